"""The environment of the other systems: the pinned versions, beside the one torch that everything else uses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import date
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from installed import MODULES
from jupyter_client.manager import start_new_kernel
from packaging.requirements import Requirement

from ddplab import launch

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if "==" in line)
Need = Callable[[str], None]


@pytest.mark.parametrize("extra", MODULES)
def test_what_an_extra_brings_has_the_pinned_version(extra: str, need: Need) -> None:
    need(extra)
    names = [Requirement(line).name for line in PROJECT["optional-dependencies"][extra]]
    assert {name: version(name) for name in names} == {name: PINS[name] for name in names}


def test_there_is_one_torch_and_it_is_the_pinned_one() -> None:
    found = [str(d.version) for d in distributions(name="torch")]
    assert found == [PINS["torch"]]


def test_no_extra_is_part_of_the_base_install() -> None:
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    for extra in MODULES:
        assert base.isdisjoint(Requirement(line).name for line in PROJECT["optional-dependencies"][extra])


def test_ranks_find_what_is_installed_here() -> None:
    tops = [module.partition(".")[0] for module in MODULES.values()]

    def found() -> list[str]:
        return [name for name in tops if find_spec(name) is not None]

    assert launch(found, view="quiet").results == [found()] * 2


def test_a_kernel_finds_what_is_installed_here() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        said: list[str] = []
        client.execute_interactive(
            "import sys; print(sys.prefix)",
            output_hook=lambda message: said.append(message["content"].get("text", "")),
            timeout=60,
        )
        assert "".join(said).strip() == sys.prefix
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_mpiexec_starts_ranks_that_meet(need: Need) -> None:
    need("mpi")
    average = "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.allreduce(10.0 * w.rank) / w.size)"
    mpiexec = [str(Path(sys.prefix) / "bin" / "mpiexec"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run([*mpiexec, sys.executable, "-c", average], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["5.0", "5.0"], done.stderr


def test_horovod_as_it_is_built_here_averages(need: Need) -> None:
    need("horovod")
    code = (
        "import horovod, json\n"
        "def mean():\n"
        "    import torch, horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    return hvd.allreduce(torch.tensor([10.0 * hvd.rank()])).tolist()\n"
        "print(json.dumps(horovod.run(mean, np=2, use_gloo=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [[5.0], [5.0]], done.stderr


def test_each_system_has_a_recorded_result_of_its_pinned_version() -> None:
    recorded = json.loads((ROOT / "notebooks" / "recorded" / "other_ways.json").read_text(encoding="utf-8"))
    build = (ROOT / "tools" / "build_horovod.sh").read_text(encoding="utf-8")
    horovod = re.search(r"^version=(\S+)", build, re.MULTILINE)
    assert horovod is not None
    names = ["ray", "pyspark", "deepspeed", "fairscale", "megatron-core", "openmpi", "mpi4py"]
    expected = {f"{name} {PINS[name]}" for name in names} | {f"horovod {horovod[1]}"}
    assert expected <= {entry["package"] for entry in recorded.values()}
    for entry in recorded.values():
        assert date.fromisoformat(entry["date"]) <= date.today()
        assert "cores" in entry["machine"] and PINS["torch"] in entry["machine"]
