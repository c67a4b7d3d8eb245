"""Pictures of what real ranks did."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplab import launch, plots
from ddplab.plots.exchange import COLLECTIVES, ring_all_reduce

# Name: what ranks 0, 1 and 2 have before and after, and of whose data the latter is made.
EXPECTED: dict[str, tuple[list[list[int]], list[list[int]], list[list[list[int]]]]] = {
    "broadcast": ([[1, 2, 3], [0, 0, 0], [0, 0, 0]], [[1, 2, 3]] * 3, [[[0]] * 3] * 3),
    "scatter": ([[1, 2, 3], [], []], [[1], [2], [3]], [[[0]]] * 3),
    "gather": ([[1], [11], [21]], [[1, 11, 21], [], []], [[[0], [1], [2]], [], []]),
    "all_gather": ([[1], [11], [21]], [[1, 11, 21]] * 3, [[[0], [1], [2]]] * 3),
    "all_reduce": ([[1, 2, 3], [11, 12, 13], [21, 22, 23]], [[33, 36, 39]] * 3, [[[0, 1, 2]] * 3] * 3),
    "reduce_scatter": ([[1, 2, 3], [11, 12, 13], [21, 22, 23]], [[33], [36], [39]], [[[0, 1, 2]]] * 3),
    "all_to_all": (
        [[1, 2, 3], [11, 12, 13], [21, 22, 23]],
        [[1, 11, 21], [2, 12, 22], [3, 13, 23]],
        [[[0], [1], [2]]] * 3,
    ),
    "send": (
        [[1, 2, 3], [11, 12, 13], [21, 22, 23]],
        [[1, 2, 3], [1, 2, 3], [21, 22, 23]],
        [[[0]] * 3, [[0]] * 3, [[2]] * 3],
    ),
}


def exchanged(name: str, op: str = "SUM", src: int = 0, dst: int = 0, world_size: int = 3) -> list[dict[str, Any]]:
    """What each rank tells of a collective."""
    from ddplab.plots.exchange import exchange

    return launch(exchange, name, op, src, dst, world_size=world_size, backend="gloo", view="quiet").results


@pytest.mark.parametrize("name", EXPECTED)
def test_a_collective_does_what_its_picture_says(name: str) -> None:
    """The numbers of every rank, and whose they are."""
    told = exchanged(name, dst=1 if name == "send" else 0)
    before, after, owners = EXPECTED[name]
    assert [one["before"] for one in told] == before
    assert [one["after"] for one in told] == after
    assert [one["after from"] for one in told] == owners


def test_reduce_is_for_dst_only() -> None:
    """What it leaves on the others is drawn as it was found, and not promised: with Gloo, parts of the sum."""
    told = exchanged("reduce", dst=1)
    assert told[1]["after"] == [33, 36, 39] and told[1]["after from"] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("op", "first"), [("SUM", 12), ("AVG", 6.0), ("PRODUCT", 11), ("MIN", 1), ("MAX", 11), ("BAND", 1), ("BXOR", 10)]
)
def test_every_op_works_on_gloo(op: str, first: float) -> None:
    """Of 1 on rank 0 and 11 on rank 1."""
    assert [one["after"][0] for one in exchanged("all_reduce", op, world_size=2)] == [first, first]


def test_every_collective_has_a_picture() -> None:
    """From its name alone, and with ``dist.ReduceOp`` for an op."""
    for name in COLLECTIVES:
        picture: Any = plots.collective(name, 2, op=dist.ReduceOp.MAX)
        assert picture._repr_mimebundle_()["text/plain"].endswith("on 2 ranks: elements before and after")
        assert [row["rank"] for row in picture.rows] == [0, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_ring_ends_with_the_sum_on_every_rank(world_size: int) -> None:
    """After 2 (n - 1) steps, in each of which a rank receives one chunk."""
    run = launch(ring_all_reduce, world_size=world_size, backend="gloo", view="quiet")
    sums = [sum(10 * rank + chunk + 1 for rank in range(world_size)) for chunk in range(world_size)]
    for rank, states in enumerate(run.results):
        assert len(states) == 2 * (world_size - 1) + 1
        assert states[0]["chunks"] == [10 * rank + chunk + 1 for chunk in range(world_size)]
        assert states[-1]["chunks"] == sums and states[-1]["from"] == [list(range(world_size))] * world_size
        for old, new in zip(states, states[1:], strict=False):
            changed = [at for at in range(world_size) if old["chunks"][at] != new["chunks"][at]]
            assert changed == [new["received"]]
    assert str(plots.ring(run)).startswith(f"a ring all-reduce on {world_size} ranks")


@pytest.mark.parametrize("picture", [plots.collective, plots.ring])
def test_the_examples_of_pictures_that_start_ranks_hold(picture: Any) -> None:
    """``make unit``, which starts no process, skips them."""
    text = picture.__doc__.replace("# doctest: +SKIP", "")
    names = {"collective": plots.collective, "ring": plots.ring}
    example = doctest.DocTestParser().get_doctest(text, names, picture.__name__, None, 0)
    assert example.examples and doctest.DocTestRunner(verbose=False).run(example).failed == 0


def model() -> nn.Module:
    """Three layers, of 40,400, 40,400 and 4,040 bytes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 10))


