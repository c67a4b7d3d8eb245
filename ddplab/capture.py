"""What ranks write to descriptors 1 and 2: any bytes in, bounded lines out."""

from __future__ import annotations

import codecs
import contextlib
import re
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from ddplab import leftovers
from ddplab.events import Event, Line, Metric, Omitted, Progress, Span, Waits

__all__ = ["LineBuffer", "OutputFile", "Transcript", "is_noise"]

MAX_LINE = 4_000
MAX_LINES = 2_000
MAX_POINTS = 10_000
MAX_FILE_BYTES = 100_000_000


# What torch.profiler (kineto) writes to stderr each time it is used: when it begins, ends, and finds no GPU.
_NOISE = re.compile(
    r"\w+:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ (SyncActivityProfilerHandler\.cpp:\d+\] profiler_(start|stop)"
    r"|DeviceProperties\.cpp:\d+\] gpuGetDeviceCount failed with code (35|100))"
)


def is_noise(line: str) -> bool:
    """Whether torch.profiler wrote this line, which tells the learner nothing.

    >>> is_noise("USDT:2026-11-30 12:34:47 25012:25012 SyncActivityProfilerHandler.cpp:39] profiler_start")
    True
    """
    return bool(_NOISE.fullmatch(line))


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
    """The events of a run in the order of their arrival, with a bound on what a rank can tell without end.

    Of a stream with more than ``MAX_LINES`` lines the first half and the last half are kept, and an
    ``Omitted`` event says how many were between them. All lines of all streams are then in ``file``.
    Of a metric with more than ``MAX_POINTS`` values every second is kept, then every fourth, and so on; of the
    spans of a rank the latest ``MAX_POINTS``; of its progress the latest.
    """

    def __init__(self) -> None:
        self.file: OutputFile | None = None
        self._events: list[tuple[int, Event]] = []
        self._num_lines: dict[tuple[int, str], int] = {}
        self._last: dict[tuple[int, str], deque[tuple[int, Line]]] = {}
        self._series: dict[tuple[int, str], Series] = {}
        self._spans: dict[int, deque[tuple[int, Event]]] = {}
        self._progress: dict[tuple[int, str], tuple[int, Event]] = {}
        self._arrived = 0
        self._file_before: list[Line] = []  # what the file must begin with, should there be one

    def add(self, events: Iterable[Event]) -> None:
        """Keep ``events``."""
        lines = []
        for event in events:
            self._arrived += 1
            if isinstance(event, Line):
                self._add_line(event)
                lines.append(event)
            elif isinstance(event, Metric):
                self._series.setdefault((event.rank, event.name), Series()).add(self._arrived, event)
            elif isinstance(event, Span):
                self._spans.setdefault(event.rank, deque(maxlen=MAX_POINTS)).append((self._arrived, event))
            elif isinstance(event, Progress):
                self._progress[event.rank, event.name] = (self._arrived, event)
            elif not isinstance(event, Waits):  # which is of the moment
                self._events.append((self._arrived, event))
        self._file_before += lines if not self.file else ()
        if not self.file and any(number > MAX_LINES for number in self._num_lines.values()):
            self.file, lines, self._file_before = OutputFile(), self._file_before, []
        if self.file:
            self.file.write(lines)

    def _add_line(self, line: Line) -> None:
        stream = line.rank, line.stream
        seen = self._num_lines[stream] = self._num_lines.get(stream, 0) + 1
        if seen <= MAX_LINES // 2:
            self._events.append((self._arrived, line))
        else:
            self._last.setdefault(stream, deque(maxlen=MAX_LINES // 2)).append((self._arrived, line))

    def events(self) -> tuple[Event, ...]:
        """All that was kept."""
        kept = [*self._events, *self._progress.values()]
        for more in (*(one.kept for one in self._series.values()), *self._spans.values()):
            kept += more
        for (rank, stream), last in self._last.items():
            first_arrived, first = last[0]
            if omitted := self._num_lines[rank, stream] - MAX_LINES // 2 - len(last):
                kept.append((first_arrived - 1, Omitted(rank, first.time_s, stream, omitted)))
            kept += last
        return tuple(event for _, event in sorted(kept, key=lambda pair: pair[0]))


class Series:
    """The values of one metric: all, or of a long series those at equal distances."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Event]] = []
        self._every = 1
        self._seen = 0

    def add(self, arrived: int, event: Event) -> None:
        """Keep the event, if its turn has come."""
        if self._seen % self._every == 0:
            self.kept.append((arrived, event))
            if len(self.kept) > MAX_POINTS:
                del self.kept[1::2]
                self._every *= 2
        self._seen += 1


class OutputFile:
    """All lines of a run, as they came, in a temporary file that only this user can read; at most 100 MB.

    ``path`` is None if there is no room for one.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._left_bytes = MAX_FILE_BYTES
        self._left_out = 0
        with contextlib.suppress(OSError):
            prefix = f"{leftovers.OUTPUT_PREFIX}{leftovers.mark()}-"
            self._file = tempfile.NamedTemporaryFile("wb", prefix=prefix, suffix=".txt", delete=False)
            self.path = Path(self._file.name)

    def write(self, lines: Iterable[Line]) -> None:
        """Add ``lines``, those of stderr behind an exclamation mark."""
        texts = [f"rank {line.rank} {'!' if line.stream == 'stderr' else '|'} {line.text}\n" for line in lines]
        data = "".join(texts).encode(errors="backslashreplace")
        if len(data) > self._left_bytes:
            self._left_out, self._left_bytes = self._left_out + len(texts), 0
        else:
            self._left_bytes -= len(data)
            self._put(data)

    def finish(self) -> None:
        """Close the file; say in it what it lacks."""
        if self._left_out:
            self._put(f"... {self._left_out} lines left out: this file is full ...\n".encode())
        self._put(b"", last=True)

    def _put(self, data: bytes, last: bool = False) -> None:
        """Write, or give the file up when the disk is full: the run goes on without it."""
        if not self.path:
            return
        try:
            self._file.write(data)
            if last:
                self._file.close()
        except OSError:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.path = None
