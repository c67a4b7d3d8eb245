"""Calls between workers on real ranks: what was asked of whom, and that nothing else changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from ddplab import launch, plots
from ddplab.plots.rpc import messages, workers


def add(a: Any, b: Any) -> Any:
    """What the others are asked to do."""
    return a + b


def work(names: list[str]) -> Any:
    """Rank 0 asks the last rank in all ways; gives what it was answered."""
    rank, last = int(os.environ["RANK"]), len(names) - 1
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names))
    found: Any = None
    if rank == 0:
        to = names[last]
        found = [rpc.rpc_sync(to, add, args=(1, 2))]
        futures = [
            rpc.rpc_async(last, add, args=(3, 4)),
            rpc.rpc_async(rpc.get_worker_info(to), add, (5, 6), None, 60.0),
        ]
        there = rpc.remote(to=to, func=torch.add, args=(torch.ones(1), 7))
        found += [futures[1].wait(), *torch.futures.wait_all(futures), int(there.to_here())]
        rpc.rpc_async(to, add, args=(8, 9))  # nobody waits for it
        try:
            rpc.rpc_sync(to, add, args=(1, "one"))
        except TypeError as error:
            found.append(type(error).__name__)
    rpc.shutdown()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls_between_workers_are_told(world_size: int) -> None:
    """Each with its target, function and wait, whether it was named, numbered or looked up; the answers are the same."""
    names = [f"worker:{rank}" for rank in range(world_size)]
    run = launch(work, names, world_size=world_size, backend=None, view="quiet")
    assert run.results == [[3, 11, 7, 11, 8, "TypeError"], *[None] * (world_size - 1)]
    assert workers(run) == dict(enumerate(names))
    found = messages(run)
    assert {(one.caller, one.callee) for one in found} == {(0, world_size - 1)}
    assert [(one.kind, one.function, one.end_s is not None) for one in found] == [
        ("rpc_sync", "add", True),
        ("rpc_async", "add", True),
        ("rpc_async", "add", True),
        ("remote", "add", True),
        ("rpc_async", "add", False),
        ("rpc_sync", "add", True),
    ]
    for one in found:
        assert one.end_s is None or one.begin_s <= (one.wait_s or 0.0) <= one.end_s
    assert repr(plots.rpc(run)) == f"6 calls between {world_size} workers"


class Counter:
    """What an RRef refers to."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, by: int) -> int:
        """Count."""
        self.count += by
        return self.count


def test_methods_of_an_rref_are_told_by_their_names() -> None:
    """Not by those of the functions with which torch asks for them, and for the type of the object."""

    def methods() -> list[int]:
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        counts = []
        if rank == 0:
            there = rpc.remote("worker1", Counter)
            counts = [there.rpc_sync().add(1), there.rpc_async().add(2).wait(), there.remote().add(3).to_here()]
        rpc.shutdown()
        return counts

    run = launch(methods, backend=None, view="quiet")
    assert run.results == [[1, 3, 6], []]
    told = [(one.kind, one.function) for one in messages(run)]
    assert told == [("remote", "Counter"), ("rpc_sync", "add"), ("rpc_async", "add"), ("remote", "add")]
