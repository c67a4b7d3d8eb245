"""A rank fails: what came first is named, what only followed is told apart, and no rank is left."""

import os
import pickle
import sys
import time
import traceback

import pytest

from ddplab import DdplabError, RankFailedError, RankTimeoutError, launch

PRELUDE = """\
import ctypes, signal, sys, threading, time

class Odd(Exception):
    def __init__(self, a, *, b):
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

class Rude(Exception):
    def __str__(self):
        raise KeyboardInterrupt

def deeper(n):
    return 1 + deeper(n)

def is_rank(rank):
    return dist.get_rank() == rank
"""
ON_RANK_1 = "def f():\n    if is_rank(1):\n        {}  # here\n    dist.all_reduce(torch.ones(4))\n"
LEFT_EARLY = ON_RANK_1.format("return 'early'")


@pytest.fixture
def cell(cells):
    """Runs a text as a cell; gives its function ``f``, and the place of its line "# here" in the learner's words."""

    def run(text):
        cells.run(PRELUDE)
        cells.run(text)
        number = next((number for number, line in enumerate(text.splitlines(), 1) if "# here" in line), None)
        return cells.namespace["f"], f"{os.path.basename(cells.filenames[-1])}, line {number}"

    return run


def study(fn, *args, **options):
    """The failed run of ``fn``, of which no rank is left."""
    run = launch(fn, *args, **{"allow_failure": True, "view": "quiet", "backend": "gloo", **options})
    assert not run.ok
    left = [event.pid for event in run.events if hasattr(event, "pid") and os.path.exists(f"/proc/{event.pid}")]
    assert not left
    return run


EXCEPTIONS = {  # how rank 1 ends: the type and the message that are told
    "raise ValueError('a\\nb')": ("ValueError", "a\nb"),
    "raise Odd(1, b=2)": ("Odd", "1 and 2"),
    "raise Mute": ("Mute", None),
    "raise Rude": ("Rude", None),
    "raise ExceptionGroup('two', [ValueError('x'), KeyError('y')])": ("ExceptionGroup", "two (2 sub-exceptions)"),
    "raise KeyError('k') from OSError('why')": ("KeyError", "'k'"),
    "raise KeyboardInterrupt": ("KeyboardInterrupt", ""),
    "raise GeneratorExit": ("GeneratorExit", ""),
    "sys.exit(0)": ("SystemExit", "sys.exit(0)"),
    "sys.exit(3)": ("SystemExit", "sys.exit(3)"),
    "sys.exit('text')": ("SystemExit", "sys.exit('text')"),
}


@pytest.mark.parametrize("body", EXCEPTIONS)
def test_an_exception_of_any_shape_is_told_with_its_line(cell, body):
    """Whatever is raised becomes a failure with rank, type, message, traceback, exit code, time and line."""
    f, place = cell(ON_RANK_1.format(body))
    run = study(f)
    root, echo = run.failures
    kind, message = EXCEPTIONS[body]
    assert (root.rank, root.role, root.type, root.exitcode, root.signal) == (1, "root", kind, 1, None)
    assert root.message == message or message is None
    assert str(root.where) == place
    assert f"{place}, in f\n" in root.traceback
    assert f"{body}  # here" in root.traceback
    assert 0 < root.time_s < run.elapsed_s
    assert (echo.rank, echo.role) == (0, "echo")


def test_causes_and_groups_are_in_the_traceback(cell):
    """The traceback holds the cause and every member of a group."""
    f, _ = cell(ON_RANK_1.format("raise ExceptionGroup('g', [ValueError('x'), KeyError('y')]) from OSError('why')"))
    told = study(f).failures[0].traceback
    assert all(part in told for part in ("ValueError: x", "KeyError: 'y'", "OSError: why", "direct cause"))


def test_endless_recursion_is_told_in_few_lines(cell):
    """A RecursionError names the function's line, and repeated lines are left out."""
    f, place = cell(ON_RANK_1.format("deeper(0)"))
    root = study(f).failures[0]
    assert (root.type, root.where.function) == ("RecursionError", "deeper")
    assert f"{place}, in f" in root.traceback
    assert len(root.traceback.splitlines()) < 30


ENDS = {  # how the process of rank 1 ends without an exception: its type, exit code and signal
    "os._exit(0)": ("exit code 0", 0, None),
    "os._exit(3)": ("exit code 3", 3, None),
    "os.kill(os.getpid(), signal.SIGKILL)": ("SIGKILL", -9, "SIGKILL"),
    "os.kill(os.getpid(), signal.SIGTERM)": ("SIGTERM", -15, "SIGTERM"),
    "ctypes.string_at(0)": ("SIGSEGV", -11, "SIGSEGV"),
    "os.abort()": ("SIGABRT", -6, "SIGABRT"),
}


