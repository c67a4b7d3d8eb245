"""What travels from a cell to the ranks and on to their peers and children, and what is refused at once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from ddplab import ShippingError, launch, shipping

WAYS = {
    "function": "def f(): return 42",
    "lambda": "f = lambda: 42",
    "closure": "def outer(n):\n    def inner(): return n + 1\n    return inner\nf = outer(41)",
    "partial": "import functools\nf = functools.partial(lambda a, b: a * b, 6, b=7)",
    "bound method": "class A:\n    n = 42\n    def get(self): return self.n\nf = A().get",
    "class method": "class A:\n    n = 42\n    @classmethod\n    def get(cls): return cls.n\nf = A.get",
    "static method": "class A:\n    @staticmethod\n    def get(): return 42\nf = A.get",
    "callable instance": "class A:\n    def __init__(self, n): self.n = n\n    def __call__(self): return self.n\nf = A(42)",
    "class": "class A(int):\n    def __new__(cls): return int(42)\nf = A",
    "other functions, classes and globals": "N = 40\nclass A:\n    n = 1\ndef g(): return N + A.n\ndef f(): return g() + 1",
    "recursion": "def add(n): return n and 1 + add(n - 1)\nf = lambda: add(42)",
    "mutual recursion": "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\n"
    "def f(): return 42 if even(10) and not odd(10) else 0",
    "local recursion": "def f():\n    def add(n): return n and 1 + add(n - 1)\n    return add(42)",
    "dataclass": "from dataclasses import dataclass, field\n@dataclass\nclass A:\n    n: int\n"
    "    more: list = field(default_factory=list)\ndef f(): return A(42).n + len(A(1).more)",
    "enum": "import enum\nclass A(enum.Enum):\n    X = 42\n    Y = 1\ndef f(): return A.X.value if A(1) is A.Y else 0",
    "super()": "class A:\n    def n(self): return 41\nclass B(A):\n    def n(self): return super().n() + 1\nf = B().n",
    "nested class": "class A:\n    class B:\n        n = 42\ndef f(): return A.B().n",
    "generic class": "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass A(Generic[T]):\n"
    "    def __init__(self, n: T): self.n = n\ndef f(): return A[int](42).n",
    "property and slots": "class A:\n    __slots__ = ('_n',)\n    def __init__(self): self._n = 42\n"
    "    @property\n    def n(self): return self._n\ndef f(): return A().n",
    "namedtuple": "from collections import namedtuple\nA = namedtuple('A', 'm n')\ndef f(): return A(1, 42).n",
    "abstract class": "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def n(self): ...\nclass B(A):\n"
    "    def n(self): return 42\ndef f(): return B().n()",
    "decorator": "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(*a): return 2 * g(*a)\n    return h\n"
    "@twice\ndef f(): return 21",
    "decorator of torch": "@torch.no_grad()\ndef f(): return 42 if not torch.is_grad_enabled() else 0",
    "decorator that gives an argument": "import functools\ndef given(g):\n    @functools.wraps(g)\n"
    "    def h(*a): return g(42, *a)\n    return h\n@given\ndef f(n): return n",
    "wrapper of a library's function": "import functools, math\nN = 2\n@functools.wraps(math.sqrt)\n"
    "def g(n): return N * n\ndef f(): return g(21)",
    "cached function": "import functools\n@functools.cache\ndef g(n): return n\n"
    "@functools.lru_cache(maxsize=1)\ndef f(): return g(42)",
    "cached property": "import functools\nclass A:\n    @functools.cached_property\n    def n(self): return 42\n"
    "def f(): return A().n",
    "context manager": "import contextlib\n@contextlib.contextmanager\ndef given(n): yield n\n"
    "def f():\n    with given(42) as n: return n",
    "module's function": "import math, functools\nf = functools.partial(math.comb, 42, 1)",
    "module": "import torch.nn.functional as F\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.n = torch.nn.Parameter(torch.tensor(-42.0))\n    def forward(self): return F.relu(-self.n)\n"
    "net = Net()\ndef f(): return int(net())",
}


@pytest.mark.parametrize("source", WAYS.values(), ids=list(WAYS))
def test_a_cell_may_launch_anything_callable(cells: Any, source: str) -> None:
    """A callable gives in a rank what it gives in the notebook."""
    cells.run(source)
    assert cells.run("f()") == 42
    assert cells.run("launch(f, world_size=1).results") == [42]


def test_a_spawned_rank_gets_the_same(cells: Any) -> None:
    """A fresh Python knows as much of the cell as the forkserver's child does."""
    cells.run(WAYS["other functions, classes and globals"] + "\n" + WAYS["decorator"].replace("f()", "h2()"))
    source = "launch(lambda: (f(), h2()), world_size=2, start_method='spawn').results"
    assert cells.run(source) == [(42, 42), (42, 42)]


