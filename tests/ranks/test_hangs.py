"""Ranks that hang, each way for real, and what the report says of them."""

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplab import Run, launch

FOREVER_S = 1000


def hang(fn: Any, world_size: int = 2, **options: Any) -> Run:
    """The run of a function that does not end; it is stopped after a second."""
    run = launch(
        fn, world_size=world_size, timeout_s=1, allow_failure=True, view="quiet", **({"backend": "gloo"} | options)
    )
    assert run.failures[0].type == "Timeout", run.report()
    return run


def test_a_rank_that_skips_a_collective_is_named() -> None:
    """Two ranks wait in call 2; the third made one call, and its line is shown."""

    def skip() -> None:
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 2:
            time.sleep(FOREVER_S)
        dist.all_reduce(torch.ones(3))

    report = hang(skip, 3).report()
    assert "ranks 0, 1 wait in all_reduce #2 (shape (3,), float32, SUM) since" in report
    assert "rank 2 is at test_hangs.py, line" in report
    assert "time.sleep(FOREVER_S)" in report
    assert "all_reduce #2 (shape (3,), float32, SUM) is not complete: rank 2 made 1 collective call" in report


def test_two_ranks_in_different_collectives_are_told_apart() -> None:
    """all_reduce against broadcast, both call 1."""

    def differ() -> None:
        x = torch.ones(3)
        dist.all_reduce(x) if dist.get_rank() == 0 else dist.broadcast(x, 0)
        dist.barrier()

    assert "collective call 1 differs: rank 0 has all_reduce, rank 1 has broadcast" in hang(differ).report()


def test_sum_against_max_is_found_though_nothing_fails() -> None:
    """The run is good as far as torch knows; the finding says that its numbers are wrong."""

    def differ() -> None:
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.SUM if dist.get_rank() == 0 else dist.ReduceOp.MAX)

    run = launch(differ, backend="gloo", view="quiet")
    assert run.findings == (
        "all_reduce #1: rank 0 has SUM, rank 1 has MAX. No error is raised, and the numbers are wrong",
    )


def test_different_shapes_are_named_whatever_gloo_makes_of_them() -> None:
    """One rank may return stale data, fail or abort; the shapes tell why."""

    def differ() -> None:
        dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 2))
        dist.barrier()

    run = launch(differ, backend="gloo", timeout_s=3, allow_failure=True, view="quiet")
    told = {call.rank for call in run.collectives if call.number == 1}
    if told == {0, 1}:  # a rank that aborts tells nothing
        assert any("all_reduce #1: rank 0 has (4,), rank 1 has (2,)" in finding for finding in run.findings)
    assert not run.ok


def test_an_extra_batch_waits_in_backward() -> None:
    """With uneven numbers of batches the rank with more waits for gradients that never come."""

    def uneven() -> None:
        model = DDP(nn.Linear(2, 2))
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()
        time.sleep(FOREVER_S)

    report = hang(uneven).report()
    assert "rank 1 waits in backward #3, where DDP averages gradients, since" in report
    assert "backward #3 is not complete: rank 0 made 2 backward calls" in report


def test_a_forward_on_rank_0_only_is_shown_in_ddp() -> None:
    """DDP's forward sends buffers to ranks that are not there."""

    def evaluate() -> None:
        model = DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model(torch.ones(4, 2)).sum().backward()
        if dist.get_rank() == 0:
            model(torch.ones(4, 2))
        dist.barrier()

    report = hang(evaluate).report()
    assert "in torch's DistributedDataParallel.forward" in report
    assert "rank 1 waits in barrier #1" in report


def test_a_receive_without_a_send_names_the_peer() -> None:
    """recv says from which rank; the peer is at its own line."""

    def lonely() -> None:
        dist.recv(torch.ones(2), 1) if dist.get_rank() == 0 else time.sleep(FOREVER_S)

    assert "rank 0 waits in recv from rank 1 (shape (2,), float32) since" in hang(lonely).report()


def test_a_wait_for_unfinished_work_is_told_as_such() -> None:
    """async_op=True returns at once; it is the wait that hangs."""

    def wait() -> None:
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert work is not None
            work.wait()
        time.sleep(FOREVER_S)

    assert "rank 0 waits in wait of all_reduce #1 (shape (2,), float32, SUM) since" in hang(wait).report()


@pytest.mark.parametrize(
    ("stall", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), "its process is stopped, as by SIGSTOP"),
        (lambda: ctypes.PyDLL(None).sleep(FOREVER_S), "it sleeps or waits in native code that does not let go"),
    ],
    ids=["SIGSTOP", "GIL"],
)
def test_a_rank_that_cannot_answer_is_told_with_what_the_system_knows(stall: Any, text: str) -> None:
    """Stopped, or holding the GIL; and nothing is claimed about its calls."""

    def silent() -> None:
        if dist.get_rank() == 1:
            stall()
        dist.barrier()

    report = hang(silent).report()
    assert f"rank 1 did not answer: {text}" in report
    assert "not complete" not in report


def test_a_group_made_on_one_rank_only_waits_in_new_group() -> None:
    """new_group is a call that all ranks make."""

    def alone() -> None:
        dist.new_group([0]) if dist.get_rank() == 0 else dist.barrier()

    assert "rank 0 waits in new_group since" in hang(alone).report()


def test_init_with_a_missing_rank_waits_in_init_process_group() -> None:
    """With backend=None one rank never joins."""

    def missing() -> None:
        dist.init_process_group("gloo") if os.environ["RANK"] == "0" else time.sleep(FOREVER_S)

    assert "rank 0 waits in init_process_group since" in hang(missing, backend=None).report()


def test_rpc_with_an_absent_peer_waits_in_init_rpc() -> None:
    """init_rpc waits for all workers, beyond its own time-out."""

    def absent() -> None:
        import torch.distributed.rpc as rpc

        if os.environ["RANK"] == "0":
            rpc.init_rpc("worker0", rank=0, world_size=2)
        time.sleep(FOREVER_S)

    assert "rank 0 waits in init_rpc since" in hang(absent, backend=None).report()


def test_a_peer_that_returned_early_is_named() -> None:
    """Was a bug: the rank that made its call alone was told to mend it, and nothing said that its peer had left."""

    def leaves() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    run = launch(leaves, backend="gloo", allow_failure=True, view="quiet")
    assert [(failure.rank, failure.role) for failure in run.failures] == [(0, "root")]
    assert "barrier #1 is not complete: rank 1 made 0 collective calls and returned" in run.report()
    assert "next: find the rank that ended or returned early" in run.report()


def test_noting_calls_changes_nothing() -> None:
    """Results, exceptions and the names of the functions are torch's own."""

    def use() -> tuple[list[float], str, str]:
        x = torch.ones(2)
        dist.all_reduce(x)
        group = dist.new_group([0, 1])
        dist.broadcast(x, 0, group=group)
        try:
            dist.all_reduce("no tensor")  # type: ignore[arg-type]
        except TypeError as error:
            return x.tolist(), dist.all_reduce.__name__, str(error)[:20]
        return [], "", ""

    run = launch(use, backend="gloo")
    assert run.results == [([2.0, 2.0], "all_reduce", run.results[0][2])] * 2
    mine = [(call.name, call.number, call.group) for call in run.collectives if call.rank == 0 and call.number]
    assert mine == [("all_reduce", 1, ""), ("broadcast", 1, "0, 1"), ("all_reduce", 2, "")]
