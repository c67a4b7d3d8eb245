"""The lines of torch.profiler that a learner need not see, and those that only look like them."""

import pytest

from ddplab.capture import is_noise

START = "USDT:2026-11-30 12:34:47 25012:25012 SyncActivityProfilerHandler.cpp:39] profiler_start"
NO_GPU = "ERROR:2026-11-30 12:34:47 25013:25013 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35"


@pytest.mark.parametrize(
    "line", [START, START.replace("39] profiler_start", "46] profiler_stop"), NO_GPU, NO_GPU.replace("35", "100")]
)
def test_the_known_lines_are_noise(line: str) -> None:
    """As torch 2.14 writes them."""
    assert is_noise(line)


@pytest.mark.parametrize(
    "line",
    [
        f" {START}",
        f"{START}!",
        f"loss 0.5 {START}",
        START.replace("profiler_start", "profiler_failed"),
        START.replace("Sync", "Async"),
        START.replace("2026-11-30 12:34:47 ", ""),
        NO_GPU.replace("35", "999"),
        "profiler_start",
        "",
    ],
)
def test_a_near_miss_stays(line: str) -> None:
    """What differs in one word may be the learner's, or matter."""
    assert not is_noise(line)
