"""Start ranks with ``torch.multiprocessing``, stop them, and leave none behind.

Two ways to start: ``torch.multiprocessing.spawn`` runs a new Python for each rank, which imports
torch again (seconds). Its sibling ``start_processes(start_method="forkserver")`` asks a server that
has imported everything once to fork (milliseconds). Either way a rank is a fresh process, and the
notebook's kernel itself is never forked.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.forkserver as forkserver
import multiprocessing.resource_tracker as resource_tracker
import multiprocessing.spawn as spawn
import multiprocessing.util as util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ddplab import leftovers

__all__ = [
    "RankProcess", "end_group", "end_strays", "forget_children", "give_up_server", "hold_interrupts", "lead_group",
    "prepare", "pump", "redirect", "server_is_stopped", "shared_memory_prefixes", "strays", "use_own_children",
    "warm",
]  # fmt: skip

PRELOAD = ["ddplab.preload"]
POSIX = os.name == "posix"
KILL_LIMIT_S = 5.0
MAX_STRAYS = 1000  # that one launch ends, lest one that starts others without end holds it up
STREAMS = {"stdout": 1, "stderr": 2}
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # <linux/prctl.h>
# Whether a pipe can stand in for descriptors 1 and 2 of another process, and be waited for with sockets.
# On Windows neither holds: there the rank itself sends what it wrote, and its closed link tells its end.
WAITS_FOR_PIPES = POSIX
# multiprocessing asks after all children when it starts one; two threads at once would lose an exit code.
_polling = threading.Lock()
_owner = 0  # the process that has started the forkserver
_living: set[int] = set()  # the ranks of all launches of this process that have not been joined


def warm() -> None:
    """Start the forkserver, which then imports what ranks need while the learner reads. Returns at once."""
    global _owner
    if _owner != os.getpid():
        if _owner:  # this process is a child, forked by one whose forkserver it cannot wait for
            _forget_server()
        _owner = os.getpid()
    # The mark is no module: it is passed over, and stands in the command line of the forkserver and of its forks.
    forkserver.set_forkserver_preload([*PRELOAD, leftovers.mark()])
    _track()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # preload.py lifts it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare(start_method: str) -> None:
    """Start what serves all launches of this process, so that it counts as there before the first."""
    if start_method == "forkserver":
        with contextlib.suppress(OSError):  # the launch will say so
            warm()
    elif POSIX:
        _track()


def _track() -> None:
    """Start what multiprocessing itself keeps for all its processes."""
    util.get_temp_dir()  # which ranks and their children then use too: this process takes it away when it ends
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # which unblocks SIGINT in the thread that starts it
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def server_is_stopped() -> bool:
    """Whether the forkserver is there but stopped, as by SIGSTOP."""
    return _state(_server_pid())[0] in ("T", "t")


def shared_memory_prefixes(launcher: int | None = None) -> tuple[str, str]:
    """How the semaphores and the blocks of shared memory are named that ranks of this process make.

    >>> shared_memory_prefixes(71)
    ('sem.ddplab71-', 'dl71_')
    """
    launcher = launcher or os.getpid()
    return f"sem.ddplab{launcher}-", f"dl{launcher}_"  # of a block, Python leaves 13 letters for the whole name


def give_up_server() -> None:
    """End a forkserver that does not answer; the next rank starts another."""
    if POSIX and (pid := _server_pid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _server_pid() -> int:
    """The id of the forkserver; 0 without one."""
    return forkserver._forkserver._forkserver_pid or 0  # type: ignore[attr-defined]


def strays() -> list[leftovers.Leftover]:
    """The processes that ranks of this process have started and that outlived them."""
    return leftovers.strays(_server_pid(), _living)


def end_strays() -> list[str]:
    """End what ranks have left in a session of its own, where no signal to their group reaches; say what it was."""
    ended: list[str] = []
    with _polling:  # no rank may be between its birth and its entry in _living
        # While ranks of another launch run, what one of them has started and detached could not be told from a stray.
        # One that dies may be starting another.
        while not _living and len(ended) < MAX_STRAYS and (found := strays()):
            if not (gone := [str(one) for one in found if leftovers.end(one)]):
                break
            ended += gone
    return ended


class RankProcess:
    """One rank as the launcher holds it: its process, a socket to talk to it, and the pipes of its output.

    ``link`` carries messages both ways. ``alive`` carries nothing: when the launcher dies, the system
    closes it, and that ends the rank. ``output`` holds the reading ends of its stdout and stderr.
    """

    def __init__(self, rank: int, start_method: str, main: Callable[..., None]) -> None:
        self.rank = rank
        self.exitcode: int | None = None
        self._pidfd: int | None = None
        self._killed: list[int] = []
        self.link, link = socket.socketpair()
        self.alive, alive = socket.socketpair()
        for theirs_end in (link, alive):  # which socket.setdefaulttimeout() may have made non-blocking
            theirs_end.setblocking(True)
        pipes = {name: Pipe(duplex=False) for name in STREAMS if WAITS_FOR_PIPES}
        self.output = {name: pipe[0] for name, pipe in pipes.items()}
        self._mine: list[Any] = [self.link, self.alive, *self.output.values()]
        theirs = {name: pipe[1] for name, pipe in pipes.items()}
        try:
            with _polling:
                self._process = _start(start_method, main, (rank, link, alive, theirs))
                _living.add(self._process.pid or 0)
        except BaseException:
            self.close()
            raise
        finally:
            ends: list[Any] = [link, alive, *theirs.values()]
            for end in ends:
                end.close()
        self.sentinel = self._open_sentinel()

    def state(self) -> tuple[str, float]:
        """What Linux says of the process: a letter ("R", "S", "T" if stopped) and its CPU seconds; else "" and 0."""
        return _state(self._process.pid or 0)

    def _open_sentinel(self) -> int | None:
        """What becomes readable when the process ends; None where such a thing cannot be waited for.

        Not multiprocessing's own on Linux: a child of the rank may hold the other end of that, or the forkserver.
        """
        if not WAITS_FOR_PIPES:
            return None
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(self._process.pid or 0)
            return self._pidfd
        return self._process.sentinel

    def kill(self) -> None:
        """End the rank and whatever it has started; ``join`` waits for it. Harmless when it is gone."""
        if POSIX and self._process.pid is not None:
            self._killed += _open_members(self._process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ValueError, ProcessLookupError):
            self._process.kill()

    def join(self) -> int:
        """Wait for the process, which has ended or was killed, and for its children; give its exit code."""
        for member in self._killed:  # which can be read when the process is gone
            wait([member], KILL_LIMIT_S)
            os.close(member)
        self._killed.clear()
        with _polling:
            if self._process.exitcode is None:  # asked first: to join would wait for all who hold the sentinel
                self._process.join(KILL_LIMIT_S)
            self._process.join(0)
            _living.discard(self._process.pid or 0)
        exitcode = self._process.exitcode
        self.exitcode = 255 if exitcode is None else exitcode
        return self.exitcode

    def close(self) -> None:
        """Close the launcher's ends."""
        for end in self._mine:
            end.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        with contextlib.suppress(AttributeError, ValueError):  # it never started, or cannot be ended
            self._process.close()


