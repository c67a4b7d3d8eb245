"""Tasks on errors."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from ddplab.exercises.engine import Attempt, Wrong, gathered, on_ranks, stand_in, task

# By world size: the batches that each rank cannot read, of 7.
BAD = {1: [{2, 6}], 2: [{4}, {1, 5}], 3: [{3}, {1, 3}, {6}]}


@task("07.1", "Skip a bad batch together")
def skip(attempt: Attempt) -> None:
    """``train(num_steps, load, step)``: the steps for which a rank cannot load its batch are left out by all."""
    for world_size, bad in BAD.items():
        made = attempt.results(7, bad, world_size=world_size, trial=with_bad_batches)
        wanted = [number for number in range(7) if not any(number in numbers for numbers in bad)]
        for rank, numbers in enumerate(made):
            if lost := [number for number in wanted if number not in numbers]:
                why = "skip one step, do not stop" if max(numbers, default=-1) < lost[0] else "all ranks have its batch"
                raise Wrong(f"{on_ranks(world_size)}, rank {rank} does not make step {lost[0]}: {why}")


def with_bad_batches(fn, num_steps, bad):
    """Which steps this rank makes. Raises ``Wrong`` on all ranks as soon as they make other steps."""
    made, words = [], []
    rank, where = dist.get_rank(), on_ranks(dist.get_world_size())

    def load(number):
        if number in bad[rank]:
            raise ValueError(f"image {number} has 4 channels")
        return torch.tensor([float(number)])

    def step(batch):
        number = int(batch) if isinstance(batch, torch.Tensor) and int(batch) not in made else -1
        words[:] = words or apart(where, gathered(number))
        if words:
            raise Wrong(words[0])
        made.append(number)

    try:
        fn(num_steps, load, step)
    except ValueError as error:
        if "has 4 channels" in str(error):
            raise Wrong(f"{where}, rank {rank}'s bad batch ends the whole job: it is to be caught") from None
        raise
    if not words:  # nobody may wait in a step
        words = apart(where, gathered(num_steps))
    if words:
        raise Wrong(words[0])
    return made


def apart(where, numbers):
    """In a list, what is wrong if the ranks step on these batches; -1 is none, or one that was used before."""
    if -1 in numbers:
        return [f"{where}, rank {numbers.index(-1)} makes a step without a new batch: who is not well must stop all"]
    if len(set(numbers)) > 1:
        first, last = min(numbers), max(numbers)
        ahead, behind = numbers.index(last), numbers.index(first)
        return [f"{where}, rank {ahead} has skipped batch {first} alone: rank {behind} is left in that step, and waits"]
    return []


# By world size: which rank is killed, and before which step; of 5.
KILLED = {1: {}, 2: {1: 2}, 3: {1: 1, 0: 3}}


@task("07.2", "Survive a killed rank")
def survive(attempt: Attempt) -> None:
    """``train(num_steps, step, store, left)``: the ranks that are left go on in a new group; no step is lost."""
    for world_size, killed in KILLED.items():
        where = f"{on_ranks(world_size)}, of which {['none is', 'one is', 'two are'][len(killed)]} killed"
        told = attempt.results(5, killed, world_size=world_size, backend=None, trial=with_kills)
        for rank, steps in enumerate(told):
            if rank in killed:
                continue
            made = [number for number, _ in steps]
            if lost := sorted(set(range(5)) - set(made)):
                if not made:
                    raise Wrong(f"{where}, rank {rank} makes no step at all")
                gone = lost[0] in killed.values() and max(made, default=-1) > lost[0]
                why = "the step in which it failed must be made again" if gone else "a broken group stays broken"
                raise Wrong(f"{where}, rank {rank} does not make step {lost[0]}: {why}")
            if made != sorted(set(made)):
                raise Wrong(f"{where}, rank {rank} makes steps {made}: those that went well are not made again")
            for number, together in steps:
                alive = world_size - sum(before <= number for before in killed.values())
                if together != alive:
                    raise Wrong(f"{where}, rank {rank} makes step {number} {on_ranks(together)}; {alive} are left")


def with_kills(fn, num_steps, killed):
    """The steps that this rank makes, and with how many; a rank that shall be killed is a child process of its own."""
    rank = int(os.environ["RANK"])
    if rank not in killed:
        return surviving(fn, num_steps, killed)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        surviving(fn, num_steps, killed)
    finally:
        os._exit(1)


def surviving(fn, num_steps, killed):
    """The steps that are made in this process, which kills itself where ``killed`` says so."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port, limit = int(os.environ["MASTER_PORT"]), timedelta(seconds=3)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=limit)
    made, members, asked, where = [], [], [], f"{on_ranks(world_size)}, rank {rank}"

    def ask():
        asked[:] = left()
        return left()

    def left():
        gone = [other for other in killed if store.check([f"killed {other}"])]
        return [other for other in range(world_size) if other not in gone]

    def step(number):
        if killed.get(rank) == number:
            store.wait([f"{other} is at {number}" for other in left() if other != rank])
            store.add(f"killed {rank}", 1)  # comes back when the store knows it, unlike set
            os.kill(os.getpid(), signal.SIGKILL)
        store.set(f"{rank} is at {number}", "")
        if set(members) - set(left()):  # the group is broken; Gloo's isend might wait here for ever
            raise RuntimeError("Connection closed by peer")
        # To the one that is killed last, and from it first: so each notices by itself, and waits for no other.
        others = sorted(set(members) - {rank}, key=lambda other: killed.get(other) == number)
        sent = [dist.isend(torch.ones(1), members.index(other)) for other in others]
        for other in reversed(others):
            dist.recv(torch.empty(1), members.index(other))
        for work in sent:
            work.wait()
        made.append((number, 1 + len(others)))

    def init(*args, **options):
        if members and asked != left():
            raise Wrong(f"{where} begins a group without asking left(): next time, others may be gone")
        if words := mistaken(options, left(), rank):
            raise Wrong(f"{on_ranks(world_size)}, {words}")
        options["store"].set(f"met by {rank}", "")
        try:
            options["store"].wait([f"met by {other}" for other in left()], timedelta(seconds=2))
        except dist.DistStoreError:
            raise Wrong(f"{where} is alone in its new group: others give it another name, or do not come") from None
        members[:] = left()
        begin(*args, **options)

    def within(*args, **options):
        raise Wrong(f"{where} makes a new_group, which is part of the broken one: leave that, and begin another")

    begin = dist.init_process_group
    stand_in(fn, "new_group", within)
    stand_in(fn, "init_process_group", init)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        fn(num_steps, step, store, ask)
    except ValueError as error:
        if not str(error).endswith("is not in list"):
            raise
        raise Wrong(f"{where} looks in left() for a rank that is not there: its first one, from before, is") from None
    except RuntimeError as error:
        if "Connection" not in str(error) or len(left()) == len(members):
            raise
        when = " also the second time" if len(members) < world_size else ""
        raise Wrong(f"{where} ends with its peer: catch the RuntimeError of step{when}") from None
    return made


def mistaken(options, left, rank):
    """What is wrong with the new group, if something is, so that nobody waits for it in vain."""
    size, store = options.get("world_size", int(os.environ["WORLD_SIZE"])), options.get("store")
    if size != len(left):
        return f"rank {rank} begins a group of {size}, and {len(left)} are left: it waits for one that is no more"
    if (told := options.get("rank", rank)) != left.index(rank):
        return f"rank {rank} calls itself {told} in a group of {size}: ranks are counted anew, from 0"
    if store is None or store.check([f"met by {rank}"]):
        return f"rank {rank} begins a group under a name that it has used before: old keys in the store mislead it"
    return ""
