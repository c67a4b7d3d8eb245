"""How often ``explain`` is right on public reports: ``python tests/benchmarks/bench_explain.py``.

``reports.jsonl`` holds the texts, their category and the cause, as an id of the catalogue (an id that is not there
counts as wrong). Rows whose id has a SHA-1 that 3 divides were kept aside until the first rules were written.
``fresh_reports.jsonl`` holds later ones, in batches: category and cause were noted before the catalogue was asked,
``first`` says how it did then ("category": that much was right), and its rules were mended only afterwards
(a cause that then got an entry of its own bears its id since).
``other_texts.jsonl`` holds what has nothing to do with it, or says little: nothing may be claimed there.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddplab.explanation import explain

FOLDER = Path(__file__).parent


class Judged(NamedTuple):
    """A report, what it is and what ``explain`` said."""

    id: str
    part: str
    category: str
    cause: str
    said_category: str
    said_cause: str
    first: str = ""


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of this folder."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def judged() -> Iterator[Judged]:
    """Every report of the collection with the answer."""
    for row in rows("reports"):
        told = explain(row["exact_message"])
        held_out = int(hashlib.sha1(row["id"].encode()).hexdigest(), 16) % 3 == 0
        part = "kept aside" if held_out else "written from"
        yield Judged(row["id"], part, row["category"], row["cause"], told.category or "unknown", told.id)


def fresh() -> Iterator[Judged]:
    """Every fresh report with the answer."""
    for row in rows("fresh_reports"):
        told, part = explain(row["text"]), f"batch {row['batch']}"
        said = told.category or "unknown", told.id
        yield Judged(row["source"], part, row["category"], row["cause"], *said, row["first"])


def claimed() -> Iterator[str]:
    """The other texts of which ``explain`` claims more than it may."""
    for row in rows("other_texts"):
        told = explain(row["text"])
        if told.known if row["should"] == "unknown" else told.certain:
            yield f"should {row['should']}, said {told.id}: {row['text'][:60]!r}"


def accuracy(rows: Sequence[Judged]) -> tuple[float, float]:
    """The shares of right categories and of right causes."""
    categories = sum(row.category == row.said_category for row in rows)
    return categories / len(rows), sum(row.cause == row.said_cause for row in rows) / len(rows)


def show(all_rows: Sequence[Judged]) -> None:
    """Print the accuracies by part, and where they were noted those of the first try."""
    parts = sorted({row.part for row in all_rows})
    for part in ["all", *parts]:
        mine = [row for row in all_rows if part in ("all", row.part)]
        category, cause = accuracy(mine)
        line = f"{part:14} {len(mine):4} reports   category {category:6.1%}   cause {cause:6.1%}"
        if mine[0].first:
            tries = Counter(row.first for row in mine)
            first = (len(mine) - tries["wrong"]) / len(mine), tries["right"] / len(mine)
            line += f"   at first: category {first[0]:4.0%}   cause {first[1]:4.0%}"
        print(line)


def confusion(all_rows: Sequence[Judged]) -> None:
    """Print which category was taken for which, and the wrong answers."""
    print("\nreports by category (down) and answer (across)")
    names = sorted({row.category for row in all_rows} | {row.said_category for row in all_rows})
    counts = Counter((row.category, row.said_category) for row in all_rows)
    print(" " * 20 + "".join(f"{name[:9]:>10}" for name in names) + "     cause")
    for name in names:
        mine = [row for row in all_rows if row.category == name]
        right = f"{accuracy(mine)[1]:10.0%}" if mine else ""
        print(f"{name:20}" + "".join(f"{counts[name, other] or '':>10}" for other in names) + right)
    print("\nwrong")
    for row in all_rows:
        if (row.category, row.cause) != (row.said_category, row.said_cause):
            print(f"  {row.id}: {row.category}, {row.cause}; said {row.said_category}, {row.said_cause or 'unknown'}")


def main() -> None:
    """Print accuracies, the confusion table and the wrong answers; then the fresh reports; then the other texts."""
    collected, later = list(judged()), list(fresh())
    show(collected)
    confusion(collected)
    print("\nfresh reports")
    show(later)
    confusion(later)
    print(f"\nother texts: {len(rows('other_texts'))}, of which too much is claimed:", *claimed(), sep="\n  ")


if __name__ == "__main__":
    main()
