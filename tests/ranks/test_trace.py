"""``launch(..., trace=True)`` on real ranks: what the timeline knows, what is kept out, and how it is bounded."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddplab import Run, launch, plots, span
from ddplab.events import Trace

KINDS = {"data", "forward", "backward", "optimizer", "communication", "waiting", "span"}


def train(num_steps: int = 4, fails: bool = False) -> None:
    """Steps of DDP with two buckets from the second step on."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset

    model = DDP(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(8 * num_steps, 512)), batch_size=8)):
        with span("step"):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        if fails and number == 2 and dist.get_rank() == 1:
            raise ValueError("bad batch")
    dist.all_reduce(torch.ones(3))


def traced(fn: Any, *args: Any, **options: Any) -> Run:
    """The traced run of ``fn``, whether it ends well or not."""
    return launch(fn, *args, **{"backend": "gloo", "trace": True, "allow_failure": True, "view": "quiet", **options})


def ranks_with_trace(run: Run) -> set[int]:
    """Which ranks told a trace."""
    return {event.rank for event in run.events if isinstance(event, Trace)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_kind_of_work_is_seen_on_every_rank(world_size: int) -> None:
    """With the bytes of every bucket; in one step a rank forwards before it goes backward, and then optimizes."""
    run = traced(train, world_size=world_size)
    assert run.ok
    for rank in range(world_size):
        rows = [row for row in run.timeline if row.rank == rank]
        assert {row.kind for row in rows} >= KINDS - {"waiting"}
        assert all(0 <= row.begin_s <= row.end_s <= run.elapsed_s for row in rows)
        names = Counter((row.name, row.num_bytes) for row in rows if row.kind == "communication" and row.num_bytes)
        assert names == {
            ("all_reduce of bucket 0", 2_101_248): 1,
            ("all_reduce of bucket 0", 1_050_624): 3,
            ("all_reduce of bucket 1", 1_050_624): 3,
            ("all_reduce", 12): 1,
        }
        order = [row.kind for row in rows if row.kind in ("forward", "backward") or row.name == "SGD.step"]
        assert order == ["forward", "backward", "optimizer"] * 4
        for backward in (row for row in rows if row.kind == "backward"):
            buckets = [row for row in rows if "bucket" in row.name and backward.begin_s < row.begin_s < backward.end_s]
            assert buckets  # clocks of the trace and of the calls agree
    assert repr(plots.timeline(run)) == f"timeline of {world_size} rank{'s' * (world_size > 1)}: all 4 steps"


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_noise_of_the_profiler_is_kept_out(start_method: str, tmp_path: Path) -> None:
    """Ours and that of a profiler the learner starts, which works as ever; the rank's own lines stay."""

    def use_profiler() -> int:
        torch.ones(3).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3).sum()
        print("seen", file=sys.stderr)
        return sum(event.name == "aten::sum" for event in profile.events())

    for trace in (True, False):
        run = traced(use_profiler, start_method=start_method, trace=trace)
        assert run.results == [1, 1]
        assert run.output() == "rank 0 ! seen\nrank 1 ! seen"


def test_a_rank_that_raises_has_its_trace_and_one_that_is_killed_has_none(tmp_path: Path) -> None:
    """Its peers, which fail for want of it, have theirs; the root cause is told as without a trace."""
    run = traced(train, 4, True)
    assert run.failures[0].rank == 1 and run.failures[0].type == "ValueError"
    assert ranks_with_trace(run) == {0, 1}
    assert [row.name for row in run.timeline if row.rank == 1 and row.kind == "optimizer"].count("SGD.step") == 3

    def die() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    run = traced(die)
    assert ranks_with_trace(run) == {0}
    run.save_trace(tmp_path)
    assert json.loads((tmp_path / "rank1.json").read_text())["traceEvents"]


