"""Ranks that are guests in the processes of an engine: how they find the launcher, and what it sees of them.

The engine starts its workers and calls ``visit`` in each. That connects to the launcher twice: one connection carries
the messages of a rank both ways, as for local ranks; the other carries nothing, and ends the rank when it closes.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import ddplab
from ddplab import processes, telling, worker
from ddplab.engines.streams import MAX_WORDS, Words, borrow
from ddplab.errors import LaunchError
from ddplab.events import Written, encode
from ddplab.run import Spec

__all__ = ["Host", "Hosted", "visit"]

ANSWER_LIMIT_S = 300.0  # for an engine to start all workers, and for these to import torch
END_LIMIT_S = 30.0  # for an engine to clear away
QUEUE_LIMIT_S = 1.0  # the same, when the cell was interrupted, or not all workers came: it goes on by itself
GREETING_LIMIT_S = 2.0
ANSWER_S = 30.0  # for the launcher to greet
TOKEN_BYTES = 32
HEAD = TOKEN_BYTES + 4 + 1 + 1  # proof, rank, channel, length of the version


class Host(Protocol):
    """An engine that runs a function once in each of its workers, which know their rank from ``RANK``."""

    name: str
    address: str  # where its workers reach this process

    def run(self, world_size: int, visit: Callable[[], None]) -> None:
        """Call ``visit`` in each worker; return when all have returned, raise if one failed."""


class Hosted:
    """Starts ranks on a host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @contextlib.contextmanager
    def start(
        self, spec: Spec, order: worker.Order, is_given_up: Callable[[], bool]
    ) -> Iterator[Iterable[tuple[GuestProcess, bytes]]]:
        """Let the host start its workers; on leaving wait until it has cleared away."""
        token = secrets.token_bytes(TOKEN_BYTES)
        server = socket.create_server((self._host.address, 0), backlog=2 * spec.world_size)
        call = functools.partial(visit, server.getsockname()[:2], token)
        attempt = _Attempt(lambda: self._host.run(spec.world_size, call), f"ddplab-{self._host.name}")
        with server as listener, Words(attempt) as words:
            listener.settimeout(0.2)
            attempt.start()

            def given_up() -> bool:
                if not attempt.is_alive():
                    raise LaunchError(self._refusal(attempt.error or EOFError("it has ended"), words.kept)) from None
                return is_given_up()

            ends: dict[tuple[int, int], socket.socket] = {}  # by rank and channel, until all have come
            guests = self._guests(listener, token, ends, spec.world_size, order, given_up)
            try:
                yield guests
            finally:
                listener.close()  # a worker that comes too late finds nobody, and ends
                for link in ends.values():
                    link.close()
                attempt.join(QUEUE_LIMIT_S if ends or is_given_up() else END_LIMIT_S)

    def _guests(
        self,
        listener: socket.socket,
        token: bytes,
        ends: dict[tuple[int, int], socket.socket],
        world_size: int,
        order: worker.Order,
        given_up: Callable[[], bool],
    ) -> Iterator[tuple[GuestProcess, bytes]]:
        """The ranks, once all have come."""
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while len(ends) < 2 * world_size:
            if given_up():
                return
            if time.monotonic() > deadline:
                came = f"{len(ends) // 2} of {world_size} workers have come in {ANSWER_LIMIT_S:.0f} s"
                raise LaunchError(f"{self._host.name} could not run the ranks: {came}")
            with contextlib.suppress(OSError):
                self._let_in(listener.accept()[0], token, ends)
        listener.close()
        for rank in range(world_size):
            guest = GuestProcess(rank, ends.pop((rank, 0)), ends.pop((rank, 1)))
            yield guest, encode(order.for_guest(time.monotonic()))

    def _let_in(self, link: socket.socket, token: bytes, ends: dict[tuple[int, int], socket.socket]) -> None:
        """Keep a connection of a worker, and no other."""
        try:
            greeting = _greeted(link, token)
        except OSError:
            greeting = None
        if greeting is None:
            return link.close()
        rank, channel, version = greeting
        ends[rank, channel] = link
        if version != _version():
            raise LaunchError(f"rank {rank} on {self._host.name} has {version}, but this notebook {_version()}")
        return None

    def _refusal(self, error: BaseException, words: str) -> str:
        text = f"{self._host.name} could not run the ranks: {type(error).__name__}: {str(error)[:MAX_WORDS]}"
        if "No module named 'ddplab'" in text + words:
            text = f"the workers of {self._host.name} cannot import ddplab: install it on each node"
        return f"{text}\n{words}".rstrip()


