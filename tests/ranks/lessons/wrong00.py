"""Wrong solutions of the tasks on first ranks: the task, what must be said of it, and the function."""

from __future__ import annotations

import os

import torch.distributed as dist
from wrong import wrong


@wrong("00.1", "variables of the environment are text")
def text_of_the_environment():
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]


@wrong("00.1", "with 3 ranks, two on a node, rank 2 says that its local rank is 2: that is its rank")
def local_rank_is_rank():
    return dist.get_rank(), dist.get_world_size(), dist.get_rank()


@wrong("00.1", "with 2 ranks, two on a node, rank 1 says that it is rank 0, as all the others do")
def rank_zero_by_default():
    return int(os.environ.get("MY_RANK", 0)), dist.get_world_size(), int(os.environ["LOCAL_RANK"])


@wrong("00.1", "with 3 ranks, two on a node, rank 0 says that the world size is 2")
def local_world_size():
    return dist.get_rank(), min(dist.get_world_size(), 2), int(os.environ["LOCAL_RANK"])


@wrong("00.1", "the only rank says that the world size is 0")
def size_first():
    return dist.get_world_size() - 1, dist.get_rank(), int(os.environ["LOCAL_RANK"])


@wrong("00.2", "there are 2 lines, from ranks [0, 1]: each rank runs the same code")
def all_print(text):
    print(text)
    dist.barrier()


@wrong("00.2", "rank 1 goes on before rank 0 has printed: nothing makes it wait")
def nobody_waits(text):
    if dist.get_rank() == 0:
        print(text)


@wrong("00.2", "rank 1 goes on before rank 0 has printed: it has waited too early")
def barrier_first(text):
    dist.barrier()
    if dist.get_rank() == 0:
        print(text)


@wrong("00.2", "barrier #1 is not complete: rank 1 made 0 collective calls and returned")
def barrier_inside(text):
    if dist.get_rank() == 0:
        print(text)
        dist.barrier()


@wrong("00.2", "rank 1 prints 'saved after epoch 7', and rank 0 should print")
def last_rank_prints(text):
    if dist.get_rank() == dist.get_world_size() - 1:
        print(text)
    dist.barrier()
