"""For tests of the other systems: ``make systems`` runs them, in an environment that has them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from installed import MODULES, missing


@pytest.fixture
def need() -> Callable[[str], None]:
    """``need("ray")`` skips the test where that system cannot run; in CI, where each extra is installed, it fails."""

    def check(system: str) -> None:
        if what := missing(system):
            stop = pytest.fail if system in MODULES and os.environ.get("CI") else pytest.skip
            stop(f"{what} is not installed: only the recorded result of {system} can be shown")

    return check
