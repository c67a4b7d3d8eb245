"""Where ranks run: processes of this machine, or guests in those of an engine that the user has: Ray or Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ddplab import events, machine, processes, rendezvous, worker
from ddplab.engines import on_ray, on_spark
from ddplab.engines.hosted import Hosted
from ddplab.run import Spec

__all__ = ["NAMES", "Engine", "Started", "choose"]

Started = Iterable[tuple[Any, bytes]]  # ranks as they come up, with the interface of RankProcess; and each one's order


class Engine(Protocol):
    """What starts the ranks of a job."""

    def start(
        self, spec: Spec, order: worker.Order, is_given_up: Callable[[], bool]
    ) -> contextlib.AbstractContextManager[Started]:
        """Start the ranks; on leaving, when all of them have ended, wait until nothing of this launch is left."""


class Local:
    """Ranks are processes that the launcher starts itself, on this machine."""

    @contextlib.contextmanager
    def start(self, spec: Spec, order: worker.Order, is_given_up: Callable[[], bool]) -> Iterator[Started]:
        """Start one process after the other; they meet in a store of this process."""
        store = rendezvous.open_store()
        data = events.encode(order.at(store.port))
        yield self._ranks(spec, data, is_given_up)

    def _ranks(self, spec: Spec, data: bytes, is_given_up: Callable[[], bool]) -> Started:
        for rank in range(spec.world_size):
            if is_given_up():
                return
            yield processes.RankProcess(rank, spec.start_method, worker.main), data


NAMES = ("local", "ray", "spark")


def choose(
    name: Any, world_size: int, backend: str | None, say: Callable[[str], None]
) -> tuple[Engine, str | None, str]:
    """The engine, ready to start that many ranks; their backend, and the reason for it in one line.

    ``say`` is called with a line before what takes long.

    Raises ``ValueError``, with what mends it, if it is unknown, not installed, does not answer, or is too small.
    """
    if name == "local":
        return Local(), *machine.choose_backend(backend, world_size)
    if name not in NAMES:
        raise ValueError(f"engine={name!r} is not one of {', '.join(map(repr, NAMES))}")
    chosen: str | None
    if backend == "auto":
        chosen, why = "gloo", f"gloo works on any cluster; on {name}, NCCL is taken where it is asked for"
    elif backend == "nccl":
        chosen, why = "nccl", "nccl was asked for"
    else:
        chosen, why = machine.choose_backend(backend, world_size)
    host = on_ray.Ray if name == "ray" else on_spark.Spark
    return Hosted(host(world_size, chosen, say)), chosen, why
