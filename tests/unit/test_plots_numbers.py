"""The numbers behind collectives, gradients, agreement, buckets, scaling, bandwidth and memory."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from recorded import run_of

from ddplab import events as ev
from ddplab import plots
from ddplab.plots.agreement import differences
from ddplab.plots.alpha_beta import Fit
from ddplab.plots.bandwidth import speeds
from ddplab.plots.collective import sides
from ddplab.plots.exchange import _bit, _owners
from ddplab.plots.gradients import table, verdict
from ddplab.plots.of_model import cut
from ddplab.plots.ring import states
from ddplab.plots.scaling import scales, seconds
from ddplab.run import Run


def returned(*values: Any, world_size: int | None = None) -> Run:
    """A run whose ranks returned ``values``, in rank order; it took 1.5 s."""
    results = (ev.Result(rank, 1.0, value) for rank, value in enumerate(values))
    return run_of(*results, world_size=world_size or len(values))


def rows(picture: Any) -> list[tuple[Any, ...]]:
    """The values of the rows of a picture."""
    return [tuple(row.values()) for row in picture.rows]


# Collectives ------------------------------------------------------------------------------------------


def test_moved_numbers_are_those_of_the_rank_that_held_them() -> None:
    """A gather of one's own: every number after it was held by exactly one rank before it."""
    before, after = sides({0: {"before": 5, "after": torch.tensor([5, 7])}, 1: {"before": 7, "after": []}}, 2)
    assert before.cells == [[5], [7]] and before.owners == [[[0]], [[1]]]
    assert after.cells == [[5, 7], []] and after.owners == [[[0], [1]], []]


def test_of_sums_nothing_is_guessed() -> None:
    """12 is held by rank 1 before, and is a sum after: as 13 is a new number, no owner is told at all."""
    told = {0: {"before": [1, 2], "after": [12, 13]}, 1: {"before": [11, 12], "after": [12, 13]}}
    assert sides(told, 2)[1].owners == [[None, None], [None, None]]


def test_what_ranks_tell_of_the_owners_counts() -> None:
    """The launched collectives say whose data each number is."""
    told = {0: {"before": [1], "after": [1], "before from": [[0]], "after from": [[0, 1]]}}
    assert sides(told, 1)[1].owners == [[[0, 1]]]


def test_a_rank_that_failed_has_an_empty_row() -> None:
    """The picture goes as far as the run went."""
    picture = plots.collective(returned({"before": [1], "after": [2]}, world_size=2))
    assert rows(picture) == [(0, "1", "2"), (1, "", "")]


def test_the_bits_of_64_ranks_can_be_read() -> None:
    """The last is the sign of an int64."""
    bits = torch.tensor([_bit(0) | _bit(2), _bit(63), _bit(63) | _bit(62), 0])
    assert _owners(bits) == [[0, 2], [63], [62, 63], []]


def test_a_ring_of_ones_own_is_drawn_as_far_as_all_have_told() -> None:
    """Rank 1 told one state less."""
    grids = states({0: [torch.tensor([1, 2]), [1, 6]], 1: [[3, 4]]}, 2)
    assert [grid.cells for grid in grids] == [[[1, 2], [3, 4]]]
    assert grids[0].owners == [[None, None], [None, None]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.collective("allreduce"), r"collective\('allreduce'\): give a run, or one of broadcast, scatter"),
        (lambda: plots.collective("all_reduce", op="MEAN"), r"op='MEAN'\): give one of SUM, AVG"),
        (lambda: plots.collective("broadcast", src=3), r"collective\(src=3\): the ranks are 0 to 2"),
        (lambda: plots.collective("gather", dst=-1), r"collective\(dst=-1\): the ranks are 0 to 2"),
        (lambda: plots.collective("send", 1), "src and dst are both rank 0, and a rank cannot send to itself"),
        (lambda: plots.collective("all_reduce", 65), r"world_size=65\): give 1 to 64"),
        (lambda: plots.collective(returned(1.0)), r"rank 0 must return {'before': tensor, 'after': tensor}, not 1.0"),
        (lambda: plots.ring(0), r"ring\(0\): give a run, or 1 to 64 ranks"),
        (lambda: plots.ring(returned([], [])), "must return lists: their chunks at the start and after each step"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_a_collective_that_cannot_be_is_refused(call: Any, message: str) -> None:
    """Before a rank is started."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that launches."""

    def launch(*args: Any, **options: Any) -> None:
        raise AssertionError("ranks were launched")

    monkeypatch.setattr("ddplab.launch", launch)


# Gradients --------------------------------------------------------------------------------------------


def test_gradients_of_a_list_of_tensors_are_flat_and_in_order() -> None:
    """As ``[p.grad for p in model.parameters()]`` gives them."""
    found = table({0: [torch.ones(1, 2), torch.tensor(3.0)]}, "before")
    assert found.tolist() == [[1, 1, 3]]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([[1.5], [1.5]], "every rank has the mean"),
        ([[1.5 + 1e-6], [1.5]], "every rank has the mean"),
        ([[3.0], [3.0]], "every rank has the sum"),
        ([[2.0], [2.0]], "every rank has the same, but neither the mean nor the sum"),
        ([[0.0], [3.0]], "the ranks still differ"),
        ([[math.nan], [1.5]], "not all gradients are finite"),
    ],
)
def test_the_verdict_says_what_became_of_the_gradients(after: list[list[float]], words: str) -> None:
    """Before, they were 0 and 3."""
    assert verdict(np.array([[0.0], [3.0]]), np.array(after)) == words


