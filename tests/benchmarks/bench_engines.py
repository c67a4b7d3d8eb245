"""How long a launch takes on an engine, against one with local ranks: the second of two, each cluster being up.

    python tests/benchmarks/bench_engines.py          about two minutes on two cores, with Ray and Spark installed

The job is that of bench_launch.py on 2 ranks. What is not installed is said to be missing.
"""

from __future__ import annotations

import time

from bench_launch import train

from ddplab import launch


def seconds(engine: str) -> tuple[float, float]:
    """The first launch, with the cluster's own start, and the second."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        launch(train, engine=engine, timeout_s=120, view="quiet")
        times.append(time.perf_counter() - began)
    return times[0], times[1]


def main() -> None:
    """Print a line for each engine."""
    first_s, local_s = seconds("local")
    print(f"local: first {first_s:.1f} s, second {local_s:.2f} s")
    for engine in ("ray", "spark"):
        try:
            first_s, again_s = seconds(engine)
        except ValueError as error:
            print(f"{engine}: {error}")
        else:
            print(f"{engine}: first {first_s:.0f} s, second {again_s:.1f} s, {again_s / local_s:.0f} times local")


if __name__ == "__main__":
    main()
