"""What a launch has left: the launcher's process and its machine, compared before and after.

Runs in the notebook's process. What a system does not tell (most of it is asked of Linux) counts as not left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddplab import processes, rendezvous

__all__ = ["Before", "Receipt"]

SETTLE_S = 1.0  # for threads and descriptors that are about to go, before they count as left
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Receipt:
    """What is left after a launch; each field but the last two is empty if nothing is.

    ``processes``: of ranks and all that they had started. ``sockets``: addresses on which this process listens.
    ``files``: temporary files that ranks made through ``tempfile``, and unused shared memory of theirs, if
    multiprocessing or torch named it.
    ``descriptors`` and ``threads``: of this process, that were not there before. ``changed``: what is not as it
    was in this process. ``ended``: processes that outlived their rank, which the launcher has ended.
    ``overlapped``: another launch ran meanwhile, so that sockets, descriptors, threads and shared memory could
    not be told apart.
    """

    processes: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    overlapped: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing is left and nothing has changed."""
        return not any(getattr(self, name) for name in LEFT)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Receipt:
        """The receipt whose fields were written as JSON, which has lists in place of tuples."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)

    def __str__(self) -> str:
        parts = [f"{name} left: {', '.join(found)}" for name in LEFT[:-1] if (found := getattr(self, name))]
        parts += [f"changed: {', '.join(self.changed)}"] if self.changed else []
        parts += [f"ended: {', '.join(self.ended)}"] if self.ended else []
        parts += ["another launch ran at the same time"] if self.overlapped else []
        return "; ".join(["nothing is left"] * self.clean + parts)


LEFT = ("processes", "sockets", "files", "descriptors", "threads", "changed")


class Before:
    """This process and its machine before a launch; ``receipt`` compares them with what is there after it."""

    _running = 0
    _launches = 0
    _lock = threading.Lock()

    def __init__(self, local: bool = True) -> None:
        self._local = local  # an engine connects when and as often as it likes
        with Before._lock:
            self._overlapped = Before._running > 0
            Before._running += 1
            Before._launches += 1
            self._launch = Before._launches
        self._state = _state()
        _use_store()
        self._counted = _counted()
        self._shared_memory = _listed(SHARED_MEMORY)

    def receipt(self, made: Iterable[str], pids: Iterable[int], ended: Iterable[str]) -> Receipt:
        """What is left now.

        ``made`` are the temporary files that ranks told of, ``pids`` their process ids, ``ended`` what was ended.
        """
        with Before._lock:
            Before._running -= 1
            overlapped = self._overlapped or Before._launches > self._launch
        deadline = time.monotonic() + SETTLE_S
        files = tuple(path for path in made if os.path.lexists(path))
        names = (*processes.shared_memory_prefixes(), *(f"torch_{pid}_" for pid in pids))
        while not (found := self._compare(overlapped, names)).clean and time.monotonic() < deadline:
            time.sleep(0.02)  # no event tells that a thread has ended
        return dataclasses.replace(found, files=files + found.files, ended=tuple(ended))

    def _compare(self, overlapped: bool, names: tuple[str, ...]) -> Receipt:
        after = _state()
        changed = tuple(name for name, value in self._state.items() if after[name] != value)
        if overlapped or not self._local:
            return Receipt(changed=changed, overlapped=overlapped)
        grown = {name: _grown(self._counted[name], found) for name, found in _counted().items()}
        came = _listed(SHARED_MEMORY) - self._shared_memory
        unused = tuple(_unused(name for name in came if name.startswith(names)))
        left = tuple(str(one) for one in processes.strays())
        return Receipt(left, grown["sockets"], unused, grown["descriptors"], grown["threads"], changed)


@functools.cache
def _use_store() -> None:
    """Open a store once: libuv, which serves it, keeps two descriptors from its first use on."""
    rendezvous.open_store()


def _grown(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """What came, if there is more than before: one that replaced another is not left."""
    came = [after[key] for key in after if key not in before]
    return tuple(came) if len(after) > len(before) else ()


# Looked at ----------------------------------------------------------------------------------------------


def _counted() -> dict[str, dict[str, str]]:
    """What can be counted, each by an id and as text."""
    descriptors = {}
    for name in _listed("/proc/self/fd"):
        with contextlib.suppress(OSError):
            # Jupyter makes one of these with each cell; those of a store would come with its sockets.
            if (target := os.readlink(f"/proc/self/fd/{name}")) != "anon_inode:[eventfd]":
                descriptors[name] = target
    threads = {}
    for name in _listed("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/comm") as file:
            threads[name] = file.read().strip()
    return {"descriptors": descriptors, "threads": threads, "sockets": _listening(descriptors)}


def _listed(folder: str) -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _listening(descriptors: Mapping[str, str]) -> dict[str, str]:
    """The addresses on which this process listens, by descriptor. Asked of each: Linux's own list takes 20 ms."""
    found = {}
    for number, target in descriptors.items():
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if target.startswith("socket:"):
                copy = os.dup(int(number))  # another thread may have closed the number, and opened something else
                stack.callback(os.close, copy)
                one = socket.socket(fileno=copy)
                stack.callback(one.detach)
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[target] = str(one.getsockname())
    return found


def _state() -> dict[str, Any]:
    """What a launch must leave as it is in this process. The handler of interrupts is ``launch``'s own to restore."""
    import torch
    import torch.distributed as dist

    handlers = sorted(signal.valid_signals() - {signal.SIGINT})
    return {
        "signal handlers": [signal.getsignal(number) for number in handlers],
        "os.environ": dict(os.environ),
        "working directory": _folder(),
        "sys.path": list(sys.path),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "start method of multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "random's state": random.getstate(),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "torch's threads": torch.get_num_threads(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's process group": dist.is_available() and dist.is_initialized(),
    }


def _folder() -> str:
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        return os.getcwd()
    return ""


# Files --------------------------------------------------------------------------------------------------


def _unused(names: Iterable[str]) -> list[str]:
    """The shared memory of this user that no process that can be looked into has open or mapped."""
    paths = []
    for name in names:
        with contextlib.suppress(OSError):
            if os.stat(path := f"{SHARED_MEMORY}/{name}").st_uid == os.getuid():
                paths.append(path)
    used = "\n".join(_in_use()) if paths else ""
    return [path for path in paths if path not in used]


def _in_use() -> Iterator[str]:
    for name in _listed("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/maps") as maps:
                    yield from (line for line in maps if SHARED_MEMORY in line)
                for number in _listed(f"/proc/{name}/fd"):
                    yield os.readlink(f"/proc/{name}/fd/{number}")
