"""Pictures of runs: each function takes a value and gives one picture."""

from ddplab.plots.metrics import metrics
from ddplab.plots.picture import Picture, rank_style
from ddplab.plots.waiting import waiting

__all__ = ["Picture", "metrics", "rank_style", "waiting"]
