"""explain: texts as people paste them, exceptions, runs, long logs, and what it does not know."""

import io
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import gone_peer, loading, raised, run_of, waiting

import ddplab
from ddplab import cli, logs
from ddplab import events as ev
from ddplab.explanation import UNKNOWN, Explanation, explain

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.5]:28"
)
TWICE = "ValueError: trying to initialize the default process group twice!"
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
TORCHRUN = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
KeyError: 'images'
E0417 10:00:02.000000 139 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 4243) of binary: /usr/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2024-04-17_10:00:02
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 4242)
  traceback : Signal 15 (SIGTERM) received by PID 4242
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4243)
"""


def roles(told: Explanation) -> list[tuple[str, str]]:
    return [(one.rank, one.role) for one in told.evidence]


# Texts -------------------------------------------------------------------------------------------------


def test_the_cause_beats_the_echoes_of_other_ranks() -> None:
    """A watchdog and a lost peer are echoes where one rank says why, wherever it stands in the log."""
    told = explain(f"[rank0]: {LOST}\n[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] {WATCHDOG}\n[rank2]: {OOM}")
    assert told.id == "gpu-memory" and told.category == "resource" and told.sure == "the text says so"
    assert roles(told) == [("rank 0", "echo"), ("rank 1", "echo"), ("rank 2", "shows it")]


def test_evidence_is_in_the_order_of_its_times() -> None:
    """Lines of several files pasted one after another are put in order by their clocks."""
    text = f"[rank0]:[E417 10:00:09.5 x.cpp:6] {LOST}\n[rank1]:[E417 10:00:01.5 x.cpp:6] {OOM}"
    told = explain(text)
    assert [one.time for one in told.evidence] == ["417 10:00:01.5", "417 10:00:09.5"]
    assert roles(told) == [("rank 1", "shows it"), ("rank 0", "echo")]


def test_a_rank_that_raised_by_itself_is_the_cause() -> None:
    """An exception that no entry knows is the root of what the others only felt."""
    told = explain(f"[rank0]: {LOST}\n[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'images'")
    assert told.id == "peer-raised" and told.sentence.startswith("Rank 1 raised") and "KeyError" in told.sentence
    assert ("rank 0", "echo") in roles(told)


def test_a_report_of_torchrun_leads_to_the_exception() -> None:
    """The launcher's report and the ranks that it stopped are no cause."""
    told = explain(TORCHRUN)
    assert told.category in ("communication", "launcher_notebook") and "KeyError: 'images'" in told.sentence


def test_torchrun_without_a_traceback_says_where_to_look() -> None:
    """Only the wrapper is there: the answer is no more than a guess, and the first step is the rank's own log."""
    told = explain("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED")
    assert told.id == "rank-raised" and "guess" in told.sure and "traceback" in told.steps[0]


@pytest.mark.parametrize(
    "text",
    [
        f"\x1b[31m{TWICE}\x1b[0m",
        f"[default3]:{TWICE}",
        f"[rank3]: {TWICE}",
        f"(RayWorkerWrapper pid=812, ip=10.0.0.2) {TWICE}",
        f"2024-04-17 10:00:01,123 - ERROR - {TWICE}",
        f"[1,3]<stderr>: {TWICE}",
        f"worker-3  | {TWICE}",
        f"> > {TWICE}",
        f"E   {TWICE}",
        "ValueError: trying to initialize the default\n    process group twice!",
        "[rank0]: ValueError: trying to initialize the def\n[rank0]: ault process group twice!",
        "[rank0]: ValueError: trying to initialize the\n[rank1]: hello\n[rank0]: default process group twice!",
        TWICE.upper(),
        f"first line\r\n{TWICE}\r\nlast line\r\n",
        f"  0%|          | 0/10\r 10%|#         | 1/10\r{TWICE}",
        '{"log": "Traceback\\n  File x\\n  call\\nValueError: trying to initialize the default process group twice!\\n"}',
        f'  File "C:\\Users\\me\\train.py", line 3, in <module>\n    dist.init_process_group("gloo")\n{TWICE}',
        f"0: starting\n1: starting\n1: {TWICE}\n0: done",
    ],
)
def test_wrapping_colours_and_prefixes_do_not_matter(text: str) -> None:
    """The same error in the dress of many loggers and launchers."""
    assert explain(text).id == "init-twice"


@pytest.mark.parametrize(
    ("line", "source", "time", "text"),
    [
        ("[rank3]:[E417 10:00:01.5 ProcessGroupNCCL.cpp:616] [Rank 3] hi", "rank 3", "417 10:00:01.5", "hi"),
        ("[E ProcessGroupNCCL.cpp:616] [Rank 1] hi", "rank 1", "", "hi"),
        ("(RayWorkerWrapper pid=812, ip=10.0.0.2) hi", "RayWorkerWrapper pid=812", "", "hi"),
        ("node7:4711:4720 [3] NCCL INFO hi", "node7 pid 4711", "", "NCCL INFO hi"),
        ("2024-04-17T10:00:01.123Z hi", "", "2024-04-17 10:00:01.123", "hi"),
        ("rank 1 ! hi", "rank 1", "", "hi"),
        ("hi [rank3]: there", "", "", "hi [rank3]: there"),
    ],
)
def test_a_line_tells_who_said_it_and_when(line: str, source: str, time: str, text: str) -> None:
    """Rank and time come from the prefix, and the text is what is left."""
    [read] = logs.read(line)
    assert (read.source, read.time, read.text) == (source, time, text)


