"""Moves events; owns time-outs, interrupts and the end of a run. A thread of the notebook's process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddplab import events as ev
from ddplab import leftovers, processes, shipping, worker
from ddplab.capture import LineBuffer, Transcript, is_noise
from ddplab.engines import Engine, Started
from ddplab.receipt import Before
from ddplab.run import Run, Spec

__all__ = ["Job"]

START_LIMIT_S = 120.0  # for all ranks to import torch and report, on a slow machine
GRACE_S = 1.0  # for the peers of a rank that failed to say what they saw
EXIT_GRACE_S = 5.0  # for ranks that have returned to close their process group
TRACE_GRACE_S = 60.0  # and to pack their trace
ANSWER_S = 0.5  # for a rank to say where it is
COALESCE_S = 0.01  # between two looks at ranks that only tell numbers: to be woken by each would slow them down
CHUNK_BYTES = 1 << 18
MAX_LEFT_BYTES = 1 << 20  # what a pipe can still hold when its writer is gone


class _Rank:
    """What the job knows of one rank."""

    def __init__(self, process: Any, order: bytes) -> None:
        self.process = process
        self.decoder = ev.Decoder()
        self.lines = {"stdout": LineBuffer(), "stderr": LineBuffer()}
        self.unsent = memoryview(order)
        self.started = self.returned = self.failed = self.broken = self.gone = self.located = self.garbled = False

    @property
    def settled(self) -> bool:
        """Whether it is known how the rank's function ended."""
        return self.returned or self.failed or self.gone


