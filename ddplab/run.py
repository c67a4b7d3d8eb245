"""A finished launch as a value: results, output, failures and metrics; save and load."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ddplab import diagnosis, failures, timeline
from ddplab import events as ev
from ddplab.errors import RankFailedError, RankTimeoutError
from ddplab.failures import Failure
from ddplab.receipt import Receipt

__all__ = ["Failure", "MetricRow", "Receipt", "Run", "Spec"]


@dataclass(frozen=True)
class Spec:
    """What was asked for: the function's name and the options as they were decided."""

    name: str
    world_size: int
    backend: str | None
    backend_why: str
    start_method: str
    timeout_s: float
    seed: int | None
    threads: int
    engine: str = "local"


class MetricRow(NamedTuple):
    """One number from ``log()``; ``time_s`` counts from the launch."""

    rank: int
    step: int | None
    time_s: float
    name: str
    value: float


@dataclass(frozen=True, repr=False)
class Run:
    """All that the ranks of one launch told, in the order in which it arrived.

    ``receipt`` says what the launch has left: normally nothing. ``output_file`` holds all that the ranks
    printed, if it was more than the run keeps; it goes when the run does.

    >>> spec = Spec("f", 1, "gloo", "gloo was asked for", "spawn", 60.0, 0, 1)
    >>> run = Run(spec, (ev.Line(0, 0.1, "stdout", "hi"), ev.Result(0, 0.2, 42)), 0.3)
    >>> run, run.results, run.output()
    (Run(f, world_size=1, backend='gloo', ok), [42], 'rank 0 | hi')
    """

    spec: Spec
    events: tuple[ev.Event, ...]
    elapsed_s: float
    receipt: Receipt | None = None
    output_file: Path | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.spec.world_size

    @property
    def backend(self) -> str | None:
        """The backend of the process group that ddplab made, or None."""
        return self.spec.backend

    @property
    def start_method(self) -> str:
        """How the ranks were started: "forkserver" or "spawn"."""
        return self.spec.start_method

    @property
    def ok(self) -> bool:
        """Whether every rank returned a value."""
        return len(self.returned) == self.world_size and not self.failures

    @property
    def returned(self) -> Mapping[int, Any]:
        """The value of each rank that returned one, by rank; also when other ranks failed."""
        values = {e.rank: e.value for e in self._all(ev.Result)}
        return types.MappingProxyType(dict(sorted(values.items())))

    @property
    def results(self) -> list[Any]:
        """The values that the function returned, in rank order.

        Raises :class:`RankFailedError` if a rank failed; ``run.returned`` has what the others returned.
        """
        self.check()
        return list(self.returned.values())

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """How ranks failed: root causes first, then echoes, then the stopped; each kind by time."""
        return failures.find(self.events, self.world_size, self.spec.timeout_s)

    def check(self) -> None:
        """Raise :class:`RankFailedError` if a rank failed, or its kind :class:`RankTimeoutError` if time ran out."""
        if self.failures:
            kind = RankTimeoutError if self.failures[0].type == "Timeout" else RankFailedError
            raise kind(self.verdict(), self, self.report())

    def verdict(self) -> str:
        """What went wrong in a sentence, the same each time the same happens; "" if nothing did."""
        return failures.verdict(self.failures, self.world_size)

    def report(self) -> str:
        """What lies behind the verdict: the first traceback, what the other ranks did, and what to do next."""
        first = self.failures[0].rank if self.failures else None
        standing = [*diagnosis.standing(self.events, self.world_size), *self.findings]
        report = failures.report(self.failures, self.output(first).splitlines()[-5:], standing)
        plain = report.rpartition("\n")[2].startswith(("next: mend", "next: read the traceback"))
        return f"{report}\n{more}" if plain and (more := self._known_cause()) else report

    def _known_cause(self) -> str:
        """A line with the cause, if the first failure's text names one; "" otherwise."""
        from ddplab.explanation import explain  # its catalogue is read when something has failed

        told = explain(self)
        return f"explain(run) says more: {told.sentence}" if told.certain else ""

    @cached_property
    def collectives(self) -> tuple[ev.Call, ...]:
        """The calls into ``torch.distributed``, by rank and time; of each rank the latest 1,000."""
        return diagnosis.calls(self.events)

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """Collective calls that do not fit together, in words; also those that raise no error."""
        return tuple(diagnosis.mismatches(self.events))

    def lines(self, rank: int | None = None, stream: str | None = None) -> Iterator[ev.Line | ev.Omitted]:
        """The lines of each rank in turn: first its stdout, then its stderr, each in the order of writing."""
        kept = [e for e in self.events if isinstance(e, ev.Line | ev.Omitted)]
        kept = [e for e in kept if rank in (None, e.rank) and stream in (None, e.stream)]
        return iter(sorted(kept, key=lambda e: (e.rank, e.stream == "stderr")))

    def output(self, rank: int | None = None, stream: str | None = None) -> str:
        """What the ranks printed, as text.

        All ranks: grouped by rank, each line behind ``rank 0 |`` (``rank 0 !`` for stderr).
        One ``rank``: its lines as they were. ``stream`` is "stdout", "stderr" or None for both.
        """
        if rank is not None:
            return "\n".join(_text(line) for line in self.lines(rank, stream))
        return "\n".join(prefixed(line, self.world_size) for line in self.lines(None, stream))

    @cached_property
    def metrics(self) -> tuple[MetricRow, ...]:
        """The numbers from ``log()``, by rank and time."""
        rows = (MetricRow(e.rank, e.step, e.time_s, e.name, e.value) for e in self._all(ev.Metric))
        return tuple(sorted(rows, key=lambda row: (row.rank, row.time_s)))

    @cached_property
    def spans(self) -> tuple[ev.Span, ...]:
        """The spans, by rank and beginning: each has ``rank``, ``time_s``, ``end_s`` and ``name``."""
        return tuple(sorted(self._all(ev.Span), key=lambda one: (one.rank, one.time_s, -one.end_s)))

    @cached_property
    def timeline(self) -> tuple[timeline.Row, ...]:
        """What each rank did when, by rank and beginning, as :class:`ddplab.timeline.Row` says.

        Without ``launch(..., trace=True)`` the kinds are "backward", "waiting" (in a call) and "span" alone.
        """
        return timeline.rows(self.events)

    def save_trace(self, folder: str | os.PathLike[str]) -> None:
        """Write the trace of each rank r to ``rank<r>.json`` in ``folder``, and all together to ``ranks.json``.

        Perfetto (ui.perfetto.dev) and chrome://tracing open them. All clocks have one zero, the launch. Beside what
        torch.profiler saw they hold the rank's spans and calls; of a rank that was killed only these.
        Files of this kind that an earlier trace has left there go. Raises ``ValueError`` if no rank has a trace.
        """
        if not self._all(ev.Trace):
            raise ValueError("this run has no trace: launch(..., trace=True) makes one, of ranks that are not killed")
        files = timeline.chrome_events(self.events, self.world_size)
        named = {f"rank{rank}.json": file for rank, file in enumerate(files)} | {"ranks.json": [*chain(*files)]}
        os.makedirs(folder, exist_ok=True)
        for path in Path(folder).glob("rank[0-9]*.json"):  # of a larger run: the two would be taken for one
            path.unlink()
        for name, file in named.items():
            text = json.dumps({"traceEvents": file, "displayTimeUnit": "ms"}, separators=(",", ":"))
            (Path(folder) / name).write_text(text, encoding="utf-8")

    def _all(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def __repr__(self) -> str:
        state = "ok" if self.ok else self.verdict() if self.failures else "unfinished"
        on = "" if self.spec.engine == "local" else f", engine={self.spec.engine!r}"
        return f"Run({self.spec.name}, world_size={self.world_size}, backend={self.backend!r}{on}, {state})"

    def _repr_html_(self) -> str:
        from ddplab import tables

        return tables.to_html(tables.summary(self), caption=repr(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run as JSON lines. What JSON cannot hold is kept as its text (:class:`Text`)."""
        receipt = self.receipt and dataclasses.asdict(self.receipt)
        head = {"ddplab_run": 1, "elapsed_s": self.elapsed_s, "receipt": receipt, **dataclasses.asdict(self.spec)}
        records = [json.dumps(record) + "\n" for record in [head, *map(_to_record, self.events)]]
        with open(path, "w", encoding="utf-8") as file:  # opened last: what fails above leaves no half a file
            file.writelines(records)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run that was saved. Raises ``ValueError`` for a file that is none."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            head, *records = map(json.loads, lines)
            if head.pop("ddplab_run") != 1:
                raise ValueError("written by a newer ddplab")
            elapsed_s, kept = head.pop("elapsed_s"), head.pop("receipt", None)
            receipt = Receipt.from_json(kept) if kept else None
            return cls(Spec(**head), tuple(map(_from_record, records)), elapsed_s, receipt)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a run that ddplab saved: {error}") from error


class Text(str):
    """The text of a value that JSON cannot hold, in a run that was loaded; shown as it was.

    >>> Text("tensor([1.])")
    tensor([1.])
    """

    def __repr__(self) -> str:
        return str(self)


def _to_record(event: ev.Event) -> dict[str, Any]:
    record = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, ev.Result):
        try:
            record["value"] = _to_json(event.value)
        except RecursionError:  # a value that holds itself
            record["value"] = _as_text(event.value)
    if isinstance(event, ev.Trace):
        record["packed"] = base64.b64encode(event.packed).decode()
    if isinstance(record.get("where"), ev.Where):
        record["where"] = dataclasses.asdict(record["where"])
    return {"event": type(event).__name__, **record}


def _from_record(record: dict[str, Any]) -> ev.Event:
    kind = getattr(ev, record.pop("event"))
    if record.get("where"):
        record["where"] = ev.Where(**record["where"])
    if kind is ev.Trace:
        record["packed"] = base64.b64decode(record["packed"])
    if kind is ev.Result:
        record["value"] = _from_json(record["value"])
    if record.get("shape") is not None:
        record["shape"] = tuple(record["shape"])
    event: ev.Event = kind(**record)
    return event


def _to_json(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(item) for item in value]
    if type(value) is tuple:
        return {"$tuple": [_to_json(item) for item in value]}
    if type(value) is dict:
        return {"$dict": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    return _as_text(value)


def _as_text(value: Any) -> dict[str, str]:
    return {"$text": safe_repr(value), "type": type(value).__qualname__}


def safe_repr(value: Any) -> str:
    """``repr(value)``, whatever its class makes of that."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(_from_json(item) for item in value["$tuple"])
    if "$dict" in value:
        return {_from_json(key): _from_json(item) for key, item in value["$dict"]}
    return Text(value["$text"])


def prefixed(line: ev.Line | ev.Omitted, world_size: int) -> str:
    """A line of a rank as it is shown among those of others.

    >>> prefixed(ev.Line(3, 0.0, "stderr", "careful"), 16)
    'rank  3 ! careful'
    """
    mark = "!" if line.stream == "stderr" else "|"
    return f"rank {line.rank:>{len(str(world_size - 1))}} {mark} {_text(line)}".rstrip()


def _text(line: ev.Line | ev.Omitted) -> str:
    return line.text if isinstance(line, ev.Line) else f"... {line.num_lines} lines left out ..."
