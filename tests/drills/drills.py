"""Bad days for ranks, drawn at random: ``drill(seed)`` is always the same one, and ``live`` is a rank's part in it."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MARK = "DDPLAB_DRILL"  # a variable of all that a drill starts: the path of the drill's folder
IN_ORDER = ("before init", "in init", "collective", "backward", "returning", "printing")
ALWAYS = (*IN_ORDER, "inside a collective")  # there another thread has the bad moment
TOGETHER = ("collective",)
SILENT = ("collective", "backward", "returning")  # nothing is printed afterwards


@dataclass(frozen=True)
class Drill:
    """One bad day: rank ``who`` of ``world_size`` has ``kind`` at ``moment``; if it outlives that, ``then`` follows.

    ``caller`` is what calls launch: a cell, a running asyncio loop, or two threads at once.
    """

    seed: int
    kind: str
    moment: str
    world_size: int
    who: int
    then: str
    start_method: str
    caller: str
    timeout_s: float
    num_lines: int

    @property
    def ends(self) -> str:
        """The type of the failure that must come first; "" for none."""
        ends = KINDS[self.kind].ends or THEN[self.then][1]
        return "ShippingError" if ends.endswith("Error") and self.moment == "returning" else ends

    def is_bad_here(self) -> bool:
        """Whether this process is the rank that has the bad day."""
        return int(os.environ["RANK"]) == self.who


@dataclass(frozen=True)
class Kind:
    """What the bad rank does, as code; the type of failure it ends in, or "" if the rank goes on; and when that can be."""

    code: str
    ends: str = ""
    moments: tuple[str, ...] = IN_ORDER
    least: int = 1  # ranks

    @property
    def is_plain(self) -> bool:
        """Whether nothing happens to the process that calls launch."""
        return self.ends not in ("KeyboardInterrupt", "kernel")


PRELUDE = "import ctypes, re, resource, signal, subprocess, tempfile, time\nFOREVER_S = 1000\n"
SLEEP = "time.sleep(FOREVER_S)"
DIE = "os.kill(os.getpid(), signal.{})\n" + SLEEP
READY = "open(os.environ[MARK] + '/ready', 'w').close()\n"  # tells the test that the moment has come
WAIT = READY + "while drill.seed % 3 == 0: pass\nif drill.seed % 3 == 1: ctypes.PyDLL(None).sleep(FOREVER_S)\n" + SLEEP
KINDS = {
    "raise": Kind("raise ValueError('bad day')", "ValueError"),
    "raise with arguments of its own": Kind("class OddError(Exception):\n def __init__(self, a, *, b): super().__init__(a, b)\nraise OddError(1, b=2)", "OddError"),
    # Not in init: there torch itself asks for the text, and what that raises takes the place.
    "raise without a text": Kind("class MuteError(Exception):\n def __str__(self): raise ValueError\nraise MuteError", "MuteError", SILENT),
    "raise what does not unpickle": Kind("class LostError(Exception):\n def __reduce__(self): return sys.exit, ('lost',)\nraise LostError", "LostError"),
    "sys.exit": Kind("sys.exit((0, 3, 'text', None)[drill.seed % 4])", "SystemExit"),
    "os._exit(0)": Kind("os._exit(0)", "exit code 0", ALWAYS),
    "os._exit(3)": Kind("os._exit(3)", "exit code 3", ALWAYS),
    "SIGKILL": Kind(DIE.format("SIGKILL"), "SIGKILL", ALWAYS),
    "SIGTERM": Kind(DIE.format("SIGTERM"), "SIGTERM", ALWAYS),
    "SIGSTOP": Kind(DIE.format("SIGSTOP"), "Timeout", ALWAYS),
    "SIGSEGV": Kind("ctypes.string_at(0)", "SIGSEGV", ALWAYS),
    "abort in Gloo": Kind("dist.all_reduce(torch.ones(40_000))", "SIGABRT", TOGETHER, least=2),
    # Gloo says nothing to small messages of different sizes; then it waits for ever.
    "shapes that differ": Kind("dist.all_reduce(torch.ones(3))\nraise Skip", "Timeout", TOGETHER, least=2),
    "skip": Kind("raise Skip", "RuntimeError", ("collective", "backward"), least=2),
    "endless loop": Kind("while True: pass", "Timeout", ALWAYS),
    "endless regular expression": Kind("re.match('(a+)+$', 'a' * 40 + 'b')", "Timeout", ALWAYS),
    "endless C that holds the GIL": Kind("ctypes.PyDLL(None).sleep(FOREVER_S)", "Timeout", ALWAYS),
    "sleep": Kind(SLEEP, "Timeout", ALWAYS),
    "endless printing": Kind("while True: print('again and again')", "Timeout", ALWAYS),
    "recursion": Kind("def deeper(n): return 1 + deeper(n)\ndeeper(0)", "RecursionError"),
    "out of memory": Kind("used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\nresource.setrlimit(resource.RLIMIT_AS, [used + 2**28] * 2)\nhoard = []\nwhile True: hoard.append(bytearray(2**20))", "MemoryError"),
    "out of descriptors": Kind("held = []\nwhile True: held.append(open(os.devnull))", "OSError"),
    "full disk": Kind("open('/dev/full', 'wb', 0).write(b'x')", "OSError"),
    "file that grows too large": Kind("resource.setrlimit(resource.RLIMIT_FSIZE, [2**16] * 2)\nfile = tempfile.TemporaryFile(buffering=0)\nwhile True: file.write(bytes(2**15))", "OSError"),
    "closed descriptor 1": Kind("os.close(1)", moments=SILENT),
    "closed sys.stdout": Kind("sys.stdout.close()", moments=SILENT),
    "flood": Kind("for number in range(drill.num_lines): print('line', number)"),
    "line of 100 MB": Kind("print('x' * 100_000_000)"),
    "binary output": Kind("os.write(1, bytes(range(256)) * 1000 + b'\\n')"),
    "child": Kind("subprocess.Popen(['sleep', str(FOREVER_S)])"),
    "child in its own session": Kind("subprocess.Popen(['sleep', str(FOREVER_S)], start_new_session=True)"),
    "forked child": Kind(f"if not os.fork():\n signal.signal(signal.SIGTERM, signal.SIG_IGN)\n {SLEEP}"),
    "daemon": Kind(f"if os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n if drill.seed % 2: os.execvp('sleep', ['sleep', str(FOREVER_S)])\n {SLEEP}\nos.wait()"),
    "endless thread": Kind(f"threading.Thread(target=lambda: {SLEEP}, daemon=drill.seed % 2 == 0).start()"),
    "thread that prints": Kind("def chatter():\n while True: print('still here'), time.sleep(0.001)\nthreading.Thread(target=chatter, daemon=drill.seed % 2 == 0).start()"),
    "interrupt": Kind(WAIT, "KeyboardInterrupt", ALWAYS),
    "two interrupts": Kind(WAIT, "KeyboardInterrupt", ALWAYS),
    "interrupt of the start": Kind(SLEEP, "KeyboardInterrupt"),
    # The others go on computing, so that the launcher waits a moment before it ends them.
    "interrupt of the clean-up": Kind("while not drill.is_bad_here(): pass\n" + READY + "raise ValueError('first')", "KeyboardInterrupt", TOGETHER, least=2),
    "kernel restart": Kind(SLEEP, "kernel", TOGETHER, least=2),
    "kernel killed": Kind(SLEEP, "kernel", TOGETHER, least=2),
    "time-out of nbval": Kind(SLEEP, "kernel", TOGETHER, least=2),
}  # fmt: skip
OF_ALL = ("flood", "interrupt of the clean-up")  # what all ranks do
LENGTHY = ("flood", "line of 100 MB")
THEN = {  # what follows trouble that a rank outlives, and the type of failure that this is
    "return": ("pass", ""),
    "raise": ("raise KeyError('after all')", "KeyError"),
    "die": (DIE.format("SIGKILL"), "SIGKILL"),
    "hang": (SLEEP, "Timeout"),
}


def drill(seed: int, num_lines: int = 100_000) -> Drill:
    """The drill of this seed. As many seeds as there are kinds, from a multiple of that number on, have each kind once."""
    turn, place = divmod(seed, len(KINDS))
    name = random.Random(f"kinds {turn}").sample(sorted(KINDS), len(KINDS))[place]
    kind, draw = KINDS[name], random.Random(f"drill {seed}")
    world_size = max(kind.least, 4 if name == "flood" else draw.choice((1, 2, 2, 3, 4)))
    then = (
        "return" if kind.ends else draw.choice(("return", "return", "raise", "die", *["hang"] * (name not in LENGTHY)))
    )
    hangs = "Timeout" in (kind.ends, THEN[then][1])
    is_spawned = kind.is_plain and world_size < 3 and not hangs and draw.random() < 0.2
    return Drill(
        seed=seed,
        kind=name,
        moment=kind.moments[seed % len(kind.moments)],
        world_size=world_size,
        who=draw.randrange(world_size),
        then=then,
        start_method="spawn" if is_spawned else "forkserver",
        caller=draw.choice(("cell", "cell", "cell", "asyncio", "threads")) if kind.is_plain else "cell",
        timeout_s=round(draw.uniform(1.5, 3), 1) if hangs else 120 if name in LENGTHY else 20,
        num_lines=num_lines,
    )


# In a rank ---------------------------------------------------------------------------------------------


class Skip(Exception):
    """Leaves what the other ranks do."""


class Arrival:
    """Becomes the drill in a rank, before that joins its group."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self.drill,)


