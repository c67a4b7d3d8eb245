"""A notebook as its tests use it: what its cells define, changed as it asks the learner to, and its script under torchrun."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
_ASSIGNS = ast.Assign | ast.AugAssign
# Put behind a script: prints the names of the threads that its process still has, and ends it at once.
THREADS = """
import os
names = [open(f"/proc/self/task/{id_}/comm").read().strip() for id_ in os.listdir("/proc/self/task")]
print(*names, flush=True)
os._exit(0)
"""
_DEFINES = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


class Lesson:
    """The code of ``notebooks/NAME.ipynb``; ``cells`` is the fixture of that name, in whose namespace it runs."""

    def __init__(self, cells: Any, name: str) -> None:
        self._cells = cells
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        self._sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]

    def source(self, start: str, *changes: tuple[str, str]) -> str:
        """The one cell that has a line which starts so, with each old text (there once) replaced by a new one."""
        (source,) = [source for source in self._sources if f"\n{start}" in f"\n{source}"]
        for old, new in changes:
            assert source.count(old) == 1, f"the cell of {start!r} has {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        return str(source)

    def define(self, start: str, *changes: tuple[str, str]) -> dict[str, Any]:
        """Run that cell without what it launches and shows; gives all that is defined by now."""
        self._cells.run(definitions(self.source(start, *changes)))
        return dict(self._cells.namespace)

    def define_all(self) -> dict[str, Any]:
        """Run what all cells import and define, in order, but no assignment."""
        for source in self._sources:
            if not source.startswith("%"):
                self._cells.run(definitions(source, assignments=False))
        return dict(self._cells.namespace)

    def script(self, name: str = "script") -> str:
        """The text that the notebook runs under torchrun: its variable of that name, however it is put together."""
        for source in self._sources:
            if source.startswith((f"{name} = ", f"{name} += ")):
                self._cells.run(definitions(source))
        return str(self._cells.namespace[name])


def definitions(source: str, assignments: bool = True) -> str:
    """Of a cell, the imports, functions, classes and assignments, unless they launch something.

    >>> definitions("import os\\ndef f():\\n    return 1\\nrun = launch(f)\\nprint(run)")
    'import os\\ndef f():\\n    return 1'
    """
    lines, kept = source.splitlines(), []
    for node in ast.parse(source).body:
        text = ast.get_source_segment(source, node) or ""
        if isinstance(node, _DEFINES) or (assignments and isinstance(node, _ASSIGNS) and "launch(" not in text):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            kept += lines[first - 1 : node.end_lineno]
    return "\n".join(kept) or "pass"


def alone(file: Path) -> list[str]:
    """The lines that a script prints as the only rank of a job, without torchrun, whose own start takes as long."""
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, env=os.environ | job)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def torchrun(file: Path, *args: object, world_size: int = 2, code: int = 0, **env: str) -> list[str]:
    """The lines that a script prints under torchrun, which ends with that exit code."""
    ours = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | env
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", file]
    words = [*map(str, command), *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=ours)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()
