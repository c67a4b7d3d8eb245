"""The lesson on the inside of DDP: its script under torchrun, and what its text claims besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lesson import Lesson, torchrun

from ddplab import Run, launch


def run_of(cells: Any, name: str, *args: Any, **options: Any) -> Run:
    """The function of that name on ranks, over Gloo; it may fail."""
    return quiet(cells.namespace[name], *args, **options)


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A run over Gloo that may fail."""
    return launch(fn, *args, backend="gloo", view="quiet", allow_failure=True, **options)


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The functions of the notebook."""
    lesson = Lesson(cells, "04_ddp_under_the_hood")
    lesson.define_all()
    return lesson


# Under torchrun ---------------------------------------------------------------------------------------


def test_the_script_on_accumulation_runs_under_torchrun(lesson: Lesson, tmp_path: Path) -> None:
    """Four micro-batches, one all-reduce, the mean over ranks."""
    (file := tmp_path / "accumulate.py").write_text(lesson.script())
    assert torchrun(file, world_size=3) == ["1 all-reduce of 4 bytes; the gradient is 1.0"]


# What the text claims ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buckets_do_not_depend_on_the_world_size(cells: Any, lesson: Lesson, world_size: int) -> None:
    """All gradients in one bucket, then two buckets."""
    steps = run_of(cells, "three_steps", None, world_size=world_size).results
    assert steps == [[[1597480], [1071144, 526336], [1071144, 526336]]] * world_size


def test_without_the_debug_level_the_error_has_indices_only(cells: Any, lesson: Lesson) -> None:
    """With INFO the notebook shows names."""
    text = run_of(cells, "two_steps").results[1][1]
    assert "Parameter indices which did not receive grad for rank 1: 0 1" in text
    assert "body.weight" not in text


@pytest.mark.skipif(torch.__version__ < "2.14", reason="renamed in torch 2.14")
def test_broadcast_buffers_has_another_name_and_warns(cells: Any, lesson: Lesson) -> None:
    """forward_sync_buffers=False does the same, without a warning."""
    old = run_of(cells, "normalise", {"broadcast_buffers": False})
    new = run_of(cells, "normalise", {"forward_sync_buffers": False})
    assert [mean for _, mean in old.results] == [mean for _, mean in new.results] == [0.0, 3.8]
    assert "Use `forward_sync_buffers` instead" in old.output()
    assert "forward_sync_buffers" not in new.output()


def test_a_detach_less_and_the_body_learns(cells: Any, lesson: Lesson) -> None:
    """The cure, without any flag."""
    lesson.define("class Net", (".detach()  # left over from an experiment", ""))
    assert "body.weight" in run_of(cells, "train", {}).results[0]["moved"]


def test_clipping_before_averaging_gives_another_direction(cells: Any, lesson: Lesson) -> None:
    """(1, 0) and (0, 1) have the mean (0.5, 0.5), which is not along (1.5, 2)."""
    lesson.define("def clip", ("own = model", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    own = model"))
    assert [value["own"] for value in run_of(cells, "clip").results] == pytest.approx([1.0, 1.0])


def test_a_second_collective_of_a_hook_runs_in_another_thread(lesson: Lesson, cells: Any) -> None:
    """That is why PowerSGD and several buckets do not go together on Gloo."""
    cells.run("""
    import threading

    def where():
        threads, model = [], DDP(mlp())
        def hook(threads, bucket):
            def after(done):
                threads.append(threading.get_native_id())
                return done.value()[0]
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(after)
        model.register_comm_hook(threads, hook)
        for _ in range(5):
            model(torch.randn(4, 256)).sum().backward()
        return set(threads) == {threading.get_native_id()}
    """)
    assert run_of(cells, "where").results == [False, False]


# What if ----------------------------------------------------------------------------------------------


def test_with_find_unused_parameters_buckets_are_cut_before_the_first_step(cells: Any, lesson: Lesson) -> None:
    """They are never cut again."""
    lesson.define("def yours", ("bucket_cap_mb=0.01", "bucket_cap_mb=0.01, find_unused_parameters=True"))
    buckets = [40, 22528, 1050624, 524288]
    run = run_of(cells, "yours")
    assert run.results[0] == [*buckets, "end of step 1", *buckets, "end of step 2"]
    assert "did not find any unused parameters" in run.output()


def test_a_hook_that_does_not_divide_gives_sums(cells: Any, lesson: Lesson) -> None:
    """The division is the hook's work."""
    lesson.define("def recording", (".div_(dist.get_world_size())", ""))
    assert [value["gradient"] for value in run_of(cells, "accumulate", True).results] == [1.0, 1.0]


def test_a_hook_needs_an_argument_named_bucket(cells: Any, lesson: Lesson) -> None:
    """DDP looks for it by name."""
    lesson.define("def recording", ("(seen, bucket):\n    mean = bucket.", "(seen, b):\n    mean = b."))
    failure = run_of(cells, "accumulate", True, world_size=1).failures[0]
    assert (failure.type, failure.message) == ("KeyError", "'bucket'")


def test_no_sync_around_forward_alone_is_enough(cells: Any, lesson: Lesson) -> None:
    """forward() decides whether the next backward() will synchronise."""
    old = "loss = model(x).sum() / 4\n        with model.no_sync():\n            loss.backward()"
    new = "with model.no_sync():\n            loss = model(x).sum() / 4\n        loss.backward()"
    lesson.define("def around_backward_only", (old, new))
    assert run_of(cells, "around_backward_only").results == [{"all-reduces": 1, "gradient": 0.5}] * 2


def test_no_sync_around_the_last_micro_batch_leaves_gradients_apart(cells: Any, lesson: Lesson) -> None:
    """Without an error."""
    last = "    (model(x).sum() / 4).backward()  # the last one synchronises"
    lesson.define("def accumulate", (last, "    with model.no_sync():\n    " + last))
    assert [tuple(value.values()) for value in run_of(cells, "accumulate", True).results] == [(0, 0.0), (0, 1.0)]


def test_a_static_graph_must_not_change(cells: Any, lesson: Lesson) -> None:
    """What was unused in step 1 must not be used in step 2."""
    once = "model(torch.ones(1, 1), dist.get_rank()).sum().backward()"
    twice = "[model(torch.ones(1, 1), which).sum().backward() for which in (0, 1)]"
    lesson.define("class Experts", ("find_unused_parameters", "static_graph"), (once, twice))
    failure = run_of(cells, "experts", world_size=1).failures[0]
    assert failure.type == "RuntimeError"
    assert failure.message.startswith("Your training graph has changed in this iteration")
