"""What a collective does: the tensors of every rank before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplab.plots.cells import Grid, arrived, paint_grid
from ddplab.plots.picture import Picture, draw, or_placard
from ddplab.plots.values import by_rank, in_words, numbers, spaced
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["collective", "sides"]

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def sides(results: dict[int, Any], world_size: int) -> tuple[Grid, Grid]:
    """The grids before and after, of the dicts "before" and "after" (tensors or numbers) that ranks returned.

    Whose data a number is, "before from" and "after from" say. Without them, what a rank held before
    is its own; and if every number after the call was held by exactly one rank before it, it comes from
    there, else nothing is said. A rank that returned nothing has an empty row.

    >>> sides({0: {"before": [5], "after": [7]}, 1: {"before": [7], "after": [7]}}, 2)[1]
    Grid(cells=[[7.0], [7.0]], owners=[[[1]], [[1]]])
    """
    before, after = (
        [_side(results[rank], rank, side) if rank in results else [] for rank in range(world_size)]
        for side in ("before", "after")
    )
    holders: dict[float, set[int]] = {}
    for rank, row in enumerate(before):
        for number in row:
            holders.setdefault(number, set()).add(rank)
    moved = all(len(holders.get(number, ())) == 1 for row in after for number in row)
    own: list[list[Any]] = [[[rank]] * len(row) for rank, row in enumerate(before)]
    found: list[list[Any]] = [[sorted(holders[x]) if moved else None for x in row] for row in after]
    for rank, value in results.items():
        own[rank] = value.get("before from", own[rank])
        found[rank] = value.get("after from", found[rank])
    return Grid(before, own), Grid(after, found)


def _side(value: Any, rank: int, side: str) -> list[float]:
    if not isinstance(value, dict) or side not in value:
        raise ValueError(f"rank {rank} must return {{'before': tensor, 'after': tensor}}, not {value!r:.60}")
    found: list[float] = numbers(value[side], f"{side!r} of rank {rank}").tolist()
    return found


@or_placard
def collective(
    what: str | Run,
    world_size: int = 3,
    *,
    op: Any = "SUM",
    src: int = 0,
    dst: int | None = None,
    ax: Axes | None = None,
) -> Picture | None:
    """Draw the tensors of every rank before and after a collective, which real ranks have played.

    what: "broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce", "reduce_scatter",
        "all_to_all" or "send" (with its recv): it is launched on ``world_size`` ranks, at most 64, over
        Gloo. Or a run of your own, whose ranks return ``{"before": tensor, "after": tensor}``.
    op: "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", or one of ``dist.ReduceOp``.
    src: the rank that sends, of broadcast, scatter and send.
    dst: the rank that receives, of gather and reduce (by default rank 0) and of send (the next rank).

    Element i of rank r is 10 r + i + 1; from ten ranks on, 100 r + i + 1. A cell has the colour of the rank
    whose data it holds, stripes where several were reduced (on more than eight ranks it is grey, the darker
    the more they are), and, on up to 16 ranks, a frame where data of another rank has come in. What
    ``reduce`` leaves on other ranks than ``dst`` is not defined: it is drawn as it was found. With ``ax`` the
    cells go there, and nothing is given back. Raises ``ValueError`` for a name, an op or a rank that there is not.

    >>> print(collective("all_gather", world_size=2))  # doctest: +SKIP
    all_gather(list_of_y, x) on 2 ranks: elements before and after
    rank  before  after
       0  1       1, 11
       1  11      1, 11
    """
    run = what if isinstance(what, Run) else _played(what, world_size, getattr(op, "name", op), src, dst)
    results = by_rank(run, "collective(run)")
    before, after = sides(results, run.world_size)
    call = next(iter(results.values())).get("call", run.spec.name)
    rows = [
        {"rank": rank, "before": in_words(old), "after": in_words(new)}
        for rank, (old, new) in enumerate(zip(before.cells, after.cells, strict=True))
    ]
    left = before.width + max(1.6, run.world_size * 0.12)
    right = left + after.width

    def paint(ax: Axes) -> None:
        ax.set(xlim=(0, right), ylim=(run.world_size - 0.5, -0.5), aspect="equal", xticks=[], title=call)
        ax.title.set(family="monospace", fontsize="medium")
        paint_grid(ax, before)
        paint_grid(ax, after, left, arrived(after) if run.world_size <= 16 else ())
        middle, arrow = (run.world_size - 1) / 2, {"arrowstyle": "-|>", "color": "black", "linewidth": 1.5}
        ax.annotate("", xy=(left - 0.3, middle), xytext=(before.width + 0.3, middle), arrowprops=arrow)
        for x, side in ((before.width / 2, "before"), (left + after.width / 2, "after")):
            ax.annotate(side, (x, run.world_size - 0.4), ha="center", va="top", annotation_clip=False)
        named = spaced(range(run.world_size), 16)
        ax.set_yticks(named, [f"rank {rank}" for rank in named])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)

    cell = min(0.5, 7.5 / right, 8 / run.world_size)
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    text = f"{call} on {ranks}: elements before and after"
    return draw(ax, (max(4.0, right * cell + 0.9), run.world_size * cell + 0.8), text, paint, rows)


def _played(name: str, world_size: int, op: str, src: int, dst: int | None) -> Run:
    from ddplab.launcher import launch  # as a learner would: this picture starts ranks of its own
    from ddplab.plots.exchange import COLLECTIVES, exchange

    if name not in COLLECTIVES:
        raise ValueError(f"collective({name!r}): give a run, or one of {', '.join(COLLECTIVES)}")
    if op not in OPS:
        raise ValueError(f"collective(op={op!r}): give one of {', '.join(OPS)}")
    if type(world_size) is not int or not 1 <= world_size <= 64:
        raise ValueError(f"collective(world_size={world_size!r}): give 1 to 64")
    if dst is None:
        dst = (src + 1) % world_size if name == "send" else 0
    for option, rank in (("src", src), ("dst", dst)):
        if type(rank) is not int or not 0 <= rank < world_size:
            raise ValueError(f"collective({option}={rank!r}): the ranks are 0 to {world_size - 1}")
    if name == "send" and src == dst:
        raise ValueError(f"collective('send'): src and dst are both rank {src}, and a rank cannot send to itself")
    return launch(exchange, name, op, src, dst, world_size=world_size, backend="gloo", view="quiet")
