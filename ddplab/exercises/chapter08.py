"""Tasks on hangs."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from ddplab.exercises.engine import Attempt, Wrong, gathered, on_ranks, task


@task("08.1", "Repair a hang")
def repair(attempt: Attempt) -> None:
    """``end_of_epoch(model, loss, x)`` gives the mean loss and, on rank 0, the output of the model in evaluation."""
    for world_size in (1, 2, 3):
        told = attempt.results(world_size, world_size=world_size, trial=after_an_epoch)
        where = on_ranks(world_size)
        mean = sum(range(1, world_size + 1)) / world_size
        for rank, (value, off, is_training, moved) in enumerate(told):
            if value is None or abs(value - mean) > 1e-4:
                why = "the sum of all" if value and abs(value - mean * world_size) < 1e-4 else "not the mean of all"
                why = "only its own" if value and abs(value - rank - 1) < 1e-4 else why
                raise Wrong(f"{where}, rank {rank} tells the loss {value}, and the mean is {mean:g}: {why}")
            if rank == 0 and off is None:
                raise Wrong(f"{where}, rank 0 gives no output")
            if rank == 0 and off > 1e-4:
                why = "BatchNorm takes the mean of this batch in place of the one it has learned"
                why = why if moved else f"off by {off:.2g}"
                raise Wrong(f"{where}, rank 0's output is not that of evaluation: {why}")
            if rank == 0 and moved:  # rank 0's buffers are those of all ranks from the next step on
                raise Wrong(f"{where}, rank {rank}'s BatchNorm has learned from the test image: evaluate in eval mode")
            if not is_training:
                raise Wrong(f"{where}, rank {rank}'s model stays in eval mode, and is trained so from here on")


def after_an_epoch(fn, world_size):
    """The loss, how far the output is off, and whether the model is as before: in training, its buffers unmoved."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model(torch.randn(8, 2)).sum().backward()
    x, rank = torch.tensor([[3.0, -1.0], [2.0, 5.0]]), dist.get_rank()
    before = copy.deepcopy(model.module)
    value, out = fn(model, torch.tensor(float(rank + 1)), x)
    dist.barrier()
    is_training = model.module.training and model.training
    moved = not torch.equal(model.module[1].running_mean, before[1].running_mean)
    off = None if out is None else (out.detach() - before.eval()(x)).abs().max().item()
    return None if value is None else float(value), off, is_training, moved


@task("08.2", "Stop early, together")
def stop(attempt: Attempt) -> None:
    """``train(num_steps, step, enough)``: all stop after the first step for which one rank says that it is enough."""
    for world_size, wishes in ((1, [2]), (3, [4, 2, 6]), (2, [5, 9])):
        made = attempt.results(8, wishes, world_size=world_size, trial=until_enough)[0]
        where, first = on_ranks(world_size), min(wishes)
        who = wishes.index(first)
        if made != first + 1:
            why = "those who want to go on decide (MIN)" if made == max(wishes) + 1 else f"{made - first - 1} too many"
            why = "only rank 0 is asked" if who and made == wishes[0] + 1 else why
            why = "nobody is heard" if made == 8 else why
            why = "it is asked after a step, not before" if made <= first else why
            raise Wrong(f"{where}, rank {who} has enough after step {first}, and all make {made} steps: {why}")


def until_enough(fn, num_steps, wishes):
    """How many steps all make. Raises ``Wrong`` on all ranks as soon as some have stopped and others not."""
    rank = dist.get_rank()
    step, end, made = together("stops")
    fn(num_steps, step, lambda number: number >= wishes[rank])
    end()
    return len(made)


def together(what):
    """A step for all ranks, what to call after the last one, and the list of steps that are made."""
    made, words = [], []

    def meet(number):
        numbers = gathered(number)
        if len(set(numbers)) > 1 and not words:
            ended = numbers.index(-1) if -1 in numbers else numbers.index(max(numbers))
            goes_on = next(rank for rank, other in enumerate(numbers) if other != numbers[ended])
            where = f"with {dist.get_world_size()} ranks"
            said = what if isinstance(what, str) else what(ended, len(made))
            words.append(f"{where}, rank {ended} {said}, and rank {goes_on} waits for it in step {len(made)}")
        if words:
            raise Wrong(words[0])

    def step(number):
        meet(len(made))
        made.append(number)

    return step, lambda: meet(-1), made


@task("08.3", "One batch more than the others")
def uneven(attempt: Attempt) -> None:
    """``train(batches, step)`` gives the batches left out: as many steps on all ranks, no batch lost without a word."""
    for nums in ((3,), (5, 2), (3, 5, 4)):
        dealt = [[100 * rank + place for place in range(num)] for rank, num in enumerate(nums)]
        told = attempt.results(dealt, world_size=len(nums), trial=with_batches)
        where = f"with {list(nums)} batches on {len(nums)} rank{'s' * (len(nums) > 1)}"
        for rank, (mine, (made, left)) in enumerate(zip(dealt, told, strict=True)):
            if foreign := [one for one in made + left if one not in mine]:
                raise Wrong(f"{where}, rank {rank} has no batch {foreign[0]!r}, and steps on it or tells of it")
            if lost := [one for one in mine if one not in made + left]:
                raise Wrong(f"{where}, rank {rank}'s batch number {lost[0] % 100} is neither used nor told of")
            if both := sorted(set(made) & set(left)):
                raise Wrong(f"{where}, rank {rank}'s batch number {both[0] % 100} is used, and told of as left out")
            if len(made) < min(nums):
                raise Wrong(f"{where}, {len(made)} steps are made, and all have batches for {min(nums)}")
            if len(made) > max(nums):
                raise Wrong(f"{where}, {len(made)} steps are made: more than any rank has batches")


def with_batches(fn, dealt):
    """The batches that this rank uses, and those that it says are left out."""

    def why(rank, num):
        many = len(dealt[rank])
        return "has no batch left" if num >= many else f"ends after {num} of its {many} batches"

    rank = dist.get_rank()
    step, end, made = together(why)
    left = fn(list(dealt[rank]), step)
    end()
    if not isinstance(left, list | tuple | None):
        raise Wrong(f"{on_ranks(len(dealt))}, rank {rank} gives {left!r:.40}, and should give a list of batches")
    return made, list(left or [])