def _state(pid: int) -> tuple[str, float]:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat") as file:
        letter, *fields = file.read().rpartition(") ")[2].split()
        return letter, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def _open_members(group: int) -> list[int]:
    """Descriptors of the processes of a group, to wait for; on Linux only."""
    members = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with contextlib.suppress(ValueError, OSError):
            if os.getpgid(int(name)) == group:
                members.append(os.pidfd_open(int(name)))
    return members


def _start(start_method: str, main: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
    """Start one process.

    torch hands all processes of one call the same arguments, but no rank may hold the pipes of
    another: their ends would never be seen closed. So there is one call for each rank.
    """
    import torch.multiprocessing as mp

    with _without_script():
        return _start_one(mp, start_method, main, args)


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Keep ranks from importing the script that launches them: what they need of it travels by value.

    And put the launcher's mark at the end of their command line.
    """
    before, command, mine = spawn.get_preparation_data, spawn.get_command_line, threading.get_ident()

    def prepare(name: str) -> dict[str, Any]:
        told = before(name)
        others = threading.get_ident() != mine  # a process that the notebook itself starts meanwhile
        return {key: value for key, value in told.items() if others or not key.startswith("init_main")}

    def marked(**kwargs: Any) -> list[str]:
        return [*command(**kwargs), *([leftovers.mark()] if threading.get_ident() == mine else [])]

    spawn.get_preparation_data, spawn.get_command_line = prepare, marked
    try:
        yield
    finally:
        spawn.get_preparation_data, spawn.get_command_line = before, command


def _start_one(mp: Any, start_method: str, main: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
    if start_method == "spawn":
        context = mp.spawn(main, args, nprocs=1, join=False)
    else:
        try:
            warm()
            context = mp.start_processes(main, args, nprocs=1, join=False, start_method=start_method)
        except (EOFError, ConnectionError, FileNotFoundError):  # it was about to end, by an interrupt or a kill, or
            # something has cleared /tmp, its socket with it: start another
            with contextlib.suppress(FileNotFoundError):
                forkserver._forkserver._stop()  # type: ignore[attr-defined]
            _forget_lost_folder()
            warm()
            context = mp.start_processes(main, args, nprocs=1, join=False, start_method=start_method)
    process: BaseProcess = context.processes[0]
    return process


def _forget_lost_folder() -> None:
    """Let multiprocessing make another folder for its sockets when the one it made is gone."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if (folder := config.get("tempdir")) and not os.path.isdir(folder):
        config["tempdir"] = None


def hold_interrupts() -> None:
    """Keep interrupts away from what this thread starts: a rank in the middle of its imports would die noisily.

    The mask of the thread is inherited; ``lead_group`` lifts it, once the rank has left the kernel's group.
    """
    if POSIX:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


# In the rank ------------------------------------------------------------------------------------------


def lead_group(rank: int, alive: socket.socket) -> None:
    """Make this process the leader of a group of its own, which ends when the other end of ``alive`` closes.

    A group of its own keeps Jupyter's interrupts, which go to the kernel's group, away from the rank;
    and one signal reaches the rank with all that it has started. On Linux the kernel of the system
    itself sends that signal, so it also reaches a rank that is stopped or never lets go of the GIL.
    """
    if not POSIX:
        return
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets an interrupt that has come meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_NAME, f"{leftovers.COMM} {rank}".encode())
        prctl(PR_SET_PDEATHSIG, 0)  # torch has asked for SIGINT when the forkserver ends, which is no reason to stop
        end_with(alive, -os.getpid())


