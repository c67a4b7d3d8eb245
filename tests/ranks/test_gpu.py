"""NCCL on real GPUs, at the world sizes that one GPU allows; run by tests/gpu_check.sh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplab import RankFailedError, ShippingError, device, launch, machine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def step() -> dict[str, object]:
    """One DDP step on this rank's device; gives what ran where, and a tensor of that device."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2).to(device()))
    loss = model(torch.ones(8, 4, device=device())).sum()
    loss.backward()
    return {"backend": dist.get_backend(), "device": str(device()), "grad": model.module.weight.grad, "loss": loss}


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_one_rank_per_gpu_uses_nccl_by_itself(start_method: str) -> None:
    """backend="auto" takes NCCL, the rank has its own device, and its tensors come back on the CPU."""
    run = launch(step, world_size=1, start_method=start_method)
    (result,) = run.results
    assert (run.backend, result["backend"], result["device"]) == ("nccl", "nccl", "cuda:0")
    assert run.spec.backend_why.startswith("one CUDA device per rank")
    assert torch.equal(result["grad"], torch.full((2, 4), 8.0))
    assert result["loss"].device.type == "cpu"


def test_a_module_comes_back_on_the_cpu() -> None:
    """Parameters and buffers of a returned module are on the CPU, and still parameters."""

    def build() -> nn.Module:
        return nn.BatchNorm1d(3).to(device())

    (module,) = launch(build, world_size=1).results
    assert {value.device.type for value in module.state_dict().values()} == {"cpu"}
    assert isinstance(module.weight, nn.Parameter)


def test_the_kernel_may_have_used_the_gpu_before() -> None:
    """CUDA state of the launching process does no harm to the ranks."""
    here = torch.ones(3, device="cuda").sum().item()
    assert launch(step, world_size=1).ok
    assert here == 3


def test_a_cuda_tensor_is_not_shipped() -> None:
    """A captured CUDA tensor is named before anything starts."""
    weights = torch.ones(3, device="cuda")
    with pytest.raises(ShippingError, match=r"'weights', captured by .* Pass tensor.cpu\(\)"):
        launch(lambda: weights.sum(), world_size=1)


def test_more_ranks_than_gpus_are_refused_before_they_start() -> None:
    """backend="nccl" with too few GPUs says so in words; "auto" takes Gloo and says why."""
    too_many = machine.num_gpus() + 1
    with pytest.raises(ValueError, match="needs one CUDA device per rank"):
        launch(step, world_size=too_many, backend="nccl")
    run = launch(step, world_size=too_many)
    assert run.backend == "gloo"
    assert "NCCL needs one CUDA device per rank" in run.spec.backend_why


def insist() -> None:
    """What a cell does that will not listen: two ranks on GPU 0, over NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def test_two_ranks_on_one_gpu_are_a_real_dist_backend_error() -> None:
    """A cell that insists sees NCCL's own error, told as a failure of a rank."""
    with pytest.raises(RankFailedError, match="DistBackendError") as caught:
        launch(insist, world_size=2, backend=None)
    assert "Duplicate GPU detected" in caught.value.report
