"""The lesson on other ways: its two traps, what they are due to, and the bytes that DeepSpeed's stages keep."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddplab import launch

LESSONS = Path(__file__).resolve().parents[1] / "ranks" / "lessons"
sys.path.insert(0, str(LESSONS))
from lesson import Lesson  # noqa: E402

spec = importlib.util.spec_from_file_location("conftest_of_ranks", LESSONS.parent / "conftest.py")
assert spec is not None and spec.loader is not None
spec.loader.exec_module(of_ranks := importlib.util.module_from_spec(spec))
cells = of_ranks.cells

Need = Callable[[str], None]
COPY = 4 * (12 * 16384 + 1)  # bytes of the large model


@pytest.fixture
def lesson(cells: Any) -> Lesson:
    """The notebook, of which all functions are defined, and DeepSpeed's settings."""
    found = Lesson(cells, "12_other_ways")
    found.define_all()
    cells.run(found.source("our_sgd = ").splitlines()[0])
    return found


def told(fn: Any, *args: Any) -> list[Any]:
    """What each of two ranks tells."""
    env = {"DS_ACCELERATOR": "cpu"}
    return launch(fn, *args, backend="gloo", threads=1, view="quiet", env=env, timeout_s=180).results


def far(lesson: Lesson, fn: Any) -> Any:
    """How far the ranks, which must agree to the last bit, are from one process after each step."""
    found = lesson.define("def make_model")
    model = found["make_model"]()
    one = np.array(found["train"](model, found["sgd"](model), share=(0, 1))["weights"])
    first, second = (np.array(rank["weights"]) for rank in told(fn))
    assert np.array_equal(first, second)
    return abs(first - one).max(axis=1)


def test_deepspeed_clips_unless_told_not_to(lesson: Lesson, need: Need) -> None:
    """From the first step on; as far as DDP with the clipping that its default names."""
    need("deepspeed")
    found = lesson.define("def make_model")
    as_it_comes = far(lesson, partial(found["with_deepspeed"], 0, found["our_sgd"]))
    assert as_it_comes.min() > 0.05
    assert as_it_comes == pytest.approx(far(lesson, found["with_clipping"]), rel=1e-4)
    never = found["our_sgd"] | {"gradient_clipping": 0.0}
    assert far(lesson, partial(found["with_deepspeed"], 0, never)).max() < 1e-6


def test_sharded_ddp_no_longer_averages_after_zero_grad_by_the_optimizer(lesson: Lesson, need: Need) -> None:
    """The first step is right, all others are not; where zeros are written, or no buckets are used, all are."""
    need("fairscale")
    fn = lesson.define("def with_oss")["with_sharded_ddp"]
    trap = far(lesson, partial(fn, "optimizer"))
    assert trap[0] < 1e-6
    assert trap[1:].min() > 0.01
    assert far(lesson, partial(fn, "model")).max() < 1e-6
    without = ("ShardedDataParallel(model, optimizer)", "ShardedDataParallel(model, optimizer, reduce_buffer_size=0)")
    unbucketed = lesson.define("def with_oss", without)["with_sharded_ddp"]
    assert far(lesson, partial(unbucketed, "optimizer")).max() < 1e-6


@pytest.mark.parametrize(("stage", "parameters", "state", "other"), [(1, 1, 0.5, 0.5), (3, 0.5, 0.5, 0.5)])
def test_deepspeed_shards_by_stage_and_keeps_a_copy_of_its_part(
    lesson: Lesson, need: Need, stage: int, parameters: float, state: float, other: float
) -> None:
    """In copies of the whole model, on each rank."""
    need("deepspeed")
    found = lesson.define("def with_deepspeed")
    never = found["our_sgd"] | {"gradient_clipping": 0.0}
    for rank in told(partial(found["with_deepspeed"], stage, never), 16384, 0.9):
        kept = {kind: num_bytes / COPY for kind, num_bytes in rank["bytes"].items()}
        assert kept["parameters"] == pytest.approx(parameters, rel=0.01)
        assert kept["optimizer state"] == pytest.approx(state, rel=0.01)
        assert kept["other"] == pytest.approx(other, abs=0.01)
