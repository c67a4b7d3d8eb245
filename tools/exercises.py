"""Make the learner's edition of the exercises from the edition with solutions.

    python tools/exercises.py            write notebooks/exercises/*.ipynb from notebooks/exercises/solutions/*.ipynb
    python tools/exercises.py --check    only say which are not what would be written

What stands between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` (the marks of nbgrader, which can use the same
files) becomes ``raise NotImplementedError``. Neither edition keeps outputs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import nbformat

CHECKOUT = Path(__file__).resolve().parents[1]
HERE = CHECKOUT / "notebooks" / "exercises"
SOURCES = HERE / "solutions"
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION$", re.DOTALL | re.MULTILINE)

_spec = importlib.util.spec_from_file_location("notebooks", Path(__file__).with_name("notebooks.py"))
assert _spec and _spec.loader
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)


def edition(source: str, solved: bool) -> str:
    """The text of the edition with solutions or of the learner's, in canonical form and without outputs."""
    notebook = nbformat.reads(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None, metadata=nbformat.from_dict({"tags": ["exercise"]}))
            cell.source = cell.source if solved else SOLUTION.sub(r"\1raise NotImplementedError", cell.source)
    return str(notebooks.to_text(notebooks.canonical(notebook)))


def main(is_check: bool) -> int:
    """Write or check both editions; the exit code is 1 if a file was not as it should be and is only checked."""
    late = []
    for source in sorted(SOURCES.glob("*.ipynb")):
        text = source.read_text(encoding="utf-8")
        for path, wanted in ((source, edition(text, True)), (HERE / source.name, edition(text, False))):
            if not path.exists() or path.read_text(encoding="utf-8") != wanted:
                late.append(path)
                if not is_check:
                    path.write_text(wanted, encoding="utf-8")
    for path in late:
        print(f"{path.relative_to(CHECKOUT)}: {'not what its source gives' if is_check else 'written'}")
    return 1 if late and is_check else 0


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
