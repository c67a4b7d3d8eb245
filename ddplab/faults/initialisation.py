"""Ranks that do not come together at the start."""

import ctypes
import datetime
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from ddplab.faults.fault import fault

CATEGORY = "initialisation"
# The store of a launch is there before its ranks, as with torchrun: where rank 0 is to open one, it must not look so.
OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": None}


def _may_name_itself():
    """What forbids a process a host name of its own."""
    if sys.platform != "linux":
        return "Linux"
    command = ["unshare", "--uts", "hostname", "x" * 64]
    try:
        ended = subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:
        ended = 1
    return "the right to run unshare --uts" if ended else ""


def _may_lose_rights():
    """What forbids to try a port that belongs to the system."""
    if sys.platform != "linux":
        return "Linux"
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start") as file:
        return "" if int(file.read()) > 98 else "ports that belong to the system: here anybody may open all"


def _may_fork():
    """What is missing for an earlier run within the run."""
    return "" if hasattr(os, "fork") else "os.fork"


# What init_process_group is told -------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="RANK is not set, as in a script that was started without a launcher",
    sees="ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected",
    cause="env-missing",
    world_size=1,
    backend=None,
)
def missing_variable():
    del os.environ["RANK"]
    dist.init_process_group("gloo")


@missing_variable.cured_by("start it with torchrun, which sets the four variables, or set them before init")
def missing_variable_repaired():
    os.environ["RANK"] = "0"
    dist.init_process_group("gloo")


@fault(
    CATEGORY,
    did="rank and world size are given, but nobody says where to meet",
    sees="ValueError: Error initializing torch.distributed using env:// rendezvous: "
    "environment variable MASTER_ADDR expected",
    cause="env-missing",
    env={"MASTER_ADDR": None},
    world_size=1,
    backend=None,
)
def missing_master():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


@missing_master.cured_by("set MASTER_ADDR and MASTER_PORT to the same values on all ranks")
def missing_master_repaired():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


@fault(
    CATEGORY,
    did="an address is given, but not how many ranks meet there",
    sees="ValueError: Error initializing torch.distributed using tcp:// rendezvous: world size parameter missing",
    cause="init-method-incomplete",
    world_size=1,
    backend=None,
)
def no_world_size():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0)


@no_world_size.cured_by("with tcp:// give rank and world_size too")
def no_world_size_repaired():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


@fault(
    CATEGORY,
    did="init_method begins with a word that torch does not know",
    sees="RuntimeError: No rendezvous handler for http://",
    cause="rendezvous-scheme",
    world_size=1,
    backend=None,
)
def unknown_init_method():
    dist.init_process_group("gloo", init_method="http://127.0.0.1:29500", rank=0, world_size=1)


@unknown_init_method.cured_by("env://, tcp://host:port or file:///path; under torchrun leave init_method away")
def unknown_init_method_repaired():
    dist.init_process_group("gloo", init_method="env://", rank=0, world_size=1)


@fault(
    CATEGORY,
    did="MASTER_PORT is no number",
    sees="ValueError: invalid literal for int() with base 10: 'auto'",
    cause="port-invalid",
    env=OWN_STORE,
    world_size=1,
    backend=None,
)
def wrong_port():
    os.environ["MASTER_PORT"] = "auto"
    dist.init_process_group("gloo")


@wrong_port.cured_by("a number; 0 lets a group of one rank take any free port")
def wrong_port_repaired():
    os.environ["MASTER_PORT"] = "0"
    dist.init_process_group("gloo")


@fault(
    CATEGORY,
    did="MASTER_PORT is made from the number of the job, which is too large for a port",
    sees="ValueError: port must have value from 0 to 65535 but was 3604217.",
    cause="port-invalid",
    env=OWN_STORE,
    world_size=1,
    backend=None,
)
def port_out_of_range():
    job = 3604217
    os.environ["MASTER_PORT"] = str(job)
    dist.init_process_group("gloo")


@port_out_of_range.cured_by("take the number modulo 10000, and add 20000")
def port_out_of_range_repaired():
    job = 3604217
    os.environ["MASTER_PORT"] = str(20000 + job % 10000)
    dist.init_process_group("gloo")


