"""Where the ranks of a run stood, and which of their collective calls do not fit together.

Pure functions of events. They say what the evidence allows: a rank that waits, since when and in which
call; a rank that has made fewer calls; calls of the same number that differ. Why is for the reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ddplab import events as ev

__all__ = ["Standing", "calls", "mismatches", "standing", "standings"]

# In these the tensors of all ranks must have one shape.
_SAME_SHAPE = {
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter_tensor",
}
MAX_MISMATCHES = 5


@dataclass(frozen=True)
class Standing:
    """Where one rank was when the launcher asked, or how it had ended.

    ``ended`` is "returned", "failed" or "". ``call`` is the call that it had not returned from, ``num_calls``
    how many collective calls it had begun in each group; None if it did not tell.
    """

    rank: int
    ended: str
    located: ev.Located | None
    call: ev.Call | None
    num_calls: dict[str, int] | None
    has_ddp: bool

    @property
    def waited_s(self) -> float:
        """Seconds in ``call``; 0.0 without one."""
        return self.located.time_s - self.call.time_s if self.located and self.call else 0.0


def calls(events: Iterable[ev.Event]) -> tuple[ev.Call, ...]:
    """The calls that were told, each once, by rank and time. A rank keeps its latest 1,000."""
    latest = {(event.rank, event.time_s): event for event in events if isinstance(event, ev.Call)}
    return tuple(latest[key] for key in sorted(latest))


def standings(events: Sequence[ev.Event], world_size: int) -> list[Standing]:
    """One ``Standing`` per rank, in rank order."""
    told = {rank: list(group) for rank, group in groupby(calls(events), key=lambda call: call.rank)}
    located = {event.rank: event for event in events if isinstance(event, ev.Located)}
    ended = {e.rank: "failed" for e in events if isinstance(e, ev.Exited)}
    ended |= {e.rank: "returned" for e in events if isinstance(e, ev.Result)}
    ended |= {e.rank: "" for e in events if isinstance(e, ev.Stopped)}
    found = []
    for rank in range(world_size):
        mine = told.get(rank, [])
        unfinished = [call for call in mine if call.end_s is None]
        counts: dict[str, int] = defaultdict(int)
        for made_call in mine:
            counts[_order(made_call)] = max(counts[_order(made_call)], made_call.number)
        has_ddp = any(call.name == "DDP(...)" for call in mine)
        call = unfinished[-1] if unfinished and rank in located and not ended.get(rank) else None
        has_told = mine or (rank in located and not located[rank].state)  # who answers tells of its calls first
        num_calls = dict(counts) if has_told else None
        found.append(Standing(rank, ended.get(rank, ""), located.get(rank), call, num_calls, has_ddp))
    return found


def _order(call: ev.Call) -> str:
    """The order of calls in which ``call`` has its number: its group's, or that of ``backward``."""
    return call.name if call.name == "backward" else call.group


def standing(events: Sequence[ev.Event], world_size: int) -> list[str]:
    """Where every rank that was stopped stood, and what that shows: a line for those that stood alike."""
    everyone = standings(events, world_size)
    stopped = {event.rank for event in events if isinstance(event, ev.Stopped)}
    running = [one for one in everyone if one.rank in stopped and not one.ended]
    lines = [_stood(list(group)) for _, group in groupby(sorted(running, key=_alike), key=_alike)]
    wanted = _waited_for(running) + _failed_in(events)
    return lines + [text for call in wanted if (text := _behind(call, everyone))]


def _alike(one: Standing) -> tuple[bool, str, str, str]:
    where = one.located.where if one.located else None
    state = one.located.state if one.located else ""
    return one.call is None, describe(one.call) if one.call else "", str(where), state


def _stood(alike: Sequence[Standing]) -> str:
    first, single = alike[0], len(alike) == 1
    who, located = ranks(one.rank for one in alike), first.located
    where = located.where if located else None
    at = f"at {where}: {where.source}" if where else ""
    if first.call is not None:
        since = min(one.located.time_s - one.call.time_s for one in alike if one.located and one.call)
        ddp = ", where DDP averages gradients," if first.call.name == "backward" and first.has_ddp else ""
        waits = f"wait{'s' * single} {'in' if first.call.since_s is None else 'for'}"
        return f"{who} {waits} {describe(first.call)}{ddp} since {since:.1f} s" + (f", {at}" if at else "")
    if where:
        inside = f", in torch's {where.call}" if where.call else ""
        return f"{who} {'is' if single else 'are'} {at}{inside}"
    if located and not located.state:
        return f"{who} {'is' if single else 'are'} in no line of yours"
    return f"{who} did not answer" + (f": {located.state}" if located else "")


