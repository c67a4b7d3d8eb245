"""Ranks that are guests in the processes of an engine, here one that starts plain processes of Python."""

from __future__ import annotations

import _thread
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddplab import LaunchError, RankFailedError, RankTimeoutError, engines, launch, log, machine
from ddplab.engines import Hosted
from ddplab.engines import hosted as hosted_module
from ddplab.engines.streams import Words

VISIT = "import pickle, sys; pickle.load(sys.stdin.buffer)()"


class Plain:
    """An engine whose workers are processes of this machine; they keep this test's modules at hand."""

    name = "plain"
    address = "127.0.0.1"

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[bytes]] = []
        self.before: Callable[[Any], None] = lambda visit: None
        self.code = VISIT

    def run(self, world_size: int, visit: Callable[[], None]) -> None:
        self.before(visit)
        with socket.create_server((self.address, 0)) as free:
            port = free.getsockname()[1]
        for rank in range(world_size):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            environ = os.environ | {"MASTER_ADDR": self.address} | {name: str(value) for name, value in names.items()}
            command = [sys.executable, "-c", self.code]
            self.workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environ))
        for process in self.workers:
            assert process.stdin
            process.stdin.write(pickle.dumps(visit))
            process.stdin.close()
        codes = [process.wait() for process in self.workers]
        if any(codes):
            raise RuntimeError(f"workers ended with {codes}")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Plain:
    """``launch(..., engine="plain")`` uses this engine."""
    engine, others = Plain(), engines.choose

    def choose(name: str, world_size: int, backend: str | None, say: Any) -> Any:
        if name != "plain":
            return others(name, world_size, backend, say)
        return Hosted(engine), *machine.choose_backend(backend, world_size)

    monkeypatch.setattr("ddplab.engines.choose", choose)
    return engine


