"""Wrong solutions of the tasks on training for real: the task, what must be said of it, and the function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong import wrong


def summed(*numbers):
    told = torch.tensor(numbers)
    dist.all_reduce(told)
    return told.tolist()


def own_mean(batches):
    return sum(loss * num for loss, num in batches) / sum(num for _, num in batches)


@wrong("06.1", "with 2 ranks, each rank gives the loss of its own share: 2, 3.545")
def loss_of_this_rank(batches):
    return own_mean(batches)


@wrong("06.1", "that is the mean of the ranks' means, and their shares are unequal")
def mean_of_rank_means(batches):
    return summed(own_mean(batches))[0] / dist.get_world_size()


@wrong("06.1", "that is the mean over batches, in which a small one counts as much")
def mean_over_batches(batches):
    total, num = summed(sum(loss for loss, _ in batches), len(batches))
    return total / num


@wrong("06.1", "rank 0 has the loss of the job, and the ranks give 2.586, 3.545: all shall have it")
def reduced_to_rank_0(batches):
    told = torch.tensor([own_mean(batches), 1.0]) * sum(num for _, num in batches)
    dist.reduce(told, dst=0)
    return (told[0] / told[1]).item()


@wrong("06.1", "with 2 ranks it ")
def reduced_batch_by_batch(batches):
    told = [summed(loss * num, num) for loss, num in batches]
    return sum(loss for loss, _ in told) / sum(num for _, num in told)


@wrong("06.2", "with 2 ranks, rank 1 writes, too: they overwrite each other")
def all_ranks_write(path, state):
    part = path.with_suffix(f".{dist.get_rank()}")
    torch.save(state, part)
    part.replace(path)
    dist.barrier()


@wrong("06.2", "the disk was full when half was written, and the old checkpoint is gone, too: it was overwritten")
def written_in_place(path, state):
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


@wrong("06.2", "with 2 ranks, rank 1 comes back too early: it reads the old checkpoint")
def without_barrier(path, state):
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


@wrong("06.2", "rank 1 comes back too early: it reads the old checkpoint, which rank 0 replaces later")
def barrier_before_the_name(path, state):
    part = path.with_suffix(".part")
    if dist.get_rank() == 0:
        torch.save(state, part)
    dist.barrier()
    if dist.get_rank() == 0:
        part.replace(path)


@wrong("06.2", "with 1 rank, the file holds epoch 0, not 2")
def never_renamed(path, state):
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".part"))
    dist.barrier()


def trained(build, train_epoch, epochs, path, forgotten=(), order=("build", "generator"), per_epoch=True, lag=0):
    """Train, save and resume, but for what is forgotten."""
    saved, rank = torch.load(path) if path.exists() else {}, dist.get_rank()
    for part in forgotten:
        saved.pop(part, None)
    for what in order:
        if what == "build":
            model, optimizer = build()
        elif "generators" in saved:
            torch.set_rng_state(saved["generators"][rank % len(saved["generators"])])
    if "model" in saved:
        model.module.load_state_dict(saved["model"])
    if "optimizer" in saved:
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(saved.get("epoch", 0), epochs):
        train_epoch(epoch, model, optimizer)
        generators = [None] * dist.get_world_size()
        dist.all_gather_object(generators, torch.get_rng_state())
        if "others" in forgotten:
            generators = generators[:1]
        if rank == 0 and (per_epoch or epoch == epochs - 1):
            parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1 - lag, "generators": generators, **parts}, path)
        dist.barrier()


@wrong("06.3", "rank 0 goes on in epoch 2 with other weights than the run that was not stopped had")
def without_model(*args):
    trained(*args, forgotten=["model"])


@wrong("06.3", "with another state of the optimizer: Adam's running means are not those")
def without_optimizer(*args):
    trained(*args, forgotten=["optimizer"])


@wrong("06.3", "rank 0 was stopped in epoch 2 and begins with epoch 0 again: save after each, read it")
def saved_at_the_end(*args):
    trained(*args, per_epoch=False)


@wrong("06.3", "rank 0 goes on in epoch 2 with another state of the random generator: dropout differs")
def without_generator(*args):
    trained(*args, forgotten=["generators"])


@wrong("06.3", "with 2 ranks, rank 1 goes on in epoch 2 with the state of rank 0's generator")
def generator_of_rank_0(*args):
    trained(*args, forgotten=["others"])


@wrong("06.3", "the state that the generator has after build(), which draws weights: restore it later")
def generator_before_build(*args):
    trained(*args, order=("generator", "build"))


@wrong("06.3", "with 2 ranks, rank 0 was stopped in epoch 2 and goes on with epochs [1, 2, 3], not [2, 3]")
def one_epoch_twice(*args):
    trained(*args, lag=1)


@wrong("06.3", "with 2 ranks, a run that goes on trains epoch 2 on rank 0 and epoch 0 on rank 1: all ranks must find")
def only_rank_0_reads(build, train_epoch, epochs, path):
    trained(build, train_epoch, epochs, path, [] if dist.get_rank() == 0 else ["model", "optimizer", "epoch"])


@wrong("06.3", "Error(s) in loading state_dict for DistributedDataParallel: Missing key(s) in state_dict: ")
def loads_past_the_wrapper(build, train_epoch, epochs, path):
    def bare():
        model, optimizer = build()
        model.load_state_dict(torch.load(path)["model"])
        return model, optimizer

    trained(bare if path.exists() else build, train_epoch, epochs, path)


@wrong("06.3", "with 2 ranks it does not end: ")
def only_rank_0_gathers(build, train_epoch, epochs, path):
    model, optimizer = build()
    for epoch in range(epochs):
        train_epoch(epoch, model, optimizer)
        if dist.get_rank() == 0:
            generators = [None] * dist.get_world_size()
            dist.all_gather_object(generators, torch.get_rng_state())
