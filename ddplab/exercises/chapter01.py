"""Tasks on process groups."""

import itertools
import os
import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddplab.exercises.engine import Attempt, Wrong, on_ranks, stand_in, task


@task("01.1", "Join by hand")
def join(attempt: Attempt) -> None:
    """``add_up(x)`` joins the process group that the environment tells of, adds up, and leaves the group again."""
    for world_size in (1, 2, 3):
        given = attempt.results(world_size=world_size, backend=None, trial=joining)
        where, total = on_ranks(world_size), sum(10.0**rank for rank in range(world_size))
        for rank, (value, is_in) in enumerate(given):
            if value != total:
                own = ", its own number: nothing was added up" if value == 10.0**rank else f", and the sum is {total}"
                raise Wrong(f"{where}, rank {rank} gives {value}{own}")
            if is_in:
                raise Wrong(f"{where}, rank {rank} is still in the process group when it returns: it has not left it")


def joining(fn):
    """What ``fn`` gives for 1, 10, 100, ... on two-rank nodes, and whether the rank is still in a group."""
    rank, world_size, join_group = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), dist.init_process_group
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    port = os.environ["MASTER_PORT"]

    def noted(*args, **kwargs):
        where = f"with {world_size} ranks, two on a node, rank {rank}" if world_size > 1 else "the only rank"
        if (told := kwargs.get("rank", -1)) not in (-1, rank):
            raise Wrong(f"{where} joins as rank {told}, which another rank does, too: the local rank is no rank")
        if (size := kwargs.get("world_size", -1)) not in (-1, world_size):
            raise Wrong(f"{where} joins a group of {size}: that is not the world size")
        if os.environ.get("MASTER_PORT") != port:
            raise Wrong(f"{where} goes to port {os.environ.get('MASTER_PORT')}, and the store is at {port}")
        return join_group(*args, **kwargs)

    dist.init_process_group = noted
    return fn(10.0**rank), dist.is_initialized()


@task("01.2", "A message without a collective")
def exchange(attempt: Attempt) -> None:
    """``exchange(store, text)`` gives the texts of all ranks, in rank order, each time that all ranks call it."""
    for world_size in (1, 2, 3):
        for rank, turns in enumerate(attempt.results(world_size=world_size, backend=None, trial=twice)):
            for turn, found in enumerate(turns):
                where = f"{on_ranks(world_size)}, in call {turn + 1}, rank {rank}"
                wanted, other = ([words(number, r) for r in range(world_size)] for number in (turn, 1 - turn))
                if any(isinstance(text, bytes) for text in found):
                    raise Wrong(f"{where} gives {found[0]!r}: the store gives bytes, and text was put in")
                if mixed := [r for r in range(world_size) if other[r] in found]:
                    raise Wrong(f"{where} gets what rank {mixed[0]} says in call {2 - turn}: both calls use one key")
                if sorted(map(str, found)) == wanted and found != wanted:
                    raise Wrong(f"{where} has the texts in the order in which the ranks came, not in rank order")
                if missing := [r for r in range(world_size) if wanted[r] not in found]:
                    raise Wrong(f"{where} has no text of rank {missing[0]}: it gives {found}")
                if found != wanted:
                    raise Wrong(f"{where} gives {found}, and should give {wanted}")


def words(turn, rank):
    """What a rank has to say in that call."""
    return f"rank {rank} {('is here', 'goes home')[turn]}"


def twice(fn):
    """What ``fn`` gives in two calls, to which rank 0 comes last."""
    rank, world_size, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=2))
    stand_in(fn, "init_process_group", refused)
    for turn in range(2):
        time.sleep(0.05 * (world_size - 1 - rank))
        where = f"{on_ranks(world_size)}, in call {turn + 1}, rank {rank}"
        try:
            texts = fn(store, words(turn, rank))
        except dist.DistStoreError as error:
            key = re.sub(".*keys: /?", "", str(error))
            raise Wrong(f"{where} waits in vain for the key {key!r}: nobody sets it, or it is gone again") from None
        if not isinstance(texts, list | tuple):
            raise Wrong(f"{where} gives {texts!r:.60}, and should give a list of texts")
        found.append(list(texts))
    return found


def refused(*args, **kwargs):
    """What stands in for ``init_process_group`` where the store alone is to be used."""
    where = f"{on_ranks(int(os.environ['WORLD_SIZE']))}, rank {os.environ['RANK']}"
    raise Wrong(f"{where} begins a process group: here the texts are to go through the store alone")


@task("01.3", "Even and odd")
def halves(attempt: Attempt) -> None:
    """``half()`` gives on each rank the group of the ranks that are even, or odd, like it."""
    for world_size in (2, 3, 4):
        for rank, value in enumerate(attempt.results(world_size=world_size, trial=adding_up)):
            if value != sum(10.0**other for other in range(rank % 2, world_size, 2)):
                raise Wrong(f"with {world_size} ranks, the sum in rank {rank}'s group is {value}")


def adding_up(fn):
    """The sum of 1, 10, 100, ... over the group that ``fn`` gives, once it is the right one."""
    rank, world_size, c10d = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d
    where, wanted = f"with {world_size} ranks, rank {rank}", list(range(rank % 2, world_size, 2))
    dist.new_group = c10d.new_group = compared(dist.new_group, f"with {world_size} ranks")
    group = fn()
    dist.barrier()  # so that what is said first is said of the making
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise Wrong(f"{where} gives a group of which it is no member")
    if not isinstance(group, dist.ProcessGroup):
        raise Wrong(f"{where} gives {group!r:.40}, which is no process group")
    if (members := dist.get_process_group_ranks(group)) != wanted:
        raise Wrong(f"{where} gives the group of ranks {members}, and should give that of {wanted}")
    x = torch.tensor(10.0**rank)
    dist.all_reduce(x, group=group)
    return x.item()


def compared(new_group, where):
    """``new_group``, which refuses a group that not all ranks make, or that they make in different orders."""
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    store, calls = dist.distributed_c10d._get_default_store(), itertools.count(1)

    def noted(ranks=None, *args, use_local_synchronization=False, **kwargs):
        if not use_local_synchronization:
            call, ranks = next(calls), list(everybody if ranks is None else ranks)
            keys = [f"group {call} of {other}" for other in everybody]
            store.set(keys[rank], str(ranks))
            try:
                store.wait(keys, timedelta(seconds=1))
            except dist.DistStoreError:
                absent = [other for other in everybody if not store.check([keys[other]])]
                raise Wrong(f"{where}, rank {rank} makes group {call}, {ranks}, and {absent} do not") from None
            made = [store.get(key).decode() for key in keys]
            if other := [one for one in everybody if made[one] != str(ranks)]:
                told = f"group {call} of rank {rank} is {ranks}, that of rank {other[0]} is {made[other[0]]}"
                raise Wrong(f"{where}, {told}: all ranks must make all groups, in the same order")
        return new_group(ranks, *args, use_local_synchronization=use_local_synchronization, **kwargs)

    return noted
