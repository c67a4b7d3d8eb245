"""The script that ``export`` writes of what cells define: its text, and what it refuses before it writes."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddplab import ShippingError, export

Run = Callable[[str], dict[str, Any]]
_numbers = itertools.count(1)


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a text as IPython runs a cell, in ``__main__``; gives its namespace."""
    namespace, filenames = vars(sys.modules["__main__"]), []
    before = dict(namespace)

    def cell(source: str) -> dict[str, Any]:
        source, filename = textwrap.dedent(source), f"/tmp/ipykernel_0/export{next(_numbers)}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        filenames.append(filename)
        exec(compile(source, filename, "exec", dont_inherit=True), namespace)
        return namespace

    yield cell
    namespace.clear()
    namespace.update(before)
    for filename in filenames:
        del linecache.cache[filename]


@pytest.fixture
def written(run: Run, tmp_path: Path) -> Callable[..., str]:
    """The script of the function ``f`` that a cell defines, after ruff has found no name undefined, unused or twice."""

    def script(source: str, *args: Any, name: str = "f", **options: Any) -> str:
        fn = run(source)[name]
        file = export(fn, tmp_path / "train.py", *args, **options)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,E9", file]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + file.read_text()
        return file.read_text()

    return script


def executed(text: str) -> dict[str, Any]:
    """What the script defines, as when another module imports it."""
    namespace: dict[str, Any] = {"__name__": __name__}  # of a module that dataclasses finds
    exec(compile(text, "train.py", "exec", dont_inherit=True), namespace)
    return namespace


