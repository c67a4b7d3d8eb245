"""What a fault tells of itself, and how what a rank saw is compared with what it should have seen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from recorded import raised, run_of, waiting

from ddplab import catalog, faults
from ddplab import events as ev
from ddplab.faults.fault import fits, saw


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([ev.Result(0, 1.0, 3.0)], "returns 3.0"),
        ([raised(0, 1.0, "ValueError", "4 shards\nand more")], "ValueError: 4 shards"),
        ([ev.Exited(0, 1.0, -9)], "SIGKILL"),
        ([ev.Exited(0, 1.0, 3)], "exit code 3"),
        (waiting(0, 3.0, "timeout"), "hangs in all_reduce"),
        ([raised(1, 1.0), *waiting(0, 3.0, "failure")], "echo: stopped in all_reduce"),
    ],
)
def test_what_a_rank_saw_is_one_line(events: Iterable[ev.Event], seen: str) -> None:
    """A value, the first line of an exception, what ended the process, or where it hung."""
    assert saw(run_of(*events), 0) == seen


@pytest.mark.parametrize(
    ("expected", "seen", "does"),
    [
        ("ValueError: no", "ValueError: no data", True),
        ("ValueError: … shards", "ValueError: 4 shards, not 3", True),
        ("ValueError: 4", "TypeError: 4", False),
        ("hangs or echo", "echo: stopped", True),
        ("hangs in recv", "hangs in send", False),
        ("f(x)", "f(x)", True),
    ],
)
def test_what_was_seen_fits_what_was_expected(expected: str, seen: str, does: bool) -> None:
    """The beginning counts; "…" is anything; " or " is a choice; all else is taken by the letter."""
    assert fits(expected, seen) is does


def test_every_fault_has_a_cure_in_words_and_in_code() -> None:
    """Both have at most 15 lines, and say who sees what on each rank."""
    for one in faults.FAULTS.values():
        assert one.fix and one.repaired and one.did, one.name
        assert one.source.startswith(f"def {one.name.replace('-', '_')}("), one.name
        assert one.repaired_source.partition("\n")[0] == one.source.partition("\n")[0], one.name
        assert max(one.source.count("\n"), one.repaired_source.count("\n")) < 15, one.name
        world_size = one.options.get("world_size", 2)
        assert isinstance(one.sees, str) or list(one.sees) == list(range(world_size)), one.name


def test_every_fault_is_explained_by_an_entry_of_the_catalogue() -> None:
    """Its cause is the id of one, in the same category; silent entries are the causes of silent faults."""
    entries = catalog.entries()
    for one in faults.FAULTS.values():
        assert one.cause in entries, (one.name, one.cause)
        assert one.category == entries[one.cause].category, (one.name, one.cause)
        assert one.silent or not entries[one.cause].silent, (one.name, one.cause)


def test_a_name_that_is_none_is_refused_with_those_that_are_near() -> None:
    """A slip of the keyboard is recognised."""
    with pytest.raises(ValueError, match="there is no fault 'shape-lager'; shape-larger"):
        faults.run("shape-lager")


def test_where_a_fault_cannot_be_run_it_shows_what_was_recorded_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said to be recorded, and where."""
    told = {"needs": lambda: "a GPU", "recorded": "RuntimeError: no", "recorded_in": "owner/repo#1"}
    monkeypatch.setitem(faults.FAULTS, "no-gpu", replace(faults.get("peer-raises"), **told))
    said = "recorded (owner/repo#1): RuntimeError: no"
    row = faults.table(["no-gpu"])[0]["what each rank saw"]
    assert "not run: a GPU" in row
    assert said in row
    assert said in str(faults.get("no-gpu"))
    with pytest.raises(RuntimeError, match=re.escape(f"cannot be run here: a GPU\n{said}")):
        faults.run("no-gpu")
