"""Every fault on real ranks: each rank sees what it should, and the cure passes."""

from __future__ import annotations

import pytest

from ddplab import explain, faults

EVERY_FAULT = pytest.mark.parametrize("name", faults.names())


def run(name: str, repaired: bool) -> faults.Seen:
    """The fault or its cure, where this machine can run it."""
    if lacks := faults.get(name).needs():
        pytest.skip(lacks)
    return faults.run(name, repaired)


@EVERY_FAULT
def test_each_rank_sees_what_the_fault_says(name: str) -> None:
    """Class and first line, exit or hang, on each rank; the right rank is the root cause, and explain names it."""
    seen = run(name, repaired=False)
    told = {rank: faults.fault.saw(seen.run, rank) for rank in range(seen.run.world_size)}
    assert seen.as_expected, (told, seen.run.report())
    why = explain(seen.run)
    assert seen.fault.silent or (why.id, why.category) == (seen.fault.cause, seen.fault.category), why


@EVERY_FAULT
def test_the_cure_passes(name: str) -> None:
    """No rank fails, and where numbers were wrong they are right."""
    seen = run(name, repaired=True)
    assert seen.as_expected, seen.run.report() or seen.run.results
