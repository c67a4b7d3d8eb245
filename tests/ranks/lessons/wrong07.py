"""Wrong solutions of the tasks on errors: the task, what must be said of it, and the function."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from wrong import wrong


@wrong("07.1", "has skipped batch 1 alone: rank 0 is left in that step, and waits")
def skipped_alone(num_steps, load, step):
    for number in range(num_steps):
        try:
            step(load(number))
        except ValueError:
            continue


@wrong("07.1", "makes a step without a new batch: who is not well must stop all")
def one_who_is_well_decides(num_steps, load, step):
    for number in range(num_steps):
        try:
            batch, ok = load(number), torch.tensor(1)
        except ValueError:
            batch, ok = None, torch.tensor(0)
        dist.all_reduce(ok, op=dist.ReduceOp.MAX)
        if ok:
            step(batch)


@wrong("07.1", "rank 0's bad batch ends the whole job: it is to be caught")
def not_caught(num_steps, load, step):
    for number in range(num_steps):
        step(load(number))


@wrong("07.1", "does not make step 3: skip one step, do not stop")
def stops_together(num_steps, load, step):
    for number in range(num_steps):
        try:
            batch, ok = load(number), torch.tensor(1)
        except ValueError:
            batch, ok = None, torch.tensor(0)
        dist.all_reduce(ok, op=dist.ReduceOp.MIN)
        if not ok:
            break
        step(batch)


def begin(store, name, rank, world_size):
    dist.destroy_process_group()
    keys, limit = dist.PrefixStore(name, store), timedelta(seconds=2)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=world_size, timeout=limit)


def again(num_steps, step, begin_anew):
    number = 0
    while number < num_steps:
        try:
            step(number)
            number += 1
        except RuntimeError:
            number = begin_anew(number)


@wrong("07.2", "does not make step 2: a broken group stays broken")
def same_group(num_steps, step, store, left):
    for number in range(num_steps):
        try:
            step(number)
        except RuntimeError:
            continue


@wrong("07.2", "does not make step 2: the step in which it failed must be made again")
def loses_a_step(num_steps, step, store, left):
    rank = dist.get_rank()

    def begin_anew(number):
        begin(store, f"from {number}", left().index(rank), len(left()))
        return number + 1

    again(num_steps, step, begin_anew)


@wrong("07.2", "under a name that it has used before: old keys in the store mislead it")
def one_name_for_all_groups(num_steps, step, store, left):
    rank = dist.get_rank()

    def begin_anew(number):
        begin(store, "again", left().index(rank), len(left()))
        return number

    again(num_steps, step, begin_anew)


@wrong("07.2", "rank 0 begins a group of 2, and 1 are left: it waits for one that is no more")
def waits_for_all(num_steps, step, store, left):
    def begin_anew(number):
        assert left()
        begin(store, f"from {number}", dist.get_rank(), dist.get_world_size())
        return number

    again(num_steps, step, begin_anew)


@wrong("07.2", "makes steps [0, 1, 0, 1, 2, 3, 4]: those that went well are not made again")
def begins_at_zero(num_steps, step, store, left):
    rank = dist.get_rank()

    def begin_anew(number):
        begin(store, f"from {number}", left().index(rank), len(left()))
        return 0

    again(num_steps, step, begin_anew)


@wrong("07.2", "rank 2 calls itself 2 in a group of 2: ranks are counted anew, from 0")
def old_ranks(num_steps, step, store, left):
    rank = dist.get_rank()

    def begin_anew(number):
        begin(store, f"from {number}", rank, len(left()))
        return number

    again(num_steps, step, begin_anew)


@wrong("07.2", "rank 0 ends with its peer: catch the RuntimeError of step")
def does_not_catch(num_steps, step, store, left):
    for number in range(num_steps):
        step(number)


@wrong("07.2", "with 1 rank, of which none is killed, rank 0 makes no step at all")
def nothing_at_all(num_steps, step, store, left):
    pass


@wrong("07.2", "rank 2 ends with its peer: catch the RuntimeError of step also the second time")
def survives_once(num_steps, step, store, left):
    rank, number = dist.get_rank(), 0
    try:
        for number in range(num_steps):
            step(number)
    except RuntimeError:
        begin(store, f"from {number}", left().index(rank), len(left()))
        for again_number in range(number, num_steps):
            step(again_number)


@wrong("07.2", "rank 2 looks in left() for a rank that is not there: its first one, from before, is")
def rank_of_the_last_group(num_steps, step, store, left):
    def begin_anew(number):
        begin(store, f"from {number}", left().index(dist.get_rank()), len(left()))
        return number

    again(num_steps, step, begin_anew)


@wrong("07.2", "makes a new_group, which is part of the broken one: leave that, and begin another")
def group_within_the_broken_one(num_steps, step, store, left):
    def begin_anew(number):
        dist.new_group(left())
        return number

    again(num_steps, step, begin_anew)


@wrong("07.2", "is alone in its new group: others give it another name, or do not come")
def name_by_rank(num_steps, step, store, left):
    rank = dist.get_rank()

    def begin_anew(number):
        begin(store, f"of {rank} from {number}", left().index(rank), len(left()))
        return number

    again(num_steps, step, begin_anew)


@wrong("07.2", "with 2 ranks, rank 0 begins a group without asking left(): next time, others may be gone")
def guesses_who_is_left(num_steps, step, store, left):
    rank = dist.get_rank()

    def begin_anew(number):
        num_left = dist.get_world_size() - 1
        begin(store, f"without {num_left}", min(rank, num_left - 1), num_left)
        return number

    again(num_steps, step, begin_anew)
