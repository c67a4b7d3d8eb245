"""The map of a sampler: who gets what, what is met again, and what is never met."""

import time
from typing import Any

import pytest
from matplotlib.figure import Figure
from recorded import run_of
from torch.utils.data import DistributedSampler

from ddplab import events as ev
from ddplab import plots
from ddplab.plots.shares import dropped, held, repeated, shares, stacked


def lines(picture: Any) -> list[str]:
    """The words of a picture, a line for each epoch."""
    return [line for line in repr(picture).splitlines() if line.startswith("epoch")]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("num_samples", "world_size"), [(10, 3), (9, 3), (1, 1), (2, 5), (21, 4)])
def test_the_map_is_what_the_samplers_give(num_samples: int, world_size: int, shuffle: bool, drop_last: bool) -> None:
    """Each row is the list of torch's own sampler of that rank, in each epoch."""
    told = shares(num_samples, world_size, epochs=2, shuffle=shuffle, drop_last=drop_last, seed=3)
    for epoch in range(2):
        for rank in range(world_size):
            data: Any = range(num_samples)
            one: Any = DistributedSampler(data, world_size, rank, shuffle=shuffle, drop_last=drop_last, seed=3)
            one.set_epoch(epoch)
            assert told[epoch, rank].tolist() == list(one)


