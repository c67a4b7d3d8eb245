"""Ranks as workers of Ray Train."""

from __future__ import annotations

import functools
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

__all__ = ["Ray", "answers"]

LOOPBACK = "127.0.0.1"  # a cluster of this machine alone is for nobody else
ANSWER_S = 3.0
PLAIN_PRINT = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}  # or Ray Train would send what is printed to stderr


class Ray:
    """The cluster that this process is connected to, that of ``RAY_ADDRESS``, or a small one on this machine.

    That last one serves all launches to come, and ends with this process or by ``ray.shutdown()``.
    """

    name = "ray"

    def __init__(self, world_size: int, backend: str | None) -> None:
        try:
            import ray
            import ray.train.torch
        except ImportError as error:
            raise ValueError(f"engine='ray': Ray Train is not installed ({error}): pip install 'ddplab[ray]'") from None
        self._backend = backend
        if not ray.is_initialized():
            _connect(ray, world_size)
        kind = "GPU" if backend == "nccl" else "CPU"
        found = int(ray.cluster_resources().get(kind, 0))
        if found < world_size:
            raise ValueError(
                f"engine='ray': {world_size} ranks need as many {kind}s, and the cluster has {found}. Use "
                f"world_size={found}, or one that has more: ray.shutdown(), then ray.init(num_cpus={world_size})."
            )
        self.address: str = ray.util.get_node_ip_address()

    def run(self, world_size: int, visit: Callable[[], None]) -> None:
        """Call ``visit`` in each worker of a ``TorchTrainer``."""
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        with tempfile.TemporaryDirectory(prefix="ddplab-ray-") as folder:  # where Ray would keep checkpoints
            TorchTrainer(
                functools.partial(_call, visit),
                torch_config=TorchConfig(backend=self._backend or "gloo"),
                scaling_config=ScalingConfig(num_workers=world_size, use_gpu=self._backend == "nccl"),
                run_config=RunConfig(storage_path=folder, worker_runtime_env={"env_vars": PLAIN_PRINT}),
            ).fit()


def _call(visit: Callable[[], None]) -> None:
    visit()


def _connect(ray: Any, world_size: int) -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or start one, with little noise."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(f"engine='ray': RAY_ADDRESS={address!r} is Ray Client's: run the notebook on a node of Ray")
    if address not in ("", "auto", "local"):
        answers("ray", "RAY_ADDRESS", address, "ray start --head")
    common: Any = {"configure_logging": False, "log_to_driver": False}
    if address in ("", "local"):
        logging.getLogger("ray").setLevel(logging.ERROR)  # it would tell of the secret that it keeps in ~/.ray
        num_cpus = max(world_size, os.cpu_count() or 1)
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, _node_ip_address=LOOPBACK, **common)
    else:
        ray.init(address, **common)


def answers(engine: str, source: str, address: str, start: str) -> None:
    """Raise ``ValueError`` if nothing answers at ``address``, which is HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"engine={engine!r}: nothing answers at {source}={address!r} ({error}). "
            f"Start it there ({start}), or unset {source} to use this machine."
        ) from None
