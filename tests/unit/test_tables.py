"""A run as rows."""

from __future__ import annotations

from ddplab import events as ev
from ddplab import tables
from ddplab.run import Run, Spec

SPEC = Spec("train", 3, "gloo", "gloo was asked for", "spawn", 60.0, 0, 1)


def test_activity_counts_what_each_rank_logged_and_printed() -> None:
    told = (
        ev.Metric(0, 0.1, 0, "loss", 2.0),
        ev.Metric(1, 0.1, 0, "loss", 3.0),
        ev.Metric(0, 0.2, 1, "accuracy", 0.5),
        ev.Metric(0, 0.3, 1, "loss", 1.23456),
        ev.Line(0, 0.4, "stdout", "done"),
        ev.Omitted(0, 0.5, "stdout", 7),
        ev.Line(1, 0.5, "stderr", "careful"),
        ev.Result(0, 0.6, None),
        ev.Failed(1, 0.7, "ValueError", "no", "", None),
        ev.Result(2, 0.8, None),
    )
    assert tables.to_text(tables.activity(Run(SPEC, told, 1.0))).splitlines() == [
        "rank  outcome       steps  first loss  last loss  printed lines",
        "   0  returned          2  2.000       1.235                  8",
        "   1  failed first      1  3.000       3.000                  1",
        "   2  returned          0                                     0",
    ]
