"""What each rank did when: a lane per rank, above what it computes, below what is on its way between the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplab import events as ev
from ddplab.plots.picture import Picture, draw, literal, rank_style
from ddplab.timeline import Row, Straggler, stragglers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddplab.run import Run

__all__ = ["Window", "timeline", "window"]

MAX_STEPS = 6  # more are not drawn unless asked for: the last STEPS are
STEPS = 4
MAX_CALLS = 24
CALLS = 16
# Of each kind the colour, hatch and place in the lane: from light to dark, so that they are told apart in grey.
KINDS: dict[str, tuple[str, str, float, float]] = {
    "data": ("#F5D76E", "", -0.2, 0.3),
    "forward": ("#9CCBEA", "", -0.2, 0.3),
    "backward": ("#2F6DA8", "", -0.2, 0.3),
    "optimizer": ("#5FB58C", "....", -0.2, 0.3),
    "waiting": ("white", "//////", -0.2, 0.3),
    "communication": ("#C8553D", "", 0.14, 0.32),
    "span": ("#DDDDDD", "", -0.42, 0.18),
}
MAX_NAMED = 16  # ranks
WIDTH_IN = 7.0
CHARACTER_IN = 0.062  # of small text


class Window(NamedTuple):
    """The time that is drawn, in seconds since the launch, and which part of the run it is, in words."""

    begin_s: float
    end_s: float
    words: str


def window(run: Run) -> Window:
    """The whole run, from when its first rank began; of many steps or calls the last few.

    A step is one ``backward``; without any, a numbered collective call counts.
    """
    begun = [event.time_s for event in run.events if isinstance(event, ev.Began)]
    begin_s = min(begun, default=min((row.begin_s for row in run.timeline), default=0.0))
    end_s = max((row.end_s for row in run.timeline), default=run.elapsed_s)
    traced_s = max((row.end_s for row in run.timeline if row.kind in ("forward", "communication")), default=end_s)
    backwards = [row for row in run.timeline if row.kind == "backward" and row.begin_s <= traced_s]
    numbered = [Row(c.rank, c.time_s, c.end_s or end_s, "", "") for c in run.collectives if c.number]
    total = max((call.number for call in run.collectives), default=0)
    for rows, word, most, last in ((backwards, "steps", MAX_STEPS, STEPS), (numbered, "calls", MAX_CALLS, CALLS)):
        ranks = [[row for row in rows if row.rank == rank] for rank in {row.rank for row in rows}]
        number = max(map(len, ranks), default=0)
        if number > most:
            return _last(run.timeline, ranks, last, f"{word} {number - last + 1} to {number} of {total}")
        if number:
            break
    return Window(begin_s, max(end_s, begin_s + 1e-3), f"all {number} {word}" if number else "the whole run")


def _last(rows: Sequence[Row], ranks: Sequence[Sequence[Row]], number: int, words: str) -> Window:
    """From the optimizer's work before the last ``number`` steps to that after them."""
    long_enough = [steps for steps in ranks if len(steps) > number]
    step_s = median(steps[-1].begin_s - steps[-2].begin_s for steps in long_enough)
    before_s = min(steps[-number - 1].end_s for steps in long_enough)
    end_s = max(steps[-1].end_s for steps in long_enough)
    optimizer = [row for row in rows if row.kind == "optimizer" and row.name.endswith("step")]
    first_s = min((row.end_s for row in optimizer if before_s <= row.begin_s < before_s + step_s), default=before_s)
    last_s = max((row.end_s for row in optimizer if end_s - step_s < row.begin_s < end_s + step_s / 2), default=end_s)
    return Window(first_s, max(end_s, last_s), words)


def numbers(run: Run, drawn: Window, late: Sequence[Straggler]) -> list[dict[str, Any]]:
    """A row per rank: milliseconds of each kind and megabytes on their way in the window; how it came last, if it did.

    Waiting in ``backward`` counts as waiting alone.
    """
    rows = []
    for rank in range(run.world_size):
        spent = dict.fromkeys(KINDS, 0.0)
        clipped = [row for row in _clipped(run.timeline, drawn) if row.rank == rank]
        waiting = [row for row in clipped if row.kind == "waiting"]
        for row in clipped:
            spent[row.kind] += row.end_s - row.begin_s
            if row.kind == "backward":
                inside = (min(one.end_s, row.end_s) - max(one.begin_s, row.begin_s) for one in waiting)
                spent["backward"] -= sum(seconds for seconds in inside if seconds > 0)
        told = {f"{kind} ms": round(1e3 * seconds, 2) for kind, seconds in spent.items() if kind != "span"}
        sent = sum(row.num_bytes or 0 for row in clipped if row.kind == "communication")
        last = next((_in_words(one) for one in late if one.rank == rank), "")
        rows.append({"rank": rank, **told, "MB on the way": round(sent / 1e6, 3), "straggler": last})
    return rows


def _clipped(rows: Sequence[Row], drawn: Window) -> list[Row]:
    """What lies in the window, cut off at its edges."""
    seen = [row for row in rows if row.end_s >= drawn.begin_s and row.begin_s <= drawn.end_s]
    return [row._replace(begin_s=max(row.begin_s, drawn.begin_s), end_s=min(row.end_s, drawn.end_s)) for row in seen]


def _in_words(one: Straggler) -> str:
    return f"last in {one.times} of {one.of}, {1e3 * one.late_s:.3g} ms after the others (median)"


