"""A room imports only from rooms below it, and importing ddplab stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddplab"
STAIRS = [
    {"errors", "events", "data", "leftovers", "logs"},
    {"places", "capture", "machine", "rendezvous", "processes", "diagnosis", "board", "catalog"},
    {"shipping", "tracing", "telling", "failures", "receipt", "checks", "panel", "timeline", "explanation"},
    {"run", "profiling", "script"},
    {"worker", "tables", "view"},
    {"preload", "engines"},
    {"job"},
    {"launcher", "checkup"},
    {"plots", "faults", "export"},
    {"exercises"},
    {"__init__", "cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(STAIRS) for room in rooms}


def imported_rooms(file: Path) -> set[str]:
    """The rooms that a file imports when it is loaded or used, but not those named for types only."""
    rooms = set()
    tree = ast.parse(file.read_text())
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    skipped = {id(inner) for block in typing_only for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and (node.module or "").startswith("ddplab"):
            names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
            rooms |= {name for name in names if name in LEVEL}
    return rooms


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_room_imports_only_from_below(file: Path) -> None:
    """No room imports from its own level or from above, so the package can be read from the bottom up."""
    parts = file.relative_to(PACKAGE).parts
    room = parts[0].removesuffix(".py")
    assert room in LEVEL, f"{room} has no place on the stairs"
    above = {other for other in imported_rooms(file) if LEVEL[other] >= LEVEL[room] and other != room}
    # A run draws its own table when a notebook shows it: the one look upwards, made when used.
    assert above <= ({"tables"} if room == "run" else set())


def test_importing_ddplab_loads_nothing_heavy() -> None:
    """A script or a rank that imports ddplab does not pay for torch, matplotlib, IPython or widgets."""
    code = (
        "import sys, ddplab; print([m for m in ('torch', 'matplotlib', 'IPython', 'ipywidgets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_are_documented() -> None:
    """Every name in ``__all__`` of the package can be reached and says what it is."""
    import ddplab

    for name in ddplab.__all__:
        assert getattr(ddplab, name).__doc__, name
