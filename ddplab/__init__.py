"""ddplab: a cell runs real ranks, and shows what every one of them did."""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING

from ddplab.errors import DdplabError, LaunchError, RankFailedError, RankTimeoutError, ShippingError
from ddplab.launcher import launch
from ddplab.machine import device
from ddplab.run import Run
from ddplab.worker import log

if TYPE_CHECKING:
    from ddplab import plots

__all__ = [
    "DdplabError", "LaunchError", "RankFailedError", "RankTimeoutError", "Run", "ShippingError",
    "device", "launch", "log", "plots",
]  # fmt: skip

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``ddplab.plots`` loads matplotlib when it is first used."""
    if name in ("plots", "data", "tables"):
        import importlib

        return importlib.import_module(f"ddplab.{name}")
    raise AttributeError(f"module 'ddplab' has no attribute {name!r}")


if "ipykernel" in sys.modules and sys.platform == "linux" and multiprocessing.parent_process() is None:
    # A learner reads for a few seconds before the first launch: let the forkserver import torch meanwhile.
    from ddplab.processes import warm

    warm(import_torch=True)
