"""Launchers and notebooks: what happens before a rank begins, and how it ends."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.launch import main as torch_launch
from torch.distributed.run import main as torchrun  # what the commands of that name run
from torch.utils.data import DataLoader

from ddplab.faults.fault import fault

CATEGORY = "launcher_notebook"


def _may_fork():
    """What is missing for processes that start at once."""
    return "" if "fork" in mp.get_all_start_methods() else "the start method fork"


def _has_gpu():
    return "" if torch.cuda.is_available() else "a GPU"


# Scripts and their launchers -----------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="the script knows --local_rank, and the launcher gives it --local-rank",
    sees="ChildFailedError: ",
    says="train.py: error: unrecognized arguments: --local-rank=0",
    cause="local-rank-argument",
    in_folder=True,
    world_size=1,
    backend=None,
)
def local_rank_argument():
    script = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
print("local rank", parser.parse_args().local_rank)
"""
    Path("train.py").write_text(script)
    torch_launch(["--master-port=0", "train.py"])  # python -m torch.distributed.launch ...


@local_rank_argument.cured_by("accept both spellings; better: torchrun, and LOCAL_RANK from the environment")
def local_rank_argument_repaired():
    script = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
print("local rank", parser.parse_args().local_rank)
"""
    Path("train.py").write_text(script)
    torch_launch(["--master-port=0", "train.py"])  # python -m torch.distributed.launch ...


@fault(
    CATEGORY,
    did="the script demands --local_rank, which torchrun does not give",
    sees="ChildFailedError: ",
    says="train.py: error: the following arguments are required: --local_rank",
    cause="local-rank-argument",
    in_folder=True,
    world_size=1,
    backend=None,
)
def local_rank_required():
    script = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
print("local rank", parser.parse_args().local_rank)
"""
    Path("train.py").write_text(script)
    torchrun(["--standalone", "train.py"])


@local_rank_required.cured_by("torchrun tells it in the environment: LOCAL_RANK")
def local_rank_required_repaired():
    script = """
import os
print("local rank", os.environ["LOCAL_RANK"])
"""
    Path("train.py").write_text(script)
    torchrun(["--standalone", "train.py"])


@fault(
    CATEGORY,
    did="the script wants LOCAL_RANK, and plain python starts it",
    sees="KeyError: 'LOCAL_RANK'",
    cause="local-rank-variable",
    env={"LOCAL_RANK": None},
    world_size=1,
    backend=None,
)
def missing_local_rank():
    return int(os.environ["LOCAL_RANK"])


@missing_local_rank.cured_by("start it with torchrun, or take 0 where there is no launcher")
def missing_local_rank_repaired():
    return int(os.environ.get("LOCAL_RANK", "0"))


@fault(
    CATEGORY,
    did="a script under torchrun raises on rank 1",
    sees="ChildFailedError: ",
    says="ValueError: no data for rank 1",
    cause="rank-raised",
    in_folder=True,
    world_size=1,
    backend=None,
)
def torchrun_child_fails():
    script = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("no data for rank 1")
"""
    Path("train.py").write_text(script)
    torchrun(["--standalone", "--nproc-per-node=2", "train.py"])


@torchrun_child_fails.cured_by("mend the line that the traceback of the rank names, above the report of torchrun")
def torchrun_child_fails_repaired():
    script = """
import os
print("rank", os.environ["RANK"], "has data")
"""
    Path("train.py").write_text(script)
    torchrun(["--standalone", "--nproc-per-node=2", "train.py"])


@fault(
    CATEGORY,
    did="torchrun is told of two machines, and started on one",
    sees="RendezvousTimeoutError: ",
    cause="rendezvous-incomplete",
    in_folder=True,
    world_size=1,
    backend=None,
)
def torchrun_node_missing():
    Path("train.py").write_text("print('here')")
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=1"]
    torchrun([*where, "--nnodes=2", "train.py"])


@torchrun_node_missing.cured_by("as many machines as --nnodes says, all with the same --rdzv-id and --rdzv-endpoint")
def torchrun_node_missing_repaired():
    Path("train.py").write_text("print('here')")
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=1"]
    torchrun([*where, "--nnodes=1", "train.py"])


# Processes from a cell, and from a script ----------------------------------------------------------------


@fault(
    CATEGORY,
    did="a function of a cell is started by spawn, and the new process has no cells",
    sees="CalledProcessError: Command …",
    says="AttributeError: Can't get attribute 'work' on <module '__main__'",
    cause="spawn-from-main",
    in_folder=True,
    world_size=1,
    backend=None,
)
def function_in_cell():
    cell = """
