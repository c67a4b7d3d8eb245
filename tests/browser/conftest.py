"""Fixtures of the browser tests: one JupyterLab, one page and one notebook serve them all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernel"))
from watch import TELL, Ranks

if TYPE_CHECKING:
    from lab import Notebook

CELLS = {
    "setup": f"{TELL}\nimport sys\nfrom ddplab import log, progress\nlaunch(print, 'ready').receipt.clean",
    "train": "def train():\n"
    "    for step in progress(range(30)):\n"
    "        log(step=step, loss=1 / (step + 1))\n"
    "        print('step', step, 'of rank', dist.get_rank())\n"
    "        time.sleep(0.1)\n"
    "run = launch(train)\n"
    "print(run.receipt)",
    "silent": "launch(time.sleep, 2.5);",
    "hang": "launch(hang, FOLDER, timeout_s=1000)",
    "flood": "def flood():\n    for number in range(100_000):\n        print('line', number)\nlaunch(flood, world_size=1);",
}


@pytest.fixture(scope="session")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """An open notebook of these cells, of which the first has run."""
    from lab import CHROMIUM, Lab, Notebook, browser_page

    if not CHROMIUM:
        pytest.skip("tests/browser needs Chromium, and there is none on the PATH (on Debian: apt-get install chromium)")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        with browser_page() as page:
            notebook = Notebook(page, lab, CELLS)
            notebook.start("setup")
            assert notebook.wait("setup", 60).endswith("True")
            yield notebook
    finally:
        lab.close()


@pytest.fixture
def ranks(lesson: Notebook) -> Ranks:
    """The ranks that the cell "hang" starts."""
    folder = lesson.path.parent / f"ranks-{len(list(lesson.path.parent.iterdir()))}"
    folder.mkdir()
    lesson.type("hang", CELLS["hang"].replace("FOLDER", repr(str(folder))))
    return Ranks(folder)


@pytest.fixture(autouse=True)
def _quiet_console(lesson: Notebook) -> Iterator[None]:
    """No test leaves an error on the browser's console."""
    lesson.complaints.clear()
    yield
    assert lesson.complaints == []
