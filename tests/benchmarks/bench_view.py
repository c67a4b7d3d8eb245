"""What the live panel costs: 16 ranks that keep all cores busy and log 1,000 metrics a second each, shown and not shown.

    python tests/benchmarks/bench_view.py          about two minutes, machine otherwise idle

A real kernel runs the cells as for JupyterLab, with nobody but this process at the other end of its channels; what a
browser takes to draw comes on top. Each is measured in turns, and the medians are told.
"""

from __future__ import annotations

import ast
import os
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernel"))
from kernel import Kernel

ROUNDS, NUM_RANKS, STEPS = 5, 16, 4000
CELL = f"""
import statistics, time
from ddplab import launch, log

def work(steps, per_step):
    began = time.monotonic()
    for step in range(steps):
        for _ in range(per_step):
            pass
        log(step=step, loss=1 / (step + 1))
    return time.monotonic() - began

def calibrate():
    "How many turns of the inner loop fill the cores at 1,000 steps a second."
    began = time.thread_time()
    for _ in range(10**6):
        pass
    return (time.thread_time() - began) / 10**6

turn_s = launch(calibrate, world_size=1, view="quiet").results[0]
per_step = int(1e-3 * {os.cpu_count()} / {NUM_RANKS} / turn_s)

def measure(view):
    cpu_s, began = time.process_time(), time.monotonic()
    run = launch(work, {STEPS}, per_step, world_size={NUM_RANKS}, view=view)
    return statistics.median(run.results), time.process_time() - cpu_s, time.monotonic() - began
"""


def main() -> None:
    """Measure and tell."""
    kernel = Kernel(env={"PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        kernel.run(CELL)
        views = ("live", "quiet")
        told = {view: [] for view in views}  # type: dict[str, list[tuple[float, float, float]]]
        for number in range(ROUNDS):
            for view in views if number % 2 else views[::-1]:
                shown = kernel.wait(start_as_notebook(kernel, f"measure({view!r})"))
                told[view].append(ast.literal_eval(shown.result["text/plain"]))
    finally:
        kernel.close()
    live, quiet = ([statistics.median(column) for column in zip(*told[view], strict=True)] for view in views)
    print(f"{NUM_RANKS} ranks logged {NUM_RANKS * STEPS / quiet[0]:,.0f} metrics a second")
    print(f"with the panel they took {live[0] / quiet[0]:.3f} times as long")
    extra = (live[1] / live[2] - quiet[1] / quiet[2]) / (os.cpu_count() or 1)
    print(
        f"the panel took {100 * extra:.1f} % of the cores, the kernel without it {100 * quiet[1] / quiet[2] / (os.cpu_count() or 1):.1f} %"
    )


def start_as_notebook(kernel: Kernel, code: str) -> str:
    """Send a cell as JupyterLab does, which tells which cell it is."""
    session = kernel.client.session
    message = session.msg("execute_request", {"code": code, "silent": False}, metadata={"cellId": "bench"})
    kernel.client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


if __name__ == "__main__":
    main()