import multiprocessing

def work():
    print("at work")

process = multiprocessing.get_context("spawn").Process(target=work)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
    subprocess.run([sys.executable, "-c", cell], check=True)


@function_in_cell.cured_by("write the function to a file and import it; or launch it with ddplab, which ships it")
def function_in_cell_repaired():
    cell = """
import multiprocessing, worker

process = multiprocessing.get_context("spawn").Process(target=worker.work)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
    Path("worker.py").write_text("def work():\n    print('at work')")
    subprocess.run([sys.executable, "-c", cell], check=True)


@fault(
    CATEGORY,
    did="a lambda is started by spawn",
    sees="CalledProcessError: Command …",
    says="PicklingError: Can't pickle <function <lambda> at 0x…>: attribute lookup <lambda> on __main__ failed",
    cause="spawn-from-main",
    world_size=1,
    backend=None,
)
def lambda_to_spawn():
    cell = """
import multiprocessing

process = multiprocessing.get_context("spawn").Process(target=lambda: print("at work"))
process.start()
process.join()
"""
    subprocess.run([sys.executable, "-c", cell], check=True)


@lambda_to_spawn.cured_by("a function that a module knows by its name")
def lambda_to_spawn_repaired():
    cell = """
import multiprocessing

process = multiprocessing.get_context("spawn").Process(target=print, args=("at work",))
process.start()
process.join()
"""
    subprocess.run([sys.executable, "-c", cell], check=True)


@fault(
    CATEGORY,
    did="a lock is given to a process that spawn starts",
    sees="TypeError: cannot pickle '_thread.lock' object",
    cause="spawn-unpicklable",
    world_size=1,
    backend=None,
)
def lock_as_argument():
    context, lock = mp.get_context("spawn"), threading.Lock()
    process = context.Process(target=print, args=(lock,))
    process.start()
    process.join()


@lock_as_argument.cured_by("a lock that processes share; or make it in the process")
def lock_as_argument_repaired():
    context = mp.get_context("spawn")
    lock = context.Lock()
    process = context.Process(target=print, args=(lock,))
    process.start()
    process.join()


@fault(
    CATEGORY,
    did="a result that still has its graph is sent to another process",
    sees="RuntimeError: Cowardly refusing to serialize non-leaf tensor which requires_grad",
    cause="tensor-with-graph",
    world_size=1,
    backend=None,
)
def tensor_with_graph():
    loss = torch.ones(2, requires_grad=True).sum()
    process = mp.get_context("spawn").Process(target=print, args=(loss,))
    process.start()
    process.join()


@tensor_with_graph.cured_by("send the number, or loss.detach()")
def tensor_with_graph_repaired():
    loss = torch.ones(2, requires_grad=True).sum()
    process = mp.get_context("spawn").Process(target=print, args=(loss.item(),))
    process.start()
    process.join()


@fault(
    CATEGORY,
    did="a function for spawn has no argument for the rank",
    sees="ProcessRaisedException: -- Process 0 terminated with the following error:",
    says="TypeError: forgotten_rank.<locals>.work() takes 0 positional arguments but 1 was given",
    cause="rank-raised",
    needs=_may_fork,
    world_size=1,
    backend=None,
)
def forgotten_rank():
    def work():
        print("at work")

    mp.start_processes(work, start_method="fork")


@forgotten_rank.cured_by("its first argument is the rank; args= of spawn come after it")
def forgotten_rank_repaired():
    def work(rank):
        print("at work")

    mp.start_processes(work, start_method="fork")


@fault(
    CATEGORY,
    did="a process of spawn ends by sys.exit, with a code that is not 0",
    sees="ProcessExitedException: process 0 terminated with exit code 3",
    cause="rank-raised",
    needs=_may_fork,
    world_size=1,
    backend=None,
)
def exit_under_spawn():
    def work(rank):
        sys.exit(3)

    mp.start_processes(work, start_method="fork")


@exit_under_spawn.cured_by("return, or raise an exception: then its traceback comes back, and not a number alone")
def exit_under_spawn_repaired():
    def work(rank):
        return

    mp.start_processes(work, start_method="fork")


@fault(
    CATEGORY,
    did="a script starts processes while it is imported by one of them",
    sees="CalledProcessError: Command …",
    says="An attempt has been made to start a new process before the…current process has finished its bootstrapping",
    cause="no-main-guard",
    in_folder=True,
    world_size=1,
    backend=None,
)
def no_main_guard():
    script = """
