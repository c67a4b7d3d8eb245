"""Tries a learner's function on real ranks, and says in words what it did there.

A *task* is a function that judges: it gets an :class:`Attempt`, runs the learner's function through it as often as
it wants, and raises :class:`Wrong` with what it saw. If it returns, the task is solved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddplab.diagnosis import describe
from ddplab.errors import DdplabError
from ddplab.events import Started
from ddplab.exercises import progress
from ddplab.launcher import launch
from ddplab.run import Run

__all__ = ["Attempt", "Checked", "Task", "Wrong", "check", "judged", "on_ranks", "results", "task"]

LIMIT_S = 4.0  # for all runs of a check together
MAX_WORDS = 300
MARKS = {"solved": "✓", "wrong": "✗", "not started": "·"}
TASKS: dict[str, Task] = {}


class Wrong(Exception):
    """What the ranks did is not what the task asks for; the message says what they did, in the words of the field."""


class NotStarted(Exception):
    """The function still raises NotImplementedError."""


@dataclass(frozen=True)
class Task:
    """One task: its number ("05.2"), what it asks for in a line, and the function that judges."""

    number: str
    title: str
    judge: Callable[[Attempt], str | None]

    @property
    def chapter(self) -> str:
        """The notebook that it belongs to: "05"."""
        return self.number.partition(".")[0]


@dataclass(frozen=True)
class Checked:
    """How a function did. ``state`` is "solved", "wrong" or "not started"; ``words`` what was seen on the ranks.

    ``run`` is the run that showed it, or None.
    """

    task: Task
    state: str
    words: str
    run: Run | None = None

    def __bool__(self) -> bool:
        return self.state == "solved"

    def __str__(self) -> str:
        words = f": {self.words}" if self.words else ""
        return f"{MARKS[self.state]} {self.task.number} {self.task.title}: {self.state}{words}"

    __repr__ = __str__


class Attempt:
    """The learner's function, to be run on ranks. All runs together have ``LIMIT_S`` seconds."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.run: Run | None = None
        self._left_s = LIMIT_S  # counted while ranks are up: the first launch of a notebook starts slowly

    def results(self, *args: Any, trial: Callable[..., Any] | None = None, **options: Any) -> list[Any]:
        """What each rank returns from ``fn(*args)``, or from ``trial(fn, *args)``, which calls it as it likes.

        ``options`` are those of ``launch``: ``world_size`` is 2 and the backend Gloo, unless said otherwise. Raises
        ``Wrong`` if a rank fails or hangs, with the trial's own words if that raises ``Wrong``, and ``NotStarted``.
        """
        return results(self.try_out(*args, trial=trial, **options))

    def try_out(self, *args: Any, trial: Callable[..., Any] | None = None, **options: Any) -> Run:
        """The run itself, which may have failed: for tasks about failures. Raises ``NotStarted``, and ``Wrong`` for
        what could not be launched."""
        given = (self.fn, *args) if trial else args
        defaults = {"world_size": 2, "backend": "gloo", "threads": 1, "timeout_s": max(0.5, self._left_s)}
        try:
            run = launch(trial or self.fn, *given, **{**defaults, **options}, view="quiet", allow_failure=True)
        except (DdplabError, TypeError, ValueError) as error:
            raise Wrong(str(error).partition(" Arguments for")[0]) from None
        self.run = run
        up_s = max((event.time_s for event in run.events if isinstance(event, Started)), default=0.0)
        self._left_s -= run.elapsed_s - up_s
        if any(failure.type == "NotImplementedError" for failure in run.failures):
            raise NotStarted
        return run


def results(run: Run) -> list[Any]:
    """What each rank returned. Raises ``Wrong`` if one failed or hangs, with its own words if that raised ``Wrong``."""
    if run.ok:
        return run.results
    told = [failure.message for failure in run.failures if failure.type == "Wrong"]
    raise Wrong(told[0] if told else _in_words(run))


