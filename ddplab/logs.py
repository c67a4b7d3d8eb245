"""Reading logs as people paste them: colours, prefixes of loggers and launchers, several ranks, 100 MB of it.

A long log is read as a stream. Kept are its beginning, its end, and between them the lines that look like news,
each kind of them a few times for each rank, with their neighbours.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["LogLine", "read", "squeeze"]

SHORT = 300_000  # up to so many characters nothing is left out
_BLOCK, _HEAD, _TAIL, _ROOM, _DULL_ROOM = 1 << 20, 1 << 16, 1 << 17, 500_000, 100_000
_MAX_LINE, _BEFORE, _AFTER, _EACH, _MAX_KINDS = 4000, 8, 6, 2, 50_000
# What a line with news holds, among others; without blanks, as in _LOWER.
_NEWS = (
    b"error", b"exception", b"traceback", b"fail", b"timeout", b"timedout", b"time-out", b"signal", b"kill", b"abort",
    b"terminat", b"mismatch", b"warn", b"notfound", b"nospace", b"expected", b"cannot", b"cant", b"unable", b"invalid",
    b"refused", b"reset", b"closed", b"memory", b"enforce", b"notbeen", b"alreadyinuse", b"unrecognized", b"exit",
    b"isnot", b"mustbe", b"hasno", b"fault", b"unknown", b"missing", b"outof", b"limit", b"hang", b"freez", b"only",
    b"waiting", b"toomany", b"[e", b"fatal", b"[c10d]", b"assert", b"stuck", b"deadlock", b"notwork", b"same", b"twice",
    b"unavailable", b"undefined", b"differ", b"[w", b"didnt", b"waitsin",
    b"waitin", b"didnot", b"nomodulenamed", b"w.start(", b"notenough",
)  # fmt: skip
_DULL = {b"warn", b"only", b"same", b"expected", b"limit", b"waiting", b"twice", b"missing", b"exit", b"reset"}
_HEX = b"abcdef"
_LOWER = bytes.maketrans(bytes(range(65, 91)), bytes(range(97, 123)))
_DROPPED = b"0123456789 \t\r\v\f\0'\"`"
# Squeezed text has no capitals, blanks and quotation marks: so it does not matter how a line was wrapped.
_NOTHING = dict.fromkeys(map(ord, " \t\r\n\v\f\0\xa0\u200b\ufeff'\"`\u2018\u2019\u201c\u201d\u2502"))
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\^\[\[[0-9;]*m|(?<!\w)\[\d\d?(?:;\d\d?)*m")
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
_GLOG = rf"[EWIF](?P<date>\d{{3,8}}) {_CLOCK}"
_SOURCE = r"(?:[\w./\\-]*[/\\])?(?P<file>[\w-]+\.(?:cpp|h|hpp|cu|cc|py)):\d+\]"
_PREFIXES = [
    re.compile(pattern)
    for pattern in (
        r"\s*(?:(?:> ?)+|E {3}|\+ ?\| |\| )(?=\S)",  # quoted in a mail, by pytest, in a group of exceptions
        r"\s*\[?(?:rank|default|trainer|Rank |RANK )(?P<rank>\d+)\]?(?:\]|:| \||(?<=\]))+ ?",
        r"\s*rank +(?P<rank>\d+) [|!] ?",
        r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>: ?",
        r"\((?P<who>[\w.-]+ pid=\d+)[^)]*\)\s*",
        r"(?P<who>[A-Za-z][\w.-]*[-_]\d+) +\| ?",
        rf"\[?(?P<date>\d{{4}}[-/]\d\d[-/]\d\d)[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?(?: *[-:|])? *",
        rf"\[?{_GLOG}(?: +\d+)?(?: {_SOURCE}|\]) ?",
        rf"\[[EWIF] {_SOURCE} ?",
        r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] ?",
        r"\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\]?(?:: ?| +)(?:[\w.]+:(?!\S*//) ?)?",
        rf"{_CLOCK} ",
    )
]
_SLURM = re.compile(r" *(?P<rank>\d{1,4}): ")
_RANK = re.compile(rb"rank\D{0,2}(\d+)")


@dataclass(frozen=True)
class LogLine:
    """One line: what the program said, without what loggers and launchers put before it.

    ``number`` counts from 1. ``source`` is who said it ("rank 3", "worker pid=812"), ``time`` is the clock as the
    log gives it, ``file`` the source file of the logger; each is "" where the log does not tell.

    >>> [line] = read("[rank3]:[E417 10:00:01.5 x.cpp:6] Watchdog caught")
    >>> line
    LogLine(number=1, text='Watchdog caught', source='rank 3', time='417 10:00:01.5', file='x.cpp')
    """

    number: int
    text: str
    source: str = ""
    time: str = ""
    file: str = ""


def squeeze(text: str) -> str:
    """The text without capitals, blanks and quotation marks.

    >>> squeeze("Rank 0 has `x`")
    'rank0hasx'
    """
    return text.lower().translate(_NOTHING)


def read(log: str | BinaryIO) -> list[LogLine]:
    """The lines of a log that matter, in order; of a long one not all."""
    if isinstance(log, str) and len(log) <= SHORT:
        numbered = list(enumerate(log.replace("\r\n", "\n").split("\n"), 1))
    else:
        numbered = digest(io.BytesIO(log.encode(errors="replace")) if isinstance(log, str) else log)
    plain = [(number, _shortened(_COLOUR.sub("", part))) for number, line in numbered for part in _unescaped(line)]
    tasks = _are_tasks([int(match[1]) for _, line in plain if (match := _SLURM.match(line))], len(plain))
    return [_parsed(number, line, tasks) for number, line in plain if line.strip()]


def _unescaped(line: str) -> list[str]:
    """A line that holds others in escaped form, as JSON does, is several."""
    return line.split("\\n") if line.count("\\n") > 2 else [line]


def _shortened(line: str) -> str:
    """The last state of a progress bar; the two ends of a very long line."""
    line = next((part for part in reversed(line.split("\r")) if part.strip()), line)
    return line if len(line) <= _MAX_LINE else f"{line[:1000]} ... {line[1000 - _MAX_LINE :]}"


def _are_tasks(numbers: Sequence[int], num_lines: int) -> bool:
    """Whether the numbers before lines are ranks, as Slurm writes them, and do not count the lines."""
    counts = len(numbers) > 2 and all(b == a + 1 for a, b in zip(numbers, numbers[1:], strict=False))
    return 2 * len(numbers) >= num_lines and not counts


def _parsed(number: int, text: str, tasks: bool) -> LogLine:
    told: dict[str, str] = {}
    for _ in range(8):
        prefixes = [_SLURM, *_PREFIXES] if tasks else _PREFIXES
        match = next((found for prefix in prefixes if (found := prefix.match(text)) and found.end()), None)
        if not match:
            break
        text = text[match.end() :]
        told = {name: value for name, value in match.groupdict().items() if value} | told
    source = f"rank {told['rank']}" if "rank" in told else told.get("who", "")
    if not source and "pid" in told:
        source = f"{told['host']} pid {told['pid']}"
    time = f"{told.get('date', '')} {told.get('clock', '')}".strip()
    return LogLine(number, text, source, time, told.get("file", ""))


# Long logs ---------------------------------------------------------------------------------------------


def digest(stream: BinaryIO) -> list[tuple[int, str]]:
    """The lines of ``stream`` that matter, with their numbers, in bounded memory.

    Lines of one kind differ in digits only.
    """
    kept: dict[int, bytes] = {}
    known: dict[bytes, int] = {}
    seen: Counter[tuple[bytes, bytes]] = Counter()
    head, room, tail, num_lines = _HEAD, [0, _DULL_ROOM, _ROOM], b"", 0
    for block in _blocks(stream):
        lines = block.split(b"\n")
        if head > 0:
            first = block[:head].count(b"\n") + 1
            kept.update(enumerate(lines[:first], num_lines + 1))
            head -= len(block)
        kinds = block.translate(_LOWER, _DROPPED).split(b"\n")
        _judge(kinds, known)
        for index in _news(kinds, lines, known, seen):
            if room[known[kinds[index]]] > 0:
                begin = max(0, index - _BEFORE)
                near = lines[begin : index + _AFTER]
                kept.update(enumerate(near, num_lines + begin + 1))
                room[known[kinds[index]]] -= sum(min(len(line), _MAX_LINE) for line in near)
        tail = (tail + block + b"\n")[-_TAIL:]
        num_lines += len(lines)
    last = tail.split(b"\n")[:-1]
    kept.update(enumerate(last, num_lines - len(last) + 1))
    return [(number, _decoded(kept[number])) for number in sorted(kept)]


def _judge(kinds: Sequence[bytes], known: dict[bytes, int]) -> None:
    """Note of each kind of line whether it looks like news: 2, or 1 if that is dull, or 0."""
    if len(known) > _MAX_KINDS:
        known.clear()
    fresh = set(kinds) - known.keys()
    everything = b"\n".join(fresh)
    words = [word for word in _NEWS if word in everything]
    for kind in fresh:
        held = {word for word in words if word in kind}
        known[kind] = 2 if held - _DULL else min(len(held), 1)


def _news(
    kinds: Sequence[bytes], lines: Sequence[bytes], known: dict[bytes, int], seen: Counter[tuple[bytes, bytes]]
) -> Iterator[int]:
    """The indices of lines with news, each kind a few times for each rank."""
    for index, kind in enumerate(kinds):
        if known[kind]:
            rank = _RANK.search(lines[index])
            key = kind[:400].translate(None, _HEX), rank[0] if rank else b""
            seen[key] += 1
            if seen[key] <= _EACH:
                yield index
    if len(seen) > _MAX_KINDS:
        seen.clear()


def _decoded(line: bytes) -> str:
    if len(line) > 4 * _MAX_LINE:
        line = line[:_MAX_LINE] + b" ... " + line[-3 * _MAX_LINE :]
    return line.decode(errors="replace").removesuffix("\r")


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines, without the last newline; a line that is longer than a block is cut."""
    rest = b""
    for data in _utf8(stream):
        end = data.rfind(b"\n")
        if end < 0 and len(rest) < _BLOCK:
            rest += data
        else:
            yield rest + data[: end if end >= 0 else None]
            rest = data[end + 1 :] if end >= 0 else b""
    if rest:
        yield rest


def _utf8(stream: BinaryIO) -> Iterable[bytes]:
    """The data of the stream; what Windows PowerShell wrote as UTF-16 becomes UTF-8."""
    data = stream.read(_BLOCK)
    coded = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    decoder = codecs.getincrementaldecoder("utf-16" if coded else "utf-8")(errors="replace")
    while data:
        yield decoder.decode(data).encode() if coded else data
        data = stream.read(_BLOCK)