def steps(num_steps: int, **options: Any) -> Any:
    """A DDP model after some steps, with buckets of about 30 KiB."""
    ddp = DDP(model(), bucket_cap_mb=0.03, **options)
    for _ in range(num_steps):
        ddp(torch.ones(2, 100)).sum().backward()
    return ddp


BUCKETS = [
    [("2.bias", 40), ("2.weight", 4000), ("1.bias", 400), ("1.weight", 40000)],
    [("0.bias", 400), ("0.weight", 40000)],
]


@pytest.mark.parametrize(("num_steps", "options"), [(2, {}), (12, {}), (3, {"static_graph": True})])
def test_buckets_are_those_that_ddp_formed(num_steps: int, options: dict[str, Any]) -> None:
    """The last layer is ready first; read after two steps, or many."""
    run = launch(lambda: plots.buckets_of(steps(num_steps, **options)), backend="gloo", view="quiet")
    assert run.results == [BUCKETS, BUCKETS]
    picture: Any = plots.buckets(run)
    assert [row["parameter"] for row in picture.rows] == [name for bucket in BUCKETS for name, _ in bucket]


def test_buckets_with_unused_parameters_are_cut_before_the_first_step() -> None:
    """Such a model never forms them anew; an unused parameter is in one all the same."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(100, 100), nn.Linear(100, 100)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    def work() -> Any:
        ddp = DDP(Unused(), find_unused_parameters=True, bucket_cap_mb=0.03)
        for _ in range(2):
            ddp(torch.ones(2, 100)).sum().backward()
        return plots.buckets_of(ddp), ddp._get_ddp_logging_data()["bucket_sizes"]

    (found, sizes), _ = launch(work, backend="gloo", view="quiet").results
    assert {name for bucket in found for name, _ in bucket} == {
        "used.weight", "used.bias", "unused.weight", "unused.bias",
    }  # fmt: skip
    assert [sum(size for _, size in bucket) for bucket in found] == [int(size) for size in sizes.split(",")]


def test_buckets_are_not_known_after_one_step() -> None:
    """The error says when they are."""

    def too_early() -> str:
        try:
            plots.buckets_of(steps(1))
        except RuntimeError as error:
            return str(error)
        return ""

    told = launch(too_early, backend="gloo", view="quiet").results
    assert told[0] == "buckets_of: DDP forms its buckets in the second forward(); call it after two steps or more"


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp2"])
def test_memory_counts_what_this_rank_keeps(kind: str) -> None:
    """DDP keeps all on both ranks; ZeRO-1 shares out Adam's state, FSDP2 everything."""

    def work() -> dict[str, int]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        net: Any = model()
        net = fully_shard(net) if kind == "fsdp2" else DDP(net)
        adam = torch.optim.Adam
        sharded = kind == "zero"
        optimizer = ZeroRedundancyOptimizer(net.parameters(), adam) if sharded else adam(net.parameters())
        net(torch.ones(2, 100)).sum().backward()
        optimizer.step()
        return plots.memory_of(net, optimizer)

    run = launch(work, backend="gloo", view="quiet")
    total = 40_400 + 40_400 + 4_040
    parameters = [one["parameters"] for one in run.results]
    state = sum(one["optimizer state"] for one in run.results)
    assert parameters == [one["gradients"] for one in run.results]
    assert sum(parameters) == (total if kind == "fsdp2" else 2 * total)
    assert 2 * total <= state <= 2 * total + 100 if kind != "ddp" else 4 * total <= state <= 4 * total + 100
    assert all(one["peak resident set"] > total for one in run.results)
    assert plots.memory({kind: run})


def test_gradients_and_agreement_of_a_real_training() -> None:
    """By hand: each rank's gradient, then the mean; and weights that stay bit for bit equal."""

    def train() -> dict[str, Any]:
        net = model()
        weights = []
        for _ in range(3):
            net.zero_grad()
            net(torch.full((1, 100), float(dist.get_rank()))).sum().backward()
            before = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()  # type: ignore[operator]
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.01 * p.grad  # type: ignore[operator]
            weights.append(nn.utils.parameters_to_vector(net.parameters()).detach())
        return {"before": before, "after": [p.grad for p in net.parameters()], "weights": weights}

    run = launch(train, world_size=3, backend="gloo", view="quiet")
    words = "gradients of 3 ranks, 21,210 elements: after averaging every rank has the mean"
    assert repr(plots.gradients(run)) == words
    told: Any = plots.agreement([one["weights"] for one in run.results])
    assert [tuple(row.values()) for row in told.rows] == [(0, 0.0), (1, 0.0), (2, 0.0)]
