"""Tasks that check themselves on real ranks: ``check("05.2", fn)``, and ``report()`` of what is solved."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ddplab.exercises.engine import MARKS, TASKS, Checked, Task, check
from ddplab.exercises.progress import load

if TYPE_CHECKING:
    from ddplab.plots.picture import Picture

__all__ = ["TASKS", "Checked", "Task", "check", "predict", "report"]

for _number in range(12):  # each chapter puts its tasks into TASKS when it is loaded
    importlib.import_module(f"ddplab.exercises.chapter{_number:02}")


class Guess:
    """What the learner thinks that will come out; ``against`` lays it beside what did."""

    def __init__(self, guess: object) -> None:
        self.guess = guess

    def against(self, seen: object) -> str:
        """Both, in a line."""
        verdict = "as you said" if self.guess == seen else f"you said {self.guess!r}"
        return f"it is {seen!r}: {verdict}"

    def __repr__(self) -> str:
        return f"noted: {self.guess!r}"


def predict(guess: object) -> Guess:
    """Note a guess before the run, to be laid beside its result.

    >>> mine = predict(3)
    >>> mine.against(4)
    'it is 4: you said 3'
    """
    return Guess(guess)


def report() -> Picture:
    """All tasks by chapter, and how far each is, as a picture; ``print(report())`` gives the table."""
    from ddplab.plots.picture import draw

    kept = load()
    rows = [
        {"task": one.number, "title": one.title, **kept.get(one.number, {"state": "not started", "tries": 0})}
        for one in TASKS.values()
    ]
    solved = sum(row["state"] == "solved" for row in rows)
    chapters = sorted({one.chapter for one in TASKS.values()})
    looks = {"solved": "#009E73", "wrong": "#D55E00", "not started": "#BBBBBB"}

    def paint(ax):  # type: ignore[no-untyped-def]
        for row in rows:
            chapter, _, place = row["task"].partition(".")
            at = int(place), chapters.index(chapter)
            ax.plot(*at, "s", markersize=17, color=looks[row["state"]])
            ax.text(*at, MARKS[row["state"]], ha="center", va="center", color="white")
        ax.set(xlabel="task", ylim=(len(chapters) - 0.5, -0.5), xlim=(0.4, max(int(r["task"][3:]) for r in rows) + 0.6))
        ax.set_yticks(range(len(chapters)), [f"chapter {chapter}" for chapter in chapters])
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.spines[:].set_visible(False)

    picture = draw(None, (5.0, 0.45 * len(chapters) + 0.8), f"{solved} of {len(rows)} tasks solved", paint, rows)
    assert picture
    return picture
