"""``explain``: what an error means, what it shows that, and what to do next; for a run, an exception or a text."""

from __future__ import annotations

import html
import importlib.util
import io
import os
import re
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplab import diagnosis
from ddplab.catalog import CATEGORIES, CAUSE, ECHO, KIND, WRAPPER, Candidate, Entry, candidates, entries, order
from ddplab.errors import RankFailedError
from ddplab.logs import LogLine, read

if TYPE_CHECKING:
    from ddplab.failures import Failure
    from ddplab.run import Run

__all__ = ["Evidence", "Explanation", "explain"]

MAX_LINES, MAX_ECHOES, WIDTH = 3, 3, 110
SURE = "the text says so"
UNKNOWN = "I do not know this error."
ENDED = "Get the whole text: the line that names the exception, normally the last one, is not in this one."
COLLECT = (
    "Take the whole log of all ranks, from the start: under torchrun, --log-dir logs --tee 3 writes one file a rank.",
    "Look for the failure that came first by time, and read its traceback from the last line upwards.",
    "Run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL (INFO if it uses DDP on Gloo), and NCCL_DEBUG=INFO on GPUs.",
    "Note the versions, python -m torch.utils.collect_env, and how the ranks were started.",
    "Try it with 2 ranks on one machine, with backend='gloo': an error that stays is in the program.",
)
_FINAL = re.compile(r"(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Warning|Exit|Iteration)(?::.*|\s*)$")
_LIBRARY = re.compile(
    r"(?:[\w.]+\.)?(?:ChildFailedError|Process(?:Raised|Exited)Exception|\w*Warning|CalledProcessError|Dist\w*Error"
    r"|Rendezvous\w*|SystemExit|nccl\w+|\w+: (?:NCCL|\[|Gloo|Process group|Socket|E[A-Z]{4}|RPCErr|Conn|Broken))"
)


