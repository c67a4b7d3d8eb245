"""Metrics over steps: a line per rank, and their mean."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from ddplab.plots.picture import Picture, literal, or_placard, panels, rank_style, tidy
from ddplab.plots.values import NothingToDrawError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddplab.run import Run

__all__ = ["metrics", "series"]

MAX_NAMED_RANKS = 8
NOTHING = "no rank logged anything; in the function, call log(loss=loss)"
Points = dict[int, list[tuple[float, float]]]


def series(run: Run, name: str) -> Points:
    """The points (step, value) of one metric for each rank; where no step was logged, steps count from 0.

    Raises ``ValueError`` if no rank logged ``name``.
    """
    points: Points = defaultdict(list)
    for row in run.metrics:
        if row.name == name:
            mine = points[row.rank]
            mine.append((len(mine) if row.step is None else row.step, row.value))
    if not points:
        known = sorted({row.name for row in run.metrics})
        if not known:
            raise NothingToDrawError(NOTHING)
        raise ValueError(f"no rank logged {name!r}; this run has {', '.join(known)}")
    return dict(points)


def mean(points: Points) -> list[tuple[float, float]]:
    """The mean over the ranks at each step that every rank logged.

    >>> mean({0: [(0, 1.0), (1, 3.0)], 1: [(0, 2.0)]})
    [(0, 1.5)]
    """
    values: dict[float, list[float]] = defaultdict(list)
    for line in points.values():
        for step, value in line:
            values[step].append(value)
    return [(step, sum(v) / len(v)) for step, v in sorted(values.items()) if len(v) == len(points)]


@or_placard
def metrics(run: Run, *names: str, ax: Axes | None = None) -> Picture | None:
    """Draw metrics over steps, a panel for each name: a line per rank, and their mean where there are several.

    Without names, all that were logged are drawn, by name. The mean is taken at the steps that all ranks
    logged. With ``ax`` the lines go there, and nothing is given back. Raises ``ValueError`` if no rank
    logged one of the names.
    """
    wanted = names or tuple(sorted({row.name for row in run.metrics}))
    if not wanted:
        raise NothingToDrawError(NOTHING)
    points = {name: series(run, name) for name in wanted}
    across = min(len(wanted), 2)
    down = math.ceil(len(wanted) / across)

    def paint(axes: list[Axes]) -> None:
        for ax, name in zip(axes, wanted, strict=False):
            _paint_lines(ax, name, points[name])
        axes[0].legend(frameon=False, fontsize="small")
        for ax in axes[len(wanted) :]:
            ax.set_axis_off()

    size = (7.0, 3.2) if len(wanted) == 1 else (9.0, 2.6 * down)
    text = "\n".join(_in_words(name, points[name]) for name in wanted)
    rows = [
        {"metric": name, "rank": rank, "steps": len(line), "first": line[0][1], "last": line[-1][1]}
        for name in wanted
        for rank, line in points[name].items()
    ]
    return panels(ax, size, text, paint, rows, (down, across))


def _paint_lines(ax: Axes, name: str, points: Points) -> None:
    for rank, line in points.items():
        label = f"rank {rank}" if len(points) <= MAX_NAMED_RANKS else None
        ax.plot(*zip(*line, strict=True), label=label, linewidth=1, alpha=0.8, **rank_style(rank))
    if len(points) > 1 and (middle := mean(points)):
        ax.plot(*zip(*middle, strict=True), color="black", linewidth=2.2, label=f"mean of {len(points)} ranks")
    ax.set(xlabel="step", ylabel=literal(name))
    tidy(ax, grid=True)


def _in_words(name: str, points: Points) -> str:
    steps = max(len(line) for line in points.values())
    ranks = "1 rank" if len(points) == 1 else f"{len(points)} ranks"
    return f"{name} of {ranks} over {steps} step{'s' * (steps != 1)}"
