"""A cell's function to bytes and back; names what cannot travel.

A notebook's functions and classes live in ``__main__`` of the kernel, where no other process can
import them. They travel by value (cloudpickle) into the ``__main__`` of the rank and keep their
names there, so that RPC, which pickles by name, finds them too. What the rank sends back travels
by name where the notebook has the original: an instance that returns is of the notebook's own class.
"""

from __future__ import annotations

import functools
import importlib
import io
import marshal
import os
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from ddplab import places
from ddplab.errors import ShippingError

__all__ = ["let_workers_ship", "pack", "pack_result", "unpack", "unpack_result"]


def _main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _cached_property(fn: Any, name: str) -> Any:
    made = functools.cached_property(fn)
    made.attrname = name
    return made


class _MainGlobals(dict[str, Any]):
    """Stands for the globals of ``__main__``, whichever process it is unpickled in."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _main, ()


def _is_code(obj: Any) -> bool:
    return isinstance(obj, FunctionType | type)


def _is_ours(obj: Any) -> bool:
    """Whether ``obj`` is the function or class that ``__main__`` knows by its name."""
    return _is_code(obj) and obj.__module__ == "__main__" and _main().get(obj.__qualname__) is obj


def _is_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


# cloudpickle would send the text of a file that is open for reading, without a word.
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes of ``__main__`` with their code, and notes which they were."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.names: dict[str, Any] = {}
        self.filenames: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if _is_tensor(obj) and obj.device.type == "cuda":
            raise TypeError("a CUDA tensor belongs to the process that made it")
        if isinstance(obj, _FILES) and obj not in (sys.stdin, sys.stdout, sys.stderr):
            raise TypeError("an open file belongs to the process that opened it")
        if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:  # also one with a class of its own
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):  # which holds a lock before Python 3.12
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, CodeType):  # cloudpickle would drop the name of the cell, which tracebacks need
            self.filenames.add(obj.co_filename)
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, FunctionType) and obj.__globals__ is _main():
            self.globals_ref.setdefault(id(obj.__globals__), _MainGlobals(__name__="__main__"))
        if _is_ours(obj):
            self.names[obj.__qualname__] = obj
        return super().reducer_override(obj)


def _pack(obj: Any) -> bytes:
    file = io.BytesIO()
    pickler = _ByValue(file)
    body = io.BytesIO()
    pickler.dump(obj)
    pickler.dump(pickler.names)
    pickle.dump(places.sources_of(pickler.filenames), body)
    return body.getvalue() + file.getvalue()


def pack(fn: Any, args: tuple[Any, ...]) -> bytes:
    """``fn`` and its arguments, with all that they use from ``__main__``, as bytes for :func:`unpack`.

    Raises :class:`ShippingError`, which names the variable that cannot travel, its type and its holder.

    >>> fn, args = unpack(pack(max, (1, 2)))
    >>> fn(*args)
    2
    """
    try:
        return _pack((fn, args))
    except Exception as error:
        raise ShippingError(_blame(fn, args, error)) from None


def unpack(data: bytes) -> Any:
    """What was packed; its functions and classes become attributes of this process's ``__main__``."""
    file = io.BytesIO(data)
    places.learn(pickle.load(file))
    unpickler = pickle.Unpickler(file)
    obj, names = unpickler.load(), unpickler.load()
    _main().update(names)
    _shipped.update(names)
    _classes.update(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
    return obj


# The names that came with the function: the notebook has them too.
_shipped: set[str] = set()
_classes: dict[type, str] = {}  # classes that came from the launcher, by cloudpickle's ids


def _original(identity: str) -> Any:
    """The class of this process that cloudpickle once sent off under ``identity``."""
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[identity]


class _ByName(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a result: what was shipped goes back by name, tensors go to the CPU, the rest by value."""

    def reducer_override(self, obj: Any) -> Any:
        if _is_ours(obj) and obj.__qualname__ in _shipped:
            return obj.__qualname__
        if isinstance(obj, type) and obj in _classes:
            return _original, (_classes[obj],)
        if type(obj).__name__ == "DistributedDataParallel":
            raise TypeError("it belongs to the process group of its rank")
        if _is_tensor(obj):
            return _on_cpu(obj).__reduce_ex__(5)
        return super().reducer_override(obj)


def _on_cpu(tensor: Any) -> Any:
    """``tensor`` on the CPU, without the rest of the storage that it may be a small view of."""
    moved = tensor
    if tensor.device.type != "cpu":
        moved = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    elif tensor.layout == sys.modules["torch"].strided and tensor.untyped_storage().nbytes() > tensor.nbytes:
        moved = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if moved is not tensor and isinstance(tensor, sys.modules["torch"].nn.Parameter):
        return type(tensor)(moved.detach(), tensor.requires_grad)
    return moved


def pack_result(value: Any) -> bytes:
    """The value that a rank returns, as bytes for :func:`unpack_result`.

    Raises :class:`ShippingError`, which names the type of what cannot be pickled.
    """
    try:
        return _pack_value(value)
    except Exception as error:
        culprit = _find(value, "the value", _pack_value) or ("the value", value)
        raise ShippingError(f"{culprit[0]} cannot be pickled: {_type(culprit[1])}. {_advice(culprit[1])}") from error


def _pack_value(value: Any) -> bytes:
    file = io.BytesIO()
    _ByName(file, protocol=5).dump(value)
    return file.getvalue()


def unpack_result(data: bytes) -> Any:
    """The value that a rank returned."""
    return pickle.loads(data)


# DataLoader workers and other processes of a rank ---------------------------------------------------


_owner: int | None = None


def let_workers_ship() -> None:
    """Teach ``multiprocessing`` in this process to send functions and classes of ``__main__`` by value.

    The children of a rank (DataLoader workers) start with an empty ``__main__`` when they are not
    forked. What they send back goes by name, since their parent has the originals.
    """
    global _owner
    _owner = os.getpid()
    ForkingPickler.reducer_override = _reduce_for_child  # type: ignore[method-assign, assignment]


def _reduce_for_child(_pickler: ForkingPickler, obj: Any) -> Any:
    if not _is_code(obj) or (obj.__module__ != "__main__" and "<" not in obj.__qualname__):
        return NotImplemented
    if os.getpid() != _owner and _is_ours(obj):
        return NotImplemented
    return _unpack_in_child, (_pack(obj),)


def _unpack_in_child(data: bytes) -> Any:
    ForkingPickler.reducer_override = _reduce_for_child  # type: ignore[method-assign, assignment]
    return unpack(data)


# What cannot travel ---------------------------------------------------------------------------------


def _type(obj: Any) -> str:
    kind = type(obj)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _parts(obj: Any, name: str) -> list[tuple[str, Any]]:
    """What ``obj`` is made of, each with a name that the learner can find."""
    if type(obj).__name__ in _ADVICE:
        return []
    if isinstance(obj, FunctionType):
        code, held = obj.__code__, obj.__closure__ or ()
        cells = [(n, c.cell_contents) for n, c in zip(code.co_freevars, held, strict=True) if _is_filled(c)]
        known = [(n, obj.__globals__[n]) for n in _names(code) if n in obj.__globals__]
        defaults = [(f"a default of {obj.__name__}", d) for d in obj.__defaults__ or ()]
        extra = [(f"{name}.{key}", value) for key, value in vars(obj).items() if key != "__wrapped__"]
        wrapped = [(obj.__name__, obj.__wrapped__)] if hasattr(obj, "__wrapped__") else []
        held_by = f"captured by {obj.__name__}"
        return [(f"{n!r}, {held_by}", v) for n, v in cells + known if v is not obj] + defaults + extra + wrapped
    if isinstance(obj, dict):
        return [(_inside(name, f"[{key!r}]"), value) for key, value in obj.items()]
    if isinstance(obj, list | tuple | set | frozenset):
        return [(_inside(name, f"[{index}]"), value) for index, value in enumerate(obj)]
    if isinstance(obj, type):
        return [(f"{obj.__name__}.{key}", value) for key, value in vars(obj).items() if not key.startswith("__weakref")]
    inner = [(_inside(name, f".{key}"), value) for key, value in getattr(obj, "__dict__", {}).items()]
    for key in ("func", "args", "keywords", "__func__", "__self__"):
        inner += [(f"{name}.{key}", getattr(obj, key))] if hasattr(obj, key) else []
    return [*inner, (type(obj).__name__, type(obj))] if type(obj).__module__ == "__main__" else inner


def _inside(name: str, part: str) -> str:
    """ "'state', captured by f" and "[0]" give "'state'[0], captured by f"."""
    head, captured, holder = name.partition(", captured by ")
    return f"{head}{part}{captured}{holder}"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _names(code: Any) -> set[str]:
    """The global names that ``code`` and the functions inside it mention."""
    inner = [_names(const) for const in code.co_consts if hasattr(const, "co_names")]
    return set(code.co_names).union(*inner)


def _find(obj: Any, name: str, attempt: Any, seen: set[int] | None = None) -> tuple[str, Any] | None:
    """The innermost part of ``obj`` for which ``attempt`` fails, with its name; None if all travel."""
    seen = seen if seen is not None else set()
    if id(obj) in seen or len(seen) > 2000:
        return None
    seen.add(id(obj))
    try:
        attempt(obj)
        return None
    except RecursionError:
        return name, obj
    except Exception:
        inner = (_find(part, part_name, attempt, seen) for part_name, part in _parts(obj, name))
        return next((found for found in inner if found), (name, obj))


def _blame(fn: Any, args: tuple[Any, ...], error: Exception) -> str:
    name = getattr(fn, "__name__", _type(fn))
    named = [(name, fn)] + [(f"argument {index} of {name}", arg) for index, arg in enumerate(args)]
    for part_name, part in named:
        if found := _find(part, part_name, _pack):
            comma = "," if ", captured by" in found[0] else ""
            return f"{found[0]}{comma} cannot travel to a rank: it is a {_type(found[1])}. {_advice(found[1])}"
    return f"{name} cannot travel to a rank: {error}"


_ADVICE = {
    "lock": "Make it inside the function: a lock of this process means nothing in another.",
    "RLock": "Make it inside the function: a lock of this process means nothing in another.",
    "generator": "Pass a list of its items, or the function that makes it.",
    "socket": "Pass the address and connect inside the function.",
    "Thread": "Start it inside the function.",
    "ProcessGroup": "Make the group inside the function, with dist.new_group.",
    "DistributedDataParallel": "Use model.module.state_dict(), or wrap the model inside the function.",
}


def _advice(obj: Any) -> str:
    if isinstance(obj, list | tuple | dict | set):
        return "It is nested too deeply, or too large for the memory that is left."
    if _is_tensor(obj):
        return "Pass tensor.cpu() and move it to device() inside the function."
    if isinstance(obj, _FILES):
        return "Pass the path and open the file inside the function."
    return _ADVICE.get(type(obj).__name__, "Make it inside the function, or pass what it is made from.")
