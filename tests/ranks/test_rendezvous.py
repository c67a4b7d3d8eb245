"""Where ranks meet: the environment, the process group, and nobody else on the network."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddplab import device, launch

# The environment --------------------------------------------------------------------------------------

PRINT_ENVIRONMENT = """
import json, os
path = f"{os.environ['FOLDER']}/{os.environ['RANK']}.json"
with open(path, "w") as file:
    json.dump(dict(os.environ), file)
"""
# What these hold belongs to one run of torchrun or of launch.
OF_ONE_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
# These tell of torchrun's own handling of failures, signals and threads; launch has its own.
OF_TORCHRUN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"}


def test_the_environment_is_that_of_torchrun(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that torchrun sets on one node is there in every rank, with the same value."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    before = dict(os.environ)
    (tmp_path / "script.py").write_text(PRINT_ENVIRONMENT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*torchrun, str(tmp_path / "script.py")], check=True, capture_output=True, timeout=120, env=before)

    def environment() -> dict[str, str]:
        return dict(os.environ)

    for rank, mine in enumerate(launch(environment, backend=None).results):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        told = {name for name, value in theirs.items() if before.get(name) != value} - OF_TORCHRUN
        assert told - mine.keys() == set()
        assert {name: theirs[name] for name in told - OF_ONE_RUN} == {name: mine[name] for name in told - OF_ONE_RUN}
        assert mine["MASTER_ADDR"] == "127.0.0.1"
        assert int(mine["MASTER_PORT"]) > 0


def test_ranks_have_the_environment_of_the_moment_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the notebook set or removed in os.environ before the launch is so in the ranks.

    Was a bug: the forkserver's children have the environment of the forkserver's start.
    """
    monkeypatch.setenv("LATE", "1")

    def look() -> str | None:
        return os.environ.get("LATE")

    assert launch(look, backend=None).results == ["1", "1"]
    monkeypatch.setenv("LATE", "2")
    assert launch(look, backend=None).results == ["2", "2"]
    monkeypatch.delenv("LATE")
    assert launch(look, backend=None).results == [None, None]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_env_adds_and_removes_variables_in_the_ranks_only(start_method: str) -> None:
    """env= adds a variable, None removes one, and the notebook's own environment stays as it was."""
    before = dict(os.environ)

    def look() -> tuple[str | None, bool]:
        return os.environ.get("ADDED"), "HOME" in os.environ or "PATH" in os.environ

    env = {"ADDED": "ä=1", "HOME": None, "PATH": None}
    assert launch(look, env=env, start_method=start_method).results == [("ä=1", False)] * 2
    assert dict(os.environ) == before


def test_env_reaches_torch() -> None:
    """TORCH_DISTRIBUTED_DEBUG takes effect, though torch was loaded before it was set."""

    def level() -> str:
        import torch.distributed as dist

        return str(dist.get_debug_level())

    assert launch(level, env={"TORCH_DISTRIBUTED_DEBUG": "INFO"}).results == ["DebugLevel.INFO"] * 2
    assert launch(level).results == ["DebugLevel.OFF"] * 2


def test_torch_may_be_imported_right_after_ddplab() -> None:
    """In a notebook, any import of torch may follow that of ddplab at once.

    Was a bug: ddplab imported torch in a thread meanwhile, and the kernel died.
    """
    notebook = "import sys; sys.modules['ipykernel'] = sys; import ddplab; import torch.distributed as dist"
    subprocess.run([sys.executable, "-c", notebook], check=True, timeout=120)


# The process group ------------------------------------------------------------------------------------


@pytest.fixture
def add() -> Callable[..., float]:
    """A function that initialises a group, sums the ranks' numbers, and destroys the group."""

    def add(**how: Any) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", **how)
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.item()

    return add  # made in a function, so it travels by value: no rank has to import this file


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"init_method": "env://"}], ids=["bare", "env"])
def test_init_process_group_works_unchanged(world_size: int, how: dict[str, str], add: Callable[..., float]) -> None:
    """With backend=None the function initialises the group itself, as under torchrun."""
    run = launch(lambda: add(**how), world_size=world_size, backend=None)
    assert run.results == [sum(range(1, world_size + 1))] * world_size


