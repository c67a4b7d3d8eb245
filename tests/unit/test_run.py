"""A run as a value: output, metrics, saving, and how it shows."""

import dataclasses
from pathlib import Path

import pytest
from recorded import raised, run_of, waiting

from ddplab import Run, events
from ddplab.events import Call, Line, Metric, Omitted, Result, Started


def test_output_is_grouped_by_rank_whatever_the_order_of_arrival() -> None:
    """Two runs whose ranks printed the same have the same text."""
    lines = [Line(1, 0.1, "stdout", "b"), Line(0, 0.2, "stderr", "w"), Line(0, 0.3, "stdout", "a")]
    text = "rank 0 | a\nrank 0 ! w\nrank 1 | b"
    assert run_of(*lines).output() == run_of(*lines[::-1]).output() == text


def test_output_of_one_rank_is_what_it_printed() -> None:
    """Asked for one rank or stream, the lines come without a label."""
    run = run_of(Line(0, 0.1, "stdout", "a"), Line(0, 0.1, "stderr", "w"), Omitted(0, 0.2, "stdout", 7))
    assert run.output(0, "stdout") == "a\n... 7 lines left out ..."
    assert run.output(0, "stderr") == "w"


def test_metrics_come_by_rank_and_time() -> None:
    """Rows of ``log()`` are sorted however they arrived."""
    run = run_of(Metric(1, 0.1, 0, "loss", 2.0), Metric(0, 0.3, 1, "loss", 1.0), Metric(0, 0.2, 0, "loss", 3.0))
    assert [(row.rank, row.step, row.value) for row in run.metrics] == [(0, 0, 3.0), (0, 1, 1.0), (1, 0, 2.0)]


def test_a_run_is_frozen() -> None:
    """Nobody can change what was recorded."""
    run = run_of(Result(0, 0.1, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.elapsed_s = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        run.returned[0] = 2  # type: ignore[index]


def test_repr_and_table_hold_no_seconds() -> None:
    """What nbval compares is the same in every run."""
    run = run_of(Started(0, 0.123, 4711), Result(0, 0.456, "<x>"), raised(1, 0.789))
    shown = repr(run) + run._repr_html_()
    assert "&lt;x&gt;" in shown
    assert not any(text in shown for text in ("0.123", "0.456", "0.789", "4711", "1.5"))


@pytest.mark.parametrize("value", [None, 1, 1.5, "é\n", [1, (2, 3)], {"a": [1], 2: (3,)}, float("inf")])
def test_a_saved_value_comes_back(tmp_path: Path, value: object) -> None:
    """JSON's own values, and tuples and dictionaries of them, survive saving."""
    run_of(Result(0, 0.1, value), world_size=1).save(tmp_path / "run.jsonl")
    assert Run.load(tmp_path / "run.jsonl").results == [value]


def test_what_json_cannot_hold_is_kept_as_text(tmp_path: Path) -> None:
    """A set is no JSON: its text stays, and shows as it was."""
    run_of(Result(0, 0.1, {3}), world_size=1).save(tmp_path / "run.jsonl")
    assert repr(Run.load(tmp_path / "run.jsonl").results) == "[{3}]"


def test_a_saved_run_tells_the_same(tmp_path: Path) -> None:
    """Every event but a value that is no JSON comes back equal, and with it all that is derived."""
    scalar = Call(0, 0.2, "all_reduce", 1, "", (), "float32", "SUM", None, None, 0.3)
    told = (
        Started(0, 0.1, 1),
        Line(0, 0.2, "stdout", "x"),
        scalar,
        dataclasses.replace(scalar, shape=None),
        raised(0, 0.3),
    )
    run = run_of(*told, *waiting(1, 0.4, "failure"))
    run.save(tmp_path / "run.jsonl")
    assert Run.load(tmp_path / "run.jsonl") == run


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"ddplab_run": 2}', "not json"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file."""
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="other.jsonl is not a run"):
        Run.load(path)


def test_messages_are_put_together_from_any_chunks() -> None:
    """A socket may cut anywhere."""
    decoder = events.Decoder()
    data = b"".join(events.encode(Result(0, 0.0, n)) for n in range(3))
    found = [message.value for index in range(len(data)) for message in decoder.feed(data[index : index + 1])]
    assert found == [0, 1, 2]
