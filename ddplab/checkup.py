"""``doctor``: what this machine can do, what will hurt, and what earlier kernels have left; each with advice.

What is measured here is judged in ``checks.py``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from ddplab import checks, leftovers, machine, rendezvous, tables
from ddplab.checks import Check
from ddplab.leftovers import Leftover

__all__ = ["Check", "Checkup", "doctor"]

PACKAGES = ("torch", "torchvision", "cloudpickle", "matplotlib", "jupyterlab", "ipykernel", "ipywidgets", "nbclient",
            "nbval")  # fmt: skip


@dataclass(frozen=True, repr=False)
class Checkup:
    """What ``doctor`` found; it shows itself as a table.

    ``rows`` has a ``Check`` for each thing. ``leftovers`` are processes and files of earlier kernels, and ``gone``
    those of them that ``doctor(end_leftovers=True)`` has ended or removed.

    >>> Checkup((Check("cores", "1", "note", "Ranks take turns."),))
    what   state  found  advice
    cores  note   1      Ranks take turns.
    <BLANKLINE>
    nothing bad, 1 note
    """

    rows: tuple[Check, ...]
    leftovers: tuple[Leftover | Path, ...] = ()
    gone: tuple[Leftover | Path, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return all(row.state != "bad" for row in self.rows)

    def verdict(self) -> str:
        """The outcome in a line."""
        bad = dict.fromkeys(row.name for row in self.rows if row.state == "bad")
        notes = sum(row.state == "note" for row in self.rows)
        return f"{'bad: ' + ', '.join(bad) if bad else 'nothing bad'}, {notes} note{'' if notes == 1 else 's'}"

    def __repr__(self) -> str:
        parts = [tables.to_text(_wrapped(self.rows, 32, 58)), tables.to_text(self._left()), self.verdict()]
        return "\n\n".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        rows, left = _wrapped(self.rows, tables.MAX_CELL, tables.MAX_CELL), self._left()
        return tables.to_html(rows, self.verdict()) + (tables.to_html(left, "leftovers") if left else "")

    def _left(self) -> list[dict[str, Any]]:
        return [{**_described(one), "now": "gone" if one in self.gone else "still there"} for one in self.leftovers]


def doctor(end_leftovers: bool = False) -> Checkup:
    """What this machine can do, what will hurt, and what earlier kernels have left: a table with advice.

    A kernel that was killed may leave ranks and files; they are listed with their process id and start time.
    ``end_leftovers=True`` ends and removes these. Otherwise nothing is changed.

    >>> [row.found for row in doctor().rows if row.name == "loopback"]
    ['127.0.0.1 answers']
    """
    left: tuple[Leftover | Path, ...] = (*leftovers.find(), *leftovers.files())
    gone = tuple(one for one in left if end_leftovers and _end(one))
    required, name = requirements(), socket.gethostname()
    rows = [
        Check("Python", f"{platform.python_version()}, {platform.system()}", "ok", f"It runs from {sys.prefix}."),
        *(checks.check_package(package, _version(package), required.get(package)) for package in PACKAGES),
        *look_at_torch(),
        checks.check_cores(machine.num_cores(), core_quota()),
        checks.check_memory(available_bytes()),
        checks.check_shared_memory(_space("/dev/shm"), sys.platform),
        checks.check_open_files(_open_files(), machine.max_world_size()),
        checks.check_start_method(),
        checks.check_temporary_folder(*_temporary_folder()),
        checks.check_loopback(_loopback_problem()),
        checks.check_host_name(name, _name_problem(name)),
        *checks.check_variables(os.environ),
        checks.check_leftovers(len(left), len(gone)),
    ]
    return Checkup(tuple(rows), left, gone)


def _end(one: Leftover | Path) -> bool:
    """End the process, if it is still the same one, or remove the file; say whether it is gone."""
    if isinstance(one, Leftover):
        return leftovers.end(one)
    with contextlib.suppress(OSError):
        one.unlink()
    return not one.exists()


# What was found, as a table ----------------------------------------------------------------------------


def _wrapped(checks: Sequence[Check], found_width: int, advice_width: int) -> list[dict[str, Any]]:
    """The checks as rows of a table in which no cell is too long: what does not fit goes on in the next row."""
    rows = []
    for check in checks:
        found = textwrap.wrap(check.found, found_width, break_on_hyphens=False)
        advice = textwrap.wrap(check.advice, advice_width, break_on_hyphens=False)
        for line in range(max(len(found), len(advice), 1)):
            what, state = (check.name, check.state) if line == 0 else ("", "")
            told = {"found": "".join(found[line : line + 1]), "advice": "".join(advice[line : line + 1])}
            rows.append({"what": what, "state": state, **told})
    return rows


def _described(one: Leftover | Path) -> dict[str, Any]:
    pid, since, text = ("", 0.0, str(one)) if isinstance(one, Path) else (one.pid, one.started, one.command[:60])
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if since else ""
    return {"leftover pid": pid, "started": started, "what": text}


# What is found -----------------------------------------------------------------------------------------


def look_at_torch() -> list[Check]:
    """The backends and the GPUs, or why torch cannot be asked."""
    try:
        import torch
        import torch.distributed as dist

        asked = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        built = [name for name, is_built in asked.items() if dist.is_available() and is_built()]
        chosen, why = machine.choose_backend("auto", 2)
        return [checks.check_backends(built, f"2 ranks get {chosen}: {why}."),
                checks.check_gpus(machine.num_gpus(), _gpu_names(), torch.version.cuda)]  # fmt: skip
    except Exception as error:  # a broken installation raises anything; no rank will start, and this is why
        return [Check("backends", f"{type(error).__name__}: {error}", "bad", "torch cannot be imported.")]


def requirements() -> dict[str, Any]:
    """What ddplab needs according to its own package, by name; empty where that cannot be read."""
    from importlib import metadata

    with contextlib.suppress(ImportError, metadata.PackageNotFoundError):
        from packaging.requirements import Requirement

        return {one.name: one for one in map(Requirement, metadata.requires("ddplab") or ())}
    return {}


def _version(name: str) -> str | None:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _gpu_names() -> list[str]:
    """As the driver has them: torch would keep memory on each GPU once it is asked."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.splitlines()
    return []


