"""Fixtures of the rank tests: a notebook's cells without a notebook, and whether a process still lives."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ddplab

assert torch.distributed.is_available()  # and is loaded before the first launch

PRELUDE = """
import os
import torch
import torch.distributed as dist
from ddplab import launch, log

def identity(pid="self"):
    "Who a process is: its id and when it started, which no later process shares."
    words = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return os.getpid() if pid == "self" else int(pid), words[19]
"""


class Cells:
    """Runs texts as IPython runs cells: in ``__main__``, from no file, with their source in linecache.

    ``namespace`` is that of ``__main__``.
    """

    _numbers = itertools.count(1)

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.filenames: list[str] = []

    def run(self, source: str) -> Any:
        """Run a cell; gives the value of its last line, if that is an expression."""
        source = textwrap.dedent(source)
        filename = f"/tmp/ipykernel_{os.getpid()}/{next(self._numbers)}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        self.filenames.append(filename)
        tree, last = ast.parse(source, filename), None
        if isinstance(end := tree.body[-1], ast.Expr):
            tree.body.pop()
            last = ast.Expression(end.value)
        exec(compile(tree, filename, "exec", dont_inherit=True), self.namespace)
        return eval(compile(last, filename, "eval", dont_inherit=True), self.namespace) if last else None


@pytest.fixture
def cells() -> Iterator[Cells]:
    """Cells of a fresh notebook, which has imported torch, ``dist``, ``launch`` and ``log``."""
    namespace = vars(sys.modules["__main__"])
    before = dict(namespace)
    cells = Cells(namespace)
    cells.run(PRELUDE)
    yield cells
    namespace.clear()
    namespace.update(before)
    for filename in cells.filenames:
        linecache.cache.pop(filename, None)


def is_alive(identity: tuple[int, str]) -> bool:
    """Whether the process that a cell's ``identity()`` told of still runs; a zombie does not."""
    pid, started = identity
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return words[19] == started and words[0] not in "ZX"


@pytest.fixture
def none_left() -> Any:
    """A function that fails if one of the processes that it is given (as ``identity()`` told) still runs."""

    def check(identities: list[tuple[int, str]]) -> None:
        assert identities, "no process was named"
        assert [who for who in identities if is_alive(who)] == []

    return check


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that starts a rank."""

    def start(*args: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(ddplab.processes, "RankProcess", start)
