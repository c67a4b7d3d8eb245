"""What each rank did when, from runs made by hand: exact rows, stragglers, files for Perfetto, and the numbers drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from recorded import run_of

from ddplab import Run, plots, profiling, timeline
from ddplab.events import Began, Call, Event, Result, Span, Stopped, Trace
from ddplab.plots.timeline import numbers, window
from ddplab.timeline import Row, Straggler

MS = 1e-3
MAIN, GLOO = 0, 900


def call(
    rank: int, begin_ms: float, end_ms: float | None, name: str = "backward", number: int = 1, **more: Any
) -> Call:
    """A call of ``rank``; ``shape``, ``dtype`` and ``since_s`` may be given."""
    end_s = None if end_ms is None else end_ms * MS
    shape, dtype, since_s = more.get("shape"), more.get("dtype", ""), more.get("since_s")
    return Call(rank, begin_ms * MS, name, number, "", shape, dtype, "", None, None, end_s, since_s)


def op(name: str, begin_ms: float, end_ms: float, tid: int = MAIN, category: str = "cpu_op") -> dict[str, Any]:
    """An event of a trace."""
    times = {"ts": begin_ms * 1e3, "dur": round((end_ms - begin_ms) * 1e3, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, **times}


def note(name: str, begin_ms: float, end_ms: float, tid: int = MAIN) -> dict[str, Any]:
    """A thing that torch annotates."""
    return op(name, begin_ms, end_ms, tid, "user_annotation")


def flow(phase: str, id: int, at_ms: float) -> dict[str, Any]:
    """The beginning or end of an arrow from an operation to its backward."""
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "pid": 0, "tid": MAIN, "ts": at_ms * 1e3, "id": id}


def trace(rank: int, *events: dict[str, Any], buckets: Any = ()) -> Trace:
    """The trace that a rank tells."""
    return Trace(rank, 1.0, profiling.pack(sorted(events, key=lambda e: e["ts"]), buckets))


# One step: two buckets; the second is still on its way when backward has computed all, from 8 to 9 ms.
STEP = [
    note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 1),
    note("Optimizer.zero_grad#SGD.zero_grad", 1, 1.5),
    note("DistributedDataParallel.forward", 2, 3),
    op("aten::linear", 2.5, 3),
    op("aten::mse_loss", 3.5, 4),
    flow("s", 1, 2.5),
    flow("s", 2, 3.5),
    op("MseLossBackward0", 5, 6),
    op("LinearBackward0", 6, 8),
    flow("f", 2, 5),
    flow("f", 1, 6),
    note("gloo:all_reduce", 6, 7, GLOO),
    note("gloo:all_reduce", 7.5, 9, GLOO + 1),
    op("copy_bucket_to_grad", 9, 10),
    note("Optimizer.step#SGD.step", 10, 11),
]


def in_ms(rows: tuple[Row, ...], rank: int = 0) -> list[tuple[float, float, str, str, int | None]]:
    return [(round(1e3 * b, 3), round(1e3 * e, 3), kind, name, size) for r, b, e, kind, name, size in rows if r == rank]


def test_a_step_of_ddp_becomes_rows() -> None:
    """Data, forward to the end of the loss, backward, each bucket with its bytes, the wait for the last, optimizer."""
    rows = timeline.rows([call(0, 5, 10), trace(0, *STEP, buckets=[[[800, 400], [1200]]])])
    assert in_ms(rows) == [
        (0, 1, "data", "DataLoader", None),
        (1, 1.5, "optimizer", "SGD.zero_grad", None),
        (2, 4, "forward", "forward", None),
        (5, 10, "backward", "backward", None),
        (6, 7, "communication", "all_reduce of bucket 0", 800),
        (7.5, 9, "communication", "all_reduce of bucket 1", 400),
        (8, 9, "waiting", "buckets", None),
        (10, 11, "optimizer", "SGD.step", None),
    ]


def test_forward_goes_on_to_the_loss() -> None:
    """Also without DDP: from the first to the last operation that backward goes back through."""
    plain = [event for event in STEP if "Distributed" not in event["name"]]
    for events, begin_ms in ((STEP, 2), (plain, 2.5)):
        rows = timeline.rows([call(0, 5, 10), trace(0, *events)])
        assert [row[:2] for row in in_ms(rows) if row[2] == "forward"] == [(begin_ms, 4)]


@pytest.mark.parametrize(
    ("number", "buckets", "sizes"),
    [
        (1, [[[8, 4], [6, 6]]], [8, 4]),  # the first step
        (2, [[[8, 4], [6, 6]]], [6, 6]),  # DDP has cut them anew
        (2, [[[8, 4], []]], [8, 4]),  # it does not with find_unused_parameters
        (2, [[[12], [12]]], [None, None]),  # not as many as were seen
        (2, [[[8, 4], []], [[6, 6], []]], [None, None]),  # two models
    ],
)
def test_bytes_of_buckets_are_told_where_they_are_certain(number: int, buckets: Any, sizes: list[int | None]) -> None:
    """The k-th all-reduce in a backward is the k-th bucket, if the model has as many."""
    rows = timeline.rows([call(0, 5, 10, number=number), trace(0, *STEP, buckets=buckets)])
    assert [row.num_bytes for row in rows if row.kind == "communication"] == sizes


def test_communication_has_the_bytes_of_its_call() -> None:
    """Two calls that are under way at once are told apart by their order."""
    calls = [
        call(0, 1, 1.1, "all_reduce", 1, shape=(10, 10), dtype="float32"),
        call(0, 1.2, 1.3, "all_reduce", 2, shape=(3,), dtype="bfloat16"),
        call(0, 2, 5, "wait of all_reduce", 1, since_s=1 * MS),
        call(0, 5.1, 6, "wait of all_reduce", 2, since_s=1.2 * MS),
        call(0, 7, 8, "barrier", 3),
    ]
    seen = [
        note("gloo:all_reduce", 1.4, 4, GLOO),
        note("gloo:all_reduce", 1.5, 5.5, GLOO + 1),
        note("gloo:barrier", 7, 8, GLOO),
    ]
    rows = timeline.rows([*calls, trace(0, *seen)])
    assert [(row.name, row.num_bytes) for row in rows if row.kind == "communication"] == [
        ("all_reduce", 400),
        ("all_reduce", 6),
        ("barrier", None),
    ]


def test_without_a_trace_there_are_calls_backward_and_spans() -> None:
    """A call that had not returned goes on to the end of its rank."""
    events = [
        Span(0, 0.001, "step", 0.004),
        call(0, 2, 3),
        call(0, 4, None, "all_reduce", 1, shape=(2,), dtype="float32"),
        call(1, 1, 2, "DDP(...)", 0),
        Stopped(0, 0.009, "timeout"),
    ]
    assert in_ms(timeline.rows(events)) == [
        (1, 4, "span", "step", None),
        (2, 3, "backward", "backward", None),
        (4, 9, "waiting", "all_reduce", 8),
    ]
    assert in_ms(timeline.rows(events), 1) == [(1, 2, "span", "DDP(...)", None)]


# Stragglers -------------------------------------------------------------------------------------------


def steps(late_ms: list[float], others_ms: float = 0.0, name: str = "backward") -> list[Event]:
    """Three ranks, a step each 20 ms; rank 1 comes ``late_ms`` after rank 0, rank 2 ``others_ms``."""
    found: list[Event] = []
    for number, late in enumerate(late_ms, 1):
        for rank, after in enumerate([0.0, late, others_ms]):
            begin_ms = 20 * number + after
            found.append(call(rank, begin_ms, begin_ms + 5, name, number))
    return found


@pytest.mark.parametrize("name", ["backward", "all_reduce"])
def test_a_straggler_is_last_in_most_steps_and_late(name: str) -> None:
    """How late counts from the next to last: that is what all others wait for this one alone."""
    events = steps([5, 4, 6, -1], others_ms=1, name=name)
    assert timeline.stragglers(events, ()) == [Straggler(1, 3, 4, pytest.approx(0.004))]


@pytest.mark.parametrize(
    ("late_ms", "others_ms"),
    [([5, 5], 0), ([0.5] * 6, 0), ([1.5] * 6, 0), ([5, 5, -1, -1], 0), ([5] * 6, 4.5)],
    ids=["two steps", "less than 1 ms", "less than a tenth of a step", "in half of them", "another is late too"],
)
def test_who_is_late_by_chance_or_a_little_is_no_straggler(late_ms: list[float], others_ms: float) -> None:
    """A mark needs evidence."""
    assert timeline.stragglers(steps(late_ms, others_ms), ()) == []


def test_with_a_trace_the_first_bucket_tells_who_is_late() -> None:
    """A rank can begin backward in time and still be slow in it."""
    events = steps([0, 0, 0])
    late = {0: 1, 1: 4, 2: 1.5}
    known = [
        Row(rank, (20 * n + late[rank]) * MS, (20 * n + 5) * MS, "communication", "all_reduce of bucket 0")
        for n in (1, 2, 3)
        for rank in late
    ]
    assert timeline.stragglers(events, known) == [Straggler(1, 3, 3, pytest.approx(0.0025))]


# Files ------------------------------------------------------------------------------------------------


def test_files_of_a_trace_have_one_zero_and_valid_events(tmp_path: Path) -> None:
    """One file per rank and one of all; spans and calls are threads of their own; times rise and are not negative."""
    run = run_of(
        Span(1, 0.002, "mine", 0.003), call(0, 5, 10), trace(0, *STEP, buckets=[[[8, 4], []]]), Result(1, 1.0, 0)
    )
    run.save_trace(tmp_path / "new" / "folder")
    files = {path.name: json.loads(path.read_text()) for path in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(files) == ["rank0.json", "rank1.json", "ranks.json"]
    for rank in (0, 1):
        events = files[f"rank{rank}.json"]["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {rank}"]
        assert all(e["ph"] in "MXsf" and type(e["tid"]) is int and e["ts"] >= 0 for e in events)
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert len(files["ranks.json"]["traceEvents"]) == sum(len(files[f"rank{r}.json"]["traceEvents"]) for r in (0, 1))
    mine = [event for event in files["rank1.json"]["traceEvents"] if event["ph"] == "X"]
    assert mine == [{"ph": "X", "cat": "span", "name": "mine", "pid": 1, "tid": 1, "ts": 2000.0, "dur": 1000.0}]
    others = files["rank0.json"]["traceEvents"]
    assert [e["args"] for e in others if e["name"] == "gloo:all_reduce"] == [{"bytes": 8}, {"bytes": 4}]
    assert [(e["ts"], e["tid"]) for e in others if e["name"] == "backward #1"] == [(5000.0, 2)]


def test_a_trace_replaces_that_of_a_larger_run(tmp_path: Path) -> None:
    """Files of ranks that this run has not would be taken for its own; what is no such file stays."""
    for name in ("rank7.json", "ranks.json", "notes.json"):
        (tmp_path / name).write_text("old")
    run_of(trace(0, *STEP)).save_trace(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.json", "rank0.json", "rank1.json", "ranks.json"]


def test_a_run_without_a_trace_refuses_to_save_one(tmp_path: Path) -> None:
    """The message says how to get one."""
    with pytest.raises(ValueError, match=r"no trace: launch\(\.\.\., trace=True\)"):
        run_of(Span(0, 0.1, "a", 0.2)).save_trace(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_saved_run_keeps_its_trace(tmp_path: Path) -> None:
    """Bytes survive JSON."""
    run = run_of(call(0, 5, 10), trace(0, *STEP))
    run.save(tmp_path / "run.jsonl")
    again = Run.load(tmp_path / "run.jsonl")
    assert again == run
    assert again.timeline == run.timeline != ()


def test_what_torch_writes_is_made_small_and_dated_from_the_launch() -> None:
    """Only what tells of work stays; the main thread is 0; microseconds count from the launch."""
    zero_ns = 1_790_857_026_000_000_000 + 500_000_000
    start_us = 500_000.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "ts": start_us, "pid": 7, "tid": 8, "args": {"name": "thread 8 (pt_gloo)"}},
        {"ph": "M", "name": "thread_name", "ts": start_us, "pid": 7, "tid": 8, "args": {"name": "thread 8 (ddplab rank 3)"}},
        {"ph": "M", "name": "process_name", "ts": start_us, "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": start_us, "dur": 1, "pid": "Spans", "tid": "P"},
        {"ph": "X", "cat": "cpu_op", "name": "b", "ts": start_us + 9, "dur": 1.5, "pid": 7, "tid": 7, "args": {"Ev Idx": 1}},
        {"ph": "X", "cat": "user_annotation", "name": "a", "ts": start_us + 3, "dur": 1, "pid": 7, "tid": 8, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": start_us + 4, "dur": 1, "pid": 0, "tid": 7, "args": {}},
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "ts": start_us + 9, "id": 5, "pid": 7, "tid": 7, "bp": "e"},
    ]  # fmt: skip
    text = json.dumps({"baseTimeNanoseconds": 1_790_857_026_000_000_000, "traceEvents": events})
    assert profiling.compact(text, 3, 7, zero_ns, part=2) == [
        {
            "ph": "M",
            "cat": "",
            "name": "thread_name",
            "pid": 3,
            "tid": 8,
            "ts": 0,
            "args": {"name": "thread 8 (pt_gloo)"},
        },
        {"ph": "X", "cat": "user_annotation", "name": "a", "pid": 3, "tid": 8, "ts": 3.0, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 3, "tid": 1_000_000_007, "ts": 4.0, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 3, "tid": 0, "ts": 9.0, "dur": 1.5},
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "pid": 3, "tid": 0, "ts": 9.0, "id": 302_000_005, "bp": "e"},
    ]
    assert profiling.compact("", 0, 7, 0) == []


def test_a_packed_trace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many events the first are kept, and fewer of them if these take too many bytes."""
    monkeypatch.setattr(profiling, "MAX_EVENTS", 3)
    few = profiling.pack([op("x", number, number + 1) for number in range(9)])
    assert [event["ts"] for event in timeline._Trace(Trace(0, 0.0, few)).events] == [0.0, 1e3, 2e3]
    monkeypatch.setattr(profiling, "MAX_EVENTS", 1_000)
    monkeypatch.setattr(profiling, "MAX_PACKED_BYTES", 2_000)
    packed = profiling.pack([op(f"operation {number * 7919 % 10_007}", number, number + 1) for number in range(1_000)])
    assert len(packed) <= 2_000
    kept = timeline._Trace(Trace(0, 0.0, packed)).events
    assert [event["ts"] for event in kept] == [1e3 * number for number in range(len(kept))]
    assert len(kept) > 50


