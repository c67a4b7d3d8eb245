"""The lab of notebook 11: 21 mistakes, each found or not by running the learner's program on real ranks.

A row of its table has a *trial*, which calls the program in a rank, and a judge of what the ranks gave, which raises
``Wrong`` or tells what is right.
"""

import gc
import os
import re
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from ddplab import tables
from ddplab.data import ShapesDataset
from ddplab.exercises.engine import MARKS, Attempt, Task, Wrong, judged, results
from ddplab.telling import log

__all__ = ["Status"]

ROWS = {}


class Runs(Attempt):
    """The learner's program; a run that one row has made is there for the others."""

    def __init__(self, fn, timeout_s):
        super().__init__(fn)
        self.timeout_s, self.runs = timeout_s, {}

    def try_out(self, *args, trial, world_size, timeout_s, **options):
        """The run of a trial at this world size."""
        key, options["timeout_s"] = (trial, world_size), min(timeout_s, self.timeout_s)
        if key not in self.runs:
            self.runs[key] = super().try_out(*args, trial=trial, world_size=world_size, **options)
        return self.runs[key]


@dataclass
class Status:
    """The 21 mistakes and how far one is: "·" not started, "✗", or "✓", and what was seen on the ranks.

    ``timeout_s`` limits each run. ``details`` has what the ranks of the latest check printed, and how they failed.

    >>> status = Status()
    >>> print(status.check({"DataParallel": "recommended"}, 21))
     #  state  claim or listing       seen on the ranks
    21  ✗      which tools to choose  not so: DataParallel, Horovod's last release, FairScale is by, Megatron-LM is by
    """

    rows: dict[int, tuple[str, str]] = field(default_factory=lambda: dict.fromkeys(sorted(ROWS), ("·", "")))
    timeout_s: float = 10.0
    details: str = ""

    def check(self, program, *rows):
        """Run ``program`` on ranks and judge these rows, in limited time; gives their part of the table."""
        if not rows:
            raise ValueError("say which rows: status.check(train, 7, 15)")
        if unknown := [row for row in rows if row not in ROWS]:
            raise ValueError(f"there is no row {unknown[0]}: they are numbered from 1 to {len(ROWS)}")
        attempt = Runs(program, self.timeout_s)
        for row in rows:
            state, seen = judged(ROWS[row], attempt)
            self.rows[row] = MARKS[state], FAILED.sub(r"stopped by \1:", seen)
        told = (f"{run!r}\n{run.output()}\n{run.report()}" for run in attempt.runs.values())
        self.details = "\n\n".join(one.strip() for one in told)
        return Status({row: self.rows[row] for row in rows})

    def table(self):
        """A row for each: number, state, claim, what was seen."""
        return [
            {"#": row, "state": state, "claim or listing": ROWS[row].title, "seen on the ranks": seen}
            for row, (state, seen) in self.rows.items()
        ]

    def __repr__(self):
        return tables.to_text(self.table())

    def _repr_html_(self):
        text = tables.to_html(self.table())
        for state, color in (("✓", "#009E73"), ("✗", "#D55E00")):
            text = text.replace(f">{state}<", f'><b style="color:{color}">{state}</b><')
        return text


# What the engine says of a program that raises: a cell of the table has no room for the place, ``details`` has it.
FAILED = re.compile(r"^with \d ranks[^:]*: (\w+)(?: in [^:]+, line \d+)?:")


def row(number, claim, trial, world_sizes=(2, 3), backend="gloo", timeout_s=60.0, of_run=False):
    """Decorate the judge of a row: it gets what each rank gave, or, ``of_run``, the run, which may have failed."""

    def keep(judge):
        def judge_all(attempt):
            for world_size in world_sizes:
                options = {"world_size": world_size, "backend": backend, "timeout_s": timeout_s}
                with tempfile.TemporaryDirectory() as folder:
                    run = attempt.try_out(*[folder] * (trial is load), trial=trial, **options)
                seen = judge(run if of_run else results(run))
            return seen

        ROWS[number] = Task(str(number), claim, judge_all)
        return judge

    return keep


