"""Time runs out, or somebody is killed: it is told where every rank was, and nothing is left behind."""

import ast
import itertools
import multiprocessing.forkserver as forkserver
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ddplab import RankTimeoutError, job, launch, processes

PRELUDE = """\
import ctypes, multiprocessing, signal, subprocess, time

def is_rank(rank):
    return dist.get_rank() == rank

def start_others():
    "Start processes that would run on, and tell who they and this rank are."
    loader = iter(torch.utils.data.DataLoader(range(100), num_workers=2))
    next(loader)
    sleeper = subprocess.Popen(["sleep", "1000"])
    print("left", [identity(), identity(sleeper.pid)] + [identity(p.pid) for p in multiprocessing.active_children()])
    return loader
"""
ENDINGS = {"success": "return loader is None", "failure": "raise ValueError('no')", "timeout": "time.sleep(1000)"}


@pytest.fixture
def cell(cells):
    """Runs a text as a cell and gives its function ``f``."""

    def run(text):
        cells.run(PRELUDE)
        cells.run(text)
        return cells.namespace["f"]

    return run


@pytest.fixture
def soon_none_left(none_left):
    """A function that fails if a process still runs after 2 s, or 6 s on a busy machine."""

    def check(identities):
        end = time.monotonic() + 6
        while True:
            try:
                return none_left(identities)
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    return check


def study(f, *args, **options):
    """The run of ``f``, also when it failed, with a small time-out."""
    return launch(f, *args, **{"backend": "gloo", "allow_failure": True, "view": "quiet", "timeout_s": 2, **options})


def told(run):
    """The processes that the ranks of ``run`` told of."""
    lines = [line.text.removeprefix("left ") for line in run.lines()]
    return list(itertools.chain(*map(ast.literal_eval, lines)))


# Time-outs --------------------------------------------------------------------------------------------


def test_a_time_out_tells_where_each_rank_was(cell):
    """For each rank its own line and the call into torch that it waits in are told."""
    f = cell(
        "def f():\n if is_rank(0):\n  dist.all_reduce(torch.ones(1))\n while is_rank(1):\n  pass\n time.sleep(100)\n"
    )
    run = study(f, world_size=3)
    assert [(failure.role, failure.type) for failure in run.failures] == [("stopped", "Timeout")] * 3
    where = {failure.rank: (failure.where.source, failure.where.call) for failure in run.failures}
    assert where[0] == ("dist.all_reduce(torch.ones(1))", "all_reduce")
    lines = ("while is_rank(1):", "pass", "def is_rank(rank):", "return dist.get_rank() == rank")
    assert where[1][0] in lines
    assert where[2] == ("time.sleep(100)", "")
    assert run.verdict() == "ranks 0, 1, 2 of 3: still running after 2 s"


def test_a_rank_that_cannot_answer_is_told_as_such(cell, soon_none_left):
    """Neither a C call that holds the GIL nor a stopped process keeps its rank alive or hides the other's line."""
    text = "def f():\n print('left', [identity()])\n if is_rank(0):\n  dist.barrier()\n"
    f = cell(text + " if is_rank(1):\n  ctypes.PyDLL(None).sleep(100)\n os.kill(os.getpid(), signal.SIGSTOP)\n")
    run = study(f, world_size=3)
    where = {failure.rank: failure.where and failure.where.call for failure in run.failures}
    assert where == {0: "barrier", 1: None, 2: None}
    assert "rank 1 did not answer: it sleeps or waits in native code" in run.report()
    assert "rank 2 did not answer: its process is stopped" in run.report()
    soon_none_left(told(run))


def test_a_time_out_keeps_what_was_told_before(cell):
    """The error is also a TimeoutError, and has the output and the values of ranks that had returned."""
    f = cell("def f():\n print('before')\n if is_rank(1):\n  return 5\n time.sleep(100)\n")
    with pytest.raises(RankTimeoutError) as caught:
        study(f, allow_failure=False)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.run.output() == "rank 0 | before\nrank 1 | before"
    assert dict(caught.value.run.returned) == {1: 5}


