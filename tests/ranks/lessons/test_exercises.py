"""Every task: its stub is not started, its solution is accepted, and wrong ones are told what is wrong with them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lesson import definitions
from wrong import WRONG

from ddplab import check, exercises

HERE = Path(__file__).resolve().parents[3] / "notebooks" / "exercises"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
for one in NOTEBOOKS:  # each puts its wrong solutions into WRONG
    importlib.import_module(f"wrong{one.stem[:2]}")
EVERY_NOTEBOOK = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of progress, which is this test's own."""
    monkeypatch.setenv("DDPLAB_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def checked(cells: Any, notebook: Path) -> dict[str, exercises.Checked]:
    """What each check of a notebook says, by task."""
    found = {}
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            cells.run(definitions(cell.source))
            for number, name in re.findall(r'^check\("([\d.]+)", (\w+)\)', cell.source, re.MULTILINE):
                found[number] = check(number, cells.namespace[name])
    return found


@EVERY_NOTEBOOK
def test_what_a_learner_is_given_is_not_started(cells: Any, notebook: Path) -> None:
    """Each stub raises NotImplementedError, and all tasks of the chapter are there."""
    found = checked(cells, notebook)
    assert {number: one.state for number, one in found.items()} == dict.fromkeys(found, "not started")
    assert list(found) == [number for number in exercises.TASKS if number.startswith(notebook.stem[:2])]


@EVERY_NOTEBOOK
def test_the_solutions_are_accepted(cells: Any, notebook: Path) -> None:
    """All of the chapter's, with nothing to say."""
    found = checked(cells, HERE / "solutions" / notebook.name)
    assert [str(one) for one in found.values() if not one] == []


@pytest.mark.parametrize(("number", "words", "fn"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_solution_is_told_what_is_wrong(number: str, words: str, fn: Any) -> None:
    """In the words of the field, and with no word of the launcher."""
    told = check(number, fn)
    assert told.state == "wrong" and words in told.words, told
    assert "launch" not in told.words and "Traceback" not in told.words


def test_every_task_has_three_wrong_solutions_with_words_of_their_own() -> None:
    """Different misconceptions get different sentences."""
    for number in exercises.TASKS:
        words = [one[1] for one in WRONG if one[0] == number]
        assert len(words) >= 3 and len(set(words)) == len(words), number


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda n: None, "no use can be made of what rank 0 returned, None"),
        (lambda n: 1 / 0, "with 1 rank it fails: ZeroDivisionError in "),
        (lambda a, b: [], "does not fit the arguments (7,)"),
    ],
)
def test_a_function_that_does_not_work_is_told_why(fn: Any, words: str) -> None:
    """Whatever the task is."""
    told = check("05.1", fn)
    assert told.state == "wrong" and words in told.words


def test_a_hang_ends_in_time_and_says_who_waits() -> None:
    """The check has 4 seconds for all its runs."""
    import torch.distributed as dist

    def waits(n: int) -> list[int]:
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            dist.barrier()
        while dist.get_rank():
            pass
        return list(range(n))

    told = check("05.1", waits)
    assert told.words.startswith("with 2 ranks it does not end: rank 0 waits in barrier #1; rank 1 is at ")
