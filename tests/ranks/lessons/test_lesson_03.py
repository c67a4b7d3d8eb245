"""The lesson on DDP: its script under torchrun, its What-ifs, and its claims that no cell shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lesson import THREADS, Lesson, alone, torchrun

from ddplab import launch

LOSS = "    loss = model(x).sum()\n"


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The notebook, of which functions and the model are defined."""
    lesson = Lesson(cells, "03_ddp")
    lesson.define_all()
    return lesson


def results(fn: Any, *args: Any, world_size: int) -> list[Any]:
    """What each rank returns."""
    return launch(fn, *args, world_size=world_size, backend="gloo", threads=1, view="quiet").results


def test_the_script_prints_the_mean_under_torchrun(lesson: Lesson, tmp_path: Path) -> None:
    """Once, by rank 0, and all processes end well; the notebook has two ranks, here are three."""
    file = tmp_path / "train.py"
    file.write_text(lesson.script())
    assert torchrun(file, world_size=3) == ["the averaged gradient is 1.0"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
@pytest.mark.parametrize("without", ["import torch.distributed.nn ", "del model ", "nothing"])
def test_the_script_lets_go_of_the_group(lesson: Lesson, tmp_path: Path, without: str) -> None:
    """No thread of the group is left at the end; without either of two lines there would be some."""
    lines = (lesson.script() + THREADS).splitlines()
    (file := tmp_path / "train.py").write_text("\n".join(line for line in lines if not line.startswith(without)))
    assert ("gloo" in alone(file)[-1]) == (without != "nothing")


@pytest.mark.parametrize(
    ("new", "world_size", "gradients"),
    [
        (LOSS, 3, [1.0] * 3),
        (LOSS, 1, [0.0]),
        ("    loss = model(x).sum() * dist.get_world_size()\n", 4, [6.0] * 4),
        ("    loss = model.module(x).sum()\n", 4, [0.0, 1.0, 2.0, 3.0]),
        (f"    if dist.get_rank() == 0: x += 8\n{LOSS}", 4, [3.5] * 4),
    ],
)
def test_the_answers_on_one_gradient_hold(lesson: Lesson, new: str, world_size: int, gradients: list[float]) -> None:
    """What becomes of 0, 1, 2, 3 after each change."""
    assert results(lesson.define("def yours", (LOSS, new))["yours"], world_size=world_size) == gradients


def test_summed_losses_take_a_step_that_is_divided_by_the_world_size(lesson: Lesson) -> None:
    """Four ranks are far from one; with four times the learning rate they would be near."""
    train = "F.cross_entropy(model(x[mine].to(device())), y[mine].to(device()))"
    summed = (train, f"{train[:-1]}, reduction='sum')")
    weights = {}
    for name, world_size, lr in (("one", 1, "0.02 / 32"), ("four", 4, "0.02 / 32"), ("cured", 4, "4 * 0.02 / 32")):
        steps = lesson.define("def steps", summed, ("lr=0.02", f"lr={lr}"))["steps"]
        weights[name] = results(steps, 3, world_size=world_size)[0][-1]
    assert (weights["four"] - weights["one"]).abs().max() > 1e-3
    assert (weights["cured"] - weights["one"]).abs().max() < 1e-5


def test_two_ranks_with_twice_the_images_make_as_many_steps(lesson: Lesson) -> None:
    """The same global batch: 63 steps an epoch."""
    train = lesson.define("def train")["train"]
    for world_size, per_rank_batch_size in ((4, 8), (2, 16)):
        run = launch(train, 1, per_rank_batch_size, world_size=world_size, threads=1, view="quiet")
        assert len([row for row in run.metrics if row.rank == 0]) == 63
