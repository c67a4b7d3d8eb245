"""The lesson on measuring: its script under torchrun, its What-ifs, and what its text claims without a cell that shows it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from lesson import Lesson, torchrun

from ddplab import launch


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The notebook, with all that it imports."""
    found = Lesson(cells, "10_measuring")
    found.define("import statistics")
    return found


def results(fn: Any, *args: Any, world_size: int = 2) -> list[Any]:
    """What each rank returns."""
    return launch(fn, *args, world_size=world_size, backend="gloo", view="quiet").results


# Under torchrun ---------------------------------------------------------------------------------------


def test_the_script_gives_a_table_of_both_bandwidths(lesson: Lesson, tmp_path: Path) -> None:
    """Rank 0 alone prints; the bus bandwidth is 2(N-1)/N times the algorithm bandwidth, which is bytes by median."""
    for part in ("setup", "measuring"):
        lesson.script(part)
    file = tmp_path / "bandwidth.py"
    file.write_text(lesson.define("table = ")["script"])
    rows = [{name: float(text) for name, text in row.items()} for row in csv.DictReader(torchrun(file, world_size=3))]
    assert [(row["bytes"], row["repeats"]) for row in rows] == [(2**10, 10), (2**16, 10), (2**22, 10)]
    for row in rows:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["algorithm_gb_per_s"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)
        assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"] * 4 / 3)


# What if ----------------------------------------------------------------------------------------------


def test_the_rank_that_is_in_time_measures_the_other(lesson: Lesson) -> None:
    """With rank 0 late by 20 ms, the clock of rank 1 shows at least half of them in most calls."""
    late = lesson.define("def late", ("get_rank() == 1", "get_rank() == 0"))["late"]
    _, in_time = results(late, False)
    assert sorted(in_time)[len(in_time) // 2] > 0.01


def test_all_ranks_sleep_and_all_load_equally_long(lesson: Lesson) -> None:
    """Each rank spends the 32 sleeps of 10 ms in data; only rank 2 does in the notebook."""
    train = lesson.define("class Samples", ("0.01 if dist.get_rank() == 2 else 0", "0.01"))["train"]
    run = launch(train, world_size=2, backend="gloo", trace=True, view="quiet")
    for rank in range(2):
        data = [row for row in run.timeline if row.rank == rank and row.kind == "data"]
        assert sum(row.end_s - row.begin_s for row in data) > 32 * 0.01


def test_without_repeat_a_second_round_overwrites_the_first(lesson: Lesson, tmp_path: Path) -> None:
    """A step that never came is all that is left of the ten."""
    profiled = lesson.define("from torch.profiler", (", repeat=1", ""))["profiled"]
    results(profiled, tmp_path)
    for rank in range(2):
        events = json.loads((tmp_path / f"own{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert names == {"ProfilerStep#10"}


def test_with_plain_sgd_there_is_no_state_to_shard(lesson: Lesson) -> None:
    """ZeRO-1 then keeps what DDP keeps."""
    sgd = [("return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)",
            "return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)"),
           ("return model, torch.optim.Adam(", "return model, torch.optim.SGD(")]  # fmt: skip
    lesson.define("from torch.distributed.device_mesh", *sgd)
    kept = lesson.define("def kept")["kept"]
    for how in ("DDP", "ZeRO-1"):
        for row in results(kept, how):
            assert (row["parameters"], row["gradients"], row["optimizer state"]) == (8 * 2**20, 8 * 2**20, 0)


def test_three_ranks_do_not_get_equal_shares(lesson: Lesson) -> None:
    """FSDP2 cuts 512 rows into 171, 171 and 170; ZeRO-1 deals eight tensors, three at most to a rank."""
    lesson.define("from torch.distributed.device_mesh")
    kept = lesson.define("def kept")["kept"]
    row_bytes, step_bytes = 8 * 512 * 4, 4
    fsdp2 = results(kept, "FSDP2", world_size=3)
    assert [row["parameters"] // row_bytes for row in fsdp2] == [171, 171, 170]
    zero1 = results(kept, "ZeRO-1", world_size=3)
    tensor_bytes = 2 * 512 * 512 * 4 + step_bytes
    assert [row["optimizer state"] / tensor_bytes for row in zero1] == [3, 3, 2]


def test_halving_and_doubling_is_never_slower_than_the_ring(lesson: Lesson) -> None:
    """In the model, for any number of ranks: as many bytes, and never more start-ups."""
    old = "2 * (n - 1).bit_length() * (alpha_s + beta * num_bytes)"
    new = "2 * (n - 1).bit_length() * alpha_s + 2 * (n - 1) / n * num_bytes * beta"
    lesson.define("def messages")
    found = lesson.define("ASSUMED = ", (old, new))
    for numbers in found["ASSUMED"].values():
        for n in range(2, 4097):
            for num_bytes in (1e6, 1e9):
                assert found["tree"](n, num_bytes, *numbers) <= found["ring"](n, num_bytes, *numbers) * (1 + 1e-12)


# What the text claims ---------------------------------------------------------------------------------


def test_the_ranks_profile_themselves_without_launch_tracing(lesson: Lesson, tmp_path: Path) -> None:
    """The ready-made handler that the text names puts the rank into the file's name."""
    from torch.profiler import tensorboard_trace_handler

    def profiled() -> None:
        import torch
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        handler = tensorboard_trace_handler(str(tmp_path), worker_name=f"rank{dist.get_rank()}")
        with profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler):
            torch.ones(3).sum()

    results(profiled)
    assert sorted(file.name.partition(".")[0] for file in tmp_path.iterdir()) == ["rank0", "rank1"]
