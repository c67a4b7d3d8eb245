"""Ranks whose collective calls do not fit together."""

import torch
import torch.distributed as dist

from ddplab.faults.fault import fault

CATEGORY = "collective_mismatch"


@fault(
    CATEGORY,
    did="rank 1 gives more elements than rank 0",
    sees="hangs or returns or RuntimeError: … or echo",
    root=None,
    cause="collective-shape",
)
def shape_larger():
    x = torch.ones(2 + dist.get_rank())
    dist.all_reduce(x)


@shape_larger.cured_by("tensors of one shape on all ranks")
def shape_larger_repaired():
    x = torch.ones(2)
    dist.all_reduce(x)


@fault(
    CATEGORY,
    did="rank 0 sums, rank 1 takes the largest",
    sees="returns …",
    right=([3.0] * 4, [3.0] * 4),
    cause="reduce-op",
)
def reduce_op():
    x = torch.ones(4) + dist.get_rank()
    dist.all_reduce(x, op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
    return x.tolist()


@reduce_op.cured_by("the same op on all ranks")
def reduce_op_repaired():
    x = torch.ones(4) + dist.get_rank()
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    return x.tolist()
