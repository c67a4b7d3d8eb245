"""The lesson on samplers: its script under torchrun, its What-ifs, and what its text claims without a cell that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lesson import Lesson, torchrun
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from ddplab import launch


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The functions and classes of the notebook, whose imports have run."""
    lesson = Lesson(cells, "05_samplers")
    lesson.define("import itertools")
    return lesson


def results(fn: Any, *args: Any, world_size: int = 2) -> list[Any]:
    """What each rank returns."""
    return launch(fn, *args, world_size=world_size, backend="gloo", view="quiet").results


# Under torchrun ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_script_of_the_lesson_counts_each_image_once(lesson: Lesson, tmp_path: Path, world_size: int) -> None:
    """However many ranks there are, it prints what the notebook shows; 2 and 4 do not divide 21."""
    (file := tmp_path / "evaluate.py").write_text(lesson.script())
    assert torchrun(file, world_size=world_size) == ["7 of 21 are right"]


# The pictures, of which nbval compares nothing ---------------------------------------------------------


def test_without_set_epoch_the_order_never_changes(lesson: Lesson) -> None:
    """The three epochs are equal on each rank; with it, all differ, and the first is the same as without."""
    epochs = lesson.define("def epochs")["epochs"]
    without, told = results(epochs, False), results(epochs, True)
    for same, new in zip(without, told, strict=True):
        assert same[0] == same[1] == same[2] == new[0]
        assert len({tuple(order) for order in new}) == 3


def test_without_a_sampler_all_ranks_see_all_in_the_same_order(lesson: Lesson) -> None:
    """For launch gives them the same seed."""
    first, second = results(lesson.define("def forgotten")["forgotten"])
    assert first == second
    assert sorted(first) == list(range(8))


def test_without_set_epoch_it_is_always_the_same_sample(lesson: Lesson) -> None:
    """That comes twice, or never; with it each has its turn."""
    times_seen = lesson.define("def times_seen")["times_seen"]
    assert sorted(times_seen(False, False)) == [30] * 8 + [60] * 2
    assert sorted(times_seen(True, False)) == [0] + [30] * 9
    assert min(times_seen(False, True)) > 30
    assert 20 < min(times_seen(True, True)) <= max(times_seen(True, True)) < 30


def test_each_worker_reads_the_whole_stream(lesson: Lesson) -> None:
    """Two of each rank."""
    namespace = lesson.define("class Stream")
    assert [sorted(rank) for rank in results(namespace["read"], namespace["Stream"])] == [sorted([*range(8)] * 2)] * 2


# What if ----------------------------------------------------------------------------------------------


def test_a_tiny_data_set_is_met_again_and_again(lesson: Lesson) -> None:
    """Two samples on five ranks: 0 comes three times, 1 twice."""
    yours = lesson.define("def yours", ("range(10)", "range(2)"))["yours"]
    assert results(yours, world_size=5) == [[0], [1], [0], [1], [0]]


def test_drop_last_may_leave_nothing(lesson: Lesson) -> None:
    """With fewer samples than ranks, all have none, and no error says so."""
    changes = ("range(10)", "range(2)"), ("shuffle=False", "drop_last=True"), ("list(sampler)", "len(sampler)")
    assert results(lesson.define("def yours", *changes)["yours"], world_size=5) == [0] * 5


def test_set_epoch_after_the_loop_is_an_epoch_late(lesson: Lesson) -> None:
    """Epoch 1 has the order of epoch 0, and epoch 2 that of epoch 1."""
    in_time = results(lesson.define("def epochs")["epochs"], True)
    call, loop = "        if call_set_epoch:\n            sampler.set_epoch(epoch)\n", "    return met"
    late = results(lesson.define("def epochs", (call, ""), (loop, call + loop))["epochs"], True)
    assert late == [[first, first, second] for first, second, _ in in_time]
    assert in_time[0][0] != in_time[0][1]


