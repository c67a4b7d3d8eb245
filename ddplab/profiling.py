"""The trace of a rank: torch.profiler over the first seconds of its function, bounded, made small. Runs in a rank."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from ddplab import leftovers, telling, tracing
from ddplab.events import Trace

__all__ = ["Profile", "compact", "pack"]

MAX_S = 10.0
MAX_CALLS = 1_000
# Of torch.profiler's file: some 100,000 operations. When it stops, each takes 3 us, and 1 kB more than the 0.5 before.
MAX_JSON_BYTES = 30_000_000
# What at least so many take until then; nothing else tells how many there are. The first steps of a small model take
# half of that: then it is looked how many there were, which leaves a gap, and the profile goes on.
MAX_GROWN_BYTES = 120_000_000
MAX_EVENTS = 150_000  # that are told
MAX_PACKED_BYTES = 20_000_000
CHECK_S = 0.05
OTHER_S = 2.0  # for the main thread to stop this profile when another thread starts one
GPU_CATEGORIES = {"gpu_memcpy", "gpu_memset", "gpu_user_annotation", "kernel"}
CATEGORIES = {"cpu_op", "user_annotation", *GPU_CATEGORIES}
GPU_TID = 10**9  # and above: a stream of the GPU


class Profile:
    """The profile of this rank: begins now, ends by itself after ``MAX_S``, or with ``finish``; then it is told.

    torch.profiler must be started and stopped by the main thread, which may be anywhere: a second thread looks at
    the limits, and lets the interpreter call what is due in the main thread, between two steps of the learner's code.
    """

    def __init__(self, told: telling.Told, with_cuda: bool) -> None:
        self._told = told
        self._with_cuda = with_cuda
        self._limit_s = time.monotonic() + MAX_S
        self._zero_ns = time.time_ns() - round((time.monotonic() - told.launched_s) * 1e9)
        self._main_tid = threading.get_native_id()
        self._running: Any = None
        self._ended: Any = None
        self._over = False
        self._has_stopped = threading.Event()
        self._has_ended = threading.Event()
        self._has_finished = threading.Event()
        self._soon = {name: _PENDING(lambda _, do=do: do()) for name, do in (("go", self._go), ("stop", self._stop))}
        self._thread = threading.Thread(target=self._watch, name="ddplab-trace", daemon=True)
        tracing.note_more()
        self._give_way()
        self._go()
        self._thread.start()

    def finish(self) -> None:
        """End the profile, if that has not happened, and wait until it is told."""
        self._over = True
        self._stop()
        self._has_finished.set()
        self._thread.join()

    # In the main thread -----------------------------------------------------------------------------------

    def _go(self) -> int:
        from torch.profiler import ProfilerActivity, profile

        if not self._over:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._with_cuda
            self._running = profile(activities=activities, acc_events=False, **_trace_only())
            self._running.start()
        return 0

    def _stop(self) -> int:
        running, self._running = self._running, None
        try:
            if running:
                running.stop()
                self._ended = running
        except Exception as error:
            _say(error)
        finally:
            self._has_stopped.set()
            if self._over:
                self._has_ended.set()
        return 0

    def _give_way(self) -> None:
        """There can be one profiler in a process: end this one when the learner starts another, or forks."""
        from torch._C import _autograd
        from torch.autograd.profiler import profile

        prepare: Any = profile._prepare_trace

        def prepare_alone(other: Any) -> None:
            if self._running and getattr(self._running, "profiler", None) is not other:
                self._over = True
                if threading.current_thread() is threading.main_thread():
                    self._stop()
                else:
                    self._ask("stop")
                    if not self._has_ended.wait(OTHER_S):
                        raise RuntimeError("launch(trace=True) profiles this rank already, and cannot be stopped now")
            prepare(other)

        setattr(profile, "_prepare_trace", prepare_alone)  # noqa: B010
        # A child, such as a worker of a DataLoader, would record on and on: nobody stops it there.
        if record := getattr(_autograd, "_enable_record_function", None):
            os.register_at_fork(after_in_child=lambda: self._running and record(False))

    # In a thread of its own -------------------------------------------------------------------------------

    def _watch(self) -> None:
        texts: list[str] = []
        left_bytes = MAX_JSON_BYTES
        while True:
            full_bytes = _own_bytes() + MAX_GROWN_BYTES
            while not self._has_stopped.wait(CHECK_S) and not self._is_due() and _own_bytes() < full_bytes:
                pass
            self._ask("stop")
            self._has_stopped.wait()
            text = self._take()
            left_bytes -= len(text)
            texts.append(text)
            self._has_stopped.clear()
            if self._over or self._is_due() or left_bytes < 0:
                break
            self._ask("go")
        self._told.send(*tracing.calls(self._told.rank, self._told.launched_s))  # the latest: those of this profile
        buckets = tracing.buckets()
        self._has_finished.wait()  # to read them holds Python's lock, for which the learner's code would wait
        events: list[dict[str, Any]] = []
        for part, text in enumerate(texts):
            events += compact(text, self._told.rank, self._main_tid, self._zero_ns, part)
        self._told.tell(Trace, pack(events, buckets))

    def _is_due(self) -> bool:
        return time.monotonic() > self._limit_s or tracing.num_calls() >= MAX_CALLS

    def _ask(self, what: str) -> None:
        ctypes.pythonapi.Py_AddPendingCall(self._soon[what], None)

    def _take(self) -> str:
        """The text of the profile that has ended; "" if there is none."""
        ended, self._ended = self._ended, None
        try:
            if ended:
                prefix = f"{leftovers.OUTPUT_PREFIX}{os.environ.get('DDPLAB_LAUNCHER', '')}-"
                with tempfile.NamedTemporaryFile(prefix=prefix, suffix=".json") as file:
                    ended.export_chrome_trace(file.name)
                    with open(file.name, encoding="utf-8", errors="replace") as written:
                        return written.read()
        except Exception as error:
            _say(error)
        return ""


_PENDING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def _say(error: Exception) -> None:
    print(f"ddplab: this rank has no whole trace: {type(error).__name__}: {error}", file=sys.stderr)


def _trace_only() -> dict[str, Any]:
    """Have torch.profiler write its file and no more, where it can: that saves two fifths of the time when it stops."""
    from torch._C import _profiler

    try:
        return {"experimental_config": _profiler._ExperimentalConfig(trace_only=True)}
    except (AttributeError, TypeError):
        return {}


def _own_bytes() -> int:
    """What this process has in memory and shares with no file; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
            return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# A pure part ------------------------------------------------------------------------------------------


