"""The lesson on process groups: its script under torchrun, and what its text claims without a cell that shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ddplab import Run, launch
from ddplab.rendezvous import open_store

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "01_process_groups.ipynb"
KEYS = [f"default_pg/0//cpu//0/{rank}" for rank in range(2)]
MAX_TRIES = 8
TELL = """
import os, sys
told = [os.environ["OMP_NUM_THREADS"], "LOCAL_RANK" in os.environ, sys.argv[1:]]
os.write(1, f"{told}\\n".encode())  # in one piece: two ranks write at once
"""
Init: TypeAlias = Callable[[int, str], None]


# Under torchrun ---------------------------------------------------------------------------------------


def torchrun(file: Path) -> list[str]:
    """What ``file`` prints on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_script_of_the_lesson_runs_under_torchrun(tmp_path: Path) -> None:
    """It adds 1 and 2 up over the pair, and finds the keys of the job and of the pair in the store."""
    (cell,) = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.source.startswith("script = '''")]
    namespace: dict[str, str] = {}
    exec(cell.source, namespace)
    file = tmp_path / "groups.py"
    file.write_text(namespace["script"])
    assert torchrun(file) == ["sum", "3.0", *(key.replace("0//cpu", "0//1//cpu") for key in KEYS), *KEYS]


def test_torchrun_gives_one_thread_and_no_argument(tmp_path: Path) -> None:
    """Each rank has OMP_NUM_THREADS=1, and learns its local rank from the environment only."""
    file = tmp_path / "told.py"
    file.write_text(TELL)
    assert torchrun(file) == ["['1', True, []]"] * 2


# Meeting ----------------------------------------------------------------------------------------------


@pytest.fixture
def init() -> Init:
    """A function that joins by an ``init_method``, with a time-out of 1 s; local, so that no rank imports this file."""

    def init(rank: int, init_method: str) -> None:
        import datetime

        import torch.distributed as dist

        dist.init_process_group("gloo", init_method, datetime.timedelta(seconds=1), 2, rank)

    return init


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A run without a process group, which may fail."""
    return launch(fn, *args, backend=None, view="quiet", allow_failure=True, **options)


def test_a_rank_that_reaches_a_stranger_waits_beyond_its_timeout(init: Init) -> None:
    """A server that accepts and says nothing holds a rank up in init, though that has a time-out."""
    import socket

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        run = quiet(init, 1, f"tcp://127.0.0.1:{stranger.getsockname()[1]}", world_size=1, timeout_s=6)
    assert [failure.type for failure in run.failures] == ["Timeout"]
    assert "waits in init_process_group" in run.report()


def test_a_rank_that_reaches_the_store_of_another_job_writes_its_address_there(init: Init) -> None:
    """It cannot tell whose store it is."""
    store = open_store()
    quiet(init, 1, f"tcp://127.0.0.1:{store.port}", world_size=1)
    assert store.list_keys() == [KEYS[1]]


def test_num_keys_also_counts_the_key_in_which_a_store_counts_ranks() -> None:
    """A client that names the world size is counted in a key which list_keys does not give."""
    store = open_store()
    dist.TCPStore("127.0.0.1", store.port, is_master=False)
    assert (store.num_keys(), store.list_keys()) == (0, [])
    dist.TCPStore("127.0.0.1", store.port, world_size=2, is_master=False)
    assert (store.num_keys(), store.list_keys()) == (1, [])


def test_a_stale_file_leads_to_dead_addresses(init: Init, tmp_path: Path) -> None:
    """A rank that comes first takes the address of a dead process; by luck it works all the same, but not often."""

    def meet(url: str, crash: bool) -> None:
        import time

        rank = int(os.environ["RANK"])
        time.sleep(0 if crash else 0.5 * rank)
        init(rank, url)
        dist.barrier()
        if crash:
            os._exit(1)

    for number in range(MAX_TRIES):
        url = f"file://{tmp_path}/meeting{number}"
        quiet(meet, url, True)
        again = quiet(meet, url, False, timeout_s=5)
        if any("Gloo connectFullMesh failed" in failure.message for failure in again.failures):
            return
    raise AssertionError(f"{MAX_TRIES} times nothing happened")


def test_a_rank_that_comes_after_the_timeout_fails_too(init: Init) -> None:
    """The one in time misses the key of the late one, which then calls a process that has left."""

    def late() -> str:
        import time

        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        rank = int(os.environ["RANK"])
        if rank == 1:
            store.wait(["gave up"])
            time.sleep(0.5)
        try:
            init(rank, "env://")
        except RuntimeError as error:
            store.set("gave up", "")
            return str(error)
        return "joined"

    run = quiet(late, timeout_s=15)
    assert run.returned[0] == f"wait timeout after 1000ms, keys: /{KEYS[1]}"
    assert "Gloo connectFullMesh failed" in run.returned[1]


def test_the_default_timeouts_are_as_the_lesson_says() -> None:
    """30 minutes with Gloo, 10 with NCCL."""
    assert (default_pg_timeout, default_pg_nccl_timeout) == (timedelta(minutes=30), timedelta(minutes=10))


# Groups -----------------------------------------------------------------------------------------------


def test_a_group_does_not_take_over_the_timeout_of_the_job(init: Init) -> None:
    """new_group waits on when the time-out that init_process_group was given is over."""

    def alone() -> None:
        import time

        init(int(os.environ["RANK"]), "env://")
        if dist.get_rank() == 0:
            dist.new_group([0, 1])
        time.sleep(60)

    run = quiet(alone, timeout_s=6)
    assert {failure.type for failure in run.failures} == {"Timeout"}
    assert "rank 0 waits in new_group" in run.report()


def test_src_is_a_rank_of_the_job_also_in_a_group() -> None:
    """Rank 2 is number 0 of its group, and src=2."""

    def broadcast() -> tuple[float, str]:
        groups = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = groups[dist.get_rank() // 2]
        x = torch.tensor(float(dist.get_rank()))
        dist.broadcast(x, src=dist.get_rank() // 2 * 2, group=mine)
        try:
            dist.broadcast(x, src=0, group=mine)
        except ValueError as error:
            return x.item(), str(error)
        return x.item(), "no error"

    results = launch(broadcast, world_size=4, backend="gloo").results
    assert [value for value, _ in results] == [0, 0, 2, 2]
    assert [said for _, said in results[:2]] == ["no error"] * 2
    assert all("Global rank 0 is not part of group" in said for _, said in results[2:])
