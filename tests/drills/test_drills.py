"""Bad days, drawn at random, on real ranks: each time control comes back, the failure is named, and nothing is left.

``DDPLAB_DRILLS`` is how many there are, ``DDPLAB_DRILLS_SEED`` the first of their seeds: 1 and 17 repeat drill 17.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import nbformat
import pytest
from drills import ALWAYS, KINDS, MARK, THEN, Arrival, Drill, add, drill, live, words

from ddplab import RankFailedError, RankTimeoutError, Run, launch

sys.path.append(str(Path(__file__).parents[1] / "kernel"))
from kernel import Kernel
from watch import TELL, Ranks, wait_for

CI = 28 * len(KINDS)  # from this seed on, a round of drills holds every moment, caller and so on: see the second test
NUMBER = int(os.environ.get("DDPLAB_DRILLS") or len(KINDS))
FIRST = int(os.environ.get("DDPLAB_DRILLS_SEED") or CI)
BOUND_S = 180  # for a drill that should not, but does, block
LATE_S = 3  # the launcher may take so much longer than its time-out, and than an interrupt
NUM_LINES = 1_000_000 if NUMBER > 100 else 100_000


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUMBER), ids=lambda seed: f"{seed} {drill(seed).kind}")
def test_a_bad_day_is_survived(seed: int, tmp_path: Path) -> None:
    """Whatever happens to the ranks, the launcher tells it rightly, leaves nothing behind, and can launch again."""
    today = drill(seed, NUM_LINES)
    print(today)
    folder = tmp_path / f"drill-{seed}"
    folder.mkdir()
    try:
        with bounded():
            if KINDS[today.kind].ends == "kernel":
                of_kernel(today, folder)
            else:
                of_launch(today, folder)
            assert again() == [3, 3]
    finally:
        for pid in marked(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_round_of_drills_holds_everything() -> None:
    """Every kind, moment, world size, start method, caller and what follows is among the drills of CI."""
    drills = [drill(seed) for seed in range(CI, CI + len(KINDS))]
    assert {today.kind for today in drills} == set(KINDS)
    assert {today.moment for today in drills} == set(ALWAYS)
    assert {today.world_size for today in drills} == {1, 2, 3, 4}
    assert {today.start_method for today in drills} == {"forkserver", "spawn"}
    assert {today.caller for today in drills} == {"cell", "asyncio", "threads"}
    assert {today.then for today in drills} == set(THEN)


def again() -> list[Any]:
    """What a launch gives in which nothing is wrong."""
    return launch(add, backend="gloo", view="quiet", timeout_s=20).results


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What the first launch starts and keeps is there before the first drill."""
    again()


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise in the main thread after ``BOUND_S``, and again, until the block is left."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"no end after {BOUND_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, BOUND_S, 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# A launch of this process ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a call of launch came to: its run, if there is one, what it raised, and when that was."""

    run: Run | None
    error: BaseException | None
    ended_s: float


def of_launch(today: Drill, folder: Path) -> None:
    """A launch called from wherever the drill wants it, perhaps interrupted."""
    family_before, descriptors_before = family(), descriptors()
    began_s = time.monotonic()
    if not KINDS[today.kind].is_plain:
        outcome, began_s = interrupted(today, folder)
    elif today.caller == "asyncio":
        outcome = asyncio.run(as_coroutine(today, folder))
    elif today.caller == "threads":
        outcome = beside_another(lambda: call(today, folder))
    else:
        outcome = call(today, folder)
    left = {pid: describe(pid) for pid in {*marked(folder), *family() - family_before}}
    assert not left, left
    wait_for(lambda: len(descriptors()) <= len(descriptors_before), 1, f"{descriptors_before} before, {descriptors()}")
    run, error = outcome.run, outcome.error
    if run is None:
        assert (type(error), today.kind) == (KeyboardInterrupt, "interrupt of the start")
        return
    limit_s: float = LATE_S
    if today.ends != "KeyboardInterrupt":  # the time-out counts from when all ranks are up
        limit_s += today.timeout_s + max(event.time_s for event in run.events if type(event).__name__ == "Started")
    assert outcome.ended_s - began_s <= limit_s, run.report()
    check_end(today, run, error)
    if today.kind != "interrupt of the start":
        check_words(today, folder, run)
    assert run.receipt is not None
    assert run.receipt.clean, run.receipt


def call(today: Drill, folder: Path) -> Outcome:
    """The launch of a drill."""
    options: dict[str, Any] = {"world_size": today.world_size, "timeout_s": today.timeout_s, "view": "quiet"}
    options |= {"backend": None if today.moment == "before init" else "gloo", "start_method": today.start_method}
    run: Run | None = None
    error: BaseException | None = None
    try:
        run = launch(live, Arrival(today), env={MARK: str(folder)}, **options)
    except (RankFailedError, KeyboardInterrupt) as caught:
        run, error = vars(caught).get("run"), caught
    return Outcome(run, error, time.monotonic())


async def as_coroutine(today: Drill, folder: Path) -> Outcome:
    """The same, where an event loop runs, as it does in a notebook."""
    return call(today, folder)


def beside_another(work: Callable[[], Outcome]) -> Outcome:
    """What ``work`` gives in a thread, while another thread launches too."""
    outcomes: list[Outcome] = []
    sums: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: outcomes.append(work()), daemon=True)]
    threads += [threading.Thread(target=lambda: sums.append(again()), daemon=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[3, 3]]
    return outcomes[0]


def interrupted(today: Drill, folder: Path) -> tuple[Outcome, float]:
    """A launch whose cell is interrupted; and when the first interrupt was sent."""
    draw, sent_s, outcome = random.Random(today.seed), [], None

    def interrupt() -> None:
        if "start" not in today.kind:
            wait_for((folder / "ready").exists, 30, "the moment of the drill")
        time.sleep(draw.uniform(0, 0.2 if "start" in today.kind else 0.7))
        for _ in range(2 if "two" in today.kind else 1):
            sent_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(draw.uniform(0, 0.1))

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background has set aside
    try:
        thread.start()
        outcome = call(today, folder)
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # the second one may come when launch has ended
            thread.join()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    return outcome, sent_s[0]


def check_end(today: Drill, run: Run, error: BaseException | None) -> None:
    """The failure names the rank and the kind, or the run is good."""
    told = f"{run.verdict()}\n{run.report()}\n{run.failures}"
    if today.ends in ("", "KeyboardInterrupt"):
        assert (type(error).__name__ if error else "") == today.ends, told
        assert today.ends or run.results == ["done"] * today.world_size
        return
    assert type(error) is (RankTimeoutError if today.ends == "Timeout" else RankFailedError)
    first = run.failures[0]
    if today.ends == "Timeout":  # of all that wait; of the bad one it is told where it is, or that it does not answer
        assert {(failure.role, failure.type) for failure in run.failures} == {("stopped", "Timeout")}, told
        mine = next(failure for failure in run.failures if failure.rank == today.who)
        assert mine.where or f"rank {today.who} did not answer" in told
        assert "shapes" not in today.kind or f"rank {today.who} has (3,)" in told
    elif today.kind == "skip":  # its peers fail
        assert (first.role, first.type) == ("root", "RuntimeError"), told
        assert first.rank != today.who
    else:
        rank = (today.who - ("Gloo" in today.kind)) % today.world_size  # Gloo aborts the one that gets the message
        number = getattr(signal, today.ends, None)
        exitcode = -number if number else int(today.ends[-1]) if today.ends.startswith("exit") else 1
        ending = rank, "root", today.ends, number and number.name, exitcode
        assert (first.rank, first.role, first.type, first.signal, first.exitcode) == ending, told


def check_words(today: Drill, folder: Path, run: Run) -> None:
    """What the ranks printed before is there."""
    everyone = range(today.world_size)
    is_early = today.moment in ("before init", "in init")
    wanted = [] if is_early else [(rank, "up") for rank in everyone]
    for rank in everyone if today.kind == "flood" else [today.who]:
        wanted += [(rank, when) for when in ("now", *["after"] * (not KINDS[today.kind].ends))]
    missing = [said for said in wanted if words(str(folder), *said) not in run.output(said[0])]
    assert not missing, run.output()[-2000:]


# A kernel of its own -----------------------------------------------------------------------------------


def of_kernel(today: Drill, folder: Path) -> None:
    """A cell whose kernel is restarted, killed, or given up by nbval."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), MARK: str(folder)}
    ranks = Ranks(folder)
    cell = f"{TELL}\nlaunch(hang, {str(folder)!r}, world_size={today.world_size}, timeout_s=1000)"
    if today.kind == "time-out of nbval":
        told = run_nbval(cell, folder, os.environ | env)
        assert "1 failed" in told
        assert len(ranks.told) == today.world_size, told
    else:
        kernel = Kernel(env=env)
        try:
            kernel.start(cell)
            ranks.wait(today.world_size)
            if today.kind == "kernel killed":
                os.kill(kernel.pid, signal.SIGKILL)
            else:
                kernel.manager.restart_kernel()
                assert "rank 0 | again\nrank 1 | again" in kernel.run(f"{TELL}\nlaunch(print, 'again')").text
            ranks.check_gone()
        finally:
            kernel.close()
    wait_for(lambda: not marked(folder), 6, "nothing left of the kernel")


def run_nbval(cell: str, folder: Path, env: dict[str, str]) -> str:
    """What ``pytest --nbval`` says of a notebook with this cell."""
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), folder / "stuck.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    command += ["--nbval-cell-timeout=20", "stuck.ipynb"]
    env.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=BOUND_S)
    return done.stdout + done.stderr


# Processes ---------------------------------------------------------------------------------------------


def stat(pid: int) -> list[str]:
    """State, parent and so on of a process; those of a zombie if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["Z", "0"]


def descriptors() -> dict[str, str]:
    """The files that this process has open."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[path.name] = os.readlink(path)
    return found


def describe(pid: int) -> str:
    """What a process is, for a message."""
    with contextlib.suppress(OSError):
        return f"{Path(f'/proc/{pid}/cmdline').read_text()[:100]!r} {stat(pid)[:4]}"
    return "gone"


def family() -> set[int]:
    """All that descend from this process, but the helpers that multiprocessing keeps."""
    parents = {pid: int(stat(pid)[1]) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]


def marked(folder: Path) -> list[int]:
    """Living processes of the drill in ``folder``: by the environment they were started with, or a file they hold."""
    found = []
    for pid in set(map(int, filter(str.isdigit, os.listdir("/proc")))) - {os.getpid()}:
        with contextlib.suppress(OSError):
            held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            is_mine = f"{MARK}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            if (is_mine or str(folder / "held") in held) and stat(pid)[0] not in "ZX":
                found.append(pid)
    return found
