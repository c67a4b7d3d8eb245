"""Tasks on DDP: gradients averaged by hand, unequal shares, and a training whose replicas equal one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from ddplab.exercises.engine import Attempt, Wrong, on_ranks, task


@task("03.1", "Average gradients by hand")
def step(attempt: Attempt) -> None:
    """``step(model, optimizer, x, y)`` steps on every rank with the mean of the ranks' gradients."""
    for per_rank_batch_size, world_size in ((5, 1), (3, 2), (4, 3)):
        told = attempt.results(per_rank_batch_size, world_size=world_size, trial=three_steps)
        where = on_ranks(world_size)
        for ranks in zip(*told, strict=True):  # one step; before the first wrong one, all have equal weights
            kinds = [kind for kind, _, _ in ranks]
            rank = next((rank for rank, kind in enumerate(kinds) if kind != "mean"), None)
            agree = all(close(weights, ranks[0][2]) for _, _, weights in ranks)
            if rank is None and agree:
                continue
            if rank is None:
                raise Wrong(f"{where}, the step is made with the mean gradient, and then the weights differ by rank")
            kind, late, _ = ranks[rank]
            if kind == "own":
                kind = "not all" if "mean" in kinds else "late" if late == "mean" else "parameters" if agree else "own"
            raise Wrong(f"{where}, rank {rank} {STEPS[kind]}")


STEPS = {
    "sum": "steps with the sum of the gradients, not their mean",
    "mean, divided": "steps with a gradient that is divided by the number of ranks twice",
    "pile": "steps with the gradients of earlier steps added: they pile up without zero_grad()",
    "own": "steps with its own gradient: nothing was averaged, and the replicas drift apart",
    "own, divided": "steps with its own gradient, divided by the number of ranks: autograd does not follow all_reduce",
    "late": "averages gradients after optimizer.step(): the step was made with its own gradient",
    "parameters": "averages parameters after the step: Adam has made it with the rank's own gradient and is not linear",
    "not all": "steps with its own gradient, another rank with the mean: all ranks need it",
    "none": "has no gradient when optimizer.step() is called",
    "no step": "does not call optimizer.step()",
    "two steps": "calls optimizer.step() more than once",
    "other": "steps with a gradient that is not the mean over the ranks",
}


