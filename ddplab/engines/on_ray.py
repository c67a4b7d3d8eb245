"""Ranks as workers of Ray Train."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

__all__ = ["Ray", "answers", "missing"]

LOOPBACK = "127.0.0.1"  # a cluster of this machine alone is for nobody else
ANSWER_S = 3.0
SETTINGS = b"\4"  # the type of the frame with which both sides of HTTP/2, and so of gRPC, begin
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)
PLAIN_PRINT = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}  # or Ray Train would send what is printed to stderr


class Ray:
    """The cluster that this process is connected to, that of ``RAY_ADDRESS``, or a small one on this machine.

    That last one serves all launches to come, and ends with this process or by ``ray.shutdown()``.
    """

    name = "ray"

    def __init__(self, world_size: int, backend: str | None, say: Callable[[str], None]) -> None:
        try:
            import ray
            import ray.train.torch
        except ImportError as error:
            raise missing("ray", "Ray Train", error) from None
        self._backend = backend
        if not ray.is_initialized():
            say("ddplab connects to Ray, or starts one on this machine: half a minute or more, once")
            _connect(ray, world_size)
        kind = "GPU" if backend == "nccl" else "CPU"
        found = int(ray.cluster_resources().get(kind, 0))
        if found < world_size:
            fewer = f"world_size={found}" if found else "backend='gloo'"
            more = " If it is this machine alone, ray.shutdown() and a new launch start a larger one."
            raise ValueError(
                f"engine='ray': {world_size} ranks need as many {kind}s, and the cluster has {found}. "
                f"Use {fewer}, or add nodes.{more if kind == 'CPU' else ''}"
            )
        self.address: str = ray.util.get_node_ip_address()

    def run(self, world_size: int, visit: Callable[[], None]) -> None:
        """Call ``visit`` in each worker of a ``TorchTrainer``."""
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        with tempfile.TemporaryDirectory(prefix="ddplab-ray-") as folder:  # where Ray would keep checkpoints
            TorchTrainer(
                visit,
                torch_config=TorchConfig(backend=self._backend or "gloo"),
                scaling_config=ScalingConfig(num_workers=world_size, use_gpu=self._backend == "nccl"),
                run_config=RunConfig(storage_path=folder, worker_runtime_env={"env_vars": PLAIN_PRINT}),
            ).fit()


def _connect(ray: Any, world_size: int) -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or start one, with little noise."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(f"engine='ray': RAY_ADDRESS={address!r} is Ray Client's: run the notebook on a node of Ray")
    if address not in ("", "auto", "local"):
        hello = b"" if os.environ.get("RAY_USE_TLS", "0") != "0" else HELLO
        answers("ray", "RAY_ADDRESS", address, "ray start --head --port=6379", hello)
    common: Any = {"configure_logging": False, "log_to_driver": False}
    if address in ("", "local"):
        logging.getLogger("ray").setLevel(logging.ERROR)  # it would tell of the secret that it keeps in ~/.ray
        num_cpus = max(world_size, os.cpu_count() or 1)
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, _node_ip_address=LOOPBACK, **common)
        return
    try:
        ray.init(address, **common)
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"engine='ray': RAY_ADDRESS={address!r} cannot be joined ({why:.300}). "
            "If it has a token, as after `ray start --head` where ~/.ray/auth_token is: set RAY_AUTH_MODE=token before "
            "the notebook starts. If there is none: ray start --head, or unset RAY_ADDRESS to use this machine."
        ) from None


def missing(engine: str, what: str, error: ImportError) -> ValueError:
    """The error for an engine that cannot be imported."""
    return ValueError(
        f"engine={engine!r}: {what} is not installed for this Python ({error}). `make systems` makes an environment "
        f"that has it, and a kernel of it; or, in ddplab's folder: pip install -c constraints.txt -e '.[{engine}]'"
    )


def answers(engine: str, source: str, address: str, start: str, hello: bytes = b"") -> None:
    """Raise ``ValueError`` if nothing answers at ``address``, which is HOST:PORT, or something else than HTTP/2."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as link:
            link.sendall(hello)
            if hello and link.recv(9)[3:4] != SETTINGS:
                raise ValueError("what answers there is another service")
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"engine={engine!r}: nothing answers at {source}={address!r} ({error}). "
            f"Start it there ({start}), or unset {source} to use this machine."
        ) from None