def test_files_of_a_real_trace_are_valid_and_aligned(tmp_path: Path) -> None:
    """Every event is well-formed and in order; the same barrier ends at nearly the same time in both files."""
    run = traced(train)
    run.save_trace(tmp_path)
    ends = []
    for rank in (0, 1):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert all(e["ph"] in "MXsf" and type(e["tid"]) is int and e["ts"] >= 0 for e in events)
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
        assert {event["cat"] for event in events if event["ph"] == "X"} >= {"cpu_op", "user_annotation", "span", "call"}
        last = [event for event in events if event["name"] == "gloo:all_reduce"][-1]
        ends.append(last["ts"] + last["dur"])
        own = [e for e in events if e["ph"] == "X" and e["cat"] == "call" and e["name"].startswith("all_reduce")]
        inner = [e for e in events if e["name"] == "c10d::allreduce_"][-1]
        assert own[-1]["ts"] <= inner["ts"] + 1_000 and inner["ts"] <= own[-1]["ts"] + own[-1]["dur"] + 1_000
    assert abs(ends[0] - ends[1]) < 200_000


def test_a_trace_ends_by_itself() -> None:
    """After 1,000 calls or some more, which the timeline has all; the function goes on as before."""

    def many(number: int) -> int:
        for _ in range(number):
            dist.all_reduce(torch.ones(3))
        return number

    run = traced(many, 10_000, world_size=1)
    assert run.results == [10_000]
    seen = [row for row in run.timeline if row.kind == "communication"]
    assert 1_000 < len(seen) < 5_000
    assert {row.num_bytes for row in seen[:-1]} == {12}


def test_a_loop_of_tiny_operations_stays_in_bounds() -> None:
    """A million operations in a second or so would take some gigabytes, and twenty seconds at the end."""

    def loop() -> int:
        import resource

        x = torch.ones(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(1_000_000):
            x = x + x
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    run = traced(loop, world_size=1)
    assert run.results[0] < 1_400_000  # kilobytes
    assert ranks_with_trace(run) == {0}


def test_workers_of_a_data_loader_do_not_record() -> None:
    """A child that is forked while the profile runs has nobody to stop it."""

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            def own_kilobytes() -> int:
                with open("/proc/self/status") as file:
                    return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

            x, before = torch.ones(1), own_kilobytes()
            for _ in range(100_000):
                x = x + x
            return own_kilobytes() - before

    def load() -> list[int]:
        return [int(grown) for grown in torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=1)]

    run = traced(load, world_size=1)
    assert max(run.results[0]) < 10_000


def test_trace_is_checked() -> None:
    """Only yes or no."""
    with pytest.raises(TypeError, match="trace is True or False, not 'yes'"):
        launch(train, trace="yes")  # type: ignore[arg-type]


def tiny(number: int, fails: bool = False) -> int:
    """Many operations, which take their time to be packed."""
    x = torch.ones(2)
    for _ in range(number):
        x = x + 1
    if fails:
        raise ValueError("after all")
    return number


def test_a_rank_has_returned_before_its_trace_is_packed() -> None:
    """Was a bug: ranks that had returned in time timed out, and were found in no line of the learner's."""
    run = traced(tiny, 40_000, world_size=2, timeout_s=3.0)
    assert run.results == [40_000] * 2
    assert ranks_with_trace(run) == {0, 1}


def test_ranks_that_raise_have_time_to_pack_their_traces() -> None:
    """Was a bug: they were ended after five seconds, and left files."""
    run = traced(tiny, 40_000, True, world_size=4)
    assert [failure.type for failure in run.failures] == ["ValueError"] * 4
    assert ranks_with_trace(run) == {0, 1, 2, 3}
    assert run.receipt is not None
    assert run.receipt.clean, run.receipt


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_profiler_of_the_learner_ends_the_trace_and_works(where: str) -> None:
    """Was a bug: torch.autograd's profiler, or torch.profiler in a thread, ended the rank by SIGSEGV."""

    def use_another() -> int:
        tiny(100)
        seen: list[int] = []

        def work() -> None:
            with torch.autograd.profiler.profile() as profile:
                tiny(10)
            seen.append(len(profile.function_events))

        if where == "main thread":
            work()
        else:
            thread = threading.Thread(target=work)
            thread.start()
            while thread.is_alive():
                thread.join(0.05)
        return seen[0]

    run = traced(use_another, world_size=1)
    assert run.results[0] > 10
    assert ranks_with_trace(run) == {0}