def test_gradients_of_a_run_and_of_sequences_are_the_same_picture() -> None:
    """A run of dicts, or what each rank had before and after."""
    run = returned({"before": torch.tensor(0.0), "after": 1.5}, {"before": 3.0, "after": 1.5})
    assert str(plots.gradients(run)) == str(plots.gradients([0.0, 3.0], after=[1.5, 1.5]))
    assert rows(plots.gradients(run)) == [("0", "0", "1.5"), ("1", "3", "1.5"), ("mean", "1.5", "1.5")]


def test_the_mean_before_is_drawn_on_both_sides() -> None:
    """So that one sees the bars of the right side reach it."""
    picture: Any = plots.gradients([0.0, 3.0], after=[1.5, 1.5])
    for ax, heights in zip(picture.figure.axes, ([0.0, 3.0], [1.5, 1.5]), strict=True):
        assert [bar.get_height() for bar in ax.patches] == heights
        assert ax.collections[0].get_segments()[0][:, 1].tolist() == [1.5, 1.5]
        assert ax.get_ylim()[1] > 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.gradients([[1.0], [1.0, 2.0]], after=[1.0, 1.0]), "not 1 on rank 0, 2 on rank 1"),
        (lambda: plots.gradients([[1.0], [1.0]], after=[1.0]), r"\(2, 1\) before, but \(1, 1\) after"),
        (lambda: plots.gradients([[], []], after=[[], []]), "equally many elements on all ranks, not 0 on rank 0"),
        (lambda: plots.gradients(returned(1.0)), r"rank 0 must return {'before': ..., 'after': ...}, not 1.0"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(call: Any, message: str) -> None:
    """With the sizes that were seen."""
    with pytest.raises(ValueError, match=message):
        call()


# Agreement --------------------------------------------------------------------------------------------


def test_the_largest_difference_between_any_two() -> None:
    """Of three sets of two parameters: 4 - 1 in the second."""
    assert differences([([1.0, 1.0], [1.5, 4.0], [2.0, 2.0])]) == [3.0]


def test_agreement_between_ranks_and_with_one_process() -> None:
    """The ranks are equal at step 0 and 1, the reference is half off at step 1."""
    run = returned(torch.tensor([[1.0], [2.0]]), [[1.0], [torch.tensor(2.0)]])
    picture: Any = plots.agreement(run, reference=[[1.0], [2.5]])
    assert rows(picture) == [(0, 0.0, 0.0), (1, 0.0, 0.5)]
    assert repr(picture) == (
        "largest parameter difference over 2 steps: between 2 ranks (none: equal to the last bit), to one process"
    )


def test_zero_is_drawn_at_the_foot_and_called_0() -> None:
    """A logarithmic axis has no 0."""
    ax = Figure().add_subplot()
    plots.agreement([[[0.0], [0.0]], [[0.0], [0.02]]], ax=ax)
    assert list(ax.lines[0].get_ydata()) == [0.001, 0.02]
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["0", "$10^{-2}$"]


def test_steps_that_not_all_told_are_left_out() -> None:
    """A rank that failed at step 1 told of one step."""
    assert rows(plots.agreement([[[1.0], [2.0]], [[1.0]]])) == [(0, 0.0)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plots.agreement([[[1.0]]]), ValueError, "one rank has nobody to differ from; give reference="),
        (lambda: plots.agreement([[], []]), ValueError, "no step was told by all"),
        (lambda: plots.agreement([[[1.0]], [[1.0, 2.0]]]), ValueError, "at step 0 there are 1, 2 parameters"),
        (lambda: plots.agreement([1.0, 2.0]), TypeError, "rank 0 must give a list with the parameters at each step"),
        (lambda: plots.agreement([[[1.0]]], reference=1.0), TypeError, "the reference must give a list"),
    ],
)
def test_agreement_needs_two_and_a_step(call: Any, error: type[Exception], message: str) -> None:
    """Each error says what to give."""
    with pytest.raises(error, match=message):
        call()


