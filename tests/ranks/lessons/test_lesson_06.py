"""The lesson on training for real: its script under torchrun, its What-ifs, and what its text claims besides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from ddplab import Run, launch

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "06_training_for_real.ipynb"
FUNCTIONS = "def images", "class LeNet", "def build", "def train_epoch", "@torch.no_grad", "def reduced", "def state_of"


class Lesson:
    """The cells of the notebook, each without the line that shows what it does."""

    def __init__(self, cells: Any) -> None:
        self._cells = cells
        self._sources = [c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
        cells.run(self._sources[0].replace("import matplotlib.pyplot as plt\n", ""))
        cells.run("ROOT = None")
        for start in FUNCTIONS:
            self.define(start)

    def define(self, start: str, *changes: tuple[str, str]) -> dict[str, Any]:
        """Run the one cell that has a line that starts so, from there, changed as the learner is asked to."""
        (source,) = [source for source in self._sources if f"\n{start}" in f"\n{source}"]
        source = source[f"\n{source}".index(f"\n{start}") :].partition("\nreference = ")[0]
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        self._cells.run(source)
        namespace: dict[str, Any] = self._cells.namespace
        return namespace

    def script(self) -> str:
        """The training as a script."""
        for start in ("imports = ", "main = "):
            self.define(start)
        return str(self.define("import inspect\n")["script"])


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The functions of the notebook."""
    return Lesson(cells)


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A run over Gloo, with one thread a rank."""
    return launch(fn, *args, backend="gloo", threads=1, view="quiet", **options)


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds."""
    saved: dict[str, Any] = torch.load(path, map_location="cpu")
    return saved