@pytest.mark.parametrize(
    "text",
    ["", "\n \n", "hello", "ValueError: expected 4 shards, got 3", "ModuleNotFoundError: No module named 'numpy'",
     "epoch 3 loss 0.5\nepoch 4 loss 0.4", "\x00\x01\xfe" * 500, "SyntaxError: invalid syntax",
     "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 2x1)"],
)  # fmt: skip
def test_what_is_not_known_is_said_to_be_unknown(text: str) -> None:
    """No guess: the answer is what to collect."""
    told = explain(text)
    assert not told.known and told.sentence == UNKNOWN and not told.category and not told.cause
    assert "TORCH_DISTRIBUTED_DEBUG" in str(told) and "NCCL_DEBUG=INFO" in str(told)


def test_binary_garbage_is_read() -> None:
    """Bytes that are no text do no harm, and an error among them is found."""
    garbage = bytes(range(256)) * 40
    assert not explain(io.BytesIO(garbage)).known
    assert explain(io.BytesIO(garbage + b"\n" + TWICE.encode() + b"\n" + garbage)).id == "init-twice"


def test_a_log_of_powershell_is_read() -> None:
    """What Windows writes as UTF-16 is text too."""
    assert explain(io.BytesIO(f"starting\r\n{TWICE}\r\n".encode("utf-16"))).id == "init-twice"


def test_numbers_that_were_left_out_do_not_matter() -> None:
    """People replace pids, ports and counts before they paste."""
    assert explain("RuntimeError: wait timeout after <n>ms, keys: /k").id == "store-wait"
    assert (
        explain("DDP expects same model across all ranks, rank <m> has inconsistent <b> params").id == "models-differ"
    )


# Long logs ---------------------------------------------------------------------------------------------


class Endless(io.RawIOBase):
    """A log that is made while it is read, and never lies in memory as a whole."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = self._made(num_blocks)
        self.num_bytes = 0

    def _made(self, num_blocks: int) -> Iterator[bytes]:
        for block in range(num_blocks):
            yield b"".join(
                b"[rank%d]: step %d loss 0.%d warning %x\n" % (at % 8, block, at, hash((block, at)))
                for at in range(2000)
            )
            if block == num_blocks // 2:
                yield f"[rank5]: {OOM}\n".encode() + 9 * f"[rank1]: {LOST}\n".encode()

    def read(self, size: int = -1) -> bytes:
        data = next(self.blocks, b"")
        self.num_bytes += len(data)
        return data


def test_a_long_log_is_read_in_bounded_memory() -> None:
    """Ten times the log keeps no more lines, and the error in its middle is found with its number."""
    few, many = Endless(40), Endless(400)
    sizes = [sum(len(line.text) for line in logs.read(log)) for log in (few, many)]  # type: ignore[arg-type]
    assert many.num_bytes > 30_000_000 and sizes[1] < 1_000_000
    told = explain(Endless(100))
    assert told.id == "gpu-memory" and told.evidence[0].number == 51 * 2000 + 1 and told.evidence[0].rank == "rank 5"


def test_a_line_without_an_end_is_cut() -> None:
    """A log that is one line of many megabytes costs no memory."""
    told = explain(io.BytesIO(b"x" * 9_000_000 + b"\n" + TWICE.encode()))
    assert told.id == "init-twice"


# Exceptions and runs -----------------------------------------------------------------------------------


def test_an_exception_is_explained_with_what_caused_it() -> None:
    """The chain and the members of a group count."""
    try:
        try:
            raise ValueError("trying to initialize the default process group twice!")
        except ValueError as error:
            raise RuntimeError("training failed") from error
    except RuntimeError as error:
        assert explain(error).id == "init-twice"
    group = ExceptionGroup("ranks failed", [KeyError("x"), RuntimeError(f"Caught: {OOM}")])
    assert explain(group).id == "gpu-memory"


def test_a_run_is_explained_by_its_root() -> None:
    """What the first rank said counts; the rank that lost it is an echo, whatever came first in the log."""
    run = run_of(gone_peer(0, 0.1), raised(1, 0.2, "ValueError", TWICE.partition(": ")[2]))
    told = explain(run)
    assert told.id == "init-twice" and ("rank 0", "echo") in roles(told)
    assert all(one.number == 0 for one in told.evidence)


def test_a_run_with_an_own_exception_names_it() -> None:
    """The learner's own exception is the cause, though no catalogue holds it."""
    told = explain(run_of(gone_peer(0, 0.1), raised(1, 0.2)))
    assert told.id == "peer-raised" and "rank 1 of 2 failed first: ValueError in cell In[7], line 3" in told.sentence
    assert explain(run_of(raised(0, 0.2), world_size=1)).id == "rank-raised"