def hosted(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return launch(fn, *args, engine="plain", view="quiet", **{"allow_failure": True} | options)


def test_a_run_on_an_engine_is_like_one_here(plain: Plain) -> None:
    """Values, output, metrics, calls, trace, seeds and times come back; this process's environment does not go there."""

    def train() -> tuple[float, str, str | None]:
        loss = torch.rand(3).sum()
        dist.all_reduce(loss)
        log(step=0, loss=loss)
        print("trained")
        os.write(2, b"by descriptor\n")
        return loss.item(), os.getcwd(), os.environ.get("GIVEN")

    here = launch(train, env={"GIVEN": "yes"}, view="quiet", backend="gloo")
    there = hosted(train, env={"GIVEN": "yes"}, backend="gloo", trace=True)
    assert there.results == here.results
    assert sorted(there.output().splitlines()) == sorted(here.output().splitlines())
    assert "rank 1 | trained" in there.output() and "rank 0 ! by descriptor" in there.output()
    assert [row.value for row in there.metrics] == [row.value for row in here.metrics]
    assert [call.name for call in there.collectives] == [call.name for call in here.collectives]
    assert [(row.rank, row.name) for row in there.timeline if row.name == "all_reduce"]
    assert (there.spec.engine, there.start_method) == ("plain", "plain")
    assert all(0 < event.time_s < there.elapsed_s for event in there.events)
    assert there.receipt.clean
    assert [process.returncode for process in plain.workers] == [0, 0]


def test_the_environment_of_the_notebook_stays_there(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a secret of the notebook's process does not travel through the cluster's network."""
    plain.before = lambda visit: monkeypatch.delenv("SECRET")
    monkeypatch.setenv("SECRET", "1")
    assert hosted(lambda: os.environ.get("SECRET"), world_size=1).results == [None]


def test_a_rank_that_raises_on_an_engine_is_named(plain: Plain) -> None:
    """The report has the rank, the line and the reason; its peers are ended."""

    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        while True:
            pass

    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed first: ValueError in .*, line \d+: bad luck"):
        hosted(fail, allow_failure=False)
    assert [process.returncode for process in plain.workers] == [-signal.SIGKILL, 0]


def test_the_last_words_of_a_killed_guest_are_shown(plain: Plain) -> None:
    """How its process ended is not known, but what it said before is."""

    def die() -> None:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    run = hosted(die, world_size=1)
    assert run.failures[0].type == "Lost"
    assert run.output(0) == "last words"
    assert "logs of the engine" in run.report()


def test_a_guest_that_hangs_is_located_and_ended(plain: Plain) -> None:
    """The time-out holds, also for one that never lets go of the lock of Python."""

    def hang() -> None:
        if dist.get_rank() == 1:
            max(range(10**12))
        dist.barrier()

    with pytest.raises(RankTimeoutError) as caught:
        hosted(hang, timeout_s=3.0, allow_failure=False)
    assert "rank 0 waits in barrier #1" in caught.value.report
    assert "rank 1 did not answer" in caught.value.report
    assert [process.returncode for process in plain.workers] == [-signal.SIGKILL] * 2


def test_an_engine_that_starts_nothing(plain: Plain) -> None:
    """The reason and the engine's own words are in the error."""

    def refuse(visit: Any) -> None:
        print("the queue is closed")
        raise PermissionError("not today")

    plain.before = refuse
    with pytest.raises(LaunchError, match="^plain could not run the ranks: PermissionError: not today\nthe queue is c"):
        hosted(print)
    assert sys.stdout.write("") == 0 and type(sys.stdout).__name__ != "_Stream"


def test_prints_through_rays_own_print_are_not_rays(capsys: pytest.CaptureFixture[str]) -> None:
    """Was a bug: ray.experimental.tqdm_ray replaces print for all, and then nothing was shown any more."""
    source = "def say(text):\n    print(text)"
    for module in ("ray.experimental.tqdm_ray", "ray.train"):
        exec(source, names := {"__name__": module})
        with Words(threading.Thread()) as words:
            names["say"](module)
        assert words.kept == ("ray.train\n" if module == "ray.train" else "")
    assert capsys.readouterr().out == "ray.experimental.tqdm_ray\n"


def test_workers_that_cannot_import_ddplab(plain: Plain) -> None:
    """Then it must be installed there."""
    plain.code = "raise ModuleNotFoundError(\"No module named 'ddplab'\")"

    def refuse(visit: Any) -> None:
        raise RuntimeError("a worker said: No module named 'ddplab'")

    plain.before = refuse
    with pytest.raises(LaunchError, match="the workers of plain cannot import ddplab: install it on each node"):
        hosted(print)


def test_workers_with_another_version(plain: Plain) -> None:
    """Code travels as bytecode, so both ends must be alike."""
    plain.code = "import ddplab; ddplab.__version__ = '0.0'; " + VISIT
    with pytest.raises(
        LaunchError, match=r"rank \d on plain has ddplab 0\.0 on Python [\d.]+, but this notebook ddplab"
    ):
        hosted(print)


def test_strangers_are_not_let_in(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no token is passed over, whether it talks or is silent; nothing of what it sends is unpickled."""
    monkeypatch.setattr("ddplab.engines.hosted.GREETING_LIMIT_S", 0.2)
    strangers = []

    def intrude(visit: Any) -> None:
        for words in (b"", b"GET / HTTP/1.1\r\n" * 100, bytes(38)):
            strangers.append(socket.create_connection(visit.args[0]))
            strangers[-1].sendall(words)

    plain.before = intrude
    assert hosted(lambda: dist.get_rank()).results == [0, 1]
    for stranger in strangers:
        stranger.close()


def test_a_worker_that_comes_to_another_than_its_launcher(plain: Plain) -> None:
    """Who has taken the port of a launcher that is gone cannot have the token, so nothing of it is unpickled."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        heard: list[bytes] = []

        def pretend() -> None:
            link = other.accept()[0]
            link.sendall(bytes(32))
            heard.append(link.recv(1 << 16))
            link.sendall(heard[0][:32])
            link.close()

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(ConnectionError, match="who answers is another"):
            hosted_module._greet(other.getsockname()[:2], b"the token" * 4, 0, 0)
        pretender.join()
    assert heard and b"the token" not in heard[0]


def test_children_of_a_guest_write_and_hold_nothing_open(plain: Plain) -> None:
    """Nothing that a forked child prints is lost; that the rank is gone is seen while its child lives."""

    def talk() -> None:
        child = os.fork()
        for _ in range(400):
            print("x" * 99)
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        if not os.fork():
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    run = hosted(talk, world_size=1, timeout_s=10.0)
    assert run.failures[0].type == "Lost"
    assert run.output(0).count("x") == 99 * 800


def test_a_thread_that_prints_while_an_engine_runs(plain: Plain, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the engine's own words are kept from the notebook; what C has printed in a rank is not lost."""

    def started(visit: Any) -> None:
        other = threading.Thread(target=print, args=("mine",))
        other.start()
        other.join()
        print("of the engine")

    plain.before = started
    run = hosted(lambda: ctypes.CDLL(None).printf(b"from C\n"), world_size=1)
    assert run.output(0) == "from C"
    assert capfd.readouterr().out == "mine\n"


def test_an_interrupt_while_the_engine_queues(plain: Plain) -> None:
    """A cell that waits for workers can be left at once; workers that come later find nobody."""
    late = threading.Event()
    plain.before = lambda visit: late.wait() and None
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hosted(print)
    assert time.monotonic() - began < 10
    late.set()
    while len(plain.workers) < 2:
        time.sleep(0.02)
    assert [process.wait(60) for process in plain.workers] == [1, 1]


def test_an_interrupt_while_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts to its end, since half a cluster would stay; then the interrupt is raised, and no rank is started."""
    started = []

    def choose(name: str, world_size: int, backend: str | None, say: Any) -> Any:
        _thread.interrupt_main()
        started.append(name)
        return Hosted(Plain()), backend, ""

    monkeypatch.setattr("ddplab.engines.choose", choose)
    with pytest.raises(KeyboardInterrupt, match="before a rank was started"):
        launch(print, engine="plain")
    assert started == ["plain"]


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"env": {"A": 1}}, {"trace": 1}, {"seed": -1}, {"threads": 0}])
def test_arguments_are_checked_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    """A cluster is not started for a launch that is refused."""
    monkeypatch.setattr("ddplab.engines.choose", lambda *_: pytest.fail("started"))
    with pytest.raises((ValueError, TypeError)):
        launch(print, engine="ray", **wrong)
    with pytest.raises(TypeError, match="cannot travel to a rank"):
        launch(print, threading.Lock(), engine="ray")


def test_what_an_engine_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input is refused before anything starts, with what mends it."""
    with pytest.raises(ValueError, match="engine='slurm' is not one of 'local', 'ray', 'spark'"):
        launch(print, engine="slurm")
    with pytest.raises(ValueError, match="start_method='spawn' is for engine='local'"):
        launch(print, engine="ray", start_method="spawn")
    for name, module in (("ray", "ray"), ("spark", "pyspark")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=rf"engine='{name}': .* is not installed .*make systems.*'\.\[{name}\]'$"):
            launch(print, engine=name)
