"""DistributedDataParallel, used in ways that it does not forgive, or forgives in silence."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from ddplab.faults.fault import fault

CATEGORY = "ddp_usage"


class TwoHeads(nn.Module):
    """A body and two heads, of which each input needs one."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, left=True):
        return self.left(self.body(x)) if left else self.right(self.body(x))


@fault(
    CATEGORY,
    did="the loss does not use all parameters, in the second step this is noticed",
    sees="RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one",
    root=None,
    cause="unused-parameters",
)
def unused_parameters():
    model = DDP(TwoHeads())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


@unused_parameters.cured_by("find_unused_parameters=True, or a model of which the loss uses everything")
def unused_parameters_repaired():
    model = DDP(TwoHeads(), find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


@fault(
    CATEGORY,
    did="static_graph=True, but the graph changes after the first step",
    sees="RuntimeError: Your training graph has changed in this iteration",
    root=None,
    cause="static-graph-changed",
)
def static_graph():
    model = DDP(TwoHeads(), static_graph=True)
    for left in (True, False):
        model(torch.ones(1, 2), left).sum().backward()


@static_graph.cured_by("without static_graph, and with find_unused_parameters=True")
def static_graph_repaired():
    model = DDP(TwoHeads(), find_unused_parameters=True)
    for left in (True, False):
        model(torch.ones(1, 2), left).sum().backward()


class Twice(nn.Module):
    """A layer that is used twice, each time under a checkpoint, so that it is computed again in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(2, 2), use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x


@fault(
    CATEGORY,
    did="a layer is used twice under a reentrant checkpoint: its gradient is ready twice",
    sees="RuntimeError: Expected to mark a variable ready only once",
    root=None,
    cause="parameter-twice",
)
def ready_twice():
    model = DDP(Twice(use_reentrant=True), find_unused_parameters=True)
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()


@ready_twice.cured_by("use_reentrant=False, or static_graph=True")
def ready_twice_repaired():
    model = DDP(Twice(use_reentrant=False), find_unused_parameters=True)
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()


@fault(
    CATEGORY,
    did="rank 1 builds a model with one layer more",
    sees="RuntimeError: DDP expects same model across all ranks, but Rank … has … params",
    root=None,
    cause="models-differ",
)
def different_models():
    layers = [nn.Linear(2, 2) for _ in range(1 + dist.get_rank())]
    DDP(nn.Sequential(*layers))


@different_models.cured_by("the same model on all ranks; nothing in it may depend on the rank")
def different_models_repaired():
    layers = [nn.Linear(2, 2) for _ in range(2)]
    DDP(nn.Sequential(*layers))


@fault(
    CATEGORY,
    did="the layers of rank 1 have another shape",
    sees={0: "echo", 1: "RuntimeError: [1]: params[0] in this process with sizes [4, 2] appears not to match sizes"},
    root=1,
    cause="parameter-shapes-differ",
)
def different_shapes():
    DDP(nn.Linear(2, 3 + dist.get_rank()))


@different_shapes.cured_by("the same shapes on all ranks: sizes that come from data are agreed upon first")
def different_shapes_repaired():
    DDP(nn.Linear(2, 4))


@fault(
    CATEGORY,
    did="all parameters are frozen when the model is wrapped",
    sees="RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that",
    root=None,
    cause="nothing-to-train",
)
def all_frozen():
    model = nn.Linear(2, 1).requires_grad_(False)
    DDP(model)


@all_frozen.cured_by("wrap what is trained; a frozen model needs no wrapper")
def all_frozen_repaired():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    DDP(nn.Sequential(frozen, nn.Linear(2, 1)))


@fault(
    CATEGORY,
    did="a layer is unfrozen after wrapping: DDP does not know of it",
    sees={0: "returns 0.0", 1: "returns 1.0"},
    right=(0.5, 0.5),
    cause="replicas-drift",
)
def unfrozen_later():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].requires_grad_(False)
    ddp = DDP(model)
    model[0].requires_grad_(True)
    nn.init.ones_(model[1].weight)
    ddp(torch.tensor([[float(dist.get_rank())]])).sum().backward()
    return model[0].weight.grad.item()


@unfrozen_later.cured_by("unfreeze first, then wrap; wrap again after each change")
def unfrozen_later_repaired():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].requires_grad_(True)
    ddp = DDP(model)
    nn.init.ones_(model[1].weight)
    ddp(torch.tensor([[float(dist.get_rank())]])).sum().backward()
    return model[0].weight.grad.item()


@fault(
    CATEGORY,
    did="the forward pass goes to model.module, past the wrapper",
    sees={0: "returns 0.0", 1: "returns 1.0"},
    right=(0.5, 0.5),
    cause="replicas-drift",
)
def past_the_wrapper():
    model = DDP(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[float(dist.get_rank())]])
    model.module(x).sum().backward()
    return model.module.weight.grad.item()


@past_the_wrapper.cured_by("call the wrapper: model(x)")
def past_the_wrapper_repaired():
    model = DDP(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[float(dist.get_rank())]])
    model(x).sum().backward()
    return model.module.weight.grad.item()


@fault(
    CATEGORY,
    did="no_sync around backward alone: the forward pass has already decided to send",
    sees="returns 1",
    right=(0, 0),
    cause="no-sync-too-late",
)
def no_sync_around_backward():
    sent = []
    model = DDP(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(sent, lambda sent, bucket: sent.append(1) or default_hook(bucket))
    loss = model(torch.ones(1, 1)).sum()
    with model.no_sync():
        loss.backward()
    return len(sent)


def default_hook(bucket):
    """The gradients, averaged over the ranks."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@no_sync_around_backward.cured_by("no_sync around forward and backward")
def no_sync_around_backward_repaired():
    sent = []
    model = DDP(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(sent, lambda sent, bucket: sent.append(1) or default_hook(bucket))
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    return len(sent)


@fault(
    CATEGORY,
    did="gradients are not set to zero: each step adds to the last",
    sees="returns [0.5, 1.0, 1.5]",
    right=([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    cause="forgotten-zero-grad",
)
def no_zero_grad():
    model = DDP(nn.Linear(1, 1, bias=False))
    seen = []
    for _ in range(3):
        model(torch.tensor([[float(dist.get_rank())]])).sum().backward()
        seen.append(model.module.weight.grad.item())
    return seen


@no_zero_grad.cured_by("optimizer.zero_grad() before each backward")
def no_zero_grad_repaired():
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[float(dist.get_rank())]])).sum().backward()
        seen.append(model.module.weight.grad.item())
    return seen


@fault(
    CATEGORY,
    did="the weights of a wrapped model are loaded into a plain one",
    sees="RuntimeError: Error(s) in loading state_dict for Linear:",
    root=None,
    cause="module-prefix",
)
def module_prefix():
    saved = DDP(nn.Linear(2, 1)).state_dict()
    nn.Linear(2, 1).load_state_dict(saved)


@module_prefix.cured_by("save ddp.module.state_dict()")
def module_prefix_repaired():
    saved = DDP(nn.Linear(2, 1)).module.state_dict()
    nn.Linear(2, 1).load_state_dict(saved)


@fault(
    CATEGORY,
    did="SyncBatchNorm on a CPU",
    sees="ValueError: SyncBatchNorm layers only work with GPU modules",
    root=None,
    cause="syncbn-on-cpu",
)
def sync_batchnorm():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))
    DDP(model)(torch.ones(4, 2))