class GuestProcess:
    """One rank as the launcher holds it, with the interface of :class:`ddplab.processes.RankProcess`.

    How its process ended is not known here: ``join`` gives None.
    """

    sentinel = None
    output: dict[str, Any] = {}  # noqa: RUF012 - never filled: it comes through the link

    def __init__(self, rank: int, link: socket.socket, alive: socket.socket) -> None:
        self.rank = rank
        self.link = link
        self._alive = alive

    def state(self) -> tuple[str, float]:
        """Nothing is known of the process."""
        return "", 0.0

    def kill(self) -> None:
        """End the rank, by taking from it what keeps it alive."""
        with contextlib.suppress(OSError):
            self._alive.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Nothing can be waited for: the host does that."""

    def close(self) -> None:
        """Close the launcher's ends."""
        self.link.close()
        self._alive.close()


class _Attempt(threading.Thread):
    """A call in a thread, and what it raised."""

    def __init__(self, call: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call = call
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error


# In the rank ------------------------------------------------------------------------------------------


def visit(address: tuple[str, int], token: bytes) -> None:
    """Be a rank of the launcher at ``address``, in the process of a worker that has its rank in ``RANK``."""
    rank = int(os.environ["RANK"])
    try:
        link, alive = (_greet(address, token, rank, channel) for channel in (0, 1))
    except OSError as error:
        raise ConnectionError(f"no launcher answers at {address[0]}:{address[1]}; it has given up: {error}") from None
    if hasattr(os, "register_at_fork"):  # or the link of a rank that is gone would stay open as long as its child
        os.register_at_fork(after_in_child=link.close)
    leads_group = hasattr(os, "getpgrp") and os.getpgrp() == os.getpid()  # as Ray and torchrun let it
    processes.end_with(alive, -os.getpid() if leads_group else os.getpid())
    import torch.distributed  # noqa: F401 - before this rank counts as started, and its time runs

    order = worker.receive(link)
    told = telling.Told(rank, link, time.monotonic() + order.launched_s)
    give_back = borrow(lambda name, data: told.tell(Written, name, data))
    worker.work(rank, order, link, told, lambda exitcode: give_back())
    telling.current = None  # from here on the connections may close
    processes.end_with(alive, 0)  # a child may hold it open
    alive.close()
    link.shutdown(socket.SHUT_RDWR)


def _greet(address: tuple[str, int], token: bytes, rank: int, channel: int) -> socket.socket:
    """Connect, say who this is, and make sure that the launcher answers: what it sends will be unpickled."""
    link = socket.create_connection(address, timeout=ANSWER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    version = _version().encode()
    said = rank.to_bytes(4, "big") + bytes([channel, len(version)]) + version
    proof = _proof(token, _exactly(link, TOKEN_BYTES) + said)
    link.sendall(proof + said)
    if not hmac.compare_digest(_exactly(link, TOKEN_BYTES), _proof(token, proof)):
        link.close()
        raise ConnectionError("who answers is another")
    link.settimeout(None)
    return link


def _greeted(link: socket.socket, token: bytes) -> tuple[int, int, str] | None:
    """Rank, channel and version of who connects; None for a stranger, who cannot have the token."""
    link.settimeout(GREETING_LIMIT_S)
    link.sendall(challenge := secrets.token_bytes(TOKEN_BYTES))
    head = _exactly(link, HEAD)
    proof, said = head[:TOKEN_BYTES], head[TOKEN_BYTES:]
    version = _exactly(link, said[-1] if said else 0)
    if not hmac.compare_digest(proof, _proof(token, challenge + said + version)):
        return None
    link.sendall(_proof(token, proof))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return int.from_bytes(said[:4], "big"), said[4], version.decode()


def _proof(token: bytes, words: bytes) -> bytes:
    """That who says these words knows the token, which itself never travels through a connection."""
    return hmac.digest(token, words, "sha256")


def _exactly(link: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (more := link.recv(num_bytes - len(data))):
        data += more
    return data


def _version() -> str:
    """What both ends must have in common: code travels as this Python's bytecode."""
    return f"ddplab {ddplab.__version__} on Python {'.'.join(platform.python_version_tuple()[:2])}"
