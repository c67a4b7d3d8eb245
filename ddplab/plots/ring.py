"""A ring all-reduce, step by step: who holds the sum of what."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddplab.plots.cells import Grid, changed, paint_grid
from ddplab.plots.picture import Picture, or_placard, panels
from ddplab.plots.values import by_rank, in_words, numbers
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ring", "states"]


def states(results: dict[int, Any], world_size: int) -> list[Grid]:
    """The grid of all ranks at the start and after each step, as far as all that returned have told it.

    A rank's value is a list with its chunks (numbers or a tensor) at the start and after each step; or
    dicts with "chunks" and, for each chunk, "from": the ranks whose numbers are in it.

    >>> [grid.cells for grid in states({0: [[1], [3]], 1: [[2], [3]]}, 2)]
    [[[1.0], [2.0]], [[3.0], [3.0]]]
    """
    grids = []
    for step, told in enumerate(zip(*results.values(), strict=False)):
        cells: list[list[float]] = [[] for _ in range(world_size)]
        owners: list[list[Any]] = [[] for _ in range(world_size)]
        for rank, state in zip(results, told, strict=True):
            known = state if isinstance(state, dict) else {"chunks": state}
            cells[rank] = numbers(known["chunks"], f"step {step} of rank {rank}").tolist()
            owners[rank] = known.get("from", [None] * len(cells[rank]))
        grids.append(Grid(cells, owners))
    return grids


@or_placard
def ring(what: int | Run = 4, ax: Axes | None = None) -> Picture | None:
    """Draw the chunks of every rank at the start of a ring all-reduce and after each of its steps.

    what: the number of ranks, 1 to 64: a ring of sends and receives is launched on them over Gloo. Or a
        run of your own ring, whose ranks return a list: their chunks at the start and after each step.

    Rows are ranks, columns are chunks; chunk c of rank r starts as 10 r + c + 1. A cell has stripes in the
    colours of the ranks whose numbers are in it (on more than eight ranks it is grey, the darker the
    more they are), and a frame where this step has changed it. With ``ax`` the steps go there, and
    nothing is given back. Raises ``ValueError`` if no step was told.

    >>> print(ring(2))  # doctest: +SKIP
    a ring all-reduce on 2 ranks, start and 2 steps
    step  rank  chunks
       0     0  1, 2
       0     1  11, 12
       1     0  1, 14
       1     1  12, 12
       2     0  12, 14
       2     1  12, 14
    """
    run = what if isinstance(what, Run) else _played(what)
    grids = states(by_rank(run, "ring(run)"), run.world_size)
    if not grids:
        raise ValueError(f"ring({run!r}): the ranks must return lists: their chunks at the start and after each step")
    rows = [
        {"step": step, "rank": rank, "chunks": in_words(row)}
        for step, grid in enumerate(grids)
        for rank, row in enumerate(grid.cells)
    ]
    world_size, width = run.world_size, max(1, *(grid.width for grid in grids))
    across = min(len(grids), 4 if world_size <= 8 else 8)
    down = math.ceil(len(grids) / across)

    def paint(axes: list[Axes]) -> None:
        for step, (ax, grid) in enumerate(zip(axes, grids, strict=False)):
            ax.set(xlim=(0, width), ylim=(world_size - 0.5, -0.5), aspect="equal", xticks=[])
            paint_grid(ax, grid, marked=changed(grids[step - 1], grid) if step else ())
            ax.set_title(f"step {step}" if step else "start", fontsize="small")
            ticks = range(0, world_size, 1 if world_size <= 8 else 5)
            ax.set_yticks(ticks, [f"rank {rank}" for rank in ticks] if step % across == 0 else [""] * len(ticks))
            ax.tick_params(length=0, labelsize="small")
            ax.spines[:].set_visible(False)
        for ax in axes[len(grids) :]:
            ax.set_axis_off()

    steps = f"{len(grids) - 1} step{'s' * (len(grids) != 2)}"
    text = f"a ring all-reduce on {world_size} ranks, start and {steps}"
    side = min(2.0, 7.6 / across)
    size = (side * across + 0.6, down * (side * world_size / width + 0.35))
    return panels(ax, size, text, paint, rows, (down, across))


def _played(world_size: int) -> Run:
    from ddplab.launcher import launch  # as a learner would: this picture starts ranks of its own
    from ddplab.plots.exchange import ring_all_reduce

    if type(world_size) is not int or not 1 <= world_size <= 64:
        raise ValueError(f"ring({world_size!r}): give a run, or 1 to 64 ranks")
    return launch(ring_all_reduce, world_size=world_size, backend="gloo", view="quiet")
