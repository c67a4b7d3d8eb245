"""How long after an interrupt the cell has control again: while ranks sleep, compute, print, and wait in all_reduce.

python tests/benchmarks/bench_interrupt.py          about a minute on two cores, machine otherwise idle
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddplab import launch

REPEATS = 50


def sleep() -> None:
    """Sleep."""
    time.sleep(60)


def compute() -> None:
    """Compute without end."""
    while True:
        torch.ones(100).sum()


def shout() -> None:
    """Print without end."""
    while True:
        print("a line")


def wait() -> None:
    """Wait in a collective for a rank that never comes."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(60)


def interrupted(job: Callable[[], None]) -> float:
    """Seconds from an interrupt to control."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.4, interrupt)
    timer.start()
    try:
        launch(job, world_size=2, view="quiet")
    except KeyboardInterrupt:
        return time.perf_counter() - sent[0]
    raise AssertionError("no interrupt came")


if __name__ == "__main__":
    launch(sum, [], world_size=2, view="quiet")
    jobs = (sleep, compute, shout, wait)
    times = sorted(interrupted(jobs[number % len(jobs)]) for number in range(REPEATS))
    p50, p99 = statistics.median(times), times[int(0.99 * REPEATS)]
    print(f"interrupt to control, {REPEATS} of them: p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms")