@dataclass(frozen=True)
class Evidence:
    """A line of the log. ``role`` is "shows it", "echo" (it only followed), "also" or "said"."""

    number: int
    rank: str
    time: str
    text: str
    role: str

    def __str__(self) -> str:
        place = ", ".join(part for part in (f"line {self.number}" * (self.number > 0), self.rank, self.time) if part)
        text = " ".join(self.text.split())
        return f"{self.role}{f' ({place})' * bool(place)}: {text[:WIDTH]}{'...' * (len(text) > WIDTH)}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """What ``explain`` found; it shows itself in a cell and in a terminal.

    ``id`` names the cause in the catalogue; "" if it is not known, and then ``steps`` are what to collect.
    ``category`` is one of ``ddplab.catalog.CATEGORIES``, or "". ``second`` is another cause that the evidence
    allows, or "". ``sure`` tells how much the text says: "the text says so", "likely", or less; at the least it
    tells the kind of error and not its cause, and then the steps are those for that kind. ``fault``
    is the name of the fault by which to see it happen.
    """

    sentence: str
    category: str = ""
    id: str = ""
    sure: str = ""
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    second: str = ""
    steps: tuple[str, ...] = ()
    fault: str = ""

    @property
    def known(self) -> bool:
        """Whether a cause was found, or nothing is wrong."""
        return bool(self.id)

    @property
    def certain(self) -> bool:
        """Whether the text names the cause, and not only that some rank failed by its own code."""
        return self.sure == SURE and self.id not in ("peer-raised", "rank-raised")

    def rows(self) -> list[tuple[str, str]]:
        """The parts with their titles, in the order in which they are shown."""
        kind = [("kind", f"{CATEGORIES[self.category]}: {self.id} ({self.sure})")] if self.category else []
        shown = [("evidence" if not at else "", str(one)) for at, one in enumerate(self.evidence)]
        why = [("likely", self.cause)] if self.cause else []
        why += [("or", self.second)] if self.second else []
        title = "next" if self.id else "collect"
        steps = [(title if at == 1 else "", f"{at}. {step}") for at, step in enumerate(self.steps, 1)]
        there = self.fault and importlib.util.find_spec("ddplab.faults")
        return kind + shown + why + steps + ([("see it", f'faults.run("{self.fault}")')] if there else [])

    def __str__(self) -> str:
        lines = textwrap.wrap(self.sentence, WIDTH)
        for title, text in self.rows():
            first, *rest = textwrap.wrap(text, WIDTH, break_on_hyphens=False) or [""]
            lines += [f"{title:>8}  {first}", *(f"{'':10}{line}" for line in rest)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left;vertical-align:top">'
        rows = (f"<tr>{cell}{html.escape(a)}</td>{cell}{html.escape(b)}</td></tr>" for a, b in self.rows())
        return f"<p><b>{html.escape(self.sentence)}</b></p><table>{''.join(rows)}</table>"


def explain(x: Run | BaseException | str | os.PathLike[str] | BinaryIO) -> Explanation:
    """What went wrong, the evidence, the likely cause and what to do next.

    ``x`` is a ``Run``, an exception, a text (a traceback, a log of several ranks, a report of torchrun, what
    NCCL_DEBUG prints), the path of a log, or a log opened with ``"rb"``. What is not in the catalogue is said to
    be unknown. Raises ``TypeError`` for other things and ``OSError`` for a file that cannot be read.

    >>> print(explain("ValueError: sampler option is mutually exclusive with shuffle").id)
    sampler-and-shuffle
    >>> explain("Segmentation fault in a program of mine").known
    False
    """
    if hasattr(x, "spec") and hasattr(x, "failures"):
        return _of_run(cast("Run", x))
    if isinstance(x, BaseException):
        if isinstance(x, RankFailedError):
            return _of_run(x.run)
        return _of_lines(read("".join(traceback.format_exception(x))))
    if isinstance(x, os.PathLike):
        with open(x, "rb") as file:
            return _of_lines(read(file))
    if isinstance(x, str | io.BufferedIOBase | io.RawIOBase):
        return _of_lines(read(cast("str | BinaryIO", x)))
    wanted = "a Run, an exception, a text, a path or a file opened with 'rb'"
    raise TypeError(f"explain() takes {wanted}, not {type(x).__name__}: {repr(x)[:60]}")


def _of_lines(lines: Sequence[LogLine]) -> Explanation:
    found = candidates(lines)
    if not found:
        return _unknown(lines)
    if found[0].entry.weight <= ECHO and (raised := _own_exceptions(lines, found)):
        return _own(raised[0], found)
    return _told(found[0], found[1:], lines)


def _told(best: Candidate, others: Sequence[Candidate], lines: Sequence[LogLine]) -> Explanation:
    """The explanation by the best candidate; the others are echoes, or stand beside it."""
    entry = best.entry
    shown = {line.number: _evidence(line, "shows it") for line in best.lines[:MAX_LINES]}
    for other in others:
        line, role = other.lines[0], "echo" if other.entry.weight <= min(ECHO, entry.weight - 1) else "also"
        if len(shown) < len(best.lines[:MAX_LINES]) + MAX_ECHOES:
            shown.setdefault(line.number, _evidence(line, role))
    by, places = order(lines), {line.number: line for line in [*lines, *(one.lines[0] for one in others)]}
    evidence = tuple(shown[number] for number in sorted(shown, key=lambda n: by(places[n])))
    if entry.weight == KIND and not any(_FINAL.match(line.text) for line in lines):
        entry = replace(entry, steps=(ENDED, *entry.steps))
    return _by(entry, entry.sentence, evidence)


def _by(entry: Entry, sentence: str, evidence: tuple[Evidence, ...]) -> Explanation:
    told = entry.cause, entry.second, entry.steps, entry.fault
    return Explanation(sentence, entry.category, entry.id, _sure(entry), evidence, *told)


def _sure(entry: Entry) -> str:
    if entry.weight >= CAUSE:
        return SURE
    if entry.weight > ECHO:
        return "likely"
    if entry.weight > WRAPPER:
        return "the text only says what followed"
    return "the kind of error, not its cause" if entry.hints else "a guess from little"


def _evidence(line: LogLine, role: str) -> Evidence:
    return Evidence(line.number, line.source, line.time, line.text.strip(), role)


def _own_exceptions(lines: Sequence[LogLine], found: Sequence[Candidate]) -> list[LogLine]:
    """Exceptions that no entry covers and no library of torch's raised, by time: a program's own."""
    covered = {line.number for one in found for line in one.lines}
    raised = [line for line in lines if _FINAL.match(line.text) and not _LIBRARY.match(line.text)]
    return sorted((line for line in raised if line.number not in covered), key=order(lines))


def _own(raised: LogLine, found: Sequence[Candidate], sentence: str = "") -> Explanation:
    """The explanation of a rank that failed in its own code, by the others that lost it or by its launcher."""
    lost = any(WRAPPER < one.entry.weight <= ECHO for one in found)
    entry = entries()["peer-raised" if lost else "rank-raised"]
    who = f"{raised.source[:1].upper()}{raised.source[1:]}" if raised.source else "A rank"
    text = " ".join(raised.text.split())
    echoes = [_evidence(one.lines[0], "echo") for one in found[:MAX_ECHOES]]
    what = sentence or f"{who} raised an exception of its own: {text[:WIDTH]}"
    return _by(entry, what, (_evidence(raised, "shows it"), *echoes))


def _unknown(lines: Sequence[LogLine]) -> Explanation:
    said = [line for line in lines if _FINAL.match(line.text)] or [line for line in lines if line.text.strip()]
    return Explanation(UNKNOWN, evidence=tuple(_evidence(line, "said") for line in said[-1:]), steps=COLLECT)


# Runs --------------------------------------------------------------------------------------------------


def _of_run(run: Run) -> Explanation:
    """The explanation by what the ranks said that failed first; where that is little, by the calls of all ranks."""
    if not run.failures:
        told = candidates(lines := _numbered(_said([*run.findings, *run.output(None, "stderr").splitlines()[-50:]])))
        return _by_rank(_told(told[0], told[1:], lines), run) if told and told[0].entry.weight > ECHO else _nothing(run)
    first = run.failures[0]
    roots = [failure for failure in run.failures if failure.role == first.role]
    lines, rest = _numbered(_lines_of(run, roots)), _echoes(run, roots)
    found = candidates(lines)
    if _says_little(found, first):
        standing = [*diagnosis.standing(run.events, run.world_size), *_left_early(run)]
        lines = _numbered([*lines, *_said([*standing, *run.findings])])
        found = candidates(lines)
    if found and found[0].entry.weight > WRAPPER:
        return _by_rank(_told(found[0], found[1:], lines), run)
    if first.traceback:
        raised = LogLine(1, str(first), f"rank {first.rank}", f"{first.time_s:.1f} s")
        return _by_rank(_own(raised, rest, run.verdict()), run)
    return _by_rank(replace(_unknown(lines), sentence=f"{run.verdict()}. Why is not known."), run)


def _says_little(found: Sequence[Candidate], first: Failure) -> bool:
    """Whether the failure's own text does not tell what was wrong, so that the calls of all ranks must."""
    if not found or found[0].entry.weight <= WRAPPER:
        return not first.traceback
    return found[0].entry.weight <= ECHO


