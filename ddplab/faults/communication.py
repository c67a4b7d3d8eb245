"""Ranks that lose each other."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddplab.faults.fault import fault

CATEGORY = "communication"


@fault(
    CATEGORY,
    did="rank 1 raises while rank 0 waits for it",
    sees={0: "echo", 1: "ValueError: no data"},
    root=1,
    cause="peer-raised",
)
def peer_raises():
    if dist.get_rank() == 1:
        raise ValueError("no data")
    dist.all_reduce(torch.ones(2))


@peer_raises.cured_by("mend the line of the rank that failed first; the others only lost it")
def peer_raises_repaired():
    dist.all_reduce(torch.ones(2))


@fault(
    CATEGORY,
    did="rank 1 leaves with sys.exit while rank 0 waits for it",
    sees={0: "echo", 1: "SystemExit: sys.exit(3)"},
    root=1,
    cause="peer-raised",
)
def peer_exits():
    if dist.get_rank() == 1:
        raise SystemExit(3)
    dist.all_reduce(torch.ones(2))


@peer_exits.cured_by("all ranks leave at the same place, after the last collective")
def peer_exits_repaired():
    dist.all_reduce(torch.ones(2))


@fault(
    "collective_mismatch",
    did="rank 1 returns early: it has fewer batches, say",
    sees={0: "RuntimeError: …", 1: "returns"},
    cause="call-missing",
)
def peer_returns():
    for _ in range(2 - dist.get_rank()):
        dist.all_reduce(torch.ones(2))


@peer_returns.cured_by("as many calls on every rank: agree on the smallest number first")
def peer_returns_repaired():
    fewest = torch.tensor(2 - dist.get_rank())
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    for _ in range(fewest.item()):
        dist.all_reduce(torch.ones(2))


@fault(
    "resource",
    did="rank 1 is killed while rank 0 waits for it",
    sees={0: "echo", 1: "SIGKILL"},
    root=1,
    cause="killed",
)
def peer_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


@peer_killed.cured_by("find out who killed it: out of memory, a scheduler's limit, a person")
def peer_killed_repaired():
    dist.all_reduce(torch.ones(2))


@fault(
    CATEGORY,
    did="rank 1 is stopped, as by Ctrl-Z or a debugger",
    sees={0: "hangs in all_reduce", 1: "hangs"},
    root=None,
    cause="peer-stopped",
    timeout_s=1.5,
)
def peer_stopped():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))


@peer_stopped.cured_by("let it go on (SIGCONT); a breakpoint goes into all ranks or none")
def peer_stopped_repaired():
    dist.all_reduce(torch.ones(2))


@fault(
    CATEGORY,
    did="rank 0 waits for a message that nobody sends",
    sees={0: "hangs in recv", 1: "hangs in recv"},
    root=None,
    cause="nobody-sends",
    timeout_s=1.5,
)
def both_receive():
    x = torch.ones(2)
    dist.recv(x, src=1 - dist.get_rank())
    dist.send(x, dst=1 - dist.get_rank())


@both_receive.cured_by("one sends while the other receives; or isend and irecv, and then wait")
def both_receive_repaired():
    x = torch.ones(2)
    sent = dist.isend(x.clone(), dst=1 - dist.get_rank())
    dist.recv(x, src=1 - dist.get_rank())
    sent.wait()


@fault(
    CATEGORY,
    did="rank 1 needs longer to its call than the group's time-out",
    sees={0: "RuntimeError: …Timed out waiting 1000ms for recv operation", 1: "echo"},
    cause="rank-late",
    backend=None,
)
def group_timeout():
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(10)
    dist.all_reduce(torch.ones(2))


@group_timeout.cured_by("a longer timeout=, or less work between two calls")
def group_timeout_repaired():
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    dist.all_reduce(torch.ones(2))


@fault(
    CATEGORY,
    did="rank 0 gives up waiting for a message after a time-out",
    sees={0: "RuntimeError: …Timed out waiting 500ms for recv operation", 1: "echo"},
    cause="rank-late",
)
def recv_timeout():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.irecv(x, src=1).wait(timedelta(seconds=0.5))
    else:
        time.sleep(10)


@recv_timeout.cured_by("send what is waited for")
def recv_timeout_repaired():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.irecv(x, src=1).wait(timedelta(seconds=5))
    else:
        dist.send(x, dst=0)


@fault(
    "collective_mismatch",
    did="rank 1 does not come to a monitored_barrier",
    sees={0: "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms", 1: "echo"},
    cause="barrier-missed",
)
def monitored_barrier():
    if dist.get_rank() == 1:
        time.sleep(10)
    dist.monitored_barrier(timeout=timedelta(seconds=0.5))


@monitored_barrier.cured_by("rank 0 has named the rank that is missing: look there")
def monitored_barrier_repaired():
    dist.monitored_barrier(timeout=timedelta(seconds=5))


@fault(
    CATEGORY,
    did="rank 1 is late at a barrier, by more than the time-out of the group",
    sees={0: "RuntimeError: …Timed out waiting 500ms", 1: "echo"},
    cause="rank-late",
    backend=None,
)
def barrier_timeout():
    dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        time.sleep(10)  # downloads the data, say
    dist.barrier()


@barrier_timeout.cured_by("a longer timeout= for the group that waits")
def barrier_timeout_repaired():
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    dist.barrier()


@fault(
    "collective_mismatch",
    did="a failure is caught, and the same group is used again",
    sees={0: "RuntimeError: Application timeout caused pair closure", 1: "RuntimeError: … or echo"},
    root=None,
    cause="gloo-pair-closed",
    backend=None,
)
def used_after_failure():
    dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        time.sleep(1)
    except RuntimeError as error:
        print("rank 0 goes on after", type(error).__name__)
    dist.all_reduce(torch.ones(2))


@used_after_failure.cured_by("after a failure all ranks make a new group, or the job starts again from a checkpoint")
def used_after_failure_repaired():
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(2))
