"""An event, seen now: lines in a terminal, a panel in JupyterLab, text in other notebooks; at the end still text."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, ClassVar

from ddplab.board import Board, to_lines
from ddplab.events import Event, Line, Omitted
from ddplab.panel import Panel
from ddplab.run import Run, Spec, prefixed

__all__ = ["Guarded", "View", "choose", "still_text"]

VIEWS = ("auto", "live", "static", "quiet")
REDRAW_S = 0.1
SHARE = 0.02  # of the time of a processor, at most, goes into drawing: the ranks need it
CALM_S = 0.3  # a function that takes less is not shown while it runs
START_S = 1.0  # ranks that take longer to start are
LIVE_LINES = 30
STILL_LINES = 100
STILL_WIDTH = 400
_MOVES = re.compile(r"\x1b(?!\[[\d;]*m)(\[[0-?]*[ -/]*[@-~]?|.?)|[\x00-\x08\x0b-\x1a]")


class View:
    """Shows nothing; the others show more."""

    def __init__(self, spec: Spec) -> None:
        self._world_size = spec.world_size

    def start(self, stop: Callable[[], None]) -> None:
        """The job begins. ``stop`` ends it, from any thread."""

    def show(self, events: Iterable[Event]) -> None:
        """Take in events as they come; called about ten times a second even when there are none."""

    def close(self) -> None:
        """The job has ended: let go of what showed it."""

    def finish(self, run: Run) -> None:
        """The run is there: show what stays."""


class Guarded(View):
    """A view of which an error ends the showing, and not the run."""

    def __init__(self, view: View) -> None:
        self._view: View | None = view

    def start(self, stop: Callable[[], None]) -> None:
        self._try(lambda view: view.start(stop))

    def show(self, events: Iterable[Event]) -> None:
        self._try(lambda view: view.show(events))

    def close(self) -> None:
        self._try(lambda view: view.close())

    def finish(self, run: Run) -> None:
        self._try(lambda view: view.finish(run))

    def _try(self, call: Callable[[View], None]) -> None:
        view = self._view
        try:
            if view:
                call(view)
        except Exception as error:
            self._view = None
            with contextlib.suppress(Exception):
                view.close() if view else None
            with contextlib.suppress(Exception):
                print(f"ddplab: what the ranks do is not shown: {type(error).__name__}: {error}", file=sys.stderr)


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


class Live(View):
    """What is drawn anew while the ranks run: ten times a second at most, and only if something has changed."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._board = Board(spec.world_size)
        self._begun_s = time.monotonic()
        self._due_s = self._begun_s + START_S
        self._began = False

    def show(self, events: Iterable[Event]) -> None:
        self._board.add(events)
        now_s = time.monotonic()
        if self._board.began > self._began:
            self._began, self._due_s = True, min(self._due_s, now_s + CALM_S)
        if now_s >= self._due_s:
            cpu_s = time.thread_time()
            self._draw(now_s - self._begun_s)
            self._due_s = now_s + max(REDRAW_S, (time.thread_time() - cpu_s) / SHARE)

    def _draw(self, now_s: float) -> None:
        """Show the board as it is ``now_s`` seconds after the launch."""
        raise NotImplementedError


