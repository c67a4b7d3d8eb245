"""How the ranks of a run failed: what came first, what only followed, and all of it in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ddplab import events as ev
from ddplab.diagnosis import ranks

__all__ = ["Failure", "find", "report", "verdict"]

# What a rank says when the process at the other end of a connection is gone: not a cause but an echo.
ECHOES = (
    "connection closed by peer", "connection reset by peer", "connection was closed by remote peer", "broken pipe",
    "socket closed", "application timeout caused pair closure", "monitoredbarrier", "timed out waiting",
    "connection refused", "communicator was aborted", "remote process exited", "rpcerr:", "failed to recv",
    "eof (this error",
)  # fmt: skip
_ORDER = {"root": 0, "echo": 1, "stopped": 2}
_STOPPED = {
    "timeout": ("Timeout", "still running after {timeout_s:g} s"),
    "init": ("Timeout", "still in init_process_group after {timeout_s:g} s"),
    "start": ("Timeout", "not all ranks started"),
    "interrupt": ("Interrupted", "the cell was interrupted"),
    "failure": ("Stopped", "stopped after another rank failed"),
}
_RPC = {"init_rpc", "rpc_sync", "shutdown", "to_here"}  # these wait for another worker
# What torch says of a worker of a DataLoader that died, raised, or was too slow; and what to do about it.
_ALONE = "With num_workers=0 the dataset runs in the rank itself, and a report names its line"
_LOADER = {
    r"DataLoader worker \(pid": "a DataLoader worker died: the line named is only where its rank was when it noticed. "
    f"{_ALONE}. A worker that was killed may have run out of memory.",
    r"DataLoader timed out": f"a DataLoader worker gave no batch in time. {_ALONE}. Slow work takes a larger timeout.",
    r"Caught \w+ in DataLoader worker": "the last lines of the traceback name the line of the dataset that raised.",
}


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    ``role`` is "root" (failed by itself), "echo" (failed because another rank was gone) or "stopped"
    (ended by the launcher). ``type`` is the class of the exception, or what ended the process
    ("SIGKILL", "exit code 3"; "Lost" where an engine does not tell), or "Timeout", "Interrupted", "Stopped" for a
    rank that was stopped.
    ``where`` is the learner's line, if it is known. ``time_s`` counts from the launch. ``exitcode`` and
    ``signal`` tell how the process ended by itself, else they are None.
    """

    rank: int
    role: str
    type: str
    message: str
    traceback: str
    where: ev.Where | None
    time_s: float
    exitcode: int | None
    signal: str | None

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where and self.role != "stopped" else ""
        message = _sentence(self.message)
        return f"{self.type}{place}" + (f": {message}" if message else "")


def find(events: Sequence[ev.Event], world_size: int, timeout_s: float) -> tuple[Failure, ...]:
    """The failures that ``events`` tell of: root causes first, then echoes, then the stopped, each by time.

    A failure is an echo if its text says that a peer was gone, and a root cause exists. Ranks that
    failed in the same way did so at the same moment, and stand in rank order.
    """
    found = [failure for rank in range(world_size) if (failure := _of_rank(rank, events, timeout_s))]
    if not any(failure.role == "root" for failure in found):
        # An echo of nothing is a cause: the peer had left early, with success.
        found = [replace(failure, role="root") if failure.role == "echo" else failure for failure in found]
    first_s: dict[Any, float] = {}
    for failure in sorted(found, key=lambda failure: failure.time_s):
        first_s.setdefault(_alike(failure), failure.time_s)
    return tuple(sorted(found, key=lambda f: (_ORDER[f.role], first_s[_alike(f)], f.rank)))


