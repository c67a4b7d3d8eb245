"""Verdicts of the correction lab on runs made by hand: each thing that can be wrong has its own words."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import raised, run_of, waiting

from ddplab import events as ev
from ddplab import verdicts
from ddplab.correction import CHECKS, Status
from ddplab.run import Run

Claim = Any


def gave(*values: Any) -> Run:
    """A run whose ranks gave these values."""
    return run_of(*(ev.Result(rank, 1.0, value) for rank, value in enumerate(values)), world_size=len(values))


def hand(used: list[float], weight: float = 0.0) -> dict[str, Any]:
    """What a rank of row 1 gives."""
    return {"used": used, "weight": weight}


def gpu(own: int, gpu: int, current: int, rank: int | None = None) -> dict[str, Any]:
    """What a rank of rows 9, 13 and 14 gives, on machines of 2 GPUs."""
    return {"own": own, "rank": own if rank is None else rank, "gpu": gpu, "current": current, "gpus": 2, "open": False}


def counted(value: Any, *order: int) -> dict[str, Any]:
    """What a rank of row 20 gives."""
    return {"value": value, "order": list(order)}


HANDLED = {"variable": "", "peer": "", "network": "", "store": "", "bug": "TypeError"}
ORDERS = {"order": [0, 2, 4, 1, 3, 5, 0, 2, 4]}


@pytest.mark.parametrize(
    ("verdict", "run", "words"),
    [
        (verdicts.averaged, gave(hand([1.5] * 3), hand([1.5] * 3)), None),
        (verdicts.averaged, gave(hand([]), hand([])), "uses nothing on rank 0"),
        (verdicts.averaged, gave(hand([1.5, 3.0]), hand([1.5, 3.0])), "uses 1.5, 3 on rank 0"),
        (verdicts.averaged, gave(hand([1.0], -0.1), hand([2.0], -0.2)), "the weights are 0.1 apart"),
        (verdicts.zeroed, gave({"used": []}), "the gradient in step() is 0"),
        (verdicts.zeroed, gave({"used": [1.0, 2.0, 1.0]}), "zeroed, but not in every step"),
        (verdicts.reordered, gave(ORDERS, ORDERS), "do not share the 12 images"),
        (verdicts.joined, gave(gpu(0, 0, 0), gpu(1, 1, 1, rank=0)), "rank 1 joined as rank 0"),
        (verdicts.joined, run_of(raised(0, 0.2, "ValueError", "no port")), "stopped by ValueError: no port"),
        (verdicts.placed, gave({"gpus": 2}, {"gpus": 2}), "did not call work(device)"),
        (verdicts.placed, gave(gpu(0, 0, 0), gpu(1, 1, 0)), "but its current device is cuda:0"),
        (verdicts.placed, gave(gpu(0, 0, 0), gpu(1, 1, 1)), None),
        (verdicts.closed, run_of(ev.Metric(0, 0.1, None, "without_group", 1.0)), "found no process group"),
        (verdicts.ran, gave(6, 6), "counted as 6"),
        (verdicts.fetched, run_of(raised(0, 0.2, "RuntimeError", "Dataset not found or")), "nobody downloads"),
        (verdicts.fetched, gave({"batch": [4, 32, 32, 3]}), "has the shape [4, 32, 32, 3]"),
        (verdicts.evaluated, gave(counted(None, *range(10))), "no rank returned the accuracy"),
        (verdicts.evaluated, gave(counted(0.5, *range(10))), "accuracy 50 %, and it is 60 %"),
        (verdicts.asked, gave({"answer": None, "open": False}), "rank 0 got None for 1 + 2"),
        (verdicts.stepped, gave({"said": "1.9", "there": []}), "rank 0 returned '1.9'"),
        (verdicts.stepped, gave({"said": 2.1, "there": [2.1]}), "went from 2 to 2.1"),
        (verdicts.stepped, gave({"said": 1.9, "there": [2.0]}), "but the weight on worker1 is 2"),
        (verdicts.stepped, gave({"said": 1.9, "there": []}), None),
        (verdicts.caught, gave(HANDLED | {"peer": "RuntimeError"}, None), "not caught: RuntimeError (no peer)"),
        (verdicts.caught, gave(HANDLED, None), None),
        (verdicts.gave_up, run_of(raised(1, 0.2, "RuntimeError", "bad batch"), ev.Result(0, 0.3, None)), "another rank returned"),
        (verdicts.gave_up, run_of(raised(0, 0.2, "KeyError", "3")), "stopped by KeyError: 3"),
        (verdicts.replicated, gave({"said": 28, "there": 28}, {"said": 28, "there": 28}), None),
        (verdicts.sharded, gave(450, 225), "the ranks hold 450, 225"),
        (verdicts.updated, gave({"said": -1e-9, "did": -0.1}), "claimed a change of 0, DDP with Adam made -0.1"),
        (verdicts.compiled, run_of(*waiting(0, 3.0, "timeout"), timeout_s=3.0), "no end within 3 s"),
    ],
)  # fmt: skip
def test_a_verdict_says_what_is_wrong(verdict: Claim, run: Run, words: str | None) -> None:
    """Each kind of mistake in words of its own; None: nothing is wrong."""
    good, told = verdict(run)
    assert good is (words is None)
    assert words is None or words in told


def test_a_wrong_choice_is_named_and_the_right_one_is_not() -> None:
    """Row 21 says which answers are wrong, and does not give them away."""
    assert verdicts.chosen("Meta")[0] is False
    told = verdicts.chosen({"DataParallel": "discouraged", "Horovod's last release": 2023, "FairScale is by": "Meta"})[
        1
    ]
    assert told == "not so: Megatron-LM is by"


def test_the_table_has_all_21_rows_and_only_these() -> None:
    """They are numbered as in the list of the two articles."""
    assert list(CHECKS) == [*range(1, 22)]
    with pytest.raises(ValueError, match="there is no row 22"):
        Status().check(print, 22)
    with pytest.raises(ValueError, match="say which rows"):
        Status().check(print)


def test_states_are_coloured_in_a_notebook_and_only_states() -> None:
    """Green for what is corrected, vermilion for what is not."""
    html = Status({1: ("✓", "a ✗ b"), 2: ("✗", "x < y")})._repr_html_()
    assert html.count("<b ") == 2
    assert "x &lt; y" in html