class Job:
    """Starts the ranks, collects what they tell, and ends them; all of it in ``thread``."""

    def __init__(self, spec: Spec, order: worker.Order, engine: Engine) -> None:
        self.thread = threading.Thread(target=self._live, name="ddplab-job", daemon=True)
        self.error: BaseException | None = None
        self._spec = spec
        self._order = order
        self._engine = engine
        self._ranks: list[_Rank] = []
        self._transcript = Transcript()
        self._results: dict[int, ev.Event] = {}  # by rank, unpacked
        self._batch: list[ev.Event] = []
        # Bounded: when the screen is slow, the pipes fill and the ranks wait; memory does not grow.
        self._queue: queue.Queue[list[ev.Event] | None] = queue.Queue(maxsize=16)
        self.ended: list[str] = []
        self._is_starting = False
        self._num_calm = 0
        self._abandoned_s: float | None = None
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._elapsed_s = 0.0

    # For the thread that launched ---------------------------------------------------------------------

    def told(self) -> Iterator[list[ev.Event]]:
        """Events in batches until the job has ended; an empty batch when nothing came for a while."""
        while True:
            try:
                events = self._queue.get(timeout=0.1)
            except queue.Empty:
                if not self.thread.is_alive():  # it was abandoned
                    return
                self._unstick()
                events = []
            if events is None:
                return
            yield events

    def abandon(self) -> None:
        """Nobody listens any more: end all ranks. From any thread, any number of times."""
        self._abandoned_s = self._abandoned_s or time.monotonic()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def join(self) -> None:
        """Wait for the end of the job."""
        while self.thread.is_alive():
            self.thread.join(0.1)
            self._unstick()

    def unpack(self) -> None:
        """Make the values of the ranks again, once the job has ended. That may take long, and may be interrupted."""
        for event in self._transcript.events():
            if isinstance(event, ev.Result):
                self._results[event.rank] = _unpacked(event)

    def finished_run(self, before: Before) -> Run:
        """The run, once the job has ended; ``before`` is this process as it was when it was made."""
        events, file = list(self._transcript.events()), self._transcript.file
        for place, event in enumerate(events):
            if isinstance(event, ev.Result):
                events[place] = self._results.get(event.rank, ev.Stopped(event.rank, event.time_s, "interrupt"))
        made = [event.path for event in events if isinstance(event, ev.Made)]
        for name in filter(lambda name: os.path.basename(name).startswith(leftovers.OUTPUT_PREFIX), made):
            with contextlib.suppress(OSError):  # ddplab's own, of a rank that was killed while it packed its trace
                os.unlink(name)
        pids = [event.pid for event in events if isinstance(event, ev.Started)]
        path = file.path if file else None
        run = Run(self._spec, tuple(events), self._elapsed_s, before.receipt(made, pids, self.ended), path)
        if path:
            weakref.finalize(run, _remove, path, os.getpid())
        return run

    def _unstick(self) -> None:
        """End a forkserver on whose answer the thread of the job waits in vain."""
        late = self._abandoned_s and time.monotonic() > self._abandoned_s + EXIT_GRACE_S
        if self._is_starting and (late or processes.server_is_stopped()):
            processes.give_up_server()

    @property
    def _abandoned(self) -> bool:
        return self._abandoned_s is not None

    # The job ------------------------------------------------------------------------------------------

    def _live(self) -> None:
        """From the first rank to the last."""
        processes.hold_interrupts()
        engine = contextlib.ExitStack()
        try:
            self._start(engine.enter_context(self._engine.start(self._spec, self._order, lambda: self._abandoned)))
            self._stop(self._serve())
            self._until(lambda: self._every("gone"), EXIT_GRACE_S + TRACE_GRACE_S * self._order.trace)
        except BaseException as error:
            self.error = error
        finally:
            try:
                with engine:
                    self._end()
            except BaseException as error:
                self.error = self.error or error
            finally:
                self._elapsed_s = self._now_s()
                self._put(None)

    def _start(self, started: Started) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ, lambda mask: self._woken.recv(64))
        self._is_starting = True
        for process, order in started:
            self._is_starting = False
            self._ranks.append(rank := _Rank(process, order))
            self._listen(rank)
            self._is_starting = True
        self._is_starting = False

    def _serve(self) -> str:
        """Wait for the ranks. Gives the reason to stop those that still run."""
        if not self._until(lambda: self._every("started") or self._any("broken"), START_LIMIT_S):
            return "start"
        if not self._until(lambda: self._every("settled") or self._any("broken"), self._spec.timeout_s):
            return "timeout"
        self._until(lambda: self._every("settled"), GRACE_S)
        return "failure"

    def _stop(self, reason: str) -> None:
        """Ask the ranks that still run where they are, then end them."""
        running = [rank for rank in self._ranks if not rank.settled]
        before: list[tuple[str, float]] = [rank.process.state() for rank in running]
        for rank in running:
            with contextlib.suppress(OSError):
                rank.process.link.send(b"?")
        self._until(lambda: all(rank.located or rank.settled for rank in running), ANSWER_S, heed_interrupt=False)
        for rank, (_, cpu_s) in zip(running, before, strict=True):
            if not rank.located:
                letter, now_s = rank.process.state()
                state = _silent(letter, now_s, cpu_s)
                self._tell(ev.Located(rank.process.rank, self._now_s(), None, state))
        running = [rank for rank in running if not rank.settled]
        for rank in running:  # all are told to be stopped before the first is: the others will lose a peer
            self._tell(ev.Stopped(rank.process.rank, self._now_s(), "interrupt" if self._abandoned else reason))
        for rank in running:
            rank.process.kill()

    def _end(self) -> None:
        """Leave nothing: no rank, no child of a rank, no open end."""
        left = [rank for rank in self._ranks if not rank.gone]
        for rank in left:
            rank.process.kill()
        for rank in left:
            self._gone(rank)
        for rank in self._ranks:
            rank.process.close()
        self.ended = processes.end_strays()
        self._flush()
        if self._transcript.file:
            self._transcript.file.finish()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    # Waiting ------------------------------------------------------------------------------------------

    def _every(self, state: str) -> bool:
        return all(getattr(rank, state) for rank in self._ranks)

    def _any(self, state: str) -> bool:
        return any(getattr(rank, state) for rank in self._ranks)

    def _until(self, done: Callable[[], bool], limit_s: float, heed_interrupt: bool = True) -> bool:
        """Take in what the ranks tell until ``done``, for at most ``limit_s`` seconds; say whether it was."""
        deadline = time.monotonic() + limit_s
        while not done():
            left_s = deadline - time.monotonic()
            if heed_interrupt and self._abandoned:
                return False
            ready, self._num_calm = self._selector.select(max(0.0, left_s)), 0
            for key, mask in ready:
                if key.fileobj in self._selector.get_map():  # an earlier one may have ended the rank
                    key.data(mask)
            self._flush()
            if left_s <= 0:  # what had come in time was still taken in
                return done()
            if ready and self._num_calm == len(ready):
                time.sleep(min(COALESCE_S, left_s))
        return True

    def _listen(self, rank: _Rank) -> None:
        """Let the selector call the right method for whatever this rank does."""
        process = rank.process
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        process.link.setblocking(False)
        self._selector.register(process.link, both, lambda mask: self._talk(rank, mask))
        for name, pipe in process.output.items():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, lambda mask, name=name: self._read(rank, name))
        if process.sentinel is not None:
            self._selector.register(process.sentinel, selectors.EVENT_READ, lambda mask: self._gone(rank))

    def _talk(self, rank: _Rank, mask: int) -> None:
        """Send more of the order, or take in what the rank tells."""
        link = rank.process.link
        try:
            if mask & selectors.EVENT_WRITE:
                rank.unsent = rank.unsent[link.send(rank.unsent[:CHUNK_BYTES]) :]
                if not rank.unsent:
                    self._selector.modify(link, selectors.EVENT_READ, self._selector.get_key(link).data)
            if mask & selectors.EVENT_READ and not self._hear(rank):
                self._unlink(rank)
        except BlockingIOError:
            pass
        except OSError:
            self._unlink(rank)

    def _unlink(self, rank: _Rank) -> None:
        """The rank has closed its link: it is gone, or will be in a moment, when its sentinel tells."""
        self._selector.unregister(rank.process.link)
        if rank.process.sentinel is None:
            self._gone(rank)

    def _hear(self, rank: _Rank) -> bool:
        """Take in a piece of what the rank tells; say whether there may be more."""
        chunk = rank.process.link.recv(1 << 20)
        if rank.garbled:
            return bool(chunk)
        try:
            told = [event for events in rank.decoder.feed(chunk) for event in events]
            for event in told:
                self._note(rank, event)
            self._num_calm += bool(told) and all(isinstance(event, ev.Batch) for event in told)
        except Exception as error:  # several processes wrote at once, or something that is not in the notebook
            rank.garbled = True
            text = f"what the rank told could not be read: {type(error).__name__}: {error}"
            self._note(rank, ev.Failed(rank.process.rank, self._now_s(), "LinkError", text, text, None))
        return bool(chunk)

    def _read(self, rank: _Rank, name: str) -> bool:
        """Take in a piece of what the rank wrote; say whether there may be more."""
        pipe = rank.process.output[name]
        data = os.read(pipe.fileno(), CHUNK_BYTES)
        self._write_down(rank, name, rank.lines[name].feed(data) if data else rank.lines[name].finish())
        if not data:
            self._selector.unregister(pipe)
        return bool(data)

    def _write_down(self, rank: _Rank, name: str, lines: list[str]) -> None:
        now_s = self._now_s()
        if name == "stderr":
            lines = [line for line in lines if not is_noise(line)]
        self._batch += [ev.Line(rank.process.rank, now_s, name, text) for text in lines]

    # What happens to a rank ---------------------------------------------------------------------------

    def _note(self, rank: _Rank, event: Any) -> None:
        """Keep an event and what it says of the rank's state."""
        if isinstance(event, ev.Batch):
            self._batch += event.events()
            return None
        if isinstance(event, ev.Written):
            return self._write_down(rank, event.stream, rank.lines[event.stream].feed(event.data))
        rank.started |= isinstance(event, ev.Started)
        rank.returned |= isinstance(event, ev.Result)
        rank.located |= isinstance(event, ev.Located)
        if isinstance(event, ev.Failed):
            rank.failed = True
            # A value that cannot travel is no reason to stop the others: the function itself has ended well.
            rank.broken = event.during != "result"
        self._tell(event)

    def _gone(self, rank: _Rank) -> None:
        """The process has ended: end what it left, take in its last words, and note how it ended."""
        process = rank.process
        process.kill()
        exitcode = process.join()
        self._drain(lambda: self._hear(rank))
        for name in process.output:
            self._drain(functools.partial(self._read, rank, name))
        for name, lines in rank.lines.items():
            self._write_down(rank, name, lines.finish())
        for source in (process.link, *process.output.values(), process.sentinel):
            if source is not None and source in self._selector.get_map():
                self._selector.unregister(source)
        self._tell(ev.Exited(process.rank, self._now_s(), exitcode))
        rank.gone = True
        rank.broken |= not (rank.returned or rank.failed)

    def _drain(self, take: Callable[[], bool]) -> None:
        """Take what is left, but no more than can be left: a child of the rank may write on."""
        with contextlib.suppress(OSError, KeyError):
            for _ in range(MAX_LEFT_BYTES // CHUNK_BYTES + 1):
                if not take():
                    return

    def _tell(self, event: ev.Event) -> None:
        self._batch.append(event)

    def _flush(self) -> None:
        """Hand over what has come since the last time."""
        if self._batch:
            self._transcript.add(self._batch)
            self._put(self._batch)
            self._batch = []

    def _put(self, events: list[ev.Event] | None) -> None:
        while not self._abandoned:
            with contextlib.suppress(queue.Full):
                self._queue.put(events, timeout=0.1)
                return

    def _now_s(self) -> float:
        return time.monotonic() - self._order.launched_s


def _remove(path: Path, owner: int) -> None:
    """Remove a file of the process ``owner``: a child that it forked may end first."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def _silent(letter: str, cpu_s: float, cpu_before_s: float) -> str:
    """Why a rank did not answer, as far as the system knows."""
    if letter in ("T", "t"):
        return "its process is stopped, as by SIGSTOP"
    if letter:
        does = "computes" if cpu_s - cpu_before_s > ANSWER_S / 5 else "sleeps or waits"
        return f"it {does} in native code that does not let go of Python's lock (the GIL)"
    return "nothing is known of its process"


def _unpacked(event: ev.Result) -> ev.Event:
    """The event with its value; or why the value, which left its rank, could not be made again here."""
    try:
        return dataclasses.replace(event, value=shipping.unpack_result(event.value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a value may run anything while it is made: also sys.exit
        text = f"the value was sent, but could not be made again in the notebook: {type(error).__name__}: {error}"
        return ev.Failed(event.rank, event.time_s, "ShippingError", text, text, None, "result")
