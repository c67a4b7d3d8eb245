"""What a rank tells of its model: the bytes that it keeps, and the buckets of its gradients. Runs in the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["Buckets", "buckets_of", "cut", "memory_of"]

Buckets = list[list[tuple[str, int]]]  # name and bytes of each gradient, by bucket


def memory_of(model: Any, optimizer: Any) -> dict[str, int]:
    """The bytes that this rank keeps of a model and its optimizer, in a dict to be returned. Call it after a step.

    "parameters", "gradients" and "optimizer state" are the tensors of this rank alone: of FSDP2 its
    shards, of ``ZeroRedundancyOptimizer`` its part of the state. Buffers, activations, and the buckets into
    which DDP copies gradients (unless ``gradient_as_bucket_view=True``) are not among them; they are in
    "peak CUDA memory", ``torch.cuda.max_memory_allocated()``, where the model is on a CUDA device; elsewhere in
    "peak resident set", the most that the operating system has ever counted for this process: torch itself, and
    what the forkserver had loaded for all ranks, are in it too.

    >>> import torch
    >>> model = torch.nn.Linear(10, 10)
    >>> found = memory_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> found["parameters"], found["gradients"], found["optimizer state"]
    (440, 0, 0)
    """
    parameters = list(model.parameters())
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer keeps its part in .optim
    kept = [value for of_one in state.values() for value in of_one.values() if hasattr(value, "nbytes")]
    found = {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer state": sum(map(_bytes, kept)),
    }
    return found | _peak(next((p.device for p in parameters if p.is_cuda), None))


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes)


def _peak(cuda: Any) -> dict[str, int]:
    if cuda is not None:
        import torch

        return {"peak CUDA memory": torch.cuda.max_memory_allocated(cuda)}
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak resident set": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def buckets_of(ddp_model: Any) -> Buckets:
    """The buckets of a model in ``DistributedDataParallel``: of each, the name and bytes of every gradient in it.

    Call it in a rank after two steps or more, and return what it gives. Buckets and gradients come in the
    order in which they become ready in ``backward()``. At first DDP does not know that order and reduces all
    in one bucket; it forms the buckets in the second ``forward()``, from what the first ``backward()`` did.
    With ``find_unused_parameters=True`` it never does that: its buckets are cut before the first step,
    from the last parameter to the first, and within a bucket the order is that of the last step.

    Read from the logging data of DDP (torch 2.11 to 2.14), which it calls a prototype. Raises ``TypeError``
    for what is no DDP model and ``RuntimeError`` where the buckets are not known yet.
    """
    if not hasattr(ddp_model, "_get_ddp_logging_data"):
        raise TypeError(f"buckets_of takes a model in DistributedDataParallel, not {type(ddp_model).__name__}")
    ddp_model.logger.set_runtime_stats_and_log()  # else the data of the step before
    told = ddp_model._get_ddp_logging_data()
    ignored = ddp_model.parameters_to_ignore
    named = ddp_model.module.named_parameters()
    sizes = [(name, p.nbytes) for name, p in named if p.requires_grad and name not in ignored]
    if text := told.get("rebuilt_per_bucket_param_indices"):
        return [[sizes[int(index)] for index in bucket.split()] for bucket in text.split(",")]
    if not told.get("find_unused_parameters"):
        raise RuntimeError("buckets_of: DDP forms its buckets in the second forward(); call it after two steps or more")
    ready = [int(index) for index in told.get("prev_iteration_grad_ready_order_indices", "").split(",") if index]
    return cut(sizes, [int(size) for size in told["bucket_sizes"].split(",")], ready)


def cut(parameters: Sequence[tuple[str, int]], bucket_bytes: Sequence[int], ready: Sequence[int] = ()) -> Buckets:
    """Parameters cut into buckets of ``bucket_bytes``, from the last parameter to the first.

    Within a bucket those come first that come first in ``ready``, a list of places in ``parameters``.
    Raises ``RuntimeError`` if the bytes do not fit.

    >>> cut([("a", 4), ("b", 8), ("c", 4)], [4, 12], ready=[2, 0, 1])
    [[('c', 4)], [('a', 4), ('b', 8)]]
    """
    left, found = list(range(len(parameters))), []
    rank_of = {place: at for at, place in enumerate(ready)}
    for size in bucket_bytes:
        bucket: list[int] = []
        while left and sum(parameters[place][1] for place in bucket) < size:
            bucket.append(left.pop())
        if sum(parameters[place][1] for place in bucket) != size:
            raise RuntimeError(f"buckets_of: no parameters in a row have the {size} bytes of a bucket of this model")
        bucket.sort(key=lambda place: rank_of.get(place, len(parameters)))
        found.append([parameters[place] for place in bucket])
    return found
