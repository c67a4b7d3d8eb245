"""Calls between workers as a sequence diagram: a line down for each worker, an arrow for each request and reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplab.plots.picture import Picture, draw, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddplab.run import Run

__all__ = ["Message", "messages", "rpc", "workers"]

KINDS = ("rpc_sync", "rpc_async", "remote")
ASKS_TYPE = "_rref_typeof_on_owner"  # torch's own call, before the first method of an RRef
MAX_MESSAGES = 16
ROW_IN = 0.24


class Message(NamedTuple):
    """A call from one rank to another, in seconds since the launch.

    The caller asked at ``begin_s``, stood still from ``wait_s`` and had its answer at ``end_s``. Of ``rpc_async`` and
    ``remote`` both are those of the first wait; None if it never waited, or, ``end_s``, if no answer came.
    """

    caller: int
    callee: int
    kind: str
    function: str
    begin_s: float
    wait_s: float | None
    end_s: float | None


def workers(run: Run) -> dict[int, str]:
    """The name of each rank that called ``init_rpc``."""
    return {call.rank: call.worker for call in run.collectives if call.name == "init_rpc"}


def messages(run: Run) -> list[Message]:
    """The calls of ``rpc_sync``, ``rpc_async`` and ``remote``, by time; of a worker that no rank has, none."""
    ranks = {name: rank for rank, name in workers(run).items()}
    waits = {(c.rank, c.since_s): c for c in reversed(run.collectives) if c.since_s is not None}
    found = []
    for call in run.collectives:
        callee = call.peer if call.peer is not None else ranks.get(call.worker)
        if call.name in KINDS and callee is not None and call.function != ASKS_TYPE:
            wait = call if call.name == "rpc_sync" else waits.get((call.rank, call.time_s))
            times = (wait.time_s, wait.end_s) if wait else (None, None)
            found.append(Message(call.rank, callee, call.name, call.function, call.time_s, *times))
    return sorted(found, key=lambda one: one.begin_s)


def rpc(run: Run, ax: Axes | None = None) -> Picture | None:
    """Draw the calls between workers, time going down, one line for each moment at which something was sent or came.

    A full arrow asks, a dashed one answers. Where the caller stands still until the answer comes, its line is a
    hatched bar: all of ``rpc_sync``, of ``rpc_async`` the ``wait()``, of ``remote`` the ``to_here()``. An answer is
    drawn when the caller has it; when the other worker was done is not known. Of many calls the first 16 are
    drawn. With ``ax`` the diagram goes there, and nothing is given back.
    """
    found, names = messages(run), workers(run)
    shown = found[:MAX_MESSAGES]
    zero_s = found[0].begin_s if found else 0.0
    columns = sorted(names.keys() | {rank for one in shown for rank in (one.caller, one.callee)})
    moments = sorted({t for one in shown for t in (one.begin_s, one.wait_s, one.end_s) if t is not None})
    left_out = f" (the first {len(shown)})" if len(shown) < len(found) else ""

    def paint(ax: Axes) -> None:
        for x, rank in enumerate(columns):
            ax.axvline(x, color="#999999", linewidth=1, zorder=0)
            title = f"{names[rank]}\nrank {rank}" if names.get(rank) else f"rank {rank}"
            ax.annotate(title, (x, 1), (0, 4), ax.get_xaxis_transform(), textcoords="offset points", ha="center",
                        color=rank_style(rank)["color"], fontweight="bold", fontsize="small")  # fmt: skip
        for one in shown:
            _arrows(ax, one, columns, moments)
        ax.set(xlim=(-0.6, len(columns) - 0.4), ylim=(len(moments) - 0.2, -1), xticks=[])
        ax.set_yticks(range(len(moments)), [f"{1e3 * (moment - zero_s):.1f}" for moment in moments], fontsize="x-small")
        ax.set_ylabel(f"ms since the first call{left_out}\n(not to scale)")
        ax.spines[:].set_visible(False)

    size = (min(7.0, 1.6 + 1.8 * max(1, len(columns))), 1.0 + ROW_IN * max(3, len(moments)))
    rows = [{"caller": names.get(one.caller) or one.caller, "callee": names.get(one.callee) or one.callee,
             "call": one.kind, "function": one.function, "ms": "" if one.end_s is None else
             round(1e3 * (one.end_s - one.begin_s), 2)} for one in found]  # fmt: skip
    calls = f"{len(found)} call{'s' * (len(found) != 1)}"
    return draw(ax, size, f"{calls} between {len(columns)} workers{left_out}", paint, rows)


def _arrows(ax: Axes, one: Message, columns: Sequence[int], moments: Sequence[float]) -> None:
    """The request, the reply and, on the line of the caller, its wait. A call to itself goes a little to the right."""
    caller, callee = float(columns.index(one.caller)), float(columns.index(one.callee))
    callee = caller + 0.4 if one.caller == one.callee else callee
    colour, is_sync = rank_style(one.caller)["color"], one.kind == "rpc_sync"
    begin, end = moments.index(one.begin_s), None if one.end_s is None else moments.index(one.end_s)
    side: dict[str, Any] = {
        "x": caller + (0.07 if callee > caller else -0.07),
        "ha": "left" if callee > caller else "right",
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0},  # a long name crosses other workers' lines
    }
    label = f"{one.function}  ({one.kind})" if one.function else one.kind
    _arrow(ax, (caller, callee), begin, "-|>" if is_sync else "->", "-", colour)
    ax.text(y=begin - 0.08, s=label, va="bottom", fontsize="x-small", **side)
    if one.wait_s is not None:
        first, last = moments.index(one.wait_s), len(moments) - 0.3 if end is None else end
        bar: dict[str, Any] = {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "zorder": 2}
        ax.broken_barh([(caller - 0.035, 0.07)], (first, last - first), **bar)
    if end is not None:
        _arrow(ax, (callee, caller), end, "->", "--", colour)
    if not is_sync or end is None:  # whose answer it is, or that there is none
        text = "" if one.wait_s is None else one.function if end is not None else "no answer"
        ax.text(y=(len(moments) - 0.4 if end is None else end) - 0.08, s=text, va="bottom", fontsize="x-small", **side)


def _arrow(ax: Axes, x: tuple[float, float], y: float, head: str, line: str, colour: str) -> None:
    look = {"arrowstyle": head, "linestyle": line, "color": colour, "shrinkA": 2, "shrinkB": 2}
    ax.annotate("", (x[1], y), (x[0], y), arrowprops=look, zorder=3)