def numbers(values):
    """
    >>> numbers([1.0, 1.5, 12])
    '1, 1.5, 12'
    """
    return ", ".join(f"{value:.3g}" for value in values)


def listed(wrong, right):
    """Raise for all that is wrong, or else give what is right."""
    if wrong:
        raise Wrong("; ".join(wrong))
    return right


class Noted(Dataset):
    """Samples that note in ``order`` who was fetched."""

    def __init__(self, samples):
        self.samples, self.order = samples, []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if not 0 <= index < len(self.samples):
            raise IndexError(index)
        self.order.append(int(index))
        return self.samples[index]


def line():
    """A model of one weight, 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@contextmanager
def gradients():
    """The gradient of the first parameter at each ``optimizer.step()``."""
    seen = []

    def note(optimizer, *_):
        grad = optimizer.param_groups[0]["params"][0].grad
        seen.append(0.0 if grad is None else grad.sum().item())

    handle = register_optimizer_step_pre_hook(note)
    yield seen
    handle.remove()


# Texts ------------------------------------------------------------------------------------------------


def error_of(fn, *args):
    """How ``fn`` failed; "" if it did not."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def listing(text):
    """What fails when the names of the text are used."""
    names = {"__name__": "listing"}
    exec(compile(text, "listing", "exec"), names)
    data = error_of(lambda: next(iter(names["train_data"])))
    return data, error_of(lambda: names["build"]()), error_of(lambda: names["Net"]()(torch.ones(1, 2)))


@row(8, "train_data = ...", listing)
def filled(ranks):
    found = ranks[0][0].replace("StopIteration: ", "train_data is empty")
    return listed([f"there is no data: {found}"] if found else [], "train_data can be looped over")


@row(17, "names not imported, no forward", listing)
def complete(ranks):
    calls = zip(("build()", "Net()(batch)"), ranks[0][1:], strict=True)
    wrong = "; ".join(f"{call}: {error}" for call, error in calls if error)
    short = re.sub(r"NotImplementedError: .* is missing the required .forward. .*", "no forward", wrong)
    return listed([short] if short else [], "the model is built, wrapped and called")


def guarded(text):
    """How often the text calls ``train``, which raises."""
    calls = []

    def train():
        calls.append(None)
        raise RuntimeError("bad batch")

    exec(compile(text, "listing", "exec"), {"train": train})
    return len(calls)


@row(6, "a try: that holds only a comment", guarded)
def compiled(ranks):
    return listed([] if ranks[0] else ["it compiles, but train() is never called"], "it compiles, and calls train()")


# Training and testing ---------------------------------------------------------------------------------


def count(program):
    """The number of images in sets of 6 and 4."""
    return program(Noted([(torch.ones(1), 0)] * 6), Noted([(torch.ones(1), 0)] * 4))


@row(16, "the loop variable hides the module data", count)
def ran(ranks):
    wrong = [f"6 + 4 images were counted as {number}" for number in ranks if number != 10]
    return listed(wrong[:1], "6 images of one set and 4 of the other were counted")


def by_hand(program):
    """Three steps of a model of one weight; the gradient of rank r is r + 1."""
    model, mine = line(), torch.full((1, 1), dist.get_rank() + 1.0)
    with gradients() as used:
        program(model, [mine] * 3)
    return used, model.weight.item()


@row(1, "gradients are synchronised after step()", by_hand)
def averaged(ranks):
    used, weights = zip(*ranks, strict=True)
    mean, steps = (len(ranks) + 1) / 2, {value for mine in used for value in mine}
    if steps == {mean}:
        return f"every step() on every rank uses the mean gradient, {mean:g}"
    if steps == {mean * len(ranks)}:
        raise Wrong(f"step() uses the sum of the gradients, {mean * len(ranks):g}; their mean is {mean:g}")
    if all(set(mine) == {rank + 1.0} for rank, mine in enumerate(used)):
        apart = max(weights) - min(weights)
        so = f"are {apart:.2g} apart" if apart > 1e-6 else "agree, but not by averaged gradients"
        raise Wrong(f"step() uses the gradient of its own rank, {numbers(mine[0] for mine in used)}: the weights {so}")
    raise Wrong(f"step() uses {numbers(used[0]) or 'nothing'} on rank 0; the mean gradient is {mean:g} each time")


