"""What broke launch once, each by a test that names it."""

import multiprocessing.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddplab import Run, launch, log


class Exits:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


class Rude:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no")


def quiet(fn: Any, *args: Any, **options: Any) -> Run:
    """A launch that shows nothing, and gives back what failed."""
    return launch(fn, *args, **({"view": "quiet", "allow_failure": True, "backend": None} | options))


@pytest.fixture
def default_timeout() -> Iterator[None]:
    """Sockets of this process are made non-blocking, as a notebook may ask."""
    socket.setdefaulttimeout(10)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_a_default_timeout_for_sockets_does_no_harm() -> None:
    """Was a bug: the rank's end of its link was non-blocking, and the rank died of it."""
    run = quiet(lambda: 1)
    assert (run.results, run.output()) == ([1, 1], "")


def test_a_forked_child_does_not_answer_for_its_rank() -> None:
    """Was a bug: the value of a child that os.fork made replaced that of the rank."""

    def fork() -> bool:
        if child := os.fork():
            os.waitpid(child, 0)
        return child != 0

    assert quiet(fork).results == [True, True]


def test_a_value_that_exits_when_it_is_unpickled_is_a_failure() -> None:
    """Was a bug: it ended the thread of the job, and the run came back unfinished."""
    run = quiet(Exits)
    assert [(failure.type, failure.rank) for failure in run.failures] == [("ShippingError", 0), ("ShippingError", 1)]
    assert "SystemExit" in run.failures[0].message


def test_a_lost_temporary_folder_is_made_anew() -> None:
    """Was a bug: when a cleaner had removed multiprocessing's folder in /tmp, no launch worked any more."""
    assert quiet(lambda: 1, world_size=1).ok
    folder = Path(multiprocessing.util.get_temp_dir())
    shutil.rmtree(folder)
    assert quiet(lambda: 2, world_size=1).results == [2]
    folder.mkdir()  # multiprocessing will remove it when this process ends


def test_lone_surrogates_in_an_error_are_shown_as_escapes() -> None:
    """Was a bug: Jupyter drops a message that is no UTF-8, and with it the whole verdict."""

    def fails() -> None:
        raise ValueError("bad \ud800 text")

    run = quiet(fails, world_size=1)
    assert run.failures[0].message == "bad \\ud800 text"
    (run.verdict() + run.report()).encode()


def test_what_cannot_be_shown_or_saved_does_not_break_the_run(tmp_path: Path) -> None:
    """Was a bug: a raising repr broke the table, a value that holds itself broke save."""

    def odd() -> list[Any]:
        value: list[Any] = [Rude()]
        value.append(value)
        return value

    run = quiet(odd, world_size=1)
    assert "Rude" in run._repr_html_() or "list" in run._repr_html_()
    run.save(tmp_path / "run.jsonl")
    assert Run.load(tmp_path / "run.jsonl").ok


def test_a_step_that_is_no_number_is_refused() -> None:
    """log(step=...) takes whole numbers, also those of numpy and torch."""
    import torch

    log(step=torch.tensor(3), loss=1.0)
    with pytest.raises(TypeError, match="log\\(step=...\\) takes a whole number, not str"):
        log(step="three", loss=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["a file", "standard input"])
def test_a_script_needs_no_main_guard(tmp_path: Path, how: str) -> None:
    """Was a bug: each rank ran the script again and died; now ranks never import it."""
    text = "from ddplab import launch\nprint('once')\ndef f():\n    return 7\nprint(launch(f, view='quiet').results)\n"
    script = tmp_path / "script.py"
    script.write_text(text)
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    if how == "a file":
        done = subprocess.run([sys.executable, script], env=env, **options)
    else:
        done = subprocess.run([sys.executable], input=text, env=env, **options)
    assert (done.stdout, done.stderr) == ("once\n[7, 7]\n", "")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threads": 10**6}, "more than 1024"),
        ({"seed": 2**64}, "is more than"),
        ({"env": {"A": "\ud800"}}, "cannot be an"),
    ],
)
def test_numbers_and_variables_beyond_all_measure_are_refused(options: dict[str, Any], text: str) -> None:
    """Before anything starts, with the limit."""
    with pytest.raises(ValueError, match=text):
        launch(print, **options)


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start where the notebook is; if that is nowhere, it says so."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match="working directory is gone"):
        launch(print)


def test_ranks_without_pipes_tell_what_they_wrote_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: no pipe stands in for descriptors 1 and 2, and the closed link tells the end of a rank."""
    monkeypatch.setattr("ddplab.processes.WAITS_FOR_PIPES", False)

    def talk() -> int:
        print("hi")
        os.write(2, b"low\n")
        subprocess.run(["echo", "child"], check=True)
        print("no end", end="")
        return 5

    run = quiet(talk)
    assert run.results == [5, 5]
    assert run.output(0, "stdout").splitlines() == ["hi", "child", "no end"]
    assert run.output(1, "stderr") == "low"


class Tee:
    """What some loggers put in place of stdout."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_stdout_that_is_no_file_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Was a bug: it was asked whether it is a terminal, and had no answer."""
    monkeypatch.setattr(sys, "stdout", tee := Tee())
    assert quiet(lambda: print("hello"), view="auto", world_size=1).results == [None]
    assert tee.text == "rank 0 | hello\n"


def test_an_error_in_what_is_shown_does_not_lose_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Was a bug: a closed or full stdout raised in the middle of a launch, and its run was gone."""

    class Full(Tee):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    monkeypatch.setattr(sys, "stdout", Full())
    run = quiet(lambda: print("hello"), view="static", world_size=1)
    assert (run.results, run.output(0)) == ([None], "hello")
    assert "what the ranks do is not shown: OSError: no space left" in capsys.readouterr().err


def test_the_working_directory_may_go_while_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was a bug: the launch raised when it looked whether the directory had changed."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run = quiet(lambda: os.rmdir(folder) if os.environ["RANK"] == "0" else None)
    assert run.results == [None, None]
    assert run.receipt is not None
    assert run.receipt.changed == ("working directory",)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_of_the_notebook_can_launch_too() -> None:
    """Was a bug: it asked after its parent's forkserver, which is no child of its own."""
    quiet(lambda: 1)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, repr(quiet(lambda: 2).results).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        assert told.read() == "[2, 2]"
    os.waitpid(child, 0)
