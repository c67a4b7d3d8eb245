"""What the measures of a machine mean for ranks: each function judges values, which may be those of any machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddplab import machine

__all__ = [
    "Check", "check_backends", "check_cores", "check_gpus", "check_host_name", "check_leftovers", "check_loopback",
    "check_memory", "check_open_files", "check_package", "check_shared_memory", "check_start_method",
    "check_temporary_folder", "check_variables", "size",
]  # fmt: skip

MIB, GIB = 2**20, 2**30
# Private pages of a rank after some training of a small CNN with DDP (torch 2.14.1, Linux, /proc/PID/smaps_rollup):
# 54 MiB forked, 409 MiB spawned; for a model of one layer 14 and 360. The forkserver itself has 384 MiB, once.
FORKED_BYTES, SPAWNED_BYTES, FORKSERVER_BYTES = 60 * MIB, 400 * MIB, 390 * MIB
UNSET = "Unset it before Jupyter starts"
# Variables, the values that matter, the state, and advice. All that is "bad" was seen to hurt real launches.
VARIABLES = (
    ("TORCH_DISTRIBUTED_DEBUG", "(?i)detail", "bad", f"DDP over Gloo crashes with it (SIGSEGV). {UNSET}, or use INFO."),
    ("TORCH_DISTRIBUTED_DEBUG", "(?i)(?!(detail|info|off)$).*", "bad", "torch takes only OFF, INFO and DETAIL."),
    ("GLOO_DEVICE_TRANSPORT", "(?!TCP$).*", "bad", f"Gloo in the wheels of torch knows only TCP. {UNSET}."),
    ("OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY", "(?i)(?!false$).+", "bad", f"Ties all ranks to one core. {UNSET}."),
    ("OMP_NUM_THREADS MKL_NUM_THREADS", ".+", "note", "Not heeded by torch in a rank: use launch(..., threads=1)."),
    ("GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME NCCL_SOCKET_IFNAME", ".*", "note",
     "Not heeded by launch: ranks use the loopback interface."),
    ("CUDA_VISIBLE_DEVICES", "|-1", "note", "Hides all GPUs."),
    ("CUDA_LAUNCH_BLOCKING", "1", "note", "CUDA calls wait for each other: times and overlap will mislead."),
    ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT", ".*", "note",
     "Not heeded by launch; without it, init_process_group takes this process for a rank and waits for others."),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, whether that is "ok", a "note" or "bad", and advice."""

    name: str
    found: str
    state: str
    advice: str = ""


def check_package(name: str, version: str | None, required: Any) -> Check:
    """Whether a package is there and new enough. Only those without which no rank runs can be bad."""
    wanted = str(required.specifier) if required else ""
    state = "bad" if required and required.marker is None else "note"
    if version is None:
        return Check(name, "missing", state, f'pip install "{name}{wanted}"')
    if wanted and not required.specifier.contains(version, prereleases=True):
        return Check(name, version, state, f'Too old: pip install "{name}{wanted}"')
    return Check(name, version, "ok", f"ddplab needs {wanted}." if wanted else "")


def check_backends(built: Sequence[str], advice: str) -> Check:
    """The backends that are part of this torch; without Gloo most lessons fail."""
    if "gloo" not in built:
        return Check("backends", ", ".join(built) or "none", "bad", "Gloo is missing: use the wheels of torch.")
    return Check("backends", ", ".join(built) + ("" if "mpi" in built else " (MPI: not in wheels)"), "ok", advice)


def check_gpus(count: int, names: Sequence[str], cuda: str | None) -> Check:
    """The GPUs that torch can use, with the names that the driver gives and the CUDA that torch was built for."""
    if count:
        return Check("GPUs", f"{count} ({', '.join(names)})", "ok", f"NCCL with up to {count} ranks, one GPU each.")
    if not names:
        return Check("GPUs", "none", "ok", "Ranks use gloo on the CPU. Cells tagged needs_gpu need another machine.")
    why = f"CUDA_VISIBLE_DEVICES hides them, or the driver is too old for CUDA {cuda}." if cuda else "a build for CPUs."
    return Check("GPUs", f"none for torch ({', '.join(names)})", "note", f"This torch sees no GPU: {why}")


def check_cores(cores: int, quota: float | None) -> Check:
    """How many ranks compute at once. ``quota``: of how many cores a container may use the time."""
    if quota is not None and quota < cores:
        advice = "A container's limit, which launch does not see: use launch(..., threads=1), and few ranks."
        return Check("cores", f"{cores}, with the time of {quota:g}", "note", advice)
    if cores == 1:
        return Check("cores", "1", "note", "Ranks take turns: all works, but more ranks are never faster.")
    return Check("cores", str(cores), "ok", f"{cores} ranks compute at once; more of them share the cores.")


