"""Samples that ranks miss, share or count twice, and loaders that fail."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ddplab.faults.fault import fault

CATEGORY = "sampler_data"


@fault(
    CATEGORY,
    did="the loader is given a DistributedSampler and shuffle=True",
    sees="ValueError: sampler option is mutually exclusive with shuffle",
    root=None,
    cause="sampler-and-shuffle",
)
def sampler_and_shuffle():
    data = list(range(8))
    loader = DataLoader(data, shuffle=True, sampler=DistributedSampler(data))
    return len(loader)


@sampler_and_shuffle.cured_by("let the sampler shuffle, which it does by itself, and leave shuffle out of the loader")
def sampler_and_shuffle_repaired():
    data = list(range(8))
    loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=True))
    return len(loader)


@fault(
    CATEGORY,
    did="a batch_sampler and a batch_size are given together",
    sees="ValueError: batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last",
    root=None,
    cause="batch-sampler",
)
def batch_sampler():
    data = list(range(8))
    batches = torch.utils.data.BatchSampler(DistributedSampler(data), batch_size=2, drop_last=False)
    loader = DataLoader(data, batch_sampler=batches, batch_size=2)
    return len(loader)


@batch_sampler.cured_by("the batch_sampler alone makes the batches")
def batch_sampler_repaired():
    data = list(range(8))
    batches = torch.utils.data.BatchSampler(DistributedSampler(data), batch_size=2, drop_last=False)
    loader = DataLoader(data, batch_sampler=batches)
    return len(loader)


@fault(
    CATEGORY,
    did="no sampler: each rank reads all samples, and an epoch does the same work on each",
    sees="returns …",
    right=([0, 2, 4, 6], [1, 3, 5, 7]),
    cause="read-twice",
)
def sampler_forgotten():
    data = list(range(8))
    loader = DataLoader(data, batch_size=2)
    return torch.cat(list(loader)).tolist()


@sampler_forgotten.cured_by("give the loader a DistributedSampler, and compare what the ranks read")
def sampler_forgotten_repaired():
    data = list(range(8))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    return torch.cat(list(loader)).tolist()


@fault(
    CATEGORY,
    did="set_epoch is not called: the sampler shuffles each epoch in the same way",
    sees="returns …",
    right=("another order", "another order"),
    cause="set-epoch-forgotten",
)
def forgotten_set_epoch():
    data = list(range(100))
    sampler = DistributedSampler(data, shuffle=True)
    orders = []
    for _ in range(2):
        orders.append(torch.cat(list(DataLoader(data, sampler=sampler))).tolist())
    return "the same order" if orders[0] == orders[1] else "another order"


@forgotten_set_epoch.cured_by("sampler.set_epoch(epoch) before each epoch, with the same number on all ranks")
def forgotten_set_epoch_repaired():
    data = list(range(100))
    sampler = DistributedSampler(data, shuffle=True)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(torch.cat(list(DataLoader(data, sampler=sampler))).tolist())
    return "the same order" if orders[0] == orders[1] else "another order"


@fault(
    CATEGORY,
    did="set_epoch is called on a loader that was made without a DistributedSampler",
    sees="AttributeError: 'RandomSampler' object has no attribute 'set_epoch'",
    root=None,
    cause="no-set-epoch",
)
def no_set_epoch():
    loader = DataLoader(list(range(8)), shuffle=True)
    loader.sampler.set_epoch(0)


@no_set_epoch.cured_by("make the loader with a DistributedSampler, the only one that has epochs")
def no_set_epoch_repaired():
    data = list(range(8))
    loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=True))
    loader.sampler.set_epoch(0)


@fault(
    CATEGORY,
    did="each rank shuffles with a seed of its own: some samples are read twice, others never",
    sees="returns …",
    right=([0, 1, 2, 3, 4, 5, 6, 7],) * 2,
    cause="sampler-seed",
)
def sampler_seed():
    data = torch.arange(8)
    sampler = DistributedSampler(data, shuffle=True, seed=dist.get_rank())
    mine = data[list(sampler)]
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return sorted(torch.cat(parts).tolist())


@sampler_seed.cured_by("one seed for all samplers: the ranks divide one shuffled list, so it must be the same list")
def sampler_seed_repaired():
    data = torch.arange(8)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    mine = data[list(sampler)]
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return sorted(torch.cat(parts).tolist())


@fault(
    CATEGORY,
    did="accuracy over 5 samples on 2 ranks: the sampler repeats one to give both equally many, and it counts twice",
    sees="returns …",
    right=(0.8, 0.8),
    cause="padding-counted",
)
def padding_counted():
    is_right = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])  # of each sample of the test set
    mine = is_right[list(DistributedSampler(is_right, shuffle=False))]
    counts = torch.tensor([mine.sum(), len(mine)])
    dist.all_reduce(counts)
    return round((counts[0] / counts[1]).item(), 3)


@padding_counted.cured_by("divide a test set without padding; ranks then have unequally many samples, so add up counts")
def padding_counted_repaired():
    is_right = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])  # of each sample of the test set
    mine = is_right[dist.get_rank() :: dist.get_world_size()]
    counts = torch.tensor([mine.sum(), len(mine)])
    dist.all_reduce(counts)
    return round((counts[0] / counts[1]).item(), 3)


@fault(
    CATEGORY,
    did="the samplers divide the data among 2 ranks, but there are 3",
    sees={0: "returns 4", 1: "returns 4", 2: "ValueError: Invalid rank 2, rank should be in the interval [0, 1]"},
    root=2,
    cause="sampler-rank",
    world_size=3,
)
def sampler_rank():
    data = list(range(8))
    return len(DistributedSampler(data, num_replicas=2, rank=dist.get_rank()))


@sampler_rank.cured_by("leave num_replicas and rank out: the sampler asks the process group")
def sampler_rank_repaired():
    data = list(range(8))
    return len(DistributedSampler(data))


@fault(
    "initialisation",
    did="a DistributedSampler is made before init_process_group",
    sees="ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    root=None,
    cause="no-init",
    backend=None,
)
def sampler_before_init():
    sampler = DistributedSampler(list(range(8)))
    dist.init_process_group("gloo")
    dist.barrier()
    return len(sampler)


@sampler_before_init.cured_by("init_process_group first; or tell the sampler num_replicas and rank")
def sampler_before_init_repaired():
    dist.init_process_group("gloo")
    sampler = DistributedSampler(list(range(8)))
    dist.barrier()
    return len(sampler)


@fault(
    CATEGORY,
    did="the files are divided among the ranks by hand, there is but one, and rank 1 has nothing to load",
    sees={0: "echo", 1: "ValueError: num_samples should be a positive integer value, but got num_samples=0"},
    root=1,
    cause="empty-dataset",
)
def empty_shard():
    files = ["one.pt"]
    mine = files[dist.get_rank() :: dist.get_world_size()]
    loader = DataLoader(mine, shuffle=True)
    dist.barrier()
    return len(loader)


@empty_shard.cured_by("see to it that each rank has a sample: DistributedSampler repeats some where there are too few")
def empty_shard_repaired():
    files = ["one.pt"]
    loader = DataLoader(files, sampler=DistributedSampler(files))
    dist.barrier()
    return len(loader)


@fault(
    CATEGORY,
    did="drop_last drops all where there are fewer samples than ranks: no batch, no step",
    sees="ZeroDivisionError: ",
    root=None,
    cause="few-samples",
)
def no_batches():
    data = [2.0]
    loader = DataLoader(data, sampler=DistributedSampler(data, drop_last=True))
    loss = sum(batch.item() for batch in loader)
    return loss / len(loader)


@no_batches.cured_by("drop_last=False for few samples, and a check that len(loader) is not 0")
def no_batches_repaired():
    data = [2.0]
    loader = DataLoader(data, sampler=DistributedSampler(data, drop_last=False))
    loss = sum(batch.item() for batch in loader)
    return loss / len(loader)


@fault(
    "collective_mismatch",
    did="rank 1 has one batch more than rank 0: its last all_reduce waits for a rank that is in another call by then",
    sees={0: "hangs in barrier", 1: "hangs in all_reduce"},
    root=None,
    cause="op-differs",
    timeout_s=1.5,
)
def uneven_batches():
    mine = torch.ones(4 + 2 * dist.get_rank())
    loader = DataLoader(mine, batch_size=2)
    for batch in loader:
        dist.all_reduce(batch)
    dist.barrier()
    return len(loader)


@uneven_batches.cured_by("as many batches on all ranks: a sampler that pads or drops, or the smallest number of all")
def uneven_batches_repaired():
    data = torch.ones(10)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    for batch in loader:
        dist.all_reduce(batch)
    dist.barrier()
    return len(loader)


@fault(
    CATEGORY,
    did="an IterableDataset does not ask which rank and which worker it serves: all is read four times",
    sees="returns …",
    right=(6.0, 6.0),
    cause="read-twice",
)
def iterable_read_twice():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    total = torch.tensor(sum(batch.item() for batch in DataLoader(Stream(), num_workers=2)))
    dist.all_reduce(total)
    return float(total)


@iterable_read_twice.cured_by("each worker of each rank takes its own samples out of the stream")
def iterable_read_twice_repaired():
    class Stream(IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            first = dist.get_rank() * worker.num_workers + worker.id
            yield from range(first, 4, dist.get_world_size() * worker.num_workers)

    total = torch.tensor(sum(batch.item() for batch in DataLoader(Stream(), num_workers=2)))
    dist.all_reduce(total)
    return float(total)


@fault(
    CATEGORY,
    did="an IterableDataset, which has no indices, is to be shuffled by the loader",
    sees="ValueError: DataLoader with IterableDataset: expected unspecified shuffle option, but got shuffle=True",
    root=None,
    cause="iterable-sampler",
)
def iterable_with_sampler():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    return len(list(DataLoader(Stream(), shuffle=True)))


@iterable_with_sampler.cured_by("shuffle within the data set, with the same seed on all ranks")
def iterable_with_sampler_repaired():
    class Stream(IterableDataset):
        def __iter__(self):
            order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
            yield from order[dist.get_rank() :: dist.get_world_size()]

    return len(list(DataLoader(Stream())))


@fault(
    "resource",
    did="a worker of rank 1's loader is killed, as it is where memory runs out",
    sees={0: "echo", 1: "RuntimeError: DataLoader worker (pid…"},
    root=1,
    cause="worker-died",
)
def worker_killed():
    class Images(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.zeros(3)

    for batch in DataLoader(Images(), num_workers=1):
        dist.all_reduce(batch)


@worker_killed.cured_by("find what kills it: too much memory (fewer workers, smaller samples), or a full /dev/shm")
def worker_killed_repaired():
    class Images(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(3)

    for batch in DataLoader(Images(), num_workers=1):
        dist.all_reduce(batch)


@fault(
    CATEGORY,
    did="a file of rank 1's data is not there, which a worker of the loader finds out",
    sees={0: "echo", 1: "FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 0."},
    root=1,
    cause="worker-raised",
)
def dataset_raises():
    class Files(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.load(f"/missing/{index}.pt") if dist.get_rank() == 1 else torch.zeros(3)

    for batch in DataLoader(Files(), num_workers=1):
        dist.all_reduce(batch)


@dataset_raises.cured_by("read the traceback of the worker, the lower one; num_workers=0 makes it plain")
def dataset_raises_repaired():
    class Files(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(3)

    for batch in DataLoader(Files(), num_workers=1):
        dist.all_reduce(batch)


@fault(
    CATEGORY,
    did="a sample takes longer than the loader waits for it",
    sees="RuntimeError: DataLoader timed out after 0.1 seconds",
    root=None,
    cause="worker-late",
)
def worker_late():
    class Slow(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            time.sleep(0.5)
            return torch.zeros(3)

    return len(list(DataLoader(Slow(), num_workers=1, timeout=0.1)))


@worker_late.cured_by("a time-out longer than the slowest sample, or a faster sample")
def worker_late_repaired():
    class Slow(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            time.sleep(0.5)
            return torch.zeros(3)

    return len(list(DataLoader(Slow(), num_workers=1, timeout=60)))


@fault(
    CATEGORY,
    did="the data set holds an open file, which cannot travel to a worker that is started by spawn",
    sees="TypeError: cannot pickle ",
    cause="worker-pickle",
    world_size=1,
)
def unpicklable_dataset():
    class Lines(Dataset):
        file = None

        def __init__(self):
            self.file = open(os.devnull)

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return self.file.read()

    return list(DataLoader(Lines(), num_workers=1, multiprocessing_context="spawn"))


@unpicklable_dataset.cured_by("open the file where it is read: in the worker")
def unpicklable_dataset_repaired():
    class Lines(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            with open(os.devnull) as file:
                return file.read()

    return list(DataLoader(Lines(), num_workers=1, multiprocessing_context="spawn"))


@fault(
    CATEGORY,
    did="the images of a batch have different sizes",
    sees="RuntimeError: stack expects each tensor to be equal size, but got [3, 4, 4] at entry 0",
    root=None,
    cause="collate-sizes",
)
def uneven_samples():
    images = [torch.zeros(3, 4, width) for width in (4, 5, 4, 5)]
    sampler = [0, 1] if dist.get_rank() == 0 else [2, 3]
    return [batch.shape for batch in DataLoader(images, batch_size=2, sampler=sampler)]


@uneven_samples.cured_by("crop, resize or pad them to one size, in the data set or in a collate_fn")
def uneven_samples_repaired():
    images = [torch.zeros(3, 4, width) for width in (4, 5, 4, 5)]
    images = [image[:, :4, :4] for image in images]
    sampler = [0, 1] if dist.get_rank() == 0 else [2, 3]
    return [batch.shape for batch in DataLoader(images, batch_size=2, sampler=sampler)]
