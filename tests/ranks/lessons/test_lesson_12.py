"""The lesson on other ways: what torch alone can run gives DDP's weights; its What-ifs; its helpers; what is recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from lesson import Lesson

from ddplab import RankFailedError, launch

NUM_PARAMETERS = 12 * 16384 + 1  # of the large model
WHOLE = 4 * NUM_PARAMETERS


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The notebook, of which all functions are defined, but nothing was run."""
    found = Lesson(cells, "12_other_ways")
    found.define_all()
    return found


def told(fn: Any, *args: Any, world_size: int = 2, backend: str | None = "gloo") -> list[Any]:
    """What each rank tells."""
    return launch(fn, *args, world_size=world_size, backend=backend, threads=1, view="quiet").results


def one(lesson: Lesson) -> Any:
    """The weights of one process after each step."""
    found = lesson.define("def make_model")
    model = found["make_model"]()
    return np.array(found["train"](model, found["sgd"](model), share=(0, 1))["weights"])


def weights(ranks: list[Any]) -> Any:
    """By rank and step."""
    return np.array([rank["weights"] for rank in ranks if rank])


# The systems ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["with_ddp", "with_zero1", "with_fsdp2", "with_dtensor", "average_each", "average_flat"]
)
def test_it_trains_as_one_process_does(lesson: Lesson, name: str) -> None:
    """All 20 steps on both ranks, which agree to the last bit."""
    found = lesson.define("def with_ddp")
    fn = partial(found["by_hand"], found[name]) if name.startswith("average") else found[name]
    ranks = weights(told(fn))
    assert ranks.shape == (2, 20, 12 * 16 + 1)
    assert np.array_equal(ranks[0], ranks[1])
    assert abs(ranks[0] - one(lesson)).max() < 1e-6


def test_the_parameter_server_trains_as_one_process_does(lesson: Lesson) -> None:
    """Its two workers have no weights to tell of."""
    server, *workers = told(lesson.define("def serve")["with_rpc"], world_size=3, backend=None)
    assert workers == [None, None]
    assert abs(weights([server])[0] - one(lesson)).max() < 1e-6


@pytest.mark.parametrize("device_ids", [None, [0, 1]])
def test_dataparallel_without_gpus_only_calls_the_module(lesson: Lesson, device_ids: Any) -> None:
    """Once a step, with all 32 samples, whatever devices it is told; its weights are those of one process."""
    found = lesson.define("def with_dataparallel")
    (rank,) = found["without_gpu"](partial(found["with_dataparallel"], device_ids))
    assert rank["seen"] == [32] * 20
    assert abs(weights([rank])[0] - one(lesson)).max() < 1e-6


# Bytes ------------------------------------------------------------------------------------------------


def held(lesson: Lesson, name: str) -> list[dict[str, int]]:
    """The bytes of both ranks, of the large model with momentum."""
    found = lesson.define("def with_ddp")
    return [rank["bytes"] for rank in told(found[name], 16384, 0.9)]


def test_ddp_keeps_three_whole_copies_on_every_rank(lesson: Lesson) -> None:
    """Less the bias of the last layer: 4 bytes are too few to be counted."""
    copy = WHOLE - 4
    assert held(lesson, "with_ddp") == [
        {"parameters": copy, "gradients": copy, "optimizer state": copy, "other": 0}
    ] * 2  # fmt: skip


def test_zero1_deals_whole_tensors(lesson: Lesson) -> None:
    """The state of the first weights, five sixths of all, is rank 0's."""
    first, second = held(lesson, "with_zero1")
    assert [rank["optimizer state"] for rank in (first, second)] == [4 * 10 * 16384, 4 * 2 * 16384]
    assert first["gradients"] == second["gradients"] == WHOLE - 4


@pytest.mark.parametrize("name", ["with_fsdp2", "with_dtensor"])
def test_what_cuts_every_tensor_halves_everything(lesson: Lesson, name: str) -> None:
    """Up to 9 %: FSDP2 gives the second rank padding for the one row of the last layer."""
    for rank in held(lesson, name):
        for kind in ("parameters", "gradients", "optimizer state"):
            assert rank[kind] == pytest.approx(WHOLE / 2, rel=0.09)
        assert rank["other"] == 0


# Its helpers ------------------------------------------------------------------------------------------


