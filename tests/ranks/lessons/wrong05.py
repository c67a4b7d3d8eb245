"""Wrong solutions of the tasks on samplers: the task, what must be said of it, and the function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info
from wrong import wrong


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


def shuffled(n, seed, world_size, rank):
    places = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    num = -(-n // world_size) * world_size
    return (places + places)[rank:num:world_size]


@wrong("05.3", "in one order in two epochs: the epoch is not used")
def no_set_epoch(n, epoch):
    return list(DistributedSampler(range(n)))


@wrong("05.3", "is met twice: ranks shuffle unlike")
def seed_by_rank(n, epoch):
    rank = dist.get_rank()
    return shuffled(n, 100 * epoch + rank, dist.get_world_size(), rank)


@wrong("05.3", "has the same samples in all epochs: shuffle all, then share out")
def only_within_the_share(n, epoch):
    mine = list(DistributedSampler(range(n), shuffle=False))
    return [mine[place] for place in shuffled(len(mine), epoch, 1, 0)]


@wrong("05.3", "a run that begins at epoch 2 has another order there")
def whatever_comes_next(n, epoch):
    return shuffled(n, torch.randint(1000, ()).item(), dist.get_world_size(), dist.get_rank())


@wrong("05.3", "in epoch 0, the last are dropped")
def last_ones_dropped(n, epoch):
    sampler = DistributedSampler(range(n), drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


class EveryRecord(IterableDataset):
    def __init__(self, records):
        self.records, self.rank, self.world_size = records, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        return iter(self.records[self.share() :: self.num_shares()])

    def worker(self):
        info = get_worker_info()
        return (info.id, info.num_workers) if info else (0, 1)

    def share(self):
        return 0

    def num_shares(self):
        return 1


@wrong("05.4", "by 2 ranks: the rank is not used")
class ByWorkerOnly(EveryRecord):
    def share(self):
        return self.worker()[0]

    def num_shares(self):
        return self.worker()[1]


@wrong("05.4", "by workers of one rank: they read the same")
class ByRankOnly(EveryRecord):
    def share(self):
        return self.rank

    def num_shares(self):
        return self.world_size


@wrong("05.4", "ranks read [6, 4]: deal to ranks first, then to their workers")
class LongSharesFirst(EveryRecord):
    def share(self):
        return self.rank * self.worker()[1] + self.worker()[0]

    def num_shares(self):
        return self.world_size * self.worker()[1]


@wrong("05.4", "nobody reads record number 1, and ")
class RankAndWorkerAdded(LongSharesFirst):
    def share(self):
        return 2 * (self.rank + self.worker()[0])


@wrong("05.4", "with 7 records, 1 rank with 0 workers, rank 0 has read 140 records and still goes on")
class Endless(EveryRecord):
    def __iter__(self):
        while True:
            yield from self.records


@wrong("05.4", "with 10 records, 2 ranks with 0 workers each, ranks read [10, 0]: deal by places")
class OneRankOnly(ByWorkerOnly):
    def __iter__(self):
        return iter([] if self.rank else super().__iter__())


@wrong("05.4", "with 7 records, 1 rank with 0 workers, 0 is read, which is no record")
class PlacesForRecords(EveryRecord):
    def __iter__(self):
        return iter(range(self.rank, len(self.records), self.world_size))
