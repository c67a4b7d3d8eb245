"""How far apart the parameters of the ranks are at each step, and how far from those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddplab.plots.picture import Picture, draw, or_placard, tidy
from ddplab.plots.values import by_rank, numbers
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["agreement", "differences"]

LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "marker": "o", "linestyle": "-"},
    {"color": "#777777", "marker": "s", "linestyle": "--"},
)


def differences(steps: Iterable[Sequence[Any]]) -> list[float]:
    """At each step, the largest difference of any parameter between any two of the given sets of parameters.

    Raises ``ValueError`` where the sets are not of one size. NaN in a parameter gives NaN.

    >>> differences([([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [1.5, 0.0])])
    [0.0, 2.0]
    """
    found = []
    for step, sets in enumerate(steps):
        rows = [numbers(one, f"the parameters at step {step}") for one in sets]
        if len({len(row) for row in rows}) != 1 or not len(rows[0]):
            raise ValueError(f"agreement: at step {step} there are {', '.join(map(str, map(len, rows)))} parameters")
        low, high = rows[0].copy(), rows[0].copy()
        for row in rows[1:]:
            np.minimum(low, row, out=low)
            np.maximum(high, row, out=high)
        found.append(float((high - low).max()))
    return found


@or_placard
def agreement(run: Run | Sequence[Any], reference: Any = None, ax: Axes | None = None) -> Picture | None:
    """Draw, step by step, the largest difference of any parameter between ranks, and between ranks and one process.

    run: a run whose ranks return a list with their parameters at each step, as a tensor or a list of tensors
        (``torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()``); or such lists, in rank order.
    reference: the same list, of one process.

    The axis is logarithmic; equal to the last bit is drawn at its foot, as 0. Steps that not all have told
    are left out. With ``ax`` the lines go there, and nothing is given back. Raises ``ValueError`` if
    there is no step, or if the numbers of parameters differ.

    >>> print(agreement([[[1.0], [2.0]], [[1.0], [2.5]]]))
    largest parameter difference over 2 steps: between 2 ranks
    step  between 2 ranks
       0  0
       1  0.5
    """
    told = by_rank(run, "agreement(run)")
    ranks = [_steps(value, f"rank {rank}") for rank, value in told.items()]
    lines: dict[str, list[float]] = {}
    if len(ranks) > 1:
        lines[f"between {len(ranks)} ranks"] = differences(zip(*ranks, strict=False))
    if reference is not None:
        against = zip(_steps(reference, "the reference"), *ranks, strict=False)
        lines["to one process"] = [float(np.max(differences([one, rank] for rank in step))) for one, *step in against]
    if not lines:
        raise ValueError("agreement(run): one rank has nobody to differ from; give reference=, or a run of more ranks")
    steps = min(len(line) for line in lines.values())
    if not steps:
        raise ValueError("agreement(run): no step was told by all; the ranks must return a list with one entry a step")

    def paint(ax: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        values = [value for line in lines.values() for value in line[:steps]]
        foot = _foot(values)
        ax.set_yscale("log")
        for (label, line), look in zip(lines.items(), LOOKS, strict=False):
            heights = [foot if value == 0 else value for value in line[:steps]]
            ax.plot(range(steps), heights, label=label, markersize=4, markevery=max(1, steps // 40), **look)
        if 0 in values:
            _name_zero(ax, foot, max(value for value in values if value < math.inf))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.set_xlim(-0.5 - 0.03 * steps, steps - 0.5 + 0.03 * steps)
        ax.set(xlabel="step", ylabel="largest difference\nof a parameter")
        tidy(ax, grid=True)
        ax.legend(frameon=False, fontsize="small")

    rows = [{"step": step, **{label: line[step] for label, line in lines.items()}} for step in range(steps)]
    names = [label if any(line[:steps]) else f"{label} (none: equal to the last bit)" for label, line in lines.items()]
    text = f"largest parameter difference over {steps} step{'s' * (steps != 1)}: {', '.join(names)}"
    return draw(ax, (7.0, 2.8), text, paint, rows)


def _steps(value: Any, whose: str) -> list[Any]:
    if isinstance(value, list | tuple) or getattr(value, "ndim", False):
        return list(value)
    raise TypeError(f"agreement: {whose} must give a list with the parameters at each step, not {value!r:.60}")


def _foot(values: Iterable[float]) -> float:
    """Where 0 is drawn: a power of ten below the smallest other value.

    >>> _foot([0.0, 0.02]), _foot([0.0])
    (0.001, 1e-09)
    """
    positive = [value for value in values if 0 < value < math.inf]
    return float(10.0 ** (math.floor(math.log10(min(positive))) - 1)) if positive else 1e-9


def _name_zero(ax: Axes, foot: float, top: float) -> None:
    """Call ``foot`` 0, and name the powers of ten above it up to ``top``, the largest value."""
    low, high = round(math.log10(foot)), math.log10(max(top, foot))
    decades = range(low + 1, math.floor(high) + 1, max(1, math.ceil((high - low) / 6)))
    ax.set_yticks([foot, *(10.0**at for at in decades)], ["0", *(f"$10^{{{at}}}$" for at in decades)])
    ax.set_yticks([], minor=True)
    ax.set_ylim(foot / 2, max(3 * top, 100 * foot))
    ax.axhline(foot * 10**0.5, color="grey", linestyle=":", linewidth=1)
