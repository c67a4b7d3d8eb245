"""Tasks on collectives."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from ddplab import tracing
from ddplab.exercises.engine import Attempt, Wrong, on_ranks, task


def by_hand(attempt, *args, world_size, trial):
    """What ``trial`` gives on each rank, and where that was, if the ranks have called no collective."""
    given = attempt.results(*args, world_size=world_size, trial=trial)
    where = on_ranks(world_size)
    if called := [call.name for call in attempt.run.collectives if call.number and call.name != "barrier"]:
        raise Wrong(f"{where}, the ranks call {called[0]}: here only messages from one rank to one other are allowed")
    return given, where


def noted_sends():
    """A list to which each message of this rank will add its bytes."""
    sizes, send = [], dist.ProcessGroup.send

    def noted(group, tensors, to, *args):
        if to == dist.get_rank():
            raise Wrong(f"{on_ranks(dist.get_world_size())}, rank {to} sends to itself")
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return send(group, tensors, to, *args)

    dist.ProcessGroup.send = noted
    return sizes


def say(what):
    """Let the other ranks hear ``what``, through the store, which is no collective."""
    dist.distributed_c10d._get_default_store().set(f"{what} {dist.get_rank()}", "yes")


def hears(what, ranks, seconds):
    """Whether each of these ranks has said it, or says it within so many seconds."""
    with contextlib.suppress(dist.DistStoreError):
        keys = [f"{what} {rank}" for rank in ranks]
        dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=seconds))
        return True


def stay_together():
    """Who leaves would end what still goes on: wait for all, but not for long."""
    say("back")
    hears("back", range(dist.get_world_size()), 0.5)


@task("02.1", "Broadcast by hand")
def broadcast(attempt: Attempt) -> None:
    """``broadcast(x, src)`` leaves the numbers of rank ``src`` in ``x`` on every rank, by messages alone."""
    for world_size, src in ((1, 0), (2, 1), (3, 1)):
        given, where = by_hand(attempt, src, world_size=world_size, trial=spreading)
        if given[src][1] != given[src][0]:
            raise Wrong(f"{where} and src={src}, rank {src} has lost its own numbers: x there is {given[src][1]}")
        for rank, (before, after) in enumerate(given):
            if after == given[src][0]:
                continue
            if after == before:
                called = {call.name for call in attempt.run.collectives if call.rank == rank}
                begun = "irecv" in called and "wait of irecv" not in called
                told = "irecv only begins, and wait() is missing" if begun else "nothing was received into it"
                raise Wrong(f"{where} and src={src}, x on rank {rank} is what it was: {told}")
            of = [other for other, (numbers, _) in enumerate(given) if numbers == after]
            told = f"has the numbers of rank {of[0]}" if of else f"is {after}, and should be {given[src][0]}"
            raise Wrong(f"{where} and src={src}, x on rank {rank} {told}")


def spreading(fn, src):
    """``x`` before and after ``fn(x, src)``."""
    x = torch.arange(1, 7).reshape(2, 3) * 10 ** dist.get_rank()
    before = x.tolist()
    noted_sends()
    others = [rank for rank in range(dist.get_world_size()) if rank != src]
    if dist.get_rank() == src and others:
        hears("back", others, 0.1)  # who does not wait for the numbers comes back without them
    fn(x, src)
    after = x.tolist()
    stay_together()
    return before, after


@task("02.2", "Gather unequal lengths")
def gather(attempt: Attempt) -> None:
    """``gather(x)`` gives the numbers of all ranks, one after another, on every rank; ranks have more or fewer."""
    for lengths in ((3,), (2, 5), (4, 1, 3)):
        world_size = len(lengths)
        parts = [[(i % 3 - 1) * 10**rank for i in range(length)] for rank, length in enumerate(lengths)]
        given = attempt.results(parts, world_size=world_size, trial=putting_together)
        where = f"with {' + '.join(map(str, lengths))} numbers {on_ranks(world_size).replace('with', 'on')}"
        wanted = [number for part in parts for number in part]
        for rank, (found, dtype) in enumerate(given):
            if found == wanted and dtype == "torch.int64":
                continue
            if found == wanted:
                raise Wrong(f"{where}, rank {rank} gives {dtype}, and whole numbers (torch.int64) were gathered")
            if found == parts[rank] or not found:
                raise Wrong(f"{where}, rank {rank} gives {found or 'nothing'}: every rank is to have those of all")
            if gone := [value for value in set(wanted) if found == [one for one in wanted if one != value]]:
                raise Wrong(f"{where}, rank {rank} lacks the {gone[0]}: padding is told by lengths, not by values")
            if len(found) == world_size * max(lengths) > len(wanted):
                raise Wrong(f"{where}, rank {rank} gives {len(found)} numbers: the padding is still among them")
            if sorted(found) == sorted(wanted):
                raise Wrong(f"{where}, rank {rank} gives {found}: all are there, and not in the order of the ranks")
            if len(found) < len(wanted):
                raise Wrong(f"{where}, rank {rank} gives only {len(found)}: longer ones were cut to the shorter")
            raise Wrong(f"{where}, rank {rank} gives {found}, and should give {wanted}")


def putting_together(fn, parts):
    """The numbers that ``fn`` gives for those of this rank, and their dtype."""
    found = fn(torch.tensor(parts[dist.get_rank()]))
    if not isinstance(found, torch.Tensor):
        raise Wrong(f"rank {dist.get_rank()} gives {found!r:.60}, and should give one tensor")
    return found.tolist(), str(found.dtype)


@task("02.3", "Ring all-reduce")
def ring(attempt: Attempt) -> None:
    """``all_reduce(x)`` adds up in place, and no rank sends more than 2(N - 1) of the N chunks of ``x``."""
    for numel, world_size in ((4, 1), (10, 2), (12, 3), (7, 3)):
        given, where = by_hand(attempt, numel, world_size=world_size, trial=counted)
        where = f"{where} and {numel} numbers"
        for rank, (before, after, _) in enumerate(given):
            if world_size > 1 and after == before:
                raise Wrong(f"{where}, x on rank {rank} is what it was: the sum must be in x itself")
            raise_for(where, rank, after, world_size)
        chunk_bytes = -(-numel // world_size) * 8
        for rank, (*_, sent_bytes) in enumerate(given):
            if world_size > 1 and not sent_bytes:
                raise Wrong(f"{where}, rank {rank} sends no message: here only send and recv, isend and irecv count")
            if sent_bytes > 2 * (world_size - 1) * chunk_bytes:
                bound = f"2(N - 1) chunks are {2 * (world_size - 1) * chunk_bytes}"
                raise Wrong(f"{where}, rank {rank} sends {sent_bytes} bytes for {numel * 8}, and {bound}")


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # x of rank r is these, times 1000 to the power of r


def raise_for(where, rank, after, world_size):
    """Say whose numbers are missing in the sums, or are there more than once."""
    parts = [[round(value) // 1000**r % 1000 for r in range(world_size)] for value in after]
    complete = sum(part == [prime] * world_size for prime, part in zip(PRIMES, parts, strict=False))
    for place, (prime, part) in enumerate(zip(PRIMES, parts, strict=False)):
        at = f"x[{place}] on rank {rank}"
        if after[place] == prime * sum(1000**r for r in range(world_size)) / world_size != prime:
            raise Wrong(f"{where}, {at} is the mean, not the sum")
        if any(one % prime for one in part):
            raise Wrong(f"{where}, {at} is {after[place]:g}: numbers from another place were added to it")
        if more := [r for r in range(world_size) if part[r] > prime]:
            raise Wrong(f"{where}, {at} has the number of rank {more[0]} {part[more[0]] // prime} times")
        if less := [r for r in range(world_size) if part[r] < prime]:
            told = f"x[{place}] lacks the number of rank {less[0]}"
            raise Wrong(f"{where}, rank {rank} has {complete} of {len(after)} sums: {told}")


def counted(fn, numel):
    """``x`` before and after ``fn(x)``, and how many bytes this rank sent for that."""
    sizes = noted_sends()
    x = torch.tensor(PRIMES[:numel], dtype=torch.float64) * 1000 ** dist.get_rank()
    before = x.tolist()
    fn(x)
    return before, x.tolist(), sum(sizes)


@task("02.4", "Compute meanwhile")
def overlap(attempt: Attempt) -> None:
    """``step(gradient, compute)`` gives the mean of ``gradient`` and ``compute()``, which runs while that travels."""
    for world_size in (1, 2, 3):
        given = attempt.results(world_size=world_size, trial=late_but_for_rank_0)
        where = on_ranks(world_size)
        values = [[(r + 1) * one for r in range(world_size)] for one in (6.0, 12.0)]
        mean, total = [sum(of) / world_size for of in values], [sum(of) for of in values]
        for rank, (_, _, calls, began, late) in enumerate(given):
            if calls != 1:
                raise Wrong(f"{where}, rank {rank} calls compute {calls} times, not once")
            if not began:
                raise Wrong(f"{where}, rank {rank} computes before it has called all_reduce: nothing travels meanwhile")
            if late:
                raise Wrong(f"{where}, rank 0 computes only when the all-reduce has ended: nothing runs meanwhile")
        for rank, (gradient, result, *_) in enumerate(given):
            own = [of[rank] for of in values]
            if gradient != mean and gradient in (own, [one / world_size for one in own]):
                waited = any(call.since_s is not None and call.rank == rank for call in attempt.run.collectives)
                told = "it is read too early, or another tensor was reduced" if waited else "nobody waits for the sum"
                raise Wrong(f"{where}, rank {rank} gives its own gradient: {told}")
            if gradient == total != mean:
                raise Wrong(f"{where}, rank {rank}'s gradient is the sum, not the mean")
            if gradient != mean:
                told = "it was used while the all-reduce was under way"
                raise Wrong(f"{where}, rank {rank}'s gradient is {gradient}, and the mean is {mean}: {told}")
            if result != rank:
                raise Wrong(f"{where}, rank {rank} gives {result!r} for what compute gave, which was {rank}")


def late_but_for_rank_0(fn):
    """What ``fn`` gives, how often it computed, whether a collective had begun then, and whether one had ended.

    The other ranks come only when rank 0 has computed, or does not seem to.
    """
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    calls, began, late = 0, False, False

    def compute():
        nonlocal calls, began, late
        calls, began = calls + 1, any(call.number for call in tracing.calls(rank, 0.0))
        late = rank == 0 and bool(others) and hears("not before", others, 0.001)
        say("computed")
        return rank

    if rank and hears("computed", [0], 1.0):
        hears("back", [0], 0.2)  # a rank 0 that does not wait has time to go on
    elif rank:
        say("not before")
    match fn(torch.tensor([6.0, 12.0]) * (rank + 1), compute):
        case (torch.Tensor() as gradient, result):
            gradient = gradient.tolist()
        case other:
            raise Wrong(f"rank {rank} gives {other!r:.60}, and should give a tensor and what compute gave")
    stay_together()
    return gradient, result, calls, began, late
