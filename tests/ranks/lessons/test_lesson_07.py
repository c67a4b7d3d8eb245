"""The lesson on errors: its script under torchrun, its What-ifs, and its claims that no cell shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lesson import Lesson

from ddplab import Run, explain, launch

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The notebook, of which functions are defined."""
    lesson = Lesson(cells, "07_errors")
    lesson.define_all()
    lesson.define("SECOND = ")
    return lesson


def quiet(fn: Any, world_size: int = 2, backend: str | None = "gloo") -> Run:
    """A run that may fail."""
    return launch(fn, world_size=world_size, backend=backend, view="quiet", allow_failure=True)


def elastic(lesson: Lesson, folder: Path, *changes: tuple[str, str], max_restarts: int) -> Any:
    """The script, changed, under torchrun with restarts; what it printed, and its exit code."""
    lesson.define("script = ")
    script = lesson.define("script += ")["script"]
    for old, new in changes:
        assert script.count(old) == 1
        script = script.replace(old, new)
    (folder / "train.py").write_text(script)
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={max_restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py"]
    return subprocess.run(command, cwd=folder, env=os.environ | OWN_STORE, capture_output=True, text=True, timeout=120)


def test_two_failures_are_one_too_many_for_one_restart(lesson: Lesson, tmp_path: Path) -> None:
    """Steps 0 and 1 are made once, step 2 never, and torchrun gives up."""
    done = elastic(lesson, tmp_path, ("(rank, step, attempt) == (1, 2, 0)", "(rank, step) == (1, 2)"), max_restarts=1)
    assert done.stdout.splitlines() == [f"attempt 0: step {step} is saved" for step in (0, 1)]
    assert done.returncode == 1


def test_without_record_the_report_of_torchrun_has_no_traceback(lesson: Lesson, tmp_path: Path) -> None:
    """With it, the report ends in the class and its text; the rank's own traceback stands above either."""
    for record, told in (("@record ", True), ("# without record ", False)):
        done = elastic(lesson, tmp_path, ("@record ", record), max_restarts=0)
        report = done.stderr[done.stderr.index("Root Cause (first observed failure)") :]
        assert ("ValueError: image 17 has 4 channels" in report) is told
        assert ("<N/A>" in report) is not told
        assert explain(done.stderr).sentence.endswith("ValueError: image 17 has 4 channels")


def test_a_rank_that_returns_early_is_named_by_the_report_alone(lesson: Lesson) -> None:
    """The other three fail for their lost peer, and none of them is an echo of an exception."""
    raising = '            raise ValueError("image 17 has 4 channels")\n        dist'
    run = quiet(lesson.define("def train", (raising, "            return\n        dist"))["train"], 4)
    assert sorted(failure.rank for failure in run.failures) == [0, 1, 3]
    assert "rank 2 made 1 collective call and returned" in run.report()


def test_a_broken_group_stays_broken(lesson: Lesson) -> None:
    """Rank 1 comes a second too late: its calls fail, and so do both of rank 0."""
    late = ("if dist.get_rank() == 0:\n                ", "time.sleep(2 * dist.get_rank())\n            ")
    run = quiet(lesson.define("def goes_on", late)["goes_on"], backend=None)
    assert run.results == [["RuntimeError", "RuntimeError"]] * 2


def test_with_max_a_rank_cannot_stop_the_others(lesson: Lesson) -> None:
    """All go on with the step, also the one that is not well."""
    step = lesson.define("def step_or_skip", ("ReduceOp.MIN", "ReduceOp.MAX"))["step_or_skip"]
    assert quiet(lambda: step(1), 4).results == ["step"] * 4