def compact(text: str, rank: int, main_tid: int, zero_ns: int, part: int = 0) -> list[dict[str, Any]]:
    """The events of torch.profiler's file that tell of work, as ``Trace`` holds them.

    ``zero_ns`` is the wall clock at the launch; ``part`` counts the files of one rank, whose flows have the same ids.
    """
    # Each event is cut down as soon as it is read: whole, so many take a gigabyte.
    trace = json.loads(text or "{}", object_hook=lambda read: _cut_down(read, main_tid) if "ph" in read else read)
    shift_us = (trace.get("baseTimeNanoseconds", 0) - zero_ns) / 1000
    kept = [event for event in trace.get("traceEvents", ()) if event]
    for event in kept:
        event["pid"] = rank
        event["ts"] = 0 if event["ph"] == "M" else round(event["ts"] + shift_us, 3)
        if "id" in event:
            event["id"] += 1_000_000 * (part + 100 * rank)
    return sorted(kept, key=lambda event: event["ts"])


def _cut_down(event: dict[str, Any], main_tid: int) -> dict[str, Any] | None:
    """What is kept of an event, as torch wrote it but for the thread; None for one that tells of no work."""
    kind, category, tid = event["ph"], event.get("cat", ""), event.get("tid", 0)
    names: tuple[str, ...] = ("ph", "name", "ts")
    if kind == "X" and category in CATEGORIES:
        names += ("dur",)
    elif category == "fwdbwd":
        names += ("id", "bp")
    elif event["name"] == "thread_name" and tid != main_tid and "ddplab" not in event["args"]["name"]:
        names += ("args",)
    else:
        return None
    tid = GPU_TID + tid if category in GPU_CATEGORIES else 0 if tid == main_tid else tid
    return {"cat": category, "tid": tid} | {name: event[name] for name in names if name in event}


def pack(events: list[dict[str, Any]], buckets: Sequence[Sequence[Sequence[int]]] = ()) -> bytes:
    """The content of a ``Trace``; only its first events, if there are too many."""
    events = events[:MAX_EVENTS]
    while True:
        text = json.dumps({"events": events, "buckets": buckets}, separators=(",", ":"))
        if len(packed := gzip.compress(text.encode(), 3)) <= MAX_PACKED_BYTES:
            return packed
        events = events[: len(events) // 2]
