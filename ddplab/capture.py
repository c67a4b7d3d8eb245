"""What ranks write to descriptors 1 and 2: any bytes in, bounded lines out."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable

from ddplab.events import Event, Line, Omitted

__all__ = ["LineBuffer", "Transcript"]

MAX_LINE = 4_000
MAX_LINES = 2_000


class LineBuffer:
    """Cuts the bytes of one stream into lines of at most ``MAX_LINE`` characters.

    A carriage return starts the line again, as on a terminal: of a progress bar the last state stays.
    Bytes that are not UTF-8 are shown as escapes. Of a longer line the beginning and the end are kept.

    >>> buffer = LineBuffer()
    >>> buffer.feed("10%\\r100%\\nhal".encode()), buffer.feed(b"f \\xff\\n"), buffer.finish()
    (['100%'], ['half \\\\xff'], [])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._head = ""
        self._tail = ""
        self._cut = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes, without their ends."""
        *complete, rest = self._decoder.decode(data).split("\n")
        lines = []
        for part in complete:
            self._add(part)
            lines.append(self._take())
        self._add(rest)
        return lines

    def finish(self) -> list[str]:
        """The last line, if it was left without an end."""
        self._add(self._decoder.decode(b"", final=True))
        return [self._take()] if self._head or self._tail else []

    def _add(self, text: str) -> None:
        half = MAX_LINE // 2
        if len(self._head) < MAX_LINE:
            room = MAX_LINE - len(self._head)
            self._head, text = self._head + text[:room], text[room:]
        if text:
            self._tail += text
            extra = max(0, len(self._tail) - half)
            self._cut, self._tail = self._cut + extra, self._tail[extra:]

    def _take(self) -> str:
        text = self._head + (f" ... {self._cut} characters left out ... " if self._cut else "") + self._tail
        self._head, self._tail, self._cut = "", "", 0
        return text.rstrip("\r").rpartition("\r")[2]


class Transcript:
    """The events of a run in the order of their arrival, with a bound on the lines of each stream.

    Of a stream with more than ``MAX_LINES`` lines the first half and the last half are kept, and an
    ``Omitted`` event says how many were between them.
    """

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        self._num_lines: dict[tuple[int, str], int] = {}
        self._last: dict[tuple[int, str], deque[tuple[int, Line]]] = {}
        self._arrived = 0

    def add(self, events: Iterable[Event]) -> None:
        """Keep ``events``."""
        for event in events:
            self._arrived += 1
            if isinstance(event, Line):
                self._add_line(event)
            else:
                self._events.append((self._arrived, event))

    def _add_line(self, line: Line) -> None:
        stream = line.rank, line.stream
        seen = self._num_lines[stream] = self._num_lines.get(stream, 0) + 1
        if seen <= MAX_LINES // 2:
            self._events.append((self._arrived, line))
        else:
            self._last.setdefault(stream, deque(maxlen=MAX_LINES // 2)).append((self._arrived, line))

    def events(self) -> tuple[Event, ...]:
        """All that was kept."""
        kept = list(self._events)
        for (rank, stream), last in self._last.items():
            first_arrived, first = last[0]
            if omitted := self._num_lines[rank, stream] - MAX_LINES // 2 - len(last):
                kept.append((first_arrived - 1, Omitted(rank, first.time_s, stream, omitted)))
            kept += last
        return tuple(event for _, event in sorted(kept, key=lambda pair: pair[0]))
