"""Which tasks are solved: a small file beside the notebooks, a table, a picture, and a CSV of a whole class."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

__all__ = ["collect", "load", "note", "path"]

NAME = "ddplab_progress.json"
STATES = ("not started", "wrong", "solved")


def path() -> Path:
    """The file: ``DDPLAB_PROGRESS``, else ``ddplab_progress.json`` in the folder of the notebook."""
    return Path(os.environ.get("DDPLAB_PROGRESS") or NAME)


def load(file: Path | None = None) -> dict[str, dict[str, Any]]:
    """What the file tells, by task: ``state`` and ``tries``; nothing if there is none, or if it is another's."""
    try:
        told = json.loads((file or path()).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tasks = told.get("tasks") if isinstance(told, dict) else None
    return {
        str(number): {"state": row["state"], "tries": int(row.get("tries", 0))}
        for number, row in (tasks.items() if isinstance(tasks, dict) else ())
        if isinstance(row, dict) and row.get("state") in STATES
    }


def note(number: str, state: str) -> None:
    """Add a try to the file. Solved stays solved. Where no file can be written, none is."""
    tasks = load()
    row = tasks.setdefault(number, {"state": state, "tries": 0})
    row["tries"] += state != "not started"
    row["state"] = row["state"] if row["state"] == "solved" else state
    file, text = path(), json.dumps({"ddplab_progress": 1, "tasks": dict(sorted(tasks.items()))}, indent=1)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        print(f"ddplab: the progress is not kept: {error}", file=sys.stderr)


def collect(folder: Path, numbers: Iterable[str], out: TextIO) -> int:
    """Write the progress files below ``folder`` as CSV: a line for each, a column for each task; gives how many.

    A file is named by its folder where it has the usual name, else by its own.
    """
    columns = list(numbers)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["learner", "solved", "tries", *columns])
    files = [file for file in sorted(folder.rglob("*.json")) if load(file)]
    for file in files:
        rows = load(file)
        who = file.parent.name if file.name == NAME else file.stem
        solved = sum(row["state"] == "solved" for row in rows.values())
        states = [rows[number]["state"] if number in rows else "" for number in columns]
        writer.writerow([who, solved, sum(row["tries"] for row in rows.values()), *states])
    return len(files)
