"""What the code of a rank can tell while it runs: ``log``, ``span``, ``progress``. Outside a launch they do nothing.

Runs in a rank; the same code runs under torchrun and in a plain process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socket import socket
from typing import Any, TypeVar

from ddplab.events import Batch, Event, Metric, Progress, Span, encode

__all__ = ["Told", "log", "progress", "span", "teller"]

MAX_NAMES = 200  # of metrics and spans of one rank: each is a line in a picture
OTHER_SPANS = "other spans"
BATCH_S = 0.02
PROGRESS_S = 0.05  # between two that are told
Item = TypeVar("Item")
Function = TypeVar("Function", bound=Callable[..., Any])


class Told:
    """The way to the launcher: events go out at once, from any thread, and are not lost when the rank dies.

    But small events that come in quick succession go out together, ``BATCH_S`` later at most.
    """

    def __init__(self, rank: int, link: socket, launched_s: float) -> None:
        self.rank = rank
        self.launched_s = launched_s
        self.pid = os.getpid()
        self.thread = threading.get_ident()
        self._link = link
        self._lock = threading.RLock()  # a signal handler may log while its own thread does
        self._is_sending = False
        self._names: set[str] = set()
        self._rows: list[tuple[Any, ...]] = []
        self._sent_s = 0.0
        self._sender: threading.Thread | None = None

    def tell(self, kind: Callable[..., Event], *args: Any) -> None:
        """Send one event, dated now."""
        self.send(kind(self.rank, time.monotonic() - self.launched_s, *args))

    def send(self, *events: Event) -> None:
        """Send events, in one message."""
        with self._lock:
            if self._is_sending:
                self._rows += [(type(event), *list(vars(event).values())[1:]) for event in events]
            else:
                self._send_rows()
                self._sendall(events)

    def tell_soon(self, kind: type[Event], time_s: float, *fields: Any) -> None:
        """Send a small event, dated ``time_s`` on the monotonic clock: now, or soon with others."""
        with self._lock:
            self._rows.append((kind, time_s - self.launched_s, *fields))
            if time.monotonic() >= self._sent_s + BATCH_S and not self._is_sending:
                self._send_rows()
            elif not self._sender:
                self._sender = threading.Thread(target=self._send_late, name="ddplab-send", daemon=True)
                self._sender.start()

    def _send_rows(self) -> None:
        if self._rows:
            rows, self._rows = tuple(self._rows), []
            self._sent_s = time.monotonic()
            self._sendall((Batch(self.rank, rows[0][1], rows),))

    def _sendall(self, events: tuple[Event, ...]) -> None:
        self._is_sending = True
        try:
            self._link.sendall(encode(events))
        except OSError:  # a launcher that is gone ends this process anyway
            pass
        finally:
            self._is_sending = False

    def _send_late(self) -> None:
        """Send what nothing else has sent in time."""
        while True:
            time.sleep(BATCH_S)  # not woken by each row: that would cost the learner's thread more than the row itself
            if self._rows:
                with self._lock:
                    self._send_rows()

    def knows(self, name: str) -> bool:
        """Whether this name is not one too many."""
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
        return name in self._names


current: Told | None = None


def teller() -> Told | None:
    """The way to the launcher, in a rank; None in any other process, such as a child of a rank."""
    return current if current is not None and current.pid == os.getpid() else None


def log(step: int | None = None, **metrics: Any) -> None:
    """Tell the notebook numbers of this rank, such as a loss; they become ``run.metrics``.

    ``metrics`` are numbers, or tensors of one element. Of a long series the run keeps every second, fourth, ...
    value, 10,000 at most. Outside a launch this does nothing, so the same function runs under torchrun.
    Raises ``TypeError`` for what is not a number, and ``ValueError`` for more than 200 names.

    >>> log(step=3, loss=0.25)
    """
    if step is not None and type(step) is not int:
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"log(step=...) takes a whole number, not {type(step).__name__}") from None
    told = teller()
    for name, value in metrics.items():
        try:
            number = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"log({name}=...) takes a number or a tensor of one element: {error}") from None
        if told:
            if not told.knows(name):
                raise ValueError(f"{name!r} is name {MAX_NAMES + 1} that this rank tells: put what counts into step=")
            told.tell_soon(Metric, time.monotonic(), step, str(name), number)


class span:
    """A named stretch of time, as ``with span("name"):`` or as a decorator ``@span("name")``; it becomes a row of
    ``run.spans``, and a bar in ``plots.timeline``.

    Spans may lie in each other. One is told when it ends, also by an exception; of each rank the run keeps the
    latest 10,000. What is more than 200 names is told as "other spans". Outside a launch this does nothing.
    Raises ``TypeError`` for a name that is no text, and for an asynchronous generator to decorate.

    >>> with span("validation"):
    ...     pass
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f'span takes a name, as in span("validation"), not {type(name).__name__}')
        self._name = str(name)
        self._of_thread = threading.local()

    def __enter__(self) -> None:
        vars(self._of_thread).setdefault("begun_s", []).append(time.monotonic())

    def __exit__(self, *_: object) -> None:
        begin_s, end_s = self._of_thread.begun_s.pop(), time.monotonic()
        if told := teller():
            name = self._name if told.knows(self._name) else OTHER_SPANS
            told.tell_soon(Span, begin_s, name, end_s - told.launched_s)

    def __call__(self, fn: Function) -> Function:
        name = self._name
        if inspect.isasyncgenfunction(fn):
            raise TypeError("span cannot decorate an asynchronous generator: put `with span(...):` into it")

        def call(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return fn(*args, **kwargs)

        async def wait(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return await fn(*args, **kwargs)

        def generate(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return (yield from fn(*args, **kwargs))

        asks = ((inspect.iscoroutinefunction, wait), (inspect.isgeneratorfunction, generate))
        spanned = next((wrapper for is_kind, wrapper in asks if is_kind(fn)), call)
        return functools.wraps(fn)(spanned)  # type: ignore[return-value]


def progress(items: Iterable[Item], total: int | None = None, name: str = "progress") -> Iterator[Item]:
    """The items one by one, while the notebook shows how far this rank is, at most twenty times a second.

    ``total`` is their number, by default ``len(items)`` where there is one. Outside a launch this gives the items
    and shows nothing. Raises ``TypeError`` for what cannot be gone through, a total that is no whole number, and a
    name that is no text.

    >>> [item for item in progress("ab")]
    ['a', 'b']
    """
    iterator = iter(items)
    if total is None:
        with contextlib.suppress(Exception):
            total = len(items)  # type: ignore[arg-type]
    else:
        try:
            total = operator.index(total)
        except TypeError:
            raise TypeError(f"progress(items, total) takes a whole number, not {type(total).__name__}") from None
    if not isinstance(name, str):
        raise TypeError(f"progress(items, name=...) takes text, not {type(name).__name__}")
    told = teller()
    return _told_items(told, iterator, total, str(name)) if told and told.knows(name) else iterator


def _told_items(told: Told, items: Iterator[Item], total: int | None, name: str) -> Iterator[Item]:
    done, due_s = 0, 0.0
    try:
        for item in items:
            if (now_s := time.monotonic()) >= due_s:
                told.tell_soon(Progress, now_s, name, done, total)
                due_s = now_s + PROGRESS_S
            yield item
            done += 1
    finally:  # also of a loop that broke off
        told.tell(Progress, name, done, total)
