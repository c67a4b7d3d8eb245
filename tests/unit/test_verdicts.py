"""What came first, what only followed, and how it is told: pure functions of recorded events."""

from dataclasses import replace

import pytest
from recorded import gone_peer, loading, raised, run_of, waiting

from ddplab import RankFailedError, RankTimeoutError
from ddplab import events as ev


def test_a_run_without_failures_says_nothing() -> None:
    """All ranks returned: no verdict, no report, no exception."""
    run = run_of(ev.Result(0, 0.1, 1), ev.Result(1, 0.1, 2))
    assert (run.ok, run.failures, run.verdict(), run.report()) == (True, (), "", "")
    assert run.check() is None


def test_a_peer_that_noticed_first_is_still_an_echo() -> None:
    """A killed rank is noticed later than the error of its peer, and yet it is the root cause."""
    run = run_of(gone_peer(0, 0.10), ev.Exited(0, 0.11, 1), ev.Exited(1, 0.12, -9))
    assert [(f.rank, f.role, f.type, f.signal) for f in run.failures] == [
        (1, "root", "SIGKILL", "SIGKILL"),
        (0, "echo", "RuntimeError", None),
    ]


def test_an_echo_of_nothing_is_the_root() -> None:
    """If the peer left early with success, the rank that lost it is where to look."""
    run = run_of(gone_peer(0, 0.1), ev.Result(1, 0.05, None))
    assert [(f.rank, f.role) for f in run.failures] == [(0, "root")]


def test_an_echo_may_be_wrapped() -> None:
    """An exception that was raised from a lost connection is an echo too: its traceback tells."""
    wrapped = ev.Failed(0, 0.1, "MyError", "sync failed", "RuntimeError: Connection reset by peer\n...", None)
    run = run_of(wrapped, raised(1, 0.2))
    assert [(f.rank, f.role) for f in run.failures] == [(1, "root"), (0, "echo")]


def test_a_worker_that_lost_an_rpc_peer_is_an_echo() -> None:
    """TensorPipe calls it "eof"."""
    eof = raised(
        0, 0.1, "RuntimeError", "eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:302)"
    )
    assert [(f.rank, f.role) for f in run_of(eof, ev.Exited(1, 0.2, -9)).failures] == [(1, "root"), (0, "echo")]


def test_an_independent_failure_is_no_echo() -> None:
    """A later error that has nothing to do with a lost peer is a root cause of its own."""
    run = run_of(raised(1, 0.2, "KeyError", line=8), raised(0, 0.1))
    assert [(f.rank, f.role) for f in run.failures] == [(0, "root"), (1, "root")]


def test_ranks_that_fail_alike_are_told_in_rank_order() -> None:
    """Which of several equal failures was quicker by a millisecond does not change the message."""
    fast, slow = (0.100, 0.101), (0.101, 0.100)
    verdicts = {run_of(raised(0, a), raised(1, b)).verdict() for a, b in (fast, slow)}
    assert verdicts == {"ranks 0, 1 of 2 failed: ValueError in cell In[7], line 3: bad"}


def test_ranks_that_fail_alike_keep_their_own_words() -> None:
    """Was a bug: of two ranks that failed in one line with different texts, the second text was lost."""
    report = run_of(raised(0, 0.1, message="shard 0"), raised(1, 0.1, message="shard 1")).report()
    assert "rank 1 said: shard 1" in report.splitlines()


def test_the_verdict_names_rank_line_and_reason() -> None:
    """One sentence: who failed first, where, and why."""
    run = run_of(raised(1, 0.1), *waiting(0, 1.1, "failure"), gone_peer(2, 0.2), world_size=3)
    assert run.verdict() == "rank 1 of 3 failed first: ValueError in cell In[7], line 3: bad"


def test_the_report_tells_what_the_others_did_and_what_to_do() -> None:
    """Traceback of the first, then a line for those that failed or waited alike, then a next step."""
    run = run_of(
        raised(1, 0.1), *waiting(0, 1.1, "failure"), *waiting(3, 1.1, "failure"), gone_peer(2, 0.2), world_size=4
    )
    assert run.report().splitlines() == [
        "traceback of rank 1:",
        "  Traceback ...",
        "  ValueError: bad",
        "rank 2 lost a peer, and so failed too: RuntimeError in cell In[7], line 5",
        "ranks 0, 3 are at cell In[7], line 9: dist.all_reduce(x), in torch's all_reduce",
        "next: mend cell In[7], line 3; the other ranks did not fail by themselves.",
    ]


