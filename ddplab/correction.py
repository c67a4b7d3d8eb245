"""The table of the correction lab: 21 mistakes, each found or not by running the learner's program on real ranks.

``trials.py`` runs in the ranks, ``verdicts.py`` judges what comes back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddplab import tables, trials, verdicts
from ddplab.errors import DdplabError
from ddplab.launcher import launch
from ddplab.run import Run
from ddplab.verdicts import Verdict

__all__ = ["Status"]


class Check(NamedTuple):
    """A row: what is claimed, how a program is tried, and on which ranks (world size, further arguments)."""

    what: str
    trial: Callable[..., Any] | None
    verdict: Callable[[Any], Verdict]
    setups: tuple[tuple[int, tuple[Any, ...]], ...] = ((2, ()), (3, ()))
    backend: str | None = "gloo"
    timeout_s: float = 60.0


MACHINES = ((2, (2,)), (4, (2,)))  # 2 ranks on one, 4 on two

CHECKS = {
    1: Check("gradients are synchronised after step()", trials.by_hand, verdicts.averaged),
    2: Check("an optimizer's step is sent by RPC", trials.remote, verdicts.stepped, backend=None),
    3: Check("RPC needs init_process_group only", trials.ask, verdicts.asked, backend=None),
    4: Check("a try around training handles errors", trials.careful, verdicts.gave_up),
    5: Check("DistBackendError has three causes", trials.handled, verdicts.caught, backend=None),
    6: Check("a try: that holds only a comment", trials.guarded, verdicts.compiled),
    7: Check("no zero_grad()", trials.train, verdicts.zeroed),
    8: Check("train_data = ...", trials.listing, verdicts.filled),
    9: Check("no destroy_process_group()", trials.main, verdicts.closed, MACHINES, None, 5.0),
    10: Check("DDP splits the model", trials.parameters, verdicts.replicated),
    11: Check("DDP trains models that do not fit", trials.wrap, verdicts.sharded),
    12: Check("updates are averaged", trials.update, verdicts.updated),
    13: Check("rank=local_rank", trials.main, verdicts.joined, MACHINES, None, 5.0),
    14: Check("no set_device()", trials.main, verdicts.placed, MACHINES, None, 5.0),
    15: Check("no set_epoch()", trials.train, verdicts.reordered),
    16: Check("the loop variable hides the module data", trials.count, verdicts.ran),
    17: Check("names not imported, no forward", trials.listing, verdicts.complete),
    18: Check("no transform, every rank downloads", trials.load, verdicts.fetched),
    19: Check("LeNet with 16·4·4 and no activation", trials.lenet, verdicts.computes),
    20: Check("every rank tests all and prints", trials.evaluate, verdicts.evaluated),
    21: Check("which tools to choose", None, verdicts.chosen),
}


@dataclass
class Status:
    """The 21 mistakes and how far one is: "·" not started, "✗", or "✓", and what was seen on the ranks.

    ``timeout_s`` limits each run. ``details`` has what the ranks of the latest check printed, and how they failed.

    >>> status = Status()
    >>> print(status.check({"DataParallel": "recommended"}, 21))
     #  state  claim or listing       seen on the ranks
    21  ✗      which tools to choose  not so: DataParallel, Horovod's last release, FairScale is by, Megatron-LM is by
    """

    rows: dict[int, tuple[str, str]] = field(default_factory=lambda: dict.fromkeys(CHECKS, ("·", "")))
    timeout_s: float = 10.0
    details: str = ""

    def check(self, program: Any, *rows: int) -> Status:
        """Run ``program`` on ranks and judge these rows, in limited time; gives their part of the table."""
        if not rows:
            raise ValueError("say which rows: status.check(train, 7, 15)")
        if unknown := [row for row in rows if row not in CHECKS]:
            raise ValueError(f"there is no row {unknown[0]}: they are numbered from 1 to {len(CHECKS)}")
        runs: dict[Any, Run | str] = {}
        for row in rows:
            good, seen = self._judge(CHECKS[row], program, runs)
            self.rows[row] = ("✓" if good else "✗", seen)
        told = [run if isinstance(run, str) else f"{run!r}\n{run.output()}\n{run.report()}" for run in runs.values()]
        self.details = "\n\n".join(one.strip() for one in told)
        return Status({row: self.rows[row] for row in rows})

    def table(self) -> list[dict[str, Any]]:
        """A row for each: number, state, claim, what was seen."""
        return [
            {"#": row, "state": state, "claim or listing": CHECKS[row].what, "seen on the ranks": seen}
            for row, (state, seen) in self.rows.items()
        ]

    def __repr__(self) -> str:
        return tables.to_text(self.table())

    def _repr_html_(self) -> str:
        text = tables.to_html(self.table())
        for state, color in (("✓", "#009E73"), ("✗", "#D55E00")):
            text = text.replace(f">{state}<", f'><b style="color:{color}">{state}</b><')
        return text

    def _judge(self, check: Check, program: Any, runs: dict[Any, Run | str]) -> Verdict:
        """The first verdict that is not good, or the last; ``runs`` keeps what was launched for another row."""
        if check.trial is None:
            return check.verdict(program)
        good, seen = True, ""
        for world_size, further in check.setups:
            key = check.trial, world_size
            if key not in runs:
                runs[key] = launched(check, program, world_size, further, self.timeout_s)
            if isinstance(run := runs[key], str):
                return False, run
            try:
                good, seen = check.verdict(run)
            except Exception:  # it computes with what the program gave, which may be anything
                good, seen = False, f"no use can be made of what it returned: {run.returned!r}"
            if not good:
                break
        return good, seen


def launched(check: Check, program: Any, world_size: int, further: tuple[Any, ...], timeout_s: float) -> Run | str:
    """The run of a trial, or why there is none."""
    assert check.trial
    limit_s = min(timeout_s, check.timeout_s)
    options: dict[str, Any] = {"threads": 1, "allow_failure": True, "view": "quiet", "timeout_s": limit_s}
    with tempfile.TemporaryDirectory() as folder:
        more = (folder,) if check.trial is trials.load else further
        try:
            return launch(check.trial, program, *more, world_size=world_size, backend=check.backend, **options)
        except (DdplabError, TypeError, ValueError) as error:
            return f"could not be launched: {error}"
