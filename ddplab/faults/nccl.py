"""GPUs and NCCL. Most of these need GPUs; where there are none, what was recorded elsewhere is shown."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ddplab.faults.fault import fault

CATEGORY = "nccl_backend"


def _one_gpu() -> str:
    return "" if torch.cuda.is_available() and dist.is_nccl_available() else "a GPU"


def _two_gpus() -> str:
    return "" if torch.cuda.device_count() > 1 and dist.is_nccl_available() else "two GPUs"


@fault(
    CATEGORY,
    did="each rank binds the group to a GPU of its own, and the machine does not have as many",
    # The second is said by a torch for CPUs alone.
    sees="ValueError: device_id cuda:… is out of range. "
    "or ValueError: device_id cuda:… does not match the current compilation's accelerator support: None",
    root=None,
    cause="gpu-not-there",
    backend=None,
    env={"CUDA_VISIBLE_DEVICES": ""},
)
def gpu_not_there():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    dist.barrier()


@gpu_not_there.cured_by("as many ranks on a machine as torch.cuda.device_count() tells, and gloo where it tells 0")
def gpu_not_there_repaired():
    dist.init_process_group("gloo")
    dist.barrier()


@fault(
    CATEGORY,
    did="rank 1 asks for the GPU after the last one",
    sees="AcceleratorError: CUDA error: invalid device ordinal or RuntimeError: CUDA error: invalid device ordinal",
    cause="gpu-not-there",
    needs=_one_gpu,
    backend=None,
    world_size=1,
    recorded="RuntimeError: CUDA error: invalid device ordinal",
    recorded_in="microsoft/SimXNS#2",
)
def set_device_too_high():
    torch.cuda.set_device(torch.cuda.device_count())


@set_device_too_high.cured_by("choose the GPU by LOCAL_RANK, and start no more ranks than there are GPUs")
def set_device_too_high_repaired():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


@fault(
    CATEGORY,
    did='set_device is left out: "cuda" is the first GPU, on both ranks',
    sees="DistBackendError: NCCL error in: …, invalid usage or echo",
    root=None,
    cause="duplicate-gpu",
    needs=_two_gpus,
    backend=None,
    timeout_s=60.0,
    recorded="torch.distributed.DistBackendError: NCCL error in: "
    "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.19.3\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000",
    recorded_in="Peterande/D-FINE#289",
)
def forgotten_set_device():
    dist.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return x.tolist()


@forgotten_set_device.cured_by("torch.cuda.set_device(LOCAL_RANK) before all else that uses a GPU")
def forgotten_set_device_repaired():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return x.tolist()


@fault(
    "collective_mismatch",
    did="a tensor on the CPU is given to NCCL",
    sees="RuntimeError: No backend type associated with device type cpu",
    cause="wrong-device",
    needs=_one_gpu,
    backend=None,
    world_size=1,
    timeout_s=60.0,
    recorded="RuntimeError: No backend type associated with device type cpu",
    recorded_in="unslothai/unsloth-zoo#129",
)
def cpu_tensor_for_nccl():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    x = torch.ones(2)
    dist.all_reduce(x)
    return x.tolist()


@cpu_tensor_for_nccl.cured_by('x.cuda(), or init_process_group("cpu:gloo,cuda:nccl"), which has a backend for each')
def cpu_tensor_for_nccl_repaired():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return x.tolist()


@fault(
    "collective_mismatch",
    did="rank 1 leaves out an all_reduce; after its time-out, the watchdog of rank 0 ends the process",
    sees="SIGABRT or DistBackendError: … or hangs or returns or echo",
    root=None,
    cause="nccl-timeout",
    needs=_two_gpus,
    backend=None,
    timeout_s=60.0,
    recorded="[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) "
    "ran for 600020 milliseconds before timing out.",
    recorded_in="XPixelGroup/BasicSR#737",
)
def nccl_watchdog():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=5))
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    torch.cuda.synchronize()


@nccl_watchdog.cured_by("all ranks make the call; a rank that is only slow needs a longer timeout")
def nccl_watchdog_repaired():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=5))
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    dist.all_reduce(x)
    torch.cuda.synchronize()


@fault(
    CATEGORY,
    did="NCCL_SOCKET_IFNAME names a network interface that the machine does not have",
    sees="DistBackendError: NCCL error in: ",
    cause="nccl-no-interface",
    needs=_one_gpu,
    backend=None,
    world_size=1,
    timeout_s=60.0,
    recorded="torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:2588, internal error - please report this issue to the NCCL developers, NCCL version 2.21.5\n"
    "ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
    recorded_in="EvolvingLMMs-Lab/open-r1-multimodal#7",
)
def nccl_wrong_interface():
    os.environ["NCCL_SOCKET_IFNAME"] = "nosuch0"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(2, device="cuda"))


@nccl_wrong_interface.cured_by("leave it unset, or take a name that `ip addr` shows")
def nccl_wrong_interface_repaired():
    os.environ.pop("NCCL_SOCKET_IFNAME", None)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(2, device="cuda"))