def arrive(drill: Drill) -> Drill:
    """Mark this process for children that it forks, and lay the trap in the group that is made next."""
    os.open(os.environ[MARK] + "/held", os.O_CREAT)

    class Gloo(dist.ProcessGroupGloo):
        def __init__(self, *args: Any, **options: Any) -> None:
            if drill.seed % 2:
                trouble(drill)
            super().__init__(*args, **options)
            if not drill.seed % 2:
                trouble(drill)

    if drill.moment == "in init":
        dist.distributed_c10d.ProcessGroupGloo = Gloo  # type: ignore[misc]
    return drill


def words(folder: str, rank: int | str, when: str) -> str:
    """What a rank of this drill, and no other, prints."""
    return f"<{os.path.basename(folder)} rank {rank} {when}>"


def say(when: str, **options: Any) -> None:
    """Print that."""
    print(words(os.environ[MARK], os.environ["RANK"], when), **options)


def trouble(drill: Drill) -> None:
    """The bad moment, with a line before it and, where it does not end the rank, one after it."""
    if not drill.is_bad_here() and drill.kind not in OF_ALL:
        return
    say("now", end="" if drill.moment == "printing" else "\n")
    known = globals() | {"drill": drill}
    exec(PRELUDE + KINDS[drill.kind].code, known)
    say("after", file=sys.stderr if drill.moment == "printing" or "closed" in drill.kind else sys.stdout)
    if drill.is_bad_here():
        exec(THEN[drill.then][0], known)


