"""What a rank can tell: a few frozen dataclasses, and how they travel through a socket.

Every event has ``rank`` and ``time_s``: seconds since the launch, on a clock that all processes of
one machine share, so that events of different ranks can be put in order.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Batch", "Began", "Call", "Decoder", "Event", "Exited", "Failed", "Line", "Located", "Made", "Metric", "Omitted",
    "Progress", "Result", "Span", "Started", "Stopped", "Trace", "Waits", "Where", "Written", "encode",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that happened in, or to, one rank."""

    rank: int
    time_s: float


@dataclass(frozen=True)
class Where:
    """A place in a rank's code.

    ``place`` is a cell or a file in the learner's words (``cell In[7]``), ``line`` counts from 1,
    ``source`` is that line's text, ``call`` the call into torch that it made, or "".
    """

    place: str
    line: int
    function: str
    source: str = ""
    call: str = ""

    def __str__(self) -> str:
        return f"{self.place}, line {self.line}"


@dataclass(frozen=True)
class Started(Event):
    """The process of the rank is up and has received its work."""

    pid: int


@dataclass(frozen=True)
class Began(Event):
    """The process group stands (if one was asked for) and the function is called now."""


@dataclass(frozen=True)
class Line(Event):
    """A line that the rank, or a process that it started, wrote; ``stream`` is "stdout" or "stderr"."""

    stream: str
    text: str


@dataclass(frozen=True)
class Written(Event):
    """Bytes of a stream, as a rank tells them that could not write into a pipe; the launcher makes lines of them."""

    stream: str
    data: bytes


@dataclass(frozen=True)
class Omitted(Event):
    """``num_lines`` lines that stood here are not kept, because the rank printed too many."""

    stream: str
    num_lines: int


@dataclass(frozen=True)
class Metric(Event):
    """A number that the rank gave to ``log()``; ``step`` may be None."""

    step: int | None
    name: str
    value: float


@dataclass(frozen=True)
class Batch(Event):
    """Many small events of this rank in a form that is quick to send: of each its class and its fields but the rank."""

    rows: tuple[tuple[Any, ...], ...]

    def events(self) -> list[Event]:
        """The events."""
        return [kind(self.rank, *fields) for kind, *fields in self.rows]


@dataclass(frozen=True)
class Span(Event):
    """A stretch of time that the rank named, from ``time_s`` to ``end_s``."""

    name: str
    end_s: float


@dataclass(frozen=True)
class Progress(Event):
    """The rank is through with ``done`` of ``total`` items; ``total`` is None if it is not known."""

    name: str
    done: int
    total: int | None


@dataclass(frozen=True)
class Made(Event):
    """The rank is about to make the temporary file or folder ``path``, through ``tempfile``."""

    path: str


@dataclass(frozen=True)
class Result(Event):
    """The function returned ``value``."""

    value: Any


@dataclass(frozen=True)
class Failed(Event):
    """The rank raised. ``during`` is "init", "function" or "result"; ``traceback`` is text."""

    type: str
    message: str
    traceback: str
    where: Where | None
    during: str = "function"


@dataclass(frozen=True)
class Call(Event):
    """A call into ``torch.distributed`` (or ``backward``, where DDP averages) that began at ``time_s``.

    ``number`` counts the collective calls that the rank made in this group, from 1; 0 for other calls.
    ``group`` names the ranks of the group, or is "" for the default one. ``shape`` and ``dtype`` are of
    the first tensor, ``op`` is the reduce operation, ``peer`` the source or destination. ``end_s`` is
    None if the call had not returned. A wait for an asynchronous call has in ``since_s`` when that began.
    Calls of ``rpc`` ask ``worker``, if it was named, to run ``function``; of ``init_rpc`` it is the rank's own name.
    """

    name: str
    number: int
    group: str
    shape: tuple[int, ...] | None
    dtype: str
    op: str
    peer: int | None
    where: Where | None
    end_s: float | None
    since_s: float | None = None
    worker: str = ""
    function: str = ""


@dataclass(frozen=True)
class Trace(Event):
    """What torch.profiler saw of the rank's first seconds, as gzipped JSON.

    ``events`` are Chrome's trace events by time: ``ts`` and ``dur`` in microseconds since the launch, ``pid`` the rank,
    ``tid`` 0 the main thread. ``buckets`` has for each DDP model the bytes of its buckets in the first step and later.
    """

    packed: bytes = field(repr=False)


@dataclass(frozen=True)
class Located(Event):
    """Where the rank was when the launcher asked. ``where`` is None if it did not answer; ``state`` then says
    what the system knows of the process.
    """

    where: Where | None
    state: str = ""


@dataclass(frozen=True)
class Waits(Event):
    """The rank is in a call for a while already; ``state`` says so, and is "" when it no longer is. Shown, not kept."""

    state: str


@dataclass(frozen=True)
class Stopped(Event):
    """The launcher ended the rank; ``reason`` is "failure", "timeout" or "interrupt"."""

    reason: str


@dataclass(frozen=True)
class Exited(Event):
    """The process of the rank is gone; ``exitcode`` is negative for a signal, and None on an engine that knows none."""

    exitcode: int | None


_LENGTH = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    """The bytes of one message: its pickle, behind eight bytes that give the pickle's length."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Puts messages together again from the chunks that a socket gives.

    >>> decoder, data = Decoder(), encode("a") + encode("b")
    >>> [decoder.feed(data[:5]), decoder.feed(data[5:])]
    [[], ['a', 'b']]
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Any]:
        """The messages that ``chunk`` completes."""
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as whole, whole[_LENGTH.size : end] as body:
                messages.append(pickle.loads(body))
            del self._buffer[:end]
        return messages
