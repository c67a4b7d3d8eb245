"""What ranks write, by whatever means, is in the run: whole, bounded, and in the same order each time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from ddplab import Run, launch, log
from ddplab.capture import MAX_LINE, MAX_LINES


def written(fn: Callable[..., Any], *args: Any, **options: Any) -> Run:
    """The run of ``fn`` on two ranks without a process group, whether it ends well or not."""
    return launch(fn, *args, **{"backend": None, "allow_failure": True, "view": "quiet", **options})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_prints_are_kept_by_rank_and_stream(world_size: int) -> None:
    """stdout and stderr of each rank are kept apart, and shown together by rank."""

    def speak() -> None:
        rank = os.environ["RANK"]
        print("err", rank, file=sys.stderr)
        print("out", rank)

    run = written(speak, world_size=world_size)
    for rank in range(world_size):
        assert run.output(rank, "stdout") == f"out {rank}"
        assert run.output(rank, "stderr") == f"err {rank}"
        assert run.output(rank) == f"out {rank}\nerr {rank}"
    assert run.output() == "\n".join(
        f"rank {rank} | out {rank}\nrank {rank} ! err {rank}" for rank in range(world_size)
    )


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_writes_below_python_are_kept(start_method: str) -> None:
    """What C code and sub-processes write to descriptors 1 and 2 is kept like a print."""

    def speak() -> None:
        import ctypes

        print("python")
        os.write(1, b"write\n")
        libc = ctypes.CDLL(None)
        libc.printf(b"printf\n")
        libc.fflush(None)
        subprocess.run(["sh", "-c", "echo sh; echo careful >&2"], check=True)
        os.write(2, b"write 2\n")

    run = written(speak, start_method=start_method)
    assert run.output(1, "stdout").splitlines() == ["python", "write", "printf", "sh"]
    assert run.output(1, "stderr").splitlines() == ["careful", "write 2"]


def test_what_c_code_left_in_its_buffer_is_kept() -> None:
    """A printf that nobody flushed is out when the rank has ended, as it is when a program ends.

    Was a bug: a rank leaves by os._exit, which knows nothing of C's buffers.
    """

    def speak() -> None:
        import ctypes

        libc = ctypes.CDLL(None)
        sys.buffer_of_c = ctypes.create_string_buffer(1 << 12)  # lives as long as the rank
        # As a C program has it by itself, whatever PYTHONUNBUFFERED made of it.
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), sys.buffer_of_c, 0, len(sys.buffer_of_c))
        libc.printf(b"printf\n")

    assert written(speak).output(0) == "printf"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"no end", "no end"),
        (b"\n\n", "\n"),
        (b"a\r\nb\r\n", "a\nb"),
        (b"10%\r50%\r100%\n", "100%"),
        (b"10%\r50%\r", "50%"),
        ("ä€😀\n".encode(), "ä€😀"),
        (b"\xff\xfe\x00\x01", "\\xff\\xfe\x00\x01"),
        ("€".encode()[:2], "\\xe2\\x82"),
        (b"\x1b[31mred\x1b[0m\n", "\x1b[31mred\x1b[0m"),
    ],
)
def test_any_bytes_become_lines(data: bytes, text: str) -> None:
    """Partial lines, progress bars and bytes that are no text arrive as lines."""
    assert written(lambda: os.write(1, data), world_size=1).output(0) == text


def test_a_character_in_two_pieces_is_whole() -> None:
    """A character whose bytes are written by two calls is one character."""

    def speak() -> None:
        for byte in "€".encode():
            os.write(1, bytes([byte]))

    assert written(speak, world_size=1).output(0) == "€"


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.abort()", "sys.exit(1)"])
def test_the_last_words_before_a_sudden_end_are_kept(end: str) -> None:
    """What a rank wrote without a newline right before it died is in the run."""

    def die() -> None:
        sys.stdout.write("last words")
        sys.stderr.write("and why")
        exec(end)

    run = written(die)
    assert not run.ok
    assert [run.output(rank, "stdout") for rank in (0, 1)] == ["last words"] * 2
    assert [run.output(rank, "stderr") for rank in (0, 1)] == ["and why"] * 2


def test_a_full_pipe_of_a_killed_rank_is_read_to_its_end() -> None:
    """Of 60,000 bytes written right before the end, none is lost."""

    def die() -> None:
        os.write(1, b"x" * 999 + b"\n" + b"y\n" * 900)
        os.write(2, (b"z" * 999 + b"\n") * 57 + b"end")
        os.kill(os.getpid(), signal.SIGKILL)

    run = written(die)
    for rank in (0, 1):
        assert len(run.output(rank, "stdout")) == 999 + 2 * 900
        assert run.output(rank, "stderr").endswith("z\nend")
        assert len(run.output(rank, "stderr")) == 57_003


def flood(num_lines: int) -> Run:
    """The run of two ranks that print ``num_lines`` lines of 100 characters each."""

    def speak() -> None:
        text = "".join(f"{number:0100}\n" for number in range(num_lines))
        for start in range(0, len(text), 1 << 20):
            sys.stdout.write(text[start : start + (1 << 20)])

    return written(speak)


def test_of_a_flood_the_beginning_and_the_end_are_kept() -> None:
    """Of 200,000 lines from each of two ranks, first and last are kept, with the number of those left out."""
    run = flood(200_000)
    for rank in (0, 1):
        lines = run.output(rank).splitlines()
        assert (int(lines[0]), int(lines[-1])) == (0, 199_999)
        assert len(lines) == MAX_LINES + 1
        assert lines[MAX_LINES // 2] == f"... {200_000 - MAX_LINES} lines left out ..."


def test_memory_does_not_grow_with_a_flood() -> None:
    """The launcher's memory is bounded, whatever the ranks print."""

    def peak_bytes(num_lines: int) -> int:
        tracemalloc.start()
        try:
            flood(num_lines)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(60_000) < 16e6  # the text alone is 12 MB, as lines it would be more than 30