# Buckets ----------------------------------------------------------------------------------------------

PARAMETERS = [("a", 4), ("b", 8), ("c", 4), ("d", 4)]


def test_buckets_are_cut_from_the_last_parameter() -> None:
    """Unsorted, the last comes first."""
    assert cut(PARAMETERS, [8, 12]) == [[("d", 4), ("c", 4)], [("b", 8), ("a", 4)]]


def test_in_a_bucket_the_first_ready_comes_first() -> None:
    """What never became ready comes last."""
    assert cut(PARAMETERS, [8, 12], ready=[2, 3, 0]) == [[("c", 4), ("d", 4)], [("a", 4), ("b", 8)]]


def test_buckets_that_do_not_fit_the_parameters_are_an_error() -> None:
    """Better than a wrong picture."""
    with pytest.raises(RuntimeError, match="no parameters in a row have the 6 bytes"):
        cut(PARAMETERS, [6, 14])


def test_ranks_with_other_buckets_are_refused() -> None:
    """And so are other values, and no buckets."""
    with pytest.raises(ValueError, match="rank 1 has other buckets than rank 0"):
        plots.buckets(returned([[("a", 4)]], [[("b", 4)]]))
    with pytest.raises(ValueError, match=r"rank 0 must return plots.buckets_of\(ddp_model\), not 3"):
        plots.buckets(returned(3))
    with pytest.raises(ValueError, match="there is no bucket with a parameter"):
        plots.buckets([])
    with pytest.raises(TypeError, match="takes a model in DistributedDataParallel, not Linear"):
        plots.buckets(torch.nn.Linear(1, 1))


def test_parameters_stand_in_the_order_of_their_buckets() -> None:
    """With their names beside them, cut in front where they are long."""
    ax = Figure().add_subplot()
    plots.buckets([[("fc.bias", 40)], [("x" * 50, 80)]], ax=ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fc.bias", "…" + "x" * 47]
    assert [bar.get_width() for bar in ax.patches] == [40, 80]
    assert [text.get_text() for text in ax.texts] == [
        " bucket 0, ready first: 40 B",
        " 40 B",
        " bucket 1: 80 B",
        " 80 B",
    ]


# Scaling ----------------------------------------------------------------------------------------------


def test_speed_up_and_efficiency_of_medians() -> None:
    """8 s on one rank, 4 s on four: twice as fast, half of what would be ideal."""
    one, four = scales({4: [3.0, 4.0, 5.0], 1: [8.0]})
    assert one == (1, 8.0, 8.0, 8.0, 1.0, 1.0)
    assert four == (4, 4.0, 3.0, 5.0, 2.0, 0.5)


def test_speed_up_counts_from_the_smallest_world_size() -> None:
    """Without a run of one rank, two ranks are taken to be twice as fast as one."""
    assert [scale.speed_up for scale in scales({2: [6.0], 4: [3.0]})] == [2.0, 4.0]


def test_weak_scaling_is_ideal_when_the_time_stays() -> None:
    """Four times the work in the same time is four times as fast."""
    assert scales({1: [2.0], 4: [2.0]}, weak=True)[1][4:] == (4.0, 1.0)


def test_seconds_told_by_ranks_are_those_of_the_slowest() -> None:
    """In each repeat; and of what is no number, those from launch to end."""
    assert seconds(returned([1.0, 2.0], [3.0, 1.0])) == ([3.0, 2.0], "seconds, told by the ranks")
    assert seconds([returned(1.0, 4.0), returned(2.0, 3.0)]) == ([4.0, 3.0], "seconds, told by the ranks")
    assert seconds(returned("done", "done")) == ([1.5], "seconds from launch to end")


def test_a_slower_world_size_is_said_to_be_slower() -> None:
    """In the picture, not in the words, as these must not change from run to run."""
    picture: Any = plots.scaling({1: 1.0, 2: 2.0, 4: 0.5})
    labels = [text.get_text() for text in picture.figure.axes[0].get_legend().get_texts()]
    assert "slower than 1 rank" in labels
    slower = next(line for line in picture.figure.axes[0].lines if line.get_label() == "slower than 1 rank")
    assert (list(slower.get_xdata()), list(slower.get_ydata())) == ([2], [2.0])
    assert repr(picture) == "time, speed-up and efficiency at world sizes 1, 2, 4"


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        ({}, ValueError, r"give times by world size, such as {1: run1, 2: run2}"),
        ([1.0], TypeError, "give times by world size, such as {1: run1, 2: run2}, not list"),
        ({2: [0.0]}, ValueError, r"2 ranks took \[0.0\] s"),
        ({2: [math.inf]}, ValueError, r"2 ranks took \[inf\] s"),
        ({2: []}, ValueError, r"2 ranks took \[\] s"),
        ({"2": [1.0]}, ValueError, "'2' ranks took"),
        ({2: "1 s"}, TypeError, "scaling: a time must be numbers or tensors, not str"),
        ({3: returned(1.0, 1.0)}, ValueError, r"3 is no world size of Run\(train, world_size=2"),
    ],
)
def test_times_that_are_none_are_refused(times: Any, error: type[Exception], message: str) -> None:
    """Each error names what was seen."""
    with pytest.raises(error, match=message):
        plots.scaling(times)


