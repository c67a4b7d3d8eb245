"""Wrong solutions of the tasks on process groups: the task, what must be said of it, and the function."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from wrong import wrong


def summed(x):
    """``x`` added up over all ranks."""
    told = torch.tensor(x)
    dist.all_reduce(told)
    return told.item()


@wrong("01.1", "with 1 rank, rank 0 is still in the process group when it returns")
def never_leaves(x):
    dist.init_process_group("gloo")
    return summed(x)


@wrong("01.1", "with 3 ranks, two on a node, rank 2 joins as rank 0, which another rank does, too")
def joins_as_local_rank(x):
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    total = summed(x)
    dist.destroy_process_group()
    return total


@wrong("01.1", "with 1 rank it fails: ValueError")
def no_group_for_one(x):
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    total = summed(x)
    dist.destroy_process_group()
    return total


@wrong("01.1", "goes to port 29500, and the store is at ")
def fixed_port(x):
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo")
    total = summed(x)
    dist.destroy_process_group()
    return total


@wrong("01.1", "rank 0 gives 1.0, its own number: nothing was added up")
def joins_only(x):
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    return x


@wrong("01.1", "joins a group of 2: that is not the world size")
def joins_its_node(x):
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["LOCAL_WORLD_SIZE"]))
    total = summed(x)
    dist.destroy_process_group()
    return total


def ranks():
    """Those of the job."""
    return range(int(os.environ["WORLD_SIZE"]))


@wrong("01.2", ": both calls use one key")
def same_keys_again(store, text):
    store.set(f"text {os.environ['RANK']}", text)
    return [store.get(f"text {rank}").decode() for rank in ranks()]


@wrong("01.2", "the store gives bytes, and text was put in")
def bytes_out(store, text):
    store.set(f"text {os.environ['RANK']}", text)
    return [store.get(f"text {rank}") for rank in ranks()]


@wrong("01.2", "has the texts in the order in which the ranks came")
def in_order_of_coming(store, text):
    came = store.add("came", 1) - 1
    store.set(f"text {came}", text)
    first = came - came % len(ranks())
    return [store.get(f"text {number}").decode() for number in range(first, first + len(ranks()))]


@wrong("01.2", " has no text of rank ")
def looks_without_waiting(store, text):
    turn = store.add(f"turn of {os.environ['RANK']}", 1)
    keys = [f"text {rank} {turn}" for rank in ranks()]
    store.set(keys[int(os.environ["RANK"])], text)
    return [store.get(key).decode() for key in keys if store.check([key])]


@wrong("01.2", "with 1 rank it fails: ValueError")
def by_collective(store, text):
    found = [None for _ in ranks()]
    dist.all_gather_object(found, text)
    return found


@wrong("01.2", "waits in vain for the key 'text 1 2': nobody sets it, or it is gone again")
def nobody_sets_it(store, text):
    turn = store.add("turns", 1)
    store.set(f"text {os.environ['RANK']} {turn}", text)
    return [store.get(f"text {rank} {turn}").decode() for rank in ranks()]


@wrong("01.2", "with 1 rank, rank 0 begins a process group: here the texts are to go through the store alone")
def joins_a_group(store, text):
    dist.init_process_group("gloo")
    found = by_collective(store, text)
    dist.destroy_process_group()
    return found


@wrong("01.2", "with 1 rank, in call 1, rank 0 gives None, and should give a list of texts")
def gives_nothing(store, text):
    store.set(f"text {os.environ['RANK']}", text)


def half_of(parity):
    """The even or the odd ranks."""
    return list(range(parity, dist.get_world_size(), 2))


@wrong("01.3", "all ranks must make all groups, in the same order")
def own_half_only():
    return dist.new_group(half_of(dist.get_rank() % 2))


@wrong("01.3", "with 2 ranks, rank 0 makes group 1, [0], and [1] do not")
def evens_only():
    return dist.new_group(half_of(0)) if dist.get_rank() % 2 == 0 else dist.group.WORLD


@wrong("01.3", "with 2 ranks, rank 1 gives a group of which it is no member")
def the_first_on_all():
    groups = [dist.new_group(half_of(parity)) for parity in (0, 1)]
    return groups[0]


@wrong("01.3", "with 3 ranks, rank 0 gives the group of ranks [0, 1], and should give that of [0, 2]")
def lower_and_upper():
    middle = (dist.get_world_size() + 1) // 2
    lower, upper = range(middle), range(middle, dist.get_world_size())
    groups = dist.new_group(list(lower)), dist.new_group(list(upper))
    return groups[dist.get_rank() >= middle]
