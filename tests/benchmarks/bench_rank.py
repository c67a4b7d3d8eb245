"""What ddplab adds inside a rank: to a collective call, to a training step, to a step that logs, to one that is traced.

    python tests/benchmarks/bench_rank.py          about a minute on two cores, machine otherwise idle

Each is measured with and without, in turns, in the same rank; medians, so that the noise of a shared
machine falls out. A trace is of a whole run: runs with and without one take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddplab import Run, launch, log, tracing
from ddplab.events import Trace


def in_turns(*jobs: Callable[[], object], rounds: int) -> list[float]:
    """The median seconds of each job."""
    times: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds):
        for turn in range(len(jobs)):  # who goes first changes: the first pays for what the last has cached
            which = (number + turn) % len(jobs)
            began = time.perf_counter()
            jobs[which]()
            times[which].append(time.perf_counter() - began)
    return [statistics.median(mine) for mine in times]


def cost_of_a_note() -> list[float]:
    """A thousand calls of a function that does nothing, noted as all_reduce is, and not noted.

    A real all_reduce waits for Gloo's thread for 25 or for 50 us, by chance: more than the note takes.
    """
    x = torch.ones(3)

    def nothing(tensor: torch.Tensor) -> None:
        """What is called."""

    noted = tracing._noted("all_reduce", nothing)
    return in_turns(*([lambda f=f: [f(x) for _ in range(1000)] for f in (noted, nothing)]), rounds=50)  # type: ignore[misc]


def step_of_5_ms() -> Callable[..., None]:
    """A step of DDP that takes a ``backward`` and whether to ``log()`` at its end."""
    torch.set_num_threads(1)
    model = DDP(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(128, 512)

    def step(backward: Callable[..., None] = torch.Tensor.backward, logs: bool = False) -> None:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        backward(loss)
        optimizer.step()
        if logs:
            log(loss=loss)

    return step


def cost_of_a_step() -> list[float]:
    """As it is, with backward as torch has it, and with a log() at its end."""
    step = step_of_5_ms()
    noted, plain = torch.Tensor.backward, torch.Tensor.backward.__wrapped__  # type: ignore[attr-defined]
    return in_turns(lambda: step(noted), lambda: step(plain), lambda: step(noted, logs=True), rounds=600)


def traced_steps() -> float:
    """The median seconds of 200 steps in one rank."""
    return in_turns(step_of_5_ms(), rounds=200)[0]


def cost_of_a_trace() -> tuple[float, float, float, int]:
    """The seconds of a step without and with a trace; what a run takes longer to pack its trace; its bytes.

    Of eight runs each the fastest: what else the machine does changes from one run to the next.
    """
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for trace in [False, True, True, False] * 4:
        runs[trace].append(launch(traced_steps, world_size=1, backend="gloo", view="quiet", trace=trace))
    bare, traced = (min(run.results[0] for run in some) for some in runs.values())
    longer = min(run.elapsed_s for run in runs[True]) - min(run.elapsed_s for run in runs[False])
    packed = next(event for event in runs[True][0].events if isinstance(event, Trace)).packed
    return bare, traced, longer - 200 * (traced - bare), len(packed)


if __name__ == "__main__":
    (noted, plain), *_ = launch(cost_of_a_note, world_size=1, backend="gloo", view="quiet").results
    print(f"the note of a collective call: {1e3 * (noted - plain):.1f} us")
    (step, bare, logging), *_ = launch(cost_of_a_step, world_size=1, backend="gloo", view="quiet").results
    print(
        f"a DDP step of {1e3 * bare:.2f} ms: noted {step / bare:.4f} times, with log() {logging / bare:.4f} times as long"
    )
    bare, traced, seconds, num_bytes = cost_of_a_trace()
    print(
        f"with trace=True a DDP step of {1e3 * bare:.2f} ms takes {traced / bare:.3f} times as long; "
        f"200 steps are packed in {seconds:.2f} s, to {num_bytes / 1e3:.0f} kB"
    )