# Bandwidth --------------------------------------------------------------------------------------------


def test_an_exact_line_is_found() -> None:
    """2 ms and 1 GB/s."""
    fit = plots.fit_alpha_beta([(size, 0.002 + size * 1e-9) for size in (1, 10**3, 10**6, 10**9)])
    assert fit.alpha_s == pytest.approx(0.002) and fit.beta_s_per_byte == pytest.approx(1e-9)
    assert fit.seconds(10**6) == pytest.approx(0.003)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """The largest is 10 % off; a plain least-squares line would miss the smallest by 1,000 times its time."""
    fit = plots.fit_alpha_beta([(1, 1e-5), (10**3, 1.1e-5), (10**9, 1.1)])
    assert fit.seconds(1) == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize(
    ("points", "fit"),
    [([(1, 1.0), (2, 4.0)], Fit(0.0, 1.2)), ([(1, 2.0), (2, 1.0)], Fit(1.2, 0.0))],
    ids=["alpha would be negative", "beta would be negative"],
)
def test_neither_time_is_negative(points: list[tuple[float, float]], fit: Fit) -> None:
    """The other is then fitted alone, by the same weights."""
    assert tuple(plots.fit_alpha_beta(points)) == pytest.approx(tuple(fit))


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """2 (n - 1) / n times the algorithm bandwidth: 1 for two ranks, 1.75 for eight."""
    for world_size, factor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        assert speeds([(10**9, 0.5)], world_size) == [(10**9, 0.5, 0.5, 0.5, 2.0, 2.0 * factor)]


def test_repeats_of_a_size_are_one_row_with_their_spread() -> None:
    """In the order of the sizes."""
    found = speeds([(16, 3.0), (8, 1.0), (16, 1.0), (16, 2.0)], 2)
    assert [speed[:4] for speed in found] == [(8, 1.0, 1.0, 1.0), (16, 2.0, 1.0, 3.0)]


