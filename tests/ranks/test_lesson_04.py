"""The lesson on the inside of DDP: its script under torchrun, and what its text claims besides."""

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

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "04_ddp_under_the_hood.ipynb"
DEFINES = ("import ", "def ", "class ", "launch =")


class Lesson:
    """The functions of the notebook, changed as its "What if" asks for."""

    def __init__(self, cells: Any) -> None:
        self._cells = cells
        self._sources = [c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
        for source in self._sources:
            if source.startswith(DEFINES):
                cells.run(definitions(source))

    def change(self, start: str, *changes: tuple[str, str]) -> None:
        """Define again what the one cell that starts so defines, with each old text replaced by a new one."""
        (source,) = [source for source in self._sources if source.startswith(start)]
        source = definitions(source)
        for old, new in changes:
            assert source.count(old) == 1, f"{start} has {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        self._cells.run(source)

    def run(self, name: str, *args: Any, **options: Any) -> Run:
        """The function of that name on ranks."""
        return quiet(self._cells.namespace[name], *args, **options)

    def script(self) -> str:
        """The lesson as a script."""
        for source in self._sources:
            if source.startswith("script"):
                self._cells.run(source)
        text: str = self._cells.namespace["script"]
        return text


def definitions(source: str) -> str:
    """A cell as far as it imports or defines something."""
    lines = source.splitlines()
    others = (at for at, line in enumerate(lines) if line and not line.startswith((" ", "from ", *DEFINES)))
    return "\n".join(lines[: next(others, len(lines))])


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A run over Gloo that may fail."""
    return launch(fn, *args, backend="gloo", view="quiet", allow_failure=True, **options)


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The functions of the notebook."""
    return Lesson(cells)


# Under torchrun ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "gradient"), [(3, 1.0)])
def test_the_script_on_accumulation_runs_under_torchrun(
    lesson: Lesson, tmp_path: Path, world_size: int, gradient: float
) -> None:
    """Four micro-batches, one all-reduce, the mean over ranks."""
    file = tmp_path / "accumulate.py"
    file.write_text(lesson.script())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, str(file)], capture_output=True, text=True, timeout=120, env=env)
    # Seldom a rank of Gloo that has done all its work dies at exit: the value counts.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    assert done.stdout.splitlines() == [f"1 all-reduce of 4 bytes; the gradient is {gradient}"]


# What the text claims ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buckets_do_not_depend_on_the_world_size(lesson: Lesson, world_size: int) -> None:
    """All gradients in one bucket, then two buckets."""
    steps = lesson.run("three_steps", None, world_size=world_size).results
    assert steps == [[[1597480], [1071144, 526336], [1071144, 526336]]] * world_size


def test_without_the_debug_level_the_error_has_indices_only(lesson: Lesson) -> None:
    """With INFO the notebook shows names."""
    text = lesson.run("two_steps").results[1][1]
    assert "Parameter indices which did not receive grad for rank 1: 0 1" in text
    assert "body.weight" not in text


@pytest.mark.skipif(torch.__version__ < "2.14", reason="renamed in torch 2.14")
def test_broadcast_buffers_has_another_name_and_warns(lesson: Lesson) -> None:
    """forward_sync_buffers=False does the same, without a warning."""
    old = lesson.run("normalise", {"broadcast_buffers": False})
    new = lesson.run("normalise", {"forward_sync_buffers": False})
    assert [mean for _, mean in old.results] == [mean for _, mean in new.results] == [0.0, 3.8]
    assert "Use `forward_sync_buffers` instead" in old.output()
    assert "forward_sync_buffers" not in new.output()


def test_a_detach_less_and_the_body_learns(lesson: Lesson) -> None:
    """The cure, without any flag."""
    lesson.change("class Net", (".detach()  # left over from an experiment", ""))
    assert "body.weight" in lesson.run("train", {}).results[0]["moved"]


def test_clipping_before_averaging_gives_another_direction(lesson: Lesson) -> None:
    """(1, 0) and (0, 1) have the mean (0.5, 0.5), which is not along (1.5, 2)."""
    lesson.change("def clip", ("own = model", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    own = model"))
    assert [value["own"] for value in lesson.run("clip").results] == pytest.approx([1.0, 1.0])


def test_a_second_collective_of_a_hook_runs_in_another_thread(lesson: Lesson, cells: Any) -> None:
    """That is why PowerSGD and several buckets do not go together on Gloo."""
    cells.run("""
    import threading

    def where():
        threads, model = [], DDP(mlp())
        def hook(threads, bucket):
            def after(done):
                threads.append(threading.get_native_id())
                return done.value()[0]
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(after)
        model.register_comm_hook(threads, hook)
        for _ in range(5):
            model(torch.randn(4, 256)).sum().backward()
        return set(threads) == {threading.get_native_id()}
    """)
    assert lesson.run("where").results == [False, False]


# What if ----------------------------------------------------------------------------------------------


def test_with_find_unused_parameters_buckets_are_cut_before_the_first_step(lesson: Lesson) -> None:
    """They are never cut again."""
    lesson.change("def yours", ("bucket_cap_mb=0.01", "bucket_cap_mb=0.01, find_unused_parameters=True"))
    buckets = [40, 22528, 1050624, 524288]
    run = lesson.run("yours")
    assert run.results[0] == [*buckets, "end of step 1", *buckets, "end of step 2"]
    assert "did not find any unused parameters" in run.output()


def test_a_hook_that_does_not_divide_gives_sums(lesson: Lesson) -> None:
    """The division is the hook's work."""
    lesson.change("def recording", (".div_(dist.get_world_size())", ""))
    assert [value["gradient"] for value in lesson.run("accumulate", True).results] == [1.0, 1.0]


def test_a_hook_needs_an_argument_named_bucket(lesson: Lesson) -> None:
    """DDP looks for it by name."""
    lesson.change("def recording", ("(seen, bucket):\n    mean = bucket.", "(seen, b):\n    mean = b."))
    failure = lesson.run("accumulate", True, world_size=1).failures[0]
    assert (failure.type, failure.message) == ("KeyError", "'bucket'")


def test_no_sync_around_forward_alone_is_enough(lesson: Lesson) -> None:
    """forward() decides whether the next backward() will synchronise."""
    old = "loss = model(x).sum() / 4\n        with model.no_sync():\n            loss.backward()"
    new = "with model.no_sync():\n            loss = model(x).sum() / 4\n        loss.backward()"
    lesson.change("def around_backward_only", (old, new))
    assert lesson.run("around_backward_only").results == [{"all-reduces": 1, "gradient": 0.5}] * 2


def test_no_sync_around_the_last_micro_batch_leaves_gradients_apart(lesson: Lesson) -> None:
    """Without an error."""
    last = "    (model(x).sum() / 4).backward()  # the last one synchronises"
    lesson.change("def accumulate", (last, "    with model.no_sync():\n    " + last))
    assert [tuple(value.values()) for value in lesson.run("accumulate", True).results] == [(0, 0.0), (0, 1.0)]


def test_a_static_graph_must_not_change(lesson: Lesson) -> None:
    """What was unused in step 1 must not be used in step 2."""
    once = "model(torch.ones(1, 1), dist.get_rank()).sum().backward()"
    twice = "[model(torch.ones(1, 1), which).sum().backward() for which in (0, 1)]"
    lesson.change("class Experts", ("find_unused_parameters", "static_graph"), (once, twice))
    failure = lesson.run("experts", world_size=1).failures[0]
    assert failure.type == "RuntimeError"
    assert failure.message.startswith("Your training graph has changed in this iteration")
