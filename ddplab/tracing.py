"""Between the learner and ``all_reduce``: notes name, shape, group and time of each call; changes nothing.

Runs in a rank. The functions of ``torch.distributed`` are replaced by ones that call them with what they
were given and give what they gave. The latest ``MAX_CALLS`` calls are kept, and told when the rank ends or
is asked where it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ddplab import places
from ddplab.events import Call, Where

__all__ = ["buckets", "calls", "install", "note_more", "num_calls", "standing"]

# The ranks of a group must make these calls in the same order: they are numbered.
COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list",
)  # fmt: skip
REDUCTIONS = {name for name in COLLECTIVES if "reduce" in name}
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
SET_UP = ("init_process_group", "new_group", "destroy_process_group", "init_device_mesh")
RPC = ("init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown")
WITHOUT_WAITING = ("irecv", "isend", "remote", "rpc_async")  # these give what can be waited for
# Methods of torch's own objects, of which only that and where they are called is noted.
METHODS = ("backward", "DDP(...)")
MAX_CALLS = 1000
_NOTHING: Mapping[str, Any] = {}


class _Note:
    """One call as it is noted while it runs; ``Call`` says what the fields mean."""

    __slots__ = (
        "begin_s", "caller", "dtype", "end_s", "function", "group", "line", "name", "number", "op", "peer", "shape",
        "since_s", "worker",
    )  # fmt: skip

    def __init__(self, name: str, frame: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NOTHING) -> None:
        self.name = name
        self.caller, self.line = frame.f_code, frame.f_lineno
        group = kwargs.get("group")
        self.group = "" if group is None else _group_name(group)
        self.number = 0
        self.shape, self.dtype = _first_tensor((*args, *kwargs.values())) if args or kwargs else (None, "")
        self.op = _op(args, kwargs) if name in REDUCTIONS else ""
        self.peer = _peer(args, kwargs) if args or kwargs else None
        self.worker = self.function = ""
        if name in RPC and (args or kwargs):
            self.peer, self.worker, self.function = _asked(args, kwargs)
        self.since_s: float | None = None
        self.end_s: float | None = None
        self.begin_s = time.monotonic()

    def as_call(self, rank: int, launched_s: float) -> Call:
        """The call as it is told, with times in seconds since the launch."""
        begin_s, end_s = self.begin_s - launched_s, None if self.end_s is None else self.end_s - launched_s
        details = self.name, self.number, self.group, self.shape, self.dtype, self.op, self.peer
        since_s = None if self.since_s is None else self.since_s - launched_s
        return Call(rank, begin_s, *details, _where(self), end_s, since_s, self.worker, self.function)


_notes: deque[_Note] = deque(maxlen=MAX_CALLS)
_numbers: dict[str, int] = {}
_works: weakref.WeakKeyDictionary[Any, _Note] = weakref.WeakKeyDictionary()
_inside = threading.local()
_models: weakref.WeakSet[Any] = weakref.WeakSet()
_buckets: dict[int, tuple[str, str]] | None = None


def install() -> None:
    """Note the calls of this process from now on."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    for name in (*COLLECTIVES, *POINT_TO_POINT, *SET_UP):
        _replace(name, name, c10d, dist)
    if dist.rpc.is_available():
        for name in RPC:
            _replace(name, f"rpc.{name}" if name == "shutdown" else name, dist.rpc.api, dist.rpc)
        dist.rpc.PyRRef.to_here = _noted_wait(dist.rpc.PyRRef.to_here)  # type: ignore[method-assign]
        torch._C.Future.wait = _noted_wait(torch._C.Future.wait)  # type: ignore[method-assign]
        torch.futures.wait_all = _noted_wait(torch.futures.wait_all)
    dist.Work.wait = _noted_wait(dist.Work.wait)  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = _noted("DDP(...)", DistributedDataParallel.__init__)  # type: ignore[method-assign]
    torch.Tensor.backward = _noted("backward", torch.Tensor.backward)  # type: ignore[method-assign]


def _replace(name: str, shown: str, *modules: Any) -> None:
    """Replace a function where it stands, by one and the same: torch compares ``isend`` by identity."""
    noted: dict[Any, Any] = {}
    for module in modules:
        if call := getattr(module, name, None):
            setattr(module, name, noted.setdefault(call, _noted(shown, call)))