class Parcel:
    """A value that has its moment while it is printed or packed."""

    def __init__(self, drill: Drill) -> None:
        self.drill = drill

    def __str__(self) -> str:
        trouble(self.drill)
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        trouble(self.drill)
        return str, ("done",)


def live(drill: Drill) -> object:
    """What each rank of a drill does."""
    if drill.moment == "before init":
        trouble(drill)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    say("up")
    dist.barrier()
    with contextlib.suppress(Skip):
        if drill.moment == "collective":
            trouble(drill)
        elif drill.moment == "inside a collective":
            if drill.is_bad_here():
                threading.Timer(random.Random(drill.seed).uniform(0, 0.1), trouble, [drill]).start()
            while True:
                dist.all_reduce(torch.ones(10_000))
        elif drill.moment == "backward":
            model = DistributedDataParallel(nn.Linear(4, 4))
            model.module.bias.register_hook(lambda grad: trouble(drill))
            model(torch.ones(2, 4)).sum().backward()
        elif drill.moment == "printing":
            print("a label:", Parcel(drill))
        elif drill.moment == "returning":
            return Parcel(drill)
        dist.all_reduce(torch.ones(4))
    if drill.kind == "shapes that differ":
        dist.barrier()
    return "done"


def add() -> int:
    """The next launch, in which nothing is wrong."""
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return int(total)
