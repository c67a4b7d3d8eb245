"""The file of what is solved: what is kept, what is not believed, and the CSV of a class."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ddplab import cli, exercises
from ddplab.exercises import progress


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of progress, not there yet."""
    monkeypatch.setenv("DDPLAB_PROGRESS", str(tmp_path / "ada.json"))
    return tmp_path / "ada.json"


def test_what_was_solved_stays_solved(file: Path) -> None:
    """A try that has not started counts for none."""
    for state in ("not started", "wrong", "solved", "wrong"):
        progress.note("05.1", state)
    assert progress.load() == {"05.1": {"state": "solved", "tries": 3}}
    assert [one.name for one in file.parent.iterdir()] == ["ada.json"]


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"tasks": 3}', '{"tasks": {"05.1": {"state": "best"}}}'])
def test_a_file_of_another_kind_tells_nothing(file: Path, text: str) -> None:
    """It is neither believed nor a reason to fail."""
    file.write_text(text)
    assert progress.load() == {}


def test_where_nothing_can_be_written_the_learner_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check goes on."""
    monkeypatch.setenv("DDPLAB_PROGRESS", "/no/such/folder/file.json")
    progress.note("05.1", "solved")
    assert "ddplab: the progress is not kept" in capsys.readouterr().err


def test_a_class_becomes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each learner, by file or by folder; other files are passed over."""
    solved = json.dumps({"ddplab_progress": 1, "tasks": {"05.1": {"state": "solved", "tries": 2}}})
    (tmp_path / "ada.json").write_text(solved)
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / progress.NAME).write_text(solved.replace("solved", "wrong"))
    (tmp_path / "other.json").write_text("{}")
    out = io.StringIO()
    assert progress.collect(tmp_path, ["05.1", "05.2"], out) == 2
    assert out.getvalue().splitlines() == [
        "learner,solved,tries,05.1,05.2",
        "ada,1,2,solved,",
        "bob,0,2,wrong,",
    ]
    assert cli.main(["class", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("learner,solved,tries,")
    assert cli.main(["class", str(tmp_path / "none")]) == 1


def test_the_report_has_every_task(file: Path) -> None:
    """Its picture has a constant text, its rows the states."""
    progress.note("05.1", "solved")
    report = exercises.report()
    assert repr(report) == f"1 of {len(exercises.TASKS)} tasks solved"
    assert [row["task"] for row in report.rows] == sorted(exercises.TASKS)
    assert {row["task"]: row["state"] for row in report.rows}["05.1"] == "solved"


def test_a_number_that_is_no_task_and_what_is_no_function_are_refused() -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match="there is no task '99.9'; they are "):
        exercises.check("99.9", print)
    with pytest.raises(TypeError, match=r'check\("05.1", fn\) takes your function itself, not int: 3'):
        exercises.check("05.1", 3)  # type: ignore[arg-type]