def _noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, but noted, unless it is made by torch inside a call that is noted already."""
    if hasattr(call, "_ddplab_notes"):
        return call
    is_method = name in METHODS
    is_numbered = name in COLLECTIVES or name == "backward"

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "call", False):
            return call(*args, **kwargs)
        frame = sys._getframe(1)
        note = _Note(name, frame) if is_method else _Note(name, frame, args, kwargs)
        if is_numbered:
            order = name if name == "backward" else note.group
            note.number = _numbers[order] = _numbers.get(order, 0) + 1
            if _buckets is not None and name == "backward" and note.number in (1, 3):
                _note_buckets(_buckets)
        _inside.call = True
        _notes.append(note)
        try:
            given = call(*args, **kwargs)
            if name == "DDP(...)":
                _models.add(args[0])
            if given is not None and (kwargs.get("async_op") or name in WITHOUT_WAITING):
                _works[given] = note
            return given
        finally:
            _inside.call = False
            note.end_s = time.monotonic()

    noted._ddplab_notes = True  # type: ignore[attr-defined]
    return noted


def _noted_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """``Work.wait`` and its like, but noted as the wait for the call that gave the work."""

    @functools.wraps(wait)
    def noted(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("futures")
        works = [] if getattr(_inside, "call", False) else given if isinstance(given, list) else [given]
        notes = [_wait_note(_works[work], sys._getframe(1)) for work in works if work in _works]
        _notes.extend(notes)
        try:
            return wait(*args, **kwargs)
        finally:
            for note in notes:
                note.end_s = time.monotonic()

    return noted


def _wait_note(waited: _Note, frame: Any) -> _Note:
    note = _Note(f"wait of {waited.name}", frame)
    note.group, note.number, note.op, note.peer = waited.group, waited.number, waited.op, waited.peer
    note.shape, note.dtype, note.since_s = waited.shape, waited.dtype, waited.begin_s
    note.worker, note.function = waited.worker, waited.function
    return note


def note_more() -> None:
    """Note from now on more calls, and how large the buckets of DDP models are: a trace is told with them."""
    global _buckets, _notes
    _buckets, _notes = {}, deque(_notes, 5 * MAX_CALLS)


def buckets() -> list[list[list[int]]]:
    """Of each DDP model the bytes of its buckets: in its first step, and once DDP has cut them anew."""
    known = list((_buckets or {}).values())
    return [[[int(size) for size in text.split(",") if text] for text in texts] for texts in known]


def _note_buckets(known: dict[int, tuple[str, str]]) -> None:
    """Ask the models, which know it before the first ``backward``, and for later steps before the third."""
    for model in list(_models):
        with contextlib.suppress(Exception):
            told = model._get_ddp_logging_data()
            known[id(model)] = told.get("bucket_sizes", ""), told.get("rebuilt_bucket_sizes", "")


def standing(longer_s: float) -> str:
    """What this process is doing if the latest of its calls has not returned for so many seconds, else ""."""
    note = next((note for note in reversed(_notes.copy()) if note.end_s is None), None)
    if note is None or time.monotonic() - note.begin_s < longer_s:
        return ""
    verb = "in" if note.name in METHODS else "waits for" if note.since_s is not None else "waits in"
    number = f" #{note.number}" if note.number and note.name not in METHODS else ""
    return f"{verb} {note.name.removeprefix('wait of ')}{number}"


def num_calls() -> int:
    """How many calls are noted now."""
    return len(_notes)


def calls(rank: int, launched_s: float) -> tuple[Call, ...]:
    """The latest calls, oldest first, with times in seconds since the launch."""
    return tuple(note.as_call(rank, launched_s) for note in list(_notes))


def _where(note: _Note) -> Where | None:
    code = note.caller
    return places.place(code.co_filename, note.line, code.co_qualname) if places.is_learners(code.co_filename) else None


def _group_name(group: Any) -> str:
    """ "" for the default group, else its ranks, such as "0, 2"."""
    import torch.distributed as dist

    try:
        return "" if group is dist.group.WORLD else ", ".join(map(str, dist.get_process_group_ranks(group)))
    except Exception:  # what is no group is for torch to refuse
        return repr(group)


def _first_tensor(values: tuple[Any, ...]) -> tuple[tuple[int, ...] | None, str]:
    tensor_type = sys.modules["torch"].Tensor
    for value in values:
        if isinstance(value, tensor_type):
            return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    for value in values:
        if isinstance(value, list | tuple) and value and isinstance(value[0], tensor_type):
            return tuple(value[0].shape), str(value[0].dtype).removeprefix("torch.")
    return None, ""


def _op(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    kinds = sys.modules["torch.distributed"].ReduceOp, sys.modules["torch.distributed"].ReduceOp.RedOpType
    op = next((value for value in (kwargs.get("op"), *args) if isinstance(value, kinds)), None)
    return "SUM" if op is None else str(op).rpartition(".")[2]


def _asked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | None, str, str]:
    """The rank or the name of the worker that an rpc asks, and the name of the function; of init_rpc its own name."""
    to, function = (*args, None, None)[:2]
    to, function = kwargs.get("to", kwargs.get("name", to)), kwargs.get("func", function)
    peer, worker, name = getattr(to, "id", to), getattr(to, "name", to), getattr(function, "__name__", "")
    if str(name).startswith("_local_invoke"):  # how torch asks for a method of what an RRef refers to
        name = kwargs.get("args", (None, name))[1]
    return peer if type(peer) is int else None, worker if type(worker) is str else "", str(name)


def _peer(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    named = (kwargs.get(name) for name in ("src", "dst", "group_src", "group_dst"))
    return next((value for value in (*named, *args) if type(value) is int), None)