def train(program):
    """Three epochs of twelve images; the gradient of each batch is 1."""
    images = Noted([torch.ones(1)] * 12)
    with gradients() as used:
        program(line(), images, 3)
    return used, images.order


@row(7, "no zero_grad()", train)
def zeroed(ranks):
    used = ranks[0][0]
    if used and set(used) == {1.0}:
        return "the gradient in step() is that of one batch, 1, in every step"
    if not any(used):
        raise Wrong("the gradient in step() is 0: it was zeroed between backward() and step()")
    after = "" if used == [*range(1, len(used) + 1)] else "; zeroed, but not in every step"
    raise Wrong(f"a batch has the gradient 1, but the first steps use {numbers(used[:4])}: it piles up{after}")


@row(15, "no set_epoch()", train)
def reordered(ranks):
    length = len(ranks[0][1]) // 3
    orders = [[order[epoch * length :][:length] for _, order in ranks] for epoch in range(3)]
    if sorted(index for mine in orders[0] for index in mine) != list(range(12)):
        raise Wrong("the ranks do not share the 12 images: some are met twice, or by nobody, in one epoch")
    same = [epoch for epoch in (1, 2) if orders[epoch] == orders[epoch - 1]]
    if same == [1, 2]:
        raise Wrong(f"rank 0 met its images in the same order in all 3 epochs: {numbers(orders[0][0])}")
    if same:
        raise Wrong(f"epoch {same[0]} has the order of epoch {same[0] - 1}: set_epoch() came after the loop had begun")
    return "every epoch has an order of its own, and the ranks share the images"


class Pictures(Dataset):
    """Stands for torchvision's CIFAR10 without a network: same arguments, same errors; ``download`` is slow."""

    def __init__(self, root, train=True, transform=None, download=False):
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

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        from torchvision.transforms.functional import to_pil_image

        picture = to_pil_image(self.pixels[index])
        return (self.transform(picture) if self.transform else picture), index


def load(program, root):
    """The shape of the first batch from a folder that is empty at first, or why there is none."""
    dist.barrier()
    loader = program(Pictures, root)
    try:
        return list(next(iter(loader))[0].shape), ""
    except TypeError as error:
        return None, str(error)


@row(18, "no transform, every rank downloads", load, of_run=True)
def fetched(run):
    by = {metric.rank for metric in run.metrics if metric.name == "downloads"}
    if not run.ok and "Dataset not found" in run.failures[0].message:
        why = "no barrier of all ranks after the download" if by else "nobody downloads"
        raise Wrong(f"a rank read the folder before the images were there: {why}")
    wrong, (shape, error) = [f"{len(by)} ranks download into one folder"] if len(by) > 1 else [], results(run)[0]
    if shape is None:
        wrong.append(f"no batch: {'the loader found PIL images' if 'PIL' in error else error}")
    elif shape[1:] != [3, 32, 32]:
        wrong.append(f"a batch has the shape {shape}, not [n, 3, 32, 32]")
    return listed(wrong, "one rank downloads, and all make batches")


def lenet(program):
    """How many outputs 32 images give, and the layers with nothing between them."""
    layers = []
    model = program().eval()  # so that dropout and batch norm change nothing, or next to nothing: no activations
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda _, x, y, name=name: layers.append((name, x[0], y)))
    num_outputs = len(model(torch.randn(32, 3, 32, 32)))
    bare = []
    for (name, _, out), (after, into, _) in zip(layers, layers[1:], strict=False):
        pooled = F.max_pool2d(out, 2) if out.dim() == 4 else out
        if into.numel() in (out.numel(), pooled.numel()):
            same = out if into.numel() == out.numel() else pooled
            bare += [f"{name} and {after}"] if torch.allclose(into.flatten(), same.flatten(), rtol=1e-4) else []
    return num_outputs, bare