STUCK = """\
class Stuck:
    def __reduce__(self):  # a rank makes its arguments before it joins the group
        return get_stuck, ()

def get_stuck():
    time.sleep(100 * int(os.environ["RANK"]))

def f(_):
    pass
"""


def test_a_rank_that_waits_for_the_others_to_join_is_told_as_such(cell, cells):
    """When a rank never joins, it is told that the others were still in init_process_group."""
    run = study(cell(STUCK), cells.run("Stuck()"))
    assert "get_stuck" in [failure.where.function for failure in run.failures if failure.where]
    assert "rank 0 waits in init_process_group since" in run.report()


def test_a_wrong_port_names_the_line_that_waits(cell):
    """With backend=None and nobody at MASTER_PORT, the init_process_group of the cell is named."""
    failures = study(
        cell("def f():\n dist.init_process_group('gloo')\n"), backend=None, env={"MASTER_PORT": "1"}
    ).failures
    assert [(failure.where.line, failure.where.call) for failure in failures] == [(2, "init_process_group")] * 2


# Nothing is left --------------------------------------------------------------------------------------


def traces():
    """What a launch could leave in this process."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    fds = len(os.listdir("/proc/self/fd"))
    return fds, sorted(thread.name for thread in threading.enumerate()), dict(os.environ), os.getcwd(), handlers


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_in_this_process_or_by_the_ranks(cell, soon_none_left, ending):
    """After success, failure and time-out: no rank, no child of a rank, no descriptor, no thread, all as before."""
    f = cell(f"def f():\n loader = start_others()\n {ENDINGS[ending]}\n")
    study(f)
    before = traces()
    run = study(f)
    assert traces() == before
    assert (run.ok, len(told(run))) == (ending == "success", 2 * 4)
    soon_none_left(told(run))


SCRIPT = """\
import ctypes, os, signal, subprocess, sys, time
import ddplab
import multiprocessing.forkserver as forkserver
import torch
import torch.distributed as dist

def identity(pid="self"):
    words = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return os.getpid() if pid == "self" else int(pid), words[19]

def tell(*who):
    with open("tmp%d" % os.getpid(), "w") as file:
        file.write(repr(who))
    os.rename(file.name, f"{os.getpid()}.told")
"""
SCRIPT_THAT_ENDS = """
def f(ending):
    iterator = iter(torch.utils.data.DataLoader(range(100), num_workers=1))
    next(iterator)
    if ending == "failure":
        raise ValueError("no")
    time.sleep(100 if ending == "timeout" else 0)

if __name__ == "__main__":
    for ending in ("success", "failure", "timeout"):
        ddplab.launch(f, ending, timeout_s=1, backend="gloo", allow_failure=True)
"""
SCRIPT_THAT_IS_KILLED = """
def f():
    if dist.get_rank() == 0:
        tell(identity(), identity(subprocess.Popen(["sleep", "1000"]).pid))
        dist.barrier()
    tell(identity())
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(1000)
    os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    if sys.argv[1] == "forkserver":
        forkserver.ensure_running()
        tell(identity(forkserver._forkserver._forkserver_pid))
    ddplab.launch(f, world_size=3, start_method=sys.argv[1], backend="gloo")