def test_a_whole_script(written: Callable[..., str]) -> None:
    """From the first line to the last, as a colleague would read it."""
    text = written(
        """
        import math, torch, torch.nn as nn
        import torch.distributed as dist
        from ddplab import log, launch

        WIDTHS = [4, 1]
        unused = object()

        class Net(nn.Module):
            def forward(self, x):
                return x * math.pi

        # above
        def f(steps):
            for step in range(steps):
                log(step, size=WIDTHS[0])  # behind
        """,
        3,
        world_size=8,
        nodes=2,
        backend="gloo",
    )
    assert text == textwrap.dedent('''\
        """f, from a notebook. Written by ddplab.export.

            torchrun --standalone --nproc-per-node=4 train.py

        On 2 machines, on each of them, with the name of the first one for HOST:

            export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # or ranks that restart meet the addresses of those that are gone
            torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 train.py
        """

        import gc
        import os

        import torch
        import torch.distributed as dist
        import torch.distributed.nn  # before init_process_group: DDP imports it, and it would hold the group for ever
        from torch.distributed.elastic.multiprocessing.errors import record


        WIDTHS = [4, 1]


        def log(step=None, **metrics):
            """Print the numbers of rank 0."""
            if os.environ["RANK"] == "0":
                numbers = [f"{name} {torch.as_tensor(value).item():.6g}" for name, value in metrics.items()]
                print(*([] if step is None else [f"step {step}"]), *numbers, flush=True)


        # above
        def f(steps):
            for step in range(steps):
                log(step, size=WIDTHS[0])  # behind


        @record  # so that torchrun's report has the traceback
        def main():
            """Join the other ranks, do the work, leave together."""
            dist.init_process_group("gloo")
            torch.manual_seed(0)
            result = f(3)
            if result is not None and os.environ["RANK"] == "0":
                print("f returned", str(result)[:500], flush=True)
                torch.save(result, "train.result.pt")
            del result
            gc.collect()  # nothing may hold the process group when it goes
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()


        if __name__ == "__main__":
            main()
        ''')


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("def g():\n    return 5\ndef f():\n    return g() + 37", "f()"),
        ("def f(n=2):\n    return f(n - 1) * 2 if n else 10.5", "f()"),
        ("from math import sqrt as root, inf\ndef f():\n    return root(1764) if inf > 1 else 0", "f()"),
        ("import os.path\ndef f():\n    return len(os.path.join('a' * 20, 'b' * 21))", "f()"),
        ("import collections.abc as kinds\ndef f():\n    return 42 * issubclass(list, kinds.Sized)", "f()"),
        ("from math import *\ndef f():\n    return int(floor(42.5) + log2(1))", "f()"),
        ("g = lambda x: x * 2\ndef f():\n    return g(21)", "f()"),
        ("def g(x): return x * 2\nh = g\ndef f():\n    return h(21)", "f()"),
        ("from __future__ import annotations\nclass A:\n    def g(self) -> A:\n        return 42\ndef f():\n    return A().g()", "f()"),
        ("if True:\n    # comment\n    def f():\n        return 42", "f()"),
        ("def f():\n    return len(TEXT)\nTEXT = 'x' * 42", "f()"),
        ("from functools import *\n@lru_cache\ndef g(x):\n    return x\ndef f():\n    return g(42)", "f()"),
        ("def twice(fn):\n    return lambda: 2 * fn()\n@twice\ndef f():\n    return 21", "f()"),
        ("fn = 40\ndef more(fn):\n    return lambda: fn() + 2\n@more\ndef f():\n    return fn", "f()"),
        ("import contextlib\nclass A:\n    n = 21\nclass B(A):\n    m = A.n * 2\ndef f():\n    return B.m", "f()"),
        ("def make(n):\n    def f():\n        return n * 2\n    return f\nf = make(21)", "f()"),
        ("def make(n):\n    def f(k=2):\n        return n if k == 0 else f(k - 1)\n    return f\nf = make(42)", "f()"),
        ("def f():\n    return 42 if (lambda: None)() is None and [x for x in VALUES] else 0\nVALUES = (1,)", "f()"),
        ("import dataclasses\n@dataclasses.dataclass\nclass C:\n    n: int = 0\nC1 = C(42)\ndef f():\n    return C1.n", "f()"),
        ("import enum\nclass E(enum.Enum):\n    A = 42\ndef f():\n    return X.value\nX = E.A", "f()"),
        ("count = 41\ndef f():\n    global count\n    count += 1\n    return count", "f()"),
        ("def sum(values):\n    return 42\ndef f():\n    return sum([])", "f()"),
        ("from ddplab import progress as bar\ndef f():\n    return len([*bar(range(42))])", "f()"),
        ("from ddplab import span\n@span('x')\ndef f():\n    with span('y'):\n        return 42", "f()"),
        ("from ddplab.data import ShapesDataset as S\ndef f():\n    return S(42).targets.numel()", "f()"),
        ("import torch\nkind = torch.float32\nplace = torch.device('cpu')\ndef f():\n    return int(torch.tensor(42, dtype=kind, device=place))", "f()"),
        ("def g(n=2):\n    return 42 if n == 0 else h(n - 1)\nh = g\ndef f():\n    return h()", "f()"),
        ("if True:\n    def f():\n        text = f\"\"\"{40}\n    .\n  \"\"\"\n        return 42 if text == '40\\n    .\\n  ' else repr(text)", "f()"),
        ("if True:\n    class A:\n        n = 42\nelse:\n    class A:\n        n = 0\ndef f():\n    return A.n", "f()"),
        ("from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    n: int = 42\n    up: C | None = None\ndef f():\n    return C().n", "f()"),
        ("from typing import Optional\nimport torch\nPair = tuple[int, ...]\nMaybe = Optional[torch.Tensor]\ndef f(a: Pair = (), b: Maybe | int = 42):\n    return b", "f()"),
        ("from pathlib import Path\nroot = Path('a' * 42)\ndef f():\n    return len(str(root))", "f()"),
        ("limits = {'a': (float('inf'), -1.5), None: {1, 2}, 3: frozenset(), b'x': [True, ...], -1: set()}\ndef f():\n    return 42 if limits['a'][0] > 1 else 0", "f()"),
    ],
)  # fmt: skip
def test_what_a_function_uses_comes_with_it(written: Callable[..., str], source: str, call: str) -> None:
    """The script's function gives what the cell's does."""
    assert eval(call, executed(written(source))) == 42


@pytest.mark.parametrize(
    "value", [{"a": (float("-inf"), 1), None: {2}}, frozenset("a'"), "a\"'\\", set(), (1,), [b"x", ...]]
)
def test_arguments_are_written_as_one_would_type_them(written: Callable[..., str], value: Any) -> None:
    """What the call gives is what was given."""
    (line,) = [line for line in written("def f(x): ...", value).splitlines() if " = f(" in line]
    assert eval(line.partition(" = ")[2], {"f": lambda x: x}) == value


def test_the_latest_code_is_written_in_an_order_that_works(
    run: Run, written: Callable[..., str], tmp_path: Path
) -> None:
    """What was run again stands above what uses it when it is defined, and the first text is gone."""
    run("class A:\n    n = 1")
    run("class B(A): ...\ndef f():\n    return B.n")
    run("class A:\n    n = 42")
    assert executed(written("class B(A): ...\ndef f():\n    return B.n"))["f"]() == 42
    run("def g(n):\n    return n")
    f = "def more(fn):\n    return lambda: g(fn())\nclass A:\n    n = [g(n) for n in [42]]\n@more\ndef f():\n    return A.n[0]"
    run(f)
    run("def g(n):\n    return n  # this runs when f is defined")
    file = export(vars(sys.modules["__main__"])["f"], tmp_path / "train.py")
    assert executed(file.read_text())["f"]() == 42


