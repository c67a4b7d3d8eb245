"""A script that grows from one function to all that it uses, for ``export``.

Each name that a piece of code takes from outside (as Python's own symtable sees it) becomes an import, a piece of
code, or a constant, until no name is open.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import enum
import functools
import gc
import inspect
import linecache
import math
import os
import random
import re
import symtable
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ddplab import machine, places, telling
from ddplab.errors import ShippingError

__all__ = ["Script", "is_code", "name_of", "refused", "runtime"]

MAX_LITERAL = 1000  # characters
_DATA = "ddplab.data"  # the one part of ddplab that is written out: it uses no other
_OF_IPYTHON = ("get_ipython", "display")  # which it makes builtins
_DEF = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")  # which Python runs where they stand
_NOTHING = object()
_WHY = {"torch.distributed.nn": "  # before init_process_group: DDP imports it, and it would hold the group for ever"}

_OWN = {"log": telling.log, "span": telling.span, "progress": telling.progress, "device": machine.device}
_STAND_INS = {
    "log": '''\
def log(step=None, **metrics):
    """Print the numbers of rank 0."""
    if os.environ["RANK"] == "0":
        numbers = [f"{name} {torch.as_tensor(value).item():.6g}" for name, value in metrics.items()]
        print(*([] if step is None else [f"step {step}"]), *numbers, flush=True)''',
    "span": '''\
@contextlib.contextmanager
def span(name):
    """Does nothing: in the notebook it is a bar of the timeline."""
    yield''',
    "progress": '''\
def progress(items, total=None, name="progress"):
    """Gives the items: in the notebook it is a bar."""
    return iter(items)''',
    "device": '''\
def device():
    """The GPU of this rank, where each rank of the machine has one, or the CPU."""
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if dist.is_initialized():
        has_gpu = "nccl" in dist.get_backend()
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")''',
}


class _Text(NamedTuple):
    """A cell, or a file whose code can be written out; ``order`` is its place among them."""

    lines: list[str]
    tree: ast.Module
    order: int


class _Found(NamedTuple):
    """A definition, and where it stands."""

    text: _Text
    node: Any


class _Part(NamedTuple):
    """A piece of the script: where it belongs, and the names that it uses when it is defined, and later."""

    order: tuple[int, int]
    code: str
    at_once: set[str]
    later: set[str]


class _Import(NamedTuple):
    """``import module as other``, or ``from module import part as other``; "" for what is not there."""

    module: str
    part: str
    other: str

    @property
    def name(self) -> str:
        """The name that it binds."""
        return self.other or self.part or self.module.partition(".")[0]

    @property
    def value(self) -> Any:
        """What it binds that name to, of modules that are loaded."""
        if not self.part:
            return sys.modules.get(self.module if self.other else self.name, _NOTHING)
        module = sys.modules.get(self.module)
        return getattr(module, self.part, sys.modules.get(f"{self.module}.{self.part}", _NOTHING))


class Script:
    """What a script has so far.

    known: what each of its names stands for.
    beside: files and folders of the user that it imports from.
    """

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.beside: set[str] = set()
        self.imports = {_Import("torch.distributed.nn", "", "")}
        self._parts: dict[str, _Part] = {}
        self._texts = _texts()
        self._seen = [entry for text in self._texts.values() for entry in _imports(text.tree)]

    def bind(self, name: str, value: Any, user: str, names: Mapping[str, Any] | None = None) -> None:
        """Let ``name``, which ``user`` takes from ``names``, stand for ``value`` in the script."""
        if self.known.get(name, value) is not value:
            raise ShippingError(f"{name!r} is two things: one for {user}, another for the rest of it. Rename yours.")
        if name in self.known or getattr(builtins, name, _NOTHING) is value:
            return
        self.known[name] = value
        home, own = _home(value), next((key for key, thing in _OWN.items() if thing is value), "")
        if own and own != name:
            self.bind(own, value, user)
            self._add(name, 1, f"{name} = {own}", self.known, name)
        elif own:
            self._add(own, 1, _STAND_INS[own], runtime(), own)
        elif home.partition(".")[0] == "ddplab" and (home != _DATA or isinstance(value, ModuleType)):
            raise ShippingError(
                f"{name!r}, which {user} uses, is ddplab's, and the script runs without it. Leave it out. Only log, "
                "span, progress, device and ddplab.data's own are written out, if they are imported by their own names."
            )
        elif found := self._importing(name, value):
            self.imports |= found
            self.beside |= {place for entry in found if (place := _beside(entry.module))}
        elif names and names.get("__name__") == _DATA and not is_code(value):
            self._write(name, self._assignment(name), names)
        elif is_code(value) and home in ("__main__", _DATA):
            self._define(name, value, user)
        elif is_code(value) or isinstance(value, ModuleType):
            raise refused(f"{name!r}, which {user} uses,", value, "It cannot be imported.")
        else:
            code = f"{name} = {self.literal(value, f'{name!r}, which {user} uses,')}"
            self._add(name, 0, code, self.known, name)

    def take(self, code: str, names: Mapping[str, Any], user: str) -> tuple[set[str], set[str]]:
        """Bind what a piece of code takes from outside: when it is defined, and later, in bodies of functions."""
        try:
            at_once, later = _uses(code)
        except SyntaxError as error:  # such as a `nonlocal` of what was around it
            raise ShippingError(
                f"{user} cannot stand in a script by itself: {error.msg}. Write it otherwise."
            ) from None
        for name in sorted(at_once | later):
            if name in _OF_IPYTHON:
                raise ShippingError(f"{user} uses {name}, or a line with % or !, which only IPython has. Leave it out.")
            if name in names:
                self.bind(name, names[name], user, names)
            elif not hasattr(builtins, name) and not name.startswith("__"):
                raise ShippingError(f"{name!r}, which {user} uses, is not defined. Run its cell first.")
        return at_once, later

    def literal(self, value: Any, what: str) -> str:
        """``value`` as one would type it. Raises ``ShippingError``, which calls it ``what``."""
        text = self._literal(value, what)
        if len(text) > MAX_LITERAL:
            raise refused(what, value, "It is too long to read: save it to a file, and load that in the function.")
        return text

    def _literal(self, value: Any, what: str) -> str:
        kind = type(value)
        if value is Ellipsis:
            return "..."
        if value is None or kind in (bool, int, str, bytes):
            text = repr(value)
            return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if kind is dict:
            return f"{{{', '.join(f'{self.literal(k, what)}: {self.literal(v, what)}' for k, v in value.items())}}}"
        if kind in (list, tuple):
            inner = ", ".join(self.literal(item, what) for item in value)
            return f"[{inner}]" if kind is list else f"({inner}{',' * (len(value) == 1)})"
        if kind in (set, frozenset):
            inner = ", ".join(sorted(self.literal(item, what) for item in value))
            return f"{{{inner}}}" if kind is set and value else f"{kind.__name__}({f'{{{inner}}}' if value else ''})"
        if isinstance(value, ModuleType) or (is_code(value) and "<" not in value.__qualname__):
            self.bind(value.__name__, value, what)
            return str(value.__name__)
        if origin := typing.get_origin(value):
            parts = ["None" if part is type(None) else self.literal(part, what) for part in typing.get_args(value)]
            is_union = origin in (typing.Union, types.UnionType)
            return " | ".join(parts) if is_union else f"{self.literal(origin, what)}[{', '.join(parts)}]"
        if isinstance(value, PurePath):
            self.bind("Path", Path, what)
            return f"Path({self.literal(str(value), what)})"
        if isinstance(value, enum.Enum) and value.name in kind.__members__:
            return f"{self.literal(kind, what)}.{value.name}"
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        if dataclasses.is_dataclass(kind) and all(field.init for field in fields):
            given = ", ".join(f"{f.name}={self.literal(getattr(value, f.name), what)}" for f in fields)
            return f"{self.literal(kind, what)}({given})"
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
            self.bind("torch", sys.modules["torch"], what)
            return f"torch.{str(value).removeprefix('torch.')}" if kind.__name__ == "dtype" else f"torch.{value!r}"
        raise refused(what, value, "Make it inside the function, or save it to a file and load it there.")

    def text(self) -> str:
        """All that was taken in: imports in blocks, constants, and code in the order of the notebook."""
        blocks = []
        for place in range(4):
            mine = sorted(entry for entry in self.imports if _place(entry.module) == place)
            lines = [f"import {e.module}{_as(e)}{_WHY.get(e.module, '')}" for e in mine if not e.part]
            for module in dict.fromkeys(entry.module for entry in mine if entry.part):
                parts = ", ".join(f"{e.part}{_as(e)}" for e in mine if e.part and e.module == module)
                lines.append(f"from {module} import {parts}")
            blocks.append("\n".join(lines))
        codes: dict[str, None] = {}  # by code, since one statement may define two names
        seen: set[tuple[str, bool]] = set()
        for name in self._sorted(self._parts):
            self._lay(name, codes, seen)
        text, before = "\n\n".join(filter(None, blocks)), "\n"
        for code in codes:
            text += ("\n" if "\n" not in before + code else "\n\n\n") + code
            before = code
        return text

    def _lay(self, name: str, codes: dict[str, None], seen: set[tuple[str, bool]], below: tuple[str, ...] = ()) -> None:
        """Put a piece under those that it needs when it is defined, and these under all that they need if called."""
        if name not in below and (name, bool(below)) not in seen:
            seen.add((name, bool(below)))
            part = self._parts[name]
            for other in self._sorted((part.at_once | (part.later if below else set())) & self._parts.keys()):
                self._lay(other, codes, seen, (*below, name))
            codes.setdefault(part.code)

    def _sorted(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: self._parts[name].order)

    # Code -------------------------------------------------------------------------------------------

    def _add(self, name: str, place: int, code: str, names: Mapping[str, Any], user: str, line: int = 0) -> None:
        order = (place, line or len(self._parts))
        self._parts[name] = _Part(order, code, *self.take(code, names, user))

    def _define(self, name: str, value: Any, user: str) -> None:
        """Write a function or class as its cell has it."""
        inner = inspect.unwrap(value)
        found = self._class(value) if isinstance(value, type) else self._function(name, inner)
        # What is not decorated as its text says was captured before, or was wrapped elsewhere.
        is_known = vars(sys.modules[value.__module__]).get(name) is value or "<locals>" in value.__qualname__
        decorators = getattr(found.node, "decorator_list", []) if found else []
        is_bare = isinstance(value, type) or not vars(value)
        is_changed = not (is_known if decorators else is_bare) or len(getattr(value, "registry", ())) > 1
        if found is None or is_changed:
            raise ShippingError(
                f"{name!r}, which {user} uses, has no source that could be written: code or a %% line made it or "
                "changed it, or a line has several lambdas. Write def or class in a cell, and change it nowhere else."
            )
        functions = [f for f in (inner, *vars(inner).values()) if isinstance(f, FunctionType)]
        are_texts = any(isinstance(kind, str) for kind in vars(inner).get("__annotations__", {}).values())
        if are_texts or any(f.__code__.co_flags & annotations.compiler_flag for f in functions):
            self.imports.add(_Import("__future__", "annotations", ""))
        names: Mapping[str, Any] = vars(sys.modules[value.__module__])
        if isinstance(inner, FunctionType) and _is_of(found.node, inner.__code__):
            cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
            names = ChainMap({key: cell.cell_contents for key, cell in cells}, inner.__globals__)
        if isinstance(found.node, ast.Lambda):
            segment = ast.get_source_segment("".join(found.text.lines), found.node)
            self._write(name, found, names, f"{name} = {segment}")
        elif found.node.name != name:
            self.bind(found.node.name, value, user)
            self._add(name, found.text.order, f"{name} = {found.node.name}", self.known, name, _first(found.node))
        else:
            self._write(name, found, names)

    def _write(self, name: str, found: _Found, names: Mapping[str, Any], code: str = "") -> None:
        """Take the lines of a definition in, with the comment above it and all that it uses."""
        first = _first(found.node)
        while not code and first > 1 and found.text.lines[first - 2].lstrip().startswith("#"):
            first -= 1
        code = code or _dedented(found, first)
        if any(entry.module.partition(".")[0] == "ddplab" for entry in _imports(found.node)):
            raise ShippingError(f"{name} imports ddplab inside. Import what it needs of it at the top of a cell.")
        self._add(name, found.text.order, code, names, name, first)

    def _named(self, name: str, kind: Any) -> Iterator[_Found]:
        """The definitions of that name, the latest first."""
        for text in reversed(self._texts.values()):
            for node in reversed(list(ast.walk(text.tree))):
                if isinstance(node, kind) and node.name == name:
                    yield _Found(text, node)

    def _class(self, value: type) -> _Found | None:
        """The definition in which all methods of a class stand, and which gives it the numbers and texts it has."""
        methods = [
            inspect.unwrap(method).__code__ for method in vars(value).values() if isinstance(method, FunctionType)
        ]
        codes = [code for code in methods if code.co_filename in self._texts]
        for found in self._named(value.__name__, ast.ClassDef) if "<" not in value.__qualname__ else ():
            lines = range(_first(found.node), found.node.end_lineno + 1)
            is_it = all(self._texts[code.co_filename] is found.text and code.co_firstlineno in lines for code in codes)
            if is_it and not _differs(value, found.node):
                return found
        return None

    def _function(self, name: str, inner: Any) -> _Found | None:
        """The definition of a function; of what a decorator made, that which it decorates."""
        code = getattr(inner, "__code__", None)
        latest = next(self._named(name, _DEF), None)
        if latest and latest.node.decorator_list and code and code.co_name != name:
            return latest
        text = self._texts.get(code.co_filename) if code else None
        if code is None or text is None:
            return None
        nodes = [node for node in ast.walk(text.tree) if _is_of(node, code)]
        return _Found(text, nodes[0]) if len(nodes) == 1 else None

    def _assignment(self, name: str) -> _Found:
        """The statement of ddplab.data that gives a constant its value."""
        text = self._texts[str(sys.modules[_DATA].__file__)]
        for node in text.tree.body:
            stored = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in stored:
                return _Found(text, node)
        raise AssertionError(name)

    def _importing(self, name: str, value: Any) -> set[_Import]:
        """The imports that bind a name to ``value``: those of the cells, else one that does; none if none can."""
        module, part = _home(value), "" if isinstance(value, ModuleType) else str(getattr(value, "__qualname__", "?"))
        made = _Import(module, part, "" if (part or module) == name else name)
        for known in [entry for entry in self._seen if entry.name == name], [made]:
            found = {e for e in known if e.value is value and e.module.partition(".")[0] not in ("__main__", "ddplab")}
            if found:
                return {e for e in found if not e.part and not e.other} or {min(found)}
        return set()


def name_of(fn: Any) -> str:
    """What the notebook calls a function, or what it calls itself."""
    known = vars(sys.modules["__main__"])
    names = [name for name, value in known.items() if value is fn and not name.startswith("_")]
    own = "task" if fn.__name__ == "<lambda>" else str(fn.__name__)
    return own if own in names or not names else names[0]


def is_code(value: Any) -> bool:
    """Whether it is a function or a class, and no object that happens to be callable."""
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, ModuleType)
    return isinstance(value, FunctionType | type | functools._lru_cache_wrapper)


def refused(what: str, value: Any, advice: str) -> ShippingError:
    """The error that says what ``what`` is."""
    kind = type(value)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return ShippingError(f"{what} cannot be written into a script: it is a {name}. {advice}")


def runtime() -> dict[str, Any]:
    """What ``main`` and the stand-ins of ddplab's functions use."""
    import torch.distributed
    from torch.distributed.elastic.multiprocessing.errors import record

    found = {"contextlib": contextlib, "gc": gc, "os": os, "random": random, "numpy": sys.modules.get("numpy")}
    return found | {"dist": torch.distributed, "record": record, "torch": torch}


