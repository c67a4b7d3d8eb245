"""Wrong solutions of the tasks on hangs: the task, what must be said of it, and the function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong import wrong


def mean_of(loss):
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def evaluated(model, x):
    model.module.eval()
    out = model.module(x)
    model.module.train()
    return out


@wrong("08.1", "it does not end: rank 0 waits in all_reduce")
def collective_of_rank_0(model, loss, x):
    if dist.get_rank() == 0:
        return mean_of(loss), evaluated(model, x)
    return loss.item(), None


@wrong("08.1", "in torch's DistributedDataParallel.forward")
def forward_of_rank_0(model, loss, x):
    mean, out = mean_of(loss), None
    if dist.get_rank() == 0:
        model.eval()
        out = model(x)
        model.train()
    return mean, out


@wrong("08.1", "the mean is 1.5: only its own")
def loss_of_rank_0(model, loss, x):
    return loss.item(), evaluated(model, x)


@wrong("08.1", "the mean is 1.5: the sum of all")
def sum_of_losses(model, loss, x):
    dist.all_reduce(loss)
    return loss.item(), evaluated(model, x)


@wrong("08.1", "BatchNorm takes the mean of this batch in place of the one it has learned")
def in_training_mode(model, loss, x):
    return mean_of(loss), model.module(x) if dist.get_rank() == 0 else None


@wrong("08.1", "rank 0's model stays in eval mode, and is trained so from here on")
def stays_in_eval_mode(model, loss, x):
    return mean_of(loss), model.module.eval()(x) if dist.get_rank() == 0 else None


@wrong("08.2", "rank 1 stops, and rank 0 waits for it in step 3")
def breaks_alone(num_steps, step, enough):
    for number in range(num_steps):
        step(number)
        if enough(number):
            break


def agreed(num_steps, step, enough, agree):
    for number in range(num_steps):
        step(number)
        wish = torch.tensor(int(enough(number)))
        agree(wish)
        if wish:
            break


@wrong("08.2", "and all make 7 steps: those who want to go on decide (MIN)")
def all_must_want(num_steps, step, enough):
    agreed(num_steps, step, enough, lambda wish: dist.all_reduce(wish, op=dist.ReduceOp.MIN))


@wrong("08.2", "and all make 5 steps: only rank 0 is asked")
def rank_0_decides(num_steps, step, enough):
    agreed(num_steps, step, enough, lambda wish: dist.broadcast(wish, src=0))


@wrong("08.2", "it does not end: ")
def breaks_before_agreeing(num_steps, step, enough):
    for number in range(num_steps):
        step(number)
        wish = torch.tensor(int(enough(number)))
        if wish:
            break
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)


@wrong("08.2", "and all make 2 steps: it is asked after a step, not before")
def asks_before_the_step(num_steps, step, enough):
    for number in range(num_steps):
        wish = torch.tensor(int(enough(number)))
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        if wish:
            break
        step(number)


@wrong("08.2", "and all make 4 steps: 1 too many")
def one_step_late(num_steps, step, enough):
    wish = torch.tensor(0)
    for number in range(num_steps):
        step(number)
        if wish:
            break
        wish = torch.tensor(int(enough(number)))
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)


@wrong("08.2", "nobody is heard")
def goes_on_to_the_end(num_steps, step, enough):
    for number in range(num_steps):
        step(number)


def fewest(batches, op=dist.ReduceOp.MIN):
    num = torch.tensor(len(batches))
    dist.all_reduce(num, op=op)
    return int(num)


@wrong("08.3", "rank 1 has no batch left, and rank 0 waits for it in step 2")
def as_many_as_there_are(batches, step):
    for batch in batches:
        step(batch)
    return []


@wrong("08.3", "rank 0's batch number 2 is neither used nor told of")
def dropped_in_silence(batches, step):
    for batch in batches[: fewest(batches)]:
        step(batch)
    return []


@wrong("08.3", "rank 1 has no batch -1, and steps on it or tells of it")
def made_up_batches(batches, step):
    num = fewest(batches, dist.ReduceOp.MAX)
    for batch in batches + [-1] * (num - len(batches)):
        step(batch)
    return []


@wrong("08.3", "0 steps are made, and all have batches for 3")
def nothing_at_all(batches, step):
    return batches


@wrong("08.3", "rank 1's batch number 0 is used, and told of as left out")
def told_of_the_used(batches, step):
    num = fewest(batches, dist.ReduceOp.MAX)
    padded = (batches * num)[:num]
    for batch in padded:
        step(batch)
    return padded[len(batches) :]


@wrong("08.3", "it fails: IndexError")
def as_many_as_rank_0(batches, step):
    num = torch.tensor(len(batches))
    dist.broadcast(num, src=0)
    for place in range(num):
        step(batches[place])
    return batches[num:]


@wrong("08.3", "with 2 ranks, rank 1 ends after 0 of its 2 batches, and rank 0 waits for it in step 0")
def rank_0_alone(batches, step):
    if dist.get_world_size() == 1 or dist.get_rank() == 0:
        for batch in batches:
            step(batch)
    return []


@wrong("08.3", "with 1 rank, rank 0 gives 3, and should give a list of batches")
def how_many(batches, step):
    for batch in batches[: fewest(batches)]:
        step(batch)
    return fewest(batches)


@wrong("08.3", "rank 1 has no batch None, and steps on it or tells of it")
def none_in_place(batches, step):
    for place in range(fewest(batches, dist.ReduceOp.MAX)):
        step(batches[place] if place < len(batches) else None)
    return []
