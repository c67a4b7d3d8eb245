"""Task on the frame of a script."""

import os

import torch
import torch.distributed as dist

from ddplab.exercises.engine import Attempt, Wrong, stand_in, task

# World size, GPUs of each machine, and the local rank of each rank: the last two jobs have two machines.
JOBS = [(1, 0, [0], False), (2, 1, [0, 0], False), (3, 2, [0, 1, 0], True)]


@task("11.1", "The frame of a script")
def frame(attempt: Attempt) -> None:
    """``main(body, num_gpus)`` runs ``body(device)`` in a group, as torchrun says, and leaves it whatever happens."""
    for world_size, num_gpus, local_ranks, raises in JOBS:
        options = {"world_size": world_size, "backend": None, "trial": as_torchrun_would}
        told = attempt.results(num_gpus, local_ranks, raises, **options)
        machines = 1 + local_ranks[1:].count(0)
        where = f"with {world_size} rank{'s' * (world_size > 1)} on {machines} machine{'s' * (machines > 1)}"
        where += f" of {num_gpus} GPU{'s' * (num_gpus != 1)}"
        for rank, (seen, result, is_left) in enumerate(told):
            wanted = f"cuda:{local_ranks[rank]}" if num_gpus else "cpu"
            if not seen:
                raise Wrong(f"{where}, rank {rank} does not run the body")
            if len(seen) > 1:
                raise Wrong(f"{where}, rank {rank} runs the body {len(seen)} times")
            group_rank, size, device = seen[0]
            if group_rank is None:
                raise Wrong(f"{where}, rank {rank} runs the body without a process group")
            if (group_rank, size) != (rank, world_size):
                raise Wrong(f"{where}, rank {rank} is rank {group_rank} of {size} in its group")
            if device != wanted:
                why = "" if wanted == "cpu" else f", and has local rank {local_ranks[rank]}"
                raise Wrong(f"{where}, rank {rank} computes on {device}{why}: it should be {wanted}")
            if raises and result != "raised":
                raise Wrong(f"{where}, the error of the body does not come out of main: it ends as if all were well")
            if not raises and result != 10 * rank:
                raise Wrong(f"{where}, the body gives {10 * rank} on rank {rank}, and main gives {result}")
            if not is_left:
                raise Wrong(f"{where}, rank {rank} is still in the group after {'an error' if raises else 'the end'}")


class BodyError(Exception):
    """What the body raises."""


def as_torchrun_would(fn, num_gpus, local_ranks, raises):
    """What the body sees, what comes of ``main``, and whether the group is left. CUDA is pretended, only noted."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    os.environ["LOCAL_WORLD_SIZE"] = str(max(num_gpus, 1))
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # no rank may leave while another still connects to it
    torch.cuda.set_device = lambda device: None
    begin, seen = dist.init_process_group, []

    def init(*args, **options):
        told, size = options.get("rank", -1), options.get("world_size", -1)
        if told not in (-1, rank):
            raise Wrong(f"rank {rank} of {len(local_ranks)} begins the group as rank {told}: RANK says {rank}")
        if size not in (-1, len(local_ranks)):
            raise Wrong(f"rank {rank} begins a group of {size}: WORLD_SIZE says {len(local_ranks)}")
        begin(*args, **options)

    def body(device):
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (None, None)
        seen.append((*group, "cpu" if str(device).startswith("cpu") else str(device)))
        if raises:
            raise BodyError("image 17 has 4 channels")
        return 10 * rank

    stand_in(fn, "init_process_group", init)
    try:
        result = fn(body, num_gpus)
    except BodyError:
        result = "raised"
    return seen, result, not dist.is_initialized()
