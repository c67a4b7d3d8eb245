"""The lesson on collectives: its script under torchrun, its pictures as numbers, and what its text claims besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lesson import Lesson, torchrun

from ddplab import Run, launch


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The functions of the notebook."""
    lesson = Lesson(cells, "02_collectives")
    lesson.define_all()
    lesson.define("sent_bytes = 0\n\ndef pass_on")
    return lesson


def play(lesson: Lesson, name: str, world_size: int) -> list[list[int]]:
    """What each rank holds after the function of that name."""
    fn = lesson.define(f"def {name}(")[name]
    return [value["after"].tolist() for value in quiet(fn, world_size=world_size).results]


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A run over Gloo that may fail."""
    return launch(fn, *args, backend="gloo", view="quiet", allow_failure=True, **options)


@pytest.fixture
def numbers() -> Callable[..., torch.Tensor]:
    """Those of the lesson, made by a function that ranks need not import this file for."""

    def made(count: int = 3) -> torch.Tensor:
        x: torch.Tensor = torch.arange(1, count + 1) * 10 ** dist.get_rank()
        return x

    return made


# Under torchrun ---------------------------------------------------------------------------------------


def test_the_script_of_the_lesson_runs_under_torchrun(lesson: Lesson, tmp_path: Path) -> None:
    """The ring of the notebook, as it stands there, adds up in a script, too, and sends 2(N - 1)/N of the tensor."""
    (file := tmp_path / "ring.py").write_text(lesson.script())
    said = ["rank 0 of 3 has [111, 222, 333, 444, 555, 666] and sent 64 bytes for 48"]
    assert torchrun(file, world_size=3) == said


# The pictures -----------------------------------------------------------------------------------------

SUMS = [111, 222, 333]


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("send_recv", [[1, 2, 3], [10, 20, 30], [1, 2, 3]]),
        ("broadcast", [[10, 20, 30]] * 3),
        ("scatter", [[1], [2], [3]]),
        ("gather", [[1, 10, 100], [], []]),
        ("reduce", [SUMS, [110, 220, 333], [100, 200, 303]]),
        ("all_gather", [[1, 10, 100]] * 3),
        ("all_reduce", [SUMS] * 3),
        ("reduce_scatter", [[111], [222], [333]]),
        ("all_to_all", [[1, 10, 100], [2, 20, 200], [3, 30, 300]]),
        ("odd_ones", [[1, 2, 3], [1010, 2020, 3030], [100, 200, 300], [1010, 2020, 3030]]),
        ("swap_at_once", [[10, 20, 30], [1, 2, 3]]),
        ("first_column", [[11, 22, 33, 4, 5, 6], [11, 22, 33, 40, 50, 60]]),
        ("first_column_copied", [[11, 2, 33, 4, 55, 6], [11, 20, 33, 40, 55, 60]]),
    ],
)
def test_a_picture_shows_what_its_text_says(lesson: Lesson, name: str, after: list[list[int]]) -> None:
    """The numbers behind it; nbval compares no pictures. If first_column is right one day, the lesson must say so."""
    assert play(lesson, name, len(after)) == after


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ring_has_two_steps_less_than_twice_the_world_size(lesson: Lesson, world_size: int) -> None:
    """It starts with a rank's own numbers and ends with the sums; half way each rank has one complete chunk."""
    ring = lesson.define("def steps()")["steps"]
    sums = [int(str(digit) * world_size) for digit in range(1, world_size + 1)]
    for rank, states in enumerate(quiet(ring, world_size=world_size).results):
        found = [state["chunks"].tolist() for state in states]
        assert len(found) == 2 * world_size - 1
        assert found[0] == [digit * 10**rank for digit in range(1, world_size + 1)]
        assert found[world_size - 1][(rank + 1) % world_size] == sums[(rank + 1) % world_size]
        assert found[-1] == sums


# What the text claims ---------------------------------------------------------------------------------


def test_a_gather_list_is_for_dst_only(numbers: Callable[..., torch.Tensor]) -> None:
    """Another rank that gives one gets a ValueError."""

    def gather() -> None:
        dist.gather(numbers(1), [numbers(1) for _ in range(2)], dst=0)

    (failure,) = [failure for failure in quiet(gather).failures if failure.role == "root"]
    assert (failure.rank, failure.type) == (1, "ValueError")


