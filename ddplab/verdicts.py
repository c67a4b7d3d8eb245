"""What the ranks did, judged: for each row of the correction lab a pure function, from a run to (passed, words).

``of_ranks`` marks those that look only at what each rank gave; a run that failed has words of its own then.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from ddplab.run import Run
from ddplab.tables import MAX_CELL

__all__: list[str] = []

Verdict = tuple[bool, str]


def stopped(run: Run) -> Verdict:
    """The words for a program that did not come to its end."""
    first = run.failures[0]
    if first.type == "Timeout":
        return False, f"no end within {run.spec.timeout_s:g} s; print(status.details) tells where each rank was"
    if run.returned and "closed by peer" in first.message.lower():
        return False, f"rank {first.rank} waited for a rank that had ended: all must make the same collective calls"
    return False, f"stopped by {first.type}: {first.message.splitlines()[0] if first.message else ''}"[:MAX_CELL]


def of_ranks(verdict: Callable[[list[Any]], Verdict]) -> Callable[[Run], Verdict]:
    """The verdict on a run, from one on the values that its ranks gave."""

    @functools.wraps(verdict)
    def judge(run: Run) -> Verdict:
        return verdict(run.results) if run.ok else stopped(run)

    return judge


def listed(wrong: list[str], right: str) -> Verdict:
    """All that is wrong, or else what is right."""
    return (False, "; ".join(wrong)) if wrong else (True, right)


def numbers(values: Any) -> str:
    """
    >>> numbers([1.0, 1.5, 12])
    '1, 1.5, 12'
    """
    return ", ".join(f"{value:.3g}" for value in values)


def alone(run: Run) -> Verdict | None:
    """The words for ranks that work, and are in no process group."""
    if any(row.name == "without_group" for row in run.metrics):
        return False, "work(device) found no process group: it was destroyed too early, or never made"
    return None


# Verdicts: of what each rank gave, or of the whole run -------------------------------------------------


@of_ranks
def averaged(ranks: list[Any]) -> Verdict:
    """Row 1."""
    used, mean = [rank["used"] for rank in ranks], (len(ranks) + 1) / 2
    steps = {value for mine in used for value in mine}
    if steps == {mean}:
        return True, f"every step() on every rank uses the mean gradient, {mean:g}"
    if steps == {mean * len(ranks)}:
        return False, f"step() uses the sum of the gradients, {mean * len(ranks):g}; their mean is {mean:g}"
    weights = [rank["weight"] for rank in ranks]
    if all(set(mine) == {rank + 1.0} for rank, mine in enumerate(used)):
        apart = max(weights) - min(weights)
        so = (
            f"the weights are {apart:.2g} apart" if apart > 1e-6 else "the weights agree, but not by averaged gradients"
        )
        return False, f"step() uses the gradient of its own rank, {numbers(mine[0] for mine in used)}: {so}"
    return False, f"step() uses {numbers(used[0]) or 'nothing'} on rank 0; the mean gradient is {mean:g} each time"


@of_ranks
def zeroed(ranks: list[Any]) -> Verdict:
    """Row 7."""
    used = ranks[0]["used"]
    if used and set(used) == {1.0}:
        return True, "the gradient in step() is that of one batch, 1, in every step"
    if not any(used):
        return False, "the gradient in step() is 0: it was zeroed between backward() and step()"
    after = "" if used == [*range(1, len(used) + 1)] else "; zeroed, but not in every step"
    return False, f"a batch has the gradient 1, but the first steps use {numbers(used[:4])}: it piles up{after}"


@of_ranks
def reordered(ranks: list[Any]) -> Verdict:
    """Row 15."""
    length = len(ranks[0]["order"]) // 3
    orders = [[rank["order"][epoch * length :][:length] for rank in ranks] for epoch in range(3)]
    if sorted(index for mine in orders[0] for index in mine) != list(range(12)):
        return False, "the ranks do not share the 12 images: some are met twice, or by nobody, in one epoch"
    same = [epoch for epoch in (1, 2) if orders[epoch] == orders[epoch - 1]]
    if same == [1, 2]:
        return False, f"rank 0 met its images in the same order in all 3 epochs: {numbers(orders[0][0])}"
    if same:
        return False, f"epoch {same[0]} has the order of epoch {same[0] - 1}: set_epoch() came after the loop had begun"
    return True, "every epoch has an order of its own, and the ranks share the images"


def joined(run: Run) -> Verdict:
    """Row 13."""
    if found := alone(run):
        return found
    if not run.ok and run.failures[0].type == "Timeout" and run.world_size == 4:
        limit = f"{run.spec.timeout_s:g} s"
        return False, f"on 2 machines nobody got past init in {limit}: do two say that they are rank 0?"
    if not run.ok:
        return stopped(run)
    wrong = [rank for rank in run.results if rank.get("rank") != rank["own"]]
    if wrong:
        return False, f"rank {wrong[0]['own']} joined as rank {wrong[0].get('rank')}"
    return True, "on 1 machine and on 2, every process joins as the rank that torchrun gave it"


@of_ranks
def placed(ranks: list[Any]) -> Verdict:
    """Row 14."""
    gpus = [rank.get("gpu") for rank in ranks]
    if None in gpus:
        return False, "main did not call work(device)"
    for rank, gpu in enumerate(gpus):
        if gpu >= (there := ranks[0]["gpus"]):
            return False, f"rank {rank} wants cuda:{gpu} of a machine with {there} GPUs: local rank, not rank"
    if len(set(gpus[:2])) == 1:
        return False, f"ranks 0 and 1 of one machine both compute on cuda:{gpus[0]}"
    current = [rank["current"] for rank in ranks]
    if current != gpus:
        there = f"its current device is cuda:{current[1]}"
        return False, f"rank 1 computes on cuda:{gpus[1]}, but {there}: .cuda() goes there"
    return True, "each rank of a machine has a GPU of its own, and it is the current one"


def closed(run: Run) -> Verdict:
    """Row 9."""
    if found := alone(run):
        return found
    if not run.ok:
        return stopped(run)
    if any(rank["open"] for rank in run.results):
        return False, "main has ended, and its process group is still there, with threads and sockets"
    return True, "no process group is left when main ends"


@of_ranks
def ran(ranks: list[Any]) -> Verdict:
    """Row 16."""
    if all(number == 10 for number in ranks):
        return True, "6 images of one set and 4 of the other were counted"
    return False, f"6 + 4 images were counted as {ranks[0]}"


@of_ranks
def filled(ranks: list[Any]) -> Verdict:
    """Row 8."""
    found = ranks[0]["data"].replace("StopIteration: ", "train_data is empty")
    return (False, f"there is no data: {found}") if found else (True, "train_data can be looped over")


@of_ranks
def complete(ranks: list[Any]) -> Verdict:
    """Row 17."""
    names = {"build()": "build", "Net()(batch)": "net"}
    wrong = [f"{call}: {ranks[0][name]}" for call, name in names.items() if ranks[0][name]]
    short = [
        re.sub(r"NotImplementedError: .* is missing the required .forward. .*", "no forward", one) for one in wrong
    ]
    return listed(short, "the model is built, wrapped and called")


def fetched(run: Run) -> Verdict:
    """Row 18."""
    by = sorted({row.rank for row in run.metrics if row.name == "downloads"})
    if not run.ok and "Dataset not found" in run.failures[0].message:
        why = "no barrier of all ranks after the download" if by else "nobody downloads"
        return False, f"a rank read the folder before the images were there: {why}"
    if not run.ok:
        return stopped(run)
    wrong = [f"{len(by)} ranks download into one folder"] if len(by) > 1 else []
    batch = run.results[0]
    if batch["batch"] is None:
        why = "the loader found PIL images" if "PIL" in batch["error"] else batch["error"]
        wrong.append(f"no batch: {why}")
    elif batch["batch"][1:] != [3, 32, 32]:
        wrong.append(f"a batch has the shape {batch['batch']}, not [n, 3, 32, 32]")
    return listed(wrong, "one rank downloads, and all make batches")


@of_ranks
def computes(ranks: list[Any]) -> Verdict:
    """Row 19."""
    rows, bare = ranks[0]["rows"], ranks[0]["bare"]
    wrong = [f"32 images of 32×32 give {rows} outputs"] if rows != 32 else []
    wrong += [f"no activation between {', '.join(bare)}"] if bare else []
    return listed(wrong, "32 images give 32 outputs, with an activation between all layers")


def evaluated(run: Run) -> Verdict:
    """Row 20."""
    if not run.ok:
        return stopped(run)
    met = sum(len(rank["order"]) for rank in run.results)
    printed = len(run.output(stream="stdout").splitlines())
    values = [rank["value"] for rank in run.results if rank["value"] is not None]
    wrong = [f"{met} images tested, of 10 that there are"] if met != 10 else []
    wrong += [f"{printed} lines printed"] if printed != 1 else []
    false = [value for value in values if abs(value - 0.6) > 1e-6]
    wrong += [f"accuracy {100 * false[0]:.0f} %, and it is 60 %"] if false else []
    wrong += [] if values else ["no rank returned the accuracy"]
    return listed(wrong, "10 images tested once, 60 % right, 1 line printed")


def asked(run: Run) -> Verdict:
    """Row 3."""
    if not run.ok:
        return stopped(run)
    if run.results[0]["answer"] != 3:
        return False, f"rank 0 got {run.results[0]['answer']!r} for 1 + 2"
    if any(rank["open"] for rank in run.results):
        return False, "the answer came, but the RPC agents are still there: rpc.shutdown() is missing"
    return True, "rank 0 has the answer of worker1, and no RPC agent is left"


@of_ranks
def stepped(ranks: list[Any]) -> Verdict:
    """Row 2."""
    weight, there = ranks[0]["said"], ranks[0]["there"]
    if not isinstance(weight, float):
        return False, f"rank 0 returned {weight!r}, not the weight on worker1"
    if weight == 2.0:
        return False, "the weight on worker1 is still 2: a copy of the optimizer stepped, on a copy of the weight"
    if there and all(abs(value - weight) > 1e-6 for value in there):
        return False, f"rank 0 returned {weight:.3g}, but the weight on worker1 is {numbers(there)}: a copy stepped"
    return abs(weight - 1.9) < 1e-6, f"the weight on worker1 went from 2 to {weight:.3g}"


@of_ranks
def caught(ranks: list[Any]) -> Verdict:
    """Row 5."""
    causes = {"variable": "no variable", "peer": "no peer", "network": "no server", "store": "no key"}
    seen = {cause: ranks[0][name] for name, cause in causes.items()}
    out = [f"{kind} ({cause})" for cause, kind in seen.items() if kind]
    if out:
        return False, "not caught: " + ", ".join(out)
    if not ranks[0]["bug"]:
        return False, "all four are caught, and so is a TypeError, a mistake in the program: that hides bugs"
    return True, "all four are caught, and a TypeError is not"


@of_ranks
def compiled(ranks: list[Any]) -> Verdict:
    """Row 6."""
    return listed([] if ranks[0] else ["it compiles, but train() is never called"], "it compiles, and calls train()")


def gave_up(run: Run) -> Verdict:
    """Row 4."""
    for row in run.metrics:
        other = row.value - (mine := row.step or 0) * (run.world_size - 1)
        if other != mine:
            who, whom = (1, 0) if row.rank == 1 else (row.rank, 1)
            met = f"step {other:g}" if who != 1 and other in range(mine + 1, 4) else "another call"
            return False, f"rank 1 went on alone: step {mine} of rank {who} met {met} of rank {whom}, in silence"
    if run.ok and all(sum(row.rank == rank for row in run.metrics) == 4 for rank in range(run.world_size)):
        return True, "rank 1 made the failed step again before the next: all ranks made the same four steps"
    if run.ok or 1 in run.returned:
        return False, "rank 1 hid its error: it returned as if all were well"
    first = run.failures[0]
    if first.rank == 1 and first.type == "SystemExit":
        return False, "rank 1 ends, but tells nobody why: raise its own error in place of SystemExit"
    if first.rank != 1 or "bad batch" not in first.message + first.traceback:
        return stopped(run)
    if run.returned:
        return False, "rank 1 failed, but another rank returned as if all were well"
    return True, "rank 1 ends with its own error, and the others end with it"


@of_ranks
def replicated(ranks: list[Any]) -> Verdict:
    """Row 10."""
    there = [rank["there"] for rank in ranks]
    good = all(rank["said"] == rank["there"] for rank in ranks)
    return good, f"claimed {ranks[0]['said']:g} parameters on each of {len(ranks)} ranks; counted {numbers(there)}"


@of_ranks
def sharded(ranks: list[Any]) -> Verdict:
    """Row 11."""
    good = max(ranks) <= 540 and sum(ranks) == 900
    return good, f"of 900 parameters the ranks hold {numbers(ranks)}; there is room for 540"


@of_ranks
def updated(ranks: list[Any]) -> Verdict:
    """Row 12."""
    said, did = (round(ranks[0][name], 5) + 0.0 for name in ("said", "did"))  # + 0.0: no "-0.000"
    return abs(said - did) < 1e-4, f"{len(ranks)} ranks: claimed a change of {said:.3g}, DDP with Adam made {did:.3g}"


def chosen(answers: Any) -> Verdict:
    """Row 21: checked against facts, the first of them in torch's own words."""
    advised = "recommended to use :class:`~torch.nn.parallel.DistributedDataParallel`" in str(nn.DataParallel.__doc__)
    facts = {
        "DataParallel": "discouraged" if advised else "recommended",
        "Horovod's last release": 2023,
        "FairScale is by": "Meta",
        "Megatron-LM is by": "NVIDIA",
    }
    wrong = [
        name for name, fact in facts.items() if not isinstance(answers, dict) or str(answers.get(name)) != str(fact)
    ]
    return listed([f"not so: {', '.join(wrong)}"] if wrong else [], "all four are right")