def test_one_endless_line_is_cut() -> None:
    """Of a line of 20 MB its beginning and end are kept, with the number of characters left out."""

    def speak() -> None:
        sys.stdout.write("a" + "-" * 20_000_000 + "z\nnext\n")

    line, after = written(speak, world_size=1).output(0).splitlines()
    assert after == "next"
    assert line[0] + line[-1] == "az"
    assert len(line) < 2 * MAX_LINE
    assert f"{20_000_002 - MAX_LINE - MAX_LINE // 2} characters left out" in line


def test_output_is_the_same_each_time() -> None:
    """Ranks that write at the same time are shown in the same order in every launch."""

    def speak() -> None:
        for step in range(50):
            print(step)
            print(step, file=sys.stderr)

    first = written(speak, world_size=3).output()
    assert first.splitlines()[:2] == ["rank 0 | 0", "rank 0 | 1"]
    assert all(written(speak, world_size=3).output() == first for _ in range(3))


def test_metrics_come_by_rank_in_the_order_of_logging() -> None:
    """The rows of log() have rank, step, name and value; 3,000 of each rank all arrive."""

    def train() -> None:
        import torch

        for step in range(1_500):
            log(step=step, loss=1 / (step + 1), accuracy=torch.tensor(step))
        log(done=True)

    rows = written(train).metrics
    assert [row.rank for row in rows] == [0] * 3_001 + [1] * 3_001
    for rank in (0, 1):
        mine = [row for row in rows if row.rank == rank]
        assert [(row.step, row.name) for row in mine[:3]] == [(0, "loss"), (0, "accuracy"), (1, "loss")]
        assert [row.value for row in mine if row.name == "accuracy"] == [float(step) for step in range(1_500)]
        assert (mine[-1].step, mine[-1].name, mine[-1].value) == (None, "done", 1.0)


def test_prints_of_threads_and_forked_children_are_kept() -> None:
    """What a thread or a forked child of a rank prints belongs to that rank."""

    def speak() -> None:
        import multiprocessing
        import threading

        for start in (threading.Thread, multiprocessing.Process):
            part = start(target=print, args=(start.__name__,))
            part.start()
            part.join()

    assert [written(speak).output(rank).splitlines() for rank in (0, 1)] == [["Thread", "Process"]] * 2


@pytest.mark.parametrize("own_session", [False, True], ids=["in the group", "in a session of its own"])
def test_a_child_that_outlives_its_rank_does_not_hold_up_the_launch(own_session: bool, none_left: Any) -> None:
    """A sub-process that goes on writing is ended with the rank, or left alone if it has left its group."""

    def leave() -> tuple[int, str]:
        talk = ["sh", "-c", "while echo still here; do sleep 0.01; done"]
        child = subprocess.Popen(talk, start_new_session=own_session)
        with open(f"/proc/{child.pid}/stat") as file:
            return child.pid, file.read().rpartition(")")[2].split()[19]

    run = launch(leave, world_size=1, backend=None, view="quiet")
    if own_session:  # then it ends by itself, when it finds that nobody reads its output
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(run.results[0][0])
            select.select([descriptor], [], [], 30)
            os.close(descriptor)
    none_left(run.results)
