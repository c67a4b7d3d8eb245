"""Execute the notebooks, and write each back in its one canonical form.

    python tools/notebooks.py [--gpu] [NAME ...]      execute and rewrite (all, if no name is given)
    python tools/notebooks.py --check [NAME ...]      only say which are not in canonical form

A notebook with a failed cell is left as it was, unless the cell is tagged ``raises-exception``. Cells tagged
``needs_gpu`` keep what they show, and are executed only with ``--gpu``.

Canonical form: the id of a cell is a digest of its source; of the metadata, only tags and the kernel's name
remain, and it says where a slide begins; cells that ran are numbered from 1; of a traceback, the frames of
cells and the error remain; no output names a path of the machine that made it. So a notebook that prints the
same is, byte for byte, the same, up to its pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

CHECKOUT = Path(__file__).resolve().parents[1]
HERE = CHECKOUT / "notebooks"
GPU = "needs_gpu"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGETS = "application/vnd.jupyter.widget-"

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LIBRARY_FRAME = re.compile(r'\s*File [^"]')  # as IPython shows it; frames of ranks look otherwise
# The rules after this mark are for writing as well as for comparing.
_MARK, _RULES = "# ---- Also applied", CHECKOUT / "tests" / "nbval_sanitize.cfg"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; give the exit code."""
    parser = argparse.ArgumentParser(description="Execute notebooks and write them in canonical form.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 03_ddp, or a path; default: all")
    parser.add_argument("--check", action="store_true", help="execute nothing, change nothing")
    parser.add_argument("--gpu", action="store_true", help=f"execute cells tagged {GPU}, too")
    args = parser.parse_args(argv)
    paths = [find(name) for name in args.names] or sorted(HERE.glob("*.ipynb"))
    good = [check(path) if args.check else rewrite(path, args.gpu) for path in paths]
    return 0 if all(good) else 1


def find(name: str) -> Path:
    """The notebook of that name or path. Exits with a message if there is none."""
    for path in (Path(name), HERE / name, HERE / f"{name}.ipynb"):
        if path.is_file():
            return path
    raise SystemExit(f"there is no notebook {name}")


def check(path: Path) -> bool:
    """Whether the notebook is in canonical form; says so if it is not."""
    text = path.read_text(encoding="utf-8")
    good = text == to_text(canonical(nbformat.reads(text, as_version=4)))
    if not good:
        print(f"{path.name}: not in canonical form; make notebooks", flush=True)
    return good


def rewrite(path: Path, gpu: bool) -> bool:
    """Execute the notebook and write it back; leave it as it was if a cell failed."""
    from nbclient.exceptions import CellExecutionError

    from ddplab import cli

    print(f"{path.name} ...", flush=True)
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        if gpu or not is_tagged(cell, GPU):
            cell.update(outputs=[], execution_count=None)
    try:
        # As under pytest, so that nbval will see the same: ipykernel captures no descriptors, ddplab draws once.
        cli.execute(notebook, HERE, env={"PYTEST_CURRENT_TEST": path.name}, skip="" if gpu else GPU)
    except CellExecutionError as error:
        print(f"{path.name}: a cell failed, nothing is written\n{error}", file=sys.stderr, flush=True)
        return False
    path.write_text(to_text(canonical(notebook)), encoding="utf-8")
    return True


# The canonical form -----------------------------------------------------------------------------------


def to_text(notebook: NotebookNode) -> str:
    """The notebook as it lies in its file."""
    text: str = nbformat.writes(notebook, version=4)
    return text.rstrip("\n") + "\n"


def canonical(notebook: NotebookNode) -> NotebookNode:
    """The notebook in canonical form. The canonical form of a canonical notebook is itself."""
    executed = count(1)
    cells = [
        dict(cell, id=id_) for cell, id_ in zip(notebook.cells, ids(c.source for c in notebook.cells), strict=True)
    ]
    for cell in cells:
        tags = cell["metadata"].get("tags")
        cell["metadata"] = ({"tags": tags} if tags else {}) | slide(cell)
        cell.pop("attachments", None)
        if cell["cell_type"] == "code":
            ran = cell["execution_count"] is not None
            cell["execution_count"] = next(executed) if ran else None
            cell["outputs"] = [clean(output, cell["execution_count"]) for output in cell["outputs"]]
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    whole: NotebookNode = nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    return whole


def slide(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Where a slide of nbconvert's begins: at each heading, and below it at each further text.

    >>> slide({"cell_type": "markdown", "source": "## Rings"})
    {'slideshow': {'slide_type': 'slide'}}
    """
    if cell["cell_type"] != "markdown":
        return {}
    return {"slideshow": {"slide_type": "slide" if cell["source"].startswith("#") else "subslide"}}


def ids(sources: Iterable[str]) -> list[str]:
    """An id for each cell, which stays when other cells come or go."""
    seen: dict[str, int] = {}
    found = []
    for source in sources:
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        found.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return found


def clean(output: NotebookNode, execution_count: int | None) -> dict[str, Any]:
    """An output without what depends on the machine and the moment."""
    kept: dict[str, Any] = dict(output)
    if "execution_count" in kept:
        kept["execution_count"] = execution_count
    if "data" in kept:
        # The models of widgets are not saved: a view would point to nothing, its text stays.
        data = {kind: value for kind, value in kept["data"].items() if not kind.startswith(WIDGETS)}
        kept["data"] = {kind: depersonalised(value) if is_text(kind) else value for kind, value in data.items()}
    for field in ("text", "evalue"):
        if field in kept:
            kept[field] = depersonalised(kept[field])
    if "traceback" in kept:
        kept["traceback"] = shortened(kept["traceback"])
    return kept


def is_text(kind: str) -> bool:
    """Whether a MIME type is compared and read as text."""
    return kind.startswith("text/")


def shortened(traceback: Iterable[str]) -> list[str]:
    """A traceback without colours and without the frames of libraries."""
    plain = (_ANSI.sub("", part) for part in traceback)
    return [depersonalised(part) for part in plain if not _LIBRARY_FRAME.match(part)]


def depersonalised(text: str) -> str:
    """``text`` without what belongs to this machine and this moment, in the way in which nbval will see it."""
    for pattern, replacement in rules():
        text = pattern.sub(replacement, text)
    return text


@cache
def rules() -> list[tuple[re.Pattern[str], str]]:
    """The rules of nbval_sanitize.cfg that also hold for writing."""
    _, _, text = _RULES.read_text(encoding="utf-8").partition(_MARK)
    return [(re.compile(regex), new) for regex, new in re.findall(r"^regex: (.*)$\n^replace: (.*)$", text, re.M)]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_tagged(cell: NotebookNode, tag: str) -> bool:
    """Whether the cell carries ``tag``."""
    return tag in cell.metadata.get("tags", [])


if __name__ == "__main__":
    raise SystemExit(main())