@pytest.mark.parametrize("body", ENDS)
def test_a_rank_that_ends_without_an_exception_is_the_root(cell, body):
    """An exit or a signal is the root cause, though the peers noticed it first, and its last lines are told."""
    f, _ = cell(ON_RANK_1.format(f"print('last words'); {body}"))
    run = study(f)
    root, echo = run.failures
    assert (root.rank, root.role, (root.type, root.exitcode, root.signal)) == (1, "root", ENDS[body])
    assert (echo.rank, echo.role, echo.type) == (0, "echo", "RuntimeError")
    assert "last words" in run.report()
    assert run.verdict() == f"rank 1 of 2 failed first: {root.type}: the process ended without a Python exception"


def test_a_request_to_end_is_not_called_a_crash(cell):
    """The advice after SIGTERM does not blame native code."""
    f, _ = cell(ON_RANK_1.format("os.kill(os.getpid(), signal.SIGTERM)"))
    assert "crashed" not in study(f).report()


def test_gloo_aborts_when_a_message_is_too_long(cell):
    """A peer that sends more than fits makes Gloo abort: that rank is the root, and Gloo's words are shown."""
    f, _ = cell(ON_RANK_1.format("dist.all_reduce(torch.ones(40_000))"))
    run = study(f)
    assert (run.failures[0].role, run.failures[0].signal) == ("root", "SIGABRT")
    assert "collective mismatch" in run.report()
    assert "different sizes" in run.report()


def test_the_first_of_two_failures_is_the_root_cause(cell):
    """A rank that fails later, by itself, is told after the first, though its number is lower."""
    text = "def f():\n    if is_rank(1):\n        raise KeyError('first')  # here\n"
    text += "    try:\n        dist.recv(torch.ones(1), src=1)\n    except RuntimeError:\n        pass\n"
    f, place = cell(text + "    raise ValueError('second')\n")
    run = study(f)
    assert [(failure.rank, failure.role, failure.type) for failure in run.failures] == [
        (1, "root", "KeyError"),
        (0, "root", "ValueError"),
    ]
    assert run.verdict() == f"rank 1 of 2 failed first: KeyError in {place}: 'first'"
    assert "rank 0 failed too: ValueError" in run.report()


def test_an_exception_raised_because_of_an_echo_is_an_echo(cell):
    """What a rank makes of the news that its peer is gone does not become a cause."""
    text = "def f():\n    if is_rank(1):\n        os._exit(3)\n    try:\n        dist.recv(torch.ones(1), src=1)\n"
    f, _ = cell(text + "    except RuntimeError as error:\n        raise OSError('my own words') from error\n")
    assert [(failure.rank, failure.role) for failure in study(f).failures] == [(1, "root"), (0, "echo")]


def test_peers_that_still_compute_are_stopped_with_their_line(cell):
    """After a short grace the other ranks are stopped, and it is told where they were."""
    text = "def f():\n    if is_rank(1):\n        raise ValueError('x')\n    while is_rank(0):\n        pass\n"
    f, place = cell(text + "    time.sleep(100)  # here\n")
    run = study(f, world_size=3, timeout_s=300)
    assert run.elapsed_s < 30
    assert [(failure.rank, failure.role, failure.type) for failure in run.failures[1:]] == [
        (0, "stopped", "Stopped"),
        (2, "stopped", "Stopped"),
    ]
    assert run.failures[2].where.source == "time.sleep(100)  # here"
    assert f"rank 2 is at {place}: time.sleep(100)" in run.report()


def test_all_ranks_that_fail_alike_give_one_verdict(cell):
    """The same failure of all ranks is one sentence, the same ten times over."""
    f, place = cell("def f():\n    raise ValueError('no')  # here\n")
    verdicts = {study(f, world_size=3).verdict() for _ in range(10)}
    assert verdicts == {f"ranks 0, 1, 2 of 3 failed: ValueError in {place}: no"}


LATE = """\
class Late:
    def __reduce__(self):  # a rank makes its arguments before it joins the group
        return be_late, ()

def be_late():
    class LateGloo(dist.ProcessGroupGloo):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            end = time.monotonic() + 0.5
            while not os.path.exists("begun") and time.monotonic() < end:
                time.sleep(0.01)
            if os.path.exists("begun"):
                raise RuntimeError("rank 0 began before rank 1 had joined")
    if os.environ["RANK"] == "1":
        dist.distributed_c10d.ProcessGroupGloo = LateGloo

def f(_):
    open("begun", "w").close()
"""


