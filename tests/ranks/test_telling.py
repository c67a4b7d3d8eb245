"""What the code of a rank tells while it runs: numbers, spans, progress; bounded, and not lost with the rank."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddplab import Run, launch, log, progress, span
from ddplab.capture import MAX_POINTS
from ddplab.events import Event, Progress, Waits
from ddplab.telling import MAX_NAMES
from ddplab.view import View


def told(fn: Callable[..., Any], *args: Any, **options: Any) -> Run:
    """The run of ``fn`` on one rank without a process group, whether it ends well or not."""
    options = {"world_size": 1, "backend": None, "allow_failure": True, "view": "quiet", **options}
    return launch(fn, *args, **options)


def test_a_call_that_lasts_is_told_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view hears which call each rank is in, and when it has returned; the run keeps nothing of it."""
    heard: list[tuple[int, str]] = []
    os.mkfifo(gate := tmp_path / "gate")

    class Listening(View):
        def show(self, events: Iterable[Event]) -> None:
            for event in events:
                if isinstance(event, Waits):
                    heard.append((event.rank, event.state))
                    if len(heard) == 1:
                        gate.write_text("go on")

    def work(gate: str) -> None:
        x = torch.ones(1)
        if dist.get_rank() == 1:
            open(gate).read()
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            dist.recv(x)

    monkeypatch.setattr("ddplab.launcher.views.choose", lambda asked, spec: Listening(spec))
    run = told(work, str(gate), world_size=2, backend="gloo", timeout_s=3.0)
    assert [one for one in heard if one[1]] == [(0, "waits in all_reduce #1"), (0, "waits in recv")]
    assert [event for event in run.events if isinstance(event, Waits)] == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_spans_have_name_rank_and_both_ends(world_size: int) -> None:
    """Spans lie in each other, by rank and beginning, and tell how long they took."""

    def work() -> None:
        with span("outer"):
            with span("inner"):
                time.sleep(0.05)
            time.sleep(0.05)

    run = told(work, world_size=world_size)
    assert [(one.rank, one.name) for one in run.spans] == [
        (rank, name) for rank in range(world_size) for name in ("outer", "inner")
    ]
    for outer, inner in zip(run.spans[::2], run.spans[1::2], strict=True):
        assert outer.time_s <= inner.time_s < inner.end_s < outer.end_s
        assert inner.end_s - inner.time_s >= 0.05


def test_a_span_decorates_a_function_that_calls_itself() -> None:
    """Each call has a span of its own; values and arguments pass through."""

    @span("call")
    def down(number: int) -> int:
        return down(number - 1) + 1 if number else 0

    run = told(lambda: down(3))
    assert run.results == [3]
    assert [one.name for one in run.spans] == ["call"] * 4
    assert [a.end_s >= b.end_s for a, b in zip(run.spans, run.spans[1:], strict=False)] == [True] * 3


def test_a_span_that_an_exception_ends_is_told() -> None:
    """Where it failed, too, the time is known."""

    def fail() -> None:
        with span("fatal"):
            raise ValueError("no")

    run = told(fail)
    assert [one.name for one in run.spans] == ["fatal"]
    assert run.failures[0].type == "ValueError"


def test_progress_gives_all_items_and_tells_the_last_state() -> None:
    """The items pass through; of the states the run keeps the latest of each name, also of a loop that broke off."""

    def work() -> list[int]:
        for number in progress(range(1000), name="broken"):
            if number == 499:
                time.sleep(0.1)
            if number == 500:
                break
        items = list(progress((n for n in range(10)), name="unknown"))
        return items + list(progress([1, 2], total=5, name="told"))

    run = told(work)
    assert run.results == [[*range(10), 1, 2]]
    states = {e.name: (e.done, e.total) for e in run.events if isinstance(e, Progress)}
    assert states == {"broken": (500, 1000), "unknown": (10, None), "told": (2, 5)}