def test_a_rank_failed_error_is_explained_by_its_run() -> None:
    """What launch raises carries the run."""
    run = run_of(gone_peer(0, 0.1), raised(1, 0.2))
    with pytest.raises(ddplab.RankFailedError) as caught:
        run.check()
    assert explain(caught.value) == explain(run)


def test_a_report_of_a_run_names_a_known_cause() -> None:
    """What launch raises ends with a line of explain, if the text names the cause; else it stays as it was."""
    known = run_of(raised(0, 0.2, "ValueError", TWICE.partition(": ")[2]), gone_peer(1, 0.3))
    last = "explain(run) says more: init_process_group was called twice in one process."
    assert known.report().splitlines()[-1] == last and "next: mend" in known.report()
    for run in (run_of(raised(0, 0.2), gone_peer(1, 0.3)), run_of(gone_peer(0, 0.1), ev.Result(1, 0.1, 1))):
        assert run.report().splitlines()[-1].startswith("next: ")


def test_a_killed_rank_and_a_hang_are_explained() -> None:
    """Ends without an exception, and runs that were stopped."""
    assert explain(run_of(ev.Exited(0, 1.0, -9), gone_peer(1, 1.1))).id == "killed"
    call = ev.Call(1, 0.1, "all_reduce", 5, "", (10,), "float32", "SUM", None, None, None)
    told = explain(
        run_of(
            *waiting(1, 60.0, "timeout"),
            call,
            replace(call, rank=0, number=4, end_s=0.2),
            ev.Result(0, 0.3, 1),
        )
    )
    assert told.id == "call-missing"
    assert not explain(run_of(*loading(0, 60.0), world_size=1)).known


def test_the_calls_of_the_ranks_count_where_the_text_says_little() -> None:
    """A lost peer is explained by the call that is missing; an exception of a rank's own is not."""
    call = ev.Call(
        0, 0.1, "all_reduce", 5, "", (10,), "float32", "SUM", None, ev.Where("cell In[7]", 5, "train", "", ""), None
    )
    calls = call, replace(call, rank=1, number=4, end_s=0.2)
    told = explain(run_of(*calls, gone_peer(0, 0.3), ev.Result(1, 0.25, None)))
    assert told.id == "call-missing" and "rank 1 made 4 collective calls and returned" in told.evidence[1].text
    assert explain(run_of(*calls, raised(0, 0.3), ev.Result(1, 0.25, None))).id == "rank-raised"


def test_a_silent_difference_of_a_good_run_is_told() -> None:
    """Ranks that reduce with different operations raise nothing, and get wrong numbers."""
    call = ev.Call(0, 0.1, "all_reduce", 1, "", (10,), "float32", "SUM", None, None, 0.2)
    run = run_of(call, replace(call, rank=1, op="MAX"), ev.Result(0, 1.0, 1), ev.Result(1, 1.0, 2))
    assert explain(run).id == "reduce-op-differs"


def test_a_good_run_has_nothing_to_explain() -> None:
    """No failure, no cause."""
    told = explain(run_of(ev.Result(0, 1.0, 1), ev.Result(1, 1.0, 2)))
    assert told.known and told.sentence == "Nothing failed: 2 of 2 ranks returned a value." and not told.steps


@pytest.mark.parametrize("thing", [None, 3, b"bytes", ["a"], io.StringIO("text"), ValueError])
def test_other_things_are_refused(thing: object) -> None:
    """The message says what explain takes."""
    with pytest.raises(TypeError, match="takes a Run, an exception, a text, a path"):
        explain(thing)  # type: ignore[arg-type]


# How it shows ------------------------------------------------------------------------------------------


def test_it_shows_in_a_terminal_and_in_a_cell() -> None:
    """The sentence first, then kind, evidence, cause and steps; what comes from a log cannot be HTML."""
    told = explain(f"[rank1]: {OOM} <script>alert(1)</script>")
    text = str(told)
    assert text.startswith(told.sentence) and repr(told) == text and max(map(len, text.splitlines())) <= 120
    order = [text.index(part) for part in ("  kind", "evidence", "likely", "  next")]
    assert order == sorted(order) and "1. " in text and "2. " in text
    assert "&lt;script&gt;" in told._repr_html_() and "<script>" not in told._repr_html_()


def test_explain_is_a_public_name() -> None:
    """The package offers the function, not a module of that name."""
    assert ddplab.explain is explain and ddplab.Explanation is Explanation


def test_torch_is_not_needed() -> None:
    """Reading a log does not wait for torch."""
    code = "import sys; from ddplab.explanation import explain; explain('CUDA out of memory'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_command_reads_a_file_or_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code says whether the error was known."""
    (tmp_path / "log").write_text(TWICE)
    assert cli.main(["explain", str(tmp_path / "log")]) == 0
    assert "init-twice" in capsys.readouterr().out
    for arguments in (["explain"], ["explain", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
        assert cli.main(arguments) == 1
        assert UNKNOWN in capsys.readouterr().out
    assert cli.main(["explain", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err