"""


def start_script(folder, text, *args):
    """A script in a process of its own, with ``folder`` for its files and its temporary files."""
    (folder / "temporary").mkdir()
    (folder / "script.py").write_text(SCRIPT + text)
    environment = os.environ | {
        "TMPDIR": str(folder / "temporary"),
        "PYTHONPATH": os.path.dirname(os.path.dirname(processes.__file__)),
    }
    return subprocess.Popen([sys.executable, "script.py", *args], cwd=folder, env=environment)


def test_a_script_leaves_no_temporary_file(tmp_path):
    """After launches that end well, fail and time out, and the end of the script, no temporary file is left."""
    with start_script(tmp_path, SCRIPT_THAT_ENDS) as process:
        assert process.wait(60) == 0
    left = os.listdir(tmp_path / "temporary")
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch makes that one on import


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_killing_the_launcher_ends_all_that_it_has_started(tmp_path, soon_none_left, start_method):
    """SIGKILL of the launcher ends ranks that wait, hold the GIL or are stopped, and a child of a rank, within 2 s."""
    number = 4 if start_method == "forkserver" else 3
    with start_script(tmp_path, SCRIPT_THAT_IS_KILLED, start_method) as process:
        try:
            end = time.monotonic() + 60
            while len(files := list(tmp_path.glob("*.told"))) < number:
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
    soon_none_left(list(itertools.chain(*(ast.literal_eval(file.read_text()) for file in files))))


# Accidents --------------------------------------------------------------------------------------------


def hit(monkeypatch, number):
    """Let rank 1 of the next launches get a signal as soon as it exists; gives the list of their process ids."""
    pids = []

    class Hit(processes.RankProcess):
        def __init__(self, rank, *args):
            super().__init__(rank, *args)
            if rank == 1:
                pids.append(self._process.pid)
                os.kill(self._process.pid, number)

    monkeypatch.setattr(processes, "RankProcess", Hit)
    return pids


def test_a_rank_killed_before_it_reports_is_the_root(cell, monkeypatch):
    """A rank that is killed right at its start is named, and its peer is stopped."""
    hit(monkeypatch, signal.SIGKILL)
    root, other = study(cell("def f():\n dist.barrier()\n"), timeout_s=30).failures
    assert (root.rank, root.role, root.signal) == (1, "root", "SIGKILL")
    assert other.role in ("stopped", "echo")


def test_a_rank_stopped_while_it_starts_does_not_stop_the_launcher(cell, monkeypatch):
    """A launch gives up a rank that never reads its order, too big for any pipe, and ends it."""
    monkeypatch.setattr(job, "START_LIMIT_S", 2)
    pids = hit(monkeypatch, signal.SIGSTOP)
    with pytest.raises(RankTimeoutError, match="not all ranks started"):
        study(cell("def f(data):\n return len(data)\n"), bytes(30_000_000), allow_failure=False)
    assert [os.path.exists(f"/proc/{pid}") for pid in pids] == [False]


def test_launches_may_run_in_threads(cell):
    """Two launches in threads give their own results, while the main thread computes."""
    f, results = cell("def f(n):\n dist.barrier()\n return n\n"), {}

    def work(n):
        results[n] = launch(f, n, backend="gloo", view="quiet").results

    for thread in (threads := [threading.Thread(target=work, args=(n,)) for n in range(2)]):
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sum(range(10_000))
    assert results == {0: [0, 0], 1: [1, 1]}


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_forkserver_may_be_killed_between_launches(cell, is_gone):
    """A launch starts a new forkserver when the old one is gone, or about to go."""
    launch(f := cell("def f():\n return 1\n"), view="quiet", start_method="forkserver")
    pid = forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if is_gone else os.WNOHANG))
    assert launch(f, view="quiet", start_method="forkserver").results == [1, 1]


class Lasting:
    """Takes its time to be made again."""

    def __reduce__(self):
        return time.sleep, (30,)


def test_a_value_that_takes_long_to_be_made_again_can_be_interrupted():
    """Was a bug: it was made in the thread of the job, beyond every time-out and interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background has set aside
    timer = threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(Lasting, world_size=2, backend=None, view="quiet")
    timer.join()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert time.monotonic() - began < 10
    run = vars(caught.value)["run"]
    assert [(failure.rank, failure.type) for failure in run.failures] == [(0, "Interrupted"), (1, "Interrupted")]
    assert run.receipt.clean


def test_a_value_that_takes_long_to_be_made_again_does_not_count_against_the_time_out():
    """The ranks were in time; what follows is the notebook's own work."""

    class Slow:
        def __reduce__(self):
            return time.sleep, (1.5,)

    run = launch(Slow, world_size=1, backend=None, view="quiet", timeout_s=1)
    assert run.results == [None]