def test_a_time_out_is_told_as_such() -> None:
    """Ranks that did not finish in time raise an error that is a TimeoutError too."""
    run = run_of(*waiting(0, 2.0, "timeout"), *waiting(1, 2.0, "timeout", line=4), timeout_s=2)
    assert run.verdict() == "ranks 0, 1 of 2: still running after 2 s"
    try:
        run.check()
    except RankTimeoutError as error:
        assert isinstance(error, TimeoutError)
        assert error.run is run


def test_what_a_rank_says_after_it_was_stopped_is_no_failure() -> None:
    """Was a bug: ranks ended one by one, and the last of them took the loss of its peers for the cause."""
    stopped = ev.Stopped(0, 2.0, "timeout"), ev.Stopped(1, 2.0, "timeout")
    run = run_of(*stopped, gone_peer(1, 2.01), ev.Exited(0, 2.02, -9), ev.Exited(1, 2.02, 1), timeout_s=2)
    assert [(f.rank, f.type) for f in run.failures] == [(0, "Timeout"), (1, "Timeout")]


def test_a_process_that_ends_without_a_word_is_a_failure() -> None:
    """os._exit(0) gives no value, so it is no success."""
    run = run_of(ev.Line(0, 0.1, "stdout", "bye"), ev.Exited(0, 0.2, 0), ev.Result(1, 0.1, 5))
    assert not run.ok
    assert run.verdict() == "rank 0 of 2 failed: exit code 0: the process ended without a Python exception"
    assert "  bye" in run.report()
    assert run.returned == {1: 5}


def test_a_value_counts_however_its_process_ends() -> None:
    """A rank that has returned and then dies at exit does not turn a good run into a failed one."""
    assert run_of(ev.Result(0, 0.1, 1), ev.Exited(0, 0.2, -6), ev.Result(1, 0.1, 2), world_size=2).ok


def test_results_raise_what_went_wrong() -> None:
    """``results`` never hides a failure; the error carries the run."""
    run = run_of(raised(0, 0.1), ev.Result(1, 0.1, 7))
    try:
        run.results  # noqa: B018
    except RankFailedError as error:
        assert error.run.returned == {1: 7}
        assert "traceback of rank 0" in error.__notes__[0]
    else:
        raise AssertionError("results of a failed run must raise")


def test_many_ranks_are_counted_not_listed() -> None:
    """The verdict on 64 ranks stays a sentence."""
    run = run_of(*(raised(rank, 0.1) for rank in range(64)), world_size=64)
    assert run.verdict().startswith("ranks 0, 1, 2 and 61 more of 64 failed: ValueError")


# The next step ----------------------------------------------------------------------------------------


def next_step(*events: ev.Event, world_size: int = 2) -> str:
    """The last line of the report."""
    return run_of(*events, world_size=world_size).report().splitlines()[-1]


MEND = "next: mend cell In[7], line 3."
COMPARE = "next: compare these lines: all ranks must make the same collective calls."


@pytest.mark.parametrize(
    ("type", "message"), [("EOFError", "EOF when reading a line"), ("BdbQuit", "")], ids=["input", "debugger"]
)
def test_a_rank_without_a_keyboard_is_not_told_to_mend_its_line(type: str, message: str) -> None:
    """input() and breakpoint() cannot work in a rank; the advice says why, and what to do in their place."""
    assert next_step(raised(1, 0.1, type, message)).startswith("next: ranks have no keyboard")


@pytest.mark.parametrize(
    ("type", "message"), [("EOFError", "Ran out of input"), ("ValueError", "EOF when reading a line"), ("Quit", "")]
)
def test_another_error_is_not_taken_for_a_missing_keyboard(type: str, message: str) -> None:
    """pickle raises an EOFError too, of a file that is cut off."""
    assert next_step(raised(1, 0.1, type, message)) == MEND


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("DataLoader worker (pid 71) is killed by signal: Killed. ", "a DataLoader worker died"),
        ("DataLoader worker (pid(s) 71) exited unexpectedly", "a DataLoader worker died"),
        ("DataLoader timed out after 5 seconds", "a DataLoader worker gave no batch in time"),
        (
            "Caught KeyError in DataLoader worker process 0.\nOriginal ...",
            "the last lines of the traceback name the line",
        ),
    ],
)
def test_a_failed_dataloader_worker_is_told_from_the_line_of_its_rank(message: str, advice: str) -> None:
    """Was a bug: torch raises these in whatever line the rank is at, and the advice was to mend that line."""
    assert next_step(raised(1, 0.1, "RuntimeError", message), gone_peer(0, 0.2)).startswith(f"next: {advice}")


