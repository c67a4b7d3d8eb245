"""The correction lab: wrong repairs in words of their own, its What-ifs, its script, and what its text claims besides."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import NOTEBOOKS, THREADS, Lesson, alone, definitions, torchrun
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10

from ddplab.exercises.lab import ROWS, Pictures, Status

NAME = "11_two_articles"
NOTEBOOK = nbformat.read(NOTEBOOKS / f"{NAME}.ipynb", as_version=4)
SOURCES = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def repaired(cells: Any, name: str, *changes: tuple[str, str]) -> Any:
    """The last program of that name in the notebook, which is the repaired one, changed back in part."""
    starts = f"def {name}(", f"class {name}(", f"{name} = "
    holds = [source for source in SOURCES if any(f"\n{start}" in f"\n{source}" for start in starts)]
    source = holds[-1]
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    for needed in (SOURCES[0], *(one for one in SOURCES if "\ndef join(" in f"\n{one}" or "def make_weight(" in one)):
        cells.run(definitions(needed))
    cells.run(definitions(source))
    return cells.namespace[name]


def seen(program: Any, row: int, timeout_s: float = 10.0) -> tuple[str, str]:
    """State and words of a row."""
    return Status(timeout_s=timeout_s).check(program, row).rows[row]


# The committed table ----------------------------------------------------------------------------------


def tables() -> list[str]:
    """The lines of all tables that the notebook shows, in order; nbval holds them against a real run."""
    outputs = [output for cell in NOTEBOOK.cells for output in cell.get("outputs", ())]
    texts = [output.get("data", {}).get("text/plain", "") for output in outputs]
    return [line for text in texts if "seen on the ranks" in text for line in text.splitlines()[1:]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (1, "no attribute 'sync_gradients'"),
        (2, "no attribute 'rpc_async'"),
        (3, "RPC has not been initialized"),
        (4, "step 1 of rank 0 met step 2 of rank 1, in silence"),
        (
            5,
            "not caught: ValueError (no variable), RuntimeError (no peer), DistNetworkError (no server), DistStoreError",
        ),
        (6, "expected an indented block after 'try'"),
        (7, "1, 2, 3, 4: it piles up"),
        (8, "'ellipsis' object is not iterable"),
        (9, "its process group is still there"),
        (10, "claimed 14 parameters on each of 2 ranks; counted 28, 28"),
        (11, "hold 900, 900; there is room for 540"),
        (12, "claimed a change of 0, DDP with Adam made -0.1"),
        (13, "on 2 machines nobody got past init in 5 s"),
        (14, "ranks 0 and 1 of one machine both compute on cuda:0"),
        (15, "same order in all 3 epochs"),
        (16, "cannot access local variable 'data'"),
        (17, "name 'DistributedDataParallel' is not defined; Net()(batch): no forward"),
        (18, "2 ranks download into one folder; no batch: the loader found PIL images"),
        (19, "give 50 outputs; no activation between conv1 and conv2, conv2 and fc1, fc1 and fc2"),
        (20, "20 images tested, of 10 that there are; 2 lines printed"),
        (21, "not so: DataParallel, Horovod's last release, FairScale is by, Megatron-LM is by"),
    ],
)
def test_a_mistake_is_found_in_words_and_its_repair_passes(row: int, words: str) -> None:
    """Each row is first not started, then wrong for its own reason, then right, and stays so."""
    mine = [line.split(maxsplit=2) for line in tables() if line.split()[0] == str(row)]
    states = [state for _, state, _ in mine]
    assert states[:4] == ["·", "✗", "✓", "✓"]
    assert words in mine[1][2]
    assert ROWS[row].title in mine[1][2]


# Half repairs -----------------------------------------------------------------------------------------

ZERO = "            optimizer.zero_grad()\n"
SET = "        sampler.set_epoch(epoch)\n"
REDUCE = "            dist.all_reduce(parameter.grad)              # the sum over ranks\n"


@pytest.mark.parametrize(
    ("name", "changes", "row", "words"),
    [
        ("by_hand", [("            parameter.grad /= dist.get_world_size()      # the mean\n", "")], 1, "uses the sum of the gradients, 3; their mean is 1.5"),
        ("by_hand", [(REDUCE, "")], 1, "step() uses 0.5, 0.5, 0.5 on rank 0; the mean gradient is 1.5"),
        ("train", [(ZERO, ""), ("loss.backward()\n", f"loss.backward()\n{ZERO}")], 7, "zeroed between backward() and step()"),
        ("train", [(ZERO, ""), (SET, f"{SET}        optimizer.zero_grad()\n")], 7, "use 1, 2, 3, 1: it piles up; zeroed, but not in every step"),
        ("train", [(SET, ""), ("optimizer.step()", f"optimizer.step()\n{SET}")], 15, "epoch 1 has the order of epoch 0"),
        ("train", [("sampler=sampler", "shuffle=True")], 15, "do not share the 12 images"),
        ("listing", [("    def forward(self, x):\n        return self.layer(x)\n", "")], 17, "Net()(batch): no forward"),
        ("listing", [("torch.ones(8, 2)", "[]")], 8, "there is no data: train_data is empty"),
        ("guarded", [("train()", "pass")], 6, "train() is never called"),
        ("load", [("    dist.barrier()                                       # nobody reads before it is there\n", "")], 18, "before the images were there: no barrier"),
        ("load", [("    if dist.get_rank() == 0:\n        Pictures", "    if True:\n        Pictures")], 18, "2 ranks download into one folder"),
        ("load", [("    dist.barrier()   ", "        dist.barrier()   ")], 18, "no barrier of all ranks after the download"),
        ("load", [(", transform=transforms.ToTensor()", "")], 18, "the loader found PIL images"),
        ("LeNet", [("F.relu(self.fc1(x.flatten(1)))", "self.fc1(x.flatten(1))")], 19, "no activation between fc1 and fc2"),
        ("LeNet", [("16 * 5 * 5", "16 * 4 * 4")], 19, "mat1 and mat2 shapes cannot be multiplied"),
        ("LeNet", [("F.relu(self.fc1(x.flatten(1)))", "F.dropout(self.fc1(x.flatten(1)), training=self.training)")], 19, "no activation between fc1 and fc2"),
        ("evaluate", [("DataLoader(mine, batch_size=2)", "DataLoader(images, batch_size=2, sampler=DistributedSampler(images))")], 20, "12 images tested, of 10 that there are; accuracy 67 %"),
        ("evaluate", [("    dist.all_reduce(total)\n", "")], 20, "accuracy 100 %, and it is 60 %"),
        ("main", [("        work(", "        dist.destroy_process_group()\n        work(")], 9, "work(device) found no process group"),
        ("main", [("        work(", "        dist.destroy_process_group()\n        work(")], 13, "work(device) found no process group"),
        ("main", [("LOCAL_RANK", "RANK")], 14, "rank 2 wants cuda:2 of a machine with 2 GPUs"),
        ("main", [("    torch.cuda.set_device(local_rank)\n", "")], 14, "its current device is cuda:0"),
        ("ask", [("    rpc.shutdown()                                       # waits until nobody has calls open\n", "")], 3, "rpc.shutdown() is missing"),
        ("handled", [("(RuntimeError, ValueError)", "dist.DistError")], 5, "not caught: ValueError (no variable), RuntimeError (no peer)"),
        ("handled", [("(RuntimeError, ValueError)", "Exception")], 5, "that hides bugs"),
        ("careful", [("            raise", "            return")], 4, "it returned as if all were well"),
        ("careful", [("            raise", "            dist.all_reduce(torch.zeros(()))")], 4, "step 1 of rank 0 met another call of rank 1"),
        ("careful", [("            raise", "            raise SystemExit(1)")], 4, "tells nobody why"),
    ],
)  # fmt: skip
def test_half_a_repair_has_words_of_its_own(cells: Any, name: str, changes: Any, row: int, words: str) -> None:
    """What a learner may try first is red, for the reason that is left."""
    state, told = seen(repaired(cells, name, *changes), row)
    assert state == "✗"
    assert words in told
    assert len(told) <= 120


def test_a_pickled_optimizer_changes_nothing(cells: Any) -> None:
    """The method of an optimizer, sent by the rpc_async that does exist, steps a copy."""
    (source,) = [source for source in SOURCES if "dist.rpc_async" in source]
    repaired(cells, "remote")
    cells.run(definitions(source.replace("dist.rpc_async", "rpc.rpc_async")))
    assert seen(cells.namespace["remote"], 2) == (
        "✗", "the weight on worker1 is still 2: a copy of the optimizer stepped, on a copy of the weight"
    )  # fmt: skip


def test_a_step_on_a_copy_is_not_taken_for_one_on_worker1(cells: Any) -> None:
    """Though what rank 0 returns is the right number."""
    (source,) = [source for source in SOURCES if "dist.rpc_async" in source]
    repaired(cells, "remote")
    for old, new in (
        ('dist.rpc_async("worker1", optimizer.step).wait()', "optimizer.step()"),
        ("weight.to_here().item()", "local.item()"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    cells.run(definitions(source))
    assert seen(cells.namespace["remote"], 2) == (
        "✗", "rank 0 returned 1.9, but the weight on worker1 is 2: a copy stepped"
    )  # fmt: skip


def test_the_line_alone_left_out_is_no_repair(cells: Any) -> None:
    """Without its last line, the program of row 1 runs, and nothing is averaged; nor with weights averaged instead."""
    (source,) = [source for source in SOURCES if "dist.sync_gradients" in source]
    cells.run(definitions(SOURCES[0]))
    for line, words in (("pass", "the weights are 0.3 apart"), (AVERAGE, "the weights agree, but not by averaged")):
        cells.run(definitions(source.replace("dist.sync_gradients()", line)))
        assert words in seen(cells.namespace["by_hand"], 1)[1]


AVERAGE = "dist.all_reduce(model.weight.data); model.weight.data /= dist.get_world_size()"


def test_another_good_repair_passes_too(cells: Any) -> None:
    """DDP in place of all-reduce by hand, rank 0 that tests for all, a step made again, an error that names another."""
    cells.run(definitions(SOURCES[0]))
    cells.run(
        """
        def with_ddp(model, batches):
            model = DDP(model)
            optimizer = torch.optim.Adam(model.parameters())
            for batch in batches:
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()

        def rank_0_tests(model, images):
            if dist.get_rank() == 0:
                right = sum((model(image).argmax(1) == label).sum() for image, label in DataLoader(images))
                print(right / len(images))
                return right / len(images)

        def again(step, num_steps):
            for number in range(num_steps):
                try:
                    step(number)
                except RuntimeError:
                    step(number)

        def told(step, num_steps):
            for number in range(num_steps):
                try:
                    step(number)
                except RuntimeError as error:
                    raise ValueError(f"in step {number}") from error
        """
    )
    assert seen(cells.namespace["with_ddp"], 1)[0] == "✓"
    assert seen(cells.namespace["rank_0_tests"], 20)[0] == "✓"
    assert seen(cells.namespace["again"], 4)[1].startswith("rank 1 made the failed step again")
    assert seen(cells.namespace["told"], 4)[1].startswith("rank 1 ends with its own error")


# Whatever a learner gives -----------------------------------------------------------------------------


def test_a_program_that_hangs_is_stopped(cells: Any) -> None:
    """The time of a run is limited, and its row says where each rank was."""
    cells.run(
        """
        import time

        def parameters(num_parameters, world_size):
            if dist.get_rank() == 1:
                time.sleep(100)
            dist.barrier()
        """
    )
    status = Status(timeout_s=1.0)
    status.check(cells.namespace["parameters"], 10)
    assert status.rows[10][1].startswith("with 2 ranks it does not end: rank 0 waits in barrier #1; rank 1 is at ")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("text", "stopped by TypeError: 'str' object is not callable"),
        (lambda *_: "many", "no use can be made of what rank 0 returned, ('many', 28) ("),
        (threading.Lock(), "cannot travel to a rank: it is a _thread.lock"),
    ],
)
def test_what_is_no_program_is_told(program: Any, words: str) -> None:
    """Nothing but words comes of a program of the wrong kind, or with a value of the wrong kind."""
    state, told = seen(program, 10)
    assert state == "✗"
    assert words in told


def test_details_tell_what_the_ranks_printed_and_where_they_failed(cells: Any) -> None:
    """For a learner who wants to look inside."""
    cells.run('def parameters(*_):\n    print("here")\n    raise KeyError("no")')
    status = Status()
    status.check(cells.namespace["parameters"], 10)
    assert "rank 1 | here" in status.details
    assert "line 3, in parameters" in status.details


# What the text claims ---------------------------------------------------------------------------------


def test_the_family_of_errors_is_as_the_text_says() -> None:
    """Three siblings below DistError, which is a RuntimeError."""
    assert set(dist.DistError.__subclasses__()) == {dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError}
    assert dist.DistError.__base__ is RuntimeError


def test_pictures_fail_as_cifar10_does(tmp_path: Path) -> None:
    """The stand-in raises what torchvision's class raises when nothing was downloaded."""
    messages = []
    for kind in (Pictures, CIFAR10):
        with pytest.raises(RuntimeError) as raised:
            kind(str(tmp_path), train=True, download=False)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_view_mixes_images_or_raises() -> None:
    """32 images of 400 numbers are 50 of 256, and the loss complains; 10 images are no whole number of them."""
    rows = torch.zeros(32, 400).view(-1, 256)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(rows, torch.zeros(32, dtype=torch.long))
    with pytest.raises(RuntimeError, match="invalid"):
        torch.zeros(10, 400).view(-1, 256)