def test_a_row_judges_by_the_last_weights_and_by_each_step(lesson: Lesson) -> None:
    """Of two ranks, of which the second is off by 0.25 in the last of two steps; a rank that tells nothing is left out."""
    found = lesson.define("def row")
    found["row"].__globals__.update(one=np.zeros((2, 1)), ddp=np.full((2, 1), 0.5), MACHINE="2 cores")
    times_s = [(11.0, 12.0), (12.0, 12.002)]
    ranks = [{"weights": [[0.0], [0.5]], "times_s": times_s}, None, {"weights": [[0.0], [0.75]], "times_s": times_s}]
    row = found["row"]("torch", ranks, 10.0)
    assert (row["dw"], row["to_one"], row["between"]) == (0.25, [0.0, 0.75], [0.0, 0.25])
    assert (row["start_s"], row["step_ms"]) == (2.0, pytest.approx(2.0))
    assert row["by"] == "PyTorch Team"


def test_the_picture_has_the_numbers_of_the_row(lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lines, though only differences are kept."""
    monkeypatch.setattr(plt, "show", lambda: None)
    found = lesson.define("def agreements")
    row = {"to_one": [0.5, 0.25], "between": [0.25, 0.5], "seen": "recorded"}
    found["agreements"].__globals__["rows"] = {"a": row, "b": row | {"seen": "here"}}
    found["agreements"](["a", "b"])
    left, right = plt.gcf().axes
    assert (left.get_title(), right.get_title()) == ("a (recorded)", "b (here)")
    lines = {line.get_label(): list(line.get_ydata()) for line in left.get_lines()}
    assert lines["to one process"] == [0.5, 0.25]
    assert lines["between 2 ranks"] == [0.25, 0.5]
    plt.close("all")


def test_what_is_not_installed_is_not_run_and_said_to_be_recorded(
    lesson: Lesson, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the function nor what starts it."""
    found = lesson.define("def ranks")
    rows: dict[str, Any] = {}
    found["compare"].__globals__.update(rows=rows, recorded={"X": {"dw": 0.5}})
    found["compare"]("X", pytest.fail, start=pytest.fail, package="no such package")
    assert rows == {"X": {"dw": 0.5, "seen": "recorded"}}
    assert capsys.readouterr().out == "X: 0.50 from DDP (recorded)\n"


# What if ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "change", "name", "between", "to_one"),
    [
        ("def yours", ("momentum))", "momentum), share=(0, 1))"), "yours", (0, 0), (0, 1e-6)),
        ("def yours", ("DDP(make_model(width))", "make_model(width)"), "yours", (0.1, 0.3), (0.05, 0.2)),
        ("def average_each", ("        p.grad /= dist.get_world_size()\n", ""), "average_each", (0, 0), (0.1, 0.2)),
    ],
)
def test_the_answers_hold(
    lesson: Lesson, start: str, change: tuple[str, str], name: str, between: tuple[float, float], to_one: tuple[float, float]
) -> None:  # fmt: skip
    """How far the ranks are from each other, and from one process, after the last step."""
    found = lesson.define(start, change)
    fn = partial(found["by_hand"], found[name]) if name.startswith("average") else found[name]
    first, second = weights(told(fn))[:, -1]
    assert between[0] <= abs(first - second).max() <= between[1]
    assert to_one[0] <= abs(first - one(lesson)[-1]).max() <= to_one[1]


def test_a_bare_parameter_does_not_bring_its_gradient_back(lesson: Lesson) -> None:
    """The server's weights never change, and nothing is raised."""
    found = lesson.define("def serve", ("{name: p.view_as(p) for name, p in model.named_parameters()}", "dict(model.named_parameters())"))  # fmt: skip
    server = told(found["with_rpc"], world_size=3, backend=None)[0]
    assert np.array_equal(server["weights"][-1], server["weights"][0])
    assert abs(server["weights"][-1] - one(lesson)[-1]).max() > 0.5


def test_cuts_that_do_not_fit_each_other_are_refused(lesson: Lesson) -> None:
    """The first layer expects half of the inputs on each rank, and is given all."""
    fits, not_fits = (
        '"0": ColwiseParallel(), "2": RowwiseParallel()',
        '"0": RowwiseParallel(), "2": ColwiseParallel()',
    )
    with pytest.raises(RankFailedError, match="same reduction dim"):
        told(lesson.define("def with_dtensor", (fits, not_fits))["with_dtensor"])


def test_four_ranks_train_as_one(lesson: Lesson) -> None:
    """The global batch is 32 on any number of ranks."""
    ranks = weights(told(lesson.define("def yours")["yours"], world_size=4))
    assert abs(ranks - one(lesson)).max() < 1e-6