@pytest.mark.parametrize(
    "message",
    ["my DataLoader worker (pid 71) is slow", "DataLoader: no samples", "Caught KeyError in pin memory thread"],
)
def test_another_error_around_a_dataloader_keeps_its_line(message: str) -> None:
    """Words that only resemble torch's do not."""
    assert next_step(raised(1, 0.1, "RuntimeError", message)) == MEND


def test_a_dead_dataloader_worker_is_a_cause_and_its_process_id_is_not_told() -> None:
    """Was a bug: with a ConnectionError in its traceback it passed for an echo, and its text changed each time."""
    error = raised(1, 0.1, "RuntimeError", "DataLoader worker (pid(s) 71, 72) exited unexpectedly")
    run = run_of(replace(error, traceback="... Connection reset by peer ..."), gone_peer(0, 0.2))
    assert [(failure.rank, failure.role) for failure in run.failures] == [(1, "root"), (0, "echo")]
    assert run.verdict().endswith(": DataLoader worker exited unexpectedly")


def test_a_batch_that_cannot_be_fetched_points_to_the_worker() -> None:
    """A rank that fetches a tensor from a worker that is gone gets a ConnectionError of Python, not of Gloo."""
    error = raised(1, 0.1, "ConnectionResetError", "[Errno 104] Connection reset by peer")
    told = replace(error, traceback='File "x/torch/utils/data/dataloader.py", line 1434, in _try_get_data\n...')
    assert next_step(told, gone_peer(0, 0.2)).startswith("next: a DataLoader worker has probably died")
    assert "find the rank that ended" in next_step(error, gone_peer(0, 0.2))


def test_a_hang_in_a_dataloader_names_who_waits_for_it() -> None:
    """One rank waits for a batch, the others for that rank."""
    step = next_step(*waiting(0, 2.0, "timeout"), *loading(1, 2.0))
    assert step.startswith(
        "next: rank 1 waits for a DataLoader, and so for its workers if it has any. With num_workers=0"
    )
    assert next_step(*loading(0, 2.0), *loading(1, 2.0)).startswith("next: ranks 0, 1 wait for a DataLoader")


@pytest.mark.parametrize(
    "other",
    [
        waiting(1, 2.0, "timeout"),
        loading(1, 2.0, "DataLoader.__init__"),
        (*loading(1, 2.0), *waiting(2, 2.0, "timeout", 5, "time.sleep(9)", "")),
        (*loading(1, 2.0), ev.Located(2, 2.0, None, "it is stopped"), ev.Stopped(2, 2.0, "timeout")),
    ],
    ids=["no loader", "being made", "another is in its own line", "another is silent"],
)
def test_a_hang_is_not_blamed_on_a_dataloader_without_evidence(other: tuple[ev.Event, ...]) -> None:
    """A rank that is in no call of torch, or that does not answer, is a better suspect."""
    assert next_step(*waiting(0, 2.0, "timeout"), *other, world_size=3).startswith(COMPARE)


def test_after_the_time_out_of_a_group_the_late_rank_is_sought() -> None:
    """The ranks that raise are those that were in time; some say that they waited, others that a peer is gone."""
    timed_out = raised(0, 0.6, "RuntimeError", "[x/unbound_buffer.cc:78] Timed out waiting 500ms for recv operation", 5)
    assert "find the rank that came late" in next_step(timed_out, gone_peer(1, 0.6))
    assert "find the rank that came late" in next_step(timed_out, *waiting(1, 1.6, "failure"))
    assert "find the rank that ended or returned early" in next_step(gone_peer(0, 0.6), gone_peer(1, 0.6))


def test_a_hang_in_rpc_sends_one_to_the_other_worker() -> None:
    """An RPC is no collective: the advice is another."""
    run = run_of(*waiting(0, 3.0, "timeout", source="rpc.rpc_sync(...)", call="rpc_sync"), *waiting(1, 3.0, "timeout"))
    assert (
        run.report().splitlines()[-1].startswith("next: find the worker that does not answer: each must call init_rpc")
    )


def test_an_answer_that_came_late_is_better_than_none() -> None:
    """Was a bug: the rank had said where it was, but the launcher had just written down that it did not answer."""
    late = ev.Located(0, 2.1, ev.Where("cell In[1]", 4, "f", "loop()"))
    run = run_of(ev.Located(0, 2.0, None, "it computes"), late, ev.Stopped(0, 2.2, "timeout"), world_size=1)
    assert str(run.failures[0].where) == "cell In[1], line 4"
