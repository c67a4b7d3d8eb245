"""The committed notebooks are executed, in canonical form, short, and free of the machine that made them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode, v4

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
MAX_LINES = 15
# Two names or more behind a slash. torch's own build folder, which its messages name, is the same everywhere.
ABSOLUTE = re.compile(r"(?<![\w.~/:<@-])/(?!__w/)(?:[\w.+@-]+/)+[\w.+@-]+|\b[A-Z]:\\\w+")


def load(tool: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tools_{tool}", FOLDER.parent / "tools" / f"{tool}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


executor, exercises = load("notebooks"), load("exercises")
each_notebook = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    return notebook


def code_cells(path: Path) -> list[NotebookNode]:
    cells: list[NotebookNode] = executor.code_cells(read(path))
    return cells


def shown_texts(cell: NotebookNode) -> list[str]:
    """All that a cell shows as text."""
    texts: list[str] = []
    for output in cell.outputs:
        texts += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", ())]
        texts += [value for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return texts


# The notebooks ----------------------------------------------------------------------------------------


@each_notebook
def test_it_is_in_canonical_form(path: Path) -> None:
    assert executor.check(path), "make notebooks"


@each_notebook
def test_its_first_cell_says_what_one_does_learns_and_needs(path: Path) -> None:
    first = read(path).cells[0]
    words = set(re.findall(r"\w+", first.source.lower()))
    assert first.cell_type == "markdown"
    assert {"do", "learn", "need", "minutes"} <= words


@each_notebook
def test_every_cell_was_executed(path: Path) -> None:
    """nbval never compares a cell without an execution count."""
    cells = [cell for cell in code_cells(path) if not executor.is_tagged(cell, executor.GPU)]
    assert [cell.source for cell in cells if cell.execution_count is None] == []


@each_notebook
def test_no_cell_is_long(path: Path) -> None:
    lengths = {cell.source: len(cell.source.splitlines()) for cell in code_cells(path)}
    assert {source: n for source, n in lengths.items() if n > MAX_LINES} == {}


@each_notebook
def test_no_output_names_a_path_of_a_machine(path: Path) -> None:
    texts = [text for cell in code_cells(path) for text in shown_texts(cell)]
    assert [found for text in texts for found in ABSOLUTE.findall(re.sub("/tmp/[.]{3}|/dev/shm", "", text))] == []


# The form ---------------------------------------------------------------------------------------------


def notebook_with(*outputs: dict[str, Any]) -> NotebookNode:
    cell = v4.new_code_cell("f()", execution_count=7, outputs=[nbformat.from_dict(output) for output in outputs])
    cell.metadata = nbformat.from_dict({"tags": ["raises-exception"], "collapsed": True})
    cells = [v4.new_markdown_cell("# f"), cell]
    notebook: NotebookNode = v4.new_notebook(cells=cells, metadata={"widgets": {}})
    return notebook


def written(*outputs: dict[str, Any]) -> list[dict[str, Any]]:
    """``outputs`` as the executor writes them."""
    found: list[dict[str, Any]] = executor.canonical(notebook_with(*outputs)).cells[1].outputs
    return found


def error(evalue: str, *traceback: str) -> dict[str, Any]:
    return {"output_type": "error", "ename": "ValueError", "evalue": evalue, "traceback": list(traceback)}


def stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text}


def test_the_canonical_form_of_a_canonical_notebook_is_itself() -> None:
    once = executor.to_text(executor.canonical(notebook_with(error("no: /tmp/x/y", "File a.py:1", "\x1b[0mno"))))
    twice = executor.to_text(executor.canonical(nbformat.reads(once, as_version=4)))
    assert once == twice
    assert once.endswith("}\n")


def test_the_learners_edition_of_the_exercises_is_what_its_source_gives(capsys: pytest.CaptureFixture[str]) -> None:
    """Both editions are in canonical form, and no solution has slipped through."""
    assert exercises.main(is_check=True) == 0, capsys.readouterr().out
    learners = sorted(exercises.HERE.glob("*.ipynb"))
    assert len(learners) == 12
    assert [path.name for path in learners if "SOLUTION" in path.read_text(encoding="utf-8")] == []


def test_a_solution_becomes_a_stub() -> None:
    """At its own indentation; what stands around it stays."""
    cell = v4.new_code_cell("def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n\nf()")
    source = nbformat.writes(v4.new_notebook(cells=[cell]))
    (stub,) = nbformat.reads(exercises.edition(source, solved=False), as_version=4).cells
    assert stub.source == "def f():\n    raise NotImplementedError\n\nf()"
    assert nbformat.reads(exercises.edition(source, solved=True), as_version=4).cells[0].source == cell.source


@each_notebook
def test_the_notebooks_make_slides(path: Path) -> None:
    """nbconvert makes more than ten of each."""
    from nbconvert.exporters import SlidesExporter

    html, _ = SlidesExporter().from_filename(str(path))
    assert html.count("<section") > 10


def test_only_tags_the_kernel_and_the_order_of_execution_remain() -> None:
    whole = executor.canonical(notebook_with())
    assert whole.metadata == {"kernelspec": executor.KERNEL, "language_info": {"name": "python"}}
    assert whole.cells[1].metadata == {"tags": ["raises-exception"]}
    assert whole.cells[1].execution_count == 1


def test_a_cell_keeps_its_id_when_others_come_and_go() -> None:
    assert executor.ids(["a", "b"])[1] == executor.ids(["new", "b"])[1]
    assert len(set(executor.ids(["a", "a", "a"]))) == 3


def test_a_traceback_keeps_the_frames_of_cells_and_of_ranks() -> None:
    cell, rank = "Cell In[7], line 1", '    File "/home/ada/lib/python3.12/site-packages/torch/x.py", line 3, in f'
    traceback = [f"\x1b[31m{cell}\x1b[0m", "File ~/lib/torch/x.py:3, in f", rank, "ValueError: no"]
    assert written(error("no", *traceback))[0]["traceback"] == [
        cell, '    File "torch/x.py", line 3, in f', "ValueError: no",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("/tmp/ipykernel_PID/345.py:3: UserWarning: x", "/tmp/...:3: UserWarning: x"),
        ("file:///tmp/tmpab_c1/store", "file:///tmp/..."),
        ("saved /private/var/folders/x1/T/tmp1.pt.", "saved /tmp/..."),
        ("/home/ada/ddplab/ddplab/worker.py:9", "ddplab/worker.py:9"),
        ("/usr/lib/python3.11/threading.py", "python3/threading.py"),
        ("peer [127.0.0.1]:35617 is gone", "peer [127.0.0.1]:PORT is gone"),
        ("tcp://127.0.0.1:29500", "tcp://127.0.0.1:29500"),
        ("<function f at 0x7f6b2c0d3e20>", "<function f at 0x...>"),
        ("3/4 of 1.5 s in cell In[7]", "3/4 of 1.5 s in cell In[7]"),
    ],
)
def test_what_belongs_to_the_machine_is_not_written(said: str, kept: str) -> None:
    assert written(stream(said))[0]["text"] == kept


def test_a_view_of_a_widget_leaves_its_text() -> None:
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=0)"}
    (output,) = written({"output_type": "display_data", "metadata": {}, "data": view})
    assert output["data"] == {"text/plain": "IntSlider(value=0)"}


@pytest.mark.parametrize("text", ["/home/ada/x.py", "in /usr/lib/x", "C:\\Users", "(/opt/a/b)"])
def test_an_absolute_path_is_found(text: str) -> None:
    assert ABSOLUTE.search(text)


@pytest.mark.parametrize("text", ["1/2/3", "</td></tr>", "tcp://a/b/c", "~/a/b", "ddplab/run.py", "/__w/pytorch/x"])
def test_what_only_looks_like_one_is_not(text: str) -> None:
    assert not ABSOLUTE.search(text)