@fault(
    CATEGORY,
    did="timeout is a number of seconds",
    sees="TypeError: Expected timeout argument to be of type datetime.timedelta, got 60",
    cause="timeout-type",
    world_size=1,
    backend=None,
)
def timeout_as_number():
    dist.init_process_group("gloo", timeout=60)


@timeout_as_number.cured_by("a timedelta")
def timeout_as_number_repaired():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))


@fault(
    CATEGORY,
    did="the name of the backend is misspelt",
    sees="AssertionError: Unknown backend type glo",
    cause="unknown-backend",
    world_size=1,
    backend=None,
)
def unknown_backend():
    dist.init_process_group("glo")


@unknown_backend.cured_by("gloo on CPUs, nccl on GPUs")
def unknown_backend_repaired():
    dist.init_process_group("gloo")


@fault(
    CATEGORY,
    did="the MPI backend is asked for, which torch from pip does not have",
    sees="RuntimeError: Distributed package doesn't have MPI built in.",
    cause="backend-not-built",
    world_size=1,
    backend=None,
)
def mpi_backend():
    dist.init_process_group("mpi")


@mpi_backend.cured_by("gloo does the same on CPUs; MPI needs a torch built from source")
def mpi_backend_repaired():
    dist.init_process_group("gloo")


@fault(
    "nccl_backend",
    did="nccl is asked for, and the ranks see no GPU",
    # The second is said by a torch for CPUs alone.
    sees="ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found! "
    "or RuntimeError: Distributed package doesn't have NCCL built in",
    cause="nccl-without-gpu",
    env={"CUDA_VISIBLE_DEVICES": ""},
    world_size=1,
    backend=None,
)
def nccl_without_gpu():
    dist.init_process_group("nccl")


@nccl_without_gpu.cured_by("choose the backend by what there is")
def nccl_without_gpu_repaired():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


# Where the ranks meet ------------------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="another program listens on the port of rank 0",
    sees="DistNetworkError: The server socket has failed to listen on any local network address. port: …EADDRINUSE",
    cause="port-taken",
    env=OWN_STORE,
    world_size=1,
    backend=None,
)
def taken_port():
    other = socket.create_server(("", 0))
    port = other.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


@taken_port.cured_by("end the other program, or take another port; torchrun --standalone finds a free one")
def taken_port_repaired():
    other = socket.create_server(("", 0))
    port = other.getsockname()[1]
    other.close()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


@fault(
    CATEGORY,
    did="an ordinary user takes a port that belongs to the system",
    sees="DistNetworkError: The server socket has failed to bind. port: 98, …EACCES",
    cause="port-denied",
    needs=_may_lose_rights,
    env=OWN_STORE,
    world_size=1,
    backend=None,
)
def forbidden_port():
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may do all; this is nobody
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:98", rank=0, world_size=1)


@forbidden_port.cured_by("a port above 1024")
def forbidden_port_repaired():
    if os.geteuid() == 0:
        os.seteuid(65534)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


@fault(
    CATEGORY,
    did="rank 1 comes to an address where rank 0 is not",
    sees="DistNetworkError: The client socket has timed out after 500ms while trying to connect to (127.0.0.1, 1).",
    cause="master-unreachable",
    world_size=1,
    backend=None,
)
def rank_0_absent():
    where = "tcp://127.0.0.1:1"  # nobody listens there
    soon = datetime.timedelta(seconds=0.5)
    dist.init_process_group("gloo", init_method=where, rank=1, world_size=2, timeout=soon)


@rank_0_absent.cured_by("start rank 0 too, and give all ranks its address and port")
def rank_0_absent_repaired():
    where = "tcp://127.0.0.1:0"
    soon = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=soon)


@fault(
    CATEGORY,
    did="MASTER_ADDR is a name that this machine cannot resolve",
    sees="DistNetworkError: The client socket has timed out after 500ms while trying to connect to (node-0.invalid, …",
    cause="master-unreachable",
    world_size=1,
    backend=None,
)
def wrong_master_addr():
    os.environ["MASTER_ADDR"] = "node-0.invalid"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=0.5))