def _of_rank(rank: int, events: Sequence[ev.Event], timeout_s: float) -> Failure | None:
    mine: dict[type[ev.Event], Any] = {}
    for event in events:
        # What a rank says after it was stopped is the noise of the end.
        if event.rank == rank and not (isinstance(event, ev.Failed) and ev.Stopped in mine):
            mine.setdefault(type(event), event)
            if isinstance(event, ev.Located) and event.where:  # the answer may come after the launcher gave up on it
                mine[ev.Located] = event
    failed, stopped, exited = mine.get(ev.Failed), mine.get(ev.Stopped), mine.get(ev.Exited)
    exitcode = exited.exitcode if exited and not stopped else None
    name = _signal_name(exitcode)
    if failed:
        role = "echo" if _is_echo(failed) else "root"
        told = failed.type, failed.message, failed.traceback, failed.where, failed.time_s
        return Failure(rank, role, *told, exitcode, name)
    if ev.Result in mine:
        return None
    if stopped:
        reason = "init" if stopped.reason == "timeout" and ev.Began not in mine else stopped.reason
        kind, text = _STOPPED[reason]
        where = mine[ev.Located].where if ev.Located in mine else None
        message = text.format(timeout_s=timeout_s)
        return Failure(rank, "stopped", kind, message, "", where, stopped.time_s, None, None)
    if exited:
        kind = name or ("Lost" if exitcode is None else f"exit code {exitcode}")
        message = "the process ended without a Python exception"
        if exitcode is None:
            message = "its process ended without a word, or the connection to it broke; the engine's logs may tell why"
        return Failure(rank, "root", kind, message, "", None, exited.time_s, exitcode, name)
    return None


def _is_echo(failed: ev.Failed) -> bool:
    """Whether the failure only followed from a lost peer. A worker of a DataLoader is no peer of its rank."""
    return not failed.message.startswith("DataLoader worker") and _tells_echo(f"{failed.message}\n{failed.traceback}")


def _tells_echo(text: str) -> bool:
    return any(sign in text.lower() for sign in ECHOES)


def _sentence(message: str) -> str:
    """The first line of a message, without Gloo's own source lines, ports and process ids."""
    if "/gloo/transport/" in message and _tells_echo(message):
        timed_out = re.search("timed out|timeout", message.lower())
        return f"{'a time-out while waiting for' if timed_out else 'the connection was closed by'} another rank"
    first = message.strip().partition("\n")[0]
    first = re.sub(r"^(Gloo \w+ failed with )?\[\S*[^]]*\.cc:\d+\] ", "", first)
    return re.sub(r"^DataLoader worker \(pid(\(s\))? [\d, ]+\)", "DataLoader worker", first)


def _signal_name(exitcode: int | None) -> str | None:
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def _alike(failure: Failure) -> tuple[str, ...]:
    source = failure.where.source if failure.where else ""
    return failure.role, failure.type, str(failure.where), source


# In words ---------------------------------------------------------------------------------------------


def verdict(failures: Sequence[Failure], world_size: int) -> str:
    """What went wrong in a sentence, the same each time the same happens; "" without failures."""
    if not failures:
        return ""
    first = failures[0]
    if first.role == "stopped":
        return f"{ranks(f.rank for f in failures)} of {world_size}: {first.message}"
    alike = [failure for failure in failures if _alike(failure) == _alike(first)]
    is_first = " first" if len(alike) < len(failures) else ""
    return f"{ranks(f.rank for f in alike)} of {world_size} failed{is_first}: {first}"


def report(failures: Sequence[Failure], last_lines: Sequence[str] = (), standing: Sequence[str] = ()) -> str:
    """What lies behind the verdict: the first traceback, what the other ranks did, and what to do next.

    ``last_lines`` are the last that the first rank printed; they stand in for a traceback it could not give.
    ``standing`` says where the ranks that were stopped stood.
    """
    if not failures:
        return ""
    first, lines = failures[0], []
    if first.traceback:
        lines += [f"traceback of rank {first.rank}:", *(f"  {line}" for line in first.traceback.splitlines())]
    elif first.role == "root" and last_lines:
        lines += [f"rank {first.rank} said last:", *(f"  {line}" for line in last_lines)]
    alike = [f for f in failures if first.role == "root" and _alike(f) == _alike(first)]
    lines += [f"rank {f.rank} said: {_sentence(f.message)}" for f in alike if f.message != first.message]
    others = [failure for failure in failures if failure not in alike]
    for _, group in groupby(sorted((f for f in others if f.role != "stopped"), key=_alike), key=_alike):
        lines.append(_in_a_line(list(group)))
    lines += standing
    return "\n".join([*lines, f"next: {_advice(first, failures, bool(others))}"])


