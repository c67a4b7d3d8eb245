"""Fixtures of the kernel tests: a real kernel, and the ranks that its cells start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel import Kernel
from watch import TELL, Ranks


def new_kernel(env: dict[str, str] | None = None) -> Kernel:
    """A kernel that finds this checkout's ddplab."""
    return Kernel(env={"PYTHONPATH": str(Path(__file__).parents[2])} | (env or {}))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel that has launched before, with ``tell`` and ``hang`` defined."""
    kernel = new_kernel()
    try:
        shown = kernel.run(f"{TELL}\nlaunch(print, 'ready')")
        assert "rank 1 | ready" in shown.text
        yield kernel
    finally:
        kernel.close()


@pytest.fixture
def fresh_kernel() -> Iterator[Kernel]:
    """A kernel that has not run a cell yet."""
    kernel = new_kernel()
    try:
        yield kernel
    finally:
        kernel.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """The ranks of a test, in a folder of their own."""
    return Ranks(tmp_path)
