"""Small runs made by hand, for tests of what is a pure function of a run."""

from __future__ import annotations

from ddplab import events as ev
from ddplab.run import Run, Spec


def run_of(*events: ev.Event, world_size: int = 2, timeout_s: float = 60.0) -> Run:
    """A run of ``world_size`` ranks that told ``events``."""
    spec = Spec("train", world_size, "gloo", "gloo was asked for", "forkserver", timeout_s, 0, 1)
    return Run(spec, events, 1.5)


def raised(
    rank: int, time_s: float, type: str = "ValueError", message: str = "bad", line: int = 3, during: str = "function"
) -> ev.Failed:
    """A rank that raised in line ``line`` of cell 7."""
    where = ev.Where("cell In[7]", line, "train", "x = f()")
    return ev.Failed(rank, time_s, type, message, f"Traceback ...\n{type}: {message}", where, during)


def gone_peer(rank: int, time_s: float, line: int = 5) -> ev.Failed:
    """A rank that only noticed that another was gone."""
    return raised(rank, time_s, "RuntimeError", "[x/pair.cc:534] Connection closed by peer [127.0.0.1]:8", line)


def waiting(
    rank: int, time_s: float, reason: str, line: int = 9, source: str = "dist.all_reduce(x)", call: str = "all_reduce"
) -> tuple[ev.Event, ...]:
    """A rank that waited in ``call``, by default all_reduce, until the launcher stopped it."""
    where = ev.Where("cell In[7]", line, "train", source, call)
    return (
        ev.Began(rank, 0.05),
        ev.Located(rank, time_s, where),
        ev.Stopped(rank, time_s, reason),
        ev.Exited(rank, time_s, -9),
    )


def loading(rank: int, time_s: float, call: str = "_BaseDataLoaderIter.__next__") -> tuple[ev.Event, ...]:
    """A rank that waited for a batch of a ``DataLoader`` until time ran out."""
    return waiting(rank, time_s, "timeout", 4, "for x in loader:", call)