def end_with(alive: socket.socket, owner: int) -> None:
    """Let Linux end the process ``owner``, or the group ``-owner``, when the other end of ``alive`` closes."""
    if sys.platform == "linux":
        import fcntl

        flags = fcntl.fcntl(alive, fcntl.F_GETFL)
        fcntl.fcntl(alive, fcntl.F_SETOWN, owner)
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, flags | os.O_ASYNC)


def end_group() -> None:
    """End this rank and all that it has started, at once."""
    if POSIX and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def use_own_children(launcher: int) -> None:
    """Let children of this rank belong to it, started as they would be in a plain Python process.

    A rank inherits its own start method as the default for its children, and the launcher's
    forkserver, whose children would outlive the rank. What it makes in shared memory is named after the launcher,
    which can then tell what is left of it.
    """
    import multiprocessing.shared_memory as shared_memory

    semaphores, blocks = shared_memory_prefixes(launcher)
    multiprocessing.current_process()._config["semprefix"] = "/" + semaphores.removeprefix("sem.").rstrip("-")  # type: ignore[attr-defined]
    shared_memory._SHM_NAME_PREFIX = "/" + blocks  # type: ignore[attr-defined]
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)
    _forget_server()
    forkserver.set_forkserver_preload(["torch", "ddplab.shipping"])


def _forget_server() -> None:
    server: Any = forkserver._forkserver
    server._forkserver_address = server._forkserver_pid = None


def forget_children() -> None:
    """Let the end of a child of this rank raise nothing more, as torch lets that of a DataLoader worker do."""
    if POSIX and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def redirect(pipes: Mapping[str, Connection]) -> None:
    """Send descriptors 1 and 2 of this process, and so of all that it starts, into ``pipes``."""
    for name, pipe in pipes.items():
        _reopen(name, pipe.fileno())
        pipe.close()


def pump(tell: Callable[[str, bytes], None]) -> Callable[[], None]:
    """Tell what this process writes, where pipes to the launcher are not to be had.

    Gives a function that waits until all has been told; after it nothing more can be written.
    """
    threads = []
    for name in STREAMS:
        reading, writing = os.pipe()
        _reopen(name, writing)
        os.close(writing)
        threads.append(threading.Thread(target=_pump, args=(name, reading, tell), daemon=True))
        threads[-1].start()

    def finish() -> None:
        for number in STREAMS.values():
            os.close(number)
        for thread in threads:
            thread.join(1.0)  # a child of this rank may hold the other end for ever

    return finish


def _pump(name: str, reading: int, tell: Callable[[str, bytes], None]) -> None:
    while data := os.read(reading, 1 << 16):
        tell(name, data)


def _reopen(name: str, target: int) -> None:
    """Let stream ``name`` write to ``target``, unbuffered: what was printed before a crash is out."""
    number = STREAMS[name]
    os.dup2(target, number)
    raw = open(number, "wb", buffering=0, closefd=False)
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