def test_ten_samples_on_three_ranks() -> None:
    """Twelve places for ten samples: 0 and 1 are met again at the last step."""
    told = shares(10, 3, shuffle=False)
    assert told.tolist() == [[[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]]
    assert repeated(told[0]).tolist() == [[False] * 4, [False] * 3 + [True], [False] * 3 + [True]]
    assert dropped(told[0], 10) == []


def test_drop_last_leaves_samples_out() -> None:
    """Nine places for ten samples."""
    told = shares(10, 3, shuffle=False, drop_last=True)
    assert dropped(told[0], 10) == [9] and not repeated(told[0]).any()


def test_without_set_epoch_the_order_never_changes() -> None:
    """Epoch 1 is epoch 0 again; with set_epoch it is another."""
    same, other = shares(10, 2, epochs=2, set_epoch=False), shares(10, 2, epochs=2)
    assert same[0].tolist() == same[1].tolist() == other[0].tolist() != other[1].tolist()


def test_repeats_are_found_in_the_order_of_time() -> None:
    """Rank 1 meets sample 5 at its first place, so rank 0 meets it again at its second."""
    assert repeated(stacked([[[1, 5], [5]]])[0]).tolist() == [[False, True], [False, False]]


def test_ranks_with_fewer_samples_have_empty_places() -> None:
    """They are neither repeated nor held."""
    told = stacked([[[0, 1, 2], [3]]])
    assert told.tolist() == [[[0, 1, 2], [3, -1, -1]]]
    assert not repeated(told[0]).any() and held(told[0, 1]) == [3]


def test_the_words_list_what_is_met_again_and_what_never() -> None:
    """In every epoch, so that they can be read aloud."""
    assert lines(plots.sampler(10, 3, shuffle=False)) == ["epoch 0: met again 0, 1; never met none"]
    never = [lines(plots.sampler(10, 3, shuffle=False, drop_last=True, epochs=2))]
    assert never == [["epoch 0: met again none; never met 9", "epoch 1: met again none; never met 9"]]


def test_a_sampler_of_ones_own_is_asked_for_every_rank() -> None:
    """Given the sampler of rank 1 the map has all ranks, and the sampler is as it was."""
    data: Any = range(5)
    mine: Any = DistributedSampler(data, 2, 1, shuffle=False)
    picture: Any = plots.sampler(mine)
    assert [row["samples"] for row in picture.rows] == ["0, 2, 4", "1, 3, 0"]
    assert mine.rank == 1 and mine.epoch == 0


def test_a_run_gives_the_map_of_what_really_happened() -> None:
    """Ranks return their indices, or a list of them for each epoch."""
    one = run_of(ev.Result(0, 1.0, [0, 2]), ev.Result(1, 1.0, [1, 0]))
    assert lines(plots.sampler(one)) == ["epoch 0: met again 0; never met none"]
    two = run_of(ev.Result(0, 1.0, [[0], [1]]), ev.Result(1, 1.0, [[1], [0]]))
    picture: Any = plots.sampler(two)
    assert [(row["epoch"], row["rank"], row["samples"]) for row in picture.rows] == [
        (0, 0, "0"), (0, 1, "1"), (1, 0, "1"), (1, 1, "0"),
    ]  # fmt: skip


def test_a_rank_that_returned_nothing_has_an_empty_row() -> None:
    """The others keep their places."""
    picture: Any = plots.sampler(run_of(ev.Result(1, 1.0, [1, 3]), world_size=3))
    assert [row["samples"] for row in picture.rows] == ["none", "1, 3", "none"]
    by_epoch: Any = plots.sampler(run_of(ev.Result(1, 1.0, [[1], [3]]), world_size=2))
    assert [row["samples"] for row in by_epoch.rows] == ["none", "1", "none", "3"]


def test_repeated_samples_are_hatched() -> None:
    """And no others."""
    ax = Figure().add_subplot()
    plots.sampler(5, 2, shuffle=False, ax=ax)
    assert [bool(cell.get_hatch()) for cell in ax.patches] == [False] * 5 + [True]
    assert [text.get_text() for text in ax.texts] == ["0", "2", "4", "1", "3", "0"]


def test_batches_are_the_steps() -> None:
    """With three samples a rank and step, six places are two steps, named in their middles."""
    ax = Figure().add_subplot()
    plots.sampler(12, 2, per_rank_batch_size=3, ax=ax)
    assert ax.get_xlabel() == "step (3 samples a rank)"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1"]
    assert list(ax.get_xticks()) == [1.5, 4.5]


def test_fewer_samples_than_ranks_and_all_dropped() -> None:
    """A map without a step is drawn, and says that nothing was met."""
    picture: Any = plots.sampler(2, 3, drop_last=True)
    assert lines(picture) == ["epoch 0: met again none; never met 0, 1"] and picture._repr_mimebundle_()


def test_a_million_samples_take_seconds_not_minutes() -> None:
    """1.3 s were measured on 2 cores; the limit allows for a busy machine."""
    begin_s = time.perf_counter()
    picture: Any = plots.sampler(1_000_000, 4)
    picture._repr_mimebundle_()
    assert time.perf_counter() - begin_s < 8
    assert repr(picture).splitlines()[0] == "1,000,000 samples on 4 ranks"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plots.sampler(0, 2), ValueError, r"sampler\(0, 2\): give how many samples and ranks, both 1 or more"),
        (lambda: plots.sampler(10), ValueError, r"sampler\(10, None\): give how many samples and ranks"),
        (lambda: plots.sampler(10, 2, epochs=0), ValueError, r"sampler\(epochs=0\): give a whole number of 1 or more"),
        (lambda: plots.sampler(10, 2, per_rank_batch_size=1.5), ValueError, "per_rank_batch_size=1.5"),
        (lambda: plots.sampler([[], []]), ValueError, "these ranks have no indices"),
        (lambda: plots.sampler([]), ValueError, "no rank returned a value"),
        (lambda: plots.sampler("10"), TypeError, "give a number, a DistributedSampler, lists of indices, or a run"),
        (lambda: plots.sampler([1, 2]), TypeError, "rank 0 has 1, and no list of indices"),
        (lambda: plots.sampler([["a"]]), TypeError, "rank 0 has .*, and no list of indices"),
    ],
)
def test_bad_input_gets_a_clear_error(call: Any, error: type[Exception], message: str) -> None:
    """Each says what was given and what is wanted."""
    with pytest.raises(error, match=message):
        call()
