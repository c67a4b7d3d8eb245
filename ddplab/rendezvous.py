"""Where ranks meet: a store that the launcher holds, on the loopback interface only.

The launcher binds the port itself and hands the bound socket to ``TCPStore``, so no other process
can take the port in between, and nothing listens on the network. The ranks see what torchrun sets,
so ``init_process_group("gloo")`` and ``init_method="env://"`` work unchanged.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["environment", "open_store"]

LOOPBACK = "127.0.0.1"
_INTERFACE = {"linux": "lo", "darwin": "lo0"}


def open_store() -> TCPStore:
    """A store that listens on a free loopback port, for as long as the object lives.

    >>> store = open_store()
    >>> store.set("greeting", "hello")
    >>> (store.host, store.get("greeting"))
    ('127.0.0.1', b'hello')
    """
    from torch.distributed import TCPStore

    if sys.platform == "win32":  # where TCPStore takes no socket; it would listen on all interfaces
        return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port = listener.getsockname()[1]
        listener.listen(1024)
        # The store owns the descriptor from here on and closes it.
        # The time-out bounds what its own client waits for here, where no descriptor is left to connect with.
        return TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=datetime.timedelta(seconds=5),
        )  # fmt: skip


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables of one rank: those of torchrun on one node, and loopback for every backend."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "ddplab",
        # The launcher already serves the store: rank 0 must not try to.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "DDPLAB_RANK": rank,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if interface := _INTERFACE.get(sys.platform):
        names |= {f"{backend}_SOCKET_IFNAME": interface for backend in ("GLOO", "TP", "NCCL")}
    return {name: str(value) for name, value in names.items()}
