"""The life of one rank, read from top to bottom like a story. Runs in the rank's own process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import multiprocessing.util
import os
import random
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ddplab import places, processes, profiling, rendezvous, shipping, telling, tracing
from ddplab.errors import ShippingError
from ddplab.events import Began, Decoder, Failed, Located, Made, Result, Started, Waits, Written

__all__ = ["Order", "main"]

MAX_FILES = 1000  # of which a rank tells
LOOK_S = 0.5  # a call that takes longer than this is told while it lasts


@dataclass(frozen=True)
class Order:
    """What the launcher asks of a rank. ``packed`` is the function and its arguments."""

    packed: bytes = field(repr=False)
    world_size: int
    backend: str | None
    environ: dict[str, str | None] = field(repr=False)
    env: dict[str, str | None]
    folder: str
    path: list[str]
    seed: int | None
    threads: int
    launched_s: float
    launcher: int
    trace: bool = False
    port: int = 0
    hosted: bool = False  # by an engine, in whose process and group the rank is a guest

    def at(self, port: int) -> Order:
        """The order for ranks of this machine, with the port of their store."""
        return dataclasses.replace(self, port=port)

    def for_guest(self, now_s: float) -> Order:
        """The order for a rank elsewhere: without this process's environment, the launch as seconds from now."""
        return dataclasses.replace(self, hosted=True, environ={}, launched_s=self.launched_s - now_s)


def main(_index: int, rank: int, link: socket.socket, alive: socket.socket, pipes: dict[str, Connection]) -> None:
    """Be rank ``rank`` from the first line to the last."""
    processes.lead_group(rank, alive)
    processes.redirect(pipes)
    order = receive(link)
    told = telling.Told(rank, link, order.launched_s)
    finish = (lambda: None) if pipes else processes.pump(lambda name, data: told.tell(Written, name, data))
    work(rank, order, link, told, lambda exitcode: leave(exitcode, finish))


def work(rank: int, order: Order, link: socket.socket, told: telling.Told, end: Callable[[int], None]) -> None:
    """Run the function, tell how it went, and ``end`` with an exit code, before anything of the function is freed:
    that may take long, as with the workers of a DataLoader, or go wrong.
    """
    telling.current = told
    threading.Thread(target=listen, args=(link, told), name="ddplab-listen", daemon=True).start()
    told.tell(Started, os.getpid())

    during, trace = "init", None
    try:
        settle(rank, order)
        tracing.install()
        fn, args = shipping.unpack(order.packed)
        join_group(rank, order)
        if order.trace:
            trace = profiling.Profile(told, with_cuda=order.backend == "nccl")
        told.tell(Began)
        during = "function"
        value = fn(*args)
        if os.getpid() != told.pid:  # a child that the function forked, and that has returned from it too
            leave(0, lambda: None)
        during = "result"
        packed = shipping.pack_result(value)
        tell_calls(told)
        told.tell(Result, packed)
    except BaseException as error:
        processes.forget_children()  # or torch might raise that a DataLoader worker is gone, right here
        if os.getpid() != told.pid:
            sys.excepthook(type(error), error, error.__traceback__)
            leave(1, lambda: None)
        tell_calls(told)
        told.tell(failed, error, during)  # before the trace, which takes its time: failures are ordered by theirs
        if trace:
            trace.finish()
        return end(1)
    with contextlib.suppress(Exception):  # the result is told: what goes wrong from here does not undo it
        if trace:
            trace.finish()
        leave_group()
    return end(0)


def receive(link: socket.socket) -> Order:
    """The order, which is the first message of the launcher."""
    decoder = Decoder()
    while chunk := link.recv(1 << 20):
        for order in decoder.feed(chunk):
            assert isinstance(order, Order)
            return order
    processes.end_group()
    raise AssertionError("unreachable")


def listen(link: socket.socket, told: telling.Told) -> None:
    """Answer the launcher, which asks only where the function is; tell it of calls that last; end with it."""
    selector, state = getattr(selectors, "PollSelector", selectors.SelectSelector)(), ""
    selector.register(link, selectors.EVENT_READ)
    while True:
        if not selector.select(LOOK_S):
            if (now := tracing.standing(LOOK_S)) != state:
                told.tell(Waits, state := now)
            continue
        if not link.recv(1):
            break
        # Located first, told last: a call that begins between the two is among the calls that are told.
        where = places.locate(sys._current_frames().get(told.thread))
        tell_calls(told)
        told.tell(Located, where)
    if telling.current is told:
        processes.end_group()


