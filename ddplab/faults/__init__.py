"""Errors to make on purpose: each a few lines that break on real ranks, and the lines that cure them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from ddplab import tables
from ddplab.catalog import CATEGORIES
from ddplab.faults.fault import FAULTS, Fault, Seen

__all__ = ["FAULTS", "Fault", "Seen", "get", "names", "run", "table"]


for _kind in ["initialisation", "communication", "mismatch", "ddp", "data", "rpc", "nccl", "launcher", "resources"]:
    importlib.import_module(f"ddplab.faults.{_kind}")  # which puts its faults into FAULTS


def names(category: str = "") -> list[str]:
    """The names of all faults, or of those of a category.

    >>> "shape-larger" in names("collective_mismatch")
    True
    """
    return [name for name, one in FAULTS.items() if category in ("", one.category)]


def get(name: str) -> Fault:
    """The fault of that name. Raises ``ValueError`` for one that there is not, and names those that are near."""
    if name not in FAULTS:
        import difflib

        near = difflib.get_close_matches(str(name), FAULTS, 3, 0.3)
        raise ValueError(f"there is no fault {name!r}; {', '.join(near) or 'faults.names() has all'}")
    return FAULTS[name]


def run(name: str, repaired: bool = False, **options: Any) -> Seen:
    """Break it, or run the cure, on real ranks; gives what each rank saw.

    ``options`` are those of ``launch``. Raises ``ValueError`` for a name that there is not, and ``RuntimeError``
    where this machine lacks what the fault needs.
    """
    return get(name).run(repaired, **options)


class Table(list[dict[str, Any]]):
    """Rows that a notebook shows as a table, and ``print`` as aligned text."""

    def _repr_html_(self) -> str:
        return tables.to_html(self)

    def __str__(self) -> str:
        return tables.to_text(self)

    __repr__ = __str__


def table(names: Iterable[str] = ()) -> Table:
    """Run faults, all by default, and give a row for each: what one did, what each rank saw, and what cures it.

    Faults that this machine cannot run have what it lacks, and what was recorded elsewhere, in place of what the
    ranks saw.
    """
    rows = Table()
    for one in map(get, names or FAULTS):
        row = {"fault": one.name, "category": CATEGORIES[one.category], "what you did": one.did}
        lacks = one.needs()
        told = [f"not run: {lacks}", *one.elsewhere] if lacks else [_told(one.run().by_rank), *one.said]
        row["what each rank saw"] = "; ".join(told)
        rows.append(row | {"cure": one.fix})
    return rows


def _told(by_rank: dict[int, str]) -> str:
    if len(set(by_rank.values())) == 1:
        return f"all: {by_rank[0]}"
    return "; ".join(f"rank {rank}: {text}" for rank, text in by_rank.items())