@row(19, "LeNet with 16·4·4 and no activation", lenet)
def computes(ranks):
    num_outputs, bare = ranks[0]
    wrong = [f"32 images of 32×32 give {num_outputs} outputs"] if num_outputs != 32 else []
    wrong += [f"no activation between {', '.join(bare)}"] if bare else []
    return listed(wrong, "32 images give 32 outputs, with an activation between all layers")


class Knows(nn.Module):
    """A model whose answer stands in its input."""

    def forward(self, x):
        return F.one_hot(x.long().flatten(), 2).float()


def evaluate(program):
    """The accuracy, and how many images were fetched for it."""
    guesses = [1, 1, 1, 0, 1, 0, 1, 0, 1, 0]  # all labels are 1: 6 of 10 are right, and 8 of 12 with the first twice
    images = Noted([(torch.tensor([float(guess)]), 1) for guess in guesses])
    value = program(Knows(), images)
    return None if value is None else float(value), len(images.order)


@row(20, "every rank tests all and prints", evaluate, of_run=True)
def evaluated(run):
    values, met = zip(*results(run), strict=True)
    values, num_lines = [value for value in values if value is not None], len(run.output(stream="stdout").splitlines())
    wrong = [f"{sum(met)} images tested, of 10 that there are"] if sum(met) != 10 else []
    wrong += [f"{num_lines} lines printed"] if num_lines != 1 else []
    wrong += [f"accuracy {100 * value:.0f} %, and it is 60 %" for value in values if abs(value - 0.6) > 1e-6][:1]
    wrong += [] if values else ["no rank returned the accuracy"]
    return listed(wrong, "10 images tested once, 60 % right, 1 line printed")


# Claims as formulas -----------------------------------------------------------------------------------


def parameters(program):
    """What is claimed, and what DDP holds, of 28 parameters."""
    there = sum(parameter.numel() for parameter in DDP(nn.Linear(6, 4)).parameters())
    return program(28, dist.get_world_size()), there


@row(10, "DDP splits the model", parameters)
def replicated(ranks):
    told = f"claimed {ranks[0][0]:g} parameters on each of {len(ranks)} ranks; counted {numbers(n for _, n in ranks)}"
    return listed([told] if any(said != there for said, there in ranks) else [], told)


def wrap(program):
    """How many of 900 parameters this rank holds."""
    model = program(nn.Sequential(nn.Linear(30, 30, bias=False)))
    mine = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    return mine


@row(11, "DDP trains models that do not fit", wrap)
def sharded(ranks):
    told = f"of 900 parameters the ranks hold {numbers(ranks)}; there is room for 540"
    return listed([told] if max(ranks) > 540 or sum(ranks) != 900 else [], told)


def update(program):
    """The change of a weight, claimed, and made by DDP with Adam."""
    gradients = [3.0, -1.0, -1.0][: dist.get_world_size()]
    model = DDP(line())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.tensor([[gradients[dist.get_rank()]]])).sum().backward()
    optimizer.step()
    return float(program(gradients)), model.module.weight.item()


@row(12, "updates are averaged", update)
def updated(ranks):
    said, did = (round(value, 5) + 0.0 for value in ranks[0])  # + 0.0: no "-0.000"
    told = f"{len(ranks)} ranks: claimed a change of {said:.3g}, DDP with Adam made {did:.3g}"
    return listed([told] if abs(said - did) >= 1e-4 else [], told)


# The frame of a script --------------------------------------------------------------------------------

GPUS = 2  # of a machine
MACHINES = {"world_sizes": (2, 4), "backend": None, "timeout_s": 5.0}  # one, and two


