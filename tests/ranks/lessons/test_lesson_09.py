"""The lesson on RPC: its script under torchrun, its What-ifs, and what its tables claim without a cell that shows it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch.distributed.rpc as rpc
from lesson import NOTEBOOKS, Lesson, torchrun

from ddplab import launch

SHOWN = [cell for cell in nbformat.read(NOTEBOOKS / "09_rpc.ipynb", as_version=4).cells if cell.cell_type == "code"]


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """All functions and classes of the notebook are defined."""
    lesson = Lesson(cells, "09_rpc")
    lesson.define_all()
    return lesson


def run(fn: Any, *args: Any, **options: Any) -> Any:
    """A run without a process group, failed or not."""
    options = {"backend": None, "timeout_s": 20, "allow_failure": True, "view": "quiet", **options}
    return launch(fn, *args, **options)


# Under torchrun ---------------------------------------------------------------------------------------


def test_the_script_of_the_lesson_trains(lesson: Lesson, tmp_path: Path) -> None:
    """It prints what the notebook shows of two workers; a third one, which is asked nothing, only shuts down."""
    file = tmp_path / "across.py"
    file.write_text(lesson.script())
    (shown,) = [cell for cell in SHOWN if cell.source.startswith("import subprocess")]
    assert torchrun(file, world_size=3) == ["w is [1.0, 1.0, 1.0]"] == shown.outputs[0].text.split("\n")[:1]


# What if ----------------------------------------------------------------------------------------------


def yours(lesson: Lesson, *changes: tuple[str, str], **options: Any) -> Any:
    """The run of the learner's cell with these changes."""
    return run(lesson.define("def yours", *changes)["yours"], **options)


def test_a_worker_may_ask_itself(lesson: Lesson) -> None:
    """Then it is the owner."""
    assert yours(lesson, ('"worker1"', '"worker0"')).results == [[("worker0", 1), ("worker0", 2)], None]


@pytest.mark.parametrize(
    ("old", "new", "world_size", "said"),
    [
        ("Counter)", "Counter())", 2, "'Counter' object is not callable"),
        ("rpc_sync().", "", 2, "has no attribute 'add'"),
        ("rpc_sync", "rpc_sync", 1, "could not find destination name worker1"),
        ("    rpc.shutdown()", "    if rank == 1:\n        return\n    rpc.shutdown()", 2, "eof"),
    ],
)
def test_it_fails_on_rank_0(lesson: Lesson, old: str, new: str, world_size: int, said: str) -> None:
    """An object in place of its class, a method of the reference, a worker that is not there, one that left."""
    failed = yours(lesson, (old, new), world_size=world_size).failures
    assert said in next(failure.message for failure in failed if failure.rank == 0)


def test_a_synchronous_server_waits_for_a_trainer_that_is_not_there(lesson: Lesson) -> None:
    """All wait with it."""
    lesson.define("goal = ")
    namespace = lesson.define("class Together", ("== self.num_trainers", "== self.num_trainers + 1"))
    hung = run(namespace["serve"], namespace["Together"], 1, world_size=3, timeout_s=2)
    assert hung.verdict() == "ranks 0, 1, 2 of 3: still running after 2 s"
    assert "ranks 1, 2 wait in rpc_sync" in hung.report()


def test_a_step_after_the_context_finds_no_gradients(lesson: Lesson) -> None:
    """The context is gone."""
    change = ("                optimizer.step", "            optimizer.step")
    failed = run(lesson.define("def train_across", change)["train_across"], 1).failures
    assert "Could not find autograd context" in failed[0].message


# What the text and the table of mistakes claim ------------------------------------------------------------


def test_torch_warns_of_itself(lesson: Lesson) -> None:
    """Why the lesson filters warnings."""
    hello = lesson.define("def join", ('    warnings.filterwarnings("ignore")', "    pass"))["hello"]
    assert "This usage is deprecated since PyTorch 2.0" in run(hello).output()


def test_a_callee_that_dies_is_an_eof(lesson: Lesson) -> None:
    """The caller is told no more; the run names the rank that died."""
    said, join = (lesson.define("def said")[name] for name in ("said", "join"))

    def dies() -> None:
        if join() == 0:
            print(said(rpc.rpc_sync, "worker1", os._exit, args=(3,)))
        rpc.shutdown(graceful=False) if os.environ["RANK"] == "0" else rpc.shutdown()

    died = run(dies)
    assert "eof" in died.output(rank=0, stream="stdout")
    assert (died.failures[0].rank, died.failures[0].exitcode) == (1, 3)


class Kept:
    """What the owner keeps."""


def alive() -> int:
    """How many of them there are in this process."""
    return sum(isinstance(one, Kept) for one in gc.get_objects())


def test_the_owner_keeps_the_object_while_a_worker_refers_to_it(lesson: Lesson) -> None:
    """And drops it afterwards: shutdown waits for that."""
    join = lesson.define("def join")["join"]

    def keeps() -> tuple[int, int]:
        during = 0
        if join() == 0:
            there = rpc.remote("worker1", Kept)
            while not there.confirmed_by_owner():
                pass
            during = rpc.rpc_sync("worker1", alive)
        rpc.shutdown()
        return during, alive()

    assert run(keeps).results == [(1, 0), (0, 0)]


def test_only_two_classes_of_errors_come_as_they_are() -> None:
    """ValueError and TypeError; of the others the caller gets a RuntimeError, unless ``to_here`` asks."""

    def ask() -> dict[str, str]:
        import torch.distributed.rpc as rpc

        rank, came = int(os.environ["RANK"]), {}
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        for name in ("ValueError", "TypeError", "KeyError", "IndexError", "ZeroDivisionError") if rank == 0 else ():
            try:
                rpc.rpc_sync("worker1", exec, args=(f"raise {name}('x')",))
            except Exception as error:
                came[name] = type(error).__name__
        rpc.shutdown()
        return came

    came = launch(ask, backend=None, view="quiet").results[0]
    assert {name for name, kind in came.items() if name == kind} == {"ValueError", "TypeError"}
    assert set(came.values()) == {"ValueError", "TypeError", "RuntimeError"}
