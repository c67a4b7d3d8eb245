"""Pictures of runs: each function takes a value and gives one picture."""

from ddplab.plots.agreement import agreement
from ddplab.plots.alpha_beta import fit_alpha_beta
from ddplab.plots.bandwidth import bandwidth
from ddplab.plots.buckets import buckets
from ddplab.plots.collective import collective
from ddplab.plots.gradients import gradients
from ddplab.plots.memory import memory
from ddplab.plots.metrics import metrics
from ddplab.plots.of_model import buckets_of, memory_of
from ddplab.plots.picture import Picture, rank_style
from ddplab.plots.ring import ring
from ddplab.plots.rpc import rpc
from ddplab.plots.sampler import sampler
from ddplab.plots.scaling import scaling
from ddplab.plots.timeline import timeline
from ddplab.plots.waiting import waiting

__all__ = [
    "Picture", "agreement", "bandwidth", "buckets", "buckets_of", "collective", "fit_alpha_beta", "gradients",
    "memory", "memory_of", "metrics", "rank_style", "ring", "rpc", "sampler", "scaling", "timeline", "waiting",
]  # fmt: skip