def test_a_group_can_be_made_after_the_one_of_launch(add: Callable[..., float]) -> None:
    """The group that launch made can be destroyed, and another one made in its place.

    Was a bug: the second group read the addresses of the first in the store.
    """

    def again() -> float:
        import torch.distributed as dist

        dist.destroy_process_group()
        return add()

    assert launch(again, backend="gloo").results == [3.0, 3.0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_a_backend_the_group_stands(world_size: int) -> None:
    """The function finds the group initialised, with the ranks of the environment, on the CPU."""

    def look() -> Any:
        import torch.distributed as dist

        return dist.get_backend(), dist.get_rank(), dist.get_world_size(), int(os.environ["RANK"]), str(device())

    run = launch(look, world_size=world_size, backend="gloo")
    assert run.results == [("gloo", rank, world_size, rank, "cpu") for rank in range(world_size)]
    assert run.backend == "gloo"


def test_the_group_is_destroyed_at_the_end() -> None:
    """A rank that has returned destroys the group that launch made."""

    def watch() -> None:
        import torch.distributed as dist

        destroy = dist.destroy_process_group

        def tell() -> None:
            destroy()
            print("destroyed", not dist.is_initialized(), flush=True)

        dist.destroy_process_group = tell

    assert launch(watch, backend="gloo").output(1) == "destroyed True"


def test_threads_are_set() -> None:
    """threads= is torch's number of threads in each rank, and 1 or more without it."""

    def count() -> int:
        import torch

        return torch.get_num_threads()

    assert launch(count, threads=3).results == [3, 3]
    run = launch(count)
    assert run.results == [run.spec.threads] * 2


def test_all_ranks_have_the_same_seed() -> None:
    """torch, random and numpy draw the same on every rank, and the same in the next launch; seed=1 draws others."""

    def draw() -> tuple[float, float, float]:
        import random

        import numpy as np
        import torch

        return torch.rand(()).item(), random.random(), float(np.random.rand())

    first, again = launch(draw).results, launch(draw).results
    other = launch(draw, world_size=1, seed=1).results[0]
    assert first[0] == first[1] == again[0] == again[1]
    assert all(a != b for a, b in zip(first[0], other, strict=True))


# The network ------------------------------------------------------------------------------------------


def test_everything_listens_on_loopback_only() -> None:
    """Store, Gloo and RPC of launcher and ranks listen on loopback addresses, nowhere else."""

    def addresses(launcher: int) -> list[str]:
        """The addresses at which the launcher and the ranks listen, from the tables of the kernel."""
        import torch.distributed as dist
        from torch.distributed import rpc

        rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=2)
        ids: list[Any] = [None, None]
        dist.all_gather_object(ids, os.getpid())
        inodes = set()
        for pid in [launcher, *ids]:
            for entry in os.listdir(f"/proc/{pid}/fd"):
                try:
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
                except FileNotFoundError:  # closed meanwhile
                    continue
        listening = []
        for name in ("tcp", "tcp6"):
            with open(f"/proc/net/{name}") as file:
                rows = [line.split() for line in file.readlines()[1:]]
            listening += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        rpc.shutdown()
        return sorted(address.rpartition(":")[0] for address in listening)

    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    for found in launch(addresses, os.getpid(), backend="gloo").results:
        assert len(found) >= 5  # the store, and Gloo and RPC of each rank
        assert set(found) - loopback == set()


def test_two_launches_at_once_do_not_disturb_each_other(add: Callable[..., float]) -> None:
    """Launches from two threads each have their own ranks, results and output."""

    def work(name: str) -> tuple[str, float]:
        print("I am", name)
        return name, add()

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(launch, work, name, backend=None, view="quiet") for name in "abab"]
        runs = [job.result() for job in jobs]
    assert [run.results for run in runs] == [[(name, 3.0)] * 2 for name in "abab"]
    assert [run.output(1) for run in runs] == [f"I am {name}" for name in "abab"]


def test_launch_works_inside_a_running_event_loop(add: Callable[..., float]) -> None:
    """A notebook's cells run inside asyncio; launch neither needs nor disturbs the loop."""

    async def cell() -> list[float]:
        return launch(add, backend=None).results

    assert asyncio.run(cell()) == [3.0, 3.0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_rpc_works_unchanged_without_a_group(world_size: int) -> None:
    """init_rpc with rank and world_size meets through the environment alone."""

    def ask() -> int:
        from torch.distributed import rpc

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
        told = rpc.rpc_sync(f"worker{(rank + 1) % size}", max, args=(rank, 10))
        rpc.shutdown()
        return int(told)

    assert launch(ask, world_size=world_size, backend=None).results == [10] * world_size


def test_files_are_private_to_the_user() -> None:
    """Whatever the umask, what a launch puts into the temporary folder can be read by its user alone."""
    script = """
import os, sys, tempfile
from pathlib import Path
from ddplab import launch

def flood():
    print("line\\n" * 5000)

os.umask(0)
run = launch(flood, view="quiet", backend=None)
for path in Path(tempfile.gettempdir()).rglob("*"):
    print(path.name.split("-")[0], oct(path.stat().st_mode & 0o777))
"""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TMPDIR": folder}
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    # torch makes an empty folder for its compiler when it is imported, as the umask says.
    found = {line for line in done.stdout.splitlines() if not line.startswith("torchinductor")}
    assert found >= {"ddplab 0o600", "pymp 0o700", "listener 0o600"}
    assert {line.split()[1] for line in found} == {"0o600", "0o700"}
