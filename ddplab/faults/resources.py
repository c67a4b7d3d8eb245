"""Machines that have too little of something."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch.distributed.run import main as torchrun  # what the command of that name runs
from torch.utils.data import DataLoader

from ddplab.faults.fault import fault

CATEGORY = "resource"


def _on_linux():
    """What is missing for limits that the system keeps."""
    return "" if sys.platform == "linux" else "Linux"


def _may_mount():
    """What forbids a process mounts of its own."""
    if sys.platform != "linux":
        return "Linux"
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        ended = subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:
        ended = 1
    return "the right to run unshare --mount" if ended else ""


# Memory --------------------------------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="a tensor is larger than the memory that the rank may have",
    sees="RuntimeError: …DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.",
    root=None,
    cause="host-memory",
    needs=_on_linux,
)
def out_of_memory():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))  # 32 GiB of addresses, as a batch system may set
    return torch.ones(2**20, 2**14).sum().item()


@out_of_memory.cured_by("a smaller batch, or piece by piece; more memory, or fewer ranks that share it")
def out_of_memory_repaired():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    return sum(torch.ones(2**4, 2**14).sum().item() for _ in range(8))


@fault(
    CATEGORY,
    did="rank 1 reads a whole data set into memory",
    sees={0: "returns 1", 1: "MemoryError"},
    root=1,
    cause="host-memory",
    needs=_on_linux,
    backend=None,
)
def memory_error():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    size = 2**36 if os.environ["RANK"] == "1" else 1
    return len(bytes(size))


@memory_error.cured_by("read it batch by batch, or as a memory map")
def memory_error_repaired():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    batches = (bytes(2**10) for _ in range(8))
    return sum(len(batch) for batch in batches)


@fault(
    CATEGORY,
    did="the system kills a rank of torchrun, as it does when memory runs out",
    sees="ChildFailedError: ",
    says="(exitcode: -9) local_rank: 1…Signal 9 (SIGKILL) received by PID",
    cause="killed",
    needs=_on_linux,
    in_folder=True,
    world_size=1,
    backend=None,
)
def killed_under_torchrun():
    script = """
import os, signal
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)  # here it does so itself
"""
    Path("train.py").write_text(script)
    torchrun(["--standalone", "--nproc-per-node=2", "train.py"])


@killed_under_torchrun.cured_by("less memory for each rank: fewer workers, smaller batches, no second copy of the data")
def killed_under_torchrun_repaired():
    script = """
import os
print("rank", os.environ["RANK"], "lives")
"""
    Path("train.py").write_text(script)
    torchrun(["--standalone", "--nproc-per-node=2", "train.py"])


@fault(
    CATEGORY,
    did="/dev/shm has 1 MiB, as in a container, and a worker of a DataLoader sends batches of 4 MB through it",
    sees="RuntimeError: Caught RuntimeError in DataLoader worker process 0.",
    says="RuntimeError: unable to allocate shared memory(shm)…No space left on device",
    cause="shared-memory",
    needs=_may_mount,
    world_size=1,
    backend=None,
)
def small_dev_shm():
    libc, new_mounts, private = ctypes.CDLL(None), 0x20000, 0x44000
    assert libc.unshare(new_mounts) == 0  # what is mounted from here on, no other process sees
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
    return sum(len(batch) for batch in DataLoader(torch.ones(4, 10**6), num_workers=1))


@small_dev_shm.cured_by("docker run --shm-size=8g, or --ipc=host; or no workers")
def small_dev_shm_repaired():
    libc, new_mounts, private = ctypes.CDLL(None), 0x20000, 0x44000
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m") == 0
    return sum(len(batch) for batch in DataLoader(torch.ones(4, 10**6), num_workers=1))


@fault(
    CATEGORY,
    did="a tensor is larger than the GPU",
    sees="OutOfMemoryError: CUDA out of memory. Tried to allocate",
    cause="gpu-memory",
    needs=lambda: "" if torch.cuda.is_available() else "a GPU",
    world_size=1,
    backend=None,
)
def gpu_out_of_memory():
    return torch.ones(2**30, 2**10, device="cuda").sum().item()


@gpu_out_of_memory.cured_by("a smaller batch, or pieces of it whose gradients add up")
def gpu_out_of_memory_repaired():
    return sum(torch.ones(2**4, 2**10, device="cuda").sum().item() for _ in range(8))


# Files, disks and processes ------------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="all batches of a DataLoader with a worker are kept, and each holds an open file",
    sees="RuntimeError: Too many open files. Communication with the workers is no longer possible.",
    cause="open-files",
    needs=_on_linux,
    world_size=1,
    backend=None,
)
def too_many_open_files():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    for batch in DataLoader(torch.ones(200), num_workers=1):
        kept.append(batch)
    return len(kept)


@too_many_open_files.cured_by("keep copies, and let the batches go; or raise the limit: ulimit -n 65535")
def too_many_open_files_repaired():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    for batch in DataLoader(torch.ones(200), num_workers=1):
        kept.append(batch.clone())
    return len(kept)


@fault(
    CATEGORY,
    did="rank 1 opens files and closes none",
    sees={0: "returns 200", 1: "OSError: [Errno 24] Too many open files"},
    root=1,
    cause="open-files",
    needs=_on_linux,
    in_folder=True,
    backend=None,
)
def files_left_open():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    for name in range(200):
        file = open(f"{os.environ['RANK']}-{name}", "w")
        kept.append(file if os.environ["RANK"] == "1" else file.close())
    return len(kept)


@files_left_open.cured_by("with open(...) as file: closes it")
def files_left_open_repaired():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    for name in range(200):
        with open(f"{os.environ['RANK']}-{name}", "w") as file:
            kept.append(file.write("x"))
    return len(kept)


@fault(
    CATEGORY,
    did="a rank writes its log to a full disk",
    sees="OSError: [Errno 28] No space left on device",
    cause="disk-full",
    needs=_on_linux,
    world_size=1,
    backend=None,
)
def disk_full():
    with open("/dev/full", "w") as log:  # a file whose disk is always full
        log.write("step 1: loss 0.5")


@disk_full.cured_by("df -h tells which disk; remove old checkpoints, or write elsewhere")
def disk_full_repaired():
    with open("/dev/null", "w") as log:
        log.write("step 1: loss 0.5")


@fault(
    CATEGORY,
    did="a checkpoint does not fit the disk",
    sees="RuntimeError: [enforce fail at inline_container.cc:…] . unexpected pos",
    cause="disk-full",
    needs=_on_linux,
    world_size=1,
    backend=None,
)
def checkpoint_does_not_fit():
    torch.save({"weight": torch.ones(10**6)}, "/dev/full")


@checkpoint_does_not_fit.cured_by("make room, and load again what was saved: half a file is no checkpoint")
def checkpoint_does_not_fit_repaired():
    torch.save({"weight": torch.ones(10**6)}, "/dev/null")


@fault(
    CATEGORY,
    did="a rank starts a thread, and the limit of processes and threads is reached",
    sees="RuntimeError: can't start new thread",
    cause="threads",
    needs=_on_linux,
    world_size=1,
    backend=None,
)
def too_many_threads():
    import resource

    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:
        os.setuid(65534)  # the limit is not for root; this is nobody
    reader = threading.Thread(target=print, args=("reading ahead",))
    reader.start()
    reader.join()


@too_many_threads.cured_by("fewer threads and workers; or raise the limit: ulimit -u, docker run --pids-limit=-1")
def too_many_threads_repaired():
    import resource

    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:
        os.setuid(65534)
    print("reading when it is needed")
