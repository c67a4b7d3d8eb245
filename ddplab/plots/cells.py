"""A grid of numbers with a row for each rank, each cell in the colours of the ranks whose data it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddplab.plots.picture import rank_style
from ddplab.plots.values import light

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Grid", "arrived", "changed", "paint_grid", "stripes"]

UNKNOWN = (0.88, 0.88, 0.88)  # data of unknown origin
NOBODY = (0.97, 0.97, 0.97)  # a buffer that holds no rank's data yet
MOST_STRIPES = 8
SMALLEST_POINTS = 4


class Grid(NamedTuple):
    """``cells[rank]`` are the numbers of a rank, which may be none; ``owners[rank][i]`` the ranks in number i.

    No owners are nobody's data; None says that they are not known.
    """

    cells: list[list[float]]
    owners: list[list[Sequence[int] | None]]

    @property
    def width(self) -> int:
        """The most numbers of a rank."""
        return max((len(row) for row in self.cells), default=0)


def stripes(grid: Grid) -> NDArray[np.float64]:
    """The grid as a picture (ranks, columns * n, 3) of colours, n a place for each rank: a cell is striped by owner.

    On more than eight ranks a cell of several owners is grey, the darker the more they are.

    >>> stripes(Grid([[1.0], []], [[None], []]))[:, :, 0].tolist()
    [[0.88, 0.88], [1.0, 1.0]]
    """
    per_cell = max(1, len(grid.cells))
    image = np.ones((len(grid.cells), grid.width * per_cell, 3))
    for row, owners in enumerate(grid.owners):
        for column, ranks in enumerate(owners):
            looks = _looks(ranks, per_cell)
            for place in range(per_cell):
                image[row, column * per_cell + place] = looks[place * len(looks) // per_cell]
    return image


def _looks(ranks: Sequence[int] | None, world_size: int) -> list[tuple[float, float, float]]:
    if not ranks:
        return [UNKNOWN if ranks is None else NOBODY]
    if len(ranks) > 1 and world_size > MOST_STRIPES:
        return [(grey := 0.94 - 0.36 * len(ranks) / world_size, grey, grey)]
    return [light(rank_style(rank)["color"]) for rank in ranks]


def changed(before: Grid, after: Grid) -> list[tuple[int, int]]:
    """The places (rank, column) whose number is another, or new, after.

    >>> changed(Grid([[1.0, 2.0]], []), Grid([[1.0, 3.0, 4.0]], []))
    [(0, 1), (0, 2)]
    """
    pairs = enumerate(zip(before.cells, after.cells, strict=True))
    return [(row, at) for row, (old, new) in pairs for at, x in enumerate(new) if at >= len(old) or old[at] != x]


def arrived(grid: Grid) -> list[tuple[int, int]]:
    """The places (rank, column) that hold data of another rank.

    >>> arrived(Grid([[1.0, 2.0], [3.0]], [[[0], [0, 1]], [[]]]))
    [(0, 1)]
    """
    pairs = ((row, column, ranks) for row, owners in enumerate(grid.owners) for column, ranks in enumerate(owners))
    return [(row, column) for row, column, ranks in pairs if set(ranks or ()) - {row}]


def paint_grid(ax: Axes, grid: Grid, left: float = 0, marked: Sequence[tuple[int, int]] = ()) -> None:
    """Paint the grid with its first column from ``left`` to ``left + 1``, and rank r around y = r.

    Numbers are written where they fit; the ``marked`` cells get a black frame. The limits of ``ax`` must be set.
    """
    from matplotlib.patches import Rectangle

    ranks, width = len(grid.cells), grid.width
    if not width:
        return
    ax.imshow(stripes(grid), extent=(left, left + width, ranks - 0.5, -0.5), interpolation="nearest", zorder=1)
    ax.vlines([left + column for column in range(1, width)], -0.5, ranks - 0.5, color="white", linewidth=0.8)
    ax.hlines([row - 0.5 for row in range(1, ranks)], left, left + width, color="white", linewidth=0.8)
    texts = [[f"{x:.6g}" for x in row] for row in grid.cells]
    points = _font_points(ax, max(len(text) for row in texts for text in row))
    for row, column in marked:
        ax.add_patch(Rectangle((left + column, row - 0.5), 1, 1, fill=False, linewidth=1.4, zorder=3))
    for row, words in enumerate(texts):
        for column, text in enumerate(words if points >= SMALLEST_POINTS else ()):
            ax.text(left + column + 0.5, row, text, ha="center", va="center", fontsize=points, zorder=4)


def _font_points(ax: Axes, num_characters: int) -> float:
    """The font size at which so many characters fit into a cell; the limits of ``ax`` must be set."""
    box = ax.get_window_extent()
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    inches = min(box.width / abs(right - left), box.height / abs(top - bottom)) / ax.figure.dpi
    return min(10.0, 72 * inches * min(0.55, 1.35 / max(num_characters, 1)))