# Under torchrun ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [3])
def test_the_script_of_the_lesson_trains_and_resumes_under_torchrun(
    lesson: Lesson, tmp_path: Path, world_size: int
) -> None:
    """Asked for one epoch and then for two, it trains each once, and tests each on every image once."""
    file, checkpoint = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    file.write_text(lesson.script())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for epochs in (1, 2):
        command = [*torchrun, str(file), str(checkpoint), str(epochs)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"epoch {epochs - 1}: tested on 1000 images, saved\n"
        assert read(checkpoint)["epoch"] == epochs
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_the_script_consists_of_the_cells_of_the_lesson(lesson: Lesson) -> None:
    """Each function as it stands there, once; nothing shows pictures or launches."""
    script = lesson.script()
    for start in FUNCTIONS:
        assert f"\n{script}".count(f"\n{start}") == 1
    assert "plots" not in script
    assert "launch" not in script


# What the text claims ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_training_ends_with_equal_bits(lesson: Lesson, tmp_path: Path, world_size: int) -> None:
    """Parameters, momentum and learning rate are those of the training that was never stopped."""
    namespace, at = lesson.define("def straight"), tmp_path
    quiet(namespace["straight"], 2, at / "straight.pt", world_size=world_size)
    quiet(namespace["straight"], 1, at / "first.pt", world_size=world_size)
    quiet(namespace["resumed"], 1, at / "first.pt", at / "resumed.pt", world_size=world_size)
    first, whole, resumed = (read(at / f"{name}.pt") for name in ("first", "straight", "resumed"))
    equal = lesson.define("def equal")["equal"]
    assert equal(whole, resumed)
    assert not equal(whole, first)


@pytest.mark.parametrize("rebuild", [False, True])
def test_from_three_ranks_on_buckets_must_be_rebuilt_before_restoring(
    lesson: Lesson, tmp_path: Path, rebuild: bool
) -> None:
    """DDP orders them anew after its first step, and with them the sums. If it no longer does, the lesson must say so."""
    backward = "job[0](torch.zeros(2, 3, 32, 32)).sum().backward()\n    " if rebuild else ""
    namespace = lesson.define("def straight", ("first = restore", f"{backward}first = restore"))
    quiet(namespace["straight"], 2, tmp_path / "straight.pt", world_size=3)
    quiet(namespace["straight"], 1, tmp_path / "first.pt", world_size=3)
    quiet(namespace["resumed"], 1, tmp_path / "first.pt", tmp_path / "resumed.pt", world_size=3)
    equal = lesson.define("def equal")["equal"]
    assert equal(read(tmp_path / "straight.pt"), read(tmp_path / "resumed.pt")) is rebuild


def test_only_the_optimizer_holds_the_learning_rate_that_the_next_step_takes(lesson: Lesson) -> None:
    """A schedule that is forgotten goes wrong one epoch later: so the lesson trains two after the checkpoint."""

    def rates(lesson_build: Any, forget: bool) -> list[float]:
        _, optimizer, schedule = lesson_build()
        optimizer.step()
        schedule.step()
        saved, saved_schedule = optimizer.state_dict(), schedule.state_dict()
        _, optimizer, schedule = lesson_build()
        optimizer.load_state_dict(saved)
        if not forget:
            schedule.load_state_dict(saved_schedule)
        found = []
        for _ in range(2):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    build = lesson.define("def build")["build"]
    with_schedule, without = (quiet(rates, build, forget, world_size=1).results[0] for forget in (False, True))
    assert with_schedule[0] == without[0]
    assert with_schedule[1] != without[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_each_image_once(lesson: Lesson, world_size: int) -> None:
    """Also where ranks have unequal numbers of batches; the reduced accuracy is the same on all."""

    def count(lesson_build: Any, lesson_evaluate: Any, lesson_reduced: Any, data: Any) -> tuple[int, float]:
        total = lesson_evaluate(lesson_build()[0], data)
        _, accuracy = lesson_reduced(total)
        return int(total[1]), accuracy

    namespace = lesson.define("def images")
    data = torch.utils.data.Subset(namespace["images"](train=False), range(301))
    functions = namespace["build"], namespace["evaluate"], namespace["reduced"]
    results = quiet(count, *functions, data, world_size=world_size).results
    assert results == [(301, results[0][1])] * world_size


# What if ----------------------------------------------------------------------------------------------


def test_ddps_forward_without_gradients_and_buffers_sends_nothing(lesson: Lesson) -> None:
    """Rank 0 has one batch more than the others, and nobody waits."""
    namespace = lesson.define("@torch.no_grad", ("model.module(x", "model(x"))
    data = torch.utils.data.Subset(namespace["images"](train=False), range(301))

    def own(lesson_build: Any, lesson_evaluate: Any) -> int:
        return int(lesson_evaluate(lesson_build()[0], data)[1])

    assert quiet(own, namespace["build"], namespace["evaluate"], world_size=3).results == [101, 100, 100]


def test_a_barrier_for_rank_0_alone_fails(lesson: Lesson, tmp_path: Path) -> None:
    """No other rank enters it."""
    lesson.define("def state_of", ("    dist.barrier()", "        dist.barrier()"))
    straight = lesson.define("def straight")["straight"]
    run = quiet(straight, 1, tmp_path / "x.pt", allow_failure=True, timeout_s=15)
    assert not run.ok
    assert {failure.rank for failure in run.failures if failure.role == "root"} == {0}


def test_on_other_numbers_of_ranks_bits_are_not_equal(lesson: Lesson, tmp_path: Path) -> None:
    """The global batch is the same, and sums round otherwise."""
    namespace = lesson.define("def straight")
    quiet(namespace["straight"], 1, tmp_path / "first.pt")
    quiet(namespace["resumed"], 1, tmp_path / "first.pt", tmp_path / "2.pt", world_size=2)
    resumed = lesson.define("def straight", ("data, 16, *job", "data, 8, *job"))["resumed"]
    quiet(resumed, 1, tmp_path / "first.pt", tmp_path / "4.pt", world_size=4)
    of_two, of_four = read(tmp_path / "2.pt")["model"], read(tmp_path / "4.pt")["model"]
    assert not all(torch.equal(of_two[name], of_four[name]) for name in of_two)
    assert all(torch.allclose(of_two[name], of_four[name], atol=0.1) for name in of_two)