def _left_early(run: Run) -> list[str]:
    """Who returned from a run that others did not end well."""
    return [f"{diagnosis.ranks(run.returned)} returned, and others did not"] if run.returned else []


def _numbered(lines: Sequence[LogLine], start: int = 1) -> list[LogLine]:
    return [replace(line, number=number) for number, line in enumerate(lines, start)]


def _by_rank(told: Explanation, run: Run) -> Explanation:
    """The explanation of a run, the same each time: no numbers of lines, no times, one line for who lost a peer."""
    lost: dict[str, list[int]] = {}
    for failure in run.failures:
        if failure.role == "echo":
            lost.setdefault(str(failure), []).append(failure.rank)
    others = {f"rank {rank}" for who in lost.values() for rank in who}
    kept = dict.fromkeys(replace(one, number=0, time="") for one in told.evidence if one.rank not in others)
    echoes = [Evidence(0, diagnosis.ranks(who), "", text, "echo") for text, who in lost.items()]
    return replace(told, evidence=(*kept, *echoes[:MAX_ECHOES]))


def _lines_of(run: Run, failures: Sequence[Failure]) -> list[LogLine]:
    """What the ranks that failed say: exception and stderr."""
    lines = []
    for failure in failures:
        told = failure.traceback or str(failure)
        lines += _said([*told.splitlines(), *run.output(failure.rank, "stderr").splitlines()[-30:]], failure)
    return lines


def _said(texts: Sequence[str], failure: Failure | None = None) -> list[LogLine]:
    who = (f"rank {failure.rank}", f"{failure.time_s:.1f} s") if failure else ("", "")
    return [LogLine(0, line.text, *who) for line in read("\n".join(texts))]


def _echoes(run: Run, roots: Sequence[Failure]) -> list[Candidate]:
    """What the other failures of the run show."""
    others = [failure for failure in run.failures if failure not in roots and failure.role == "echo"]
    return candidates(_numbered(_lines_of(run, others), 1_000_000)) if others else []


def _nothing(run: Run) -> Explanation:
    return Explanation(f"Nothing failed: {len(run.returned)} of {run.world_size} ranks returned a value.", id="nothing")