def three_steps(fn, per_rank_batch_size):
    """Of each step, with which gradient it was made, which is there after it, and the weights then."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, told, before = net(), [], 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)  # for which a mean of steps is not a step on the mean
    optimizer.register_step_pre_hook(lambda *_: stepped.append(gradient(model)))
    for batch in torch.randn(3, world_size, per_rank_batch_size, 4):
        own, stepped = own_gradients(model, batch), []
        fn(model, optimizer, batch[rank, :, :3], batch[rank, :, 3:])
        mean = own.mean(0)
        known = {"mean": mean, "own": own[rank], "sum": own.sum(0), "mean, divided": mean / world_size}
        known["own, divided"] = own[rank] / world_size
        kind = name_of(stepped[0], known | {"pile": mean + before}) if stepped else "no step"
        late = name_of(gradient(model), {"mean": mean})
        told.append((kind if len(stepped) < 2 else "two steps", late, weights_of(model)))
        before = mean
    return told


@task("03.2", "Unequal shares")
def backward(attempt: Attempt) -> None:
    """``backward(model, x, y)``, where ``model`` is in DDP, leaves the gradient of the mean over all samples."""
    for sizes in ((5,), (5, 2), (4, 1, 4)):
        told = attempt.results(sizes, world_size=len(sizes), trial=unequal)
        shares = f"with {' and '.join(map(str, sizes))} samples on {on_ranks(len(sizes))[5:]}"
        found = [vector for _, vector, _ in told if vector is not None]
        for rank, (kind, _, times) in enumerate(told):
            if kind == "other" and not all(close(vector, found[0]) for vector in found):
                raise Wrong(f"{shares}, {UNLIKE}")
            if kind == "other" and times:
                raise Wrong(f"{shares}, rank {rank} ends with {times:.3g} times the mean gradient of all samples")
            if kind != "mean":
                raise Wrong(f"{shares}, rank {rank} ends with {SHARES[kind]}")


UNLIKE = "ranks end with unlike gradients: what one computes past DDP, or changes after it, the others do not get"
SHARES = {
    "none": "no gradient",
    "mean of means": "the mean of the ranks' means: a sample of a small share counts for more than others",
    "divided": "the right gradient divided by the number of ranks: DDP divides, too",
    "sum": "the gradient of the sum over all samples: it is not divided by how many there are",
    "sum, divided": "the mean of the ranks' sums: divided by the number of ranks, not by that of samples",
    "sum of means": "the sum of the ranks' means: their mean, times the number of ranks",
    "own": "its own gradient: who calls model.module or no_sync goes past DDP's averaging",
    "twice": "a gradient that is multiplied by the number of ranks once too often",
    "other": "a gradient that is not that of the mean over all samples",
}


def unequal(fn, sizes):
    """Which gradient a rank is left with that has so many samples, the gradient, and how many times the right one."""
    rank, world_size = dist.get_rank(), len(sizes)
    model = DDP(net())
    batch = torch.randn(sum(sizes), 4).split(sizes)
    fn(model, batch[rank][:, :3], batch[rank][:, 3:])
    own, shares = own_gradients(model.module, batch), torch.tensor(sizes)[:, None]
    total = (own * shares).sum(0)
    mean = total / sum(sizes)
    known = {"mean": mean, "mean of means": own.mean(0), "divided": mean / world_size, "sum": total}
    known |= {"sum, divided": total / world_size, "sum of means": own.sum(0), "twice": mean * world_size}
    found = gradient(model.module)
    if found is None:
        return "none", None, 0.0
    times = float(found @ mean / (mean @ mean))
    kind = name_of(found, known | {"own": own[rank]})
    return kind, found, times if close(found, times * mean) else 0.0


@task("03.3", "Train as one process would")
def train(attempt: Attempt) -> None:
    """``train(model, data, epochs, global_batch_size)`` gives all replicas the weights of one process."""
    for world_size, *args in ((2, 24, 2, 6), (3, 30, 2, 12), (1, 18, 3, 6)):
        num_samples, epochs, global_batch_size = args
        told, where = attempt.results(*args, world_size=world_size, trial=trained), on_ranks(world_size)
        first, seen, rows, known = told[0]
        if not all(torch.equal(first, weights) for weights, *_ in told):
            raise Wrong(f"{where}, replicas have different weights at the end: not all batches went through DDP")
        taken = max(rows, default=0) * world_size
        if taken > global_batch_size:
            many = f"rank 0 takes {max(rows)} samples a step, so the ranks take {taken} together"
            raise Wrong(f"{where}, {many}; the global batch has {global_batch_size}")
        kind = name_of(first, known, tolerance=1e-6)
        if kind == "right":
            continue
        if kind in TRAININGS:
            raise Wrong(f"{where}, {TRAININGS[kind]}")
        if taken < global_batch_size:
            raise Wrong(f"{where}, all ranks take {taken} samples a step; the global batch has {global_batch_size}")
        share = epochs * num_samples // world_size
        if len(seen) != share:
            raise Wrong(f"{where}, rank 0 trains on {len(seen)} samples in {epochs} epochs; its share is {share}")
        apart = (first - known["right"]).abs().max().item()
        raise Wrong(f"{where}, weights are {apart:.1g} away from those of one process with lr=0.05 and momentum=0.9")


TRAININGS = {
    "untouched": "the model that was given has not moved: train it in place",
    "pile": "the gradients of all steps pile up: the weights are those without zero_grad()",
    "one order": "every epoch has the order of epoch 0: the weights are those without set_epoch()",
    "in order": "the samples come in order 0, 1, 2, ...: shuffle=False is not the sampler's default",
    "other epochs": "the order of epoch 0 is that of epoch 1: set_epoch() begins with 0",
}


class Pairs(torch.utils.data.Dataset):
    """Inputs and targets; notes which were looked at."""

    def __init__(self, num_samples):
        self.rows, self.seen = torch.randn(num_samples, 4, dtype=torch.float64), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.seen.append(index)
        return self.rows[index, :3], self.rows[index, 3:]


def trained(fn, num_samples, epochs, global_batch_size):
    """The weights of a rank, the samples it looked at, its batch sizes, and the weights of one process."""
    data, model, rows = Pairs(num_samples), net().double(), []
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(start + dist.get_rank(), model.parameters())  # DDP begins with those of rank 0
    handle = model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    fn(model, data, epochs, global_batch_size)
    handle.remove()
    orders = [list(DistributedSampler(data, 1, 0, shuffle=False))]
    for epoch in range(epochs + 1):
        (sampler := DistributedSampler(data, 1, 0)).set_epoch(epoch)
        orders.append(list(sampler))
    in_order, right = orders[:1] * epochs, orders[1:-1]
    ways = {"right": (right, True), "pile": (right, False), "one order": (right[:1] * epochs, True)}
    ways |= {"in order": (in_order, True), "other epochs": (orders[2:], True)}
    known = {way: alone(start, data.rows, global_batch_size, *how) for way, how in ways.items()}
    return weights_of(model), data.seen, rows, known | {"untouched": start}


def alone(start, rows, batch_size, orders, is_zeroed):
    """The weights that one process gets with these orders of the samples."""
    model = net().double()
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for order in orders:
        for batch in rows[order].split(batch_size):
            if is_zeroed:
                optimizer.zero_grad()
            F.mse_loss(model(batch[:, :3]), batch[:, 3:]).backward()
            optimizer.step()
    return weights_of(model)


def net():
    """A small model of three inputs and one output."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def weights_of(model):
    """All parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradient(model):
    """The gradients of all parameters in one vector; None if one is missing."""
    found = [p.grad for p in model.parameters()]
    return None if any(one is None for one in found) else torch.cat([one.flatten() for one in found])


def own_gradients(model, batch):
    """What each rank's share of a batch gives for the gradient of its mean, a row per rank."""
    losses = [F.mse_loss(model(share[:, :3]), share[:, 3:]) for share in batch]
    found = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    return torch.stack([torch.cat([one.flatten() for one in grads]) for grads in found])


def close(found, wanted, tolerance=1e-5):
    """Whether two vectors are equal but for rounding."""
    return bool((found - wanted).abs().max() <= tolerance)


def name_of(found, known, tolerance=1e-5):
    """Which of the ``known`` vectors it is, "none" or "other"."""
    if found is None:
        return "none"
    return next((name for name, one in known.items() if close(found, one, tolerance)), "other")
