"""What holds for every picture, and what they are made of."""

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from recorded import raised, run_of, waiting

from ddplab import events as ev
from ddplab import plots
from ddplab.plots.cells import Grid, arrived, changed, stripes
from ddplab.plots.picture import Picture
from ddplab.plots.values import by_rank, in_bytes, light, numbers
from ddplab.run import Run, Text


def returned(*values: Any, world_size: int | None = None) -> Run:
    """A run whose ranks returned ``values``, in rank order."""
    results = (ev.Result(rank, 1.0, value) for rank, value in enumerate(values))
    return run_of(*results, world_size=world_size or len(values))


PAIRS = returned({"before": [1.0], "after": [2.0]}, {"before": [3.0], "after": [2.0]})
METRICS = run_of(*(ev.Metric(rank, 0.1, 0, name, 1.0) for rank in (0, 1) for name in ("loss", "lr")))
BYTES = {"parameters": 8, "gradients": 8, "optimizer state": 16, "peak": 100}
PICTURES: dict[str, Callable[..., Picture | None]] = {
    "metrics": lambda **ax: plots.metrics(METRICS, **ax),
    "collective": lambda **ax: plots.collective(PAIRS, **ax),
    "ring": lambda **ax: plots.ring(returned([[1, 2], [1, 5]], [[3, 4], [4, 4]]), **ax),
    "sampler": lambda **ax: plots.sampler(10, 3, epochs=2, **ax),
    "sampler, many": lambda **ax: plots.sampler(1000, 4, epochs=4, **ax),
    "gradients": lambda **ax: plots.gradients(PAIRS, **ax),
    "gradients, many": lambda **ax: plots.gradients(list(torch.ones(3, 500)), torch.ones(3, 500), **ax),
    "agreement": lambda **ax: plots.agreement([[[1.0]], [[1.0]]], reference=[[2.0]], **ax),
    "buckets": lambda **ax: plots.buckets([[("b", 4)], [("a", 8)]], **ax),
    "buckets, many": lambda **ax: plots.buckets([[(f"p{n}", 4) for n in range(50)]], **ax),
    "scaling": lambda **ax: plots.scaling({1: [1.0], 2: [2.0, 3.0]}, **ax),
    "bandwidth": lambda **ax: plots.bandwidth([(8, 1.0), (16, 1.5)], 2, **ax),
    "memory": lambda **ax: plots.memory({"DDP": [BYTES, BYTES], "FSDP2": [BYTES, BYTES]}, **ax),
}
ALL_OF_A_RUN: dict[str, Callable[..., Picture | None]] = {
    plot.__name__: plot
    for plot in (
        plots.agreement, plots.bandwidth, plots.buckets, plots.collective, plots.gradients, plots.memory, plots.metrics,
        plots.ring, plots.rpc, plots.sampler, plots.timeline, plots.waiting,
    )
} | {"scaling": lambda run, **ax: plots.scaling({2: run}, **ax)}  # fmt: skip
ANY_PICTURE = pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)


@ANY_PICTURE
def test_a_picture_is_one_image_a_constant_text_and_rows(picture: Callable[..., Picture]) -> None:
    """What ends a cell is a PNG and words; printing it gives the numbers too."""
    first, second = picture(), picture()
    bundle = first._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/plain"} and bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == repr(first) == repr(second)
    assert first.rows and all(list(row) == list(first.rows[0]) for row in first.rows)
    assert str(first).startswith(repr(first)) and next(iter(first.rows[0])) in str(first)


@ANY_PICTURE
def test_a_picture_can_go_into_one_part_of_a_figure(picture: Callable[..., Picture | None]) -> None:
    """With ``ax`` nothing is given back, and the neighbours stay empty."""
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    assert picture(ax=left) is None
    figure.draw_without_rendering()
    assert not right.has_data() and any(ax.has_data() or ax.texts or ax.patches for ax in figure.axes)
    assert all(ax.get_position().x1 < right.get_position().x0 for ax in figure.axes if ax is not right and ax.axison)


@ANY_PICTURE
def test_every_axis_of_numbers_says_what_it_is(picture: Callable[..., Picture]) -> None:
    """Where there are ticks there is a label, or the ticks are the names of ranks or parameters."""
    for ax in picture().figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            names = [label.get_text() for label in axis.get_ticklabels() if label.get_visible()]
            bare = not axis.get_label().get_text() and ax.axison and any(name[:1].isdigit() for name in names)
            shared = axis is ax.yaxis and ax.get_subplotspec() and ax.get_subplotspec().colspan.start > 0
            assert not bare or shared, f"{names} of {ax}"


def test_several_panels_need_a_subplot() -> None:
    """Axes at a place of their own cannot be split, and the error says which can."""
    ax = Figure().add_axes((0, 0, 1, 1))
    with pytest.raises(ValueError, match="must come from figure.add_subplot or subplots"):
        plots.gradients([1.0], after=[1.0], ax=ax)


def test_importing_plots_loads_neither_matplotlib_nor_torch() -> None:
    """A rank that calls ``plots.memory_of`` does not pay for pictures."""
    code = "import sys, ddplab.plots; print([m for m in ('matplotlib', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "flat"),
    [
        (3, [3]),
        (torch.tensor([[1, 2], [3, 4]]), [1, 2, 3, 4]),
        (torch.ones(2, dtype=torch.bfloat16, requires_grad=True), [1, 1]),
        ([torch.tensor(1.5), np.array([2])], [1.5, 2]),
        ({"w": [1], "b": (2,)}, [1, 2]),
        ([], []),
    ],
    ids=repr,
)
def test_numbers_of_many_kinds(value: Any, flat: list[float]) -> None:
    """Tensors, arrays, numbers and nests of them become flat float64."""
    assert numbers(value).tolist() == flat


