"""Wrong solutions of the tasks on what DDP sends: the task, what must be said of it, and the function."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong import wrong


def accumulated(model, batches, skipped=0, parts=None):
    """Backward on each micro-batch; the first ``skipped`` of them do not synchronise."""
    for number, (x, y) in enumerate(batches):
        with model.no_sync() if number < skipped else nullcontext():
            (F.mse_loss(model(x), y) / (parts or len(batches))).backward()


@wrong("04.1", "rank 0 has 3 all-reduces in step 1, of 252 bytes for 84: all but the last micro-batch can do without")
def synced_each_time(model, batches):
    accumulated(model, batches)


@wrong("04.1", "of 252 bytes for 84: no_sync() is entered, but not around forward(), which decides")
def no_sync_around_backward(model, batches):
    for number, (x, y) in enumerate(batches):
        loss = F.mse_loss(model(x), y) / len(batches)
        with model.no_sync() if number < len(batches) - 1 else nullcontext():
            loss.backward()


@wrong("04.1", "with 2 ranks and 3 micro-batches, rank 0 sends nothing in step 1: the last backward() must synchronise")
def no_sync_around_all(model, batches):
    accumulated(model, batches, len(batches))


@wrong("04.1", "ends step 1 with the sum of the micro-batches' gradients, not their mean")
def not_divided(model, batches):
    accumulated(model, batches, len(batches) - 1, parts=1)


@wrong("04.1", "the gradient of the last micro-batch alone, divided by how many there are")
def zeroed_each_time(model, batches):
    accumulated(model, batches[:-1], len(batches))
    model.zero_grad()
    accumulated(model, batches[-1:], parts=len(batches))


@wrong("04.1", "rank 0 has 6 samples in one forward(); a micro-batch has 2")
def put_together(model, batches):
    xs, ys = zip(*batches, strict=True)
    F.mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()


@wrong("04.1", "with 2 ranks and 3 micro-batches, rank 0 makes 6 forward passes: it does the work of other ranks, too")
def every_rank_does_all(model, batches):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, batches)
    together = [batch for batches_of_one in everything for batch in batches_of_one]
    accumulated(model, together, len(together))


@wrong("04.1", "rank 0 does not send what the last backward() adds in step 1: that is too late")
def first_one_sends(model, batches):
    accumulated(model, batches[:1], parts=len(batches))
    accumulated(model, batches[1:], len(batches), parts=len(batches))


@wrong("04.1", "of 168 bytes for 84: a backward() outside of no_sync() has sent the whole mean already")
def averaged_again(model, batches):
    accumulated(model, batches, len(batches) - 1)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def reduced(tensor):
    return dist.all_reduce(tensor, async_op=True).get_future()


@wrong("04.2", "with 2 ranks, rank 0 ends step 1 with the sum of the ranks' gradients, not their mean")
def half_of_the_sum(seen, bucket):
    small = bucket.buffer().half()
    seen.append(small.nbytes)
    return reduced(small).then(lambda done: done.value()[0].float())


@wrong("04.2", "gets inf from gradients of 40,000: fp16 ends at 65,504, the sum is beyond")
def divided_after_the_sum(seen, bucket):
    small = bucket.buffer().half()
    seen.append(small.nbytes)
    return reduced(small).then(lambda done: done.value()[0].float() / dist.get_world_size())


@wrong("04.2", "bytes of the 124 in step 1: not half")
def sent_whole(seen, bucket):
    mean = bucket.buffer().div_(dist.get_world_size())
    seen.append(mean.nbytes // 2)
    return reduced(mean).then(lambda done: done.value()[0].half().float())


@wrong("04.2", "with 2 ranks, rank 0 notes 124 bytes in step 1, and sends 62")
def noted_before_it_is_small(seen, bucket):
    seen.append(bucket.buffer().nbytes)
    small = (bucket.buffer() / dist.get_world_size()).half()
    return reduced(small).then(lambda done: done.value()[0].float())


@wrong("04.2", "the hook returns a Tensor, and DDP waits for a future")
def gave_a_tensor(seen, bucket):
    small = (bucket.buffer() / dist.get_world_size()).half()
    seen.append(small.nbytes)
    dist.all_reduce(small)
    return small.float()


@wrong("04.2", "the hook's future holds a list; DDP needs a tensor: .then() takes it out")
def gave_what_all_reduce_gives(seen, bucket):
    small = (bucket.buffer() / dist.get_world_size()).half()
    seen.append(small.nbytes)
    return reduced(small)


@wrong("04.2", "rank 0 ends step 1 with its own gradient: it has not been averaged")
def never_sent(seen, bucket):
    seen.append(bucket.buffer().nbytes // 2)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def stepped(model, optimizer, batches, clip):
    optimizer.zero_grad()
    accumulated(model, batches, len(batches) - 1)
    norm = clip(model)
    optimizer.step()
    return norm


def clip_to(model, max_norm):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


@wrong("04.3", "rank 0 steps with the whole mean gradient: it is clipped too late or not at all")
def clipped_after_the_step(model, optimizer, batches, max_norm):
    stepped(model, optimizer, batches, lambda model: None)
    return clip_to(model, max_norm)


@wrong("04.3", "steps with the mean of gradients that each rank had clipped by itself: average first")
def clipped_then_averaged(model, optimizer, batches, max_norm):
    optimizer.zero_grad()
    accumulated(model, batches, len(batches))
    norm = clip_to(model, max_norm)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    return norm


@wrong("04.3", "steps with micro-batches that were clipped one by one: clip once, when all are there")
def clipped_each_time(model, optimizer, batches, max_norm):
    optimizer.zero_grad()
    for number, (x, y) in enumerate(batches):
        with model.no_sync() if number < len(batches) - 1 else nullcontext():
            (F.mse_loss(model(x), y) / len(batches)).backward()
        norm = clip_to(model, max_norm)
    optimizer.step()
    return norm


@wrong("04.3", "steps with single numbers cut off: that changes the direction, clipping by norm does not")
def clipped_by_value(model, optimizer, batches, max_norm):
    def clip(model):
        torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
        return max_norm

    return stepped(model, optimizer, batches, clip)


@wrong("04.3", "the norm was added up over ranks, and all hold the same gradient")
def norm_of_all_ranks(model, optimizer, batches, max_norm):
    def clip(model):
        grads = [p.grad for p in model.parameters()]
        squares = sum(grad.pow(2).sum() for grad in grads)
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        for grad in grads:
            grad *= min(1.0, max_norm / norm)
        return norm

    return stepped(model, optimizer, batches, clip)


@wrong("04.3", "steps with a gradient that is stretched to max_norm: a shorter one stays as it is")
def always_scaled(model, optimizer, batches, max_norm):
    def clip(model):
        norm = clip_to(model, float("inf"))
        for p in model.parameters():
            p.grad *= max_norm / norm
        return norm

    return stepped(model, optimizer, batches, clip)


@wrong("04.3", "steps with gradients of the step before added: zero_grad() is missing")
def old_gradients_stay(model, optimizer, batches, max_norm):
    accumulated(model, batches, len(batches) - 1)
    norm = clip_to(model, max_norm)
    optimizer.step()
    return norm


@wrong("04.3", "rank 0 gives 0.")
def norm_after_clipping(model, optimizer, batches, max_norm):
    def clip(model):
        clip_to(model, max_norm)
        return clip_to(model, float("inf"))

    return stepped(model, optimizer, batches, clip)