@sync_batchnorm.cured_by("BatchNorm on a CPU, or a normalisation that needs no batch (GroupNorm, LayerNorm)")
def sync_batchnorm_repaired():
    model = nn.GroupNorm(1, 2)
    DDP(model)(torch.ones(4, 2))


@fault(
    CATEGORY,
    did="BatchNorm's running mean is each rank's own; the file that rank 0 saves knows its share alone",
    sees={0: "returns 0.0", 1: "returns 0.1"},
    right=(0.05, 0.05),
    cause="buffers-differ",
)
def batchnorm_buffers():
    model = DDP(nn.BatchNorm1d(1))
    model(torch.full((2, 1), float(dist.get_rank())))
    return round(model.module.running_mean.item(), 3)


@batchnorm_buffers.cured_by("average the buffers over ranks before you save or evaluate (on GPUs: SyncBatchNorm)")
def batchnorm_buffers_repaired():
    model = DDP(nn.BatchNorm1d(1))
    model(torch.full((2, 1), float(dist.get_rank())))
    dist.all_reduce(model.module.running_mean)
    model.module.running_mean /= dist.get_world_size()
    return round(model.module.running_mean.item(), 3)


@fault(
    CATEGORY,
    did="rank 1 has one batch less, and leaves the loop",
    sees={0: "RuntimeError: …", 1: "returns"},
    cause="backward-missing",
)
def uneven_inputs():
    model = DDP(nn.Linear(1, 1))
    for _ in range(3 - dist.get_rank()):
        model(torch.ones(1, 1)).sum().backward()


@uneven_inputs.cured_by("Join, which lets the rank that is done answer the others; or as many batches everywhere")
def uneven_inputs_repaired():
    model = DDP(nn.Linear(1, 1))
    with Join([model]):
        for _ in range(3 - dist.get_rank()):
            model(torch.ones(1, 1)).sum().backward()


@fault(
    CATEGORY,
    did="rank 0 alone validates, through the wrapper, which broadcasts buffers",
    sees={0: "hangs in DistributedDataParallel.forward", 1: "hangs in barrier"},
    root=None,
    cause="forward-on-some",
    timeout_s=1.5,
)
def rank_0_forward():
    model = DDP(nn.BatchNorm1d(2))
    model(torch.ones(4, 2)).sum().backward()
    if dist.get_rank() == 0:
        model(torch.ones(4, 2))
    dist.barrier()


@rank_0_forward.cured_by("rank 0 calls model.module, which sends nothing; or all ranks validate")
def rank_0_forward_repaired():
    model = DDP(nn.BatchNorm1d(2))
    model(torch.ones(4, 2)).sum().backward()
    if dist.get_rank() == 0:
        model.module.eval()
        model.module(torch.ones(4, 2))
    dist.barrier()


@fault(
    CATEGORY,
    did="a rank whose loss is 0 skips backward",
    sees={0: "hangs in barrier", 1: "hangs in Tensor.backward"},
    root=None,
    cause="backward-missing",
    timeout_s=1.5,
)
def skipped_backward():
    model = DDP(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum() * dist.get_rank()
    if loss != 0:
        loss.backward()
    dist.barrier()


@skipped_backward.cured_by("all ranks call backward: a loss of 0 has gradients of 0")
def skipped_backward_repaired():
    model = DDP(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum() * dist.get_rank()
    loss.backward()
    dist.barrier()


@fault(
    CATEGORY,
    did="the optimizer is made of parameters that are then replaced",
    sees="returns True",
    right=(False, False),
    cause="stale-optimizer",
)
def stale_optimizer():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight = nn.Parameter(torch.ones(1, 1))
    ddp = DDP(model)
    ddp(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item() == 1.0


@stale_optimizer.cured_by("first the final model, then DDP, then the optimizer")
def stale_optimizer_repaired():
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.ones(1, 1))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item() == 1.0
