"""A fault: a few lines that break on purpose, what each rank is expected to see, and the lines that cure it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddplab.launcher import launch
from ddplab.places import Source, learn
from ddplab.run import Failure, Run

__all__ = ["FAULTS", "Fault", "Seen", "fault", "fits", "saw"]

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Fault:
    """An error that can be made on purpose.

    ``did`` says what is wrong with ``broken``, ``fix`` what ``repaired`` does about it. ``options`` are those of
    ``launch``. ``cause`` names the entry of the catalog that explains it. ``needs`` tells what this machine lacks.

    ``sees`` is what each rank is expected to see, by rank, or one text for all: "ValueError: " and the beginning of
    its text, "returns 3.0", "hangs in recv", "SIGKILL", or "echo" for a rank that only loses a peer. In it "…" stands
    for anything, and " or " between what may come in turn. ``root`` is the rank that fails first, None where that is
    chance. A silent fault raises nothing: ``right`` is what the ranks should return. ``says`` is what they print, or
    raise below the first line, with "…" as above. ``in_folder`` lets them run in a folder of their own, which goes
    afterwards.
    """

    name: str
    category: str
    did: str
    sees: Mapping[int, str] | str
    cause: str
    broken: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    root: int | None = 0
    right: tuple[Any, ...] | None = None
    says: str = ""
    in_folder: bool = False
    fix: str = ""
    repaired: Callable[[], Any] | None = None
    needs: Callable[[], str] = str
    recorded: str = ""
    recorded_in: str = ""

    @property
    def silent(self) -> bool:
        """Whether it makes wrong numbers and no error."""
        return self.right is not None

    @property
    def source(self) -> str:
        """The lines that break."""
        return _source(self.broken)

    @property
    def repaired_source(self) -> str:
        """The lines that do not."""
        return _source(self.repaired) if self.repaired else ""

    def expected(self, rank: int) -> str:
        """What this rank is expected to see."""
        return self.sees if isinstance(self.sees, str) else self.sees[rank]

    @property
    def said(self) -> list[str]:
        """What is said besides, if that is where the cause stands."""
        return [f"and says: {self.says}"] if self.says else []

    @property
    def elsewhere(self) -> list[str]:
        """What was recorded on another machine, if anything was."""
        return [f"recorded ({self.recorded_in}): {self.recorded}"] if self.recorded else []

    def __str__(self) -> str:
        told = self.elsewhere if self.needs() else []
        broken = [f"{self.name}: {self.did}", _indented(self.source), *told]
        return "\n".join([*broken, f"cure: {self.fix}", _indented(self.repaired_source)])

    __repr__ = __str__

    def run(self, repaired: bool = False, **options: Any) -> Seen:
        """Run it, or its cure, on real ranks. ``options`` are those of ``launch``, in place of the fault's own.

        Raises ``RuntimeError`` where this machine lacks what it needs.
        """
        if lacking := self.needs():
            raise RuntimeError("\n".join([f"{self.name} cannot be run here: {lacking}", *self.elsewhere]))
        fn = _as_cell(self.repaired if repaired and self.repaired else self.broken, self.name)
        defaults = {"world_size": 2, "backend": "gloo", "timeout_s": 20.0, "threads": 1, "view": "quiet"}
        with _new_folder() if self.in_folder else contextlib.nullcontext():
            run = launch(fn, **{**defaults, **self.options, "allow_failure": True, **options})
        return Seen(self, run, repaired)


@dataclass(frozen=True)
class Seen:
    """A fault that was run: what each rank saw."""

    fault: Fault
    run: Run
    repaired: bool = False

    @property
    def by_rank(self) -> dict[int, str]:
        """What each rank saw: as the fault expects it where it does, so that it is the same each time."""
        return {rank: self._told(rank) for rank in range(self.run.world_size)}

    def _told(self, rank: int) -> str:
        seen = saw(self.run, rank)
        return self.fault.expected(rank) if not self.repaired and fits(self.fault.expected(rank), seen) else seen

    @property
    def as_expected(self) -> bool:
        """Whether all ranks saw what they should, and the right one failed first."""
        if self.repaired:
            return self.run.ok and self.fault.right in (None, tuple(self.run.results))
        ranks = range(self.run.world_size)
        if not all(fits(self.fault.expected(rank), saw(self.run, rank)) for rank in ranks):
            return False
        if not fits(f"…{self.fault.says}", "\n".join([self.run.output(), *(one.message for one in self.run.failures)])):
            return False
        if self.fault.silent:
            return self.run.ok and self.fault.right != tuple(self.run.results)
        return not self.run.failures or self.fault.root in (None, self.run.failures[0].rank)

    def __str__(self) -> str:
        fault, told = self.fault, [f"rank {rank}: {text}" for rank, text in self.by_rank.items()]
        if self.repaired:
            return "\n".join([f"{fault.name}, cured: {fault.fix}", _indented(fault.repaired_source), *told])
        told += fault.said
        if fault.silent:
            told.append(f"no error, but wrong: right is {', '.join(map(repr, fault.right or ()))}")
        told.append(f'cure: faults.run("{fault.name}", repaired=True)')
        return "\n".join([f"{fault.name}: {fault.did}", _indented(fault.source), *told])

    __repr__ = __str__


FAULTS: dict[str, Fault] = {}
FIELDS = ("root", "right", "says", "in_folder", "needs", "recorded", "recorded_in")  # what is no option of launch


def fault(category: str, did: str, sees: Mapping[int, str] | str, cause: str, **more: Any) -> Callable[..., Any]:
    """Decorate the function that breaks; ``more`` are fields of :class:`Fault`, and else options of ``launch``.

    The function that cures it follows, decorated by what it has become: ``@function.cured_by("how")``.
    """

    def keep(broken: Callable[[], Any]) -> Callable[[], Any]:
        name = broken.__name__.replace("_", "-")
        fields = {key: more.pop(key) for key in FIELDS if key in more}
        FAULTS[name] = Fault(name, category, did, sees, cause, broken, more, **fields)

        def cured_by(fix: str) -> Callable[..., Any]:
            def add(repaired: Callable[[], Any]) -> Callable[[], Any]:
                FAULTS[name] = replace(FAULTS[name], fix=fix, repaired=repaired)
                return repaired

            return add

        broken.cured_by = cured_by  # type: ignore[attr-defined]
        return broken

    return keep


def saw(run: Run, rank: int) -> str:
    """What a rank saw, in a line: a value, an exception, a signal, or where it hung."""
    if rank in run.returned:
        return f"returns {run.returned[rank]!r}"
    failure = next(failure for failure in run.failures if failure.rank == rank)
    if failure.role == "stopped":
        return _stood(failure)
    first_line = failure.message.strip().partition("\n")[0]
    ended = failure.signal or failure.type.startswith("exit code")
    text = failure.type if ended else f"{failure.type}: {first_line}"
    return f"echo: {text}" if failure.role == "echo" else text


def _stood(failure: Failure) -> str:
    call = failure.where.call if failure.where else ""
    if failure.type == "Stopped":
        return "echo: stopped" + (f" in {call}" if call else "")
    return "hangs" + (f" in {call}" if call else "")


def fits(expected: str, seen: str) -> bool:
    """Whether what was seen is what was expected, of which the end is not needed.

    >>> fits("hangs or ValueError: expected … shards", "ValueError: expected 4 shards, got 3")
    True
    """
    ways = (".*".join(map(re.escape, way.split("…"))) for way in expected.split(" or "))
    return any(re.match(way, seen, re.DOTALL) for way in ways)


def _indented(source: str) -> str:
    return f"\n{textwrap.indent(source, '    ')}\n"


@contextlib.contextmanager
def _new_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def _source(fn: Callable[..., Any]) -> str:
    """The function without its decorators."""
    lines = textwrap.dedent(inspect.getsource(fn)).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(("def ", "class ")))
    return "\n".join(lines[first:]).replace("_repaired(", "(", 1)


def _as_cell(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``fn`` as if it stood in a cell: it travels as text, and reports name its lines."""
    text, filename = _source(fn), f"<fault {next(_numbers)}>"
    learn([Source(filename, f"fault {name}", text)])
    namespace = dict(fn.__globals__)
    namespace["__name__"] = "__main__"
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)
    made: Callable[..., Any] = namespace[fn.__name__.removesuffix("_repaired")]
    return made
