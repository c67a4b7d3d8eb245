"""The calls between workers that the sequence diagram shows."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure
from recorded import run_of

from ddplab import plots
from ddplab.events import Call
from ddplab.plots.rpc import MAX_MESSAGES, Message, messages


def call(rank: int, begin_s: float, end_s: float | None, name: str, worker: str = "", **more: Any) -> Call:
    """A call into ``torch.distributed.rpc``; ``peer``, ``since_s`` and ``function`` may be given."""
    peer, since_s = more.get("peer"), more.get("since_s")
    return Call(rank, begin_s, name, 0, "", None, "", "", peer, None, end_s, since_s, worker, more.get("function", "f"))


NAMES = [call(0, 0.0, 0.1, "init_rpc", "master"), call(1, 0.0, 0.1, "init_rpc", "trainer")]


def test_a_worker_is_found_by_name_and_by_rank() -> None:
    """``init_rpc`` tells which rank has which name."""
    run = run_of(*NAMES, call(0, 1.0, 1.5, "rpc_sync", "trainer"), call(1, 2.0, 2.5, "rpc_sync", peer=0))
    assert messages(run) == [
        Message(0, 1, "rpc_sync", "f", 1.0, 1.0, 1.5),
        Message(1, 0, "rpc_sync", "f", 2.0, 2.0, 2.5),
    ]


def test_an_answer_is_there_when_it_was_first_waited_for() -> None:
    """The wait of an asynchronous call is matched by when that began; one may never be waited for, or never end."""
    run = run_of(
        *NAMES,
        call(0, 1.0, 1.1, "rpc_async", "trainer"),
        call(0, 1.2, 1.3, "remote", "trainer"),
        call(0, 1.4, 1.5, "rpc_async", "trainer"),
        call(0, 2.0, None, "wait of remote", "trainer", since_s=1.2),
        call(0, 3.0, 3.5, "wait of rpc_async", "trainer", since_s=1.0),
        call(0, 4.0, 4.5, "wait of rpc_async", "trainer", since_s=1.0),
    )
    assert [(one.begin_s, one.wait_s, one.end_s) for one in messages(run)] == [
        (1.0, 3.0, 3.5),
        (1.2, 2.0, None),
        (1.4, None, None),
    ]


def test_the_picture_says_how_many_calls_and_shows_the_first() -> None:
    """A constant text; the numbers behind it for every call, also those that are not drawn."""
    many = [call(0, n, n + 0.25, "rpc_sync", "trainer", function="add") for n in range(1, MAX_MESSAGES + 2)]
    picture = plots.rpc(run_of(*NAMES, *many))
    assert picture is not None
    assert repr(picture) == f"{MAX_MESSAGES + 1} calls between 2 workers (the first {MAX_MESSAGES})"
    row = {"caller": "master", "callee": "trainer", "call": "rpc_sync", "function": "add", "ms": 250.0}
    assert picture.rows == [row] * (MAX_MESSAGES + 1)


@pytest.mark.parametrize(
    "events",
    [
        [],
        NAMES,
        [call(0, 1.0, None, "rpc_sync", "nobody")],
        [call(0, 1.0, None, "rpc_sync", peer=0), call(5, 1.0, None, "rpc_async", peer=3)],
        [*NAMES, call(1, 1.0, 2.0, "remote", "master"), call(1, 2.0, None, "wait of remote", since_s=1.0)],
    ],
    ids=["nothing", "no call", "unknown worker", "no names, no answers", "an answer that does not come"],
)
def test_a_partial_run_is_drawn_as_far_as_it_went(events: list[Call]) -> None:
    """Never an exception, also in axes of one's own."""
    picture = plots.rpc(run_of(*events))
    assert picture is not None
    assert picture._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")
    assert plots.rpc(run_of(*events), ax=Figure().add_subplot()) is None
