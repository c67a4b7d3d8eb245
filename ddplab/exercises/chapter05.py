"""Tasks on samplers."""

from collections import Counter
from itertools import islice

import torch
from torch.utils.data import DataLoader

from ddplab.exercises.engine import Attempt, Wrong, task


@task("05.1", "Shard by hand")
def shard(attempt: Attempt) -> None:
    """``shard(n)`` gives the indices of this rank: each of ``range(n)`` on one rank, shares as equal as can be."""
    for n, world_size in ((7, 1), (10, 2), (11, 3)):
        shares = [list(map(int, share)) for share in attempt.results(n, world_size=world_size)]
        seen = Counter(index for share in shares for index in share)
        where = f"with {n} samples on {world_size} rank{'s' * (world_size > 1)}"
        if world_size > 1 and all(share == shares[0] for share in shares):
            raise Wrong(f"{where}, all ranks get the same {len(shares[0])} samples: the rank is not used")
        if twice := sorted(index for index, times in seen.items() if times > 1):
            who = [rank for rank, share in enumerate(shares) if twice[0] in share]
            raise Wrong(f"{where}, sample {twice[0]} is seen {seen[twice[0]]} times, by ranks {who}: no padding here")
        if missing := sorted(set(range(n)) - set(seen)):
            raise Wrong(f"{where}, no rank gets sample {missing[0]}: the last ones are dropped")
        if beyond := sorted(set(seen) - set(range(n))):
            raise Wrong(f"{where}, index {beyond[0]} is none of the samples")
        if max(map(len, shares)) - min(map(len, shares)) > 1:
            raise Wrong(f"{where}, shares have {list(map(len, shares))} samples: all wait for the longest")


@task("05.2", "Evaluate exactly")
def evaluate(attempt: Attempt) -> None:
    """``accuracy(right)`` gives on every rank the share of ones in ``right``; each rank looks at its part of them."""
    for n, ones, world_size in ((10, 8, 1), (10, 8, 3), (7, 3, 2)):
        told = attempt.results([0] * (n - ones) + [1] * ones, world_size=world_size, trial=counted)
        values, looks = [round(float(value), 4) for value, _ in told], [num for _, num in told]
        where = f"with {n} images on {world_size} rank{'s' * (world_size > 1)}"
        if len(set(values)) > 1:
            raise Wrong(f"{where}, the ranks find {values}: sums and counts must be reduced over all of them")
        if abs(values[0] - ones / n) > 1e-4:
            why = f"{sum(looks)} labels were looked at: some are padding" if sum(looks) > n else "shares are unequal"
            raise Wrong(f"{where}, the accuracy is {values[0]} and should be {ones / n:.4f}; {why}")
        if world_size > 1 and min(looks) >= n:
            raise Wrong(f"{where}, each rank looks at all images: right, and as slow as one process")


class Noted:
    """Labels that count how many of them were looked at."""

    def __init__(self, labels):
        self.labels, self.looks = labels, 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        found = self.labels[at]
        self.looks += len(found) if isinstance(at, slice) else 1
        return found


def counted(fn, labels):
    """What ``fn`` gives, and how many labels this rank looked at."""
    right = Noted(labels)
    return fn(right), right.looks


@task("05.3", "A new order each epoch")
def reshuffle(attempt: Attempt) -> None:
    """``order(n, epoch)`` gives this rank's indices: another order of all in each epoch, always the same for it."""
    for n, world_size in ((11, 1), (12, 2), (13, 3)):
        by_rank = attempt.results(n, [0, 1, 2], world_size=world_size, trial=orders)
        where = f"with {n} samples on {world_size} rank{'s' * (world_size > 1)}"
        for epoch, shares in enumerate(zip(*by_rank, strict=True)):
            seen = Counter(index for share in shares for index in share)
            if missing := sorted(set(range(n)) - set(seen)):
                twice = [index for index, times in seen.items() if times > 1]
                why = f"and sample {twice[0]} is met twice: ranks shuffle unlike" if twice else "the last are dropped"
                raise Wrong(f"{where}, no rank meets sample {missing[0]} in epoch {epoch}, {why}")
            if len(set(map(len, shares))) > 1:
                raise Wrong(f"{where}, shares have {list(map(len, shares))} samples: DDP needs equal shares")
            if sum(seen.values()) > n + world_size - 1:
                raise Wrong(f"{where}, {sum(seen.values())} places are filled in epoch {epoch}: padding needs less")
        for rank, epochs in enumerate(by_rank):
            if len(set(map(tuple, epochs))) < 3:
                raise Wrong(f"{where}, rank {rank} meets its samples in one order in two epochs: the epoch is not used")
            if world_size > 1 and len(set(map(frozenset, epochs))) == 1:
                raise Wrong(f"{where}, rank {rank} has the same samples in all epochs: shuffle all, then share out")
    again = attempt.results(n, [2, 0], world_size=world_size, trial=orders)
    if [[epochs[2], epochs[0]] for epochs in by_rank] != again:
        raise Wrong(f"{where}, a run that begins at epoch 2 has another order there: it must follow from the epoch")


def orders(fn, n, epochs):
    """The share of this rank in each epoch; between them other things draw random numbers, as in a training."""
    shares = []
    for epoch in epochs:
        torch.rand(3)
        shares.append([int(index) for index in fn(n, epoch)])
    return shares


@task("05.4", "Share out a stream")
def stream(attempt: Attempt) -> None:
    """``stream(records)`` makes a dataset that each rank and each of its workers reads: every record once."""
    for n, world_size, all_workers in ((7, 1, (0, 2)), (10, 2, (0, 2)), (11, 3, (2,))):
        records = [100 + number**2 for number in range(n)]
        by_rank = attempt.results(records, all_workers, world_size=world_size, trial=read)
        for num_workers, shares in zip(all_workers, zip(*by_rank, strict=True), strict=True):
            seen = Counter(record for share in shares for record in share)
            ranks = f"{world_size} rank{'s' * (world_size > 1)} with {num_workers} workers"
            where = f"with {n} records, {ranks}{' each' * (world_size > 1)}"
            if foreign := [record for record in seen if record not in records]:
                raise Wrong(f"{where}, {foreign[0]!r:.40} is read, which is no record")
            if endless := [rank for rank, share in enumerate(shares) if len(share) > MOST * n]:
                raise Wrong(f"{where}, rank {endless[0]} has read {MOST * n} records and still goes on")
            if missing := sorted(set(records) - set(seen)):
                gone = records.index(missing[0])
                raise Wrong(f"{where}, nobody reads record number {gone}, and {len(missing)} in all")
            if twice := sorted(record for record, times in seen.items() if times > 1):
                times, by = seen[twice[0]], sum(twice[0] in share for share in shares)
                who = f"by {by} ranks: the rank is not used" if by > 1 else "by workers of one rank: they read the same"
                raise Wrong(f"{where}, record number {records.index(twice[0])} is read {times} times, {who}")
            if max(map(len, shares)) - min(map(len, shares)) > 1:
                told = f"{where}, ranks read {list(map(len, shares))}"
                if num_workers:
                    raise Wrong(f"{told}: deal to ranks first, then to their workers")
                raise Wrong(f"{told}: deal by places, one record to each rank in turn")


MOST = 20  # times as many as there are: all that a rank with two workers can read, and be told that it has not ended


def read(fn, records, all_workers):
    """What arrives at this rank, for each number of workers."""
    arrived = []
    for num_workers in all_workers:
        reader = DataLoader(fn(list(records)), batch_size=None, num_workers=num_workers)
        arrived.append(list(islice(reader, MOST * len(records) + 1)))
    return arrived
