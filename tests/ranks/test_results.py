"""What ranks return, and what becomes of values that cannot be sent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddplab import RankFailedError, Run, launch, log, shipping


@pytest.fixture
def back() -> Callable[..., Any]:
    """A function that gives what one rank returns for the value it is given."""
    return lambda value: launch(lambda: value, world_size=1, backend=None, view="quiet").results[0]


# Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_come_in_rank_order(world_size: int) -> None:
    """results has one value per rank, in rank order, though the last rank returns first."""

    def work() -> int:
        import torch.distributed as dist

        rank = dist.get_rank()
        if rank + 1 < dist.get_world_size():  # wait until the next rank is about to return
            dist.recv(torch.empty(1), src=rank + 1)
        if rank > 0:
            dist.send(torch.ones(1), dst=rank - 1)
        return rank

    run = launch(work, world_size=world_size, backend="gloo")
    assert run.results == list(range(world_size))
    assert run.returned == dict(enumerate(run.results))
    assert run.ok


@pytest.mark.parametrize(
    "value",
    [None, (), 1.5, "ä", b"\x00", {1: [{"a": (1, {2})}]}, 10**100, float("-inf"), range(3), Ellipsis, ValueError],
    ids=repr,
)
def test_plain_values_come_back_equal(back: Callable[..., Any], value: Any) -> None:
    """What a rank returns arrives with its type and value."""
    told = back(value)
    assert told == value
    assert type(told) is type(value)


def test_an_exception_may_be_a_value(back: Callable[..., Any]) -> None:
    """A returned exception is no failure."""
    told = back(ValueError("a", 1))
    assert (type(told), told.args) == (ValueError, ("a", 1))


TENSORS = {
    "scalar": lambda: torch.tensor(3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "leaf": lambda: torch.ones(2, requires_grad=True),
    "with a graph": lambda: torch.ones(2, requires_grad=True) * 2,
    "view with a graph": lambda: (torch.ones(4, requires_grad=True) * 2)[1:3],
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "empty": lambda: torch.empty(0, 3),
}


# torch before 2.14 says so wherever a sparse tensor is made, in the launcher too.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", TENSORS.values(), ids=list(TENSORS))
def test_tensors_come_back(make: Callable[[], torch.Tensor]) -> None:
    """A tensor keeps its type, dtype, layout, shape, values and requires_grad."""
    here = make()
    for told in launch(make, backend=None).results:
        assert type(told) is type(here)
        assert (told.dtype, told.layout, told.requires_grad) == (here.dtype, here.layout, here.requires_grad)
        assert torch.equal(told.to_dense(), here.to_dense())


def test_models_and_their_state_come_back(back: Callable[..., Any]) -> None:
    """Modules, state_dicts and optimizer states arrive, nested with numpy arrays, and compute the same."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2]
    told = back({"model": model, "states": [model.state_dict(), optimizer.state_dict()], "array": {"x": array}})
    assert torch.equal(told["model"].eval()(torch.ones(1, 2)), model.eval()(torch.ones(1, 2)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(told["states"][0][name], tensor)
    momentum = told["states"][1]["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state_dict()["state"][0]["momentum_buffer"])
    np.testing.assert_array_equal(told["array"]["x"], array)


def test_large_values_do_not_deadlock() -> None:
    """64 MB from each of three ranks arrive whole."""

    def work() -> torch.Tensor:
        return torch.full((16_000_000,), float(os.environ["RANK"]))

    run = launch(work, world_size=3, backend=None)
    assert [(len(told), told.unique().tolist()) for told in run.results] == [(16_000_000, [float(r)]) for r in range(3)]


@pytest.mark.parametrize("wrap", [lambda t: t, torch.nn.Parameter, lambda t: t.requires_grad_()])
def test_a_small_view_of_a_large_tensor_travels_small(wrap: Callable[..., Any]) -> None:
    """Of a view only its own elements are sent, whatever storage it looks into."""
    value = {"rows": [wrap(torch.zeros(10_000_000)[3:5])]}
    assert len(shipping.pack_result(value)) < 5_000

    def work() -> Any:
        return {"rows": [wrap(torch.zeros(10_000_000)[3:5])]}

    told = launch(work, world_size=1, backend=None).results[0]["rows"][0]
    assert (told.tolist(), told.requires_grad, type(told)) == ([0, 0], value["rows"][0].requires_grad, type(wrap(told)))
    assert told.untyped_storage().nbytes() == 8


# Classes and functions of a cell ----------------------------------------------------------------------


def test_an_instance_comes_back_as_the_notebooks_own_class(cells: Any) -> None:
    """isinstance holds for a value of a cell's class, also inside containers."""
    cells.run("class A:\n    n = 1\ndef f(): return A(), [{'a': (A(),)}]")
    for one, inside in cells.run("launch(f).results"):
        assert type(one) is cells.namespace["A"]
        assert type(inside[0]["a"][0]) is cells.namespace["A"]


def test_an_instance_of_a_local_class_comes_back_as_that_class(cells: Any) -> None:
    """isinstance holds for a class that a function of the notebook made."""
    cells.run("def make():\n    class A: pass\n    return A\nA = make()\nB = make()\ndef f(): return A(), B()")
    for a, b in cells.run("launch(f).results"):
        assert (type(a), type(b)) == (cells.namespace["A"], cells.namespace["B"])


def test_an_enum_member_comes_back_as_itself(cells: Any) -> None:
    """`is` holds for members of a cell's enum."""
    cells.run("import enum\nclass A(enum.Enum):\n    X = 1\ndef f(): return {A.X: A}")
    assert cells.run("launch(f, world_size=1).results[0]") == {cells.namespace["A"].X: cells.namespace["A"]}


def test_a_function_of_a_cell_comes_back_as_itself(cells: Any) -> None:
    """A returned cell function is the notebook's own, not a copy."""
    cells.run("def g(): return 1\ndef f(): return g, [f]")
    g, (f,) = cells.run("launch(f, world_size=1).results[0]")
    assert (g, f) == (cells.namespace["g"], cells.namespace["f"])


@pytest.mark.parametrize("where", ["class A:\n    class B:", "def make():\n    class B:"], ids=["nested", "local"])
def test_a_returned_instance_leaves_its_class_in_the_notebook_as_it_was(cells: Any, where: str) -> None:
    """Methods go on to see the notebook's globals, and what a rank did to the class stays in the rank.

    Was a bug: cloudpickle puts the rank's copies of all attributes into the class it finds.
    """
    body = "\n        n = 1\n        def get(self): return N, self.n\n"
    cells.run(f"N = 1\n{where}{body}" + ("    return B\nB = make()" if "make" in where else "B = A.B"))
    cells.run("def f():\n    B.n = 2\n    return B()")
    value = cells.run("launch(f, world_size=1).results[0]")
    cells.run("N = 5")
    assert value.get() == (5, 1)
    assert cells.run("B().get()") == (5, 1)


def test_a_class_made_in_a_rank_comes_back_by_value(cells: Any) -> None:
    """An instance of a class that only the rank knows still arrives, with its methods."""
    cells.run("def f():\n    class A:\n        def n(self): return 42\n    return A()")
    assert [value.n() for value in cells.run("launch(f).results")] == [42, 42]


# Values that cannot be sent ---------------------------------------------------------------------------

UNSENDABLE = {
    "lock": ("threading.Lock()", "lock"),
    "generator": ("(n for n in 'ab')", "generator"),
    "deep inside": ("{'a': [1, {'b': (2, [threading.RLock()])}]}", r"\['a'\]\[1\]\['b'\]\[1\]\[0\].*RLock"),
    "attribute": ("A()", r"\.guard.*lock"),
    "very deep": ("__import__('functools').reduce(lambda inner, _: [inner], range(40), threading.Lock())", "lock"),
}


@pytest.mark.parametrize(("value", "words"), UNSENDABLE.values(), ids=list(UNSENDABLE))
def test_a_value_that_cannot_be_pickled_is_named(cells: Any, value: str, words: str) -> None:
    """The error names the rank and what in its value cannot be sent; the other ranks' values are kept.

    Was a bug: the search for the culprit in a nested value took for ever.
    """
    cells.run("import threading\nclass A:\n    def __init__(self): self.guard = threading.Lock()")
    cells.run(f"def f(): return {value} if dist.get_rank() == 1 else 'fine'")
    run = cells.run("launch(f, world_size=3, backend='gloo', allow_failure=True, timeout_s=10)")
    assert dict(run.returned) == {0: "fine", 2: "fine"}
    assert [(failure.rank, failure.type, failure.role) for failure in run.failures] == [(1, "ShippingError", "root")]
    with pytest.raises(RankFailedError, match=f"(?s)rank 1 of 3 failed.*{words}"):
        run.check()


def test_a_value_that_cannot_be_made_again_is_named(cells: Any) -> None:
    """A value that arrives but does not unpickle is a failure of its rank; the others' values are kept."""
    cells.run(
        """
        class A(Exception):
            def __init__(self, code, text): super().__init__(text)
        def f(): return A(1, "x") if dist.get_rank() == 0 else "fine"
        """
    )
    run = cells.run("launch(f, backend='gloo', allow_failure=True)")
    assert dict(run.returned) == {1: "fine"}
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 failed.*could not be made again.*TypeError.*text"):
        run.check()


def test_a_model_in_ddp_is_refused_as_a_value(cells: Any) -> None:
    """A returned DistributedDataParallel is named, with the advice to return its state_dict."""
    cells.run("def f(): return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))")
    with pytest.raises(RankFailedError, match=r"(?s)DistributedDataParallel.*state_dict"):
        cells.run("launch(f, backend='gloo')")


# The end of a rank ------------------------------------------------------------------------------------

ENDS = {
    "a finalizer aborts": "from multiprocessing import util; util.Finalize(None, os.abort, exitpriority=1)",
    "an exit handler aborts": "import atexit; atexit.register(os.abort)",
    "a thread aborts after main": "import threading; main = threading.main_thread()\n"
    "    threading.Thread(target=lambda: (main.join(), os.abort())).start()",
    "a finalizer kills": "from multiprocessing import util\n"
    "    util.Finalize(None, os.kill, (os.getpid(), 9), exitpriority=1)",
    "a finalizer raises": "from multiprocessing import util; util.Finalize(None, lambda: 1 / 0, exitpriority=1)",
    "the group cannot be destroyed": "dist.destroy_process_group = os.abort",
    "a daemonic thread runs on": "import threading\n"
    "    threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a thread runs on": "import threading\n    threading.Thread(target=threading.Event().wait).start()",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_how_a_rank_ends_does_not_undo_its_value(cells: Any, end: str) -> None:
    """A rank that has returned has succeeded, even if its process then crashes or would not end."""
    cells.run(f"def f():\n    {end}\n    return dist.get_rank()")
    run = cells.run("launch(f, backend='gloo')")
    assert run.ok
    assert run.results == [0, 1]


# Saved ------------------------------------------------------------------------------------------------


def test_a_saved_run_comes_back(tmp_path: Any) -> None:
    """Run.load gives the output, failures, metrics and values of the run that was saved."""

    def work() -> Any:
        rank = int(os.environ["RANK"])
        print("rank", rank)
        log(step=rank, loss=math.pi)
        if rank == 1:
            raise ValueError("one is bad")
        return {"rank": rank, 2: (1.5, [None, True])}, torch.ones(2)

    run = launch(work, world_size=3, backend=None, allow_failure=True, view="quiet")
    run.save(tmp_path / "run.jsonl")
    again = Run.load(tmp_path / "run.jsonl")
    assert (again.spec, again.elapsed_s) == (run.spec, run.elapsed_s)
    assert (again.output(), again.failures, again.metrics) == (run.output(), run.failures, run.metrics)
    assert (again.verdict(), again.report()) == (run.verdict(), run.report())
    assert {rank: value[0] for rank, value in again.returned.items()} == {
        rank: value[0] for rank, value in run.returned.items()
    }
    assert repr(again.returned) == repr(run.returned)
    assert again.failures[0].where is not None


def test_a_loaded_run_raises_as_the_launch_did(tmp_path: Any) -> None:
    """results of a loaded run raise the same error, with the same report, as the launch."""
    with pytest.raises(RankFailedError) as caught:
        launch(lambda: 1 / 0, backend=None, view="quiet")
    caught.value.run.save(tmp_path / "run.jsonl")
    with pytest.raises(RankFailedError) as again:
        Run.load(tmp_path / "run.jsonl").results  # noqa: B018
    assert (str(again.value), again.value.report) == (str(caught.value), caught.value.report)


def test_thirty_two_ranks_start_and_finish_on_two_cores() -> None:
    """Many more ranks than cores: all join one group, and each value comes back in its place."""

    def total() -> tuple[int, float]:
        import torch.distributed as dist

        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.get_rank(), x.item()

    assert launch(total, world_size=32, backend="gloo", view="quiet").results == [(rank, 32.0) for rank in range(32)]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_without_a_seed_every_rank_draws_its_own_numbers(start_method: str) -> None:
    """Was a bug: ranks that are forked had the random state of the forkserver, all alike."""

    def draw() -> tuple[float, float, float]:
        import random

        import numpy

        return torch.rand(1).item(), random.random(), numpy.random.rand()

    runs = [launch(draw, backend=None, seed=None, start_method=start_method, view="quiet").results for _ in range(2)]
    assert all(len(set(column)) == 4 for column in zip(*runs[0], *runs[1], strict=True))