def _texts() -> dict[str, _Text]:
    """ddplab's data sets, the script that calls, if one does, and the cells of this notebook, by file name."""
    files = [getattr(sys.modules.get(module), "__file__", None) for module in (_DATA, "__main__")]
    cells = [name for name, entry in list(linecache.cache.items()) if len(entry) > 1 and entry[1] is None]
    cells.sort(key=_number)  # one that ran again keeps its place in the cache
    texts: dict[str, _Text] = {}
    for name in dict.fromkeys([*filter(None, files), *cells]):
        with contextlib.suppress(SyntaxError, ValueError):
            lines = linecache.getlines(name)
            texts[name] = _Text(lines, ast.parse("".join(lines)), len(texts) + 2)
    return texts


def _number(file: str) -> int:
    """The number of a cell's last run; 0 for what IPython does not know."""
    found = re.fullmatch(r"cell In\[(\d+)\]", places.place(file, 1, "").place)
    return int(found[1]) if found else 0


def _home(value: Any) -> str:
    """The module that a value is or comes from."""
    return str(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "?")


def _imports(tree: ast.AST) -> Iterator[_Import]:
    """The imports anywhere in a piece of code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, "", alias.asname or "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (_Import(node.module, alias.name, alias.asname or "") for alias in node.names)


def _uses(code: str) -> tuple[set[str], set[str]]:
    """The names that a piece of code takes from outside: when it is defined, and later, in bodies of functions."""
    at_once: set[str] = set()
    later: set[str] = set()
    top = symtable.symtable(code, "script", "exec")

    def walk(table: symtable.SymbolTable, names: set[str]) -> None:
        for symbol in table.get_symbols():
            if symbol.is_global() or (table is top and symbol.is_referenced()):
                names.add(symbol.get_name())
        for inner in table.get_children():
            is_body = str(inner.get_type()) == "function" and inner.get_name() not in _COMPREHENSIONS
            walk(inner, later if is_body else names)

    walk(top, at_once)
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    return at_once - own, later - own


def _dedented(found: _Found, first: int) -> str:
    """The lines of a definition from its margin on; those inside a string are part of its value."""
    docs = [node.value for node in ast.walk(found.node) if isinstance(node, ast.Expr)]
    texts = [n for n in ast.walk(found.node) if isinstance(n, ast.Constant | ast.JoinedStr) and n not in docs]
    inside = {number for node in texts for number in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    code = ""
    for number, line in enumerate(found.text.lines[first - 1 : found.node.end_lineno], first):
        margin = min(found.node.col_offset, len(line) - len(line.lstrip(" \t")))
        code += line if number in inside else line[margin:]
    return code.rstrip()


def _first(node: Any) -> int:
    """The line where a definition starts, with its decorators."""
    return int(min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]))


def _is_of(node: Any, code: CodeType) -> bool:
    """Whether a function's code comes from here."""
    is_function = isinstance(node, _DEF | ast.Lambda) and getattr(node, "name", "<lambda>") == code.co_name
    return is_function and _first(node) == code.co_firstlineno