def main(program):
    """As torchrun starts it on machines of two ranks; torch.cuda is only told."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % GPUS)
    seen, current = {"own": int(os.environ["RANK"])}, [0]  # the current device, as torch.cuda would have it

    def work(device):
        index = torch.device(device).index
        seen.update(gpu=current[0] if index is None else index, current=current[0], alone=not dist.is_initialized())
        if not seen["alone"]:
            dist.all_reduce(torch.ones(1))
            seen["rank"] = dist.get_rank()

    def set_device(device):
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    with mock.patch.multiple("torch.cuda", set_device=set_device, current_device=lambda: current[0]):
        try:
            program(work)
        finally:
            if seen.get("alone"):
                raise Wrong("work(device) found no process group: it was destroyed too early, or never made")
    return seen | {"open": dist.is_initialized()}


@row(9, "no destroy_process_group()", main, **MACHINES)
def closed(ranks):
    is_open = any(rank["open"] for rank in ranks)
    wrong = ["main has ended, and its process group is still there, with threads and sockets"] if is_open else []
    return listed(wrong, "no process group is left when main ends")


@row(13, "rank=local_rank", main, of_run=True, **MACHINES)
def joined(run):
    if run.world_size == 4 and run.failures and run.failures[0].type == "Timeout":
        limit = f"{run.spec.timeout_s:g} s"
        raise Wrong(f"on 2 machines nobody got past init in {limit}: do two say that they are rank 0?")
    for rank in results(run):
        if rank.get("rank") != rank["own"]:
            raise Wrong(f"rank {rank['own']} joined as rank {rank.get('rank')}")
    return "on 1 machine and on 2, every process joins as the rank that torchrun gave it"


@row(14, "no set_device()", main, **MACHINES)
def placed(ranks):
    gpus, current = [rank.get("gpu") for rank in ranks], [rank.get("current") for rank in ranks]
    if None in gpus:
        raise Wrong("main did not call work(device)")
    for rank, gpu in enumerate(gpus):
        if gpu >= GPUS:
            raise Wrong(f"rank {rank} wants cuda:{gpu} of a machine with {GPUS} GPUs: local rank, not rank")
    if gpus[0] == gpus[1]:
        raise Wrong(f"ranks 0 and 1 of one machine both compute on cuda:{gpus[0]}")
    if current != gpus:
        there = f"its current device is cuda:{current[1]}"
        raise Wrong(f"rank 1 computes on cuda:{gpus[1]}, but {there}: .cuda() goes there")
    return "each rank of a machine has a GPU of its own, and it is the current one"


# RPC and errors ---------------------------------------------------------------------------------------


def ask(program):
    """The answer, and whether an RPC agent is left."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    try:
        answer = program()
    finally:
        if os.environ["RANK"] == "0":
            store.set("asked", "")
    store.get("asked")  # nobody leaves before rank 0 has its answer, also without shutdown()
    return answer, rpc.api._is_current_rpc_agent_set()


@row(3, "RPC needs init_process_group only", ask, backend=None)
def asked(ranks):
    if ranks[0][0] != 3:
        raise Wrong(f"rank 0 got {ranks[0][0]!r} for 1 + 2")
    is_open = any(is_open for _, is_open in ranks)
    wrong = ["the answer came, but the RPC agents are still there: rpc.shutdown() is missing"] if is_open else []
    return listed(wrong, "rank 0 has the answer of worker1, and no RPC agent is left")


def single_weights():
    """The single weights that lie in this process."""
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.requires_grad]
    return [one.item() for one in found if one.is_leaf and one.numel() == 1]


def remote(program):
    """The weight on worker1, which was 2, after a step: as rank 0 tells it, and as it lies there at the end."""
    there, shutdown = [], rpc.shutdown

    def look_first(*args, **kwargs):
        if os.environ["RANK"] == "0":
            with suppress(RuntimeError):  # no such worker
                there.extend(rpc.rpc_sync("worker1", single_weights))
        shutdown(*args, **kwargs)

    with mock.patch("torch.distributed.rpc.shutdown", look_first):
        return program(2.0), there


@row(2, "an optimizer's step is sent by RPC", remote, backend=None)
def stepped(ranks):
    weight, there = ranks[0]
    if not isinstance(weight, float):
        raise Wrong(f"rank 0 returned {weight!r}, not the weight on worker1")
    if weight == 2.0:
        raise Wrong("the weight on worker1 is still 2: a copy of the optimizer stepped, on a copy of the weight")
    if there and all(abs(value - weight) > 1e-6 for value in there):
        raise Wrong(f"rank 0 returned {weight:.3g}, but the weight on worker1 is {numbers(there)}: a copy stepped")
    told = f"the weight on worker1 went from 2 to {weight:.3g}"
    return listed([told] if abs(weight - 1.9) >= 1e-6 else [], told)


