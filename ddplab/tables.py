"""A run as rows: the values of the ranks side by side, for the eye and for a screen reader."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddplab.run import safe_repr

if TYPE_CHECKING:
    from ddplab.run import Run

__all__ = ["activity", "summary", "to_html", "to_text"]

Rows = Sequence[dict[str, Any]]
MAX_CELL = 120


def summary(run: Run) -> Rows:
    """One row per rank: ``rank``, ``outcome`` and ``value`` (what it returned, or why it failed)."""
    failed = {failure.rank: failure for failure in run.failures}
    rows = []
    for rank in range(run.world_size):
        if failure := failed.get(rank):
            first = " first" if failure.role == "root" else ""
            outcome = "stopped" if failure.role == "stopped" else f"failed{first}"
            rows.append({"rank": rank, "outcome": outcome, "value": str(failure)})
        elif rank in run.returned:
            rows.append({"rank": rank, "outcome": "returned", "value": safe_repr(run.returned[rank])})
        else:
            rows.append({"rank": rank, "outcome": "did not start", "value": ""})
    return rows


def activity(run: Run) -> Rows:
    """One row per rank, of a training that called ``log(loss=...)``: what it did, in numbers.

    ``rank``, ``outcome``, ``steps`` (how many losses it logged), ``first loss`` and ``last loss`` ("" if it
    logged none), and ``printed lines``.
    """
    rows = []
    for row in summary(run):
        rank = row["rank"]
        losses = [f"{metric.value:.3f}" for metric in run.metrics if (metric.rank, metric.name) == (rank, "loss")]
        first, last = (losses[0], losses[-1]) if losses else ("", "")
        lines = sum(getattr(line, "num_lines", 1) for line in run.lines(rank))
        told = {"steps": len(losses), "first loss": first, "last loss": last, "printed lines": lines}
        rows.append({"rank": rank, "outcome": row["outcome"], **told})
    return rows


def to_text(rows: Rows) -> str:
    """The rows as aligned text.

    >>> print(to_text([{"rank": 0, "value": "1.5"}, {"rank": 10, "value": ""}]))
    rank  value
       0  1.5
      10
    """
    if not rows:
        return ""
    texts = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    widths = [max(len(text[column]) for text in texts) for column in range(len(texts[0]))]
    numeric = [all(isinstance(row[name], int | float) for row in rows) for name in rows[0]]
    lines = (
        "  ".join(
            f"{cell:>{w}}" if right else f"{cell:<{w}}" for cell, w, right in zip(text, widths, numeric, strict=True)
        )
        for text in texts
    )
    return "\n".join(line.rstrip() for line in lines)


def to_html(rows: Rows, caption: str = "") -> str:
    """The rows as an HTML table."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{html.escape(_short(v))}</td>' for v in row.values()) + "</tr>"
        for row in rows
    )
    title = f'<caption style="text-align:left;white-space:nowrap">{html.escape(caption)}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."
