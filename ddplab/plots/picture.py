"""What all pictures share: one figure with a text twin, and the look of a rank."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Picture", "draw", "rank_style"]

# Okabe and Ito's palette (2008), which the colour-blind can tell apart; line styles tell ranks apart in grey.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F6F00", "#555555")
_LINES = ("-", "--", "-.", ":")


def rank_style(rank: int) -> dict[str, Any]:
    """The colour and line style of a rank, the same in every picture.

    >>> rank_style(0)["color"], rank_style(0) == rank_style(8)
    ('#0072B2', False)
    """
    colour = _COLOURS[rank % len(_COLOURS)]
    return {"color": colour, "linestyle": _LINES[(rank + rank // len(_COLOURS)) % len(_LINES)]}


class Picture:
    """A drawn figure. Ending a cell, it shows exactly one picture; ``text`` says the same in words."""

    def __init__(self, figure: Figure, text: str) -> None:
        self.figure = figure
        self.text = text

    def save(self, path: str) -> None:
        """Write the picture to a file; its ending gives the format."""
        self.figure.savefig(path, bbox_inches="tight")

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=110, bbox_inches="tight")
        return {"image/png": data.getvalue(), "text/plain": self.text}


def draw(ax: Axes | None, size: tuple[float, float], text: str, paint: Callable[[Axes], None]) -> Picture | None:
    """Paint into ``ax``, or into a figure of ``size`` inches, which is given back.

    The figure is not one of pyplot's, so nothing else shows it a second time or keeps it open.
    """
    if ax is not None:
        paint(ax)
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    paint(figure.add_subplot())
    return Picture(figure, text)