@wrong_master_addr.cured_by("an address that all ranks reach; on one machine 127.0.0.1")
def wrong_master_addr_repaired():
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))


@fault(
    CATEGORY,
    did="rank 0 waits for a second rank that nobody has started",
    sees="DistStoreError: Timed out after …clients. 1/2 clients joined.",
    cause="ranks-missing",
    env=OWN_STORE,
    world_size=1,
    backend=None,
)
def wrong_world_size():
    soon = datetime.timedelta(seconds=0.5)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=2, timeout=soon)


@wrong_world_size.cured_by("as many processes as the world size says: torchrun starts them, and counts")
def wrong_world_size_repaired():
    soon = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=soon)


@fault(
    CATEGORY,
    did="each of two processes was started as a job of one, so nobody talks to anybody",
    sees="returns 1.0",
    right=(2.0, 2.0),
    cause="world-of-one",
    backend=None,
)
def world_of_one():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@world_of_one.cured_by("one job: let the launcher say rank and world size")
def world_of_one_repaired():
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@fault(
    CATEGORY,
    did="ranks are counted from 1",
    sees={0: "echo or RuntimeError: …", 1: "RuntimeError: …rank < size. 2 vs 2"},
    root=1,
    cause="rank-out-of-range",
    backend=None,
)
def rank_out_of_range():
    os.environ["RANK"] = str(int(os.environ["LOCAL_RANK"]) + 1)
    dist.init_process_group("gloo")
    dist.barrier()


@rank_out_of_range.cured_by("ranks run from 0 to the world size less one")
def rank_out_of_range_repaired():
    os.environ["RANK"] = str(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    dist.barrier()


@fault(
    CATEGORY,
    did="both processes have rank 0, so both wait for rank 1",
    sees="DistStoreError: wait timeout after …ms, keys: … or echo",
    root=None,
    cause="store-wait",
    backend=None,
)
def rank_twice():
    soon = datetime.timedelta(seconds=0.5)
    dist.init_process_group("gloo", rank=0, world_size=2, timeout=soon)
    dist.barrier()


@rank_twice.cured_by("no rank in the code: take it from the launcher")
def rank_twice_repaired():
    soon = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2, timeout=soon)
    dist.barrier()


@fault(
    CATEGORY,
    did="rank 1 asks the store for a key that rank 0 has spelt otherwise",
    sees={0: "returns None", 1: "DistStoreError: wait timeout after 500ms, keys: /…data-path"},
    root=1,
    cause="store-wait",
    backend=None,
)
def missing_key():
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=0.5))
    if os.environ["RANK"] == "0":
        store.set("data_path", "/data")
    else:
        store.get("data-path")


@missing_key.cured_by("the same key on both sides; best a name that is written once")
def missing_key_repaired():
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=5))
    if os.environ["RANK"] == "0":
        store.set("data_path", "/data")
    else:
        store.get("data_path")


@fault(
    CATEGORY,
    did="the file of an earlier run was left, with the addresses of processes that are gone; rank 0 comes first",
    sees={0: "RuntimeError: Gloo connectFullMesh failed with", 1: "echo"},
    cause="stale-file-store",
    needs=_may_fork,
    in_folder=True,
    env={"TORCH_DIST_INIT_BARRIER": "1"},  # lets the earlier run be whole before it ends
    backend=None,
)
def stale_file_store():
    def train(rank, seconds):
        store, limit = os.path.abspath("store"), datetime.timedelta(seconds=seconds)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)

    if os.environ["RANK"] == "0":
        for rank in range(2):  # the earlier run: its ranks end without destroy_process_group
            if os.fork() == 0:
                train(rank, 20)
                os._exit(0)
        os.wait(), os.wait()
    else:
        time.sleep(5)
    train(int(os.environ["RANK"]), 0.2)


@stale_file_store.cured_by("a new name for each run, or delete the file before; better env://, which needs none")
def stale_file_store_repaired():
    def train(rank, name):
        store = os.path.abspath(name)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    if os.environ["RANK"] == "0":
        for rank in range(2):
            if os.fork() == 0:
                train(rank, "store1")
                os._exit(0)
        os.wait(), os.wait()
    train(int(os.environ["RANK"]), "store2")


