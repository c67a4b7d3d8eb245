"""What is shown of ranks while they run, as a pure function of what they told; and how a terminal shows it."""

from __future__ import annotations

import io
import math
import re

import pytest
from recorded import raised, run_of, waiting

from ddplab import events as ev
from ddplab import view as views
from ddplab.board import MAX_LINES, MAX_POINTS, Board, Row, to_lines
from ddplab.panel import to_html


def shown(*events: ev.Event, now_s: float = 5.9) -> Row:
    """The row of rank 0 after ``events``."""
    board = Board(1)
    board.add(events)
    return board.rows(now_s)[0]


def losses(*values: float) -> list[ev.Event]:
    """What a rank tells that logs these losses."""
    return [ev.Metric(0, 1.0, step, "loss", value) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("events", "state", "seconds"),
    [
        ([], "starting", 5),
        ([ev.Started(0, 0.1, 42)], "starting", 5),
        ([ev.Began(0, 0.2)], "running", 5),
        (waiting(0, 3.0, "timeout")[:2], "waits in all_reduce", 5),
        ([ev.Waits(0, 1.0, "waits in recv"), waiting(0, 3.0, "timeout")[1]], "waits in recv", 5),
        ([ev.Began(0, 0.2), ev.Waits(0, 1.0, "in backward")], "in backward", 5),
        ([ev.Began(0, 0.2), ev.Waits(0, 1.0, "in backward"), ev.Waits(0, 1.5, "")], "running", 5),
        ([ev.Waits(0, 1.0, "waits in init_process_group"), ev.Began(0, 1.1)], "running", 5),
        (waiting(0, 3.0, "timeout"), "stopped", 3),
        ([ev.Began(0, 0.2), ev.Result(0, 2.5, 1), ev.Exited(0, 4.0, 0)], "returned", 2),
        ([ev.Began(0, 0.2), raised(0, 1.5), ev.Exited(0, 4.0, 1)], "failed", 1),
        ([ev.Began(0, 0.2), ev.Exited(0, 1.5, -9)], "failed", 1),
        ([ev.Stopped(0, 3.0, "failure"), raised(0, 3.1), ev.Exited(0, 3.2, -9)], "stopped", 3),
    ],
)
def test_a_row_tells_the_state_and_the_time_until_the_end(events, state, seconds):
    """The first thing that ends a rank counts, and stops its clock."""
    row = shown(*events)
    assert (row.state, row.seconds) == (state, seconds)


@pytest.mark.parametrize(
    ("done", "total", "told"),
    [(3, 4, (0.75, "3 of 4")), (7, None, (None, "7")), (0, 0, (None, "0")), (5, 4, (1, "5 of 4"))],
)
def test_progress_is_a_share_where_the_total_is_known(done, total, told):
    """Without a total there is a count and no bar."""
    row = shown(ev.Progress(0, 0.5, "epochs", 1, 9), ev.Progress(0, 1.0, "steps", done, total))
    assert (row.done, row.progress) == told


def test_the_metric_with_the_most_values_is_shown_with_its_latest():
    """One that comes now and then does not take its place."""
    row = shown(*losses(2.0, 1.0), ev.Metric(0, 2.0, 1, "accuracy", 0.5))
    assert (row.metric, row.value, row.trend) == ("loss", "1.000", (2.0, 1.0, 1.0))
    assert [shown(*losses(value)).value for value in (0.123456, 1234, 1e9, math.nan)] == [
        "0.1235",
        "1234",
        "1.000e+09",
        "nan",
    ]


def test_a_trend_has_a_bound_and_spans_the_whole_run():
    """Of a long series values at equal distances are kept, and the latest."""
    trend = shown(*losses(*range(10_000))).trend
    assert MAX_POINTS / 2 <= len(trend) <= MAX_POINTS + 1
    assert trend[0] == 0 and trend[-1] == 9999
    steps = {second - first for first, second in zip(trend, trend[1:-1], strict=False)}
    assert len(steps) == 1


def test_output_has_a_bound_and_one_line_is_shown():
    """The latest lines of a rank are kept; the last is shown without what would disturb a row."""
    board = Board(2)
    board.add(ev.Line(1, 0.1, "stdout", f"\x1b[31mline\t{number}\x1b[0m") for number in range(1000))
    assert board.rows(1.0)[1].line == "line 999"
    assert [len(board.output(rank)) for rank in range(2)] == [0, MAX_LINES]


def test_rows_as_lines_are_aligned_and_as_many_as_fit():
    """Columns are as wide as what is in them; ranks that do not fit are counted."""
    board = Board(12)
    board.add([ev.Began(3, 0.1), ev.Line(3, 0.2, "stdout", "hello"), ev.Progress(3, 0.3, "steps", 10, 20)])
    assert to_lines(board.rows(700.0), 5) == [
        "rank  0 ○ starting  11 min",
        "rank  1 ○ starting  11 min",
        "rank  2 ○ starting  11 min",
        "rank  3 ● running   11 min  10 of 20  hello",
        "... and 8 more ranks",
    ]


