"""Wrong solutions of the tasks on samplers: the task, what must be said of it, and the function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

WRONG = []


def wrong(number, words):
    """Keep a wrong solution."""
    return lambda fn: WRONG.append((number, words, fn)) or fn


@wrong("05.1", "with 10 samples on 2 ranks, all ranks get the same 10 samples")
def everything(n):
    return list(range(n))


@wrong("05.1", "sample 0 is seen 2 times, by ranks [0, 2]: no padding here")
def padded(n):
    return list(DistributedSampler(range(n), shuffle=False))


@wrong("05.1", "no rank gets sample 9: the last ones are dropped")
def dropped(n):
    size = n // dist.get_world_size()
    return list(range(dist.get_rank() * size, (dist.get_rank() + 1) * size))


@wrong("05.2", "12 labels were looked at: some are padding")
def counted_twice(right):
    mine = [right[i] for i in DistributedSampler(right, shuffle=False)]
    told = torch.tensor([sum(mine), len(mine)])
    dist.all_reduce(told)
    return told[0].item() / told[1].item()


@wrong("05.2", "should be 0.8000; shares are unequal")
def mean_of_means(right):
    mine = [right[i] for i in range(dist.get_rank(), len(right), dist.get_world_size())]
    mean = torch.tensor(sum(mine) / len(mine))
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@wrong("05.2", "each rank looks at all images: right, and as slow as one process")
def all_of_them(right):
    return sum(right[i] for i in range(len(right))) / len(right)
