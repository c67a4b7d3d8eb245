"""Ranks that hang, each way for real, and what the report says of them."""

import ctypes
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

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

    assert "rank 0 waits for all_reduce #1 (shape (2,), float32, SUM) since" in hang(wait).report()


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


def fail_on_rank_1(act: Any) -> Run:
    """The run of two ranks of which rank 1 does ``act`` while rank 0 waits for it; rank 1 is seen to fail first."""

    def fn() -> None:
        if dist.get_rank() == 1:
            act()
        dist.all_reduce(torch.ones(2))

    run = launch(fn, backend="gloo", timeout_s=20, allow_failure=True, view="quiet")
    assert [(failure.rank, failure.role) for failure in run.failures] == [(1, "root"), (0, "echo")], run.report()
    assert "all_reduce #1 (shape (2,), float32, SUM) is not complete: rank 1 made 0 collective calls" in run.report()
    return run


def test_input_in_a_rank_fails_at_once_and_says_why() -> None:
    """A rank's stdin is empty: it does not hang, what was asked is shown, and the advice names the cause."""
    run = fail_on_rank_1(lambda: input("go on? "))
    assert (run.failures[0].type, run.output(1)) == ("EOFError", "go on? ")
    assert "next: ranks have no keyboard: give launch what input() would ask for" in run.report()


def test_a_breakpoint_in_a_rank_ends_at_once_and_says_why() -> None:
    """pdb finds no keyboard and quits, with an error in the line after it; the advice is not to mend that line."""
    run = fail_on_rank_1(lambda: breakpoint())
    assert run.failures[0].type == "BdbQuit"
    assert "(Pdb)" in run.output(1)
    assert "next: ranks have no keyboard, so a debugger ends at once" in run.report()


class Fatal(Dataset[torch.Tensor]):
    """A data set that does ``act`` in place of giving its first sample."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        self.act()
        return torch.ones(1)

    def load(self, **options: Any) -> None:
        """Ask a worker for the sample."""
        next(iter(DataLoader(self, num_workers=1, **options)))


@pytest.mark.parametrize(
    "act", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(3)], ids=["SIGKILL", "exit"]
)
def test_a_dataloader_worker_that_died_is_the_cause(act: Any) -> None:
    """Rank 1 fails in the line where it asked for the sample; the advice looks at the worker, not at that line."""
    run = fail_on_rank_1(Fatal(act).load)
    assert run.failures[0].message.startswith("DataLoader worker (pid")
    assert "next(iter(DataLoader(self, num_workers=1, **options)))" in run.report()
    assert "next: a DataLoader worker died: the line named is only where its rank was" in run.report()


def test_a_dataloader_worker_that_raises_is_told_with_the_line_of_the_dataset() -> None:
    """torch raises it again in the rank; the traceback of the worker is part of its text."""
    run = fail_on_rank_1(Fatal(lambda: {}["no such sample"]).load)
    assert 'Fatal(lambda: {}["no such sample"])' in run.report()
    assert "next: the last lines of the traceback name the line of the dataset" in run.report()


def test_a_dataloader_worker_that_hangs_is_what_its_rank_waits_for() -> None:
    """Rank 0 waits in all_reduce for rank 1, and rank 1 for its worker; the worker is ended with its rank."""

    def load() -> None:
        if dist.get_rank() == 1:
            Fatal(lambda: time.sleep(FOREVER_S)).load()
        dist.all_reduce(torch.ones(2))

    report = hang(load).report()
    assert "rank 0 waits in all_reduce #1" in report
    assert "in torch's _BaseDataLoaderIter.__next__" in report
    assert "next: rank 1 waits for a DataLoader, and so for its workers if it has any. With num_workers=0" in report


def test_a_time_out_of_a_dataloader_makes_an_error_of_a_hang() -> None:
    """What the advice promises: the rank fails, with torch's text."""
    run = fail_on_rank_1(lambda: Fatal(lambda: time.sleep(FOREVER_S)).load(timeout=1))
    assert run.failures[0].message == "DataLoader timed out after 1 seconds"
    assert "next: a DataLoader worker gave no batch in time" in run.report()


def test_a_rank_that_is_late_lets_those_that_waited_raise() -> None:
    """The time-out of the group is over in rank 0, which was in time; the advice is to look for the late one."""

    def late() -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))
        if dist.get_rank() == 1:
            time.sleep(FOREVER_S)
        dist.all_reduce(torch.ones(2))

    run = launch(late, backend=None, timeout_s=20, allow_failure=True, view="quiet")
    assert [(failure.rank, failure.role) for failure in run.failures] == [(0, "root"), (1, "stopped")]
    assert "Timed out waiting 500ms" in run.failures[0].message
    assert "next: find the rank that came late, or never" in run.report()


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


def test_batched_sends_work_as_without_ddplab() -> None:
    """Was a bug: ``P2POp`` compares isend and irecv by identity, and they had become two functions each."""

    def exchange() -> float:
        peer = 1 - dist.get_rank()
        mine, theirs = torch.full((2,), float(dist.get_rank())), torch.zeros(2)
        ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return theirs.sum().item()

    run = launch(exchange, world_size=2, backend="gloo", view="quiet", timeout_s=20)
    assert run.results == [2.0, 0.0]
    assert {call.name for call in run.collectives} >= {"batch_isend_irecv"}
