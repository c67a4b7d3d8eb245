"""Tasks on first ranks."""

import contextlib
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from ddplab.exercises.engine import Attempt, Wrong, on_ranks, task


@task("00.1", "Who am I?")
def who_am_i(attempt: Attempt) -> None:
    """``who_am_i()`` gives rank, world size and local rank as whole numbers, also where a job has several nodes."""
    for world_size in (1, 2, 3):
        given = attempt.results(world_size=world_size, trial=on_nodes_of_two)
        for rank, told in enumerate(given):
            where = f"with {world_size} ranks, two on a node, rank {rank}" if world_size > 1 else "the only rank"
            mine, size, local = told
            if any(isinstance(one, str) for one in told):
                raise Wrong(f"{where} gives {told}: variables of the environment are text, and '1' is not 1")
            if mine != rank and all(one[0] == mine for one in given):
                raise Wrong(f"{where} says that it is rank {mine}, as all the others do")
            if size != world_size:
                raise Wrong(f"{where} says that the world size is {size}")
            if local != rank % 2 and local == rank:
                raise Wrong(f"{where} says that its local rank is {local}: that is its rank, which counts all nodes")
            if (mine, local) != (rank, rank % 2):
                raise Wrong(f"{where} gives {told}, and should give ({rank}, {world_size}, {rank % 2})")


def on_nodes_of_two(fn):
    """What ``fn`` gives where torchrun runs two ranks on a node."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return fn()


@task("00.2", "Rank 0 only")
def announce(attempt: Attempt) -> None:
    """``announce(text)`` prints ``text`` on rank 0 alone, and no rank goes on before that has happened."""
    for world_size, text in ((1, "step 1"), (2, "saved after epoch 7"), (3, "loss 0.25")):
        early = attempt.results(text, world_size=world_size, trial=printing_slowly)
        where = on_ranks(world_size)
        printed = [(line.rank, line.text) for line in attempt.run.lines(stream="stdout") if line.text.strip()]
        who = [rank for rank, _ in printed]
        if not printed:
            raise Wrong(f"{where}, no rank prints anything")
        if len(printed) > 1:
            raise Wrong(f"{where}, there are {len(printed)} lines, from ranks {who}: each rank runs the same code")
        if who != [0] or printed[0][1] != text:
            raise Wrong(f"{where}, rank {who[0]} prints {printed[0][1]!r}, and rank 0 should print {text!r}")
        if any(early):
            waited = any(call.number for call in attempt.run.collectives)
            why = "it has waited too early" if waited else "nothing makes it wait"
            raise Wrong(f"{where}, rank {early.index(True)} goes on before rank 0 has printed: {why}")


def printing_slowly(fn, text):
    """Whether ``fn(text)`` came back in this rank although rank 0, which gave it time, had not printed yet."""
    store, write = dist.distributed_c10d._get_default_store(), sys.stdout.write
    others = [f"back {rank}" for rank in range(1, dist.get_world_size())]

    def slowly(words):
        if words.strip() and others:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(others, timedelta(seconds=0.25))
        write(words)
        store.set("printed", "yes")

    sys.stdout.write = slowly
    fn(text)
    early = not store.check(["printed"])
    store.set(f"back {dist.get_rank()}", "yes")
    return early
