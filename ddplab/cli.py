"""What can be done without opening a notebook: ``python -m ddplab demo``, ``doctor``, ``explain`` and ``class``."""

from __future__ import annotations

import argparse
import base64
import csv
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab.checkup import Checkup, doctor
from ddplab.errors import DdplabError
from ddplab.explanation import explain

if TYPE_CHECKING:
    from nbformat import NotebookNode

__all__ = ["execute", "main"]

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "03_ddp.ipynb"
CELL_TIMEOUT_S = 300
CLASS_COLUMNS = ("Python", "torch", "cores", "memory", "/dev/shm", "leftovers")
# Asked of the notebook's kernel when the notebook is through.
ACTIVITY = "from ddplab import tables\nprint(tables.to_text(tables.activity(run)))"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; give the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddplab", description="Distributed PyTorch, run from a notebook.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("demo", help="execute a training notebook; show what each rank did")
    command.add_argument("notebook", nargs="?", type=Path, default=NOTEBOOK, metavar="NOTEBOOK", help="default: 03_ddp")
    command.add_argument("--out", type=Path, default=Path("build/demo"), help="folder to write to (build/demo)")
    command.set_defaults(action=lambda args: demo(args.notebook, args.out))
    command = commands.add_parser("doctor", help="tell what this machine can do, and what will hurt")
    command.add_argument("--end-leftovers", action="store_true", help="end what earlier kernels of yours have left")
    command.add_argument(
        "--class", action="store_true", dest="in_a_line", help="one line of CSV, for a room of machines"
    )
    command.set_defaults(action=lambda args: examine(args.end_leftovers, args.in_a_line))
    command = commands.add_parser("class", help="collect the progress files of a class into one CSV")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="holds a file or a folder for each learner")
    command.set_defaults(action=lambda args: collect(args.folder))
    command = commands.add_parser("explain", help="say what an error in a log means, and what to do next")
    command.add_argument("file", nargs="?", default="-", metavar="FILE", help="the log; stdin if left out or -")
    command.set_defaults(action=lambda args: tell(args.file))
    args = parser.parse_args(argv)
    code: int = args.action(args)
    return code


def demo(path: Path, out: Path) -> int:
    """Execute the notebook, write it and its pictures to ``out``, print what each rank of its ``run`` did."""
    began_s = time.monotonic()
    try:
        import nbformat
        from nbclient.exceptions import CellExecutionError, DeadKernelError
    except ImportError as error:
        return _complain(f"{error.name} is missing; the notebook tools come with pip install 'ddplab[notebook]'")
    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        return _complain(f"there is no notebook {path}")
    except (OSError, ValueError) as error:
        return _complain(f"{path} cannot be read as a notebook: {error}")
    print(f"running {_short(path)} ...", flush=True)
    question = nbformat.v4.new_code_cell(ACTIVITY, metadata={"tags": ["raises-exception"]})
    notebook.cells.append(question)
    try:
        execute(notebook, path.parent, skip="needs_gpu")
    except CellExecutionError as error:
        return _complain(f"a cell of {_short(path)} failed\n{error}".rstrip())
    except (DeadKernelError, RuntimeError, TimeoutError) as error:
        return _complain(f"{_short(path)} could not be executed: {error}")
    notebook.cells.pop()
    answer = next(output for output in question.outputs if output.get("name") != "stderr")
    print(answer.get("text", f"(no table: {answer.get('evalue')}; it shows the notebook's variable `run`)").rstrip())
    for file in _write(notebook, path.stem, out):
        print(_short(file))
    print(f"{time.monotonic() - began_s:.0f} s")
    return 0


def examine(end_leftovers: bool, in_a_line: bool) -> int:
    """Print what ``doctor`` finds, as a table or in a line of CSV. The exit code is 1 if something is bad."""
    checkup = doctor(end_leftovers)
    if in_a_line:
        return preflight(checkup)
    print(checkup)
    return 0 if checkup.ok else 1


def preflight(checkup: Checkup) -> int:
    """Print a line of CSV: host, verdict, what was found of some things, and the seconds of two launches of 2 ranks."""
    from ddplab.launcher import launch

    found = {row.name: row.found for row in checkup.rows}
    row = [socket.gethostname(), checkup.verdict(), *(found.get(name, "") for name in CLASS_COLUMNS)]
    try:
        row += [f"{launch(int, backend='gloo', view='quiet').elapsed_s:.1f}" for _ in range(2)]
    except (DdplabError, ValueError) as error:
        row += [f"failed: {error}", ""]
    csv.writer(sys.stdout, lineterminator="\n").writerow(row)
    return 0 if checkup.ok and row[-1] else 1


def collect(folder: Path) -> int:
    """Print the progress of a class as CSV. The exit code is 1 if there is none."""
    from ddplab import exercises
    from ddplab.exercises import progress

    if not folder.is_dir():
        return _complain(f"{folder} is no folder")
    num_files = progress.collect(folder, exercises.TASKS, sys.stdout)
    return 0 if num_files else _complain(f"there is no progress file below {folder}; learners have {progress.NAME}")


def tell(file: str) -> int:
    """Print what ``explain`` says of a log; "-" is stdin. The exit code is 1 if the error is not known."""
    try:
        told = explain(sys.stdin.buffer if file == "-" else Path(file))
    except OSError as error:
        return _complain(f"{file} cannot be read: {error.strerror}")
    print(str(told).encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))
    return 0 if told.known else 1


def execute(notebook: NotebookNode, folder: Path, env: Mapping[str, str] | None = None, skip: str = "") -> None:
    """Run all cells in a fresh kernel of this Python, and put what they show into ``notebook``.

    ``folder`` is where the kernel works, ``env`` is added to its environment, cells tagged ``skip`` are left out.
    Raises nbclient's ``CellExecutionError`` for a cell that fails without the tag ``raises-exception``.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    # No folders to look in: a "python3" that another environment has registered must not be taken.
    native = KernelSpecManager(kernel_dirs=[])
    NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=native),
        timeout=CELL_TIMEOUT_S,
        startup_timeout=120,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
        skip_cells_with_tag=skip,
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
    ).execute(cleanup_kc=True, env={**os.environ, **(env or {})})


def _write(notebook: NotebookNode, stem: str, out: Path) -> list[Path]:
    """Write the notebook and each PNG in it; give the files."""
    import nbformat

    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{stem}.ipynb"]
    nbformat.write(notebook, files[0])
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    for number, picture in enumerate(pictures, 1):
        files.append(out / f"{stem}-{number}.png")
        files[-1].write_bytes(base64.b64decode(picture))
    return files


def _short(path: Path) -> str:
    """The path as seen from here, where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def _complain(message: str) -> int:
    print(f"ddplab: {message}", file=sys.stderr)
    return 1
