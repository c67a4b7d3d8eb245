"""What a test knows of the processes that a kernel's cells start, and how it waits for them."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path

# For a rank: tell the test that it is up, and who it is.
TELL = """
import os, time
import torch, torch.distributed as dist
from ddplab import launch, log

def tell(folder):
    words = open("/proc/self/stat").read().rpartition(")")[2].split()
    with open(f"{folder}/{os.getpid()}.tmp", "w") as file:
        file.write(repr((os.getpid(), words[19])))
    os.rename(file.name, f"{folder}/{os.getpid()}.told")

def hang(folder):
    tell(folder)
    while int(os.environ["RANK"]):
        pass
    dist.barrier()
"""


class Ranks:
    """The ranks that called ``tell(folder)``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def told(self) -> list[tuple[int, str]]:
        """Process id and start time of each."""
        return [ast.literal_eval(path.read_text()) for path in self.folder.glob("*.told")]

    def wait(self, number: int) -> None:
        """Wait until ``number`` ranks are up."""
        wait_for(lambda: len(self.told) == number, 60, f"{number} ranks up")

    def check_gone(self) -> None:
        """All that were up must be gone after 2 s; three times that on a busy machine."""
        assert self.told
        wait_for(lambda: not any(map(is_alive, self.told)), 6, "no rank left")


def wait_for(is_true: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait until ``is_true()``; fail after ``limit_s`` seconds."""
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, f"waited for {limit_s} s: {what}"
        time.sleep(0.02)


def is_alive(identity: tuple[int, str]) -> bool:
    """Whether that very process still runs; a zombie does not."""
    try:
        words = Path(f"/proc/{identity[0]}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[19] == identity[1] and words[0] not in "ZX"


def children(pid: int) -> list[str]:
    """The command lines of the children of a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [Path(f"/proc/{child}/cmdline").read_text() for child in path.read_text().split()]
        except OSError:  # one that has just ended
            continue
    return found
