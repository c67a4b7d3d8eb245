"""Tasks on samplers."""

from collections import Counter

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