def _waited_for(running: Iterable[Standing]) -> list[ev.Call]:
    """The numbered calls in which ranks wait, each once."""
    waiting = {(_order(o.call), o.call.number): o.call for o in running if o.call and o.call.number}
    return [call for key, call in sorted(waiting.items()) if call.name != "backward" or any(o.has_ddp for o in running)]


def _failed_in(events: Sequence[ev.Event]) -> list[ev.Call]:
    """The numbered collective calls in whose line a rank failed, each number once."""
    failed = {event.rank: event.where for event in events if isinstance(event, ev.Failed) and event.where}
    last = {call.rank: call for call in calls(events) if call.number and call.name != "backward"}
    found = {
        (call.group, call.number): call
        for rank, call in last.items()
        if rank in failed and call.where and str(call.where) == str(failed[rank])
    }
    return [found[key] for key in sorted(found)]


def _behind(call: ev.Call, everyone: Sequence[Standing]) -> str:
    """Which ranks have not made ``call``, in a sentence; "" if all have. Ranks that told nothing are passed over."""
    kind = "backward" if call.name == "backward" else "collective"

    def count(one: Standing) -> int:
        return (one.num_calls or {}).get(_order(call), 0)

    members = [one for one in everyone if not call.group or str(one.rank) in call.group.split(", ")]
    behind = sorted((one for one in members if one.num_calls is not None and count(one) < call.number), key=count)
    parts = []
    for number, group in groupby(behind, key=count):
        same = list(group)
        left = " and returned" if all(one.ended == "returned" for one in same) else ""
        parts.append(f"{ranks(one.rank for one in same)} made {number} {kind} call{'s' * (number != 1)}{left}")
    return f"{describe(call)} is not complete: {'; '.join(parts)}" if parts else ""


def mismatches(events: Iterable[ev.Event]) -> list[str]:
    """Collective calls of the same number that differ between ranks, in words; at most five.

    torch finds few of these by itself, and some give wrong numbers without an error.
    """
    by_number: dict[tuple[str, int], list[ev.Call]] = defaultdict(list)
    for call in calls(events):
        if call.number and call.name != "backward" and not call.name.startswith("wait of"):
            by_number[call.group, call.number].append(call)
    found = [text for key in sorted(by_number) if (text := _differ(by_number[key]))]
    return found[:MAX_MISMATCHES]


def _differ(made: Sequence[ev.Call]) -> str:
    first = made[0]
    if len({call.name for call in made}) > 1:
        return f"collective call {first.number} differs: {_sides(made, 'name')}. Each waits for the other"
    checks = [
        ("op", "no error is raised, and the numbers are wrong"),
        ("dtype", "the bytes of one are read as the other"),
    ]
    if first.name in _SAME_SHAPE:
        checks.append(("shape", "data is cut off, or the rank with the smaller tensor aborts"))
    for field, consequence in checks:
        if len({getattr(call, field) for call in made}) > 1:
            return f"{first.name} #{first.number}: {_sides(made, field)}. {consequence[0].upper()}{consequence[1:]}"
    return ""


def _sides(made: Sequence[ev.Call], field: str) -> str:
    """ "rank 0 has SUM, ranks 1, 2 have MAX"."""
    who: dict[str, list[int]] = defaultdict(list)
    for call in made:
        who[str(getattr(call, field))].append(call.rank)
    return ", ".join(f"{ranks(found)} {'has' if len(found) == 1 else 'have'} {value}" for value, found in who.items())


def describe(call: ev.Call) -> str:
    """ "all_reduce #17 (shape (10,), float32, SUM)", or "recv from rank 1" for a call between two ranks."""
    if call.name == "backward":
        return f"backward #{call.number}"
    details = [] if call.shape is None else [f"shape {call.shape}", call.dtype]
    details += [call.op] if call.op else []
    details += [f"group of ranks {call.group}"] if call.group else []
    number = f" #{call.number}" if call.number else ""
    direction = {"recv": " from rank ", "irecv": " from rank ", "send": " to rank ", "isend": " to rank "}.get(
        call.name
    )
    peer = f"{direction}{call.peer}" if direction and call.peer is not None else ""
    return f"{call.name.removeprefix('wait of ')}{number}{peer}" + (f" ({', '.join(details)})" if details else "")


def ranks(numbers: Iterable[int]) -> str:
    """ "rank 1" or "ranks 0, 1, 2"; of more than six the first three and how many more."""
    known = sorted(numbers)
    shown = ", ".join(map(str, known if len(known) <= 6 else known[:3]))
    more = f" and {len(known) - 3} more" if len(known) > 6 else ""
    return f"rank{'s' * (len(known) > 1)} {shown}{more}"
