"""Wrong solutions of the tasks on collectives: the task, what must be said of it, and the function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong import wrong


def others():
    """All ranks but this."""
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


@wrong("02.1", "the ranks call broadcast: here only messages")
def calls_broadcast(x, src):
    dist.broadcast(x, src=src)


@wrong("02.1", "with 2 ranks and src=1, rank 1 has lost its own numbers")
def source_is_rank_0(x, src):
    if dist.get_rank() == 0:
        for other in others():
            dist.send(x, dst=other)
    else:
        dist.recv(x, src=0)


@wrong("02.1", "with 2 ranks and src=1, x on rank 0 is what it was: nothing was received into it")
def received_into_a_copy(x, src):
    if dist.get_rank() == src:
        for other in others():
            dist.send(x, dst=other)
    else:
        y = torch.empty_like(x)
        dist.recv(y, src=src)
        x = y


@wrong("02.1", "with 1 rank it fails: ValueError")
def sends_to_itself(x, src):
    if dist.get_rank() == src:
        for other in range(dist.get_world_size()):
            dist.send(x, dst=other)
    else:
        dist.recv(x, src=src)


@wrong("02.1", "with 3 ranks it fails: rank 0 is left alone in recv from rank 1")
def sends_to_the_next_only(x, src):
    if dist.get_rank() == src:
        dist.send(x, dst=(src + 1) % dist.get_world_size()) if others() else None
    else:
        dist.recv(x, src=src)


@wrong("02.1", "x on rank 0 is what it was: irecv only begins, and wait() is missing")
def begins_only(x, src):
    if dist.get_rank() != src:
        dist.irecv(x, src=src)
    for other in others() if dist.get_rank() == src else ():
        dist.send(x, dst=other)


@wrong("02.1", "with 1 rank, rank 0 sends to itself")
def begins_to_send_to_itself(x, src):
    if dist.get_rank() == src:
        for work in [dist.isend(x, dst=other) for other in range(dist.get_world_size())]:
            work.wait()
    else:
        dist.recv(x, src=src)


def lengths_of_all(x):
    """How many numbers each rank has."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    return [int(size) for size in sizes]


