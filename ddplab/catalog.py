"""The known causes of errors, from ``catalog.toml``, and which of them a log shows.

A pattern is plain text. Capitals, blanks and quotation marks do not count, ``*`` stands for up to 200 characters,
``#`` for a number. A pattern that begins with ``re:`` is a regular expression for the squeezed text; its group "at",
if it has one, shows the line. It may use ``{error}``, an exception of a built-in class; ``{raised}``, which after a
file of a traceback says that the exception was raised there; ``{cut}``, that the traceback ends there without one.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddplab.logs import LogLine, squeeze

__all__ = ["CATEGORIES", "CAUSE", "ECHO", "KIND", "WRAPPER", "Candidate", "Entry", "candidates", "entries", "order"]

CATEGORIES = {
    "nccl_backend": "backend/NCCL",
    "communication": "communication",
    "initialisation": "initialisation",
    "collective_mismatch": "collective mismatch",
    "ddp_usage": "DDP use",
    "sampler_data": "sampler and data",
    "rpc": "RPC",
    "launcher_notebook": "launcher and notebook",
    "resource": "resources",
}
CAUSE, ECHO, WRAPPER = 70, 50, 30  # weights: from CAUSE on the text names the cause; up to ECHO it only followed
KIND = 25  # the weight of an answer by hints: more than a launcher's report, less than anything else

# Words of squeezed texts from which one tells whether they have to do with this, or come from other programs.
_HERE = re.compile(
    r"torch|nccl|p2p|gloo|c10d|rank|cuda|gpu|nvidia|iommu|ddp|distributed|tensorpipe|rpc|rref|dataloader|sampler|epoch"
    r"|backward|zero_grad|train|collective|replica|init_process|tcpstore|rendezvous|world_?size|master_|deepspeed"
    r"|accelerat|lightning|slurm|srun|mpirun|hostfile|pdsh|ray::|rayw"
)
_ELSEWHERE = re.compile(
    r"nginx|npm|net\.js|node:|java[.:]|\.java|curl:|wget|git@|github\.com|requests[._]|urllib|redis|postgres|psql|mysql"
    r"|sqlite|celery|joblib|rsync|keras|tensorflow|chrome|kubectl"
)
_MIN_CUT, _MAX_CUT = 12, 200  # what must be left of a pattern at a cut end, and where to look for it
_ERROR = r"(?P<at>(attribute|type|value|runtime|assertion|key|index|notimplemented|dist\w{0,60})error(?![(\w]))"
_MACROS = {
    "{raised}": r"\.py,line\d+,in((?!,line\d)(?!error:).){0,400}?" + _ERROR,
    "{cut}": r"\.py,line\d+,in(?!.{0,3000}(error|exception)(?!\w))",
    "{error}": _ERROR,
}
_REDACTED = re.compile("<(?:[a-z]|pid|port|rank|num|number|int|size|ms)>")  # for numbers that were left out


@dataclass(frozen=True)
class Entry:
    """One cause: the texts that show it, what it means and what to do.

    ``weight`` says how much the text tells: 70 and more, it names the cause; 51 to 69, a symptom with a usual cause;
    31 to 50, an echo, what survivors see; up to 30, the wrapping of a launcher, or a warning. A ``silent`` cause
    makes wrong numbers and no text: it has no patterns, and ``fault`` shows it. ``hints`` are words of a whole kind of
    errors (files of torch, names of its parts): they count only where nothing tells more.
    """

    id: str
    category: str
    sentence: str
    cause: str
    steps: tuple[str, ...]
    weight: int = 0
    silent: bool = False
    source: str = ""
    example: str = ""
    near_miss: str = ""
    classes: str = ""
    second: str = ""
    fault: str = ""
    torch: str = ""
    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """An entry whose patterns are in a log, and the lines that show it, the first one first."""

    entry: Entry
    lines: tuple[LogLine, ...]


@cache
def entries() -> dict[str, Entry]:
    """All entries of the catalogue by id."""
    with open(Path(__file__).with_name("catalog.toml"), "rb") as file:
        categories = tomllib.load(file)
    return {
        name: Entry(name, category, **_frozen(table))
        for category, tables in categories.items()
        for name, table in tables.items()
    }


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        for name, meaning in _MACROS.items():
            pattern = pattern.replace(name, meaning)
        return re.compile(pattern[3:])
    escaped = re.escape(squeeze(pattern))
    return re.compile(escaped.replace(r"\*", ".{0,200}?").replace(r"\#", r"\d+"))


@cache
def _plain(pattern: str) -> str:
    """A pattern without gaps as squeezed text, or "" if it has some."""
    return "" if pattern.startswith("re:") or "*" in pattern or "#" in pattern else squeeze(pattern)


def _cut_at(pattern: str, end: str) -> int | None:
    """Where in the end of a text a plain pattern begins that was cut off there, with more than half of it left."""
    whole = _plain(pattern)
    begin = end.rfind(whole[:_MIN_CUT]) if len(whole) > _MIN_CUT else -1
    left = end[begin:] if begin >= 0 else ""
    return begin if len(whole) > len(left) > len(whole) // 2 and whole.startswith(left) else None


class View:
    """Lines as one squeezed text, in which a position leads back to its line."""

    def __init__(self, lines: Sequence[LogLine]) -> None:
        # The logger's file is part of what a line says, but must not stand within a text that was wrapped.
        files = [*(line.file for line in lines), ""]
        said = [line.text if line.file == files[at - 1] else line.file + line.text for at, line in enumerate(lines)]
        parts = [_REDACTED.sub("5", squeeze(text)) for text in said]
        self.lines, self.text = lines, "".join(parts)
        self._begins = list(accumulate(map(len, parts[:-1]), initial=0))

    def found(self, pattern: str, cut: bool = False) -> Iterator[LogLine]:
        """The lines in which the pattern begins, or its group "at" if it has one.

        With ``cut`` also the line where it begins, if the text was cut off within it.
        """
        compiled = _compiled(pattern)
        group = "at" if "at" in compiled.groupindex else 0
        for match in compiled.finditer(self.text):
            yield self._line(match.start(group))
        if cut and (begin := _cut_at(pattern, self.text[-_MAX_CUT:])) is not None:
            yield self._line(len(self.text) - min(len(self.text), _MAX_CUT) + begin)

    def _line(self, position: int) -> LogLine:
        return self.lines[bisect_right(self._begins, position) - 1]


def _views(lines: Sequence[LogLine]) -> list[View]:
    """The lines as they stand, and those of each rank together where several ranks are mixed."""
    sources = list(dict.fromkeys(line.source for line in lines))
    if len(sources) < 2:
        return [View(lines)]
    return [View(lines), View(sorted(lines, key=lambda line: sources.index(line.source)))]


def candidates(lines: Sequence[LogLine]) -> list[Candidate]:
    """What the lines show, the best first: by weight, then by time.

    Nothing where they come from other programs; and what people tell in words, without an error, counts only where
    it has to do with training.
    """
    views, by = _views(lines), order(lines)
    here = bool(_HERE.search(views[0].text))
    if not here and _ELSEWHERE.search(views[0].text):
        return []
    known = (entry for entry in entries().values() if here or not entry.classes.startswith("none:"))
    found = [Candidate(entry, shown) for entry in known if (shown := _shown(entry, views))]
    if all(one.entry.weight < KIND for one in found):
        found += _cut_off(views) or _by_hints(views)
    return sorted(found, key=lambda one: (-one.entry.weight, by(one.lines[0])))


def _cut_off(views: Sequence[View]) -> list[Candidate]:
    """The entries of which a pattern was cut off at the end of the text: likely at best."""
    hits = [
        (entry, [line for one in entry.any for line in views[0].found(one, cut=True)]) for entry in entries().values()
    ]
    return [
        Candidate(replace(entry, weight=min(entry.weight, CAUSE - 1)), tuple(lines))
        for entry, lines in hits
        if lines and not entry.all and not entry.none
    ]


def _by_hints(views: Sequence[View]) -> list[Candidate]:
    """The kind of error for which most hints speak; of two that are equal, the one that is hinted at last."""
    kinds = []
    for entry in entries().values():
        hits = [hit for hint in entry.hints if (hit := tuple(line for view in views[:1] for line in view.found(hint)))]
        lines = {line.number: line for hit in hits for line in hit}
        if hits:
            shown = tuple(lines[number] for number in sorted(lines, reverse=True))
            kinds.append((len(hits), shown[0].number, Candidate(replace(entry, weight=KIND), shown)))
    return [max(kinds, key=lambda kind: kind[:2])[2]] if kinds else []


def order(lines: Iterable[LogLine]) -> Callable[[LogLine], tuple[str, int]]:
    """By what lines are sorted: their time if all tell one, else their number."""
    timed = all(line.time for line in lines)
    return lambda line: (line.time if timed else "", line.number)


def _shown(entry: Entry, views: Sequence[View]) -> tuple[LogLine, ...]:
    """The lines that show the entry; () if its patterns do not hold."""
    hits = [[line for view in views for line in view.found(one)] for one in (*entry.all, *entry.any)]
    required, either = hits[: len(entry.all)], hits[len(entry.all) :]
    if not hits or not all(required) or (either and not any(either)):
        return ()
    if any(next(view.found(one), None) for view in views for one in entry.none):
        return ()
    lines = {line.number: line for lines in (either or required[:1]) for line in lines}
    return tuple(lines[number] for number in sorted(lines))
