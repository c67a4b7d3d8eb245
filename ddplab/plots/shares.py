"""Which sample goes to which rank, as arrays: what a sampler gives, what it gives twice, and what it never gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddplab.plots.values import by_rank
from ddplab.run import Run

__all__ = ["EMPTY", "Map", "dropped", "held", "of", "repeated", "shares", "stacked"]

Map = NDArray[np.int64]
EMPTY = -1  # no sample: this rank has fewer than others


def shares(
    num_samples: int, world_size: int, *, epochs: int = 1, set_epoch: bool = True, shuffle: bool = True, **options: Any
) -> Map:
    """What ``DistributedSampler`` gives: indices by (epoch, rank, place), the places in order of time.

    ``options`` are the sampler's own: ``seed`` and ``drop_last``. No process is started.

    >>> shares(5, 2, shuffle=False).tolist()
    [[[0, 2, 4], [1, 3, 0]]]
    """
    from torch.utils.data import DistributedSampler

    data: Any = range(num_samples)
    ranks: list[Any] = [DistributedSampler(data, world_size, r, shuffle=shuffle, **options) for r in range(world_size)]
    return _told_by(ranks, epochs, set_epoch)


def of(what: Any, world_size: int | None, *, epochs: int, set_epoch: bool, **options: Any) -> tuple[Map, int]:
    """The map of whatever ``plots.sampler`` takes, and how many samples its data set has.

    Of lists of indices nobody knows that: it is taken to be one more than the highest index.

    >>> of([[0, 1], [2]], None, epochs=1, set_epoch=True)
    (array([[[ 0,  1],
            [ 2, -1]]]), 3)
    """
    if type(what) is int:
        if what < 1 or type(world_size) is not int or world_size < 1:
            raise ValueError(f"sampler({what!r}, {world_size!r}): give how many samples and ranks, both 1 or more")
        return shares(what, world_size, epochs=epochs, set_epoch=set_epoch, **options), what
    if hasattr(what, "num_replicas") and hasattr(what, "rank"):
        ranks = [copy.copy(what) for _ in range(what.num_replicas)]
        for rank, one in enumerate(ranks):
            one.rank = rank
        return _told_by(ranks, epochs, set_epoch), len(what.dataset)
    if isinstance(what, str) or not isinstance(what, Run | Sequence):
        raise TypeError(f"sampler({what!r:.60}): give a number, a DistributedSampler, lists of indices, or a run")
    found = by_rank(what, "sampler(...)")
    num_ranks = what.world_size if isinstance(what, Run) else len(what)
    lists = [_checked(found.get(rank, ()), rank) for rank in range(num_ranks)]
    by_epoch = any(indices and isinstance(indices[0], list | tuple) for indices in lists)
    told = stacked(list(itertools.zip_longest(*lists, fillvalue=())) if by_epoch else [lists])
    if not told.size or told.max() < 0:
        raise ValueError("sampler(...): these ranks have no indices")
    return told, int(told.max()) + 1


def _checked(indices: Any, rank: int) -> list[Any]:
    """The indices of a rank, or lists of them by epoch, as a list."""
    kept: list[Any] = list(indices) if isinstance(indices, Iterable) and not isinstance(indices, str) else [None]
    flat = itertools.chain.from_iterable(kept) if kept and isinstance(kept[0], list | tuple) else kept
    if not all(hasattr(index, "__index__") and index >= 0 for index in flat):
        raise TypeError(f"sampler(...): rank {rank} has {indices!r:.60}, and no list of indices of 0 or more")
    return kept


def _told_by(ranks: Sequence[Any], epochs: int, set_epoch: bool) -> Map:
    told = []
    for epoch in range(epochs):
        for one in ranks if set_epoch else ():
            one.set_epoch(epoch)
        told.append([list(one) for one in ranks])
    return stacked(told)


def stacked(epochs: Sequence[Sequence[Iterable[int]]]) -> Map:
    """Lists of indices by epoch and rank as one array; ranks that have fewer get ``EMPTY`` (-1) at the end.

    >>> stacked([[[0, 2], [1]]]).tolist()
    [[[0, 2], [1, -1]]]
    """
    rows = [[np.fromiter(rank, dtype=np.int64) for rank in ranks] for ranks in epochs]
    most = max((len(row) for ranks in rows for row in ranks), default=0)
    found = np.full((len(rows), max(map(len, rows), default=0), most), EMPTY, dtype=np.int64)
    for epoch, ranks in enumerate(rows):
        for rank, row in enumerate(ranks):
            found[epoch, rank, : len(row)] = row
    return found


def held(row: Map) -> list[int]:
    """The samples of a row, or of a whole epoch by time, without the empty places."""
    found: list[int] = row.T[row.T != EMPTY].tolist()
    return found


def repeated(epoch: Map) -> NDArray[np.bool_]:
    """Where an epoch's map (rank, place) meets a sample that was met before; at equal places, lower ranks come first.

    >>> repeated(np.array([[0, 2, 4], [1, 3, 0]])).tolist()
    [[False, False, False], [False, False, True]]
    """
    in_time, time = epoch.T.reshape(-1), np.arange(epoch.size)
    first = np.zeros(int(epoch.max(initial=0)) + 2, dtype=np.int64)
    first[in_time[::-1]] = time[::-1]  # the last to be written is the earliest
    again: NDArray[np.bool_] = (first[in_time] != time) & (in_time != EMPTY)
    return again.reshape(epoch.T.shape).T


def dropped(epoch: Map, num_samples: int) -> list[int]:
    """The samples of ``range(num_samples)`` that an epoch's map does not have, in order.

    >>> dropped(np.array([[0, 2], [1, 3]]), 5)
    [4]
    """
    met = np.zeros(num_samples, dtype=np.bool_)
    met[epoch[(epoch >= 0) & (epoch < num_samples)]] = True
    never: list[int] = np.flatnonzero(~met).tolist()
    return never