def test_a_message_of_a_run_takes_as_long_as_its_slowest_rank() -> None:
    """The world size comes from the run."""
    picture = plots.bandwidth(returned([(8, 1.0), (16, 2.0)], [(8, 1.5), (16, 1.0)]))
    assert [row[:2] for row in rows(picture)] == [(8, 1.5), (16, 2.0)]
    assert repr(picture) == "all_reduce on 2 ranks, message sizes from 8 B to 16 B"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.bandwidth([], 2), "there are no rows"),
        (lambda: plots.bandwidth([(8, 1.0)]), r"world_size=0\): between how many ranks"),
        (lambda: plots.bandwidth([(8, 1.0)], 1), r"world_size=1\): between how many ranks"),
        (lambda: plots.bandwidth([(0, 1.0)], 2), r"\(0, 1.0\) is no row \(bytes, seconds\), both above 0"),
        (lambda: plots.bandwidth(returned([(8, 1.0)], [(9, 1.0)])), r"ranks tell of messages of \[8, 9\] bytes"),
        (lambda: plots.bandwidth(returned(3)), r"rank 0 must return a list of \(bytes, seconds\), not 3"),
        (lambda: plots.bandwidth(returned([8.0], [8.0])), r"8.0 is no row \(bytes, seconds\)"),
        (lambda: plots.bandwidth([("8", "1")], 2), r"\('8', '1'\) is no row"),
        (lambda: plots.fit_alpha_beta([(8, 1.0), (8, 2.0)]), "rows .* of two sizes or more"),
        (lambda: plots.fit_alpha_beta([(8, 1.0), (9, 0.0)]), "with seconds above 0"),
    ],
)
def test_rows_that_are_none_are_refused(call: Any, message: str) -> None:
    """Each error says what was seen."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# Memory -----------------------------------------------------------------------------------------------


def test_the_parts_stand_on_each_other_and_the_peak_apart() -> None:
    """A bar for each part and rank; the peak has its own panel."""
    picture: Any = plots.memory([{"parameters": 4, "gradients": 2, "peak resident set": 90}])
    kept, peak = picture.figure.axes
    assert [(bar.get_y(), bar.get_height()) for bar in kept.patches] == [(0, 4), (4, 2)]
    assert [bar.get_height() for bar in peak.patches] == [90] and peak.get_ylabel() == "peak resident set"


def test_runs_are_compared_on_one_scale() -> None:
    """A column for each run; the rows say which."""
    picture: Any = plots.memory({"DDP": [{"parameters": 8}], "FSDP2": [{"parameters": 2}]})
    assert [ax.get_title() for ax in picture.figure.axes] == ["DDP", "FSDP2"]
    assert len({ax.get_ylim() for ax in picture.figure.axes}) == 1
    assert rows(picture) == [("DDP", 0, 8), ("FSDP2", 0, 2)]


def test_optimizer_state_is_what_the_optimizer_keeps() -> None:
    """Adam keeps two numbers for each parameter, and the count of its steps."""
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(10)).sum().backward()
    optimizer.step()
    found = plots.memory_of(model, optimizer)
    assert (found["parameters"], found["gradients"], found["optimizer state"]) == (400, 400, 804)
    assert found["peak resident set"] > 10**7


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([3], r"rank 0 must return plots.memory_of\(model, optimizer\), not 3"),
        ([{}], "rank 0 must return plots.memory_of"),
        ([{"parameters": "4"}], "rank 0 must return plots.memory_of"),
        ([{"parameters": 4}, {"peak": 4}], "rank 1 tells of peak, and another rank of parameters"),
        ({}, "give a run, or runs by name"),
    ],
)
def test_memory_that_is_none_is_refused(told: Any, message: str) -> None:
    """Each error names the rank."""
    with pytest.raises(ValueError, match=message):
        plots.memory(told)


# Metrics ----------------------------------------------------------------------------------------------


def test_metrics_has_a_panel_for_each_name() -> None:
    """In the order asked for; without names, all that were logged, by name."""
    logged = [ev.Metric(rank, 0.1, 0, name, 1.0) for rank in (0, 1) for name in ("lr", "loss", "accuracy")]
    run = run_of(*logged)
    picture: Any = plots.metrics(run, "loss", "accuracy")
    assert [ax.get_ylabel() for ax in picture.figure.axes] == ["loss", "accuracy"]
    assert repr(picture) == "loss of 2 ranks over 1 step\naccuracy of 2 ranks over 1 step"
    every: Any = plots.metrics(run)
    assert [ax.get_ylabel() for ax in every.figure.axes if ax.axison] == ["accuracy", "loss", "lr"]
    assert rows(every)[0] == ("accuracy", 0, 1, 1.0, 1.0)


def test_a_run_without_metrics_is_told_how_to_log() -> None:
    """The picture has the call, whatever was asked for."""
    for names in ((), ("loss",)):
        assert repr(plots.metrics(run_of(), *names)) == "no rank logged anything; in the function, call log(loss=loss)"
