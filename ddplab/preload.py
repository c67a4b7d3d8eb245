"""What the forkserver imports once, so that no rank has to: all that a distributed job pulls in."""

import gc
import importlib
import os
import signal
import warnings

MODULES = [
    "ddplab.worker",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.rpc",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.profiler",
    "torch.utils.data.distributed",
    "torchvision",
]

if __name__ == "ddplab.preload":
    # An interrupt of the cell ends a forkserver that still imports, without a word; the next launch starts another.
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception:
            continue  # a job that needs it will say so in its own rank
# The ranks share these pages with the forkserver; a collection would touch, and so copy, all of them.
gc.collect()
gc.freeze()
