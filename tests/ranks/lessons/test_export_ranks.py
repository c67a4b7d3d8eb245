"""Scripts that ``export`` writes, under torchrun: the same work as ``launch`` does, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from lesson import THREADS, Lesson, alone, torchrun
from nbclient import NotebookClient

from ddplab import export, launch

GLOO = {"backend": "gloo", "world_size": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the script stands and runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, every bit of every tensor."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def test_the_training_of_lesson_03_gives_the_same_weights(cells: Any, folder: Path) -> None:
    """With the lesson's data set and its network, which the script has; what rank 0 returns is in the file."""
    lesson = Lesson(cells, "03_ddp")
    lesson.define_all()
    train = lesson.define("def train")["train"]
    torchrun(export(train, "train.py", 1, 32, **GLOO))
    found = torch.load("train.result.pt")
    assert equal(found, launch(train, 1, 32, threads=1, view="quiet", **GLOO).results[0])
    assert sorted(folder.iterdir()) == [folder / "train.py", folder / "train.result.pt"]


SRUN = """#!/bin/sh
shift
exec "$@"
"""
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[1-2]" && echo localhost && echo other
"""


def test_the_training_of_lesson_06_runs_by_its_slurm_script(cells: Any, folder: Path) -> None:
    """With stand-ins for srun and scontrol; model, optimizer and schedule in the file that it saves are the same."""
    lesson = Lesson(cells, "06_training_for_real")
    lesson.define_all()
    cells.run("ROOT = None")
    straight = lesson.define("def straight")["straight"]
    (folder / "jobs").mkdir()
    export(straight, "train.py", 1, folder / "script.pt", slurm="jobs/train.sbatch", **GLOO)
    (bin_ := folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    path = f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    job = {"SLURM_JOB_ID": str(10_000 + os.getpid() % 10_000), "SLURM_JOB_NODELIST": "node[1-2]", "PATH": path}
    job |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    command = ["bash", "train.sbatch"]
    done = subprocess.run(command, cwd="jobs", env=env | job, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    launch(straight, 1, folder / "launch.pt", threads=1, view="quiet", **GLOO)
    assert equal(torch.load("script.pt"), torch.load("launch.pt"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_a_function_that_joins_by_itself_leaves_no_thread(cells: Any, folder: Path) -> None:
    """Of ddplab's functions the script has its own; what holds the group is gone at the end."""
    cells.run("""
        import torch.nn as nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        from ddplab import log, progress, span

        @span("all")
        def train():
            dist.init_process_group("gloo")
            model = DDP(nn.Linear(1, 1))
            ring = [model]
            ring.append(ring)  # which holds itself, as a trainer that knows its parts and is known by them
            for step in progress(range(2)):
                model(torch.ones(1, 1)).sum().backward()
                log(step, one=torch.ones(1), two=2)
    """)
    file = export(cells.namespace["train"], "train.py", backend=None)
    file.write_text(file.read_text() + THREADS)
    *lines, threads = alone(file)
    assert lines == ["step 0 one 1 two 2", "step 1 one 1 two 2"]
    assert "gloo" not in threads


CELLS = [
    "import torch\nimport torch.distributed as dist\nfrom ddplab import device, export, launch",
    "class Scale:\n    by = 3\n\ndef share(x):\n    return x * 1000",
    "class Scale:\n    by = 5",
    "class Scale:\n    by = 3\n\ndef share(x):\n    return x * 1000",  # again: IPython keeps its place among the cells
    "def share(x):\n    dist.all_reduce(x)\n    return x * Scale.by",
    "def work(n):\n    return share(torch.rand(n, device=device()))",
    "run = launch(work, 4, view='quiet')\ntorch.save(run.results[0], 'launch.pt')\nprint(export(work, 'train.py', 4))",
    "def noisy():\n    !ls\nexport(noisy, 'noisy.py')",
]


def test_from_a_real_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the cells that ran last; a line for the shell has no place in a script."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute(cwd=str(folder))
    (shown,) = notebook.cells[-2].outputs
    assert shown.text == "train.py\n"
    (error,) = notebook.cells[-1].outputs
    assert (error.ename, error.evalue.partition(",")[0]) == ("ShippingError", "noisy uses get_ipython")
    assert not (folder / "noisy.py").exists()
    (line,) = torchrun(folder / "train.py")
    assert line.startswith("work returned tensor([")
    assert torch.equal(torch.load("train.result.pt"), torch.load("launch.pt"))