def test_a_partial_function_is_a_call_with_its_arguments(run: Run, tmp_path: Path) -> None:
    """As one would write it."""
    f = run("def f(a, b, c=0): ...")["f"]
    assert "result = f(1, 2, c=3)\n" in export(functools.partial(f, 1, c=3), tmp_path / "a.py", 2).read_text()


def test_functions_named_as_the_scripts_own_do_not_meet_them(written: Callable[..., str]) -> None:
    """``main`` and ``result`` are common names."""
    text = written("def result():\n    return 42\ndef main():\n    return result()", name="main")
    assert "    result_of_main = main()\n" in text
    assert text.endswith("    run_main()\n")


@pytest.mark.parametrize(
    ("backend", "seed", "there", "absent"),
    [
        ("auto", 7, ['"nccl"', '"gloo"', "torch.manual_seed(7)", "random.seed(7)", "    np.random.seed(7)"], "seed(0)"),
        ("nccl", 0, ['"nccl"', "set_device"], '"gloo"'),
        ("gloo", None, ['init_process_group("gloo")'], "seed("),
        (None, 0, ["torch.manual_seed(0)", "destroy_process_group"], "init_process_group("),
    ],
)  # fmt: skip
def test_backend_and_seed(written: Callable[..., str], backend: Any, seed: Any, there: list[str], absent: str) -> None:
    """Each as ``launch`` understands it."""
    text = written("import random\nimport numpy as np\ndef f():\n    return random, np", backend=backend, seed=seed)
    assert [word for word in there if word not in text] == []
    assert absent not in text.partition("def main")[2]