def timeline(
    run: Run, begin_s: float | None = None, end_s: float | None = None, ax: Axes | None = None
) -> Picture | None:
    """Draw a lane per rank: spans on top, then what it computes and where it waits (hatched), below it communication.

    Where communication lies under backward, the two overlap. A run of many steps shows its last few;
    ``begin_s`` and ``end_s``, in seconds since the launch, show another part. A rank that keeps the others waiting
    is marked: in how many steps it came last, and how long after all others. With ``launch(..., trace=True)``
    all kinds are known, else waiting, backward and spans. With ``ax`` the lanes go there, and nothing is given back.
    Raises ``ValueError`` if ``begin_s`` is not before ``end_s``.
    """
    drawn = window(run)
    if begin_s is not None or end_s is not None:
        first_s = 0.0 if begin_s is None else begin_s
        last_s = run.elapsed_s if end_s is None else end_s
        drawn = Window(first_s, last_s, "a part")
        if not first_s < last_s:
            raise ValueError(f"timeline needs begin_s before end_s, not {first_s} and {last_s}")
    late = stragglers(run.events, run.timeline)
    rows = _clipped(run.timeline, drawn)

    def paint(ax: Axes) -> None:
        for rank in range(run.world_size):
            _lane(ax, rank, [row for row in rows if row.rank == rank], drawn, run.world_size <= MAX_NAMED)
        for one in late:
            text = f"last in {one.times} of {one.of},\n{1e3 * one.late_s:.3g} ms late"
            x, side, where = (-0.02, "right", "top") if run.world_size <= MAX_NAMED else (1.01, "left", "center")
            y = one.rank + (0.16 if where == "top" else 0)
            ax.text(x, y, text, transform=ax.get_yaxis_transform(), ha=side, va=where, fontsize="x-small")
        words = "" if drawn.words == "a part" else f" ({drawn.words})"
        ax.set(xlim=drawn[:2], ylim=(run.world_size - 0.5, -0.5), xlabel=f"seconds since the launch{words}")
        _name(ax, run.world_size)
        _explain(ax, rows)

    ranks = f"{run.world_size} rank" + "s" * (run.world_size != 1)
    size = (WIDTH_IN, 1.1 + min(0.75, 9 / run.world_size) * run.world_size)
    return draw(ax, size, f"timeline of {ranks}: {drawn.words}", paint, numbers(run, drawn, late))


def _lane(ax: Axes, rank: int, rows: Sequence[Row], drawn: Window, is_high: bool) -> None:
    """What one rank did, with labels where the lane is high enough; waiting lies over backward, of which it is part."""
    levels = _levels([row for row in rows if row.kind == "communication"])
    for kind, (colour, hatch, offset, height) in KINDS.items():
        mine = [row for row in rows if row.kind == kind]
        num_levels = 1 + (max(levels, default=0) if kind == "communication" else 0)
        for level in range(num_levels):
            some = [row for at, row in enumerate(mine) if num_levels == 1 or levels[at] == level]
            bottom = rank + offset + level * height / num_levels
            bars = [(row.begin_s, row.end_s - row.begin_s) for row in some]
            look: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "#444444" if hatch else "white"}
            ax.broken_barh(bars, (bottom, height / num_levels), linewidth=0.3, **look)
            if kind in ("span", "communication") and is_high:
                for row in some:
                    _label(ax, row, bottom + height / num_levels / 2, drawn)


def _levels(rows: Sequence[Row]) -> list[int]:
    """For each row, by beginning, the first of two levels that is free; the second if neither is.

    >>> _levels([Row(0, 0, 2, "", ""), Row(0, 1, 3, "", ""), Row(0, 2, 4, "", "")])
    [0, 1, 0]
    """
    free_s, found = 0.0, []
    for row in rows:
        found.append(int(row.begin_s < free_s))
        free_s = free_s if found[-1] else row.end_s
    return found


def _label(ax: Axes, row: Row, y: float, drawn: Window) -> None:
    """The name of a span, or the size of what is on its way, where there is room for it."""
    size = row.num_bytes or 0
    text = f"{size / 1e6:.3g} MB" if size >= 1e5 else f"{size / 1e3:.3g} kB" if size else ""
    text = literal(row.name) if row.kind == "span" else text
    width_in = ax.get_figure().get_figwidth() * ax.get_position().width  # type: ignore[union-attr]
    if text and (row.end_s - row.begin_s) / (drawn.end_s - drawn.begin_s) * width_in > CHARACTER_IN * len(text):
        colour = "black" if row.kind == "span" else "white"
        ax.text((row.begin_s + row.end_s) / 2, y, text, ha="center", va="center", fontsize="xx-small", color=colour)


def _name(ax: Axes, world_size: int) -> None:
    every = -(-world_size // MAX_NAMED)
    ax.set_yticks(range(0, world_size, every), [f"rank {rank}" for rank in range(0, world_size, every)])
    for rank, label in zip(range(0, world_size, every), ax.get_yticklabels(), strict=True):
        label.set(color=rank_style(rank)["color"], fontweight="bold")
    ax.ticklabel_format(axis="x", useOffset=False)
    ax.spines[["top", "right"]].set_visible(False)


def _explain(ax: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.patches import Patch

    kinds, spans = {row.kind for row in rows}, sorted({row.name for row in rows if row.kind == "span"})
    words = dict.fromkeys(KINDS, "") | {"span": literal(spans[0]) if len(spans) == 1 else "spans"}
    patches = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#444444", linewidth=0.3, label=words[kind] or kind)
        for kind, (colour, hatch, *_) in KINDS.items()
        if kind in kinds
    ]
    ax.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=7, frameon=False, fontsize="small",
              columnspacing=1.2, handlelength=1.5)  # fmt: skip
