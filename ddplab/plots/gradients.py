"""The gradients of each rank before they are averaged, and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddplab.plots.picture import Picture, or_placard, panels, rank_style, tidy
from ddplab.plots.values import by_rank, listed, numbers, spaced
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = ["gradients", "table", "verdict"]

Array = NDArray[np.float64]
MOST_BARS = 4  # elements; more are drawn as a heat map
MOST_COLUMNS = 400


def table(values: dict[int, Any], what: str) -> Array:
    """Gradients as an array (ranks, elements): each a number, a tensor, or any nest of them, flat and in order.

    Raises ``ValueError`` if they are not equally many on all ranks, or none.

    >>> table({0: [1.0, [2.0]], 2: [3.0, 4.0]}, "before")
    array([[1., 2.],
           [3., 4.]])
    """
    rows = {rank: numbers(value, f"{what!r} of rank {rank}") for rank, value in values.items()}
    sizes = {rank: len(row) for rank, row in rows.items()}
    if len(set(sizes.values())) != 1 or not min(sizes.values()):
        told = ", ".join(f"{size} on rank {rank}" for rank, size in sizes.items())
        raise ValueError(f"gradients: {what!r} must have equally many elements on all ranks, not {told}")
    return np.stack(list(rows.values()))


def verdict(before: Array, after: Array) -> str:
    """What has become of the gradients: averaged, summed, equal in another way, or still different.

    Equal means to 1e-5 of the largest, as sums of float32 in another order differ by their rounding.

    >>> verdict(np.array([[0.0], [3.0]]), np.array([[1.5], [1.5]]))
    'every rank has the mean'
    """
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return "not all gradients are finite"
    near = 1e-5 * max(float(np.abs(before).max()), 1e-30)
    for words, expected in (("the mean", before.mean(axis=0)), ("the sum", before.sum(axis=0)), ("the same", after[0])):
        if np.abs(after - expected).max() <= near:
            return f"every rank has {words}" + (", but neither the mean nor the sum" if words == "the same" else "")
    return "the ranks still differ"


@or_placard
def gradients(run: Run | Sequence[Any], after: Sequence[Any] | None = None, ax: Axes | None = None) -> Picture | None:
    """Draw the gradients of each rank before and after averaging: bars of up to four elements, else a heat map.

    run: a run whose ranks return ``{"before": gradients, "after": gradients}``, each a tensor, a number or a
        list of them; or what each rank had before, in rank order, with ``after`` likewise.

    The mean over the ranks, before, is drawn on both sides: after averaging all should be equal to it. Of more
    than 400 elements, 400 at equal distances are drawn; the words take all into account. With ``ax`` the
    panels go there, and nothing is given back. Raises ``ValueError`` or ``TypeError`` for other values.

    >>> print(gradients([0.0, 3.0], after=[1.5, 1.5]))
    gradients of 2 ranks, 1 element: after averaging every rank has the mean
    rank  before  after
    0     0       1.5
    1     3       1.5
    mean  1.5     1.5
    """
    pairs = by_rank(run, "gradients(run)")
    if after is None:
        for rank, value in pairs.items():
            if not isinstance(value, dict) or not {"before", "after"} <= set(value):
                raise ValueError(f"rank {rank} must return {{'before': ..., 'after': ...}}, not {value!r:.60}")
        pairs, then = ({rank: v[side] for rank, v in pairs.items()} for side in ("before", "after"))
    else:
        then = by_rank(after, "gradients(before, after)")
    sides = [table(pairs, "before"), table(then, "after")]
    if sides[0].shape != sides[1].shape:
        raise ValueError(f"gradients: (ranks, elements) are {sides[0].shape} before, but {sides[1].shape} after")
    before = sides[0]
    ranks, elements = list(pairs), before.shape[1]
    mean = before.mean(axis=0)

    def paint(axes: list[Axes]) -> None:
        for ax, side, title in zip(axes, sides, ("before averaging", "after averaging"), strict=True):
            ax.set_title(title, fontsize="medium")
            if elements <= MOST_BARS:
                _paint_bars(ax, side, mean, ranks)
            else:
                image = _paint_heat(ax, np.vstack([side, mean]), [*(f"rank {rank}" for rank in ranks), "mean before"])
                image.set_clim(*_limits(np.vstack(sides)))
        axes[1].tick_params(labelleft=False)
        if elements <= MOST_BARS:
            both = [*axes[0].get_ylim(), *axes[1].get_ylim()]
            for ax in axes:
                ax.set_ylim(min(both), max(both))
            axes[0].set_ylabel("gradient")
            axes[1].legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        else:
            axes[0].figure.colorbar(image, ax=axes, label="gradient", pad=0.01)

    count = f"{elements:,} element{'s' * (elements != 1)}"
    text = f"gradients of {len(ranks)} rank{'s' * (len(ranks) != 1)}, {count}: after averaging {verdict(*sides)}"
    firsts = [[listed([f"{x:.6g}" for x in row]) for row in (*side, side.mean(axis=0))] for side in sides]
    named = zip([*map(str, ranks), "mean"], *firsts, strict=True)
    rows = [{"rank": rank, "before": old, "after": new} for rank, old, new in named]
    height = 2.6 if elements <= MOST_BARS else 1.2 + 0.3 * min(len(ranks) + 1, 17)
    return panels(ax, (8.0, height), text, paint, rows, (1, 2))


def _paint_bars(ax: Axes, side: Array, mean: Array, ranks: list[int]) -> None:
    """Groups of bars, one for each element; in a group a bar for each rank."""
    places = np.arange(len(mean)) + 0.8 * ((np.arange(len(ranks)) + 0.5) / len(ranks) - 0.5)[:, None]
    for rank, place, row in zip(ranks, places, side, strict=True):
        ax.bar(place, row, 0.74 / len(ranks), color=rank_style(rank)["color"])
    ends = np.arange(len(mean)) - 0.45, np.arange(len(mean)) + 0.45
    ax.hlines(mean, *ends, color="black", linewidth=2, label="mean before")
    ax.axhline(0, color="black", linewidth=0.6)
    shown = spaced(list(zip(places.T.reshape(-1), ranks * len(mean), strict=True)), 16)
    ax.set_xticks([place for place, _ in shown], [str(rank) for _, rank in shown])
    ax.set_xlabel("rank" if len(mean) == 1 else f"rank, for each of {len(mean)} elements")
    ax.tick_params(axis="x", length=0, labelsize=10 if len(shown) <= 10 else 8)
    tidy(ax)


def _paint_heat(ax: Axes, side: Array, names: list[str]) -> AxesImage:
    elements = side.shape[1]
    columns = np.unique(np.linspace(0, elements - 1, min(elements, MOST_COLUMNS)).astype(int))
    image = ax.imshow(side[:, columns], aspect="auto", interpolation="nearest", cmap="cividis")
    ticks = [*spaced(range(len(names) - 1), 16), len(names) - 1]
    ax.set_yticks(ticks, [names[at] for at in ticks])
    ax.axhline(len(names) - 1.5, color="white", linewidth=3)
    if len(columns) < elements:
        ax.set_xticks([])
    ax.set_xlabel("element" if len(columns) == elements else f"element ({len(columns)} of {elements:,} drawn)")
    ax.tick_params(length=0)
    return image


def _limits(values: Array) -> tuple[float, float]:
    """The range of colours; of many values, the one that holds 98 % of them, so that a few do not hide the others."""
    low, high = np.percentile(values, (1, 99) if values.shape[1] > MOST_COLUMNS else (0, 100))
    return float(low), float(high)
