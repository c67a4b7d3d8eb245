"""What is installed of the other systems."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

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
