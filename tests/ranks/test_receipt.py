"""What a launch leaves: nothing, and it proves that; what a learner leaves is named or ended."""

import _thread
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, shared_memory
from pathlib import Path
from typing import Any

import pytest

from ddplab import Run, launch, leftovers

METHODS = ["forkserver", "spawn"]


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A launch that shows nothing, and gives back what failed."""
    return launch(fn, *args, **({"view": "quiet", "allow_failure": True, "backend": None} | options))


def receipt_of(run: Run) -> Any:
    assert run.receipt is not None
    return run.receipt


def detach(how: str, pids: Path) -> None:
    """Start a process that leaves the rank's group, in one of the ways in which programs do."""
    rank = os.environ["RANK"]
    if how == "session":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        (pids / f"{rank}.{child.pid}").touch()
    elif not os.fork():
        os.setsid()
        if not os.fork():
            (pids / f"{rank}.{os.getpid()}").touch()
            time.sleep(300)
        os._exit(0)
    while not list(pids.glob(f"{rank}.*")):
        time.sleep(0.01)


@pytest.mark.parametrize("start_method", METHODS)
def test_a_run_that_ends_well_leaves_nothing(start_method: str) -> None:
    """The receipt of a run with a process group is clean, also that of the first launch in a process."""
    run = quiet(lambda: 1, backend="gloo", start_method=start_method)
    assert (run.results, receipt_of(run).clean, str(run.receipt)) == ([1, 1], True, "nothing is left")


@pytest.mark.parametrize("ending", ["raises", "times out", "is killed"])
def test_a_run_that_ends_badly_leaves_nothing(ending: str) -> None:
    """However a rank ends, the receipt is clean."""

    def end() -> None:
        if os.environ["RANK"] == "0":
            {
                "raises": lambda: 1 / 0,
                "times out": threading.Event().wait,
                "is killed": lambda: os.kill(os.getpid(), 9),
            }[ending]()

    run = quiet(end, backend="gloo", timeout_s=1.0)
    assert not run.ok
    assert receipt_of(run).clean, run.receipt


def test_an_interrupt_carries_the_run_with_its_receipt() -> None:
    """The KeyboardInterrupt of a cell has the run, whose receipt is clean, and the handler is as before."""
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        quiet(time.sleep, 30)
    timer.join()
    assert receipt_of(vars(caught.value)["run"]).clean
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("how", ["session", "daemon"])
def test_a_process_that_leaves_its_rank_is_ended(how: str, start_method: str, tmp_path: Path) -> None:
    """Was a bug: a child with a session of its own outlived the launch; or, holding its pipes, made it time out."""

    def leave() -> None:
        detach(how, tmp_path)
        if os.environ["RANK"] == "1":
            os._exit(3)

    run = quiet(leave, start_method=start_method, timeout_s=30)
    pids = [int(path.suffix[1:]) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert [(f.rank, f.type) for f in run.failures] == [(1, "exit code 3")]
    assert [pid for pid in pids if leftovers.mark(pid) != f"ddplab_of_{pid}_0"] == []
    assert len(receipt_of(run).ended) >= 2
    assert receipt_of(run).processes == ()


def test_processes_of_the_notebook_itself_are_left_alone() -> None:
    """What the notebook started, with the same forkserver too, is no stray."""
    import multiprocessing

    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(300,))
    child.start()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    try:
        run = quiet(lambda: 1)
        assert (child.is_alive(), other.poll(), receipt_of(run).ended) == (True, None, ())
    finally:
        child.kill()
        other.kill()
        child.join()
        other.wait()


def test_temporary_files_that_a_rank_left_are_named() -> None:
    """A file made through tempfile stays, for it may be the function's result, and the receipt names it."""

    def make() -> str:
        with tempfile.NamedTemporaryFile():  # which is gone at the end
            return tempfile.mkdtemp()

    run = quiet(make)
    try:
        assert sorted(receipt_of(run).files) == sorted(run.results)
        assert not receipt_of(run).clean
    finally:
        for folder in run.results:
            os.rmdir(folder)


@pytest.mark.parametrize("start_method", METHODS)
def test_a_killed_rank_leaves_no_folder_of_multiprocessing(start_method: str) -> None:
    """A rank uses the folder of the notebook's process, which removes it at its end, also if the rank is killed."""

    def work() -> None:
        import multiprocessing.util

        print(multiprocessing.util.get_temp_dir())
        os.kill(os.getpid(), signal.SIGKILL)

    run = quiet(work, world_size=1, start_method=start_method)
    assert run.output(0) == multiprocessing.util.get_temp_dir()
    assert receipt_of(run).clean


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_shared_memory_that_nobody_uses_is_named_and_that_of_others_is_not() -> None:
    """A block that a killed rank made takes memory until somebody removes it. What others make is theirs."""
    others = shared_memory.SharedMemory(create=True, size=100)

    def make() -> None:
        block = shared_memory.SharedMemory(create=True, size=100)
        print(block.name)
        shared_memory.SharedMemory(name="ddplab-test-other", create=True, size=100)
        os.kill(os.getpid(), signal.SIGKILL)

    run = quiet(make, world_size=1)
    others.close()
    others.unlink()
    path = f"/dev/shm/{run.output(0).splitlines()[0]}"
    assert receipt_of(run).files == (path,)
    os.unlink(path)
    os.unlink("/dev/shm/ddplab-test-other")


