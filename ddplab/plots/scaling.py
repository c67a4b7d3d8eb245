"""How a job's time changes with the number of ranks: time, speed-up and efficiency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplab.plots.picture import Picture, or_placard, panels, tidy
from ddplab.plots.values import NothingToDrawError, by_rank, listed, numbers
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Scale", "scales", "scaling", "seconds"]


class Scale(NamedTuple):
    """One world size: the median of its seconds, the least and the most, and what that is against the smallest one."""

    world_size: int
    median_s: float
    min_s: float
    max_s: float
    speed_up: float
    efficiency: float


def seconds(value: Any) -> tuple[list[float], str]:
    """The seconds of each repeat, and whose clock that is.

    Of a run whose ranks return seconds, or a list of them, those of the slowest rank in each repeat; of a
    run that returns something else, the one time from launch to end; of a run that failed, none; of a list, those
    of its items.

    >>> seconds([1.5, 2]), seconds(3)
    (([1.5, 2.0], 'seconds'), ([3.0], 'seconds'))
    """
    if isinstance(value, list | tuple):
        parts = [seconds(item) for item in value]
        return [one for times, _ in parts for one in times], next((clock for _, clock in parts if clock), "")
    if not isinstance(value, Run):
        return numbers(value, "scaling: a time").tolist(), "seconds"
    if not value.ok:
        return [], ""
    told = list(by_rank(value, "scaling(...)").values())
    if not all(map(_is_seconds, told)):
        return [value.elapsed_s], "seconds from launch to end"
    repeats = zip(*(numbers(times).tolist() for times in told), strict=False)
    return [max(of_ranks) for of_ranks in repeats], "seconds, told by the ranks"


def _is_of_runs(value: Any) -> bool:
    return isinstance(value, Run) or (isinstance(value, list | tuple) and any(map(_is_of_runs, value)))


def _is_seconds(value: Any) -> bool:
    many = isinstance(value, list | tuple) and bool(value)
    return all(map(_is_seconds, value)) if many else type(value) in (int, float)


def scales(times: Mapping[int, Sequence[float]], weak: bool = False) -> list[Scale]:
    """A row for each world size, by size; speed-up and efficiency are those of the medians.

    Against the smallest world size n, of time t: at N ranks in T seconds the speed-up is n t / T, and
    with ``weak``, where N ranks do N/n times the work, N t / T. The efficiency is the speed-up divided by
    N (G. Amdahl 1967; weak scaling: J. Gustafson 1988). Raises ``ValueError`` for no times or times of 0.

    >>> scales({1: [8.0], 4: [4.0, 3.0, 5.0]})[1]
    Scale(world_size=4, median_s=4.0, min_s=3.0, max_s=5.0, speed_up=2.0, efficiency=0.5)
    """
    for world_size, of_size in times.items():
        if type(world_size) is not int or world_size < 1 or not of_size or not all(0 < s < math.inf for s in of_size):
            raise ValueError(f"scaling: {world_size!r} ranks took {list(of_size)!r} s; give ranks and seconds above 0")
    if not times:
        raise ValueError("scaling: give times by world size, such as {1: run1, 2: run2}")
    base = min(times)
    base_s = statistics.median(times[base])
    found = []
    for world_size in sorted(times):
        median_s = statistics.median(times[world_size])
        speed_up = (world_size if weak else base) * base_s / median_s
        spread = min(times[world_size]), max(times[world_size])
        found.append(Scale(world_size, median_s, *spread, speed_up, speed_up / world_size))
    return found


@or_placard
def scaling(times: Mapping[int, Any], *, weak: bool = False, ax: Axes | None = None) -> Picture | None:
    """Draw time, speed-up and efficiency over the number of ranks, against the ideal.

    times: by world size, a run, a number of seconds, or a list of these: repeats. If the ranks of a run return a
        number or a list of numbers, these are its seconds, each repeat until its slowest rank is done; of any
        other run it is the time from launch to end, in which ranks are started too. The axis says which.
    weak: whether the work grows with the ranks; else it is the same in all.

    Points are medians, bars reach from the fastest repeat to the slowest. A world size that took longer
    than the smallest one is crossed and said to be slower. Of world sizes whose runs failed it is said that they
    did. With ``ax`` the panels go there, and nothing is given back. Raises ``ValueError`` for no times, times of 0
    and a wrong world size.

    >>> print(scaling({1: [8.0], 4: [4.0, 3.0, 5.0]}))
    time, speed-up and efficiency at world sizes 1, 4
    world_size  median_s  min_s  max_s  speed_up  efficiency
             1  8         8      8      1         1
             4  4         3      5      2         0.5
    """
    if not isinstance(times, Mapping):
        raise TypeError(f"scaling: give times by world size, such as {{1: run1, 2: run2}}, not {type(times).__name__}")
    for size, value in times.items():
        if isinstance(value, Run) and value.world_size != size:
            raise ValueError(f"scaling: {size!r} is no world size of {value!r}")
    clocks = {size: seconds(value) for size, value in times.items()}
    failed = [size for size, (of_size, _) in clocks.items() if not of_size and _is_of_runs(times[size])]
    clocks = {size: clock for size, clock in clocks.items() if size not in failed}
    if failed and not clocks:
        raise NothingToDrawError("scaling(...): a run that failed has no time, and there is no other")
    found = scales({size: of_size for size, (of_size, _) in clocks.items()}, weak)
    names = {name for _, name in clocks.values()}
    clock = names.pop() if len(names) == 1 else "seconds"
    sizes, base = [scale.world_size for scale in found], found[0]

    def paint(axes: list[Axes]) -> None:
        times_s = [one[1:4] for one in found]  # the median, the least and the most
        speed_ups = [tuple(one.speed_up * one.median_s / time_s for time_s in one[1:4]) for one in found]
        efficiencies = [tuple(100 * s / size for s in ups) for size, ups in zip(sizes, speed_ups, strict=True)]
        slower = [one for one in found if one.median_s > base.median_s and not weak]
        _paint(axes[0], sizes, times_s, lambda n: base.median_s * (1 if weak else base.world_size / n), clock)
        _paint(axes[1], sizes, speed_ups, lambda n: n, "speed-up")
        _paint(axes[2], sizes, efficiencies, lambda n: 100, "efficiency in %")
        if slower:
            _mark_slower(axes[0], base, slower)
        axes[0].legend(frameon=False, fontsize="small", title=no_time, title_fontsize="small")

    no_time = f"{listed(failed)} ranks: failed" if failed else ""
    text = f"time, speed-up and efficiency at world sizes {', '.join(map(str, sizes))}{' (weak scaling)' * weak}"
    text += f"; {no_time}" if failed else ""
    return panels(ax, (9.0, 2.8), text, paint, [one._asdict() for one in found], (1, 3))


def _paint(
    ax: Axes, sizes: list[int], points: Sequence[tuple[float, ...]], ideal: Callable[[float], float], label: str
) -> None:
    """``points`` are (median, one end, other end), one for each of ``sizes``."""
    middles = [middle for middle, *_ in points]
    below = [middle - min(ends) for middle, *ends in points]
    above = [max(ends) - middle for middle, *ends in points]
    between = [sizes[0] * (sizes[-1] / sizes[0]) ** (at / 50) for at in range(51)]
    wanted = [ideal(size) for size in between]
    ax.plot(between, wanted, color="#777777", linestyle="--", label="ideal")
    ax.errorbar(sizes, middles, [below, above], color="black", marker="o", markersize=5, capsize=3, label="measured")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_xticks([], minor=True)
    top = 1.08 * max(*wanted, *(value for values in points for value in values))
    ax.set(xlabel="ranks", ylabel=label, ylim=(0, top))
    tidy(ax, grid=True)


def _mark_slower(ax: Axes, base: Scale, slower: list[Scale]) -> None:
    look: dict[str, Any] = {"color": "#D55E00", "markersize": 11, "markeredgewidth": 2}
    label = f"slower than {base.world_size} rank{'s' * (base.world_size != 1)}"
    ax.plot([one.world_size for one in slower], [one.median_s for one in slower], "x", label=label, **look)
