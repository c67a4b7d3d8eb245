"""Collectives played by a rank with small numbers, and told as values. Runs in the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["COLLECTIVES", "exchange", "ring_all_reduce"]


def exchange(name: str, op: str, src: int, dst: int) -> dict[str, Any]:
    """Play collective ``name`` of ``COLLECTIVES`` on this rank, whose element i is 10 rank + i + 1.

    From ten ranks on it is 100 rank + i + 1. Gives lists: "before" and "after" with the elements of this
    rank; "before from" and "after from" with the ranks whose data is in each; and the "call". To know
    whose data it is, the collective is played again with one bit for each rank: that is what it did,
    not what it should do.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    call, num_elements = COLLECTIVES[name]
    values = _numbers(num_elements or world_size)
    before, after = _play(name, values.float() if op == "AVG" else values, op, src, dst)
    bits_before, bits_after = _play(name, torch.full_like(values, _bit(rank)), "BOR", src, dst)
    return {
        "before": before.tolist(),
        "after": after.tolist(),
        "before from": _owners(bits_before),
        "after from": _owners(bits_after),
        "call": call.format(op=op, src=src, dst=dst),
    }


def ring_all_reduce() -> list[dict[str, Any]]:
    """Sum over the ranks: each sends to the next rank and receives from the one before, again and again.

    A rank has one chunk for each rank, of one number: chunk c is 10 rank + c + 1, as in ``exchange``. In
    the first world_size - 1 steps a rank adds what it receives, in as many more it copies it. Gives a
    dict for the start and for each step: "chunks", "from" (the ranks whose numbers are in each chunk;
    their bits travel with the numbers) and "received" (the chunk that came; None at the start).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = _numbers(world_size)
    bits = torch.full_like(chunks, _bit(rank))
    states: list[dict[str, Any]] = [{"chunks": chunks.tolist(), "from": _owners(bits), "received": None}]
    for step in range(2 * (world_size - 1)):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        number, bit = _pass_on(chunks[outgoing], bits[outgoing])
        adds = step < world_size - 1
        chunks[incoming] = chunks[incoming] + number if adds else number
        bits[incoming] = bits[incoming] | bit if adds else bit
        states.append({"chunks": chunks.tolist(), "from": _owners(bits), "received": incoming})
    return states


def _pass_on(*mine: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arrived = torch.zeros(len(mine), dtype=torch.int64)
    sending = dist.isend(torch.stack(mine), dst=(rank + 1) % world_size)
    dist.recv(arrived, src=(rank - 1) % world_size)
    if sending is not None:
        sending.wait()
    return arrived


def _numbers(size: int) -> Tensor:
    return torch.arange(1, size + 1) + (10 if dist.get_world_size() < 10 else 100) * dist.get_rank()


def _bit(rank: int) -> int:
    return 1 << rank if rank < 63 else -(1 << 63)  # the sign is the last of 64 bits


def _owners(bits: Tensor) -> list[list[int]]:
    return [[rank for rank in range(64) if mask >> rank & 1] for mask in bits.tolist()]


def _play(name: str, x: Tensor, op: str, src: int, dst: int) -> tuple[Tensor, Tensor]:
    """Call the collective on ``x``; give what this rank held before, and what it holds after."""
    rank, before, how = dist.get_rank(), x.clone(), {"op": getattr(dist.ReduceOp, op)}
    mine, parts = x.new_zeros(1), [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    match name:
        case "broadcast":
            before *= rank == src
            dist.broadcast(x.copy_(before), src=src)
        case "scatter":
            dist.scatter(mine, list(x.split(1)) if rank == src else None, src=src)
            return x if rank == src else x[:0], mine
        case "gather":
            dist.gather(x, parts if rank == dst else None, dst=dst)
            return x, torch.cat(parts) if rank == dst else x[:0]
        case "all_gather":
            dist.all_gather(parts, x)
            return x, torch.cat(parts)
        case "reduce":
            dist.reduce(x, dst=dst, **how)
        case "all_reduce":
            dist.all_reduce(x, **how)
        case "reduce_scatter":
            dist.reduce_scatter(mine, list(x.split(1)), **how)
            return x, mine
        case "all_to_all":
            parts = [torch.zeros_like(mine) for _ in parts]
            dist.all_to_all(parts, list(x.split(1)))
            return x, torch.cat(parts)
        case "send" if rank == src:
            dist.send(x, dst=dst)
        case "send" if rank == dst:
            dist.recv(x, src=src)
    return before, x


# Name: the call in words, and the elements of a rank's tensor (0: one for each rank).
COLLECTIVES = {
    "broadcast": ("broadcast(x, src={src})", 3),
    "scatter": ("scatter(y, list_of_x, src={src})", 0),
    "gather": ("gather(x, list_of_y, dst={dst})", 1),
    "all_gather": ("all_gather(list_of_y, x)", 1),
    "reduce": ("reduce(x, dst={dst}, op={op})", 3),
    "all_reduce": ("all_reduce(x, op={op})", 3),
    "reduce_scatter": ("reduce_scatter(y, list_of_x, op={op})", 0),
    "all_to_all": ("all_to_all(list_of_y, list_of_x)", 0),
    "send": ("send(x, dst={dst}) on rank {src}, recv(x, src={src}) on rank {dst}", 3),
}
