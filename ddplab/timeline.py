"""What each rank did when: from its calls, its spans and, where it has one, its trace. Pure functions of events."""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from ddplab import diagnosis
from ddplab import events as ev

__all__ = ["Row", "Straggler", "chrome_events", "rows", "stragglers"]

# How torch names what it does, and what that is here.
NAMES = {
    "data": re.compile(r"enumerate\((DataLoader)\)#"),
    "forward": re.compile(r"(DistributedDataParallel)\.forward"),
    "optimizer": re.compile(r"Optimizer\.\w+#(.+)"),
    "communication": re.compile(r"gloo:(\w+)|(nccl\w*)"),
}
MIN_WAIT_S = 50e-6  # a shorter gap between two operations is the work between them
MIN_LATE_S = 1e-3  # of a straggler, and
MIN_LATE_SHARE = 0.1  # of the time from one step to the next, in
MIN_LAST_SHARE = 2 / 3  # of all steps, of
MIN_STEPS = 3
SPANS, CALLS = 1, 2  # threads of a trace's file; 0 is the main thread, others have large numbers

Interval = tuple[float, float]


class Row(NamedTuple):
    """A stretch of a rank's time, in seconds since the launch.

    ``kind`` is "data", "forward", "backward", "optimizer", "communication" (on the way between the ranks, or
    waiting for one that has not come), "waiting" (the main thread stands until others are there, or a bucket is
    averaged) or "span". Rows of a rank may lie in each other: waiting in backward, for one, and all in spans.
    ``num_bytes`` is the size of this rank's tensor where it is known.
    """

    rank: int
    begin_s: float
    end_s: float
    kind: str
    name: str
    num_bytes: int | None = None


class Straggler(NamedTuple):
    """A rank that came last in ``times`` of ``of`` steps, in the middle ``late_s`` after all others were there."""

    rank: int
    times: int
    of: int
    late_s: float


def rows(events: Sequence[ev.Event]) -> tuple[Row, ...]:
    """All that is known, by rank and beginning. Without a trace: calls, ``backward`` and spans alone."""
    found = [Row(e.rank, e.time_s, e.end_s, "span", e.name) for e in events if isinstance(e, ev.Span)]
    ends = _ends(events)
    made = diagnosis.calls(events)
    for call in made:
        kind = {"backward": "backward", "DDP(...)": "span"}.get(call.name, "waiting")
        end_s = ends[call.rank] if call.end_s is None else call.end_s
        found.append(Row(call.rank, call.time_s, end_s, kind, call.name, _call_bytes(call)))
    for trace in _traces(events):
        found += trace.rows([call for call in made if call.rank == trace.rank and call.end_s is not None])
    return tuple(sorted(found, key=lambda row: (row.rank, row.begin_s, -row.end_s)))


def _ends(events: Iterable[ev.Event]) -> dict[int, float]:
    """When each rank ended, or was last heard of."""
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if isinstance(event, ev.Result | ev.Failed | ev.Stopped | ev.Call):
            ends[event.rank] = max(ends[event.rank], event.time_s)
    return ends


def _call_bytes(call: ev.Call) -> int | None:
    bits = re.search(r"\d+", call.dtype)
    item_bytes = int(bits[0]) // 8 if bits else 1
    return math.prod(call.shape) * item_bytes if call.shape is not None and call.dtype else None


# A trace ----------------------------------------------------------------------------------------------


def _traces(events: Iterable[ev.Event]) -> list[_Trace]:
    return [_Trace(event) for event in events if isinstance(event, ev.Trace)]


