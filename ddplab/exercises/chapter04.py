"""Tasks on what DDP sends: gradient accumulation, a communication hook, and clipping."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplab.exercises.chapter03 import gradient, name_of, net, own_gradients
from ddplab.exercises.engine import Attempt, Wrong, on_ranks, task


@task("04.1", "Accumulate, send once")
def accumulate(attempt: Attempt) -> None:
    """``accumulate(model, batches)`` leaves the mean gradient of all batches and ranks, and sends it once."""
    for num_batches, size, world_size in ((3, 2, 2), (2, 4, 1), (4, 1, 3)):
        told = attempt.results(num_batches, size, world_size=world_size, trial=accumulated)
        for step, ranks in enumerate(zip(*told, strict=True), 1):
            for rank, (kind, sent, syncs, num_skips, rows) in enumerate(ranks):
                where = f"{on_ranks(world_size)} and {num_batches} micro-batches, rank {rank}"
                if max(rows, default=0) > size:
                    raise Wrong(f"{where} has {max(rows)} samples in one forward(); a micro-batch has {size}")
                if len(rows) > num_batches:
                    raise Wrong(f"{where} makes {len(rows)} forward passes: it does the work of other ranks, too")
                if kind == "own" and not sum(sent):
                    raise Wrong(f"{where} sends nothing in step {step}: the last backward() must synchronise")
                if kind == "other" and syncs and not syncs[-1] and sum(sent):
                    raise Wrong(f"{where} does not send what the last backward() adds in step {step}: that is too late")
                if kind != "mean":
                    raise Wrong(f"{where} ends step {step} with {ACCUMULATED[kind]}")
                if sum(sent) > NUM_BYTES:
                    calls = f"{where} has {len(sent)} all-reduces in step {step}, of {sum(sent)} bytes for {NUM_BYTES}"
                    if sum(syncs) == 1 < len(sent):
                        raise Wrong(f"{calls}: a backward() outside of no_sync() has sent the whole mean already")
                    if num_skips and sum(syncs) == num_batches:
                        raise Wrong(f"{calls}: no_sync() is entered, but not around forward(), which decides")
                    raise Wrong(f"{calls}: all but the last micro-batch can do without")


ACCUMULATED = {
    "none": "no gradient",
    "own": "its own gradient, though something was sent",
    "not divided": "the sum of the micro-batches' gradients, not their mean",
    "last": "the gradient of the last micro-batch alone",
    "last, divided": "the gradient of the last micro-batch alone, divided by how many there are",
    "sum": "the sum over ranks, not the mean",
    "mean, divided": "the mean divided by the number of ranks: DDP has done that",
    "other": "a gradient that is not the mean over micro-batches and ranks",
}
NUM_BYTES = sum(p.nbytes for p in net().parameters())  # what one step must send


def accumulated(fn, num_batches, size):
    """Of two steps, which gradient is left, what was sent, how often it was skipped, and the sizes of forward()."""
    rank, world_size, told = dist.get_rank(), dist.get_world_size(), []
    model, sent = DDP(net()), noted_bytes("all_reduce")
    reduce, no_sync, skips, forwards = dist.all_reduce.real, model.no_sync, [], []

    def hook(state, bucket):
        mean = bucket.buffer().div_(world_size)
        sent.append(mean.nbytes)
        return reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    model.no_sync = lambda: skips.append(1) or no_sync()
    model.module.register_forward_pre_hook(
        lambda _, args: forwards.append((model.require_backward_grad_sync, len(args[0])))
    )
    for batches in torch.randn(2, num_batches, world_size, size, 4):
        model.zero_grad()
        for notes in (sent, skips, forwards):
            notes.clear()
        fn(model, [(batch[rank, :, :3], batch[rank, :, 3:]) for batch in batches])
        seen = list(forwards), list(sent), len(skips)
        own = torch.stack([own_gradients(model.module, batch) for batch in batches])
        mean, last = own.mean((0, 1)), own[-1].mean(0)
        known = {"mean": mean, "own": own[:, rank].mean(0), "not divided": mean * num_batches, "last": last}
        known |= {"last, divided": last / num_batches, "sum": mean * world_size}
        known["mean, divided"] = mean / world_size
        syncs = [is_synced for is_synced, _ in seen[0]]
        told.append((name_of(gradient(model.module), known), seen[1], syncs, seen[2], [rows for _, rows in seen[0]]))
    return told


def noted_bytes(*names):
    """A list that grows by the bytes of each call of these functions of ``dist``; ``.real`` of each is as it was."""
    sent = []

    def noting(real):
        def call(*args, **options):
            tensors = [one for one in (*args, *options.values()) if isinstance(one, torch.Tensor)]
            sent.append(tensors[-1].nbytes)  # the input comes last
            return real(*args, **options)

        call.real = real
        return call

    for name in names:
        setattr(dist, name, noting(getattr(dist, name)))
    return sent


@task("04.2", "A hook that sends half")
def half(attempt: Attempt) -> None:
    """``half(seen, bucket)`` averages a bucket in half the bytes, and adds to ``seen`` how many these were."""
    for width, world_size in ((6, 2), (4, 1), (5, 3)):
        told = attempt.results(width, world_size=world_size, trial=hooked)
        for step, ranks in enumerate(zip(*told, strict=True), 1):
            for rank, (kind, gradients, seen, sent) in enumerate(ranks):
                where, num_bytes = f"{on_ranks(world_size)}, rank {rank}", gradients.nbytes
                if not gradients.isfinite().all():
                    raise Wrong(f"{where} gets inf from gradients of 40,000: fp16 ends at 65,504, the sum is beyond")
                if kind != "mean":
                    raise Wrong(f"{where} ends step {step} with {HOOKED[kind]}")
                if sum(sent) > num_bytes / 2:
                    raise Wrong(f"{where} sends {sum(sent)} bytes of the {num_bytes} in step {step}: not half")
                if sum(seen) != (sum(sent) or num_bytes / 2):
                    raise Wrong(f"{where} notes {sum(seen)} bytes in step {step}, and sends {sum(sent)}")
                if not torch.equal(gradients, ranks[0][1]):
                    raise Wrong(f"{where} ends with other bits than rank 0: the replicas drift apart")


HOOKED = {
    "sum": "the sum of the ranks' gradients, not their mean",
    "mean, divided": "the mean divided by the number of ranks once more",
    "own": "its own gradient: it has not been averaged",
    "none": "no gradient",
    "other": "a gradient that is more than 2 % away from the mean",
}


def hooked(fn, width):
    """Of two steps, which gradient is left, its numbers, what the hook noted, and what was sent."""
    rank, world_size, told = dist.get_rank(), dist.get_world_size(), []
    model = DDP(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)), bucket_cap_mb=1e-6)
    sent, seen = noted_bytes("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"), []
    kinds = set()

    def hook(state, bucket):
        future = fn(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise Wrong(f"the hook returns a {type(future).__name__}, and DDP waits for a future")
        return future.then(tensor_of)

    def tensor_of(done):
        value = done.value()
        kinds.add(type(value).__name__)
        return value[0] if isinstance(value, list) else value

    model.register_comm_hook(seen, hook)
    x = torch.randn(world_size, 4, 3)
    for scale in (1.0, 40_000.0):
        parameters = list(model.module.parameters())
        grads = [torch.autograd.grad(model.module(one).mean() * scale, parameters) for one in x]
        own = torch.stack([torch.cat([one.flatten() for one in each]) for each in grads])
        model.zero_grad()
        seen.clear(), sent.clear()
        (model(x[rank]).mean() * scale).backward()
        if kinds != {"Tensor"}:
            raise Wrong(f"the hook's future holds a {' or a '.join(kinds)}; DDP needs a tensor: .then() takes it out")
        found, mean = gradient(model.module), own.mean(0)
        known = {"mean": mean, "own": own[rank], "sum": own.sum(0), "mean, divided": mean / world_size}
        told.append((name_of(found, known, 0.02 * float(mean.norm())), found, list(seen), list(sent)))
    return told


@task("04.3", "Clip what was accumulated")
def clipped_step(attempt: Attempt) -> None:
    """``clipped_step(model, optimizer, batches, max_norm)`` steps with the clipped mean and gives its norm before."""
    for num_batches, world_size in ((2, 2), (3, 1), (2, 3)):
        told = attempt.results(num_batches, world_size=world_size, trial=clipped)
        for ranks in zip(*told, strict=True):
            for rank, (kind, norm, wanted, max_norm) in enumerate(ranks):
                where = f"{on_ranks(world_size)}, a norm of {wanted:.3g} and max_norm={max_norm:.3g}, rank {rank}"
                if kind != "right":
                    raise Wrong(f"{where} steps with {CLIPPED[kind.partition(', ')[0]]}")
                if norm is None or abs(float(norm) - wanted) > 1e-4 * wanted:
                    given = norm if norm is None else f"{float(norm):.3g}"
                    raise Wrong(f"{where} gives {given}, which is not the norm of the mean before it was clipped")


CLIPPED = {
    "no step": "nothing: optimizer.step() is not called",
    "none": "no gradient",
    "not clipped": "the whole mean gradient: it is clipped too late or not at all",
    "own first": "the mean of gradients that each rank had clipped by itself: average first",
    "each": "micro-batches that were clipped one by one: clip once, when all are there",
    "norm of all": "a gradient that is too short: the norm was added up over ranks, and all hold the same gradient",
    "by value": "single numbers cut off: that changes the direction, clipping by norm does not",
    "stretched": "a gradient that is stretched to max_norm: a shorter one stays as it is",
    "not averaged": "its own gradient, clipped: it was never averaged",
    "sum": "a gradient that was clipped as the sum of the micro-batches, not their mean",
    "pile": "gradients of the step before added: zero_grad() is missing",
    "other": "another gradient than the clipped mean",
}


def clipped(fn, num_batches):
    """Of three steps, with which gradient it was made, the norm that was given and the right one, and max_norm."""
    rank, world_size, told, before = dist.get_rank(), dist.get_world_size(), [], 0
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: stepped.append(gradient(model.module)))
    for batches, factor in zip(torch.randn(3, num_batches, world_size, 4, 4), (0.2, 3.0, 0.3), strict=True):
        own, stepped = torch.stack([own_gradients(model.module, batch) for batch in batches]), []
        mean = own.mean((0, 1))
        wanted = mean.norm().item()
        max_norm = factor * wanted
        norm = fn(model, optimizer, [(batch[rank, :, :3], batch[rank, :, 3:]) for batch in batches], max_norm)
        known = ways_to_clip(own, rank, max_norm, before)
        told.append((name_of(stepped[0], known) if stepped else "no step", norm, wanted, max_norm))
        before = known["right"]
    return told


def ways_to_clip(own, rank, max_norm, before):
    """What comes out of the right way to clip and of others; ``own`` has a gradient for each micro-batch and rank."""
    num_batches, world_size, _ = own.shape
    mean = own.mean((0, 1))
    each, alone = torch.zeros_like(mean), torch.zeros_like(own[0])
    for number, batch in enumerate(own / num_batches, 1):
        each = shortened(each + batch.mean(0), max_norm)
        alone = alone + batch
        alone = torch.stack([shortened(one, max_norm) for one in alone]) if number < num_batches else alone
    return {
        "right": shortened(mean, max_norm),
        "not clipped": mean,
        "own first": torch.stack([shortened(one, max_norm) for one in own.mean(0)]).mean(0),
        "each": each,
        "each, alone": shortened(alone.mean(0), max_norm),
        "norm of all": shortened(mean, max_norm, world_size),
        "norm of all, squared": shortened(mean, max_norm, world_size**0.5),
        "by value": mean.clamp(-max_norm, max_norm),
        "stretched": mean * max_norm / mean.norm(),
        "not averaged": shortened(own.mean(0)[rank], max_norm),
        "sum": shortened(own.mean(1).sum(0), max_norm),
        "pile": shortened(mean + before, max_norm),
    }


def shortened(vector, max_norm, factor=1.0):
    """Clipped by its norm, which is taken for ``factor`` times as large."""
    return vector * min(1.0, max_norm / (factor * vector.norm().item()))