def handled(program):
    """On rank 0, by cause, the class of each error that the program did not catch."""

    def no_server():
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=0.2))

    def no_key():
        (empty := dist.HashStore()).set_timeout(timedelta(seconds=0.1))
        empty.get("nothing")

    def no_variable():
        with mock.patch.dict(os.environ):
            del os.environ["MASTER_ADDR"]
            dist.init_process_group("gloo")

    def no_peer():
        for _ in range(1000):  # one or two may still pass
            dist.all_reduce(torch.ones(1))

    def bug():
        raise TypeError("a mistake in the program")

    # On all ranks: torch counts each attempt, and only ranks with equal counts find each other.
    seen = {"no variable": error_of(program, no_variable)}
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() != 0:
        return None
    seen |= {fn.__name__.replace("_", " "): error_of(program, fn) for fn in (no_peer, no_server, no_key, bug)}
    return {cause: told.partition(":")[0] for cause, told in seen.items()}


@row(5, "DistBackendError has three causes", handled, backend=None)
def caught(ranks):
    out = [f"{kind} ({cause})" for cause, kind in ranks[0].items() if kind and cause != "bug"]
    if out:
        raise Wrong("not caught: " + ", ".join(out))
    if not ranks[0]["bug"]:
        raise Wrong("all four are caught, and so is a TypeError, a mistake in the program: that hides bugs")
    return "all four are caught, and a TypeError is not"


def careful(program):
    """Four steps, of which rank 1 fails once in step 1."""
    failed = []

    def step(number):
        if dist.get_rank() == 1 and number == 1 and not failed:
            failed.append(number)
            raise RuntimeError("bad batch")
        total = torch.tensor(float(number))
        dist.all_reduce(total)
        log(number, total=total.item())

    return program(step, 4)


@row(4, "a try around training handles errors", careful, of_run=True)
def gave_up(run):
    for metric in run.metrics:
        other = metric.value - (mine := metric.step or 0) * (run.world_size - 1)
        if other != mine:
            who, whom = (1, 0) if metric.rank == 1 else (metric.rank, 1)
            met = f"step {other:g}" if who != 1 and other in range(mine + 1, 4) else "another call"
            raise Wrong(f"rank 1 went on alone: step {mine} of rank {who} met {met} of rank {whom}, in silence")
    if run.ok and all(sum(metric.rank == rank for metric in run.metrics) == 4 for rank in range(run.world_size)):
        return "rank 1 made the failed step again before the next: all ranks made the same four steps"
    if run.ok or 1 in run.returned:
        raise Wrong("rank 1 hid its error: it returned as if all were well")
    first = run.failures[0]
    if first.rank == 1 and first.type == "SystemExit":
        raise Wrong("rank 1 ends, but tells nobody why: raise its own error in place of SystemExit")
    if first.rank != 1 or "bad batch" not in first.message + first.traceback:
        results(run)
    if run.returned:
        raise Wrong("rank 1 failed, but another rank returned as if all were well")
    return "rank 1 ends with its own error, and the others end with it"


def chosen(attempt):
    """Checked against facts, the first of them in torch's own words."""
    advised = "recommended to use :class:`~torch.nn.parallel.DistributedDataParallel`" in str(nn.DataParallel.__doc__)
    facts = {
        "DataParallel": "discouraged" if advised else "recommended",
        "Horovod's last release": 2023,
        "FairScale is by": "Meta",
        "Megatron-LM is by": "NVIDIA",
    }
    answers = attempt.fn if isinstance(attempt.fn, dict) else {}
    wrong = ", ".join(name for name, fact in facts.items() if str(answers.get(name)) != str(fact))
    return listed([f"not so: {wrong}"] if wrong else [], "all four are right")


ROWS[21] = Task("21", "which tools to choose", chosen)
