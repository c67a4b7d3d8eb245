"""Metrics over steps: a line per rank, and their mean."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddplab.plots.picture import Picture, draw, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddplab.run import Run

__all__ = ["metrics", "series"]

MAX_NAMED_RANKS = 8


def series(run: Run, name: str) -> dict[int, list[tuple[float, float]]]:
    """The points (step, value) of one metric for each rank; where no step was logged, steps count from 0.

    Raises ``ValueError`` if no rank logged ``name``.
    """
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in run.metrics:
        if row.name == name:
            mine = points[row.rank]
            mine.append((len(mine) if row.step is None else row.step, row.value))
    if not points:
        known = sorted({row.name for row in run.metrics})
        raise ValueError(f"no rank logged {name!r}; this run has {', '.join(known) if known else 'no metrics at all'}")
    return dict(points)


def mean(points: dict[int, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean over the ranks at each step that every rank logged.

    >>> mean({0: [(0, 1.0), (1, 3.0)], 1: [(0, 2.0)]})
    [(0, 1.5)]
    """
    values: dict[float, list[float]] = defaultdict(list)
    for line in points.values():
        for step, value in line:
            values[step].append(value)
    return [(step, sum(v) / len(v)) for step, v in sorted(values.items()) if len(v) == len(points)]


def metrics(run: Run, name: str, ax: Axes | None = None) -> Picture | None:
    """Draw metric ``name`` over steps: a line per rank, and their mean where there are several.

    The mean is taken at the steps that all ranks logged. With ``ax`` the lines go there, and nothing
    is given back. Raises ``ValueError`` if no rank logged ``name``.
    """
    points = series(run, name)

    def paint(ax: Axes) -> None:
        for rank, line in points.items():
            label = f"rank {rank}" if len(points) <= MAX_NAMED_RANKS else None
            ax.plot(*zip(*line, strict=True), label=label, linewidth=1, alpha=0.8, **rank_style(rank))
        if len(points) > 1 and (middle := mean(points)):
            ax.plot(*zip(*middle, strict=True), color="black", linewidth=2.2, label=f"mean of {len(points)} ranks")
        ax.set(xlabel="step", ylabel=name)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize="small")

    return draw(ax, (7.0, 3.2), _in_words(name, points), paint)


def _in_words(name: str, points: dict[int, list[tuple[float, float]]]) -> str:
    steps = max(len(line) for line in points.values())
    ranks = "1 rank" if len(points) == 1 else f"{len(points)} ranks"
    return f"{name} of {ranks} over {steps} step{'s' * (steps != 1)}"
