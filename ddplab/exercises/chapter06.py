"""Tasks on training for real: a loss of the whole job, a checkpoint, and a training that resumes to the last bit."""

import contextlib
import errno
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ddplab.exercises.chapter03 import weights_of
from ddplab.exercises.engine import Attempt, Wrong, on_ranks, task


@task("06.1", "The loss of the job")
def mean_loss(attempt: Attempt) -> None:
    """``mean_loss(batches)`` gives on every rank the mean loss over the samples of all ranks."""
    for shares in LOSSES:
        values = attempt.results(shares, world_size=len(shares), trial=share_of)
        if None in values:
            raise Wrong(f"{on_ranks(len(shares))}, rank {values.index(None)} gives None: all shall have the loss")
        values = list(map(float, values))
        ways = ways_to_average(shares)
        right = ways.pop("right")
        if all(is_near(value, right) for value in values):
            continue
        where, told = on_ranks(len(shares)), ", ".join(f"{value:.4g}" for value in values)
        means = [weighted(share) for share in shares]
        if len(set(told.split(", "))) > 1:
            if is_near(values[0], right):
                raise Wrong(f"{where}, rank 0 has the loss of the job, and the ranks give {told}: all shall have it")
            if all(map(is_near, values, means)):
                raise Wrong(f"{where}, each rank gives the loss of its own share: {told}; the job's is {right:.4g}")
        why = next(
            (way for way, value in ways.items() if is_near(values[0], value)),
            "that is no mean over the samples of all ranks",
        )
        raise Wrong(f"{where}, they give {told} and the loss of the job is {right:.4g}: {why}")


LOSSES = (
    [[(1.0, 8), (2.0, 8), (6.0, 2)], [(3.0, 8), (5.0, 3)]],
    [[(2.0, 4), (5.0, 1)]],
    [[(1.0, 4), (1.5, 4)], [(4.0, 3)], [(9.0, 1), (2.0, 3)]],
)


def share_of(fn, shares):
    """What ``fn`` gives for this rank's batches."""
    return fn(shares[dist.get_rank()])


def weighted(batches):
    """The mean over samples."""
    return sum(loss * num for loss, num in batches) / sum(num for _, num in batches)


def ways_to_average(shares):
    """What comes out of the right way and of wrong ones, by what is to be said of them."""
    batches = [batch for share in shares for batch in share]
    total, num = sum(loss * num for loss, num in batches), sum(num for _, num in batches)
    losses, means = [loss for loss, _ in batches], [weighted(share) for share in shares]
    plain = [sum(loss for loss, _ in share) / len(share) for share in shares]
    return {
        "right": weighted(batches),
        "that is the mean over batches, in which a small one counts as much": sum(losses) / len(losses),
        "that is the mean of the ranks' means, and their shares are unequal": sum(means) / len(means),
        "that is a mean over batches on each rank, and then over ranks; samples must count": sum(plain) / len(plain),
        "a batch's mean is added up once, and divided by all samples": sum(losses) / num,
        "that is the sum over all ranks, divided by what rank 0 has": total / sum(num for _, num in shares[0]),
        "that is the sum over samples": total,
        "that is the sum of the ranks' means": sum(means),
    }


def is_near(value, wanted):
    """Equal but for rounding."""
    return abs(value - wanted) <= 1e-4 * abs(wanted)


@task("06.2", "Save a checkpoint")
def save(attempt: Attempt) -> None:
    """``save(path, state)``: rank 0 writes it whole or not at all, and all ranks come back when it is there."""
    for world_size, num_numbers in ((1, 9000), (2, 7000), (3, 8000)):
        with tempfile.TemporaryDirectory() as folder:
            trial = while_disk_is_full if world_size == 1 else watched
            attempt.results(Path(folder, "last.pt"), num_numbers, world_size=world_size, trial=trial)


def state_in(epoch, num_numbers):
    """A state of this rank."""
    return {"epoch": epoch, "rank": dist.get_rank(), "weights": torch.full((num_numbers,), float(epoch))}


