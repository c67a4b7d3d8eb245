"""Wrong solutions of the tasks on measuring: the task, what must be said of it, and the function."""

from __future__ import annotations

import statistics

import numpy
import torch
import torch.distributed as dist
from wrong import wrong

from ddplab import plots


def of_each_size(rows, middle=statistics.median):
    sizes = sorted({size for size, _ in rows})
    return [(size, middle(time_s for other, time_s in rows if other == size)) for size in sizes]


@wrong("10.1", "late rows pull the line away")
def means_of_each_size(rows):
    return tuple(plots.fit_alpha_beta(of_each_size(rows, statistics.mean)))


@wrong("10.1", "a small error in the longest times is more than alpha; fit relative errors")
def unweighted(rows):
    beta, alpha = numpy.polyfit(*zip(*of_each_size(rows), strict=True), 1)
    return alpha, beta


@wrong("10.1", "you give beta before alpha")
def beta_first(rows):
    return tuple(plots.fit_alpha_beta(of_each_size(rows)))[::-1]


@wrong("10.1", "bytes/s: beta is its inverse")
def bandwidth(rows):
    alpha, beta = plots.fit_alpha_beta(of_each_size(rows))
    return alpha, 1 / beta


@wrong("10.1", "wanted are seconds, and seconds per byte")
def in_ms(rows):
    alpha, beta = plots.fit_alpha_beta(of_each_size(rows))
    return 1e3 * alpha, 1e3 * beta


def times_of(work, clock, warmup=3, repeats=5):
    times = []
    for _ in range(warmup + repeats):
        dist.barrier()
        begin = clock()
        work()
        times.append(clock() - begin)
    return times[warmup:]


def reduced(times, op=dist.ReduceOp.MAX):
    told = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(told, op=op)
    return told.tolist()


def bus_of(num_bytes, time_s):
    n = dist.get_world_size()
    return 2 * (n - 1) / n * num_bytes / time_s / 1e9


@wrong("10.2", "GB/s: all must reduce, and say what the slowest has")
def by_its_own_clock(work, num_bytes, clock):
    return bus_of(num_bytes, statistics.median(times_of(work, clock)))


@wrong("10.2", "this is the algorithm bandwidth: a rank sends 2(N-1)/N times the tensor")
def algorithm_bandwidth(work, num_bytes, clock):
    return num_bytes / statistics.median(reduced(times_of(work, clock))) / 1e9


@wrong("10.2", "the fastest rank counts, not the slowest")
def fastest_rank(work, num_bytes, clock):
    return bus_of(num_bytes, statistics.median(reduced(times_of(work, clock), dist.ReduceOp.MIN)))


@wrong("10.2", "the ranks' times are averaged, and all wait for the slowest")
def mean_of_the_ranks(work, num_bytes, clock):
    mine = statistics.median(times_of(work, clock))
    return bus_of(num_bytes, reduced([mine], dist.ReduceOp.SUM)[0] / dist.get_world_size())


@wrong("10.2", "the first calls are in it, which warm up")
def no_warm_up(work, num_bytes, clock):
    return bus_of(num_bytes, statistics.median(reduced(times_of(work, clock, warmup=0))))


@wrong("10.2", "a late repeat weighs as much as others")
def mean_of_the_repeats(work, num_bytes, clock):
    return bus_of(num_bytes, statistics.mean(reduced(times_of(work, clock))))


@wrong("10.2", "wanted are GB, of 1e9 bytes, per second")
def in_bytes(work, num_bytes, clock):
    return 1e9 * bus_of(num_bytes, statistics.median(reduced(times_of(work, clock))))
