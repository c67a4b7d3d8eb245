"""What the correction lab does with a learner's program in a rank: call it, and give what was seen.

Each trial is one function; ``correction.py`` launches it and judges what it gives.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from ddplab.data import ShapesDataset
from ddplab.telling import log

__all__ = ["Pictures"]


class Pictures(Dataset[Any]):
    """Stands for torchvision's CIFAR10 without a network: same arguments, same errors; ``download`` is slow."""

    def __init__(self, root: Any, train: bool = True, transform: Any = None, download: bool = False) -> None:
        file = Path(root, "pictures.pt")
        if download and not file.exists():
            log(downloads=1)
            time.sleep(0.6)  # the network; the others begin meanwhile
            mine = file.with_suffix(f".{os.getpid()}")
            torch.save(ShapesDataset(8).pixels, mine)
            mine.replace(file)
        if not file.exists():
            raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")
        self.pixels, self.transform = torch.load(file), transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from torchvision.transforms.functional import to_pil_image

        picture = to_pil_image(self.pixels[index])
        return (self.transform(picture) if self.transform else picture), index


class Noted(Dataset[Any]):
    """Samples that note in ``order`` who was fetched."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.order = samples, list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.samples):
            raise IndexError(index)
        self.order.append(int(index))
        return self.samples[index]


# Trials -----------------------------------------------------------------------------------------------


def _line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@contextmanager
def _gradients() -> Iterator[list[float]]:
    """The gradient of the first parameter at each ``optimizer.step()``."""
    seen: list[float] = []

    def note(optimizer: Any, *_: Any) -> None:
        grad = optimizer.param_groups[0]["params"][0].grad
        seen.append(0.0 if grad is None else grad.sum().item())

    handle = register_optimizer_step_pre_hook(note)
    yield seen
    handle.remove()


def by_hand(program: Any) -> Any:
    """Row 1: three steps of a model of one weight; the gradient of rank r is r + 1."""
    model, mine = _line(), torch.full((1, 1), dist.get_rank() + 1.0)
    with _gradients() as used:
        program(model, [mine] * 3)
    return {"used": used, "weight": model.weight.item()}


def train(program: Any) -> Any:
    """Rows 7 and 15: three epochs of twelve images; the gradient of each batch is 1."""
    images = Noted([torch.ones(1)] * 12)
    with _gradients() as used:
        program(_line(), images, 3)
    return {"used": used, "order": images.order}


def main(program: Any, per_node: int) -> Any:
    """Rows 9, 13 and 14: as torchrun starts it on machines of ``per_node`` ranks; torch.cuda is only told."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_node)
    seen: dict[str, Any] = {"gpus": per_node, "own": int(os.environ["RANK"])}
    current = [0]  # the current device, as torch.cuda would have it

    def work(device: Any) -> None:
        index = torch.device(device).index
        seen.update(gpu=current[0] if index is None else index, current=current[0])
        if not dist.is_initialized():
            log(without_group=1)
        else:
            dist.all_reduce(torch.ones(1))
            seen["rank"] = dist.get_rank()

    def set_device(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    def current_device() -> int:
        return current[0]

    with mock.patch.multiple("torch.cuda", set_device=set_device, current_device=current_device):
        program(work)
    return seen | {"open": dist.is_initialized()}


def load(program: Any, root: str) -> Any:
    """Row 18: who downloads into an empty folder, and the first batch."""
    dist.barrier()
    loader = program(Pictures, root)
    try:
        return {"batch": list(next(iter(loader))[0].shape)}
    except TypeError as error:
        return {"batch": None, "error": str(error)}


def count(program: Any) -> Any:
    """Row 16: the number of images in sets of 6 and 4."""
    return program(Noted([(torch.ones(1), 0)] * 6), Noted([(torch.ones(1), 0)] * 4))


def _attempt(fn: Any, *args: Any) -> str:
    """How ``fn`` failed; "" if it did not."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def listing(text: str) -> Any:
    """Rows 8 and 17: what fails when the names of the text are used."""
    names: dict[str, Any] = {"__name__": "listing"}
    exec(compile(text, "listing", "exec"), names)
    batch = torch.ones(1, 2)
    return {
        "data": _attempt(lambda: next(iter(names["train_data"]))),
        "net": _attempt(lambda: names["Net"]()(batch)),
        "build": _attempt(lambda: names["build"]()),
    }


def lenet(program: Any) -> Any:
    """Row 19: how many outputs 32 images give, and the layers with nothing between them."""
    layers: list[tuple[str, Any, Any]] = []
    model = program().eval()  # so that dropout and batch norm change nothing, or next to nothing: no activations
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda _, x, y, name=name: layers.append((name, x[0], y)))
    rows = len(model(torch.randn(32, 3, 32, 32)))
    bare = []
    for (name, _, out), (after, into, _) in zip(layers, layers[1:], strict=False):
        pooled = F.max_pool2d(out, 2) if out.dim() == 4 else out
        if into.numel() in (out.numel(), pooled.numel()):
            same = out if into.numel() == out.numel() else pooled
            bare += [f"{name} and {after}"] if torch.allclose(into.flatten(), same.flatten(), rtol=1e-4) else []
    return {"rows": rows, "bare": bare}


class _Knows(nn.Module):
    """A model whose answer stands in its input."""

    def forward(self, x: Any) -> Any:
        return F.one_hot(x.long().flatten(), 2).float()


def evaluate(program: Any) -> Any:
    """Row 20: the accuracy, and which images were fetched for it."""
    guesses = [1, 1, 1, 0, 1, 0, 1, 0, 1, 0]  # all labels are 1: 6 of 10 are right, and 8 of 12 with the first twice
    images = Noted([(torch.tensor([float(guess)]), 1) for guess in guesses])
    value = program(_Knows(), images)
    return {"value": None if value is None else float(value), "order": images.order}


def ask(program: Any) -> Any:
    """Row 3: the answer, and whether an RPC agent is left."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    try:
        answer = program()
    finally:
        if os.environ["RANK"] == "0":
            store.set("asked", "")
    store.get("asked")  # nobody leaves before rank 0 has its answer, also without shutdown()
    return {"answer": answer, "open": rpc.api._is_current_rpc_agent_set()}


def handled(program: Any) -> Any:
    """Row 5: the class of each error that the program did not catch."""

    def network() -> None:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=0.2))

    def store() -> None:
        (empty := dist.HashStore()).set_timeout(timedelta(seconds=0.1))
        empty.get("nothing")

    def variable() -> None:
        with mock.patch.dict(os.environ):
            del os.environ["MASTER_ADDR"]
            dist.init_process_group("gloo")

    def peer() -> None:
        for _ in range(1000):  # one or two may still pass
            dist.all_reduce(torch.ones(1))

    def bug() -> None:
        raise TypeError("a mistake in the program")

    # On all ranks: torch counts each attempt, and only ranks with equal counts find each other.
    seen = {"variable": _attempt(program, variable)}
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() != 0:
        return None
    seen |= {fn.__name__: _attempt(program, fn) for fn in (network, store, peer, bug)}
    return {name: told.partition(":")[0] for name, told in seen.items()}


