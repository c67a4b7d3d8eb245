"""The judges of the correction lab on what ranks might give: each thing that can be wrong has its own words."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import raised, run_of

from ddplab import events as ev
from ddplab.exercises import lab
from ddplab.exercises.engine import Attempt, Wrong
from ddplab.run import Run


def gave(*values: Any) -> Run:
    """A run whose ranks gave these values."""
    return run_of(*(ev.Result(rank, 1.0, value) for rank, value in enumerate(values)), world_size=len(values))


def gpu(own: int, gpu: int, current: int, rank: int | None = None) -> dict[str, Any]:
    """What a rank of rows 9, 13 and 14 gives, on machines of 2 GPUs."""
    return {"own": own, "rank": own if rank is None else rank, "gpu": gpu, "current": current, "open": False}


HANDLED = {"no variable": "", "no peer": "", "no server": "", "no key": "", "bug": "TypeError"}
ORDERS = [], [0, 2, 4, 1, 3, 5, 0, 2, 4]


@pytest.mark.parametrize(
    ("judge", "seen", "words"),
    [
        (lab.averaged, [([1.5] * 3, 0), ([1.5] * 3, 0)], None),
        (lab.averaged, [([], 0), ([], 0)], "uses nothing on rank 0"),
        (lab.averaged, [([1.5, 3.0], 0), ([1.5, 3.0], 0)], "uses 1.5, 3 on rank 0"),
        (lab.averaged, [([1.0], -0.1), ([2.0], -0.2)], "the weights are 0.1 apart"),
        (lab.zeroed, [([], [])], "the gradient in step() is 0"),
        (lab.zeroed, [([1.0, 2.0, 1.0], [])], "zeroed, but not in every step"),
        (lab.reordered, [ORDERS, ORDERS], "do not share the 12 images"),
        (lab.joined, gave(gpu(0, 0, 0), gpu(1, 1, 1, rank=0)), "rank 1 joined as rank 0"),
        (lab.joined, run_of(raised(0, 0.2, "ValueError", "no port")), "ValueError in cell In[7], line 3: no port"),
        (lab.placed, [{}, {}], "did not call work(device)"),
        (lab.placed, [gpu(0, 0, 0), gpu(1, 1, 0)], "but its current device is cuda:0"),
        (lab.placed, [gpu(0, 0, 0), gpu(1, 1, 1)], None),
        (lab.ran, [6, 6], "counted as 6"),
        (lab.fetched, run_of(raised(0, 0.2, "RuntimeError", "Dataset not found or")), "nobody downloads"),
        (lab.fetched, gave(([4, 32, 32, 3], "")), "has the shape [4, 32, 32, 3]"),
        (lab.evaluated, gave((None, 10)), "no rank returned the accuracy"),
        (lab.evaluated, gave((0.5, 10)), "accuracy 50 %, and it is 60 %"),
        (lab.asked, [(None, False)], "rank 0 got None for 1 + 2"),
        (lab.stepped, [("1.9", [])], "rank 0 returned '1.9'"),
        (lab.stepped, [(2.1, [2.1])], "went from 2 to 2.1"),
        (lab.stepped, [(1.9, [2.0])], "but the weight on worker1 is 2"),
        (lab.stepped, [(1.9, [])], None),
        (lab.caught, [HANDLED | {"no peer": "RuntimeError"}, None], "not caught: RuntimeError (no peer)"),
        (lab.caught, [HANDLED, None], None),
        (lab.gave_up, run_of(raised(1, 0.2, "RuntimeError", "bad batch"), ev.Result(0, 0.3, None)), "another rank returned"),
        (lab.gave_up, run_of(raised(0, 0.2, "KeyError", "3")), "with 2 ranks it fails: KeyError in cell In[7], line 3: 3"),
        (lab.replicated, [(28, 28), (28, 28)], None),
        (lab.sharded, [450, 225], "the ranks hold 450, 225"),
        (lab.updated, [(-1e-9, -0.1)], "claimed a change of 0, DDP with Adam made -0.1"),
        (lab.chosen, Attempt("Meta"), "not so: DataParallel, Horovod's last release, FairScale is by, Megatron-LM is by"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_judge_says_what_is_wrong(judge: Any, seen: Any, words: str | None) -> None:
    """Each kind of mistake in words of its own; None: nothing is wrong."""
    if words is None:
        assert judge(seen)
    else:
        with pytest.raises(Wrong) as wrong:
            judge(seen)
        assert words in str(wrong.value)


def test_a_wrong_choice_is_named_and_the_right_one_is_not() -> None:
    """Row 21 says which answers are wrong, and does not give them away."""
    answers = {"DataParallel": "discouraged", "Horovod's last release": 2023, "FairScale is by": "Meta"}
    assert lab.Status().check(answers, 21).rows == {21: ("✗", "not so: Megatron-LM is by")}


def test_the_table_has_all_21_rows_and_only_these() -> None:
    """They are numbered as in the list of the two articles."""
    assert list(lab.Status().rows) == [*range(1, 22)]
    with pytest.raises(ValueError, match="there is no row 22"):
        lab.Status().check(print, 22)
    with pytest.raises(ValueError, match="say which rows"):
        lab.Status().check(print)


def test_the_place_of_an_error_is_left_to_the_details() -> None:
    """A cell of the table has no room for it; other words stay as they are."""
    for told in ("it fails: KeyError in cell In[7], line 3: no", "no use can be made of what you wrote: KeyError: no"):
        assert lab.FAILED.sub(r"stopped by \1:", f"with 2 ranks, {told}") == "stopped by KeyError: no"
    for told in ("with 2 ranks it fails: rank 0 is left alone in all_reduce", "with 3 ranks it does not end: rank 0"):
        assert lab.FAILED.sub("", told) == told


def test_states_are_coloured_in_a_notebook_and_only_states() -> None:
    """Green for what is corrected, vermilion for what is not."""
    html = lab.Status({1: ("✓", "a ✗ b"), 2: ("✗", "x < y")})._repr_html_()
    assert html.count("<b ") == 2
    assert "x &lt; y" in html
