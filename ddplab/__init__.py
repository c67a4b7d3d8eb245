"""ddplab: a cell runs real ranks, and shows what every one of them did."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
from typing import TYPE_CHECKING

from ddplab.checkup import doctor
from ddplab.errors import DdplabError, LaunchError, RankFailedError, RankTimeoutError, ShippingError
from ddplab.export import export
from ddplab.launcher import launch
from ddplab.machine import device
from ddplab.run import Run
from ddplab.telling import log, progress, span

if TYPE_CHECKING:
    from ddplab import exercises, faults, plots
    from ddplab.exercises import check as check
    from ddplab.explanation import Explanation as Explanation
    from ddplab.explanation import explain as explain

__all__ = [
    "DdplabError", "Explanation", "LaunchError", "RankFailedError", "RankTimeoutError", "Run", "ShippingError",
    "check", "device", "doctor", "exercises", "explain", "export", "faults", "launch", "log", "plots", "progress",
    "span",
]  # fmt: skip

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``ddplab.plots`` loads matplotlib when it is first used, ``ddplab.explain`` its catalogue."""
    if name in ("explain", "Explanation"):
        return getattr(importlib.import_module("ddplab.explanation"), name)
    if name == "check":
        return importlib.import_module("ddplab.exercises").check
    if name in ("plots", "data", "exercises", "faults", "tables"):
        return importlib.import_module(f"ddplab.{name}")
    raise AttributeError(f"module 'ddplab' has no attribute {name!r}")


def _warm() -> None:
    """In a notebook, prepare the first launch while the learner reads: the forkserver, and torch in the kernel.

    torch is imported by the kernel's own event loop, when the cell has ended. A thread would not do: torch
    breaks when one thread imports it and another one of its parts.
    """
    import asyncio

    from ddplab.processes import warm

    warm()
    with contextlib.suppress(RuntimeError):  # no event loop: torch is imported by the first launch
        asyncio.get_running_loop().call_later(0.05, importlib.import_module, "torch.multiprocessing")


if "ipykernel" in sys.modules and sys.platform == "linux" and multiprocessing.parent_process() is None:
    _warm()
