"""How ``DistributedDataParallel`` puts gradients into buckets, and in which order they become ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplab.plots.of_model import Buckets, buckets_of
from ddplab.plots.picture import Picture, draw, in_byte_ticks, or_placard, tidy
from ddplab.plots.values import by_rank, in_bytes
from ddplab.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["buckets"]

MOST_NAMED = 40


@or_placard
def buckets(what: Run | Buckets | Any, ax: Axes | None = None) -> Picture | None:
    """Draw the parameters of a DDP model from the first gradient ready to the last, coloured by bucket.

    what: a run whose ranks return ``plots.buckets_of(ddp_model)``, or what that gave, or the model itself.

    A bar is as long as the gradient has bytes. DDP reduces a bucket when all gradients in it are ready.
    Of more than 40 parameters, each bucket is one bar. With ``ax`` the bars go there, and nothing is
    given back. Raises ``ValueError`` if there is no bucket or if ranks differ.

    >>> print(buckets([[("fc.bias", 40), ("fc.weight", 3360)], [("conv.weight", 1800)]]))
    2 buckets of 3 parameters, in the order in which gradients become ready
    bucket  parameter    bytes
         0  fc.bias         40
         0  fc.weight     3360
         1  conv.weight   1800
    """
    found = _of(what)
    if not found or not all(found):
        raise ValueError("buckets(...): there is no bucket with a parameter; return plots.buckets_of(ddp_model)")
    rows = [{"bucket": at, "parameter": name, "bytes": size} for at, one in enumerate(found) for name, size in one]
    num_rows = len(rows) + len(found) if len(rows) <= MOST_NAMED else len(found)

    def paint(ax: Axes) -> None:
        from matplotlib import colormaps

        colours = [colormaps["cividis"](0.15 + 0.7 * at / max(1, len(found) - 1)) for at in range(len(found))]
        (_paint_parameters if len(rows) <= MOST_NAMED else _paint_whole)(ax, found, colours)
        ax.margins(x=0.12)
        ax.set(xlabel="bytes of the gradient", ylim=(num_rows - 0.4, -0.6), xlim=(0, None))
        in_byte_ticks(ax.xaxis, ax.get_xlim()[1])
        tidy(ax)
        ax.tick_params(axis="y", length=0)

    text = f"{len(found)} bucket{'s' * (len(found) != 1)} of {len(rows)} parameter{'s' * (len(rows) != 1)}"
    size = (8.0, 0.8 + 0.24 * min(num_rows, 60))
    return draw(ax, size, f"{text}, in the order in which gradients become ready", paint, rows)


def _of(what: Any) -> Buckets:
    if not isinstance(what, Run):
        return list(what) if isinstance(what, list | tuple) else buckets_of(what)
    told = by_rank(what, "buckets(run)")
    first = next(iter(told))
    for rank, value in told.items():
        if not isinstance(value, list):
            raise ValueError(f"rank {rank} must return plots.buckets_of(ddp_model), not {value!r:.60}")
        if value != told[first]:
            raise ValueError(f"buckets(run): rank {rank} has other buckets than rank {first}; give those of one rank")
    found: Buckets = told[first]
    return found


def _paint_parameters(ax: Axes, found: Buckets, colours: list[Any]) -> None:
    """A row for each bucket's name, and below it a bar for each parameter."""
    row, ticks = 0, {}
    for at, (bucket, colour) in enumerate(zip(found, colours, strict=True)):
        size = in_bytes(sum(num_bytes for _, num_bytes in bucket))
        title = f" bucket {at}{', ready first' * (at == 0)}: {size}"
        ax.annotate(title, (0, row), va="center", weight="bold", fontsize=9)
        for offset, (name, num_bytes) in enumerate(bucket, row + 1):
            ax.barh(offset, num_bytes, 0.75, color=colour)
            ax.annotate(f" {in_bytes(num_bytes)}", (num_bytes, offset), va="center", fontsize=8)
            ticks[offset] = name
        row += len(bucket) + 1
    ax.set_yticks(list(ticks), [name if len(name) <= 48 else f"…{name[-47:]}" for name in ticks.values()], fontsize=8)


def _paint_whole(ax: Axes, found: Buckets, colours: list[Any]) -> None:
    """A bar for each bucket, in which white lines part the parameters."""
    for at, (bucket, colour) in enumerate(zip(found, colours, strict=True)):
        left = 0
        for _, num_bytes in bucket:
            ax.barh(at, num_bytes, 0.75, left, color=colour, edgecolor="white", linewidth=0.6)
            left += num_bytes
        ax.annotate(f" {in_bytes(left)}", (left, at), va="center", fontsize=8)
    names = [f"bucket {at}: {len(bucket)} parameters" for at, bucket in enumerate(found)]
    ax.set_yticks(range(len(found)), names, fontsize=8)