def test_drop_last_of_the_loader_drops_on_every_rank(lesson: Lesson) -> None:
    """Of six samples in batches of four, two."""
    epochs = lesson.define("def epochs", (" batch_size=2", " batch_size=4, drop_last=True"))["epochs"]
    assert [[len(met) for met in rank] for rank in results(epochs, True)] == [[4, 4, 4]] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_numpy_is_seeded_in_workers_only(lesson: Lesson, num_workers: int) -> None:
    """Where workers load, seed + rank for torch is enough; where the rank itself does, NumPy draws the same."""
    draw = "import numpy\n        return int(numpy.random.randint(-30, 31))"
    changes = ("return torch.randint(-30, 31, ())", draw), ("num_workers=2", f"num_workers={num_workers}")
    first, second = results(lesson.define("class Turned", *changes)["angles"], True)
    assert (first == second) == (num_workers == 0)


def test_a_stream_shared_by_rank_alone_comes_once_from_each_worker(lesson: Lesson) -> None:
    """Both workers of a rank read the share of the rank."""
    old = "share, None, num_workers * self.world_size"
    namespace = lesson.define("class SharedStream", (old, "self.rank, None, self.world_size"))
    read = lesson.define("class Stream")["read"]
    told = results(read, namespace["SharedStream"])
    assert [sorted(rank) for rank in told] == [[0, 0, 2, 2, 4, 4, 6, 6], [1, 1, 3, 3, 5, 5, 7, 7]]


# What the text claims ---------------------------------------------------------------------------------


def test_workers_count_up_from_a_seed_that_the_rank_draws() -> None:
    """Worker i has base + i; ranks with one seed have one base, and ranks with seed + rank have others."""

    def seeds(by_rank: bool) -> list[int]:
        class Seeds(Dataset[int]):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> int:
                info = get_worker_info()
                assert info
                return info.seed

        if by_rank:
            torch.manual_seed(1000 + dist.get_rank())
        return list(DataLoader(Seeds(), batch_size=None, num_workers=2))

    (first, second), other = results(seeds, False)
    assert second == first + 1
    assert other == [first, second]
    (first, _), (other_first, _) = results(seeds, True)
    assert abs(first - other_first) > 2


@pytest.mark.parametrize(("context", "is_member"), [("fork", True), ("spawn", False)])
def test_a_spawned_worker_belongs_to_no_process_group(context: str, is_member: bool) -> None:
    """So a stream asks for its rank where it is made."""

    def members() -> list[bool]:
        class Members(Dataset[bool]):
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int) -> bool:
                return dist.is_initialized()

        return list(DataLoader(Members(), batch_size=None, num_workers=1, multiprocessing_context=context))

    assert results(members, world_size=1) == [[is_member]]


def test_a_stream_takes_no_sampler() -> None:
    """DataLoader says so."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(ValueError, match="expected unspecified sampler option"):
        DataLoader(Stream(), sampler=DistributedSampler(range(4), 2, 0))  # type: ignore[arg-type]


def test_a_shared_stream_gives_each_record_once_also_without_workers(lesson: Lesson) -> None:
    """Then there is no worker to ask."""
    stream = lesson.define("class SharedStream")["SharedStream"]
    read = lesson.define("class Stream", ("num_workers=2", "num_workers=0"))["read"]
    assert results(read, stream) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_weighted_sampler_deals_out_one_list(lesson: Lesson, world_size: int) -> None:
    """The ranks get equally many, and together what one rank draws; another list in another epoch."""
    weighted = lesson.define("class DistributedWeightedSampler")["DistributedWeightedSampler"]

    def draw() -> list[list[int]]:
        sampler = weighted(torch.ones(100), 20)
        found = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
            assert len(found[-1]) == len(sampler) == 20 // dist.get_world_size()
        return found

    (whole,), dealt = results(draw, world_size=1), results(draw, world_size=world_size)
    for epoch in range(2):
        met = [index for step in zip(*(rank[epoch] for rank in dealt), strict=True) for index in step]
        assert met == whole[epoch][: len(met)]
    assert whole[0] != whole[1]


def test_no_accuracy_is_wrong_by_more_than_the_share_of_padding() -> None:
    """For all that may be right of 10 images, and up to 16 ranks."""
    for world_size in range(1, 17):
        dealt = [
            index for rank in range(world_size) for index in DistributedSampler(range(10), world_size, rank, False)
        ]
        for bits in range(1 << 10):
            right = [bits >> index & 1 for index in range(10)]
            error = abs(sum(right[index] for index in dealt) / len(dealt) - sum(right) / 10)
            assert error <= (len(dealt) - 10) / len(dealt) + 1e-9