def test_a_global_has_its_value_at_launch(cells: Any) -> None:
    """A rank sees the global as it is when launch is called, not as it was when the function was defined."""
    cells.run("N = 1\ndef f(): return N")
    cells.run("N = 2")
    assert cells.run("launch(f, world_size=1).results") == [2]
    cells.run("N = 3")
    assert cells.run("launch(f, world_size=1).results") == [3]


def test_a_function_may_name_a_part_of_torch_that_is_no_plain_module(cells: Any) -> None:
    """Was a bug: torch.ops, found by the attribute's name alone, was to be pickled."""
    cells.run(
        """
        def uses_ops():
            return str(torch.ops.aten.add), str(torch.classes)
        """
    )
    assert cells.run("launch(uses_ops, world_size=1, view='quiet').results") == [
        (str(torch.ops.aten.add), str(torch.classes))
    ]


def test_functions_of_a_cell_share_their_globals_in_the_rank(cells: Any) -> None:
    """What one function of a cell assigns to a global, another one sees."""
    cells.run("N = 0\ndef add():\n    global N\n    N += 1\ndef f():\n    add()\n    add()\n    return N")
    assert cells.run("launch(f).results, N") == ([2, 2], 0)


def test_a_redefined_function_is_the_one_that_runs(cells: Any) -> None:
    """After a cell is run again, the new definition runs, also where another function calls it."""
    cells.run("def g(): return 1\ndef f(): return g()")
    cells.run("launch(f, world_size=1)")
    cells.run("def g(): return 2")
    assert cells.run("launch(f, world_size=1).results") == [2]