def test_in_a_script_the_first_loop_still_works() -> None:
    """On a module's level, the loop variable replaces the module, and the second loop has none."""
    text = (
        "import torch.utils.data as data\nfor data in data.DataLoader([1, 2]): pass\nfirst = data\ndata.DataLoader([3])"
    )
    names: dict[str, Any] = {}
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'DataLoader'"):
        exec(text, names)
    assert names["first"].item() == 2


def test_with_sgd_averaged_updates_are_the_update_of_the_average(cells: Any) -> None:
    """Why the claim of row 12 survives."""
    cells.run(definitions(next(source for source in SOURCES if "def adam_step" in source).replace("Adam", "SGD")))
    names = cells.namespace
    assert names["update"]([3.0, -1.0]) == pytest.approx(names["adam_step"](1.0))


def test_pil_images_make_no_batch() -> None:
    """The words of the loader, by which row 18 knows the cause."""
    from torchvision.transforms.functional import to_pil_image

    with pytest.raises(TypeError, match="PIL"):
        next(iter(DataLoader([to_pil_image(torch.zeros(3, 2, 2))])))


def test_the_script_of_the_lesson_prints_one_line(cells: Any, tmp_path: Path) -> None:
    """On 2 ranks as on the 3 of the notebook, and it leaves in order."""
    lesson = Lesson(cells, NAME)
    network, evaluate = (
        [s for s in SOURCES if f"\n{start}" in f"\n{s}"][-1] for start in ("class LeNet", "def evaluate")
    )
    parts = [lesson.script("imports"), definitions(network), definitions(evaluate), lesson.script("main_part")]
    (file := tmp_path / "train.py").write_text("\n\n".join(parts))
    (line,) = torchrun(file)
    assert line.startswith("accuracy ")
    if sys.platform == "linux":
        file.write_text(file.read_text() + THREADS)
        assert "gloo" not in alone(file)[-1]
