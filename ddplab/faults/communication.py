"""Ranks that lose each other."""

import torch
import torch.distributed as dist

from ddplab.faults.fault import fault

CATEGORY = "communication"


@fault(
    CATEGORY,
    did="rank 1 raises while rank 0 waits for it",
    sees={0: "echo", 1: "ValueError: no data"},
    root=1,
    cause="peer-raises",
)
def peer_raises():
    if dist.get_rank() == 1:
        raise ValueError("no data")
    dist.all_reduce(torch.ones(2))


@peer_raises.cured_by("mend the line of the rank that failed first; the others only lost it")
def peer_raises_repaired():
    dist.all_reduce(torch.ones(2))