def _in_words(run: Run) -> str:
    """Why a run did not come to its end, by rank."""
    ranks = on_ranks(run.world_size)
    if run.failures[0].type == "Timeout":
        standing = [line for line in run.report().splitlines() if line.startswith("rank")]
        told = "; ".join(line.partition(", at ")[0].partition(" since ")[0].rstrip(",") for line in standing)
        return f"{ranks} it does not end: {told}"
    told, report = run.verdict().partition(": ")[2] or run.verdict(), run.report().splitlines()
    first = run.failures[0]
    if first.traceback and not first.where:  # in the trial, that is: in no line of the learner's
        return f"{ranks}, no use can be made of what you wrote: {first.type}: {first.message:.90}"
    if told.endswith(":") and "\n" in first.message:  # as torch's, of a state that does not fit
        told += f" {first.message.splitlines()[1].strip():.90}"
    last = [call for call in run.collectives if call.rank == run.failures[0].rank][-1:]
    if unmatched := [line for line in report if " is not complete: " in line]:
        told = unmatched[0]
    elif "Gloo aborts when" in report[-1]:
        told = report[-1].rpartition("; ")[2]
    elif last and told.endswith("closed by another rank"):
        told = f"rank {last[0].rank} is left alone in {describe(last[0])}"
    return f"{ranks} it fails: {told}"


def on_ranks(world_size: int) -> str:
    """How a sentence on a run begins.

    >>> on_ranks(1), on_ranks(3)
    ('with 1 rank', 'with 3 ranks')
    """
    return f"with {world_size} rank{'s' * (world_size > 1)}"


def gathered(number: int) -> list[int]:
    """Of each rank the number that it gives: for a step of a trial, which all ranks should make together."""
    told = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.tensor([number]))
    return [int(one) for one in told]


def stand_in(fn: Callable[..., Any], name: str, new: Callable[..., Any]) -> None:
    """In this rank let ``dist.NAME`` be ``new``, also where the file of ``fn`` has imported it by its name."""
    old = getattr(dist, name)
    for names in (vars(dist), getattr(fn, "__globals__", {})):
        names.update({found: new for found, value in names.items() if value is old})


def task(number: str, title: str) -> Callable[[Callable[[Attempt], None]], Callable[[Attempt], None]]:
    """Decorate the function that judges a task; its docstring says what counts as solved."""

    def keep(judge: Callable[[Attempt], None]) -> Callable[[Attempt], None]:
        assert number not in TASKS, number
        TASKS[number] = Task(number, title, judge)
        return judge

    return keep


def check(number: str, fn: Callable[..., Any]) -> Checked:
    """Run ``fn`` on real ranks, at several world sizes, and say how it did; takes less than 5 seconds.

    The result is noted in the file of ``exercises.report()``. Raises ``ValueError`` for a number that is no task, and
    ``TypeError`` for what is no function.
    """
    if number not in TASKS:
        raise ValueError(f"there is no task {number!r}; they are {', '.join(TASKS)}")
    if not callable(fn):
        raise TypeError(f'check("{number}", fn) takes your function itself, not {type(fn).__name__}: {fn!r:.60}')
    wanted, attempt = TASKS[number], Attempt(fn)
    state, words = judged(wanted, attempt)
    progress.note(number, state)
    return Checked(wanted, state, words, attempt.run)


def judged(wanted: Task, attempt: Attempt) -> tuple[str, str]:
    """The state that a task is in, and the words for it."""
    try:
        state, words = "solved", wanted.judge(attempt) or ""
    except NotStarted:
        state, words = "not started", ""
    except Wrong as wrong:
        state, words = "wrong", str(wrong)
    except Exception as error:  # the judge computes with what the function gave, which may be anything
        returned = attempt.run.returned.get(0) if attempt.run else None
        state, words = "wrong", f"no use can be made of what rank 0 returned, {returned!r:.60} ({error})"
    words = " ".join(words.split())
    return state, words if len(words) <= MAX_WORDS else f"{words[: MAX_WORDS - 3]}..."
