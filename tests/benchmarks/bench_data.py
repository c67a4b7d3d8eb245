"""What ranks send: large values against a bare pipe, floods of lines against a sink, and what that costs in memory.

python tests/benchmarks/bench_data.py          about a minute on two cores, machine otherwise idle
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection

import torch

from ddplab import launch

RANKS = 4
VALUE_BYTES = 256_000_000
NUM_LINES = 250_000


def value() -> torch.Tensor:
    """A tensor of ``VALUE_BYTES`` bytes."""
    return torch.zeros(VALUE_BYTES // 4)


def send(end: Connection) -> None:
    """Make the value, and send its bytes."""
    end.send_bytes(value().numpy())


def by_pipe() -> float:
    """Seconds until as many forked processes have each sent their value through a bare pipe."""
    began = time.perf_counter()
    context = multiprocessing.get_context("fork")
    ends = []
    for _ in range(RANKS):
        mine, theirs = context.Pipe(duplex=False)
        context.Process(target=send, args=(theirs,)).start()
        theirs.close()
        ends.append(mine)
    for end in ends:
        assert len(end.recv_bytes()) == VALUE_BYTES
    return time.perf_counter() - began


def print_lines(sink: str | None) -> float:
    """Print many lines, to ``sink`` if there is one; give the seconds."""
    if sink:
        os.dup2(os.open(sink, os.O_WRONLY), 1)
    began = time.perf_counter()
    for number in range(NUM_LINES):
        print("a line as long as lines are, number", number)
    return time.perf_counter() - began


def peak_bytes() -> int:
    """The most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare_values() -> None:
    """Large values, against a pipe that does nothing else."""
    bare = by_pipe()
    began = time.perf_counter()
    run = launch(value, world_size=RANKS, backend=None, view="quiet")
    took = time.perf_counter() - began
    assert [result.numel() * 4 for result in run.results] == [VALUE_BYTES] * RANKS
    print(f"{RANKS} x {VALUE_BYTES // 10**6} MB: {took:.2f} s, {took / bare:.1f} times a bare pipe ({bare:.2f} s)")


def compare_lines() -> None:
    """Lines, against as many ranks that print them into a sink."""
    launch(print_lines, "/dev/null", world_size=RANKS, backend=None, view="quiet")
    before = peak_bytes()
    sunk = max(launch(print_lines, "/dev/null", world_size=RANKS, backend=None, view="quiet").results)
    run = launch(print_lines, None, world_size=RANKS, backend=None, view="quiet")
    told, grown = max(run.results), peak_bytes() - before
    assert run.output_file is not None
    assert run.output_file.read_text().count("\n") == RANKS * NUM_LINES
    print(f"{RANKS} x {NUM_LINES:,} lines: {told:.2f} s, {told / sunk:.1f} times as long as into /dev/null")
    print(f"the launcher grew by {grown / 1e6:.0f} MB, its file has {run.output_file.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    launch(sum, [], world_size=1, backend=None, view="quiet")  # starts the forkserver
    compare_lines()
    compare_values()