def test_an_edit_of_a_file_next_to_the_notebook_is_seen(
    cells: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the notebook's folder is imported anew by each launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "beside.py").write_text("def f(): return 1\n")
    monkeypatch.setitem(sys.modules, "beside", None)  # to be taken out again at the end
    del sys.modules["beside"]
    cells.run("import beside")
    assert cells.run("launch(beside.f, world_size=1).results") == [1]
    (tmp_path / "beside.py").write_text("def f(): return 2  # edited\n")
    assert cells.run("launch(beside.f, world_size=1).results, launch(lambda: beside.f()).results") == ([2], [2, 2])


def test_globals_of_a_decorators_module_stay_apart_from_those_of_the_cell(
    cells: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that both the cell and an imported decorator's module use has its own value in each.

    Was a bug: functools.wraps says ``__module__ == "__main__"`` of a function with other globals.
    """
    (tmp_path / "scaling.py").write_text(
        "import functools\nN = 2\ndef scaled(g):\n    @functools.wraps(g)\n    def h(): return N * g()\n    return h\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cells.run("from scaling import scaled\nN = 10\n@scaled\ndef f(): return N")
    del sys.modules["scaling"]
    assert cells.run("launch(f, world_size=1).results") == [20]


def test_large_arguments_reach_every_rank(cells: Any) -> None:
    """Arguments of 32 MB arrive whole on three ranks."""
    cells.run("data = torch.arange(8_000_000, dtype=torch.int32)\ndef f(data): return int(data[-1]), len(data)")
    assert cells.run("launch(f, data, world_size=3).results") == [(7_999_999, 8_000_000)] * 3


# RPC --------------------------------------------------------------------------------------------------

RPC = """
from torch.distributed import rpc

class Counter:
    def __init__(self, n): self.n = n
    def add(self, k):
        self.n += k
        return self.n

def double(x): return 2 * x

def f():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    told = None
    if rank == 0:
        counter = rpc.remote("worker1", Counter, args=(40,))
        there = rpc.remote("worker1", double, args=(4,))
        told = (
            rpc.rpc_sync("worker1", double, args=(torch.tensor(21),)).item(),
            rpc.rpc_async("worker1", double, args=(3,)).wait(),
            counter.rpc_sync().add(2), type(counter.to_here()) is Counter, there.to_here(),
        )
    rpc.shutdown()
    return told
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_rpc_calls_functions_and_classes_of_a_cell(cells: Any, start_method: str) -> None:
    """rpc_sync, rpc_async and remote find a cell's functions and classes by their names."""
    cells.run(RPC)
    told = cells.run(f"launch(f, backend=None, start_method={start_method!r}).results")
    assert told == [(42, 6, 42, True, 8), None]


# DataLoader -------------------------------------------------------------------------------------------

LOADER = """
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Batch:
    class Names(tuple): pass
    def __init__(self, items):
        self.x = torch.tensor([x for x, _ in items])
        self.workers = Batch.Names(worker for _, worker in items)

class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index**2 + OFFSET + get_worker_info().dataset.extra, identity()

OFFSET = 100
def collate(items): return Batch(items)
def prepare(worker_id): get_worker_info().dataset.extra = 1000

def f(*contexts):
    told = []
    for context in contexts:
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, collate_fn=collate, worker_init_fn=prepare,
                            multiprocessing_context=context, persistent_workers=True)
        batches = list(loader)
        assert all(type(batch) is Batch and type(batch.workers) is Batch.Names for batch in batches)
        told.append((torch.cat([b.x for b in batches]).tolist(), [tuple(w) for b in batches for w in b.workers]))
        kept.append(loader)  # its workers live until the rank ends
    return told

kept = []
"""


def check_loaders(results: list[Any], none_left: Any) -> None:
    for items, workers in (told for of_rank in results for told in of_rank):
        assert items == [1100 + index**2 for index in range(8)]
        assert len(set(workers)) == 2
        none_left(workers)


@pytest.mark.parametrize("context", [None, "fork", "forkserver", "spawn"])
def test_a_data_loader_of_a_cells_classes_works(cells: Any, none_left: Any, context: str | None) -> None:
    """Dataset, collate function, worker_init_fn and batch class of a cell reach two workers and come back."""
    cells.run(LOADER)
    check_loaders(cells.run(f"launch(f, {context!r}, world_size=1).results"), none_left)


def test_a_data_loader_works_in_spawned_ranks_too(cells: Any, none_left: Any) -> None:
    """The same holds in a fresh Python, for all four ways to start workers, on two ranks at once."""
    cells.run(LOADER)
    results = cells.run("launch(f, None, 'fork', 'forkserver', 'spawn', start_method='spawn').results")
    check_loaders(results, none_left)


# What cannot travel -----------------------------------------------------------------------------------

INSIDE = "inside the function"
REFUSED = {
    "lock": ("import threading\nmutex = threading.Lock()\ndef f(): return mutex", ["'mutex'", "lock", "f", INSIDE]),
    "open file": ("file = open('/dev/null')\ndef f(): return file", ["'file'", "TextIOWrapper", "f", "Pass the path"]),
    "generator": ("numbers = (n for n in [1])\ndef f(): return numbers", ["'numbers'", "generator", "f", "a list"]),
    "thread": ("import threading\nworker = threading.Thread()\ndef f(): worker", ["'worker'", "Thread", "f", INSIDE]),
    "socket": ("import socket\nwire = socket.socket()\ndef f(): return wire", ["'wire'", "socket", "f", "address"]),
    "lock in a dict in a closure": (
        "import threading\ndef make():\n    state = {'a': [{'b': threading.Lock()}]}\n    return lambda: state\nf = make()",
        ["'state'", "['a'][0]['b']", "lock", "<lambda>", INSIDE],
    ),
    "attribute of an instance": (
        "import threading\nclass A:\n    def __init__(self): self.guard = threading.Lock()\na = A()\ndef f(): return a",
        ["'a'", "guard", "lock", "f", INSIDE],
    ),
    "lock that another function uses": (
        "import threading\nmutex = threading.RLock()\ndef g(): return mutex\ndef f(): return g()",
        ["'mutex'", "RLock", "captured by g", INSIDE],
    ),
    "lock of a method's class": (
        "import threading\nclass A:\n    guard = threading.Lock()\n    def get(self): return self.guard\nf = A().get",
        ["A.guard", "lock", INSIDE],
    ),
}


@pytest.mark.parametrize(("source", "words"), REFUSED.values(), ids=list(REFUSED))
@pytest.mark.usefixtures("no_start")
def test_what_cannot_travel_is_named(cells: Any, source: str, words: list[str]) -> None:
    """The error names the variable, its type, who captured it and what to do; nothing is started."""
    cells.run(source)
    with pytest.raises(ShippingError) as caught:
        cells.run("launch(f)")
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    for name in ("file", "wire"):
        if name in cells.namespace:
            cells.namespace[name].close()


@pytest.mark.usefixtures("no_start")
def test_an_argument_that_cannot_travel_is_named_by_its_place() -> None:
    """Of arguments, which have no name, the error tells the number."""
    numbers = (n for n in [1])
    with pytest.raises(ShippingError, match=r"argument 1 of max.*generator.*a list"):
        launch(max, [1], numbers)


@pytest.mark.usefixtures("no_start")
def test_a_cuda_tensor_is_refused(cells: Any) -> None:
    """A tensor on the GPU is named, with the advice to move it to the CPU (here: one that claims to be there)."""
    cells.run(
        "class Claims(torch.Tensor):\n    device = torch.device('cuda', 0)\nw = torch.ones(1).as_subclass(Claims)"
    )
    with pytest.raises(ShippingError, match=r"'w', captured by f.*Pass tensor.cpu\(\)"):
        cells.run("def f(): return w\nlaunch(f)")
    assert shipping.pack(max, (torch.ones(1),))
