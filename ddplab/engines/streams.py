"""Standard streams that an engine shares: its own words in the notebook, and those of a rank in its worker."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ddplab.processes import STREAMS

__all__ = ["MAX_WORDS", "Words", "borrow"]

MAX_WORDS = 4000  # characters of what the engine itself printed last
ENGINES = ("ray", "pyspark", "py4j")
PRINTS_FOR_OTHERS = "ray.experimental.tqdm_ray"  # puts its own function in place of print


class Words:
    """While entered, keeps the end of what an engine itself prints: its modules anywhere, and all of ``thread``."""

    def __init__(self, thread: threading.Thread) -> None:
        self.kept = ""
        self.ended = False
        self._thread = thread

    def __enter__(self) -> Words:
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._put = (_Stream(self, sys.stdout), _Stream(self, sys.stderr))
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True  # another launch may have put its own stream over this one, and put this one back
        for name, put, before in zip(("stdout", "stderr"), self._put, self._before, strict=True):
            if getattr(sys, name) is put:
                setattr(sys, name, before)

    def are(self, frame: FrameType | None) -> bool:
        """Whether it is the engine that prints from here."""
        if self.ended or threading.current_thread() is self._thread:
            return not self.ended
        while frame:
            name = str(frame.f_globals.get("__name__"))
            if name.partition(".")[0] in ENGINES and name != PRINTS_FOR_OTHERS:
                return True
            frame = frame.f_back
        return False


class _Stream:
    """A standard stream for all but the engine, whose words it keeps."""

    def __init__(self, words: Words, stream: Any) -> None:
        self._words = words
        self._stream = stream

    def write(self, text: str) -> Any:
        """Write through, or keep."""
        if not self._words.are(sys._getframe(1)):
            return self._stream.write(text)
        self._words.kept = (self._words.kept + text)[-MAX_WORDS:]
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# In the rank ------------------------------------------------------------------------------------------


def borrow(tell: Callable[[str, bytes], None]) -> Callable[[], None]:
    """Tell what this process writes to stdout and stderr, until the function that this gives is called.

    What goes through Python is told before ``print`` returns, so it is out if the process dies.
    """
    borrowed = [_Borrowed(name, number, tell) for name, number in STREAMS.items()]

    def give_back() -> None:
        with contextlib.suppress(Exception):
            ctypes.CDLL(None).fflush(None)  # what C and C++ libraries have printed
        for one in borrowed:
            one.give_back()

    return give_back


class _Borrowed(io.RawIOBase):
    """The stream ``name``. What is written to its descriptor goes into a pipe, which a thread reads."""

    def __init__(self, name: str, number: int, tell: Callable[[str, bytes], None]) -> None:
        self._name, self._number, self._tell, self._pid = name, number, tell, os.getpid()
        self._before = os.dup(number), getattr(sys, name)
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.dup2(writing, number)
        os.close(writing)
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._pump, name="ddplab-stream", daemon=True)
        self._thread.start()
        setattr(sys, name, io.TextIOWrapper(self, encoding="utf-8", errors="backslashreplace", write_through=True))

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor, for those who write to it directly."""
        return self._number

    def write(self, data: Any) -> int:
        """Tell ``data``, and before it what was written to the descriptor. A forked child writes to that."""
        if os.getpid() != self._pid:
            return os.write(self._number, data)
        with self._lock:
            self._drain()
            self._tell(self._name, bytes(data))
        return len(data)

    def _drain(self) -> bool:
        """Tell what is in the pipe; say whether there can be more."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reading, 1 << 16):
                self._tell(self._name, data)
            return False
        return True

    def _pump(self) -> None:
        poll, more = select.poll(), True
        poll.register(self._reading)
        while more:
            poll.poll()
            with self._lock:
                more = self._drain()

    def give_back(self) -> None:
        """Let the stream be as it was before."""
        descriptor, stream = self._before
        os.dup2(descriptor, self._number)
        os.close(descriptor)
        setattr(sys, self._name, stream)
        self._thread.join(1.0)  # a child of this rank may hold the other end for ever
        if not self._thread.is_alive():
            os.close(self._reading)