def padded_parts(x, length):
    """The numbers of all ranks, with zeros behind them."""
    padded = torch.zeros(length, dtype=x.dtype)
    padded[: len(x)] = x[:length]
    parts = [torch.zeros_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return parts


@wrong("02.2", "gives 10 numbers: the padding is still among them")
def padding_left(x):
    return torch.cat(padded_parts(x, max(lengths_of_all(x))))


@wrong("02.2", "rank 0 lacks the 0: padding is told by lengths, not by values")
def zeros_are_padding(x):
    found = torch.cat(padded_parts(x, max(lengths_of_all(x))))
    return found[found != 0]


@wrong("02.2", "longer ones were cut to the shorter")
def cut_to_the_shortest(x):
    return torch.cat(padded_parts(x, min(lengths_of_all(x))))


@wrong("02.2", "gives [-1, 0]: every rank is to have those of all")
def on_the_last_rank_only(x):
    found = [None] * dist.get_world_size() if not dist.get_rank() else None
    dist.gather_object(x, found)
    return x if found is None or len(found) == 2 else torch.cat(found)


@wrong("02.2", "gives torch.float32, and whole numbers")
def floats(x):
    lengths = lengths_of_all(x)
    parts = padded_parts(x.float(), max(lengths))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


@wrong("02.2", "with 2 ranks it fails: Gloo aborts when the ranks give one collective different sizes")
def own_length_for_all(x):
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def pass_on(outgoing, arrived, way=1):
    """Send to the next, and receive from the one before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    works = dist.isend(outgoing, (rank + way) % world_size), dist.irecv(arrived, (rank - way) % world_size)
    for work in works:
        work.wait()


@wrong("02.3", "with 3 ranks and 12 numbers, rank 0 sends 192 bytes for 96, and 2(N - 1) chunks are 128")
def everything_to_everybody(x):
    mine, arrived = x.clone(), torch.empty_like(x)
    for way in range(1, dist.get_world_size()):
        pass_on(mine, arrived, way)
        x += arrived


@wrong("02.3", "rank 0 sends 192 bytes for 96")
def all_by_rank_0(x):
    arrived = torch.empty_like(x)
    if dist.get_rank():
        dist.send(x, dst=0)
        dist.recv(x, src=0)
        return
    for other in others():
        dist.recv(arrived, src=other)
        x += arrived
    for other in others():
        dist.send(x, dst=other)


def ring_steps(x, num_steps, keep_from, shift=0):
    """The steps of a ring all-reduce, or not quite."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for step in range(num_steps):
        mine = chunks[(rank - step - 1 + shift) % world_size]
        arrived = torch.empty_like(chunks[(rank - step - 1) % world_size])
        pass_on(chunks[(rank - step) % world_size], arrived)
        if step < keep_from:
            mine += arrived[: len(mine)]
        else:
            mine.copy_(arrived)


@wrong("02.3", "with 2 ranks and 10 numbers, rank 0 has 5 of 10 sums: x[0] lacks the number of rank 1")
def reduce_scatter_only(x):
    ring_steps(x, dist.get_world_size() - 1, 99)


@wrong("02.3", "with 2 ranks and 10 numbers, x[0] on rank 0 has the number of rank 0 2 times")
def adds_to_the_end(x):
    ring_steps(x, 2 * (dist.get_world_size() - 1), 99)


@wrong("02.3", "with 2 ranks and 10 numbers, x[0] on rank 0 is 13002: numbers from another place were added to it")
def adds_to_the_wrong_chunk(x):
    world_size = dist.get_world_size()
    ring_steps(x, 2 * (world_size - 1), world_size - 1, shift=1)


@wrong("02.3", "with 2 ranks and 10 numbers, x on rank 0 is what it was: the sum must be in x itself")
def sums_in_a_copy(x):
    y = x.clone()
    ring_steps(y, 2 * (dist.get_world_size() - 1), dist.get_world_size() - 1)
    return y


@wrong("02.3", "with 2 ranks and 10 numbers, x[0] on rank 0 is the mean, not the sum")
def averages(x):
    ring_steps(x, 2 * (dist.get_world_size() - 1), dist.get_world_size() - 1)
    x /= dist.get_world_size()


@wrong("02.3", "with 2 ranks it does not end: ")
def everybody_sends_first(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, arrived = x.clone(), torch.empty_like(x)
    for _ in range(world_size - 1):
        dist.send(mine, dst=(rank + 1) % world_size)
        dist.recv(arrived, src=(rank - 1) % world_size)
        x += arrived


@wrong("02.3", "the ranks call all_reduce: here only messages")
def calls_all_reduce(x):
    dist.all_reduce(x)


@wrong("02.3", "with 2 ranks and 10 numbers, rank 0 sends no message: here only send and recv, isend and irecv count")
def past_the_functions(x):
    dist.group.WORLD.allreduce([x]).wait()


@wrong("02.4", "rank 0 computes only when the all-reduce has ended: nothing runs meanwhile")
def one_after_the_other(gradient, compute):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size(), compute()


@wrong("02.4", "rank 0 computes before it has called all_reduce: nothing travels meanwhile")
def computes_first(gradient, compute):
    result = compute()
    dist.all_reduce(gradient, async_op=True).wait()
    return gradient / dist.get_world_size(), result


@wrong("02.4", "with 2 ranks, rank 0's gradient is the sum, not the mean")
def sums(gradient, compute):
    work = dist.all_reduce(gradient, async_op=True)
    result = compute()
    work.wait()
    return gradient, result


@wrong("02.4", "with 2 ranks, rank 0 gives its own gradient: nobody waits for the sum")
def never_waits(gradient, compute):
    gradient /= dist.get_world_size()
    dist.all_reduce(gradient, async_op=True)
    return gradient * 1, compute()


@wrong("02.4", "rank 0 gives its own gradient: it is read too early, or another tensor was reduced")
def reduces_a_copy(gradient, compute):
    work = dist.all_reduce(gradient / dist.get_world_size(), async_op=True)
    result = compute()
    work.wait()
    return gradient, result


@wrong("02.4", "rank 0 gives tensor([ 6., 12.]), and should give a tensor and what compute gave")
def forgets_the_result(gradient, compute):
    work = dist.all_reduce(gradient, async_op=True)
    compute()
    work.wait()
    return gradient / dist.get_world_size()


@wrong("02.4", "with 1 rank, rank 0 calls compute 2 times, not once")
def computes_twice(gradient, compute):
    work = dist.all_reduce(gradient, async_op=True)
    compute()
    work.wait()
    return gradient / dist.get_world_size(), compute()