def test_html_is_escaped_and_odd_values_are_drawn():
    """No text of a rank becomes markup, and a series without finite values has no line."""
    board = Board(1)
    board.add([ev.Line(0, 0.1, "stdout", "<script>"), *losses(math.inf, math.nan, 1.0, 1.0, 2.0, -1e308, 1e308)])
    page = to_html(board.rows(1.0))
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert not re.search(r"points='[^']*(nan|inf)", page) and "points='" in page
    assert "polyline" not in to_html([shown(*losses(math.nan, math.nan))])


class Terminal(io.StringIO):
    """A terminal that knows the movements used here: up by lines, and clear to the end."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What stands on it."""
        lines = [""]
        for part in re.split(r"(\x1b\[\d+F\x1b\[J|\n)", re.sub(r"\x1b\[\?7[lh]", "", self.getvalue())):
            if part == "\n":
                lines.append("")
            elif part.startswith("\x1b"):
                lines = [*lines[: -1 - int(re.findall(r"\d+", part)[0])], ""]
            else:
                lines[-1] += part
        return lines[:-1]


def open_terminal(monkeypatch):
    """A terminal in the place of stdout (a fixture would be undone by pytest), and a clock that must be moved."""
    terminal, clock = Terminal(), [100.0]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(views.time, "monotonic", lambda: clock[0])
    terminal.sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    return terminal


def test_a_terminal_shows_lines_above_rows(monkeypatch):
    """Lines stay, in their order; below them the rows are redrawn; at the end only lines are there."""
    terminal = open_terminal(monkeypatch)
    run = run_of(world_size=1)
    view = views.choose("auto", run.spec)
    view.show([ev.Began(0, 0.1), ev.Line(0, 0.2, "stdout", "one")])
    assert terminal.screen() == ["rank 0 | one"]
    terminal.sleep(0.5)
    view.show([ev.Line(0, 0.6, "stdout", "two")])
    assert terminal.screen() == ["rank 0 | one", "rank 0 | two", "rank 0 ● running  0 s  two"]
    terminal.sleep(0.05)
    view.show([ev.Line(0, 0.7, "stderr", "three"), ev.Result(0, 0.7, None)])
    assert len(terminal.screen()) == 3  # too soon
    terminal.sleep(0.05)
    view.show([])
    assert terminal.screen()[2:] == ["rank 0 ! three", "rank 0 ✓ returned  0 s  three"]
    written = terminal.getvalue()
    terminal.sleep(0.2)
    view.show([])
    assert terminal.getvalue() == written  # nothing new
    view.show([ev.Line(0, 0.9, "stdout", "four")])
    view.close()
    view.finish(run)
    assert terminal.screen() == ["rank 0 | one", "rank 0 | two", "rank 0 ! three", "rank 0 | four"]


def test_two_launches_at_a_time_share_a_terminal(monkeypatch):
    """The first has the rows, the lines of both stand above them, and none is lost when either ends."""
    terminal = open_terminal(monkeypatch)
    first, second = (views.choose("auto", run_of(world_size=1).spec) for _ in range(2))
    first.show([ev.Began(0, 0.1), ev.Line(0, 0.2, "stdout", "one")])
    second.show([ev.Began(0, 0.1), ev.Line(0, 0.2, "stdout", "of the other")])
    terminal.sleep(0.5)
    first.show([])
    assert terminal.screen() == ["rank 0 | one", "rank 0 | of the other", "rank 0 ● running  0 s  one"]
    second.show([ev.Line(0, 0.6, "stdout", "more")])
    first.close()
    second.show([ev.Line(0, 0.7, "stdout", "last")])
    second.close()
    lines = ["one", "of the other", "more", "last"]
    assert terminal.screen() == [f"rank 0 | {line}" for line in lines]


def test_a_short_run_shows_no_rows(monkeypatch):
    """A function that returns at once shows only what it printed."""
    terminal = open_terminal(monkeypatch)
    run = run_of(world_size=1)
    view = views.choose("auto", run.spec)
    view.show([ev.Began(0, 0.1), ev.Line(0, 0.2, "stdout", "one")])
    terminal.sleep(0.2)
    view.show([ev.Result(0, 0.2, None)])
    view.close()
    assert terminal.getvalue() == "rank 0 | one\n"


@pytest.mark.parametrize(("view", "term"), [("auto", "dumb"), ("static", "xterm"), ("quiet", "xterm")])
def test_nothing_is_redrawn_where_it_is_not_wanted(monkeypatch, view, term):
    """Not on a terminal that cannot, not with view="static", not with view="quiet"."""
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("TERM", term)
    run = run_of(ev.Line(0, 0.2, "stdout", "one"), world_size=1)
    chosen = views.choose(view, run.spec)
    chosen.show([ev.Began(0, 0.1), *run.events])
    terminal.sleep(9)
    chosen.show([])
    chosen.close()
    chosen.finish(run)
    assert terminal.getvalue() == ("" if view == "quiet" else "rank 0 | one\n")
