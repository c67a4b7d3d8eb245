"""What all pictures share: one figure with a text twin, and the look of a rank."""

from __future__ import annotations

import functools
import inspect
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ddplab.plots.values import NothingToDrawError, in_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["Picture", "draw", "in_byte_ticks", "literal", "or_placard", "panels", "rank_style", "tidy"]

# Okabe and Ito's palette (2008), which the colour-blind can tell apart; line styles tell ranks apart in grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F6F00", "#555555")
_LINES = ("-", "--", "-.", ":")
Plot = TypeVar("Plot", bound=Callable[..., Any])


def rank_style(rank: int) -> dict[str, Any]:
    """The colour and line style of a rank, the same in every picture.

    >>> rank_style(0)["color"], rank_style(0) == rank_style(8)
    ('#0072B2', False)
    """
    colour = _COLOURS[rank % len(_COLOURS)]
    return {"color": colour, "linestyle": _LINES[(rank + rank // len(_COLOURS)) % len(_LINES)]}


class Picture:
    """A drawn figure. Ending a cell, it shows exactly one picture.

    ``text`` says in words what it shows, the same each time; ``rows`` has the numbers behind it, and
    ``print(picture)`` gives both.
    """

    def __init__(self, figure: Figure, text: str, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.figure = figure
        self.text = text
        self.rows = list(rows)

    def save(self, path: str) -> None:
        """Write the picture to a file; its ending gives the format."""
        self.figure.savefig(path, bbox_inches="tight")

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        from ddplab import tables

        rows = [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in self.rows]
        return f"{self.text}\n{tables.to_text(rows)}".rstrip()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        data = io.BytesIO()
        with np.errstate(all="ignore"):
            self.figure.savefig(data, format="png", dpi=110, bbox_inches="tight")
        return {"image/png": data.getvalue(), "text/plain": self.text}


def draw(
    ax: Axes | None,
    size: tuple[float, float],
    text: str,
    paint: Callable[[Axes], None],
    rows: Sequence[dict[str, Any]] = (),
) -> Picture | None:
    """Paint into ``ax``, or into a figure of ``size`` inches, which is given back.

    The figure is not one of pyplot's, so nothing else shows it a second time or keeps it open.
    """
    return panels(ax, size, text, lambda axes: paint(axes[0]), rows)


def panels(
    ax: Axes | None,
    size: tuple[float, float],
    text: str,
    paint: Callable[[list[Axes]], None],
    rows: Sequence[dict[str, Any]] = (),
    shape: tuple[int, int] = (1, 1),
) -> Picture | None:
    """Like :func:`draw`, with ``shape`` rows and columns of axes, which ``paint`` gets row by row.

    A given ``ax`` is split into them. Raises ``ValueError`` if it is no subplot, and so cannot be split.
    """
    if ax is not None:
        paint(_split(ax, shape))
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    paint(list(figure.subplots(*shape, squeeze=False).flat))
    return Picture(figure, text, rows)


def or_placard(plot: Plot) -> Plot:
    """``plot``, which of a run that has not got so far shows a sentence in place of a picture, and raises nothing.

    Nor does it warn of infinite values: one sees them.
    """

    @functools.wraps(plot)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                return plot(*args, **kwargs)
        except NothingToDrawError as nothing:
            text, ax = str(nothing), inspect.signature(plot).bind(*args, **kwargs).arguments.get("ax")
        return draw(ax, (7.0, 0.6), text, lambda ax: _paint_placard(ax, text))

    return drawn  # type: ignore[return-value]


def _paint_placard(ax: Axes, text: str) -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, literal(text), ha="center", va="center", color="#555555", transform=ax.transAxes, wrap=True)


def _split(ax: Axes, shape: tuple[int, int]) -> list[Axes]:
    if shape == (1, 1):
        return [ax]
    place = ax.get_subplotspec()
    if place is None:
        raise ValueError("this picture has several panels: ax= must come from figure.add_subplot or subplots")
    ax.set_axis_off()
    grid = place.subgridspec(*shape)
    return [ax.figure.add_subplot(grid[row, column]) for row in range(shape[0]) for column in range(shape[1])]


def literal(name: str) -> str:
    """A learner's name as matplotlib shows it letter by letter: between two dollar signs it would read TeX.

    >>> literal("$loss$")
    '\\\\$loss\\\\$'
    """
    return name.replace("$", r"\$")


def tidy(ax: Axes, grid: bool = False) -> None:
    """Take away the frame's upper and right line; with ``grid``, draw pale lines behind the values."""
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(alpha=0.25)


def in_byte_ticks(axis: Axis, top: float) -> None:
    """Name a linear axis from 0 to ``top`` bytes at some round numbers of B, KiB, MiB or GiB."""
    from matplotlib.ticker import MultipleLocator

    unit = 1024.0 ** int(math.log(max(top / 2, 1), 1024))
    steps = [unit * ten * factor for ten in (0.1, 1, 10, 100) for factor in (1, 2, 5)]
    axis.set_major_locator(MultipleLocator(next((step for step in steps if top / step <= 5), 1000 * unit)))
    axis.set_major_formatter(lambda num_bytes, _: in_bytes(num_bytes) if num_bytes else "0")
