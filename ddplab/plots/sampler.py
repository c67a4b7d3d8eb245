"""Which sample goes to which rank at which step: the map of a sampler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddplab.plots import shares
from ddplab.plots.picture import Picture, or_placard, panels, rank_style
from ddplab.plots.values import light, listed, spaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = ["sampler"]

MOST_CELLS = 36  # side by side, with their numbers
MOST_PIXELS = 2000


@or_placard
def sampler(
    what: int | Any,
    world_size: int | None = None,
    *,
    epochs: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    set_epoch: bool = True,
    per_rank_batch_size: int = 1,
    ax: Axes | None = None,
) -> Picture | None:
    """Draw which sample each rank gets at which step, the epochs side by side. No process is started.

    what: a number of samples, shared out by ``DistributedSampler`` over ``world_size`` ranks with ``shuffle``,
        ``seed`` and ``drop_last``; or a sampler of your own that has ``num_replicas`` and ``rank``; or lists of
        indices, one for each rank; or a run whose ranks returned such lists. A list of lists is one for each epoch.
    epochs, set_epoch: how many epochs, from 0, and whether ``set_epoch(epoch)`` is called before each.
    per_rank_batch_size: samples of a rank at each step; lines part the steps.

    A sample that is met again in an epoch is hatched. Above each epoch stand those, and the samples that are
    never met. Large maps are drawn as an image, in which a sample's colour is its index. With ``ax`` the
    maps go there, and nothing is given back. Raises ``ValueError`` for counts below 1 and empty lists,
    ``TypeError`` for what is no sampler.

    >>> print(sampler(5, 2, shuffle=False))
    5 samples on 2 ranks
    epoch 0: met again 0; never met none
    epoch  rank  samples
        0     0  0, 2, 4
        0     1  1, 3, 0
    """
    for name, value in (("epochs", epochs), ("per_rank_batch_size", per_rank_batch_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"sampler({name}={value!r}): give a whole number of 1 or more")
    told, num_samples = shares.of(
        what, world_size, epochs=epochs, set_epoch=set_epoch, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    again = [shares.repeated(epoch) for epoch in told]
    met = [epoch.T[seen.T].tolist() for epoch, seen in zip(told, again, strict=True)]
    never = [shares.dropped(epoch, num_samples) for epoch in told]
    num_epochs, ranks, places = told.shape
    small = places <= MOST_CELLS and ranks <= 16
    across = min(num_epochs, max(1, MOST_CELLS // max(places, 1)) if small else 3)
    down = math.ceil(num_epochs / across)

    def paint(axes: list[Axes]) -> None:
        for epoch, ax in enumerate(axes[:num_epochs]):
            listing = f"met again: {listed(met[epoch], most)}\nnever met: {listed(never[epoch], most)}"
            ax.set_title(f"epoch {epoch}\n{listing}", fontsize="small")
            ax.set(xlim=(0, max(places, 1)), ylim=(ranks - 0.5, -0.5))
            if small:
                _paint_cells(ax, told[epoch], again[epoch])
            else:
                image = _paint_image(ax, told[epoch], num_samples)
            _name_steps(ax, places, per_rank_batch_size)
            named = spaced(range(ranks), 16)
            ax.set_yticks(named, [f"rank {rank}" for rank in named])
            ax.tick_params(length=0)
        for ax in axes[num_epochs:]:
            ax.set_axis_off()
        if not small:
            bar = axes[0].figure.colorbar(image, ax=axes, label="index of the sample", format="{x:,.0f}", pad=0.01)
            bar.set_ticks([0, num_samples // 2, num_samples - 1])

    samples = "1 sample" if num_samples == 1 else f"{num_samples:,} samples"
    words = [f"epoch {at}: met again {listed(met[at])}; never met {listed(never[at])}" for at in range(num_epochs)]
    text = "\n".join([f"{samples} on {ranks} rank{'s' * (ranks != 1)}", *words])
    rows = [
        {"epoch": epoch, "rank": rank, "samples": listed(shares.held(told[epoch, rank]), 20)}
        for epoch in range(num_epochs)
        for rank in range(ranks)
    ]
    width = min(9.0, max(3.0, across * (0.42 * places + 0.7))) if small else 9.0
    most = min(8, max(2, int(2.3 * width / across) - 3))  # that fit above a map
    height = ranks * (0.42 if ranks <= 8 else 0.3) if small else 0.2 * max(4, min(ranks, 24))
    return panels(ax, (width, down * (height + 1.2)), text, paint, rows, (down, across))


def _paint_cells(ax: Axes, epoch: shares.Map, again: NDArray[np.bool_]) -> None:
    from matplotlib.patches import Rectangle

    points = min(9.0, 24.0 / len(str(epoch.max(initial=0))), 260.0 / max(epoch.shape[1], 1))
    for (rank, place), index in np.ndenumerate(epoch):
        if index == shares.EMPTY:
            continue
        colour = rank_style(rank)["color"]
        look: dict[str, Any] = {"facecolor": light(colour), "edgecolor": "white"}
        if again[rank, place]:
            look = {"facecolor": "white", "edgecolor": colour, "hatch": "////"}
        ax.add_patch(Rectangle((place, rank - 0.5), 1, 1, linewidth=0.8, **look))
        paper = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 0.8}
        ax.text(place + 0.5, rank, str(index), ha="center", va="center", fontsize=points, bbox=paper)
    ax.spines[:].set_visible(False)


def _paint_image(ax: Axes, epoch: shares.Map, num_samples: int) -> AxesImage:
    ranks, places = epoch.shape
    shown = np.unique(np.linspace(0, places - 1, min(places, MOST_PIXELS)).astype(int))
    return ax.imshow(
        np.ma.masked_less(epoch[:, shown], 0),
        extent=(0, places, ranks - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0,
        vmax=num_samples - 1,
    )


def _name_steps(ax: Axes, places: int, per_rank_batch_size: int) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = math.ceil(places / per_rank_batch_size)
    most = 12 if steps <= MOST_CELLS else 5
    wanted = MaxNLocator(most, integer=True, min_n_ticks=1).tick_values(0, max(steps - 1, 1))
    named = [int(step) for step in wanted if 0 <= step < steps]
    middles = [(step * per_rank_batch_size + min((step + 1) * per_rank_batch_size, places)) / 2 for step in named]
    ax.set_xticks(middles, [f"{step:,}" for step in named])
    ax.set_xlabel("step" if per_rank_batch_size == 1 else f"step ({per_rank_batch_size} samples a rank)")
    if per_rank_batch_size > 1 and steps <= MOST_CELLS:
        ends = [step * per_rank_batch_size for step in range(1, steps)]
        ax.vlines(ends, -0.5, ax.get_ylim()[0], color="black", linewidth=1.2)
