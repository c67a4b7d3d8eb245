"""What each rank keeps in memory: parameters, gradients and optimizer state, and the most it ever held."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddplab.plots.picture import Picture, in_byte_ticks, or_placard, panels, rank_style, tidy
from ddplab.plots.values import NothingToDrawError, by_rank, light, spaced
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["memory", "memory_table"]

LOOKS = ((1.0, ""), (0.55, "///"), (0.25, "..."), (0.75, "xxx"), (0.35, "|||"))  # share of the rank's colour, hatch

Row = dict[str, int]


def memory_table(told: Mapping[int, Any]) -> dict[int, Row]:
    """What ranks told, checked: dicts of names and bytes, with the same names on all ranks.

    >>> memory_table({0: {"parameters": 4, "peak": 9}})
    {0: {'parameters': 4, 'peak': 9}}
    """
    names = None
    for rank, row in told.items():
        if not isinstance(row, dict) or not row or not all(isinstance(v, int | float) for v in row.values()):
            raise ValueError(f"memory: rank {rank} must return plots.memory_of(model, optimizer), not {row!r:.60}")
        names = names or list(row)
        if set(row) != set(names):
            raise ValueError(f"memory: rank {rank} tells of {', '.join(row)}, and another rank of {', '.join(names)}")
    return dict(told)


@or_placard
def memory(runs: Run | Sequence[Row] | Mapping[str, Run | Sequence[Row]], ax: Axes | None = None) -> Picture | None:
    """Draw the bytes of every rank: parameters, gradients and optimizer state on each other, and the peak.

    runs: a run whose ranks return ``plots.memory_of(model, optimizer)``, or a dict of names and bytes with the
        same names on every rank ("parameters", ..., and what begins with "peak"); or a list of such dicts,
        in rank order; or several of these by name, to be compared: ``{"DDP": run1, "FSDP2": run2}``.

    The peak has a panel of its own, as it holds the others and more. With ``ax`` the panels go there, and
    nothing is given back. Raises ``ValueError`` for other values, and if no rank returned one.

    >>> print(memory([{"parameters": 2048, "peak": 8192}, {"parameters": 1024, "peak": 8192}]))
    bytes of 2 ranks: parameters, peak
    rank  parameters  peak
       0        2048  8192
       1        1024  8192
    """
    several: Mapping[str, Any] = runs if isinstance(runs, Mapping) else {"": runs}
    if not several:
        raise ValueError("memory: give a run, or runs by name")
    failed = [name for name, one in several.items() if isinstance(one, Run) and not one.returned]
    if len(failed) == len(several):
        raise NothingToDrawError("memory(...): no rank returned a value, for the run failed")
    tables = {key: {} if key in failed else memory_table(by_rank(one, "memory(...)")) for key, one in several.items()}
    parts = list(dict.fromkeys(part for rows in tables.values() for row in rows.values() for part in row))
    peaks = [part for part in parts if part.startswith("peak")]
    stacks = [group for group in ([part for part in parts if part not in peaks], *([peak] for peak in peaks)) if group]
    shape = (1, len(stacks)) if len(tables) == 1 else (len(stacks), len(tables))

    def paint(axes: list[Axes]) -> None:
        for at, group in enumerate(stacks):
            mine = axes[at * len(tables) : (at + 1) * len(tables)]
            for ax, (name, rows) in zip(mine, tables.items(), strict=True):
                _paint(ax, rows, group)
                ax.set_title("" if at else f"{name}: failed" if name in failed else name, fontsize="medium")
            top = max(ax.get_ylim()[1] for ax in mine)
            for ax in mine:
                ax.set_ylim(0, top)
                in_byte_ticks(ax.yaxis, top)
            mine[0].set_ylabel(group[0] if len(group) == 1 else "bytes kept")
            if len(group) > 1:
                _name_parts(mine[-1], group)

    ranks = max(len(rows) for rows in tables.values())
    of = f" with {', '.join(tables)}" if len(tables) > 1 else ""
    text = f"bytes of {ranks} rank{'s' * (ranks != 1)}{of}: {', '.join(parts)}"
    text += f"; failed: {', '.join(failed)}" if failed else ""
    lines = [
        {**({"run": name} if name else {}), "rank": rank, **{part: row.get(part, 0) for part in parts}}
        for name, rows in tables.items()
        for rank, row in rows.items()
    ]
    return panels(ax, (min(9.5, 1.6 + 3.2 * shape[1]), 2.6 * shape[0]), text, paint, lines, shape)


def _paint(ax: Axes, rows: dict[int, Row], parts: list[str]) -> None:
    for rank, row in rows.items():
        below, edge = 0, 0.5 if len(rows) <= 16 else 0
        for part, (share, hatch) in zip(parts, itertools.cycle(LOOKS)):
            colour = light(rank_style(rank)["color"], share)
            ax.bar(rank, row[part], 0.8, below, color=colour, hatch=hatch, edgecolor="white", linewidth=edge)
            below += row[part]
    shown = spaced(list(rows), 16 if len(rows) <= 16 else 8)
    ax.set_xticks(shown, [str(rank) for rank in shown])
    ax.set_xlabel("rank")
    ax.tick_params(axis="x", length=0, labelsize=10 if len(shown) <= 8 else 8)
    tidy(ax)


def _name_parts(ax: Axes, parts: list[str]) -> None:
    """A legend in grey, as the colours are those of the ranks; in the order of the stack."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=light("#444444", share), hatch=hatch, edgecolor="white", label=part)
        for part, (share, hatch) in zip(parts, itertools.cycle(LOOKS))
    ]
    ax.legend(handles=patches[::-1], frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