class _Trace:
    """The trace of one rank, unpacked; times in seconds."""

    def __init__(self, event: ev.Trace) -> None:
        content = json.loads(gzip.decompress(event.packed))
        self.rank = event.rank
        self.events: list[dict[str, Any]] = content["events"]
        self._buckets: list[list[list[int]]] = content["buckets"]
        self._operations = [event for event in self.events if event["cat"] == "cpu_op"]
        self._named = [(event, *named) for event in self.events if (named := _kind_and_name(event))]

    def rows(self, calls: Sequence[ev.Call]) -> list[Row]:
        """What torch annotates, and what follows from it and from the calls that the rank has made."""
        backwards = [(call.time_s, call.end_s or 0.0) for call in calls if call.name == "backward"]
        communication = [row for _, row in self.communication(calls)]
        ddp = [_times(event) for event, kind, _ in self._named if kind == "forward"]
        found = [Row(self.rank, *_times(e), k, name) for e, k, name in self._named if k in ("data", "optimizer")]
        found += [Row(self.rank, *t, "forward", "forward") for t in _union([*ddp, *self._forwards(backwards)])]
        found += [Row(self.rank, *t, "waiting", "buckets") for t in self._waits(backwards, communication)]
        return found + communication

    def communication(self, calls: Sequence[ev.Call]) -> list[tuple[dict[str, Any], Row]]:
        """Each operation of the backend as it is in the trace, and as a row: whose bucket, how many bytes."""
        found = [(e, name, _backward_of(e, calls)) for e, kind, name in self._named if kind == "communication"]
        counts = Counter(number for _, name, number in found if name == "all_reduce")
        sizes = {number: self._sizes(number, counts[number]) for number in counts}
        seen: Counter[int] = Counter()
        taken: set[float] = set()
        pairs = []
        for event, name, number in found:
            num_bytes = _made_by(event, name, calls, taken)
            if number and name == "all_reduce":
                bucket = seen[number]
                seen[number] += 1
                name, num_bytes = f"all_reduce of bucket {bucket}", sizes[number][bucket]
            pairs.append((event, Row(self.rank, *_times(event), "communication", name, num_bytes)))
        return pairs

    def _sizes(self, number: int, num_buckets: int) -> Sequence[int | None]:
        """The bytes of the buckets in backward ``number``; known if all DDP models with so many buckets agree."""
        known = [first if number == 1 else later or first for first, later in self._buckets]
        fitting = [sizes for sizes in known if len(sizes) == num_buckets]
        return fitting[0] if fitting and all(sizes == fitting[0] for sizes in fitting) else [None] * num_buckets

    def _forwards(self, backwards: Sequence[Interval]) -> list[Interval]:
        """From the first to the last operation that each backward went back through."""
        begun = {event["id"]: event["ts"] for event in self.events if event["ph"] == "s"}
        ends = {event["ts"]: event["ts"] + event["dur"] for event in reversed(self._operations)}
        flows = sorted((e["ts"] / 1e6, begun[e["id"]]) for e in self.events if e["ph"] == "f" and e["id"] in begun)
        found = []
        for begin_s, end_s in backwards:
            if passed := [ts for _, ts in flows[bisect_left(flows, (begin_s,)) : bisect_right(flows, (end_s,))]]:
                found.append((min(passed) / 1e6, max(ends.get(ts, ts) for ts in passed) / 1e6))
        return found

    def _waits(self, backwards: Sequence[Interval], communication: Sequence[Row]) -> list[Interval]:
        """Where in ``backward`` no operation runs while buckets are on their way."""
        busy = _union(map(_times, self._operations))
        under_way = _union((row.begin_s, row.end_s) for row in communication)
        gaps = [(first[1], second[0]) for first, second in pairwise([(0.0, 0.0), *busy, (math.inf, math.inf)])]
        found = _common(_common(sorted(backwards), gaps), under_way)
        return [(begin_s, end_s) for begin_s, end_s in found if end_s - begin_s >= MIN_WAIT_S]


def _times(event: dict[str, Any]) -> Interval:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _kind_and_name(event: dict[str, Any]) -> tuple[str, str] | None:
    if event["cat"] in ("user_annotation", "kernel"):
        for kind, pattern in NAMES.items():
            if found := pattern.match(event["name"]):
                return kind, next(part for part in found.groups() if part)
    return None


def _backward_of(event: dict[str, Any], calls: Sequence[ev.Call]) -> int:
    """The number of the ``backward`` in which an operation began; 0 if it was in none."""
    begin_s, _ = _times(event)
    inside = (c.number for c in calls if c.name == "backward" and c.time_s <= begin_s <= (c.end_s or 0.0))
    return next(inside, 0)


