"""An event, seen now: prefixed lines in a terminal, live text in a notebook, still text elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from ddplab.events import Event, Line, Omitted
from ddplab.run import Run, Spec, prefixed

__all__ = ["View", "choose", "still_text"]

VIEWS = ("auto", "live", "static", "quiet")
REDRAW_S = 0.1
LIVE_LINES = 30
STILL_LINES = 100
STILL_WIDTH = 400


class View:
    """Shows nothing; the others show more."""

    def __init__(self, spec: Spec) -> None:
        self._world_size = spec.world_size

    def show(self, events: Iterable[Event]) -> None:
        """Take in events as they come; called about ten times a second even when there are none."""

    def finish(self, run: Run) -> None:
        """The run has ended."""


class Terminal(View):
    """Each line as it comes, behind the rank that wrote it."""

    def show(self, events: Iterable[Event]) -> None:
        lines = [prefixed(event, self._world_size) for event in events if isinstance(event, Line)]
        if lines:
            _print("\n".join(lines))


class Still(View):
    """All lines at the end, by rank: the same text each time the ranks print the same."""

    def finish(self, run: Run) -> None:
        if text := still_text(run):
            _print(text)


class Notebook(View):
    """Under the cell: the latest lines while the ranks run (``live``), then all, by rank."""

    def __init__(self, spec: Spec, live: bool) -> None:
        super().__init__(spec)
        self._live = live
        self._latest: deque[str] = deque(maxlen=LIVE_LINES)
        self._handle: Any = None
        self._is_stale = False
        self._drawn_s = 0.0

    def show(self, events: Iterable[Event]) -> None:
        if not self._live:
            return
        lines = [prefixed(event, self._world_size) for event in events if isinstance(event, Line)]
        self._latest += lines
        self._is_stale |= bool(lines)
        if self._is_stale and time.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw("\n".join(line[:STILL_WIDTH] for line in self._latest))

    def finish(self, run: Run) -> None:
        if text := still_text(run):
            self._draw(text)

    def _draw(self, text: str) -> None:
        from IPython.display import display

        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        self._is_stale, self._drawn_s = False, time.monotonic()


def _print(text: str) -> None:
    """Print what a rank wrote, also to a terminal that lacks some of its characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def still_text(run: Run) -> str:
    """What the ranks printed, by rank, short enough for a page: of long output, the beginning and the end."""
    parts: list[str] = []
    for (rank, stream), group in groupby(run.lines(), key=lambda line: (line.rank, line.stream)):
        lines = list(group)
        half = STILL_LINES // 2
        if len(lines) > STILL_LINES:
            left_out = sum(line.num_lines if isinstance(line, Omitted) else 1 for line in lines[half:-half])
            lines[half:-half] = [Omitted(rank, 0.0, stream, left_out)]
        parts += [_clipped(prefixed(line, run.world_size)) for line in lines]
    notes = [*run.findings] if run.ok else []
    notes += ["all that the ranks printed is in the file run.output_file"] if run.output_file else []
    if run.receipt and run.receipt.ended:
        notes.append("processes that outlived their rank were ended; run.receipt names them")
    return "\n".join([*parts, *(f"note: {text}" for text in notes)])


def _clipped(line: str) -> str:
    if len(line) <= STILL_WIDTH:
        return line
    return f"{line[:STILL_WIDTH]} ... {len(line) - STILL_WIDTH} more characters"


def choose(asked: str, spec: Spec) -> View:
    """The view for ``asked`` in this process. Raises ``ValueError``.

    Under nbval, which compares the first thing that a cell shows, "auto" draws once, at the end.
    """
    if asked not in VIEWS:
        raise ValueError(f'view={asked!r} is not one of "auto", "live", "static", "quiet"')
    if asked == "quiet":
        return View(spec)
    under_test = "PYTEST_CURRENT_TEST" in os.environ
    if _in_notebook():
        return Notebook(spec, live=asked == "live" or (asked == "auto" and not under_test))
    return Still(spec) if asked == "static" else Terminal(spec)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