@pytest.mark.parametrize(
    ("room", "found"),
    [(torch.zeros(3, dtype=torch.float64), [0, 0, 0]), (torch.zeros(5, dtype=torch.int64), [1, 2, 3, 0, 0])],
    ids=["another dtype", "longer"],
)
def test_recv_takes_bytes_as_they_come(
    numbers: Callable[..., torch.Tensor], room: torch.Tensor, found: list[int]
) -> None:
    """Into another dtype they make other numbers, and of a longer tensor they fill the start; no error is raised."""

    def hand_over(room: torch.Tensor) -> list[int]:
        if dist.get_rank() == 0:
            dist.send(numbers(), dst=1)
        else:
            dist.recv(room, src=0)
        return room.round().long().tolist()

    assert quiet(hand_over, room).results[1] == found


def test_new_group_waits_for_those_who_are_not_in_it() -> None:
    """Where only its members call it, they wait."""

    def members_only() -> None:
        if dist.get_rank() != 0:
            dist.new_group([1, 2])

    run = quiet(members_only, world_size=3, timeout_s=1)
    assert {failure.type for failure in run.failures} == {"Timeout"}
    assert "ranks 1, 2 wait in new_group" in run.report()


def test_group_src_is_a_rank_of_the_group(numbers: Callable[..., torch.Tensor]) -> None:
    """Number 1 of the group of ranks 1 and 2 is rank 2."""

    def within() -> int:
        x = numbers(1)
        group: Any = dist.new_group([1, 2])
        if dist.get_rank() > 0:
            dist.broadcast(x, group_src=1, group=group)
        return int(x)

    assert quiet(within, world_size=3).results == [1, 100, 100]


def test_avg_of_whole_numbers_fails_when_they_have_been_added_up(numbers: Callable[..., torch.Tensor]) -> None:
    """Gloo's mean is the sum, divided; the sum is left in the tensor."""

    def average() -> int:
        x = numbers(1)
        try:
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
        except RuntimeError:
            return int(x)
        return 0

    assert quiet(average, world_size=3).results == [111] * 3


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="new in torch 2.13")
def test_calls_with_lists_have_siblings_for_one_tensor(numbers: Callable[..., torch.Tensor]) -> None:
    """all_gather_single, reduce_scatter_single and all_to_all_single."""

    def single() -> list[list[int]]:
        x, one = numbers(), numbers(1)
        gathered, mine, mail = torch.zeros_like(x), torch.zeros_like(one), torch.zeros_like(x)
        dist.all_gather_single(gathered, one)
        dist.reduce_scatter_single(mine, x)
        dist.all_to_all_single(mail, x)
        return [gathered.tolist(), mine.tolist(), mail.tolist()]

    assert quiet(single, world_size=3).results[1] == [[1, 10, 100], [222], [2, 20, 200]]


# What if ----------------------------------------------------------------------------------------------


def test_a_slice_in_one_piece_is_added_up_in_place(numbers: Callable[..., torch.Tensor]) -> None:
    """all_reduce(x[1:]) changes x, but not its first element."""

    def part() -> list[int]:
        x = numbers()
        dist.all_reduce(x[1:])
        return x.tolist()

    assert quiet(part).results == [[1, 22, 33], [10, 22, 33]]


def test_where_every_rank_is_the_source_of_a_broadcast_all_wait() -> None:
    """Nobody takes what the others send."""
    run = quiet(lambda: dist.broadcast(torch.ones(3), src=dist.get_rank()), world_size=3, timeout_s=1)
    assert "ranks 0, 1, 2 wait in broadcast #1" in run.report()


def test_reduce_to_another_rank_leaves_parts_on_the_others(numbers: Callable[..., torch.Tensor]) -> None:
    """The sums are on dst; what the others hold is neither theirs nor the sums."""

    def to_the_last() -> list[int]:
        x = numbers()
        dist.reduce(x, dst=2)
        return x.tolist()

    first, second, last = quiet(to_the_last, world_size=3).results
    assert last == SUMS
    assert first not in ([1, 2, 3], SUMS)
    assert second not in ([10, 20, 30], SUMS)


def test_letters_that_are_sent_back_arrive(numbers: Callable[..., torch.Tensor]) -> None:
    """Two times all_to_all is no change."""

    def there_and_back() -> list[int]:
        letters = list(numbers().split(1))
        mail = [torch.zeros_like(letters[0]) for _ in letters]
        dist.all_to_all(mail, letters)
        dist.all_to_all(letters, mail)
        return torch.cat(letters).tolist()

    assert quiet(there_and_back, world_size=3).results == [[1, 2, 3], [10, 20, 30], [100, 200, 300]]


def test_a_ring_with_an_empty_chunk_is_right(lesson: Lesson, numbers: Callable[..., torch.Tensor]) -> None:
    """Two numbers on three ranks."""
    ring = lesson.define("def ring_all_reduce")["ring_all_reduce"]
    assert quiet(lambda: ring(numbers(2))[-1].tolist(), world_size=3).results == [[111, 222]] * 3