# Interfaces and names ------------------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="GLOO_SOCKET_IFNAME names an interface that this machine does not have",
    sees="RuntimeError: …Unable to find address for: eth77",
    cause="wrong-interface",
    world_size=1,
    backend=None,
)
def wrong_interface():
    os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    dist.init_process_group("gloo")


@wrong_interface.cured_by("one that `ip addr` lists, or none: then Gloo looks for itself")
def wrong_interface_repaired():
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_nameindex()[0][1]
    dist.init_process_group("gloo")


@fault(
    CATEGORY,
    did="the machine has a host name of 64 letters, one more than Gloo can read",
    sees="DistBackendError: File name too long",
    cause="host-name-long",
    needs=_may_name_itself,
    env={"GLOO_SOCKET_IFNAME": None},
    world_size=1,
    backend=None,
)
def host_name_of_64_characters():
    new_uts = 0x04000000  # a host name for this thread alone, not for the machine
    assert ctypes.CDLL(None).unshare(new_uts) == 0
    socket.sethostname("n" * 64)
    dist.init_process_group("gloo")


@host_name_of_64_characters.cured_by("a shorter name, or GLOO_SOCKET_IFNAME, with which Gloo does not read it")
def host_name_of_64_characters_repaired():
    new_uts = 0x04000000
    assert ctypes.CDLL(None).unshare(new_uts) == 0
    socket.sethostname("n" * 64)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")


# Groups --------------------------------------------------------------------------------------------------


@fault(
    CATEGORY,
    did="a cell was run again",
    sees="ValueError: trying to initialize the default process group twice!",
    cause="init-twice",
    world_size=1,
    backend=None,
)
def init_twice():
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


@init_twice.cured_by("ask first, or call destroy_process_group before the second")
def init_twice_repaired():
    dist.init_process_group("gloo")
    if not dist.is_initialized():
        dist.init_process_group("gloo")


@fault(
    CATEGORY,
    did="a collective is called before init_process_group",
    sees="ValueError: Default process group has not been initialized",
    cause="no-init",
    world_size=1,
    backend=None,
)
def no_init():
    dist.all_reduce(torch.ones(2))


@no_init.cured_by("init_process_group first, in each process that uses it")
def no_init_repaired():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))


@fault(
    "collective_mismatch",
    did="rank 0 makes a group without rank 1, which is not in it but should have called new_group too",
    sees={0: "hangs in new_group", 1: "hangs in barrier"},
    cause="call-missing",
    timeout_s=1.5,
)
def group_by_members_only():
    if dist.get_rank() == 0:
        dist.new_group([0])
    dist.barrier()


@group_by_members_only.cured_by("call new_group on all ranks, in the same order; members alone use the group")
def group_by_members_only_repaired():
    dist.new_group([0])
    dist.barrier()


@fault(
    CATEGORY,
    did="a group is made of ranks that the job does not have",
    sees="ValueError: Rank 2 is out of range. Valid ranks are 0 to 1 (world_size=2)",
    root=None,
    cause="rank-out-of-range",
)
def group_of_absent_ranks():
    dist.new_group([1, 2])


@group_of_absent_ranks.cured_by("only ranks below the world size")
def group_of_absent_ranks_repaired():
    dist.new_group([0, 1])


@fault(
    "collective_mismatch",
    did="rank 1 is not in the group, and reduces in it all the same",
    sees={0: "returns 1.0", 1: "returns 1.0"},
    right=(2.0, 2.0),
    says="Running all_reduce on global rank 1 which does not belong to the given group.",
    cause="not-in-group",
)
def outside_the_group():
    group = dist.new_group([0])
    x = torch.ones(1)
    dist.all_reduce(x, group=group)  # rank 1 gets a warning, and goes on
    return x.item()


@outside_the_group.cured_by("a group of all ranks that are to take part")
def outside_the_group_repaired():
    group = dist.new_group([0, 1])
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return x.item()