@pytest.mark.parametrize("value", ["3", None, b"1", object(), ["x"]], ids=repr)
def test_what_is_no_number_is_refused_with_its_name(value: Any) -> None:
    """The message names the value, its type and what was expected."""
    with pytest.raises(TypeError, match="the loss must be numbers or tensors, not"):
        numbers(value, "the loss")


def test_a_tensor_of_a_saved_run_is_told_apart() -> None:
    """A run that was saved has the text of a tensor: the message says how to save numbers."""
    with pytest.raises(TypeError, match=r"a saved run keeps lists, not tensors: use x.tolist\(\)"):
        numbers(Text("tensor([1.])"))


def test_values_of_a_run_that_failed_keep_their_ranks() -> None:
    """What ranks 0 and 2 returned is theirs, whatever became of rank 1."""
    run = run_of(ev.Result(0, 1.0, "a"), ev.Result(2, 1.0, "c"), world_size=3)
    assert by_rank(run, "x") == {0: "a", 2: "c"}


@pytest.mark.parametrize("plot", ALL_OF_A_RUN.values(), ids=ALL_OF_A_RUN)
@pytest.mark.parametrize("run", [run_of(), run_of(raised(0, 1.0)), run_of(*waiting(0, 3.0, "timeout"))])
def test_of_a_run_that_went_nowhere_a_sentence_is_drawn(plot: Any, run: Run) -> None:
    """Nothing was told, one rank raised, or one hung: there is a picture with a text, alone or in a figure."""
    picture = plot(run)
    assert repr(picture) and picture._repr_mimebundle_()["image/png"]
    assert plot(run, ax=Figure().subplots()) is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4e38])
def test_what_diverged_is_drawn_without_a_warning(value: float) -> None:
    """Infinite, no number, or the largest float32: alone, and beside its negative."""
    for pair in ([value, 1.0], [value, -value]):
        run = returned(*({"before": pair, "after": pair[::-1]} for _ in range(2)))
        losses = run_of(*(ev.Metric(0, 0.1, step, "loss", loss) for step, loss in enumerate(pair)))
        for picture in (
            plots.gradients(run), plots.collective(run), plots.agreement([[pair], [pair]]), plots.metrics(losses)
        ):  # fmt: skip
            assert picture is not None and picture._repr_mimebundle_()


def test_of_several_runs_those_that_failed_are_named() -> None:
    """The others are drawn."""
    fine, failed = run_of(*(ev.Result(rank, 1.0, {"parameters": 8}) for rank in (0, 1))), run_of(raised(0, 1.0))
    assert repr(plots.memory({"DDP": fine, "FSDP2": failed})) == (
        "bytes of 2 ranks with DDP, FSDP2: parameters; failed: FSDP2"
    )
    times: Any = plots.scaling({1: [2.0], 2: failed, 4: [1.0]})
    assert repr(times) == "time, speed-up and efficiency at world sizes 1, 4; 2 ranks: failed"
    assert times.figure.axes[0].get_legend().get_title().get_text() == "2 ranks: failed"


def test_no_values_is_an_error() -> None:
    """An empty list is no run that failed."""
    with pytest.raises(ValueError, match="no rank returned a value"):
        plots.memory([])


def test_bytes_have_three_digits() -> None:
    """Between 1,000 and 1,023 there are four."""
    assert [in_bytes(n) for n in (0, 999, 1023, 1024, 2**20 - 1, 5 * 2**30)] == [
        "0 B", "999 B", "1023 B", "1 KiB", "1024 KiB", "5 GiB",
    ]  # fmt: skip


# Cells ------------------------------------------------------------------------------------------------


def test_a_cell_is_striped_by_its_owners() -> None:
    """Two ranks, one cell each: of rank 0, and of both."""
    image = stripes(Grid([[1.0], [2.0]], [[[0]], [[0, 1]]]))
    blue, orange = (light(plots.rank_style(rank)["color"]) for rank in (0, 1))
    assert image.shape == (2, 2, 3)
    assert [tuple(pixel) for pixel in image.reshape(4, 3)] == [blue, blue, blue, orange]


def test_of_many_ranks_a_sum_is_grey_and_the_darker_the_more_are_in_it() -> None:
    """Sixteen stripes could not be told apart."""
    image = stripes(Grid([[1.0, 2.0]] * 16, [[[0, 1], list(range(16))]] * 16))
    few, all_of_them = image[0, 0], image[0, 16]
    assert len(set(few)) == len(set(all_of_them)) == 1 and few[0] > all_of_them[0] > 0.5


def test_what_has_come_from_others_and_what_has_changed() -> None:
    """A frame is drawn where another rank's data is; of a step, where a number is another."""
    before, after = Grid([[1.0, 2.0]], [[[0], [0]]]), Grid([[1.0, 5.0]], [[[0], [0, 1]]])
    assert arrived(after) == changed(before, after) == [(0, 1)]
    assert arrived(Grid([[1.0]], [[None]])) == []


def test_neither_matplotlib_nor_numpy_warns() -> None:
    """NaN, infinity and equal values are drawn, or left out, in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nan, inf = float("nan"), float("inf")
        for picture in (
            plots.gradients([[nan], [1.0]], after=[[nan], [nan]]),
            plots.gradients([[0.0] * 9] * 2, after=[[0.0] * 9] * 2),
            plots.agreement([[[nan], [1.0]], [[1.0], [1.0]]]),
            plots.agreement([[[nan]], [[1.0]]]),
            plots.agreement([[[inf], [1.0]], [[1.0], [1.0]]]),
            plots.metrics(run_of(ev.Metric(0, 0.1, 0, "loss", nan))),
            plots.memory([{"parameters": 0, "gradients": 0}]),
        ):
            assert picture and picture._repr_mimebundle_()
