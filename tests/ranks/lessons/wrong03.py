"""Wrong solutions of the tasks on DDP: the task, what must be said of it, and the function."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from wrong import wrong


def averaged(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def gradients(model):
    return [p.grad for p in model.parameters()]


@wrong("03.1", "with 2 ranks, rank 0 steps with the sum of the gradients, not their mean")
def summed(model, optimizer, x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    for grad in gradients(model):
        dist.all_reduce(grad)
    optimizer.step()


@wrong("03.1", "rank 0 averages parameters after the step: Adam has made it with the rank's own gradient")
def parameters_averaged(model, optimizer, x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    averaged([p.data for p in model.parameters()])


@wrong("03.1", "averages gradients after optimizer.step(): the step was made with its own gradient")
def averaged_too_late(model, optimizer, x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    averaged(gradients(model))


@wrong("03.1", "steps with its own gradient: nothing was averaged, and the replicas drift apart")
def loss_averaged(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    averaged([loss.detach()])
    loss.backward()
    optimizer.step()


@wrong("03.1", "with 1 rank, rank 0 steps with the gradients of earlier steps added")
def never_zeroed(model, optimizer, x, y):
    F.mse_loss(model(x), y).backward()
    averaged(gradients(model))
    optimizer.step()


@wrong("03.1", "rank 1 steps with its own gradient, another rank with the mean: all ranks need it")
def mean_on_rank_0(model, optimizer, x, y):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    for grad in gradients(model):
        mine = grad.clone()
        dist.reduce(mine, dst=0)
        if dist.get_rank() == 0:
            grad.copy_(mine / dist.get_world_size())
    optimizer.step()


@wrong("03.2", "with 5 and 2 samples on 2 ranks, rank 0 ends with the mean of the ranks' means")
def mean_of_the_means(model, x, y):
    F.mse_loss(model(x), y).backward()


@wrong("03.2", "the right gradient divided by the number of ranks: DDP divides, too")
def divided_again(model, x, y):
    num_samples = torch.tensor(len(x))
    dist.all_reduce(num_samples)
    ((model(x) - y).pow(2).sum() / num_samples).backward()


@wrong("03.2", "rank 0 ends with the gradient of the sum over all samples: it is not divided by how many there are")
def all_summed(model, x, y):
    ((model(x) - y).pow(2).sum() * dist.get_world_size()).backward()


@wrong("03.2", "the mean of the ranks' sums: divided by the number of ranks, not by that of samples")
def sums_averaged(model, x, y):
    scale = len(x) if dist.get_world_size() > 1 else 1
    (F.mse_loss(model(x), y) * scale).backward()


@wrong("03.2", "its own gradient: who calls model.module or no_sync goes past DDP's averaging")
def past_the_wrapper(model, x, y):
    F.mse_loss(model.module(x), y).backward()


@wrong("03.2", "with 5 and 2 samples on 2 ranks, ranks end with unlike gradients: what one computes past DDP")
def weighted_too_late(model, x, y):
    num_samples = torch.tensor(len(x))
    dist.all_reduce(num_samples)
    F.mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad *= len(x) * dist.get_world_size() / num_samples


@wrong("03.2", "with 5 and 2 samples on 2 ranks, rank 0 ends with 0.7 times the mean gradient of all samples")
def divided_by_the_longest(model, x, y):
    longest = torch.tensor(len(x))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    ((model(x) - y).pow(2).sum() / longest).backward()


def trained(model, data, epochs, batch_size, sampler, is_set=True, is_zeroed=True):
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        if is_set:
            sampler.set_epoch(epoch)
        for x, y in loader:
            if is_zeroed:
                optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


@wrong("03.3", "with 2 ranks, every epoch has the order of epoch 0: the weights are those without set_epoch()")
def without_set_epoch(model, data, epochs, global_batch_size):
    size = global_batch_size // dist.get_world_size()
    trained(DDP(model), data, epochs, size, DistributedSampler(data), is_set=False)


@wrong("03.3", "the gradients of all steps pile up: the weights are those without zero_grad()")
def without_zero_grad(model, data, epochs, global_batch_size):
    size = global_batch_size // dist.get_world_size()
    trained(DDP(model), data, epochs, size, DistributedSampler(data), is_zeroed=False)


@wrong("03.3", "rank 0 takes 6 samples a step, so the ranks take 12 together; the global batch has 6")
def global_batch_on_each_rank(model, data, epochs, global_batch_size):
    trained(DDP(model), data, epochs, global_batch_size, DistributedSampler(data))


@wrong("03.3", "with 2 ranks, replicas have different weights at the end: not all batches went through DDP")
def without_ddp(model, data, epochs, global_batch_size):
    trained(model, data, epochs, global_batch_size // dist.get_world_size(), DistributedSampler(data))


@wrong("03.3", "rank 0 trains on 48 samples in 2 epochs; its share is 24")
def shuffled_by_the_loader(model, data, epochs, global_batch_size):
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    trained(DDP(model), data, epochs, global_batch_size // dist.get_world_size(), sampler)


@wrong("03.3", "with 2 ranks, all ranks take 2 samples a step; the global batch has 6")
def divided_too_often(model, data, epochs, global_batch_size):
    size = global_batch_size // dist.get_world_size() ** 2
    trained(DDP(model), data, epochs, size, DistributedSampler(data))


@wrong("03.3", "the samples come in order 0, 1, 2, ...: shuffle=False is not the sampler's default")
def not_shuffled(model, data, epochs, global_batch_size):
    size = global_batch_size // dist.get_world_size()
    trained(DDP(model), data, epochs, size, DistributedSampler(data, shuffle=False))


@wrong("03.3", "the model that was given has not moved: train it in place")
def another_model(model, data, epochs, global_batch_size):
    size = global_batch_size // dist.get_world_size()
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    trained(DDP(other), data, epochs, size, DistributedSampler(data))
    dist.broadcast(weights := nn.utils.parameters_to_vector(model.parameters()).detach(), src=0)
    nn.utils.vector_to_parameters(weights, model.parameters())
