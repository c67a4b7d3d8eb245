"""``launch``: a function on fresh ranks, from the check of its arguments to the finished run.

Runs in the notebook's process. The thread that called ``launch`` only shows events; the thread of the
job (``job.py``) does the rest. An interrupt of the cell reaches the first alone, so it cannot leave a
half-started or half-stopped job behind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddplab import engines, leftovers, machine, processes, shipping, telling, worker
from ddplab import view as views
from ddplab.errors import LaunchError
from ddplab.job import Job
from ddplab.receipt import Before
from ddplab.run import Run, Spec, safe_repr

__all__ = ["launch"]

RANK_NAMES = ("rank", "local_rank", "gpu", "proc_id")
MAX_TIMEOUT_S = 7 * 24 * 3600.0


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str | None = "auto",
    timeout_s: float = 60.0,
    start_method: str = "auto",
    env: Mapping[str, str | None] | None = None,
    seed: int | None = 0,
    threads: int | None = None,
    trace: bool = False,
    allow_failure: bool = False,
    view: str = "auto",
    engine: str = "local",
) -> Run:
    """Run ``fn(*args)`` in ``world_size`` fresh processes, the ranks, and give all that they told.

    ``fn`` may be any function of a notebook or a module. It gets no hidden arguments: inside it,
    ``dist.get_rank()`` and the environment variables of torchrun tell which rank it is.

    world_size: number of ranks, from 1 to 256 (fewer where few files may be open).
    backend: "gloo", "nccl", "auto" (nccl where there is one CUDA device per rank, else gloo), or None:
        ``fn`` calls ``init_process_group`` itself.
    timeout_s: seconds, counted from when all ranks are up, after which they are stopped.
    start_method: "spawn", "forkserver" or "auto" (``DDPLAB_START_METHOD``, else the forkserver on Linux).
    env: environment variables for the ranks; a value of None removes one. Variables that libraries
        read when they are loaded (``OMP_NUM_THREADS``) come too late with the forkserver: use ``threads``.
    seed: given to torch, random and numpy on every rank alike; None seeds each anew.
    threads: threads of torch per rank; None shares the cores out.
    trace: keep what torch.profiler sees of each rank, for ``run.timeline``, ``plots.timeline`` and
        ``run.save_trace``: of the first 10 seconds of ``fn``, or 1,000 calls, or some 100,000 operations. It ends
        when ``fn`` does, also by an exception; a rank that is killed before has none. A DDP step of 5 ms takes some
        5% longer, and 3 ms more when the trace is packed at its end. A profiler that ``fn`` starts ends it.
    allow_failure: give back a failed run to be studied, in place of raising.
    view: "live", "static" (once, at the end, by rank), "quiet", or "auto".
    engine: "local", or the cluster on which the ranks are started: "ray" (Ray Train; that of ``RAY_ADDRESS`` or
        ``ray.init``, else a small one on this machine) or "spark" (TorchDistributor; that of the active session, else
        one on this machine). It must have ddplab and this Python on each node. What does not come through there: the
        environment of this process, how a lost process ended, what it has started in a session of its own, and what
        is left on other machines. Of the engine's own messages only those of one that could not start are shown.

    Raises ``ValueError`` or ``TypeError`` (``ShippingError`` for what cannot travel) before anything is
    started, ``RankFailedError`` if a rank fails, ``RankTimeoutError`` if time runs out, ``LaunchError`` if the ranks
    could not be started, and ``KeyboardInterrupt`` if the cell is interrupted. In all cases no rank is left.

    >>> def double(x):
    ...     import torch.distributed as dist
    ...     return x * 2, dist.get_rank()
    >>> launch(double, 21, world_size=2, backend="gloo").results
    [(42, 0), (42, 1)]
    """
    try:
        _check_caller()
        _check_call(fn, args)
        start_method = _check_start_method(start_method, engine)
        with _held_interrupts(lambda: None) as interrupts:  # half an import of torch would stay broken for good
            import torch.multiprocessing  # noqa: F401

            processes.prepare(start_method)
        if interrupts:
            raise KeyboardInterrupt
        world_size, timeout_s = _check_world_size(world_size), _check_seconds(timeout_s)
        seed, trace, wanted = _check_whole("seed", seed, 0), _check_yes("trace", trace), _check_env(env)
        threads = _check_whole("threads", threads, 1, 1024) or max(1, machine.num_cores() // world_size)
        packed = shipping.pack(fn, args)
        with _held_interrupts(lambda: None) as interrupts:  # half an import of Ray, or a Java that nobody ends
            host, backend, why = engines.choose(
                engine, world_size, backend, (lambda text: None) if view == "quiet" else _say
            )
        if interrupts:
            raise KeyboardInterrupt
        spec = Spec(
            name=getattr(fn, "__name__", None) or type(fn).__name__,
            world_size=world_size,
            backend=backend,
            backend_why=why,
            start_method=start_method,
            timeout_s=timeout_s,
            seed=seed,
            threads=threads,
            engine=engine,
        )
        screen = views.Guarded(views.choose(view, spec))
        order = worker.Order(
            packed=packed,
            world_size=world_size,
            backend=backend,
            environ={**os.environ, "DDPLAB_LAUNCHER": leftovers.mark()},
            env=wanted,
            folder=(folder := _folder()),
            path=[str(entry) or folder for entry in sys.path if isinstance(entry, str | os.PathLike)],
            seed=spec.seed,
            threads=spec.threads,
            launched_s=time.monotonic(),
            launcher=os.getpid(),
            trace=trace,
        )
        before, job = Before(engine == "local"), Job(spec, order, host)
    except (TypeError, ValueError) as error:
        _plain(error)
        raise
    except KeyboardInterrupt:  # IPython fails at showing one that came between two lines of any function
        raise _plain(KeyboardInterrupt("the cell was interrupted before a rank was started")) from None
    run = _watch(job, screen, before)
    if not allow_failure:
        run.check()
    return run


def _watch(job: Job, screen: views.View, before: Before) -> Run:
    """Start the job and show what it tells until it ends. An interrupt, or the Stop button, which is taken for one,
    ends it; KeyboardInterrupt is raised afterwards.
    """
    pressed = threading.Event()
    unpacking = False

    def stop() -> None:
        pressed.set()
        job.abandon()

    def interrupt() -> None:
        nonlocal unpacking
        job.abandon()
        if unpacking:  # which runs what the value's class wants, for as long as that takes
            unpacking = False
            raise KeyboardInterrupt

    with _held_interrupts(interrupt) as interrupts:
        try:
            job.thread.start()
            screen.start(stop)
            for events in job.told():
                screen.show(events)
        finally:
            job.abandon()  # does nothing to a job that has ended
            job.join()
            try:
                unpacking = True
                job.unpack()
                unpacking = False
            except KeyboardInterrupt:
                pass
            run = job.finished_run(before)
            screen.close()
        screen.finish(run)
    if interrupts or pressed.is_set():
        told = f"the Stop button was pressed; {run.verdict()}" if pressed.is_set() else run.verdict()
        error = _plain(KeyboardInterrupt(told), run.report())
        vars(error)["run"] = run
        raise error
    if isinstance(job.error, LaunchError):
        raise job.error
    if job.error is not None:
        raise LaunchError(
            f"the launch was given up: {type(job.error).__name__}: {job.error}. doctor() tells what this machine lacks."
        ) from job.error
    return run


@contextlib.contextmanager
def _held_interrupts(note: Callable[[], None]) -> Iterator[list[None]]:
    """Let an interrupt call ``note`` and be counted in the list that is given; the caller raises it afterwards.

    Raised in the middle, it could come between any two lines of the block, and more than once.
    """
    came: list[None] = []

    def handle(*_: Any) -> None:
        came.append(None)
        note()

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield came
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _plain(error: BaseException, report: str = "") -> BaseException:
    """``error``, of which IPython shows the message and ``report``, and not the lines of ddplab above them."""
    lines = [f"{type(error).__name__}: {error}", *report.splitlines()]
    vars(error)["_render_traceback_"] = functools.partial(list, lines)
    return error


# What the caller gave ---------------------------------------------------------------------------------


def _check_caller() -> None:
    if telling.current is not None:
        raise ValueError(
            f"launch was called inside rank {telling.current.rank}: ranks cannot launch ranks. "
            "Call it in a cell, or start a process with torch.multiprocessing."
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch was reached while a rank imports your script, which would start ranks without end. "
            'Put the call under `if __name__ == "__main__":`.'
        )


def _check_start_method(start_method: str, engine: str) -> str:
    if engine == "local":
        return machine.choose_start_method(start_method)
    if start_method != "auto":
        raise ValueError(f"start_method={start_method!r} is for engine='local': {engine} starts its workers by itself")
    return engine


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not callable(fn):
        hint = " Give the function itself, and its arguments after it: launch(train, 0.1)." if fn is None else ""
        raise TypeError(f"launch needs a function to run, not {_shown(fn)}.{hint}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(f"{name} is a coroutine or generator function: calling it runs nothing. Wrap it.")
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name}{signature} does not fit the arguments {args!r:.200}: {error}.{_rank_hint(name, signature, args)}"
        ) from None


def _rank_hint(name: str, signature: inspect.Signature, args: tuple[Any, ...]) -> str:
    """How to get the rank, for a function that expects it as ``torch.multiprocessing.spawn`` gives it."""
    first = next(iter(signature.parameters), "")
    if not (first in RANK_NAMES or _fits(signature, 0, *args)):
        return " Arguments for the function follow it: launch(fn, arg, world_size=2)."
    return (
        f" launch passes no rank, unlike torch.multiprocessing.spawn. Drop {first!r} and ask inside: "
        f'{first} = dist.get_rank(), or int(os.environ["RANK"]) before there is a process group. '
        f'To keep {name} as it is: launch(lambda: {name}(int(os.environ["RANK"]), ...)).'
    )


def _fits(signature: inspect.Signature, *args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _check_world_size(world_size: Any) -> int:
    limit = machine.max_world_size()
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size is the number of ranks, a whole number, not {_shown(world_size)}")
    asked = f"world_size={safe_repr(world_size):.80}"
    if limit < min(max(world_size, 1), machine.MAX_WORLD_SIZE):
        raise ValueError(
            f"{asked} needs more open files than this process may have, which do for {limit}. "
            "Close some, or raise the limit before Jupyter starts: ulimit -n 4096."
        )
    if not 1 <= world_size <= limit:
        raise ValueError(f"{asked} is not between 1 and {limit}, what one machine can start")
    return world_size


def _check_seconds(timeout_s: Any) -> float:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s is a number of seconds, not {_shown(timeout_s)}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s={safe_repr(timeout_s):.80} is not between 0 and {MAX_TIMEOUT_S:.0f} seconds")
    return float(timeout_s)


def _check_whole(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number or None, not {_shown(value)}")
    if value < least:
        raise ValueError(f"{name}={safe_repr(value):.80} is not {least} or more")
    if value > most:
        raise ValueError(f"{name}={safe_repr(value):.80} is more than {most}")
    return value


def _check_yes(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {_shown(value)}")
    return value


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise ValueError(f"the working directory is gone: os.chdir to another, where ranks can run ({error})") from None


def _check_env(env: Any) -> dict[str, str | None]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f'env is a dictionary such as {{"NCCL_DEBUG": "INFO"}}, not {_shown(env)}')
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str | None):
            raise TypeError(f"env[{name!r}] is {_shown(value)}: names and values of variables are text, or None")
        if not name or "=" in name or "\0" in name + (value or ""):
            raise ValueError(f"env[{name!r}]={value!r} cannot be an environment variable")
        try:
            os.fsencode(name + (value or ""))
        except UnicodeEncodeError:
            raise ValueError(f"env[{name!r}]={value!r} cannot be an environment variable") from None
    return dict(env)


def _shown(value: Any) -> str:
    """The value and its type, short, whatever it is."""
    return f"{safe_repr(value):.80} ({type(value).__name__})"
