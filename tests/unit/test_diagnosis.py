"""Where ranks stood and which calls do not fit: each verdict with a run that triggers it and a near miss."""

from typing import Any

import pytest
from recorded import run_of

from ddplab import Run, diagnosis, plots
from ddplab import events as ev
from ddplab.plots.waiting import lanes

AT = ev.Where("cell In[7]", 9, "train", "dist.all_reduce(x)")
ASLEEP = ev.Where("cell In[7]", 4, "train", "time.sleep(100)")


def call(rank: int, number: int, *, open: bool = False, time_s: float | None = None, **fields: Any) -> ev.Call:
    """An all_reduce of three numbers; ``open`` if it had not returned."""
    begin_s = float(number) if time_s is None else time_s
    known = {
        "name": "all_reduce",
        "group": "",
        "shape": (3,),
        "dtype": "float32",
        "op": "SUM",
        "peer": None,
        "where": AT,
    }
    return ev.Call(rank, begin_s, number=number, end_s=None if open else begin_s + 0.5, **(known | fields))


def stopped(rank: int, where: ev.Where | None = AT, state: str = "", time_s: float = 10.0) -> list[ev.Event]:
    """A rank that was asked where it is, and stopped."""
    located = ev.Located(rank, time_s, where, state)
    return [ev.Began(rank, 0.1), located, ev.Stopped(rank, time_s, "timeout"), ev.Exited(rank, time_s, -9)]


def test_ranks_that_wait_and_the_one_that_has_not_come_are_told_apart() -> None:
    """The report counts the calls: two wait in number 2, the third made 1 and is elsewhere."""
    run = run_of(
        *(call(rank, 1) for rank in range(3)), *(call(rank, 2, open=True) for rank in (0, 1)),
        *stopped(0), *stopped(1), *stopped(2, ASLEEP), world_size=3,
    )  # fmt: skip
    assert diagnosis.standing(run.events, 3) == [
        "ranks 0, 1 wait in all_reduce #2 (shape (3,), float32, SUM) since 8.0 s, at cell In[7], line 9: dist.all_reduce(x)",
        "rank 2 is at cell In[7], line 4: time.sleep(100)",
        "all_reduce #2 (shape (3,), float32, SUM) is not complete: rank 2 made 1 collective call",
    ]


def test_nobody_is_behind_when_all_have_come() -> None:
    """Near miss: all ranks are in the same call, so it is only slow."""
    run = run_of(*(call(rank, 1, open=True) for rank in (0, 1)), *stopped(0), *stopped(1))
    assert len(diagnosis.standing(run.events, 2)) == 1


def test_a_rank_that_returned_early_is_named() -> None:
    """The one that waits and the one that left after fewer calls."""
    run = run_of(
        call(0, 1), call(1, 1), call(0, 2, open=True), *stopped(0), ev.Result(1, 3.0, None), ev.Exited(1, 3.1, 0)
    )
    assert diagnosis.standing(run.events, 2)[-1].endswith("is not complete: rank 1 made 1 collective call and returned")


def test_of_a_rank_that_told_nothing_nothing_is_claimed() -> None:
    """A rank that did not answer may have made any number of calls."""
    run = run_of(call(0, 1, open=True), *stopped(0), *stopped(1, None, "its process is stopped, as by SIGSTOP"))
    assert diagnosis.standing(run.events, 2)[1:] == ["rank 1 did not answer: its process is stopped, as by SIGSTOP"]


def test_ranks_outside_a_group_are_not_missed() -> None:
    """Near miss: rank 1 has not made a call that is none of its business."""
    group = {"group": "0, 2"}
    events = [call(rank, 1, open=True, **group) for rank in (0, 2)] + [call(1, 1)]
    run = run_of(*events, *stopped(0), *stopped(1, ASLEEP), *stopped(2), world_size=3)
    assert not any("not complete" in line for line in diagnosis.standing(run.events, 3))