import multiprocessing

context = multiprocessing.get_context("spawn")
process = context.Process(target=print, args=("a child",))
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
    Path("train.py").write_text(script)
    subprocess.run([sys.executable, "train.py"], check=True)


@no_main_guard.cured_by('put the start under if __name__ == "__main__":')
def no_main_guard_repaired():
    script = """
import multiprocessing

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=print, args=("a child",))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    Path("train.py").write_text(script)
    subprocess.run([sys.executable, "train.py"], check=True)


@fault(
    CATEGORY,
    did="the start method is set by a cell that is run again",
    sees="RuntimeError: context has already been set",
    cause="start-method-twice",
    world_size=1,
    backend=None,
)
def start_method_twice():
    for _ in range(2):
        mp.set_start_method("spawn")


@start_method_twice.cured_by("force=True, or a context of its own: mp.get_context('spawn')")
def start_method_twice_repaired():
    for _ in range(2):
        mp.set_start_method("spawn", force=True)


@fault(
    CATEGORY,
    did="a daemonic process has a DataLoader with workers",
    sees="ProcessRaisedException: -- Process 0 terminated with the following error:",
    says="AssertionError: daemonic processes are not allowed to have children",
    cause="daemon-children",
    needs=_may_fork,
    world_size=1,
    backend=None,
)
def daemon_with_workers():
    def work(rank):
        print(list(DataLoader([1, 2], num_workers=1)))

    mp.start_processes(work, daemon=True, start_method="fork")


@daemon_with_workers.cured_by("daemon=False, or num_workers=0")
def daemon_with_workers_repaired():
    def work(rank):
        print(list(DataLoader([1, 2], num_workers=1)))

    mp.start_processes(work, daemon=False, start_method="fork")


@fault(
    CATEGORY,
    did="a process is forked after the GPU was used",
    sees="ProcessRaisedException: -- Process 0 terminated with the following error:",
    says="RuntimeError: Cannot re-initialize CUDA in forked subprocess",
    cause="cuda-before-fork",
    needs=_has_gpu,
    world_size=1,
    backend=None,
)
def cuda_before_fork():
    def work(rank):
        print(torch.ones(2, device="cuda"))

    torch.ones(2, device="cuda")
    mp.start_processes(work, start_method="fork")


@cuda_before_fork.cured_by("fork before the GPU is used, or spawn")
def cuda_before_fork_repaired():
    def work(rank):
        print(torch.ones(2, device="cuda"))

    mp.start_processes(work, start_method="fork")


# How a rank ends -----------------------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="rank 1 ends its process without a word, even with a good exit code",
    sees={0: "echo", 1: "exit code 0"},
    root=1,
    cause="silent-exit",
)
def silent_exit():
    if dist.get_rank() == 1:
        print("done")  # never seen: os._exit does not empty the buffer
        os._exit(0)
    dist.all_reduce(torch.ones(2))


@silent_exit.cured_by("let the function return, after the last collective of all ranks")
def silent_exit_repaired():
    if dist.get_rank() == 1:
        print("done")
    dist.all_reduce(torch.ones(2))


@fault(
    CATEGORY,
    did="native code of rank 1 reads memory that is not there",
    sees={0: "echo", 1: "SIGSEGV"},
    root=1,
    cause="spawn-crashed",
)
def rank_crashes():
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(2))


@rank_crashes.cured_by("find the extension by python -X faulthandler, and build it for this torch")
def rank_crashes_repaired():
    if dist.get_rank() == 1:
        ctypes.string_at(b"")
    dist.all_reduce(torch.ones(2))