def _differs(value: type, node: ast.ClassDef) -> bool:
    """Whether a class has another number or text than is written here."""
    plain = (int, float, str, bool, type(None))
    written = {
        target.id: part.value.value
        for part in node.body
        if isinstance(part, ast.Assign | ast.AnnAssign) and isinstance(part.value, ast.Constant)
        for target in (part.targets if isinstance(part, ast.Assign) else [part.target])
        if isinstance(target, ast.Name)
    }
    found = {name: vars(value).get(name, _NOTHING) for name in written}
    return any(isinstance(now, plain) and now != written[name] for name, now in found.items())


def _as(entry: _Import) -> str:
    return f" as {entry.other}" if entry.other else ""


def _place(module: str) -> int:
    """The block of its import: those that change Python, Python's own, libraries, and what is beside the script."""
    is_own = module.partition(".")[0] in sys.stdlib_module_names
    return 0 if module == "__future__" else 1 if is_own else 3 if _beside(module) else 2


def _beside(module: str) -> str:
    """The file, or folder, of a module that belongs to no library; else nothing."""
    file = getattr(sys.modules.get(module), "__file__", None)
    root = module.partition(".")[0]
    in_folder = root != module or (file and os.path.basename(file) == "__init__.py")
    return "" if not file or not places.is_learners(file) else f"{root}/" if in_folder else os.path.basename(file)
