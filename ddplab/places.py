"""Where a piece of code is, in the learner's words: "cell In[7], line 9" and the call it made.

A function from a cell has no file that a rank could read its lines from. The launcher sends the
text of such cells along (``sources_of``), the rank puts it where Python looks (``learn``), and every
traceback of the rank shows the cell's number and its source.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple

from ddplab.events import Where

__all__ = ["Source", "explain_error", "is_learners", "learn", "locate", "place", "sources_of"]

_labels: dict[str, str] = {}
_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}) + ("<frozen",)
_WRAPPERS = {"wrapper", "noted", "_wrapped_call_impl", "_call_impl", "decorate_context", "_fn", "inner"}
MAX_TEXT = 20_000


class Source(NamedTuple):
    """The text of a cell and the name that the learner knows it by."""

    filename: str
    label: str
    text: str


def sources_of(filenames: Iterable[str]) -> list[Source]:
    """The sources among ``filenames`` that exist only in this process, such as a notebook's cells."""
    sources = []
    for name in filenames:
        lines = linecache.getlines(name)
        if lines and not os.path.exists(name):
            sources.append(Source(name, _label(name), "".join(lines)))
    return sources


def learn(sources: Iterable[Source]) -> None:
    """Let tracebacks of this process show these sources."""
    for source in sources:
        lines = source.text.splitlines(keepends=True)
        linecache.cache[source.filename] = (len(source.text), None, lines, source.filename)
        _labels[source.filename] = source.label


def _label(filename: str) -> str:
    """``cell In[7]`` for a cell of this kernel, the base name for a file."""
    if filename in _labels:
        return _labels[filename]
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    named = shell.compile.format_code_name(filename) if shell else None
    return " ".join(named).replace("Cell", "cell") if named else os.path.basename(filename)


def is_learners(filename: str) -> bool:
    """Whether the learner wrote this: a cell, or a file that belongs to no library."""
    if filename in _labels:
        return True
    in_library = filename.startswith((_HERE, *_LIBRARIES)) or f"{os.sep}site-packages{os.sep}" in filename
    return not in_library and os.path.exists(filename)


def _is_torch(filename: str) -> bool:
    return f"{os.sep}torch{os.sep}" in filename


def _where(stack: list[tuple[str, int, str]]) -> Where | None:
    """The learner's innermost line in a stack of (filename, line, function), outermost first."""
    mine = [index for index, (filename, _, _) in enumerate(stack) if is_learners(filename)]
    if not mine:
        return None
    below = (name for file, _, name in stack[mine[-1] + 1 :] if _is_torch(file) and _short(name) not in _WRAPPERS)
    return place(*stack[mine[-1]], next(below, ""))


def place(filename: str, line: int, function: str, call: str = "") -> Where:
    """A line of code as the learner knows it."""
    return Where(_label(filename), line, function, linecache.getline(filename, line).strip(), call)


def _short(qualname: str) -> str:
    return qualname.rpartition(".")[2]


def locate(frame: FrameType | None) -> Where | None:
    """Where the thread that owns ``frame`` is now: its innermost line of the learner, and the call below it."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return _where(stack[::-1])


def explain_error(error: BaseException) -> tuple[str, Where | None]:
    """The traceback of ``error`` as text with cells named as the learner knows them, and where it arose.

    Frames of ddplab itself are left out. Causes, contexts, groups and notes are kept.
    """
    told = traceback.TracebackException.from_exception(error)
    stack = [(frame.filename, frame.lineno or 0, frame.name) for frame in told.stack]
    for part in _parts(told):
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if not f.filename.startswith(_HERE)])
    text = "".join(told.format())
    for filename, label in _labels.items():
        text = text.replace(f'File "{filename}"', label)
    return _bounded(text), _where(stack)


def _parts(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """``told`` and all exceptions that hang on it, each once."""
    todo, seen = [told], set()
    while todo:
        part = todo.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            others = [part.__cause__, part.__context__, *(part.exceptions or ())]
            todo += [other for other in others if other is not None]


def _bounded(text: str) -> str:
    """``text``, or its beginning and end when it is very long."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - MAX_TEXT} characters left out ...\n{text[-half:]}"