def test_looking_for_listening_sockets_leaves_no_descriptor_of_another_thread() -> None:
    """Was a bug: a number that another thread gave to something else meanwhile was copied, and stayed open."""
    from ddplab import receipt

    here, there = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    assert receipt._listening({str(here): "socket:[1]", str(there): "socket:[2]"}) == {}
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(here)
    os.close(there)


def test_what_changes_in_the_notebook_is_named() -> None:
    """A thread of the notebook that meanwhile listens, opens files and sets variables is not hidden."""
    opened: list[Any] = []

    def meddle() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)
        os.environ["DDPLAB_TEST_MEDDLED"] = "1"

    timer = threading.Timer(0.3, meddle)
    timer.start()
    try:
        receipt = receipt_of(quiet(time.sleep, 0.8))
    finally:
        timer.join()
        os.environ.pop("DDPLAB_TEST_MEDDLED", None)
        port = opened[0].getsockname()[1]
        opened[0].close()
    assert receipt.changed == ("os.environ",)
    assert [str(port) in text for text in receipt.sockets] == [True]
    assert len(receipt.descriptors) == 1


def test_two_launches_at_once_say_that_they_overlapped() -> None:
    """With another launch at work, descriptors cannot be told apart: the receipt claims nothing of them."""
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(quiet(time.sleep, 1.0)))
    thread.start()
    runs.append(quiet(time.sleep, 1.0))
    thread.join()
    assert [(receipt_of(run).clean, receipt_of(run).overlapped) for run in runs] == [(True, True)] * 2


def test_a_receipt_is_saved_with_its_run(tmp_path: Path) -> None:
    """A run that is loaded has the receipt that it was saved with."""
    run = quiet(lambda: 1)
    run.save(tmp_path / "run.jsonl")
    assert Run.load(tmp_path / "run.jsonl").receipt == run.receipt != None  # noqa: E711


def test_all_that_a_rank_printed_is_kept_until_the_run_is_dropped() -> None:
    """Of a flood the run keeps the ends, and a file, which only its user can read, keeps everything."""

    def flood() -> None:
        for number in range(5000):
            print(number, file=sys.stderr if number % 2 else sys.stdout)

    run = quiet(flood, world_size=2)
    path = run.output_file
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("rank 1 |")] == [f"rank 1 | {n}" for n in range(0, 5000, 2)]
    assert [line for line in lines if line.startswith("rank 0 !")] == [f"rank 0 ! {n}" for n in range(1, 5000, 2)]
    assert len(lines) == 10_000
    assert receipt_of(run).clean
    del run
    assert not path.exists()


def test_little_output_makes_no_file() -> None:
    """What the run keeps by itself needs no file."""
    assert quiet(lambda: print("a line")).output_file is None


def server() -> int:
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def test_ranks_outlive_a_forkserver_that_is_killed() -> None:
    """Was a bug: torch asks for an interrupt when the parent of a rank dies, which looked like one of the cell."""
    quiet(lambda: 1)
    timer = threading.Timer(0.3, lambda: os.kill(server(), signal.SIGKILL))
    timer.start()
    run = quiet(time.sleep, 1.0)
    timer.join()
    assert run.results == [None, None]
    assert quiet(lambda: 1).results == [1, 1]


def test_a_stopped_forkserver_is_replaced() -> None:
    """Was a bug: the launch waited for ever, and no interrupt reached it."""
    quiet(lambda: 1)
    stopped = server()
    os.kill(stopped, signal.SIGSTOP)
    run = quiet(lambda: 1)
    assert (run.results, server() != stopped, receipt_of(run).processes) == ([1, 1], True, ())


def test_leftovers_of_a_dead_launcher_are_found_and_ended(tmp_path: Path) -> None:
    """A launcher that was killed may leave what left its rank's group; its mark tells, and only that is ended."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "from ddplab import launch\n"
        "def work():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(300)\n"
        "launch(work, world_size=1, backend=None)\n"
    )
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environ)
    assert launcher.stdout
    child = int(launcher.stdout.readline().rpartition(" ")[2])
    assert child not in [one.pid for one in leftovers.find()]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    found = [one for one in leftovers.find() if one.pid == child]
    assert [abs(one.started - time.time()) < 60 for one in found] == [True]
    assert leftovers.end(found[0])
    assert child not in [one.pid for one in leftovers.find()]


def test_a_process_that_took_over_an_id_is_not_ended() -> None:
    """A leftover is told by its id and its start: a later process of the same id is another."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        assert leftovers.end(leftovers.Leftover(child.pid, 1, "python", leftovers.mark()))
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
