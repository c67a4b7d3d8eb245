"""What launchers leave when they cannot tidy up, told by a mark; and the processes that ranks have left. Linux only.

Ranks carry the mark of their launcher, "ddplab_of_PID_START", in their command line or their environment, and
so does all that they start. ``START`` tells the launcher from a later process of the same id.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMM", "OUTPUT_PREFIX", "Leftover", "end", "files", "find", "mark", "strays"]

MARK = re.compile(rb"ddplab_of_(\d+)_(\d+)")
COMM = "ddplab rank"  # how `ps` and `top` name a rank; a child that it forks keeps the name until it calls exec
OUTPUT_PREFIX = "ddplab-output-"  # of the files that hold long output; the mark of the launcher follows
KILL_LIMIT_S = 5.0


@dataclass(frozen=True)
class Leftover:
    """A process that is still there: its id, when it started (clock ticks since the system did), its command line.

    ``launcher`` is the mark of the process that launched the rank it comes from.
    """

    pid: int
    ticks: int
    command: str
    launcher: str

    @property
    def started(self) -> float:
        """When it started, in seconds since 1970."""
        with open("/proc/stat") as file:
            boot_s = next(float(line.split()[1]) for line in file if line.startswith("btime"))
        return boot_s + self.ticks / os.sysconf("SC_CLK_TCK")

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command[:80]})"


def mark(pid: int | None = None) -> str:
    """The mark of a launcher, by default of this process."""
    pid = pid or os.getpid()
    return f"ddplab_of_{pid}_{_ticks(pid)}"


def find() -> list[Leftover]:
    """The processes of this user whose launcher is dead, oldest first."""
    return sorted((one for one in _marked() if not _is_running(one.launcher)), key=lambda one: one.ticks)


def strays(server: int | None, ranks: Collection[int]) -> list[Leftover]:
    """The processes that ranks of this process have started and that outlived them.

    ``server`` is the forkserver, ``ranks`` are the ranks that live; what these have started is no stray.
    """
    mine = mark()
    found = [one for one in _marked(_ticks(os.getpid())) if one.launcher == mine and one.pid != server]
    return [one for one in found if _comes_from_rank(one.pid, mine) and not _descends(one.pid, ranks)]


def end(leftover: Leftover) -> bool:
    """End the process, if it is still the same one; say whether it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(leftover.pid)
        try:
            if _ticks(leftover.pid) == leftover.ticks:  # asked after it was opened: the id cannot change hands
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _wait(handle)
        finally:
            os.close(handle)
    return _ticks(leftover.pid) != leftover.ticks


def files() -> list[Path]:
    """The output files of launchers that are dead, in the temporary folder."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{OUTPUT_PREFIX}*"):
        with contextlib.suppress(OSError):
            known = MARK.search(path.name.encode())
            if known and not _is_running(known[0].decode()) and path.stat().st_uid == os.getuid():
                found.append(path)
    return sorted(found)


def _descends(pid: int, ancestors: Collection[int]) -> bool:
    """Whether the process is one of ``ancestors`` or comes from one of them."""
    while pid > 1 and pid not in ancestors:
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return pid > 1


def _marked(since: int = 0) -> list[Leftover]:
    """The living processes of this user that carry a mark and started at clock tick ``since`` or later."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit() or (pid := int(name)) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != os.getuid() or not (ticks := _ticks(pid)) or ticks < since:
                continue
            command = _read(pid, "cmdline")
            if known := MARK.search(command) or MARK.search(_read(pid, "environ")):
                text = command.replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(Leftover(pid, ticks, text, known[0].decode()))
    return found


def _comes_from_rank(pid: int, mine: str) -> bool:
    """Whether a rank has started it: the forkserver may serve other processes of the notebook too."""
    with contextlib.suppress(OSError):
        forked = _read(pid, "comm").startswith(COMM.encode())
        return forked or f"DDPLAB_LAUNCHER={mine}\0".encode() in _read(pid, "environ")
    return False


def _is_running(launcher: str) -> bool:
    pid, ticks = map(int, launcher.split("_")[-2:])
    return _ticks(pid) == ticks


def _ticks(pid: int) -> int:
    """When the process started, in clock ticks since the system did; 0 if it is gone or a zombie, or not known."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program: state, parent, ...; empty if it is gone."""
    with contextlib.suppress(OSError):
        return _read(pid, "stat").rpartition(b") ")[2].decode().split()
    return []


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _wait(handle: int) -> None:
    from multiprocessing.connection import wait

    wait([handle], KILL_LIMIT_S)
