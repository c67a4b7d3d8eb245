"""Wrong solutions of the task on a script's frame: the task, what must be said of it, and the function."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from wrong import wrong


def device_of(num_gpus, index):
    return torch.device("cuda", index) if num_gpus else torch.device("cpu")


def local_rank():
    return int(os.environ["LOCAL_RANK"])


def framed(body, device, **options):
    dist.init_process_group("gloo", **options)
    try:
        return body(device)
    finally:
        dist.destroy_process_group()


@wrong("11.1", "rank 1 of 2 begins the group as rank 0: RANK says 1")
def rank_is_local_rank(body, num_gpus):
    size = int(os.environ["WORLD_SIZE"])
    return framed(body, device_of(num_gpus, local_rank()), rank=local_rank(), world_size=size)


@wrong("11.1", "begins a group of 1: WORLD_SIZE says 2")
def as_many_as_gpus(body, num_gpus):
    rank = int(os.environ["RANK"])
    return framed(body, device_of(num_gpus, local_rank()), rank=rank, world_size=max(num_gpus, 1))


@wrong("11.1", "rank 1 computes on cuda:1, and has local rank 0: it should be cuda:0")
def gpu_by_rank(body, num_gpus):
    return framed(body, device_of(num_gpus, int(os.environ["RANK"])))


@wrong("11.1", "rank 0 computes on cuda, and has local rank 0: it should be cuda:0")
def any_gpu(body, num_gpus):
    return framed(body, torch.device("cuda") if num_gpus else torch.device("cpu"))


@wrong("11.1", "rank 0 is still in the group after an error")
def no_finally(body, num_gpus):
    dist.init_process_group("gloo")
    result = body(device_of(num_gpus, local_rank()))
    dist.destroy_process_group()
    return result


@wrong("11.1", "the error of the body does not come out of main: it ends as if all were well")
def swallowed(body, num_gpus):
    try:
        return framed(body, device_of(num_gpus, local_rank()))
    except Exception as error:
        print("training failed:", error)


@wrong("11.1", "rank 0 is still in the group after the end")
def never_left(body, num_gpus):
    dist.init_process_group("gloo")
    return body(device_of(num_gpus, local_rank()))


@wrong("11.1", "rank 0 runs the body without a process group")
def no_group(body, num_gpus):
    return body(device_of(num_gpus, local_rank()))
