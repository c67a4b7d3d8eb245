"""How long a collective takes by message size, what bandwidth that is, and a line fitted to it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplab.plots.alpha_beta import fit_alpha_beta
from ddplab.plots.picture import Picture, or_placard, panels, tidy
from ddplab.plots.values import by_rank, in_bytes, in_seconds, spaced
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Speed", "bandwidth", "speeds"]


class Speed(NamedTuple):
    """A message size: its median, least and most seconds, and the bandwidths of the median in GB/s (10^9 bytes)."""

    bytes: int
    median_s: float
    min_s: float
    max_s: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


def speeds(rows: Iterable[tuple[float, float]], world_size: int) -> list[Speed]:
    """A row for each message size, by size, from rows (bytes, seconds), in which a size may stand several times.

    The algorithm bandwidth is bytes / seconds. The bus bandwidth is that times 2 (n - 1) / n on n ranks: what
    every rank must send and receive at least, so that it can be compared with the hardware, whatever n is
    (NVIDIA nccl-tests, doc/PERFORMANCE.md).

    >>> speeds([(4e9, 2.0), (4e9, 4.0), (4e9, 8.0)], world_size=4)
    [Speed(bytes=4000000000, median_s=4.0, min_s=2.0, max_s=8.0, algorithm_gb_per_s=1.0, bus_gb_per_s=1.5)]
    """
    if type(world_size) is not int or world_size < 2:
        raise ValueError(f"bandwidth(world_size={world_size!r}): between how many ranks? Give 2 or more")
    by_size: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        size, time_s = _checked(row)
        by_size[int(size)].append(float(time_s))
    if not by_size:
        raise ValueError("bandwidth: there are no rows (bytes, seconds)")
    found = []
    for size, times in sorted(by_size.items()):
        median_s = statistics.median(times)
        rate = size / median_s / 1e9
        found.append(Speed(size, median_s, min(times), max(times), rate, rate * 2 * (world_size - 1) / world_size))
    return found


@or_placard
def bandwidth(
    rows: Run | Sequence[tuple[float, float]], world_size: int | None = None, ax: Axes | None = None
) -> Picture | None:
    """Draw the time of an all-reduce by message size with a fitted line, and its algorithm and bus bandwidth.

    rows: a run whose ranks return a list of (bytes, seconds), all for the same messages in the same order: a
        message is done when its slowest rank is. Or such a list, and the ``world_size``.

    A size that stands several times is drawn by its median, with a bar from the fastest to the slowest. The
    line is ``plots.fit_alpha_beta`` of the medians. With ``ax`` the panels go there, and nothing is given
    back. Raises ``ValueError`` for no rows, for bytes or seconds of 0, and for fewer than two ranks.

    >>> print(bandwidth([(1000, 0.5), (4000, 1.0)], world_size=4))
    all_reduce on 4 ranks, message sizes from 1000 B to 3.91 KiB
    bytes  median_s  min_s  max_s  algorithm_gb_per_s  bus_gb_per_s
     1000  0.5       0.5    0.5    2e-06               3e-06
     4000  1         1      1      4e-06               6e-06
    """
    if isinstance(rows, Run):
        world_size, rows = rows.world_size, _slowest(by_rank(rows, "bandwidth(run)"))
    found = speeds(rows, 0 if world_size is None else world_size)

    def paint(axes: list[Axes]) -> None:
        _paint_times(axes[0], found)
        sizes = [speed.bytes for speed in found]
        axes[1].plot(sizes, [speed.algorithm_gb_per_s for speed in found], "o-", color="black", label="algorithm")
        axes[1].plot(sizes, [speed.bus_gb_per_s for speed in found], "s--", color="#777777", label="bus")
        axes[1].set(ylabel="bandwidth in GB/s", ylim=(0, None))
        for ax in axes:
            shown = spaced(sizes, 5)
            ax.set_xscale("log", base=2)
            ax.set_xticks(shown, [in_bytes(size) for size in shown])
            ax.set_xticks([], minor=True)
            ax.set_xlabel("message size")
            tidy(ax, grid=True)
            ax.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2)

    first, last = in_bytes(found[0].bytes), in_bytes(found[-1].bytes)
    text = f"all_reduce on {world_size} ranks, message sizes from {first} to {last}"
    return panels(ax, (9.0, 3.0), text, paint, [speed._asdict() for speed in found], (1, 2))


def _paint_times(ax: Axes, found: list[Speed]) -> None:
    from matplotlib.ticker import LogLocator

    sizes, medians = [speed.bytes for speed in found], [speed.median_s for speed in found]
    below = [speed.median_s - speed.min_s for speed in found]
    above = [speed.max_s - speed.median_s for speed in found]
    ax.errorbar(sizes, medians, [below, above], fmt="o", color="black", markersize=4, capsize=3, label="measured")
    if len(found) > 1:
        fit = fit_alpha_beta(zip(sizes, medians, strict=True))
        between = [sizes[0] * (sizes[-1] / sizes[0]) ** (at / 100) for at in range(101)]
        ax.plot(between, [fit.seconds(size) for size in between], color="#777777", label=f"fit: {fit}")
    ax.set(ylabel="time of all_reduce", yscale="log")
    decades = math.log10(max(speed.max_s for speed in found) / min(speed.min_s for speed in found))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
    ax.yaxis.set_major_formatter(lambda time_s, _: in_seconds(time_s))
    ax.set_yticks([], minor=True)


def _slowest(told: dict[int, Any]) -> list[tuple[float, float]]:
    """The rows of all ranks as one: of each message, the seconds of the slowest.

    >>> _slowest({0: [(8, 1.0), (8, 3.0)], 1: [(8, 2.0), (8, 1.0)]})
    [(8, 2.0), (8, 3.0)]
    """
    for rank, rows in told.items():
        if not isinstance(rows, list | tuple):
            raise ValueError(f"bandwidth: rank {rank} must return a list of (bytes, seconds), not {rows!r:.60}")
    found = []
    for of_ranks in zip(*told.values(), strict=False):
        sizes = {size for size, _ in map(_checked, of_ranks)}
        if len(sizes) > 1:
            raise ValueError(f"bandwidth(run): at one place, ranks tell of messages of {sorted(sizes)} bytes")
        found.append((of_ranks[0][0], max(time_s for _, time_s in of_ranks)))
    return found


def _checked(row: Any) -> tuple[float, float]:
    pair = isinstance(row, list | tuple) and len(row) == 2
    if not pair or not all(isinstance(value, int | float) and 0 < value < math.inf for value in row):
        raise ValueError(f"bandwidth: {row!r:.60} is no row (bytes, seconds), both above 0")
    size, time_s = row
    return size, time_s