def test_backward_is_counted_for_ddp_only() -> None:
    """A wait in backward means something when DDP averages there; in a plain model it is only slow."""
    backward = {"name": "backward", "shape": None, "dtype": "", "op": ""}
    calls = [call(0, 1, **backward), call(0, 2, open=True, **backward), call(1, 1, **backward)]
    wrapped = [call(rank, 0, name="DDP(...)", time_s=0.5) for rank in (0, 1)]
    end = [*stopped(0), *stopped(1, ASLEEP)]
    with_ddp = diagnosis.standing(run_of(*wrapped, *calls, *end).events, 2)
    assert with_ddp[0].startswith("rank 0 waits in backward #2, where DDP averages gradients, since 8.0 s")
    assert with_ddp[-1] == "backward #2 is not complete: rank 1 made 1 backward call"
    assert not any("not complete" in line for line in diagnosis.standing(run_of(*calls, *end).events, 2))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("op", "MAX", "all_reduce #1: rank 0 has SUM, rank 1 has MAX. No error is raised, and the numbers are wrong"),
        ("dtype", "int64", "all_reduce #1: rank 0 has float32, rank 1 has int64. The bytes of one are read as the other"),
        ("shape", (4,), "all_reduce #1: rank 0 has (3,), rank 1 has (4,). Data is cut off, or the rank with the smaller tensor aborts"),
        ("name", "broadcast", "collective call 1 differs: rank 0 has all_reduce, rank 1 has broadcast. Each waits for the other"),
    ],
)  # fmt: skip
def test_calls_of_one_number_that_differ_are_found(field: str, value: object, text: str) -> None:
    """Also those that torch does not see; equal calls give nothing."""
    assert diagnosis.mismatches([call(0, 1), call(1, 1, **{field: value})]) == [text]
    assert diagnosis.mismatches([call(0, 1), call(1, 1)]) == []


def test_shapes_may_differ_where_they_are_meant_to() -> None:
    """Near miss: the ranks of an all_to_all may send different amounts; calls of other groups are other calls."""
    assert diagnosis.mismatches([call(0, 1, name="all_to_all"), call(1, 1, name="all_to_all", shape=(9,))]) == []
    assert diagnosis.mismatches([call(0, 1), call(1, 1, group="1, 2", op="MAX")]) == []


def test_a_call_told_twice_counts_once() -> None:
    """A rank that was asked, and failed afterwards, tells its calls again; the later word counts."""
    assert diagnosis.calls([call(0, 1, open=True), call(0, 1)]) == (call(0, 1),)


def test_a_good_run_with_a_silent_mismatch_says_so() -> None:
    """No rank failed, and yet the reader of the cell is told."""
    from ddplab.view import still_text

    run = run_of(call(0, 1), call(1, 1, op="MAX"), ev.Result(0, 2.0, 1), ev.Result(1, 2.0, 1))
    assert run.ok
    assert still_text(run).startswith("note: all_reduce #1: rank 0 has SUM, rank 1 has MAX.")


def test_calls_survive_saving(tmp_path: Any) -> None:
    """A recorded run can be diagnosed again."""
    run = run_of(call(0, 1), call(1, 1, op="MAX"), *stopped(0), *stopped(1, None))
    run.save(tmp_path / "run.jsonl")
    assert Run.load(tmp_path / "run.jsonl") == run


def test_lanes_show_computing_waiting_and_standing_still() -> None:
    """Seconds count from when the first rank began; the open call reaches to the end of the lane."""
    run = run_of(call(0, 1), call(0, 2, open=True), call(1, 1), *stopped(0), *stopped(1, ASLEEP))
    first, second = lanes(run)
    assert first.waits == [(pytest.approx(0.9), pytest.approx(1.4))]
    assert first.stuck == (pytest.approx(1.9), pytest.approx(9.9))
    assert (second.stuck, second.label) == (None, "cell In[7], line 4")


def test_waiting_draws_whatever_there_is() -> None:
    """A run that hung, one that failed before it began, one of 64 ranks: a picture, never an exception."""
    hung = run_of(call(0, 1, open=True), *stopped(0), *stopped(1, None))
    empty = run_of(ev.Exited(0, 0.1, 1))
    many = run_of(*(event for rank in range(64) for event in stopped(rank)), world_size=64)
    texts = [plots.waiting(run) for run in (hung, empty, many)]
    assert [picture._repr_mimebundle_()["image/png"][:4] for picture in texts if picture] == [b"\x89PNG"] * 3
    assert repr(texts[0]) == "rank 0: all_reduce #1 (shape (3,), float32, SUM)\nrank 1: did not answer"