def test_no_function_begins_before_all_ranks_have_joined(cell, tmp_path, monkeypatch):
    """Else a rank that soon returns cuts off a slower peer that still connects, and a good run fails."""
    monkeypatch.chdir(tmp_path)
    f, _ = cell(LATE)
    launch(f, vars(sys.modules["__main__"])["Late"](), backend="gloo", view="quiet")


def test_who_is_left_behind_is_the_root(cell):
    """A rank whose peer returned early is the root cause and no echo, and the peer's value is kept."""
    f, _ = cell(LEFT_EARLY)
    run = study(f)
    assert [(failure.rank, failure.role) for failure in run.failures] == [(0, "root")]
    assert dict(run.returned) == {1: "early"}
    with pytest.raises(RankFailedError):
        run.results  # noqa: B018


@pytest.mark.parametrize("text", [ON_RANK_1.format("raise ValueError('one\\ntwo')"), LEFT_EARLY])
def test_the_message_is_one_sentence_and_always_the_same(cell, text):
    """str(error) is one line without pids, ports and places in Gloo's source, the same each time."""
    f, _ = cell(text)
    messages = set()
    for _ in range(5):
        with pytest.raises(RankFailedError) as caught:
            launch(f, backend="gloo", view="quiet")
        messages.add(str(caught.value))
    (message,) = messages
    assert "\n" not in message
    assert "127.0.0.1" not in message
    assert ".cc:" not in message


def test_the_error_carries_the_run_and_the_traceback(cell):
    """RankFailedError is a DdplabError with the run, and its note holds the rank's traceback."""
    f, place = cell(ON_RANK_1.format("raise ValueError('no')"))
    with pytest.raises(RankFailedError) as caught:
        launch(f, backend="gloo", view="quiet")
    error = caught.value
    assert isinstance(error, DdplabError)
    assert not isinstance(error, RankTimeoutError)
    assert error.run.failures[0].rank == 1
    assert str(error) == f"rank 1 of 2 failed first: ValueError in {place}: no"
    assert "raise ValueError('no')  # here" in "".join(traceback.format_exception(error))
    assert error.__notes__ == [error.report]


@pytest.mark.parametrize("kind", [RankFailedError, RankTimeoutError])
def test_the_error_can_be_pickled(cell, kind):
    """The error travels to another process with message, note and run, also after the run was looked at."""
    body = "time.sleep(100)" if kind is RankTimeoutError else "raise ValueError('no')"
    f, _ = cell(f"def f():\n    if is_rank(1):\n        return 5\n    {body}\n")
    with pytest.raises(kind) as caught:
        launch(f, backend="gloo", view="quiet", timeout_s=1)
    assert dict(caught.value.run.returned) == {1: 5}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.__notes__) == (kind, str(caught.value), caught.value.__notes__)
    assert again.run.failures == caught.value.run.failures


def test_a_failure_in_init_is_told_as_such(cell):
    """Where the process group cannot be made, that is said for all ranks, long before the time-out."""
    f, _ = cell("def f():\n    return 1\n")
    began = time.monotonic()
    run = study(f, env={"GLOO_SOCKET_IFNAME": "no_such_interface"}, timeout_s=300)
    assert time.monotonic() - began < 30
    assert run.verdict().startswith("ranks 0, 1 of 2 failed: RuntimeError")
    assert "no_such_interface" in run.verdict()
    assert "init_process_group" in run.report()


def test_a_bad_time_out_in_the_function_names_its_line(cell):
    """With backend=None the failing init_process_group of the cell is named."""
    f, place = cell("def f():\n    dist.init_process_group('gloo', timeout=5)  # here\n")
    run = study(f, backend=None)
    assert str(run.failures[0].where) == place
    assert run.failures[0].type == "TypeError"


def test_a_failing_loader_worker_shows_the_line_of_the_cell(cell):
    """An error in a process that a DataLoader started is told with the line of the dataset."""
    data = "class Bad(torch.utils.data.Dataset):\n    def __len__(self):\n        return 2\n"
    data += "    def __getitem__(self, index):\n        return 1 / 0  # here\n"
    f, place = cell(data + "def f():\n    return list(torch.utils.data.DataLoader(Bad(), num_workers=1))\n")
    run = study(f, world_size=1)
    assert run.failures[0].type == "ZeroDivisionError"
    assert f"{place}, in __getitem__" in run.failures[0].traceback
    assert "\n" not in run.verdict()
