"""How fast a cell gets its ranks: ratios against what torch and others offer, measured in one run.

    python tests/benchmarks/bench_launch.py          about three minutes on two cores, machine otherwise idle

The job is the same everywhere: join a Gloo group, wrap a small model in DDP, 20 steps, return.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplab import launch

RANKS = 4


def train(num_steps: int = 20) -> float:
    """A small DDP job; gives the sum of the final weights."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(10, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).pow(2).mean().backward()
        optimizer.step()
    return float(sum(p.detach().sum() for p in model.parameters()))


def train_as_spawned(rank: int, world_size: int, port: int) -> None:
    """The same job, as a function for ``torch.multiprocessing.spawn``."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    train()
    dist.destroy_process_group()


def train_as_forked() -> None:
    """The same job, as a function for accelerate's notebook_launcher."""
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


def seconds(job: Callable[[], object], repeats: int) -> float:
    """The median time of ``job``, over runs in which no process aborted at its exit, as with Gloo some do."""
    times: list[float] = []
    for attempt in range(1, 3 * repeats + 1):
        began = time.perf_counter()
        try:
            job()
        except mp.ProcessExitedException as error:
            print(f"(not counted: run {attempt}, {error})")
            continue
        times.append(time.perf_counter() - began)
        if len(times) == repeats:
            break
    return statistics.median(times)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ours(world_size: int = RANKS, **options: object) -> None:
    """The job by ddplab."""
    launch(train, world_size=world_size, backend="gloo", view="quiet", **options)  # type: ignore[arg-type]


def by_spawn() -> None:
    """The job by ``torch.multiprocessing.spawn``."""
    mp.spawn(train_as_spawned, (RANKS, free_port()), nprocs=RANKS)


def by_accelerate() -> None:
    """The job by accelerate, which forks this process."""
    from accelerate import notebook_launcher

    os.environ["ACCELERATE_USE_CPU"] = "true"
    notebook_launcher(train_as_forked, num_processes=RANKS, use_port=str(free_port()))


def compare_launchers() -> None:
    """Seconds for the job, and how many times longer the others take."""
    first = seconds(ours, 1)
    usual = seconds(ours, 9)
    print(f"ddplab, {RANKS} ranks: first launch {first:.2f} s (nothing was warm), then {usual:.3f} s")
    rows: list[tuple[str, Callable[[], object], int]] = [
        ("torch.multiprocessing.spawn", by_spawn, 3),
        ("ddplab with start_method='spawn'", lambda: ours(start_method="spawn"), 3),
    ]
    try:
        import accelerate

        rows.append((f"accelerate {accelerate.__version__} notebook_launcher", by_accelerate, 3))
    except ImportError:
        print("accelerate is not installed: not compared")
    for name, job, repeats in rows:
        took = seconds(job, repeats)
        print(f"{name}: {took:.2f} s, {took / usual:.1f} times as long")


def cost_per_rank() -> None:
    """How the time grows with the number of ranks."""
    for world_size in (1, 2, 4, 8, 16, 32, 64):
        took = seconds(lambda world_size=world_size: ours(world_size), 3)  # type: ignore[misc]
        print(f"{world_size:>3} ranks: {took:.3f} s, {1000 * took / world_size:.0f} ms a rank")


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare_launchers()
    cost_per_rank()
