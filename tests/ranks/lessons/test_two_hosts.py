"""An exported script on two hosts: network namespaces of this machine with their own names and addresses."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddplab import export, launch

HOSTS = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
TRAIN = """
import time
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(num_steps, file, pause_s=0.0):
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts, history = {"model": model.module, "optimizer": optimizer}, []
    if os.path.exists(file):
        saved = torch.load(file)
        history = saved["history"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(len(history), num_steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x[dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
        optimizer.step()
        history.append((step, dist.get_world_size()))
        if dist.get_rank() == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"history": history, **states}, f"{file}.part")
            os.replace(f"{file}.part", file)
        dist.barrier()
        time.sleep(pause_s)
    return model.module.state_dict()
"""


class Hosts:
    """Two hosts that are joined by a cable, each with a name that both can resolve."""

    def __init__(self, folder: Path) -> None:
        self._spaces = {host: f"ddplab-{os.getpid()}-{host}" for host in HOSTS}
        self._names = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in HOSTS.items())]
        self._names.write_text("\n".join(lines) + "\n")

    def up(self) -> None:
        """Make them; ``subprocess.CalledProcessError`` or ``FileNotFoundError`` where that is not allowed."""
        for space in self._spaces.values():
            _ip("netns", "add", space)
        a, b = self._spaces.values()
        _ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for host, space in self._spaces.items():
            _ip("-n", space, "addr", "add", f"{HOSTS[host]}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
            subprocess.run(self.on(host, "true"), check=True, capture_output=True, text=True)

    def on(self, host: str, *command: object) -> list[str]:
        """The words that run a command on a host."""
        own = f'hostname {host} && mount --bind {shlex.quote(str(self._names))} /etc/hosts && exec "$@"'
        words = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "sh", "-c", own, "sh"]
        return [*words, *map(str, command)]

    def pids(self, host: str) -> list[int]:
        """The processes that run on a host."""
        return [int(pid) for pid in _ip("netns", "pids", self._spaces[host]).split()]

    def kill(self, host: str) -> None:
        """End all that runs on a host, as when its power fails."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def down(self) -> None:
        """End all that runs on them, and them."""
        for host, space in self._spaces.items():
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                self.kill(host)
                _ip("netns", "del", space)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, or a skip that says why there are none."""
    hosts = Hosts(tmp_path)
    try:
        try:
            hosts.up()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error} {getattr(error, 'stderr', '')}".strip())
        yield hosts
    finally:
        hosts.down()


@pytest.fixture
def train(cells: Any) -> Any:
    """A function of a cell, which goes on from its checkpoint."""
    cells.run(TRAIN)
    return cells.namespace["train"]


def reference(train: Any, num_steps: int, file: Path) -> dict[str, torch.Tensor]:
    """The weights after a launch on four ranks."""
    run = launch(train, num_steps, file, world_size=4, backend="gloo", threads=1, view="quiet")
    weights: dict[str, torch.Tensor] = run.results[0]
    return weights


def test_two_hosts_give_the_weights_of_launch(hosts: Hosts, train: Any, tmp_path: Path) -> None:
    """The Slurm script starts torchrun on both, where srun and scontrol are stand-ins; every bit is the same."""
    export(train, tmp_path / "train.py", 20, tmp_path / "script.pt", world_size=4, nodes=2, slurm=tmp_path / "a.sbatch")
    (bin_ := tmp_path / "bin").mkdir()
    first, second = (shlex.join(hosts.on(host)) for host in HOSTS)
    srun = f'shift\n{first} "$@" & first=$!\n{second} "$@" & second=$!\ncode=0\n'
    (bin_ / "srun").write_text(f"#!/bin/sh\n{srun}wait $first || code=$?\nwait $second || code=$?\nexit $code\n")
    (bin_ / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(HOSTS)}\n")
    for file in bin_.iterdir():
        file.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
    }
    env = (
        os.environ
        | job
        | {"PATH": f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    )
    done = subprocess.run(["bash", "a.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, expected = torch.load(tmp_path / "train.result.pt"), reference(train, 20, tmp_path / "launch.pt")
    assert {name: torch.equal(found[name], expected[name]) for name in expected} == {"weight": True, "bias": True}
    assert torch.load(tmp_path / "script.pt")["history"] == [(step, 4) for step in range(20)]
    assert [hosts.pids(host) for host in HOSTS] == [[], []]


def test_one_host_goes_on_when_the_other_is_lost(hosts: Hosts, train: Any, tmp_path: Path) -> None:
    """Its agent starts its two ranks again, and they go on from the checkpoint: each step was done once."""
    num_steps, file = 40, tmp_path / "script.pt"
    script = export(train, tmp_path / "train.py", num_steps, file, 0.1, world_size=4, nodes=2)
    # Lost hosts are to be noticed in seconds here, and one that is late is not waited for long.
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    options = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", f"--rdzv-conf={conf}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-backend=c10d"]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        agents = []
        for host in HOSTS:
            words = hosts.on(host, *command, "--rdzv-endpoint=node-a:29400", script)
            log = stack.enter_context(open(tmp_path / f"{host}.log", "w"))
            agents.append(subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT))
        try:
            end = time.monotonic() + 60
            while not (file.exists() and torch.load(file)["history"].count((5, 4))):
                assert time.monotonic() < end and agents[0].poll() is None, (tmp_path / "node-a.log").read_text()
                time.sleep(0.1)
            hosts.kill("node-b")
            assert agents[1].wait(10) == -signal.SIGKILL
            assert agents[0].wait(60) == 0, (tmp_path / "node-a.log").read_text()
        finally:
            hosts.down()
            for agent in agents:
                agent.wait(10)
    steps, world_sizes = zip(*torch.load(file)["history"], strict=True)
    assert steps == tuple(range(num_steps))
    lost_at = world_sizes.index(2)
    assert 5 < lost_at < num_steps - 1
    assert world_sizes == (4,) * lost_at + (2,) * (num_steps - lost_at)
    found, expected = torch.load(tmp_path / "train.result.pt"), reference(train, num_steps, tmp_path / "launch.pt")
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
