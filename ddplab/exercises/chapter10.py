"""Tasks on measuring."""

import random

import torch
import torch.distributed as dist

from ddplab.exercises.engine import Attempt, Wrong, task

NETWORKS = [(50e-6, 1e-9), (8e-6, 3e-10), (400e-6, 5e-9)]  # alpha in seconds, beta in seconds per byte


@task("10.1", "Alpha and beta")
def fit(attempt: Attempt) -> None:
    """``fit(rows)`` finds alpha and beta in rows (bytes, seconds), of which some are late."""
    measured = [made_up(*network, seed) for seed, network in enumerate(NETWORKS)]
    [told] = attempt.results(measured, world_size=1, trial=fit_all)
    for (alpha, beta), (found_alpha, found_beta) in zip(NETWORKS, told, strict=True):
        where = f"with alpha {1e6 * alpha:g} µs and beta {1e9 * beta:g} ns per byte"
        said = f"you find {1e6 * found_alpha:.3g} µs and {1e9 * found_beta:.3g} ns"
        if near(found_alpha, beta, 0.2) and near(found_beta, alpha, 0.3):
            raise Wrong(f"{where}, you give beta before alpha")
        if near(found_beta, 1 / beta, 0.2):
            raise Wrong(f"{where}, you give a bandwidth of {found_beta:.3g} bytes/s: beta is its inverse")
        if near(found_beta, 1e3 * beta, 0.2) or near(found_beta, 1e6 * beta, 0.2):
            raise Wrong(f"{where}, {said}: wanted are seconds, and seconds per byte")
        if not near(found_beta, beta, 0.15):
            raise Wrong(f"{where}, {said}: late rows pull the line away; take the median, or the least, of each size")
        if not near(found_alpha, alpha, 0.25):
            raise Wrong(f"{where}, {said}: a small error in the longest times is more than alpha; fit relative errors")


def near(value, wanted, share):
    """Whether the value is wrong by this share at most."""
    return abs(value - wanted) <= share * wanted


def made_up(alpha, beta, seed):
    """Rows (bytes, seconds) of 11 repeats; none is faster than alpha + beta * bytes, and one in six is late."""
    chance = random.Random(seed)
    rows = []
    for num_bytes in (2**power for power in range(9, 26, 2)):
        for _ in range(11):
            late = chance.uniform(3, 20) if chance.random() < 1 / 6 else 1
            rows.append((num_bytes, (alpha + beta * num_bytes) * (1 + 0.05 * chance.random()) * late))
    chance.shuffle(rows)
    return rows


def fit_all(fn, measured):
    """Alpha and beta of each of these."""
    return [tuple(map(float, fn(list(rows)))) for rows in measured]


WARMUP_S = 0.5
# By rank: what the repeats after the warm-up take. One is late on rank 0, one on rank 1, which is always slower.
REPEATS_MS = [(2.0, 2.1, 1.95, 60.0, 2.05), (4.0, 4.1, 80.0, 4.05, 3.95), (3.0, 3.1, 2.95, 3.0, 3.05)]


@task("10.2", "Bus bandwidth")
def bus(attempt: Attempt) -> None:
    """``bus_bandwidth(work, num_bytes, clock)`` in GB/s, of the slowest rank, after a warm-up, on all ranks."""
    for world_size, num_bytes in ((2, 3_000_000), (3, 8_000_000)):
        told = attempt.results(num_bytes, world_size=world_size, trial=measured)
        values, looks = [value for value, _ in told], [num for _, num in told]
        where = f"with {num_bytes / 1e6:g} MB on {world_size} ranks"
        factor = 2 * (world_size - 1) / world_size
        wanted = factor * num_bytes / 4.05e-3 / 1e9
        if min(looks) == 0:
            raise Wrong(f"{where}, the clock that is given is not read: it has the times of this task")
        if any(near(value, wanted, 0.05) for value in values) and len(set(values)) == 1:
            continue
        if len(set(values)) > 1:
            shown = ", ".join(f"{value:.3g}" for value in values)
            raise Wrong(f"{where}, the ranks say {shown} GB/s: all must reduce, and say what the slowest has")
        ways = {
            "this is the algorithm bandwidth: a rank sends 2(N-1)/N times the tensor": wanted / factor,
            "the fastest rank counts, not the slowest": wanted * 4.05 / 2.05,
            "wanted are GB, of 1e9 bytes, per second": wanted * 1e9,
            "GB are 1e9 bytes, not 2**30": wanted * 1e9 / 2**30,
            "the ranks' times are averaged, and all wait for the slowest": wanted * 4.05 / 3,
        }
        why = [words for words, value in ways.items() if near(values[0], value, 0.04)]
        if not why and values[0] < wanted:
            is_cold = values[0] < wanted / 40 or near(values[0], wanted * 4.05 / 250, 0.5)
            why = ["the first calls are in it, which warm up" if is_cold else "a late repeat weighs as much as others"]
        raise Wrong(f"{where}, you find {values[0]:.3g} GB/s, and it is {wanted:.3g}: {(why or ['too fast'])[0]}")


def measured(fn, num_bytes):
    """The bandwidth by a clock that goes on only in ``work``, and how often the clock was read."""
    now_s, num_calls, looks = 0.0, 0, 0
    repeats = REPEATS_MS[dist.get_rank()]

    def work():
        nonlocal now_s, num_calls
        dist.all_reduce(torch.ones(1))
        now_s += WARMUP_S if num_calls < 3 else repeats[(num_calls - 3) % len(repeats)] / 1e3
        num_calls += 1

    def clock():
        nonlocal looks
        looks += 1
        return now_s

    return float(fn(work, num_bytes, clock)), looks
