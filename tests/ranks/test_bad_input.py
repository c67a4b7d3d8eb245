"""What a caller gives wrongly is refused in words that help, before any rank is started."""

import functools
import math
import os
import re

import pytest
import torch
import torch.distributed as dist

from ddplab import RankFailedError, launch


def nothing():
    """A function for launches that must not happen."""


def add(a, b, scale=1):
    """A function that takes two arguments."""


def mp_train(rank, world_size, lr):
    """A function as torch.multiprocessing.spawn wants it."""


def items():
    """A generator function."""
    yield 1


async def later():
    """A coroutine function."""


def refuse(kind, words, *args, **options):
    """Check that this launch raises ``kind`` exactly, with all ``words`` in the message, which is one line."""
    with pytest.raises((ValueError, TypeError)) as caught:
        launch(*args, **options)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert "object at 0x" not in message
    return message


OPTIONS = [
    ("world_size", 0, ValueError, "between 1 and"),
    ("world_size", -1, ValueError, "between 1 and"),
    ("world_size", 10**9, ValueError, "between 1 and"),
    ("world_size", "2", TypeError, "a whole number"),
    ("world_size", True, TypeError, "a whole number"),
    ("world_size", 2.0, TypeError, "a whole number"),
    ("world_size", None, TypeError, "a whole number"),
    ("backend", "mpi", ValueError, '"gloo"'),
    ("backend", "cpu", ValueError, '"gloo"'),
    ("backend", "Gloo", ValueError, '"gloo"'),
    ("backend", 3, ValueError, '"gloo"'),
    ("backend", [], ValueError, '"gloo"'),
    ("start_method", "fork", ValueError, '"spawn"'),
    ("start_method", 3, ValueError, '"spawn"'),
    ("start_method", None, ValueError, '"spawn"'),
    ("timeout_s", 0, ValueError, "seconds"),
    ("timeout_s", -1, ValueError, "seconds"),
    ("timeout_s", math.nan, ValueError, "seconds"),
    ("timeout_s", math.inf, ValueError, "seconds"),
    ("timeout_s", "60", TypeError, "seconds"),
    ("timeout_s", None, TypeError, "seconds"),
    ("timeout_s", True, TypeError, "seconds"),
    ("seed", -1, ValueError, "0 or more"),
    ("seed", 2**64, ValueError, "seed"),
    ("seed", 1.5, TypeError, "a whole number"),
    ("seed", "1", TypeError, "a whole number"),
    ("threads", 0, ValueError, "1 or more"),
    ("threads", True, TypeError, "a whole number"),
    ("threads", "all", TypeError, "a whole number"),
    ("view", "loud", ValueError, '"quiet"'),
    ("view", None, ValueError, '"quiet"'),
    ("view", [], ValueError, '"quiet"'),
    ("env", "A=1", TypeError, "dictionary"),
    ("env", [("A", "1")], TypeError, "dictionary"),
]


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(("name", "value", "kind", "words"), OPTIONS, ids=lambda value: str(value)[:20])
def test_an_option_is_refused_with_its_name_its_value_and_what_would_do(name, value, kind, words):
    """The message has the option, what was given, and what it takes."""
    refuse(kind, [name, repr(value)[:60], words], nothing, **{name: value})


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("name", ["world_size", "seed", "threads", "timeout_s"])
def test_a_number_too_long_to_be_shown_is_refused_by_its_option(name):
    """Was a bug: Python refused to write such a number out, and that was all the message said."""
    refuse(ValueError, [name], nothing, **{name: 10**5000})


