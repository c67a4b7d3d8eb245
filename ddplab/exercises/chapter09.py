"""Tasks on RPC."""

import os
import threading
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import rpc

from ddplab.exercises.engine import Attempt, Wrong, task

NUM_PUSHES = 3  # of each worker
MEETING_S = 1.0  # for all to be asked, once the first is


def working(trial):
    """Let rank 0 run ``trial(*args)``, while all ranks are workers."""

    def run(*args):
        warnings.filterwarnings("ignore")  # init_rpc warns of torch's own inner calls
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
        try:
            return trial(*args) if rank == 0 else None
        finally:
            rpc.shutdown()

    return run


@task("09.1", "A parameter server")
def serve(attempt: Attempt) -> None:
    """``Server(w, rule)`` has ``push(grad)`` and ``pull()``; pushes come at the same time, and each is an update."""
    for world_size in (1, 2, 3):
        num = NUM_PUSHES * world_size
        told = attempt.results(world_size, world_size=world_size, backend=None, trial=push_from_all)[0]
        answers, pulled, num_calls, at_once = told
        where = f"with {num} pushes by {world_size} worker{'s' * (world_size > 1)}"
        if num_calls < num:
            raise Wrong(f"{where}, {num_calls} of them reach the rule: one that finds another at work is dropped")
        if at_once > 1 and pulled != 2**num - 1:
            lost = num - bin(pulled).count("1")  # of so many powers of two
            why = f"calls run in threads, and {at_once} read the same weights"
            raise Wrong(f"{where}, {lost} of them {'are' if lost > 1 else 'is'} lost: {why}")
        if pulled == 0:
            raise Wrong(f"{where}, pull() gives the weights as they were before all updates")
        if pulled != 2**num - 1:
            why = "each update begins at the first ones" if bin(pulled).count("1") == 1 else "updates are to add up"
            raise Wrong(f"{where}, the weights are {pulled} and should be {2**num - 1}: {why}")
        for push, answer in enumerate(answers):
            if answer is None or not int(answer) >> push & 1:
                raise Wrong(f"{where}, one is answered with {answer}: these are not the weights after its own update")


class Rule:
    """An update rule, w + grad. The first call takes until a second one has come, if one comes."""

    def __init__(self):
        self.lock, self.second = threading.Lock(), threading.Event()
        self.num_calls = self.inside = self.at_once = 0

    def __call__(self, w, grad):
        with self.lock:
            self.num_calls += 1
            self.inside += 1
            self.at_once = max(self.at_once, self.inside)
            if self.inside > 1:
                self.second.set()
        self.second.wait(0.12)
        self.second.set()
        with self.lock:
            self.inside -= 1
        return w + grad


def push_from_all(fn, world_size):
    """What each push is answered, the weights at the end, and what the rule has seen; gradients are powers of two."""
    return working(push_here)(fn, world_size)


def push_here(fn, world_size):
    rule = Rule()
    server = rpc.RRef(fn(torch.zeros(1), rule))
    asked = []
    for rank in range(world_size):
        grads = [torch.tensor([2.0 ** (NUM_PUSHES * rank + place)]) for place in range(NUM_PUSHES)]
        asked.append(rpc.rpc_async(f"worker{rank}", push_all, args=(server, grads)))
    answers = [None if answer is None else answer.item() for future in asked for answer in future.wait()]
    return answers, int(server.rpc_sync().pull().item()), rule.num_calls, rule.at_once


def push_all(server, grads):
    """All at the same time."""
    futures = [server.rpc_async().push(grad) for grad in grads]
    return [future.wait() for future in futures]


@task("09.2", "Ask all at once")
def ask(attempt: Attempt) -> None:
    """``ask_all(names, function, args)`` gives the answers of all workers, which work side by side."""
    for names in (["worker0"], ["worker1", "worker0"], ["worker2", "worker0", "worker1"]):
        told = attempt.results(names, world_size=len(names), backend=None, trial=ask_twice)[0]
        answers, again, failed = told
        where = f"with {len(names)} worker{'s' * (len(names) > 1)}"
        if "alone" in answers:
            raise Wrong(f"{where}, {names[0]} must answer before the next is asked: that is one after the other")
        if again:
            raise Wrong(f"{where}, {again[0]} is asked more than once")
        if "Future" in answers:
            raise Wrong(f"{where}, you give futures, and not what they will hold: nobody has waited for them")
        if answers != list(range(len(names))):
            by = [names[place] for place in answers] if sorted(answers) == list(range(len(names))) else answers
            raise Wrong(f"{where}, {names} are asked, and the answers are those of {by}: by who was first, not by name")
        if not failed:
            raise Wrong(f"{where}, {names[-1]} raises ValueError, and who has asked does not learn of it")


def ask_twice(fn, names):
    """The answers, who was asked again, and whether the error of one comes to who has asked."""
    here["store"] = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return working(ask_here)(fn, names)


def ask_here(fn, names):
    answers = [one if isinstance(one, int | str) else type(one).__name__ for one in fn(names, answer, (names,))]
    again = [name for name in names if here["store"].add(f"{name} is asked", 0) > 1]
    try:
        fn(names, fail, (names[-1],))
    except Exception as error:
        if "no data" not in str(error):
            raise
        return answers, again, True
    return answers, again, False


here = {}  # of this rank: its store


def answer(names):
    """The worker's place among the names. It waits until all are asked, and then for the answers of those behind it."""
    store, name, limit = here["store"], rpc.get_worker_info().name, timedelta(seconds=MEETING_S)
    place = names.index(name)
    if store.add(f"{name} is asked", 1) > 1:
        return place
    if store.add("asked", 1) == len(names):
        store.set("all are asked", "")
    try:
        store.wait(["all are asked"], limit)
        store.wait([f"answer {later}" for later in range(place + 1, len(names))] or ["all are asked"], limit)
    except dist.DistStoreError:
        store.set("all are asked", "")
        return "alone"
    finally:
        store.set(f"answer {place}", "")
    return place


def fail(name):
    """Raise, on the worker of that name."""
    if rpc.get_worker_info().name == name:
        raise ValueError("no data")
    return 0