def _space(folder: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(folder)
        return usage.total, usage.free
    return None


def _open_files() -> tuple[int, int] | None:
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)
    return None


def _temporary_folder() -> tuple[str, str, int]:
    """The folder, what is wrong with it, and its free bytes. The socket is made as the forkserver makes its own."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return "none", str(error), 0
    problem = ""
    try:
        if sys.platform != "win32":
            Listener(family="AF_UNIX").close()
    except FileNotFoundError:
        pass  # something has cleared the folder since this process began: launch makes another
    except OSError as error:
        problem = str(error)
    return folder, problem, (_space(folder) or (0, 0))[1]


def core_quota(root: Path = Path("/")) -> float | None:
    """Of how many cores the control groups of this process let it use the time; None without a limit."""
    quotas = [_read(folder / "cpu.max").split() for folder in _groups(root)]
    return min((int(quota[0]) / int(quota[1]) for quota in quotas if quota and quota[0] != "max"), default=None)


def available_bytes(root: Path = Path("/")) -> int | None:
    """The memory that this process can still get, from the system and within its control groups."""
    rooms = [int(kib) * 1024 for kib in re.findall(r"MemAvailable: +(\d+)", _read(root / "proc/meminfo"))]
    for folder in _groups(root):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            cache = re.search(r"^inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            rooms.append(max(0, int(limit) - int(used) + int(cache[1] if cache else 0)))
    return min(rooms, default=None)


def _groups(root: Path) -> list[Path]:
    """The control groups (version 2) that hold this process, up to the top; in a container, that alone is seen."""
    own = re.search(r"^0::/(.*)", _read(root / "proc/self/cgroup"), re.MULTILINE)
    path = Path(own[1] if own else "")
    return [root / "sys/fs/cgroup" / part for part in (path, *path.parents)]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _loopback_problem() -> str:
    try:
        with socket.create_server((rendezvous.LOOPBACK, 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2), server.accept()[0]:
                return ""
    except OSError as error:
        return str(error)


def _name_problem(name: str, limit_s: float = 1.0) -> str:
    """What is wrong with looking up ``name``, which can take long, in a thread that nobody has to wait for."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            socket.getaddrinfo(name, None)
            answers.put("")
        except (OSError, UnicodeError) as error:
            answers.put(str(error))

    threading.Thread(target=look_up, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=limit_s)
    return f"no answer within {limit_s:g} s"