def guarded(text: str) -> Any:
    """Row 6: how often the text calls ``train``, which raises."""
    calls: list[None] = []

    def train() -> None:
        calls.append(None)
        raise RuntimeError("bad batch")

    exec(compile(text, "listing", "exec"), {"train": train})
    return len(calls)


def careful(program: Any) -> Any:
    """Row 4: four steps, of which rank 1 fails once in step 1."""
    failed: list[int] = []

    def step(number: int) -> None:
        if dist.get_rank() == 1 and number == 1 and not failed:
            failed.append(number)
            raise RuntimeError("bad batch")
        total = torch.tensor(float(number))
        dist.all_reduce(total)
        log(number, total=total.item())

    return program(step, 4)


def parameters(program: Any) -> Any:
    """Row 10: what is claimed, and what DDP holds, of 28 parameters."""
    model = nn.Linear(6, 4)
    there = sum(parameter.numel() for parameter in DDP(model).parameters())
    return {"said": program(28, dist.get_world_size()), "there": there}


def wrap(program: Any) -> Any:
    """Row 11: how many of 900 parameters this rank holds."""
    model = program(nn.Sequential(nn.Linear(30, 30, bias=False)))
    mine = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    return mine


def update(program: Any) -> Any:
    """Row 12: the change of a weight, claimed, and made by DDP with Adam."""
    gradients = [3.0, -1.0, -1.0][: dist.get_world_size()]
    model = DDP(_line())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.tensor([[gradients[dist.get_rank()]]])).sum().backward()
    optimizer.step()
    return {"said": float(program(gradients)) + 0.0, "did": model.module.weight.item()}


def _weights() -> list[float]:
    """The single weights that lie in this process."""
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.requires_grad]
    return [one.item() for one in found if one.is_leaf and one.numel() == 1]


def remote(program: Any) -> Any:
    """Row 2: the weight on worker1, which was 2, after a step: as rank 0 tells it, and as it lies there at the end."""
    there: list[float] = []
    shutdown = rpc.shutdown

    def look_first(*args: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "0":
            with suppress(RuntimeError):  # no such worker
                there.extend(rpc.rpc_sync("worker1", _weights))
        shutdown(*args, **kwargs)

    with mock.patch("torch.distributed.rpc.shutdown", look_first):
        return {"said": program(2.0), "there": there}
