"""What this machine can do: cores, devices, backends; and why a backend was chosen."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["choose_backend", "choose_start_method", "device", "max_world_size", "num_cores"]

START_METHODS = ("forkserver", "spawn")
FILES_PER_RANK, FILES_PER_LAUNCH = 8, 32  # that the launcher opens; a few more than were seen to do
MAX_WORLD_SIZE = 256


def num_cores() -> int:
    """How many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus() -> int:
    """How many CUDA devices torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def max_world_size() -> int:
    """How many ranks one launch may have: 256, or fewer where this process may open few more files; perhaps none."""
    try:
        import resource
    except ImportError:
        return 64
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_WORLD_SIZE
    free = limit - len(os.listdir("/dev/fd")) - FILES_PER_LAUNCH
    return max(0, min(MAX_WORLD_SIZE, free // FILES_PER_RANK))


def choose_start_method(asked: str) -> str:
    """``asked``, or for "auto" what ``DDPLAB_START_METHOD`` says, or the fastest that is safe here.

    The forkserver is safe on Linux: it forks a process that has done nothing but import. On macOS
    system libraries do not survive a fork, and Windows has none. Raises ``ValueError``.
    """
    source = f"start_method={asked!r}"
    if asked == "auto" and "DDPLAB_START_METHOD" in os.environ:
        asked = os.environ["DDPLAB_START_METHOD"]
        source = f"the environment variable DDPLAB_START_METHOD={asked!r}"
    if asked == "auto":
        return "forkserver" if sys.platform == "linux" else "spawn"
    if asked not in START_METHODS:
        why = " (a forked kernel breaks CUDA, threads and Jupyter's sockets)" if asked == "fork" else ""
        raise ValueError(f'{source} is not one of "auto", "forkserver", "spawn"{why}')
    if asked == "forkserver" and sys.platform == "win32":
        raise ValueError(f'{source}: Windows has no forkserver; use "spawn"')
    return asked


def choose_backend(asked: str | None, world_size: int) -> tuple[str | None, str]:
    """The backend for ``world_size`` ranks and the reason in one line. Raises ``ValueError``.

    >>> choose_backend("gloo", 2)
    ('gloo', 'gloo was asked for')
    """
    if asked is None:
        return None, "no process group: the function calls init_process_group itself"
    if asked not in ("auto", "gloo", "nccl"):
        mpi = " (MPI is not part of the torch wheels)" if asked == "mpi" else ""
        raise ValueError(f'backend={asked!r} is not one of "auto", "gloo", "nccl", None{mpi}')
    if asked == "gloo":
        return "gloo", "gloo was asked for"
    found = num_gpus()
    here = f"{found or 'no'} CUDA device{'' if found == 1 else 's'} for {_ranks(world_size)}"
    if found >= world_size:
        return "nccl", f"one CUDA device per rank: {here}"
    if asked == "nccl":
        raise ValueError(
            f"backend='nccl' needs one CUDA device per rank, and this machine has {here}. Use backend='gloo' "
            f"(the same code on the CPU){f', or world_size={found}' if found else ''}; "
            "backend=None leaves the choice to the function, to see what NCCL itself says."
        )
    return "gloo", f"NCCL needs one CUDA device per rank: {here}"


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def device() -> torch.device:
    """The device of this rank: its CUDA device where there is one for each rank, else the CPU.

    Works in a rank of ``launch``, under torchrun and in a plain process.

    >>> device().type in ("cpu", "cuda")
    True
    """
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if dist.is_available() and dist.is_initialized():
        on_gpu = "nccl" in str(dist.get_backend())
    else:
        on_gpu = num_gpus() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