def test_a_file_of_the_users_is_imported_and_named(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """The header says that the script needs it; a library is not named."""
    (tmp_path / "mine_for_export.py").write_text("import math\ndef g(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    f = run("from mine_for_export import g\nimport torch\ndef f():\n    return g, torch")["f"]
    text = export(f, tmp_path / "train.py").read_text()
    assert "\nNeeds beside it: mine_for_export.py.\n" in text
    assert text.index("import record\n\nfrom mine_for_export import g\n")
    text = export(f.__globals__["g"], tmp_path / "train.py").read_text()
    assert "\nfrom mine_for_export import g\n" in text


MADE = "import torch\nlayer = torch.nn.Linear(2, 1)\ndef g():\n    return layer\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"{MADE}def f():\n    return g()", "'layer', which g uses, cannot be written into a script: it is a torch.nn.modules.linear.Linear. Make it inside the function"),
        ("import threading\nlocks = {'a': [threading.Lock()]}\ndef f():\n    locks", "'locks', which f uses, cannot be written into a script: it is a _thread.lock"),
        ("def f():\n    return missing", "'missing', which f uses, is not defined"),
        ("def f():\n    get_ipython().system('ls')", "which only IPython has"),
        ("from ddplab import launch\ndef f():\n    launch", "'launch', which f uses, is ddplab's"),
        ("import ddplab\ndef f():\n    ddplab.log(x=1)", "'ddplab', which f uses, is ddplab's"),
        ("from ddplab import data\ndef f():\n    data.ShapesDataset(1)", "'data', which f uses, is ddplab's"),
        ("def f():\n    from ddplab import log", "f imports ddplab inside"),
        ("exec('def g(): ...')\ndef f():\n    g()", "'g', which f uses, has no source"),
        ("class A:\n    def g(self): ...\nA.g = lambda self: 1\ndef f():\n    A()", "'A', which f uses, has no source"),
        ("class A:\n    def g(self): ...\nf = A().g", "what to run cannot be written into a script: it is a method"),
        ("class A:\n    def __call__(self): ...\nf = A()", "what to run cannot be written into a script: it is a A"),
        ("values = list(range(1000))\ndef f():\n    values", "It is too long to read"),
        ("values = []\nvalues.append(values)\ndef f():\n    values", "nested too deeply"),
        ("def make(n):\n    def g():\n        return n\n    return g\ng, n = make(1), 2\ndef f():\n    return g(), n", "'n' is two things"),
        ("def more(fn):\n    return lambda: fn() + 2\ndef use(fn):\n    def f():\n        return fn()\n    return f\n@more\ndef g(): ...\nf = use(g.__closure__[0].cell_contents)", "'fn', which f uses, has no source"),
        ("class A:\n    n = 1\nA.n = 2\ndef f():\n    A", "'A', which f uses, has no source"),
        ("def f():\n    return f.n\nf.n = 1", "'f', which export uses, has no source"),
        ("import functools\n@functools.singledispatch\ndef g(x): ...\n@g.register\ndef _(x: int): ...\ndef f():\n    g(1)", "'g', which f uses, has no source"),
        ("def make(n):\n    def f():\n        nonlocal n\n        n += 1\n    return f\nf = make(1)", "f cannot stand in a script by itself: no binding for nonlocal 'n' found"),
        ("def record(): ...\ndef f():\n    record()", "'record' is two things: one for the script, another for the rest of it. Rename yours."),
        ("kind = type(len)\ndef f():\n    kind", "'kind', which f uses, cannot be written into a script: it is a type. It cannot be imported."),
        ("import dataclasses\n@dataclasses.dataclass\nclass C:\n    n: int = dataclasses.field(default=1, init=False)\nc = C()\nc.n = 2\ndef f():\n    c", "'c', which f uses, cannot be written into a script: it is a C"),
        ("import torch\ng = torch.compile(lambda: 1)\ndef f():\n    g()", "'g', which f uses, has no source"),
        ("def h(): ...\ndef wrap(fn):\n    import functools\n    return functools.wraps(fn)(lambda: fn())\ng = wrap(h)\ndef f():\n    g()", "'g', which f uses, has no source"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_named(run: Run, tmp_path: Path, source: str, words: str) -> None:
    """The error says what, who uses it and what to do; nothing is written, neither script."""
    f = run(source)["f"]
    with pytest.raises(ShippingError) as caught:
        export(f, tmp_path / "train.py", slurm=tmp_path / "train.sbatch")
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_argument_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """By its place."""
    for value in (object(), re.I | re.M, 1j, torch.ones(1)):
        kind = type(value).__name__
        with pytest.raises(
            ShippingError, match=f"argument 1 of print cannot be written into a script: it is a .*{kind}"
        ):
            export(print, tmp_path / "train.py", 1, value)


@pytest.mark.parametrize(
    ("fn", "options", "error", "words"),
    [
        ("train.py", {}, TypeError, "export needs a function"),
        (len, {}, TypeError, "missing"),
        (print, {"world_size": 0}, ValueError, "world_size=0 is not 1 or more"),
        (print, {"world_size": 2.0}, TypeError, "world_size is a whole number"),
        (print, {"nodes": True}, TypeError, "nodes is a whole number"),
        (print, {"world_size": 3, "nodes": 2}, ValueError, "shared equally"),
        (print, {"backend": "mpi"}, ValueError, "backend='mpi' is not one of"),
        (print, {"seed": -1}, ValueError, "seed=-1 is not 0 or more"),
        (print, {"slurm": "train.py"}, ValueError, "is the script itself"),
        (print, {"slurm": "no/folder/a.sbatch"}, FileNotFoundError, "there is no folder"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, monkeypatch: Any, fn: Any, options: Any, error: Any, words: str) -> None:
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        export(fn, "train.py", **options)
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_files_are_replaced(tmp_path: Path) -> None:
    """Another needs ``overwrite=True``; then the other file is not written either."""
    file, batch = tmp_path / "train.py", tmp_path / "train.sbatch"
    for word in ("one", "two"):
        export(print, file, word, slurm=batch)
    assert 'print("two")' in file.read_text()
    batch.write_text("mine")
    with pytest.raises(FileExistsError, match="train.sbatch is there and was not written by export"):
        export(print, file, "three", slurm=batch)
    assert 'print("two")' in file.read_text()
    export(print, file, "three", slurm=batch, overwrite=True)
    assert batch.read_text().startswith("#!/bin/bash\n# Written by ddplab.export.")


@pytest.mark.parametrize(
    ("backend", "line"),
    [("nccl", "#SBATCH --gpus-per-node=8"), ("auto", "##SBATCH --gpus-per-node=8    (with one # less"), ("gloo", "")],
)
def test_the_slurm_script_asks_for_what_it_needs(tmp_path: Path, backend: str, line: str) -> None:
    """Machines, one task on each, GPUs where they are wanted; and bash can read it."""
    (tmp_path / "jobs").mkdir()
    export(print, tmp_path / "my train.py", world_size=16, nodes=2, backend=backend, slurm=tmp_path / "jobs" / "a.sh")
    text = (tmp_path / "jobs" / "a.sh").read_text()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=8"} <= set(text.splitlines())
    assert [li[: len(line)] for li in text.splitlines() if "gpus-per-node" in li] == [line] * bool(line)
    assert text.endswith(" '../my train.py'\n")
    assert subprocess.run(["bash", "-n", tmp_path / "jobs" / "a.sh"]).returncode == 0
