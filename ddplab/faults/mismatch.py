"""Ranks whose collective calls do not fit together."""

import threading

import torch
import torch.distributed as dist

from ddplab.faults.fault import fault

CATEGORY = "collective_mismatch"


@fault(
    CATEGORY,
    did="rank 1 gives more elements than rank 0",
    sees={0: "returns", 1: "RuntimeError: …"},
    root=1,
    cause="shape-differs",
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
    did="rank 1 gives fewer elements than rank 0, which only DETAIL notices in time",
    sees="RuntimeError: Detected mismatch between collectives on ranks",
    root=None,
    cause="shape-differs",
    env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
)
def shape_smaller():
    x = torch.ones(4 - dist.get_rank())
    dist.all_reduce(x)


@shape_smaller.cured_by("tensors of one shape on all ranks; pad what is shorter")
def shape_smaller_repaired():
    x = torch.zeros(4)
    x[: 4 - dist.get_rank()] = 1
    dist.all_reduce(x)


@fault(
    CATEGORY,
    did="rank 0 gives float32, rank 1 float64",
    sees={0: "SIGABRT", 1: "echo"},  # the larger message overruns the smaller buffer, and Gloo ends the process
    cause="gloo-size-differs",
)
def dtype():
    x = torch.ones(4, dtype=torch.float64 if dist.get_rank() else torch.float32)
    dist.all_reduce(x)


@dtype.cured_by("one dtype on all ranks")
def dtype_repaired():
    x = torch.ones(4, dtype=torch.float32)
    dist.all_reduce(x)


@fault(
    CATEGORY,
    did="rank 0 sums, rank 1 takes the largest",
    sees="returns [3.0, 3.0, 2.0, 2.0]",
    right=([3.0] * 4, [3.0] * 4),
    cause="reduce-op-differs",
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


@fault(
    CATEGORY,
    did="rank 0 calls all_reduce, rank 1 broadcast",
    sees={0: "hangs in all_reduce", 1: "hangs in broadcast"},
    root=None,
    cause="op-differs",
    timeout_s=1.5,
)
def other_collective():
    x = torch.ones(4)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=0)


@other_collective.cured_by("the same collective on all ranks")
def other_collective_repaired():
    x = torch.ones(4)
    dist.all_reduce(x)


@fault(
    CATEGORY,
    did="rank 1 reduces loss and accuracy in the other order",
    sees="returns {'loss': 2.5, 'accuracy': 2.5}",
    right=({"loss": 4.0, "accuracy": 1.0}, {"loss": 4.0, "accuracy": 1.0}),
    cause="order-differs",
)
def order():
    told = {"loss": torch.tensor(2.0), "accuracy": torch.tensor(0.5)}
    for name in sorted(told, reverse=dist.get_rank() == 1):
        dist.all_reduce(told[name])
    return {name: value.item() for name, value in told.items()}


@order.cured_by("one order on all ranks: sort by name, never by what differs")
def order_repaired():
    told = {"loss": torch.tensor(2.0), "accuracy": torch.tensor(0.5)}
    for name in sorted(told):
        dist.all_reduce(told[name])
    return {name: value.item() for name, value in told.items()}


@fault(
    CATEGORY,
    did="rank 1 skips a collective: its next one meets another call of rank 0",
    sees={0: "hangs in barrier", 1: "hangs in all_reduce"},
    root=None,
    cause="op-differs",
    timeout_s=1.5,
)
def skipped():
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(1))


@skipped.cured_by("every rank makes the call: take it out of the `if`")
def skipped_repaired():
    dist.barrier()
    dist.all_reduce(torch.ones(1))


@fault(
    CATEGORY,
    did="each rank names the other one as the source of the broadcast",
    sees="hangs in broadcast",
    root=None,
    cause="root-differs",
    timeout_s=1.5,
)
def root_rank():
    x = torch.tensor(float(dist.get_rank()))
    dist.broadcast(x, src=1 - dist.get_rank())


@root_rank.cured_by("the same src on all ranks")
def root_rank_repaired():
    x = torch.tensor(float(dist.get_rank()))
    dist.broadcast(x, src=0)


@fault(
    CATEGORY,
    did="rank 2 reduces in a group of its own, the others in the group of all",
    sees={0: "RuntimeError: … or echo", 1: "RuntimeError: … or echo", 2: "returns 1.0"},
    root=None,
    cause="call-missing",
    world_size=3,
)
def other_group():
    alone = dist.new_group([2])
    x = torch.ones(1)
    dist.all_reduce(x, group=alone if dist.get_rank() == 2 else None)
    return x.item()


@other_group.cured_by("the same group on all of its ranks")
def other_group_repaired():
    dist.new_group([2])
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@fault(
    CATEGORY,
    did='a tensor is still on the device "meta", where the backend does nothing',
    sees="RuntimeError: Tensor.item() cannot be called on meta tensors",
    root=None,
    cause="wrong-device",
)
def other_device():
    x = torch.ones(1, device="meta")
    dist.all_reduce(x)
    return x.item()


@other_device.cured_by("tensors on the device of the backend: the CPU for gloo, CUDA for nccl")
def other_device_repaired():
    x = torch.ones(1, device="cpu")
    dist.all_reduce(x)
    return x.item()


@fault(
    CATEGORY,
    did="rank 1 gathers an object that cannot be pickled",
    sees={0: "echo", 1: "TypeError: cannot pickle '_thread.lock' object"},
    root=1,
    cause="object-pickle",
)
def unpicklable_object():
    mine = {"rank": dist.get_rank(), "lock": threading.Lock() if dist.get_rank() else None}
    told = [None, None]
    dist.all_gather_object(told, mine)


@unpicklable_object.cured_by("send numbers and text, and make locks, files and connections on each rank")
def unpicklable_object_repaired():
    mine = {"rank": dist.get_rank()}
    told = [None, None]
    dist.all_gather_object(told, mine)


@fault(
    CATEGORY,
    did="the list that is gathered into is too short",
    sees="RuntimeError: ProcessGroupGloo::allgather: invalid output tensor list at index 0 (expected length 2, got 1)",
    root=None,
    cause="tensor-sizes",
)
def short_list():
    told = [torch.empty(2)]
    dist.all_gather(told, torch.ones(2))


@short_list.cured_by("a tensor for each rank")
def short_list_repaired():
    told = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.ones(2))


@fault(
    CATEGORY,
    did="a column of a matrix, which is not contiguous, is reduced in place",
    sees="returns [2.0, 2.0, 1.0]",
    right=([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]),
    cause="not-contiguous",
)
def column():
    x = torch.tensor([[1.0, 10.0]] * 3)
    dist.all_reduce(x[:, 0])
    return x[:, 0].tolist()


@column.cured_by("reduce a copy in one piece, then write it back")
def column_repaired():
    x = torch.tensor([[1.0, 10.0]] * 3)
    piece = x[:, 0].contiguous()
    dist.all_reduce(piece)
    x[:, 0] = piece
    return x[:, 0].tolist()