def _in_a_line(alike: Sequence[Failure]) -> str:
    first = alike[0]
    if first.role == "echo":
        place = f" in {first.where}" if first.where else ""
        return f"{ranks(f.rank for f in alike)} lost a peer, and so failed too: {first.type}{place}"
    text = str(first).partition("\n")[0]
    return f"{ranks(f.rank for f in alike)} failed too: {text[:150]}{'...' * (len(text) > 150)}"


def _advice(first: Failure, failures: Sequence[Failure], others: bool) -> str:
    """The next step, for the kind of failure that came first."""
    if advice := _about_keyboard(first) or _about_loader(first, failures):
        return advice
    if _tells_echo(first.message):
        if any("timed out waiting" in failure.message.lower() for failure in failures):
            return "find the rank that came late, or never: those that raise had waited for it."
        return "find the rank that ended or returned early: all ranks must make the same collective calls."
    if first.type == "Timeout" and any(f.where and f.where.call in _RPC for f in failures):
        return (
            "find the worker that does not answer: each must call init_rpc, and stay until all others call shutdown. "
            "Slow work takes a larger timeout_s."
        )
    if first.type == "Timeout":
        return "compare these lines: all ranks must make the same collective calls. Slow work takes a larger timeout_s."
    if first.type == "Lost":
        return "look into the logs of the engine, and for a system that ran out of memory."
    if first.signal == "SIGKILL":
        return "find out what ended it: somebody's kill, or the system when memory ran out."
    if first.signal == "SIGABRT":
        return "read its last lines; Gloo aborts when the ranks give one collective different sizes or dtypes."
    if first.signal == "SIGTERM":
        return "find out what asked it to end."
    if first.signal:
        return "its native code crashed; run the same function in one process, or look at its last lines."
    if first.exitcode is not None and not first.traceback:
        return "let the function return, or raise: os._exit ends a rank without a word."
    if first.role == "root" and first.where:
        alone = others and len({_alike(failure) for failure in failures if failure.role == "root"}) == 1
        return f"mend {first.where}" + ("; the other ranks did not fail by themselves." if alone else ".")
    return "read the traceback from its last line upwards."


def _about_keyboard(first: Failure) -> str:
    """What to do in place of ``input()`` or a debugger; "" if the rank used neither."""
    if first.type == "EOFError" and first.message == "EOF when reading a line":
        return "ranks have no keyboard: give launch what input() would ask for, as an argument of the function."
    if first.type == "BdbQuit":
        return "ranks have no keyboard, so a debugger ends at once: print what you want to see, or return it."
    return ""


def _about_loader(first: Failure, failures: Sequence[Failure]) -> str:
    """What to do about a ``DataLoader`` in which the cause seems to lie; "" if there is none."""
    for said, advice in _LOADER.items():
        if re.match(said, first.message):
            return advice
    if first.type.startswith("Connection") and re.search(r"torch.utils.data.dataloader\.py", first.traceback):
        return f"a DataLoader worker has probably died: its rank could not read from it. {_ALONE}."
    if first.type != "Timeout" or not all(failure.where and failure.where.call for failure in failures):
        return ""  # a rank that is in no call of torch, or nobody knows where, is a better suspect
    loading = [failure.rank for failure in failures if failure.where and "DataLoaderIter" in failure.where.call]
    if not loading:
        return ""
    who = f"{ranks(loading)} wait{'s' * (len(loading) == 1)} for a DataLoader, and so for its workers if it has any"
    return f"{who}. {_ALONE}; DataLoader(timeout=...) turns the hang into an error."