def check_memory(available: int | None) -> Check:
    """How many ranks with small models the memory carries."""
    if available is None:
        return Check("memory", "not known here", "ok")
    forked, spawned = (available - FORKSERVER_BYTES) // FORKED_BYTES, available // SPAWNED_BYTES
    state = "bad" if forked < 2 else "note" if spawned < 4 else "ok"
    advice = f"Carries about {max(0, forked)} ranks by forkserver or {spawned} by spawn, with small models."
    little = "" if state == "ok" else " Shut down other kernels."
    return Check("memory", f"{size(available)} available", state, advice + little)


def check_shared_memory(space: tuple[int, int] | None, system: str) -> Check:
    """The total and free bytes of ``/dev/shm``, which only Linux has."""
    if system != "linux":
        return Check("/dev/shm", "not known here", "ok")
    total, free = space or (0, 0)
    state = "bad" if free < 16 * MIB else "note" if free < 512 * MIB else "ok"
    advice = "" if state == "ok" else " Little: docker run --shm-size=1g, or DataLoader(num_workers=0)."
    found = f"{size(free)} of {size(total)} free" if space else "missing"
    return Check("/dev/shm", found, state, f"DataLoader workers and NCCL pass data there.{advice}")


def check_open_files(limits: tuple[int, int] | None, world_size: int) -> Check:
    """The soft and the hard limit, and the ``world_size`` that comes of them."""
    soft, hard = (str(limit) if 0 <= limit < 2**31 else "no limit" for limit in limits or (-1, -1))
    state = "bad" if world_size < 4 else "note" if world_size < 32 else "ok"
    advice = "" if state == "ok" else " For more: `ulimit -n 4096` before Jupyter starts."
    if advice and limits and 0 <= limits[1] < 4096:
        advice = " For more, raise the hard limit: docker run --ulimit nofile=4096."
    found = f"{soft} (at most {hard})" if limits else "not known here"
    return Check("open files", found, state, f"launch takes a world_size of up to {world_size}.{advice}")


def check_start_method() -> Check:
    """How "auto" starts ranks here."""
    try:
        chosen = machine.choose_start_method("auto")
    except ValueError as error:
        return Check("start method", "none", "bad", f"{error}.")
    fast = chosen == "forkserver"
    advice = "A launch takes tenths of a second, the first one more." if fast else "Each rank imports torch: seconds."
    by = " by DDPLAB_START_METHOD" if "DDPLAB_START_METHOD" in os.environ else ""
    return Check("start method", f'"auto" is {chosen}{by}', "ok", advice)


def check_temporary_folder(folder: str, problem: str, free: int) -> Check:
    """The folder for sockets and long output; ``problem`` is what became of a socket there."""
    if problem:
        return Check("temporary folder", folder, "bad", f"{problem}: set TMPDIR to a short path that can be written.")
    state = "ok" if free >= GIB else "note"
    return Check("temporary folder", f"{folder}, {size(free)} free", state, "Holds sockets and long output of ranks.")


def check_loopback(problem: str) -> Check:
    """Whether ranks can meet."""
    if problem:
        return Check("loopback", problem, "bad", "Ranks meet on 127.0.0.1: `ip link set lo up`, or allow it.")
    return Check("loopback", "127.0.0.1 answers", "ok", "Ranks meet there; nothing listens on the network.")


def check_host_name(name: str, problem: str) -> Check:
    """Whether Gloo can use the name, as it does unless it is told an interface; launch tells it."""
    safe = "launch avoids that; for torchrun set GLOO_SOCKET_IFNAME=lo."
    if len(os.fsencode(name)) >= 64:  # one too many for the buffer in torch, seen with 2.14.1
        return Check("host name", f"{len(name)} characters", "note", f"Too long: Gloo raises DistBackendError. {safe}")
    if problem:
        return Check("host name", f"{name}: {problem}", "note", f"Gloo cannot resolve it and warns. {safe}")
    return Check("host name", name, "ok", "Can be resolved, which Gloo and torchrun do.")


def check_variables(environ: Mapping[str, str]) -> list[Check]:
    """The environment variables that change a run; one line if there are none."""
    found = []
    for names, values, state, advice in VARIABLES:
        held = [f"{name}={environ[name]}" for name in names.split() if name in environ]
        if held := [text for text in held if re.fullmatch(values, text.partition("=")[2])]:
            found.append(Check("environment", " ".join(held), state, advice))
    return found or [Check("environment", "nothing that hurts", "ok")]


def check_leftovers(num_found: int, num_gone: int) -> Check:
    """What earlier kernels of this user have left."""
    if num_found == num_gone:
        return Check("leftovers", f"none ({num_gone} ended)" if num_gone else "none", "ok")
    advice = "They are listed below. To end them: doctor(end_leftovers=True), or --end-leftovers after the command."
    return Check("leftovers", f"{num_found - num_gone} of earlier kernels", "note", advice)


def size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
