"""nbval re-runs a notebook and compares: what ddplab shows is the same each time, and stuck cells leave nothing."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from watch import TELL

SANITIZER = Path(__file__).parents[1] / "nbval_sanitize.cfg"
CELLS = [
    ("import os\nimport torch\nimport torch.distributed as dist\nfrom ddplab import launch, log, plots", []),
    ("def train():\n"
     "    for step in range(3):\n"
     "        log(step=step, loss=1.0 / (step + 1 + dist.get_rank()))\n"
     "        print('step', step, 'of', dist.get_rank())\n"
     "    return dist.get_rank()\n"
     "run = launch(train, world_size=3)", []),
    ("run", []),
    ("print(run.results)\nrun.results", []),
    ("plots.metrics(run, 'loss')", []),
    ("def fail():\n"
     "    if dist.get_rank() == 1:\n"
     "        raise ValueError('no')\n"
     "    dist.all_reduce(torch.ones(1))\n"
     "launch(fail, world_size=3)", ["raises-exception"]),
    ("def leave():\n"
     "    if dist.get_rank() == 0:\n"
     "        dist.all_reduce(torch.ones(1))\n"
     "launch(leave)", ["raises-exception"]),
    ("launch(train, world_size=0)", ["raises-exception"]),
]  # fmt: skip


def write(path, cells):
    """A notebook of these cells, given as (source, tags)."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text, metadata={"tags": tags}) for text, tags in cells]
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    nbformat.write(notebook, path)
    return notebook


def nbval(path, *options):
    """What pytest --nbval says of the notebook."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    command += [f"--nbval-sanitize-with={SANITIZER}", path.name]
    return subprocess.run(
        [*command, *options], cwd=path.parent, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder outside the checkout, from which ddplab is found; what runs there is not told that it is tested."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    return tmp_path


def test_a_notebook_passes_nbval_twice(folder):
    """Output of several ranks, a run, a picture and failures as last expressions compare equal on each re-run."""
    path = folder / "lesson.ipynb"
    notebook = write(path, CELLS)
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    nbformat.write(notebook, path)
    assert "rank 2 | step 0 of 2" in str(notebook.cells[1].outputs)
    assert "image/png" in notebook.cells[4].outputs[-1].data
    for _ in range(2):
        told = nbval(path)
        assert told.returncode == 0, told.stdout
        assert f"{len(CELLS)} passed" in told.stdout


def test_a_stuck_cell_under_nbval_leaves_no_rank(folder, ranks):
    """The time-out of nbval, shorter than that of the launch, ends the ranks of the cell."""
    write(folder / "stuck.ipynb", [(f"{TELL}\nlaunch(hang, {str(folder)!r}, timeout_s=1000)", [])])
    told = nbval(folder / "stuck.ipynb", "--nbval-cell-timeout=15")
    assert len(ranks.told) == 2
    ranks.check_gone()
    assert "1 failed" in told.stdout
