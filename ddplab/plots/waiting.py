"""Where each rank stood when its run ended: a lane per rank, with its calls into ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ddplab import events as ev
from ddplab.diagnosis import calls, describe, standings
from ddplab.plots.picture import Picture, draw, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddplab.run import Run

__all__ = ["lanes", "waiting"]


class Lane(NamedTuple):
    """One rank over time, in seconds since the first rank began.

    It ran from ``begin_s`` to ``end_s``, was in calls during ``waits``, and stood in one during ``stuck``
    when it was stopped; ``label`` says in which, or where else it was.
    """

    rank: int
    begin_s: float
    end_s: float
    waits: list[tuple[float, float]]
    stuck: tuple[float, float] | None
    label: str


def lanes(run: Run) -> list[Lane]:
    """A lane per rank that began, in rank order."""
    begun = {event.rank: event.time_s for event in run.events if isinstance(event, ev.Began)}
    last = {e.rank: e.time_s for e in run.events if isinstance(e, ev.Exited)}
    last |= {e.rank: e.time_s for e in run.events if isinstance(e, ev.Result | ev.Failed | ev.Stopped)}
    zero_s = min(begun.values(), default=0.0)
    found = []
    for one in standings(run.events, run.world_size):
        if one.rank not in begun:
            continue
        begin_s, end_s = begun[one.rank] - zero_s, last.get(one.rank, run.elapsed_s) - zero_s
        mine = [call for call in calls(run.events) if call.rank == one.rank]
        ended = [(call.time_s - zero_s, call.end_s - zero_s) for call in mine if call.end_s is not None]
        waits = [(max(first_s, begin_s), last_s) for first_s, last_s in ended if last_s > begin_s]
        stuck = (one.call.time_s - zero_s, end_s) if one.call else None
        where = one.located.where if one.located else None
        silent = "did not answer" if one.located and not where else ""
        label = describe(one.call) if one.call else str(where) if where else silent or one.ended
        found.append(Lane(one.rank, begin_s, end_s, waits, stuck, label))
    return found


def waiting(run: Run, ax: Axes | None = None) -> Picture | None:
    """Draw a lane per rank: pale where it computed, dark in calls into ``torch.distributed``, hatched where it stood.

    The text at the end of a lane says in which call, or at which line, the rank was. With ``ax`` the
    lanes go there, and nothing is given back.
    """
    drawn = lanes(run)

    def paint(ax: Axes) -> None:
        for lane in drawn:
            colour = rank_style(lane.rank)["color"]
            row = (lane.rank - 0.35, 0.7)
            ax.broken_barh([(lane.begin_s, lane.end_s - lane.begin_s)], row, color=colour, alpha=0.2)
            ax.broken_barh([(begin, end - begin) for begin, end in lane.waits], row, color=colour)
            if lane.stuck:
                begin, end = lane.stuck
                ax.broken_barh([(begin, end - begin)], row, facecolor="white", edgecolor=colour, hatch="////")
            ax.annotate(f" {lane.label}", (lane.end_s, lane.rank), va="center", fontsize="small", annotation_clip=False)
        ax.set(xlabel="seconds since the first rank began", ylim=(run.world_size - 0.5, -0.5))
        ax.set_yticks(range(run.world_size), [f"rank {rank}" for rank in range(run.world_size)])
        ax.spines[["top", "right"]].set_visible(False)

    size = (7.0, 0.8 + 0.35 * min(run.world_size, 24))
    text = "\n".join(f"rank {lane.rank}: {lane.label}" for lane in drawn) or "no rank began"
    return draw(ax, size, text, paint)
