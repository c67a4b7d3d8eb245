"""What is shown of ranks while they run: a board with one row per rank, a pure function of what they tell."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddplab import events as ev

__all__ = ["MARKS", "Board", "Row", "clock", "printable", "to_lines"]

MAX_LINES = 200  # of each rank
MAX_WIDTH = 400
MAX_POINTS = 64  # of a sparkline
STATES = {
    ev.Began: "running", ev.Result: "returned", ev.Failed: "failed", ev.Stopped: "stopped", ev.Exited: "failed"
}  # fmt: skip
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
MARKS = {"starting": "○", "running": "●", "returned": "✓", "failed": "✗", "stopped": "■"}  # others wait: ◐


@dataclass(frozen=True)
class Row:
    """What is shown of one rank. ``done`` is from 0 to 1, or None; ``seconds`` count from the launch to its end."""

    rank: int
    state: str
    seconds: int
    done: float | None = None
    progress: str = ""
    metric: str = ""
    value: str = ""
    trend: tuple[float, ...] = ()
    line: str = ""


class Board:
    """Takes in events; ``rows`` is what to show of them now.

    >>> board = Board(1)
    >>> board.add([ev.Began(0, 0.2), ev.Progress(0, 0.9, "epochs", 1, 4), ev.Metric(0, 1.0, 1, "loss", 0.5)])
    >>> to_lines(board.rows(2.4), 1)
    ['rank 0 ● running  2 s  1 of 4  loss 0.5000']
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self.began = False

    def add(self, events: Iterable[ev.Event]) -> None:
        """Take in ``events``, in the order in which they came."""
        for event in events:
            mine, kind = self._ranks[event.rank], type(event)
            if isinstance(event, ev.Metric):  # first, for there can be many
                series = mine.series.get(event.name)
                if series is None:
                    series = mine.series[event.name] = _Series()
                series.add(event.value)
            elif isinstance(event, ev.Line):
                mine.lines.append(event)
            elif isinstance(event, ev.Progress):
                mine.progress = event
            elif mine.ended_s is not None:  # what comes after the end is the noise of the end
                continue
            elif isinstance(event, ev.Waits):
                mine.waits = event.state
            elif isinstance(event, ev.Located) and event.where and event.where.call:
                mine.waits = mine.waits or f"waits in {event.where.call}"
            elif kind in STATES:
                mine.state, mine.waits = STATES[kind], ""
                mine.ended_s = None if kind is ev.Began else event.time_s
                self.began = True

    def rows(self, now_s: float) -> tuple[Row, ...]:
        """A row for each rank, ``now_s`` seconds after the launch."""
        return tuple(one.row(rank, now_s) for rank, one in enumerate(self._ranks))

    def output(self, rank: int) -> tuple[ev.Line, ...]:
        """The latest lines of a rank, ``MAX_LINES`` at most."""
        return tuple(self._ranks[rank].lines)


class _Series:
    """Values of one metric: so many, at equal distances, as a sparkline can show; and the latest."""

    __slots__ = ("every", "latest", "points", "seen")

    def __init__(self) -> None:
        self.points: list[float] = []
        self.every, self.seen, self.latest = 1, 0, 0.0

    def add(self, value: float) -> None:
        if not self.seen % self.every:
            self.points.append(value)
            if len(self.points) > MAX_POINTS:
                del self.points[1::2]
                self.every *= 2
        self.seen += 1
        self.latest = value


@dataclass
class _Rank:
    state: str = "starting"
    waits: str = ""
    ended_s: float | None = None
    progress: ev.Progress | None = None
    series: dict[str, _Series] = field(default_factory=dict)
    lines: deque[ev.Line] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def row(self, rank: int, now_s: float) -> Row:
        # Of several metrics the one with the most values: the newest of all would change its name all the time.
        name, series = max(self.series.items(), key=lambda item: item[1].seen, default=("", None))
        told = self.progress
        return Row(
            rank=rank,
            state=self.waits or self.state,
            seconds=int(now_s if self.ended_s is None else self.ended_s),
            done=min(1.0, told.done / told.total) if told and told.total else None,
            progress=f"{told.done} of {told.total}" if told and told.total else str(told.done) if told else "",
            metric=printable(name),
            value=f"{series.latest:#.4g}".rstrip(".") if series else "",
            trend=tuple(series.points) + (series.latest,) if series else (),
            line=printable(self.lines[-1].text) if self.lines else "",
        )


def printable(text: str) -> str:
    """``text`` without what colours it or moves the cursor of a terminal, short enough for a line."""
    text = text[:MAX_WIDTH]
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in _ANSI.sub("", text))


def to_lines(rows: Sequence[Row], most: int) -> list[str]:
    """The rows as aligned lines, ``most`` at most."""
    digits = len(str(len(rows) - 1))
    columns = (
        ([f"rank {row.rank:>{digits}} {MARKS.get(row.state, '◐')} {row.state}" for row in rows], "<"),
        ([clock(row.seconds) for row in rows], ">"),
        ([row.progress for row in rows], ">"),
        ([f"{row.metric} {row.value}".strip() for row in rows], "<"),
        ([row.line for row in rows], "<"),
    )
    padded = [[f"{cell:{side}{max(map(len, cells))}}" for cell in cells] for cells, side in columns if any(cells)]
    lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return lines if len(lines) <= most else [*lines[: most - 1], f"... and {len(lines) - most + 1} more ranks"]


def clock(seconds: int) -> str:
    """Seconds as text, minutes where those say enough."""
    return f"{seconds} s" if seconds < 600 else f"{seconds // 60} min"
