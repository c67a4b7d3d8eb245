"""For tests of the other systems: ``make systems`` runs them, in an environment that has them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec

import pytest

# What each extra of pyproject.toml brings, as it is imported.
MODULES = {
    "ray": "ray",
    "spark": "pyspark",
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "megatron": "megatron.core",
    "mpi": "mpi4py",
}


def missing(system: str) -> str:
    """What `system` lacks here, or nothing."""
    module = MODULES.get(system, system)
    if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
        return module
    if system == "spark" and shutil.which("java") is None:
        return "Java"
    return ""


@pytest.fixture
def need() -> Callable[[str], None]:
    """``need("ray")`` skips the test where that system cannot run; in CI, where each extra is installed, it fails."""

    def check(system: str) -> None:
        if what := missing(system):
            stop = pytest.fail if system in MODULES and os.environ.get("CI") else pytest.skip
            stop(f"{what} is not installed: only the recorded result of {system} can be shown")

    return check