@contextlib.contextmanager
def room_for(num_bytes):
    """In the block this process can write files of so many bytes, as if the disk were full then."""
    import resource  # not on Windows

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def while_disk_is_full(fn, path, num_numbers):
    """One rank saves, when there is room for half a checkpoint; and again, when there is enough."""
    torch.save(state_in(0, num_numbers), path)
    with room_for(2 * num_numbers), contextlib.suppress(Exception):
        fn(path, state_in(1, num_numbers))
    if found(path, num_numbers) is None:
        raise Wrong("the disk was full when half was written, and the old checkpoint is gone, too: it was overwritten")
    fn(path, state_in(2, num_numbers))
    if (epoch := found(path, num_numbers)) != 2:
        raise Wrong(f"with 1 rank, the file holds {'nothing of use' if epoch is None else f'epoch {epoch}, not 2'}")


def watched(fn, path, num_numbers):
    """Several ranks save: rank 0 takes its time, and the others can write nothing."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        torch.save(state_in(0, num_numbers), path)
        if dist.get_world_size() == 2:
            take_time(path, lambda: store.wait(["back"], timedelta(seconds=0.25)))
    dist.barrier()
    try:
        with room_for(0) if rank else contextlib.nullcontext():
            fn(path, state_in(1, num_numbers))
    except (OSError, RuntimeError) as error:
        if rank and (getattr(error, "errno", 0) == errno.EFBIG or "inline_container" in str(error)):
            where = on_ranks(dist.get_world_size())
            raise Wrong(f"{where}, rank {rank} writes, too: they overwrite each other") from None
        raise
    epoch, where = found(path, num_numbers), f"{on_ranks(dist.get_world_size())}, rank {rank}"
    if epoch != 1:
        holds = "half a checkpoint" if epoch is None else "the old checkpoint"
        raise Wrong(f"{where} comes back too early: it reads {holds}, which rank 0 replaces later: it must wait")
    if rank:
        store.set("back", "yes")


def take_time(path, wait):
    """Before this rank writes or renames a file, others get the time to go on, if nothing keeps them."""

    def patiently(*args, **options):
        with contextlib.suppress(dist.DistStoreError):
            wait()
        return real(*args, **options)

    def look(event, args):
        if event == "os.rename" and str(path) == str(args[1]):
            with contextlib.suppress(dist.DistStoreError):
                wait()

    real, torch.save = torch.save, patiently
    sys.addaudithook(look)


def found(path, num_numbers):
    """The epoch of the checkpoint that is there; None if there is no whole one."""
    try:
        state = torch.load(path)
    except Exception:
        return None
    whole = state["rank"] == 0 and torch.equal(state["weights"], state_in(state["epoch"], num_numbers)["weights"])
    return state["epoch"] if whole else None


@task("06.3", "Resume to the last bit")
def train(attempt: Attempt) -> None:
    """``train(build, train_epoch, epochs, path)``: who was stopped goes on as if nothing had been."""
    for world_size, stop, epochs in ((2, 2, 4), (1, 1, 3), (3, 2, 3)):
        with tempfile.TemporaryDirectory() as folder:
            args, options = (Path(folder), stop, epochs), {"world_size": world_size}
            if world_size == 2:  # the second half in new processes
                told = attempt.results(*args, True, False, trial=twice, **options)
                resumed = [runs[1] for runs in attempt.results(*args, False, True, trial=twice, **options)]
                straight = [runs[0] for runs in told]
            else:
                straight, resumed = zip(*attempt.results(*args, True, True, trial=twice, **options), strict=True)
        compare(straight, resumed, stop, epochs)


def compare(straight, resumed, stop, epochs):
    """Of each rank, a run that was not stopped with one that was, before epoch ``stop``, and went on."""
    same = torch.equal if len(straight) < 3 else near  # from three on, DDP's buckets have a say in the last bits
    for rank, (one, other) in enumerate(zip(straight, resumed, strict=True)):
        where = f"{on_ranks(len(straight))}, rank {rank}"
        numbers, after = [note["epoch"] for note in one[:-1]], [note["epoch"] for note in other[:-1]]
        if numbers != list(range(epochs)):
            raise Wrong(f"{where} trains epochs {numbers}, and was asked for {list(range(epochs))}")
        if after == numbers:
            raise Wrong(f"{where} was stopped in epoch {stop} and begins with epoch 0 again: save after each, read it")
        if after != numbers[stop:]:
            raise Wrong(f"{where} was stopped in epoch {stop} and goes on with epochs {after}, not {numbers[stop:]}")
        before, now = one[stop], other[0]
        for what, words in PARTS.items():
            if before[what].shape != now[what].shape or not same(before[what], now[what]):
                if what == "generator" and torch.equal(before["generator, then built"], now[what]):
                    words = "the state that the generator has after build(), which draws weights: restore it later"
                elif what == "generator" and torch.equal(straight[0][stop][what], now[what]):
                    words = "the state of rank 0's generator, and has one of its own"
                raise Wrong(f"{where} goes on in epoch {stop} with {words}")
    for rank, (one, other) in enumerate(zip(straight, resumed, strict=True)):
        if not same(one[-1], other[-1]):
            where = f"{on_ranks(len(straight))}, rank {rank}"
            raise Wrong(f"{where} goes on rightly, and ends with other weights than the run that was not stopped")


PARTS = {
    "weights": "other weights than the run that was not stopped had",
    "optimizer": "another state of the optimizer: Adam's running means are not those of the run that was not stopped",
    "generator": "another state of the random generator: dropout differs",
}


class Stopped(Exception):
    """What ends a training in an epoch."""


def twice(fn, folder, stop, epochs, is_first, is_second):
    """What a rank notes in a run that is not stopped, and in one that was and goes on."""
    straight, resumed = [], []
    if is_first:
        straight = noted(fn, folder / "straight.pt", epochs, epochs)
        noted(fn, folder / "stopped.pt", stop, epochs)
    if is_second:
        resumed = noted(fn, folder / "stopped.pt", epochs, epochs, seed=77)
    return straight, resumed


def noted(fn, path, stop, epochs, seed=1):
    """What is there at the begin of each epoch that is trained, and the weights at the end."""
    store = dist.distributed_c10d._get_default_store()
    notes, ends, data = [], [], torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def plain():
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

    def build():
        model = DDP(plain())
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    def train_epoch(epoch, model, optimizer):
        keys = [f"{path.name} {seed}, epoch {len(notes)} of {other}" for other in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], str(epoch))
        told = [f"epoch {store.get(key).decode()} on rank {at}" for at, key in enumerate(keys) if store.check([key])]
        if other := [one for one in told if one.split()[1] != told[0].split()[1]]:
            run = f"{on_ranks(len(keys))}, a run{' that goes on' if seed > 1 else ''}"
            raise Wrong(f"{run} trains {told[0]} and {other[0]}: all ranks must find the checkpoint, and read it")
        if epoch == stop:
            raise Stopped
        states = [one for state in optimizer.state.values() for one in state.values()]
        state = torch.cat([one.flatten().double() for one in states] or [torch.zeros(0)])
        generator = torch.get_rng_state()
        plain()
        parts = {"weights": weights_of(model), "optimizer": state, "generator": generator}
        notes.append({"epoch": epoch, **parts, "generator, then built": torch.get_rng_state()})
        torch.set_rng_state(generator)
        sampler = DistributedSampler(data)
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(batch[:, :3]), batch[:, 3:]).backward()
            optimizer.step()
        ends.append(weights_of(model))

    torch.manual_seed(seed + dist.get_rank())  # as in new processes
    with contextlib.suppress(Stopped):
        fn(build, train_epoch, epochs, path)
    dist.barrier()
    return [*notes, ends[-1] if ends else torch.zeros(0)]


def near(found, wanted):
    """Equal but for the rounding of double precision."""
    return bool(torch.allclose(found, wanted, rtol=0, atol=1e-9))
