"""How often ``explain`` is right on public reports: ``python tests/benchmarks/bench_explain.py``.

``reports.jsonl`` holds the texts, their category and the cause, as an id of the catalogue (an id that is not there
counts as wrong). Rows whose id has a SHA-1 that 3 divides were kept aside until the first rules were written.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddplab.explanation import explain

REPORTS = Path(__file__).with_name("reports.jsonl")


class Judged(NamedTuple):
    """A report, what it is and what ``explain`` said."""

    id: str
    held_out: bool
    category: str
    cause: str
    said_category: str
    said_cause: str


def judged() -> Iterator[Judged]:
    """Every report with the answer."""
    for line in REPORTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        told = explain(row["exact_message"])
        held_out = int(hashlib.sha1(row["id"].encode()).hexdigest(), 16) % 3 == 0
        yield Judged(row["id"], held_out, row["category"], row["cause"], told.category or "unknown", told.id)


def accuracy(rows: list[Judged]) -> tuple[float, float]:
    """The shares of right categories and of right causes."""
    categories = sum(row.category == row.said_category for row in rows)
    return categories / len(rows), sum(row.cause == row.said_cause for row in rows) / len(rows)


def main() -> None:
    """Print the accuracies, the confusion table and the wrong answers."""
    rows = list(judged())
    for name, part in (("all", rows), *((str(h), [r for r in rows if r.held_out == h]) for h in (False, True))):
        category, cause = accuracy(part)
        title = {"False": "written from", "True": "kept aside"}.get(name, name)
        print(f"{title:14} {len(part):4} reports   category {category:6.1%}   cause {cause:6.1%}")
    print("\nreports by category (down) and answer (across)")
    names = sorted({row.category for row in rows} | {row.said_category for row in rows})
    counts = Counter((row.category, row.said_category) for row in rows)
    print(" " * 20 + "".join(f"{name[:9]:>10}" for name in names) + "     cause")
    for name in names:
        mine = [row for row in rows if row.category == name]
        right = f"{accuracy(mine)[1]:10.0%}" if mine else ""
        print(f"{name:20}" + "".join(f"{counts[name, other] or '':>10}" for other in names) + right)
    print("\nwrong")
    for row in rows:
        if (row.category, row.cause) != (row.said_category, row.said_cause):
            print(f"  {row.id}: {row.category}, {row.cause}; said {row.said_category}, {row.said_cause or 'unknown'}")


if __name__ == "__main__":
    main()