class Redrawn(Live):
    """In a terminal that can move its cursor: lines as they come, below them one redrawn line per rank.

    Of several launches at a time, in threads, the first has the block; the lines of all go above it.
    """

    _first: ClassVar[Redrawn | None] = None
    _lines: ClassVar[deque[str]] = deque()

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._block: list[str] = []

    def show(self, events: Iterable[Event]) -> None:
        Redrawn._first = Redrawn._first or self
        lines = [prefixed(event, self._world_size) for event in events if isinstance(event, Line)]
        # Colours may pass; what would move the cursor, and with it the block, may not.
        self._lines.extend(_MOVES.sub("", line) + "\x1b[0m" * ("\x1b" in line) for line in lines)
        if Redrawn._first is self:
            if self._lines and not self._block:
                self._write([])
            super().show(events)

    def close(self) -> None:
        if Redrawn._first in (None, self):
            self._write([])
            Redrawn._first = None

    def _draw(self, now_s: float) -> None:
        self._write(to_lines(self._board.rows(now_s), max(1, shutil.get_terminal_size().lines - 2)))

    def _write(self, block: list[str]) -> None:
        """Put the block in place of the last, and the lines that came since above it."""
        if block == self._block and not self._lines:
            return
        back = f"\x1b[{len(self._block)}F\x1b[J" if self._block else ""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]  # another thread may add to them
        # Without wrapping, a row that is too long for the terminal still takes one line.
        shown = ["\x1b[?7l" + "\n".join(block) + "\x1b[?7h"] if block else []
        _print(back + "".join(f"{line}\n" for line in [*lines, *shown]), end="")
        self._block = block


class Notebook(View):
    """Under the cell: the latest lines while the ranks run (``live``), then all, by rank."""

    def __init__(self, spec: Spec, live: bool) -> None:
        super().__init__(spec)
        self._live = live
        self._latest: deque[Line] = deque(maxlen=LIVE_LINES)
        self._handle: Any = None
        self._is_stale = False
        self._drawn_s = 0.0

    def show(self, events: Iterable[Event]) -> None:
        if self._live:
            self.keep(events)
            if self._is_stale and time.monotonic() - self._drawn_s >= REDRAW_S:
                self._is_stale, self._drawn_s = False, time.monotonic()
                lines = [prefixed(line, self._world_size)[:STILL_WIDTH] for line in self._latest]
                self.put({"text/plain": "\n".join(lines)})

    def keep(self, events: Iterable[Event]) -> None:
        """Take in events without showing them yet."""
        lines = [event for event in events if isinstance(event, Line)]
        self._latest += lines
        self._is_stale |= bool(lines)

    def finish(self, run: Run) -> None:
        if text := still_text(run):
            self.put({"text/plain": text})
        elif self._handle:
            self.put({})  # shows nothing, and nbval sees nothing

    def put(self, bundle: dict[str, Any]) -> None:
        """Show ``bundle``, in place of what was shown before."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class Paneled(Live):
    """In JupyterLab: the panel while the ranks run, then still text in its place."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._title = (
            f"{spec.name} on {spec.world_size} rank{'s' * (spec.world_size > 1)}, {spec.backend or 'no group'}"
        )
        self._text = Notebook(spec, live=True)
        self._panel: Panel | None = None
        self._is_shown = False

    def start(self, stop: Callable[[], None]) -> None:
        self._panel = Panel.take(self._title, self._world_size, stop)

    def show(self, events: Iterable[Event]) -> None:
        if self._panel and not self._panel.is_refused:
            self._text.keep(events)
            super().show(events)
        else:
            self._text.show(events)

    def close(self) -> None:
        if self._panel:
            self._panel.leave()

    def finish(self, run: Run) -> None:
        self._text.finish(run)

    def _draw(self, now_s: float) -> None:
        assert self._panel
        self._panel.draw(self._board, now_s)
        if not self._is_shown:
            self._text.put(self._panel.bundle() | {"text/plain": f"{self._title}: what they print follows at the end"})
            self._is_shown = True


def _print(text: str, end: str = "\n") -> None:
    """Print what a rank wrote, also to a terminal that lacks some of its characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)


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
        live = asked == "live" or (asked == "auto" and not under_test)
        return Paneled(spec) if live and not under_test and Panel.ready() else Notebook(spec, live)
    if asked == "static":
        return Still(spec)
    return Redrawn(spec) if _can_redraw() else Terminal(spec)


def _can_redraw() -> bool:
    """Whether what is printed goes to a terminal that can move its cursor."""
    try:
        return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except (AttributeError, ValueError):  # something else was put in its place, or it is closed
        return False


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
