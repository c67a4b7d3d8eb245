"""The numbers behind each picture, and that a picture shows once."""

import pytest
from matplotlib.figure import Figure
from recorded import run_of

from ddplab import plots
from ddplab.events import Metric
from ddplab.plots.metrics import mean, series

LOSSES = [Metric(rank, 0.1 * step, step, "loss", float(10 * rank + step)) for rank in (0, 1) for step in range(3)]


def test_series_has_the_points_of_each_rank() -> None:
    """One line of (step, value) per rank."""
    assert series(run_of(*LOSSES), "loss") == {0: [(0, 0.0), (1, 1.0), (2, 2.0)], 1: [(0, 10.0), (1, 11.0), (2, 12.0)]}


def test_steps_are_counted_where_none_was_logged() -> None:
    """``log(loss=...)`` without a step gives 0, 1, 2."""
    run = run_of(*(Metric(0, 0.1 * n, None, "loss", float(n)) for n in range(3)))
    assert series(run, "loss") == {0: [(0, 0.0), (1, 1.0), (2, 2.0)]}


def test_the_mean_is_taken_where_all_ranks_logged() -> None:
    """A rank that stopped early does not bend the mean."""
    assert mean({0: [(0, 1.0), (1, 2.0)], 1: [(0, 3.0)]}) == [(0, 2.0)]


def test_a_picture_is_one_image_and_a_constant_text() -> None:
    """What ends a cell is a PNG and words without numbers that change."""
    picture = plots.metrics(run_of(*LOSSES), "loss")
    assert picture is not None
    bundle = picture._repr_mimebundle_()
    assert bundle["text/plain"] == "loss of 2 ranks over 3 steps"
    assert bundle["image/png"].startswith(b"\x89PNG")


def test_a_picture_can_go_into_a_figure_of_ones_own() -> None:
    """With ``ax`` nothing is given back, and the axes hold a line per rank and the mean."""
    ax = Figure().add_subplot()
    assert plots.metrics(run_of(*LOSSES), "loss", ax=ax) is None
    assert [line.get_label() for line in ax.lines] == ["rank 0", "rank 1", "mean of 2 ranks"]
    assert list(ax.lines[2].get_ydata()) == [5.0, 6.0, 7.0]


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    """The message says what there is."""
    with pytest.raises(ValueError, match="no rank logged 'lost'; this run has loss"):
        plots.metrics(run_of(*LOSSES), "lost")


def test_ranks_look_different_in_colour_and_in_grey() -> None:
    """Sixteen ranks have sixteen looks, and neighbours differ in line style too."""
    looks = [tuple(plots.rank_style(rank).values()) for rank in range(16)]
    assert len(set(looks)) == 16
    assert all(a[1] != b[1] for a, b in zip(looks, looks[1:], strict=False))


def test_a_name_between_dollar_signs_is_drawn_as_it_is() -> None:
    """Was a bug: matplotlib took it for TeX, and raised when the picture was shown."""
    picture = plots.metrics(run_of(Metric(0, 0.1, 0, r"$\frac$", 1.0), world_size=1), r"$\frac$")
    assert picture is not None
    assert picture._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")