def _made_by(event: dict[str, Any], name: str, calls: Sequence[ev.Call], taken: set[float]) -> int | None:
    """The bytes of the first call that an operation can belong to: it has begun, and no other has ``taken`` it."""
    waited = {call.since_s: call.end_s for call in calls if call.since_s is not None}
    middle_s = sum(_times(event)) / 2
    for call in calls:
        end_s = waited.get(call.time_s) or call.end_s or 0.0
        fits = call.since_s is None and call.name.startswith(name) and call.time_s <= middle_s <= end_s
        if fits and call.time_s not in taken:
            taken.add(call.time_s)
            return _call_bytes(call)
    return None


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals, joined where they overlap, in order.

    >>> _union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    joined: list[Interval] = []
    for begin_s, end_s in sorted(intervals):
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end_s)
        else:
            joined.append((begin_s, end_s))
    return joined


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Where both have an interval; each is in order and does not overlap itself.

    >>> _common([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    found, index = [], 0
    for begin_s, end_s in some:
        while index < len(others) and others[index][1] <= begin_s:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end_s:
            found.append((max(begin_s, others[at][0]), min(end_s, others[at][1])))
            at += 1
    return found


# Stragglers -------------------------------------------------------------------------------------------


def stragglers(events: Sequence[ev.Event], known: Sequence[Row]) -> list[Straggler]:
    """The ranks that keep the others waiting, the worst first; ``known`` are the rows of the events.

    A rank counts that is the last in two thirds or more of the numbered collective calls of a group, or of the
    steps of DDP, and comes a tenth of a step or more (1 ms at least) after all others.
    """
    found = [one for steps in _arrivals(events, known) for one in _late_in(steps)]
    found.sort(key=lambda one: -one.times * one.late_s)
    return [one for index, one in enumerate(found) if one.rank not in {earlier.rank for earlier in found[:index]}]


def _arrivals(events: Sequence[ev.Event], known: Sequence[Row]) -> list[list[dict[int, float]]]:
    """For each order of calls its steps: when each rank came."""
    orders: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    made = diagnosis.calls(events)
    for call in made:
        if call.number and call.since_s is None:
            order = "backward" if call.name == "backward" else f"group {call.group}"
            orders[order][call.number][call.rank] = call.time_s
    backwards = sorted((call.rank, call.time_s, call.number) for call in made if call.name == "backward")
    for row in known:
        if row.name == "all_reduce of bucket 0":
            number = backwards[bisect_right(backwards, (row.rank, row.begin_s, math.inf)) - 1][2]
            orders["bucket"][number][row.rank] = row.begin_s
    if "bucket" in orders:
        orders.pop("backward", None)
    return [[numbers[number] for number in sorted(numbers)] for numbers in orders.values()]


def _late_in(steps: Sequence[dict[int, float]]) -> list[Straggler]:
    num_ranks = max(map(len, steps))
    complete = [sorted((time_s, rank) for rank, time_s in step.items()) for step in steps if len(step) == num_ranks]
    if num_ranks < 2 or len(complete) < MIN_STEPS:
        return []
    step_s = median(later[-1][0] - earlier[-1][0] for earlier, later in pairwise(complete))
    late: dict[int, list[float]] = defaultdict(list)
    for *_, (before_s, _), (last_s, rank) in complete:
        late[rank].append(last_s - before_s)
    found = [Straggler(rank, len(mine), len(complete), median(mine)) for rank, mine in late.items()]
    least_s = max(MIN_LATE_S, MIN_LATE_SHARE * step_s)
    return [one for one in found if one.times >= MIN_LAST_SHARE * one.of and one.late_s >= least_s]


# Files ------------------------------------------------------------------------------------------------


def chrome_events(events: Sequence[ev.Event], world_size: int) -> list[list[dict[str, Any]]]:
    """For each rank what Perfetto and chrome://tracing show: its trace, spans and calls, in microseconds.

    Zero is the launch. The rank is the process; its threads are the main one, its spans, its calls, and the backend's.
    """
    traces = {trace.rank: trace for trace in _traces(events)}
    ends = _ends(events)
    made = diagnosis.calls(events)
    files = []
    for rank in range(world_size):
        mine = [call for call in made if call.rank == rank]
        spans = [event for event in events if isinstance(event, ev.Span) and event.rank == rank]
        timed = [_bar(rank, SPANS, "span", span.name, span.time_s, span.end_s) for span in spans]
        for call in mine:
            end_s = ends[rank] if call.end_s is None else call.end_s
            timed.append(_bar(rank, CALLS, "call", diagnosis.describe(call), call.time_s, end_s))
        heads = [_head(rank, "process_name", 0, name=f"rank {rank}")]
        heads.append(_head(rank, "process_sort_index", 0, sort_index=rank))
        names = {0: "main thread", SPANS: "spans", CALLS: "calls into torch.distributed"}
        heads += [_head(rank, "thread_name", tid, name=name) for tid, name in names.items()]
        if trace := traces.get(rank):
            sizes = {id(event): row.num_bytes for event, row in trace.communication(mine)}
            for event in trace.events:
                size = sizes.get(id(event))
                timed.append(event | ({"args": {"bytes": size}} if size is not None else {}))
        files.append(heads + sorted(timed, key=lambda event: event["ts"]))
    return files


def _bar(rank: int, tid: int, category: str, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    times = {"ts": round(begin_s * 1e6, 3), "dur": round((end_s - begin_s) * 1e6, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": tid, **times}


def _head(rank: int, what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "ts": 0, "args": args}