def tell_calls(told: telling.Told) -> None:
    """Tell of the calls into torch.distributed that were noted."""
    told.send(*tracing.calls(told.rank, told.launched_s))


def settle(rank: int, order: Order) -> None:
    """Make this process look like the launcher's, with the variables of this rank. A guest keeps those of its host."""
    wanted: dict[str, str | None]
    if order.hosted:
        with contextlib.suppress(OSError):  # of another machine
            os.chdir(order.folder)
        sys.path += [entry for entry in order.path if entry not in sys.path]
        if order.backend is None:
            leave_host()
        wanted = dict(os.environ)
    else:
        os.chdir(order.folder)
        sys.path[:] = order.path
        wanted = {**order.environ, **rendezvous.environment(rank, order.world_size, order.port)}
        processes.use_own_children(order.launcher)
    wanted |= order.env
    for name in os.environ.keys() | wanted.keys():
        if (value := wanted.get(name)) is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    shipping.let_workers_ship()
    tell_temporary_files()

    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    torch.set_num_threads(order.threads)
    random.seed(order.seed)  # None: anew from the system, or all forks would have the forkserver's state
    torch.seed() if order.seed is None else torch.manual_seed(order.seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(None if order.seed is None else order.seed % 2**32)
    if order.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def tell_temporary_files() -> None:
    """Tell the launcher of each temporary file and folder that this rank makes: it looks afterwards what is left."""
    left = itertools.count(MAX_FILES, -1)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in ("tempfile.mkstemp", "tempfile.mkdtemp") and (told := telling.teller()) and next(left) > 0:
            told.tell(Made, os.path.abspath(os.fsdecode(args[0])))

    sys.addaudithook(audit)


def join_group(rank: int, order: Order) -> None:
    """Initialise the process group, unless the function wants to do it itself, or the host has done it."""
    import torch
    import torch.distributed as dist

    if order.backend is None or dist.is_initialized():
        return
    store = None
    if not order.hosted:
        # Keys of its own in the store: a group that the function makes later would stumble over those of this one.
        store = dist.PrefixStore("ddplab", dist.TCPStore(rendezvous.LOOPBACK, order.port, is_master=False))
    device_id = torch.device("cuda", torch.cuda.current_device()) if order.backend == "nccl" else None
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")  # no rank may fail while another still connects to it
    dist.init_process_group(order.backend, store=store, rank=rank, world_size=order.world_size, device_id=device_id)


def leave_host() -> None:
    """Leave the host's group, for the function to make its own: at another port, or ranks meet in the old store."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    with socket.create_server(("", 0)) as free:
        port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
    os.environ["MASTER_PORT"] = str(port[0])
    dist.destroy_process_group()


def leave_group() -> None:
    """Destroy the process group if there still is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def failed(rank: int, time_s: float, error: BaseException, during: str) -> Failed:
    """The event that tells of ``error``, whatever its ``__str__`` and ``__init__`` do."""
    try:
        traceback, where = places.explain_error(error)
    except Exception as other:
        traceback, where = f"(the traceback cannot be shown: {type(other).__name__})", None
    try:
        message = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
        message = message[: places.MAX_TEXT]
    except BaseException as other:  # even a KeyboardInterrupt: this process must tell its failure
        message = f"(its text cannot be shown: __str__ raised {type(other).__name__})"
    if isinstance(error, ShippingError):
        traceback = message
    kind = type(error)
    return Failed(rank, time_s, kind.__qualname__, _showable(message), _showable(traceback), where, during)


def _showable(text: str) -> str:
    """``text`` without lone surrogates, with which Jupyter would drop the whole message."""
    return text.encode("utf-8", "backslashreplace").decode()


def leave(exitcode: int, finish: Callable[[], None]) -> None:
    """Exit without the interpreter's own end, in which Gloo's threads can still abort a good run."""
    with contextlib.suppress(Exception):
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):  # the function may have put anything there, also None
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        if processes.POSIX:
            ctypes.CDLL(None).fflush(None)  # what C and C++ libraries have printed
    with contextlib.suppress(Exception):
        finish()
    os._exit(exitcode)