@pytest.mark.parametrize("end", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_what_was_logged_before_a_rank_died_is_there(end: Callable[[], None]) -> None:
    """A number is sent at once, unless another was just sent."""

    def die() -> None:
        log(step=7, loss=0.5)
        end()

    assert [(row.step, row.value) for row in told(die).metrics] == [(7, 0.5)]


def test_numbers_in_quick_succession_come_in_order_and_all() -> None:
    """They travel together, and keep their order, steps and times."""

    def work() -> None:
        for step in range(5000):
            log(step, loss=step / 2)

    rows = told(work, world_size=2).metrics
    assert [(row.rank, row.step, row.value) for row in rows] == [(r, n, n / 2) for r in (0, 1) for n in range(5000)]
    assert all(a.time_s <= b.time_s for a, b in zip(rows[:5000], rows[1:5000], strict=False))


def test_a_number_logged_before_a_long_silence_is_sent() -> None:
    """What waits for company does not wait long: it is there when the rank is killed later."""

    def work() -> None:
        for step in range(100):
            log(step, loss=1.0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    assert len(told(work).metrics) == 100


def test_a_series_without_end_is_thinned() -> None:
    """Of a long series values at equal distances are kept, at the same steps for each rank; of spans the latest."""
    number = 2 * MAX_POINTS + 10

    def work() -> None:
        for step in range(number):
            log(step, loss=step)
        for _ in range(MAX_POINTS + 5):
            with span("short"):
                pass

    run = told(work, world_size=2)
    steps = [[row.step for row in run.metrics if row.rank == rank] for rank in (0, 1)]
    assert steps[0] == steps[1] == list(range(0, number, 4))
    assert len(run.spans) == 2 * MAX_POINTS


def test_names_without_end_are_refused() -> None:
    """A name with the step in it would be a series for each step."""

    def work() -> None:
        for step in range(MAX_NAMES + 1):
            log(**{f"loss{step}": 1.0})

    failure = told(work).failures[0]
    assert (failure.type, "step=" in failure.message) == ("ValueError", True)


def test_what_is_no_name_and_no_iterable_is_refused_where_it_stands() -> None:
    """The error comes from the call itself, not later from the loop, and outside a launch too."""
    with pytest.raises(TypeError, match="span takes a name"):
        span(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not iterable"):
        progress(3)  # type: ignore[type-var]


def test_children_of_a_rank_tell_nothing() -> None:
    """Workers of a DataLoader run the same code, and would speak for their rank."""

    def work() -> int:
        if not (child := os.fork()):
            log(loss=1.0)
            with span("child"):
                list(progress(range(3)))
            os._exit(0)
        return os.waitpid(child, 0)[1]

    run = told(work)
    assert (run.results, run.metrics, run.spans) == ([0], (), ())


@pytest.mark.parametrize(
    "options",
    [{"total": "training"}, {"total": 1.5}, {"name": ["a"]}],
    ids=str,
)
def test_what_progress_cannot_use_is_refused_in_the_rank(options: dict[str, Any]) -> None:
    """Was a bug: a title in place of the total, as tqdm takes it, broke what draws the ranks, and so the launch."""
    failure = told(lambda: list(progress(range(3), **options))).failures[0]
    assert (failure.type, "progress(" in failure.message) == ("TypeError", True)


def test_a_total_may_be_any_whole_number(tmp_path: Path) -> None:
    """Was a bug: one of NumPy could not be saved."""

    def work() -> None:
        list(progress(range(3), total=np.int64(3)))

    run = told(work)
    run.save(tmp_path / "run.jsonl")
    assert [(e.done, e.total) for e in Run.load(tmp_path / "run.jsonl").events if isinstance(e, Progress)] == [(3, 3)]


def test_too_many_names_of_spans_end_no_training() -> None:
    """Was a bug: span(f"step {i}") raised in step 201."""

    def work() -> str:
        for step in range(MAX_NAMES + 50):
            with span(f"step {step}"):
                pass
        return "done"

    run = told(work)
    assert run.results == ["done"]
    assert [one.name for one in run.spans].count("other spans") == 50


def test_a_span_lasts_as_long_as_a_coroutine_or_a_generator_does() -> None:
    """Was a bug: it ended when the coroutine or generator was made, before anything of it had run."""

    @span("coroutine")
    async def sleep() -> int:
        await asyncio.sleep(0.1)
        return 7

    @span("generator")
    def numbers() -> Iterator[int]:
        time.sleep(0.1)
        yield 1

    run = told(lambda: (asyncio.run(sleep()), list(numbers())))
    assert run.results == [(7, [1])]
    assert [(one.name, one.end_s - one.time_s >= 0.1) for one in run.spans] == [
        ("coroutine", True),
        ("generator", True),
    ]


def test_one_span_in_two_threads_keeps_their_times_apart() -> None:
    """Was a bug: whichever thread left first took the beginning of the one that came last."""

    def work() -> None:
        shared = span("shared")

        def use(before_s: float, inside_s: float) -> None:
            time.sleep(before_s)
            with shared:
                time.sleep(inside_s)

        threads = [threading.Thread(target=use, args=args) for args in ((0.0, 0.4), (0.1, 0.1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sorted(round(one.end_s - one.time_s, 1) for one in told(work).spans) == [0.1, 0.4]


def test_a_signal_handler_may_log_while_its_thread_does() -> None:
    """Was a bug: the handler waited for the lock that its own thread held, and the rank said it held the GIL."""

    def work() -> int:
        calls = []

        def handle(*_: Any) -> None:
            calls.append(1)
            log(loss=0.0)

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            log(loss=1.0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return len(calls)

    run = told(work, timeout_s=20)
    assert run.results[0] > 10