@pytest.mark.usefixtures("no_start")
def test_too_few_open_files_are_told_before_anything_starts(monkeypatch):
    """Was a bug: the launch was given up after seconds, with lines of C++."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (len(os.listdir("/dev/fd")) + 50, 4096))
    refuse(ValueError, ["world_size=3", "open files", "do for 2", "ulimit -n"], nothing, world_size=3)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("env", "kind", "words"),
    [
        ({"A": 1}, TypeError, ["env['A']", "1 (int)", "text"]),
        ({2: "1"}, TypeError, ["env[2]", "text"]),
        ({"A": True}, TypeError, ["env['A']", "True (bool)"]),
        ({"A=B": "1"}, ValueError, ["env['A=B']"]),
        ({"": "1"}, ValueError, ["env['']"]),
        ({"A": "\0"}, ValueError, ["env['A']"]),
    ],
)
def test_a_variable_that_cannot_be_is_refused(env, kind, words):
    """Names and values of environment variables are text, and the message names the one that is not."""
    refuse(kind, words, nothing, env=env)


@pytest.mark.usefixtures("no_start")
def test_the_environment_may_not_name_a_bad_start_method(monkeypatch):
    """DDPLAB_START_METHOD is checked like the option, and named."""
    monkeypatch.setenv("DDPLAB_START_METHOD", "bad")
    refuse(ValueError, ["DDPLAB_START_METHOD='bad'", '"spawn"'], nothing)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    "thing", [None, 3, "train", [nothing], {"fn": nothing}], ids=["None", "3", "text", "list", "dict"]
)
def test_what_cannot_be_called_is_refused(thing):
    """The first argument must be a function, and the message shows what it was."""
    refuse(TypeError, ["a function", type(thing).__name__], thing)


@pytest.mark.usefixtures("no_start")
def test_the_result_of_a_call_in_place_of_a_function_is_explained():
    """launch(train(0.1)) gives None to launch: the message shows how to write it."""
    refuse(TypeError, ["the function itself", "launch(train, 0.1)"], nothing())


@pytest.mark.usefixtures("no_start")
def test_no_function_at_all_is_refused():
    """launch() names its missing argument."""
    refuse(TypeError, ["fn"])


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3, 4)], ids=len)
def test_arguments_that_do_not_fit_are_refused(args):
    """The signature, the arguments and the way to give them are in the message."""
    words = ["add(a, b, scale=1)", repr(args), "launch"]
    refuse(TypeError, words, add, *args)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("wrapped", [functools.partial(add, 1), functools.partial(add, scale=2)], ids=["a", "scale"])
def test_arguments_of_a_partial_are_checked_too(wrapped):
    """A partial function that still lacks an argument is refused."""
    refuse(TypeError, ["missing a required argument"], wrapped)


@pytest.mark.usefixtures("no_start")
def test_a_function_for_spawn_that_expects_the_rank_is_told_how_to_get_it():
    """Who comes from torch.multiprocessing.spawn learns that the rank is asked for inside."""
    words = ["passes no rank", "'rank'", "dist.get_rank()", 'os.environ["RANK"]', "mp_train"]
    refuse(TypeError, words, mp_train, 2, 0.1)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("name", ["nprocs", "worldsize", "num_ranks", "timeout", "args", "lr"])
def test_an_unknown_option_is_refused_by_name(name):
    """A misspelt option is not silently passed on."""
    refuse(TypeError, [repr(name)], nothing, **{name: 2})


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("fn", [items, later], ids=["generator", "coroutine"])
def test_a_function_whose_call_runs_nothing_is_refused(fn):
    """Generator and coroutine functions are refused by name: their values would be of no use."""
    refuse(TypeError, [fn.__name__, "runs nothing"], fn)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("fn", [items, later], ids=["generator", "coroutine"])
def test_a_partial_of_such_a_function_is_refused_too(fn):
    """A partial of a generator or coroutine function is refused in the same words."""
    refuse(TypeError, ["runs nothing"], functools.partial(fn))


@pytest.mark.usefixtures("no_start")
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_nccl_without_devices_is_refused_with_the_way_out():
    """backend='nccl' on a CPU says what there is, what it needs, and what would run."""
    refuse(ValueError, ["no CUDA devices for 2 ranks", "backend='gloo'"], nothing, backend="nccl")


@pytest.mark.usefixtures("no_start")
def test_the_message_for_a_huge_argument_is_short():
    """A long value is cut in the message."""
    assert len(refuse(TypeError, ["add"], add, "x" * 1_000_000)) < 1000
    assert len(refuse(TypeError, ["world_size"], nothing, world_size="x" * 1_000_000)) < 1000


def test_a_launch_inside_a_rank_is_refused(cells):
    """A rank that launches fails with a message that says why, and its line."""
    cells.run("def f():\n    launch(print)\n")
    with pytest.raises(RankFailedError, match=re.escape("inside rank 0: ranks cannot launch ranks")) as caught:
        launch(cells.namespace["f"], world_size=1)
    assert caught.value.run.failures[0].type == "ValueError"
    assert caught.value.run.failures[0].where.line == 2


def test_a_refusal_leaves_the_process_as_it_was():
    """After a refused launch there is no process group, and the next launch runs."""
    refuse(ValueError, ["world_size"], nothing, world_size=0)
    assert not dist.is_initialized()
    assert launch(nothing, world_size=1).results == [None]


@pytest.mark.parametrize("args", [(), (3,)], ids=["no arguments", "one argument"])
def test_a_function_that_wants_the_rank_is_told_how_to_get_it_however_it_is_called(args):
    """Was a bug: ``launch(train)`` for ``train(rank, world_size)`` was told to pass two arguments."""

    def train(rank, world_size):
        """As torch.multiprocessing.spawn wants it."""

    with pytest.raises(TypeError, match="launch passes no rank") as caught:
        launch(train, *args)
    assert "rank = dist.get_rank()" in str(caught.value)