# The picture ------------------------------------------------------------------------------------------


def many_steps(number: int) -> Run:
    return run_of(Began(0, 0.0), *(call(0, 20 * n, 20 * n + 10, number=n) for n in range(1, number + 1)), world_size=1)


def test_of_many_steps_the_last_are_drawn() -> None:
    """The text says which; few are drawn all, and a part that is asked for is drawn."""
    drawn = window(many_steps(50))
    assert (round(drawn.begin_s, 6), round(drawn.end_s, 6), drawn.words) == (0.93, 1.01, "steps 47 to 50 of 50")
    assert window(many_steps(3)) == (0.0, pytest.approx(0.07), "all 3 steps")
    assert repr(plots.timeline(many_steps(50))) == "timeline of 1 rank: steps 47 to 50 of 50"
    ax = Figure().add_subplot()
    assert plots.timeline(many_steps(50), begin_s=0.1, end_s=0.2, ax=ax) is None
    assert ax.get_xlim() == (0.1, 0.2)
    with pytest.raises(ValueError, match=r"begin_s before end_s, not 0\.2 and 0\.1"):
        plots.timeline(many_steps(50), begin_s=0.2, end_s=0.1)


def test_the_window_holds_whole_steps_of_the_traced_part() -> None:
    """A trace ends before a long run does: the last of its steps are drawn, from optimizer to optimizer."""
    calls = [call(0, 20 * n, 20 * n + 10, number=n) for n in range(1, 100)]
    seen = [note("Optimizer.step#SGD.step", 20 * n + 11, 20 * n + 13) for n in range(1, 11)]
    seen += [note("gloo:all_reduce", 20 * n + 5, 20 * n + 9, GLOO) for n in range(1, 11)]
    drawn = window(run_of(*calls, trace(0, *seen), world_size=1))
    assert (round(drawn.begin_s, 6), round(drawn.end_s, 6), drawn.words) == (0.133, 0.213, "steps 7 to 10 of 99")


def test_the_numbers_of_a_picture_count_waiting_once() -> None:
    """Milliseconds of each kind, of what lies in the window; waiting in backward is not backward."""
    run = run_of(call(0, 5, 10), trace(0, *STEP, buckets=[[[800_000, 400_000], []]]))
    told, other = numbers(run, window(run), [Straggler(1, 3, 3, 0.005)])
    assert told == {
        "rank": 0, "data ms": 1.0, "forward ms": 2.0, "backward ms": 4.0, "optimizer ms": 1.5, "waiting ms": 1.0,
        "communication ms": 2.5, "MB on the way": 1.2, "straggler": "",
    }  # fmt: skip
    assert other["straggler"] == "last in 3 of 3, 5 ms after the others (median)"


@pytest.mark.parametrize(
    "events",
    [[], [Began(0, 5.0), call(1, 1, 2, "init_process_group", 0)], [call(0, 4, None, "recv", 0)], steps([5] * 9)],
    ids=["nothing", "one began", "one call, for good", "a straggler"],
)
def test_a_partial_run_is_drawn_as_far_as_it_went(events: list[Event]) -> None:
    """Never an exception."""
    picture = plots.timeline(run_of(*events, world_size=3))
    assert picture is not None
    assert picture._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")
