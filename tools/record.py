"""Execute the notebook of the other ways, and keep what each system gave here for machines that lack it.

    .venv-systems/bin/python tools/record.py

Writes ``notebooks/recorded/other_ways.json``, by name of the row. What is not installed keeps its row.
The notebook itself is left alone: ``tools/notebooks.py 12_other_ways`` executes that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

from ddplab import cli

HERE = Path(__file__).resolve().parents[1] / "notebooks"
FILE = HERE / "recorded" / "other_ways.json"


def main() -> None:
    """Execute it with one more cell, which prints the rows, and write those that ran here."""
    notebook = nbformat.read(HERE / "12_other_ways.ipynb", as_version=4)
    notebook.cells.append(v4.new_code_cell("print(json.dumps(rows))"))
    cli.execute(notebook, HERE)
    rows = json.loads(notebook.cells[-1].outputs[0]["text"])
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    for name, row in rows.items():
        if row.pop("seen") == "here" and not row["package"].startswith("torch "):  # which all have
            kept[name] = {key: rounded(value) for key, value in row.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in kept.items())
    FILE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Numbers to three digits.

    >>> rounded([0.123456, {"bytes": 786432}])
    [0.123, {'bytes': 786432}]
    """
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
