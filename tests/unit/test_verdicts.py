"""What came first, what only followed, and how it is told: pure functions of recorded events."""

from recorded import gone_peer, raised, run_of, waiting

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
        "next: mend cell In[7], line 3; the other ranks only waited for this one.",
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
