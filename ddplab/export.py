"""``export``: a function of the notebook as a script of its own for torchrun, and the Slurm script that starts it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
import textwrap
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddplab.errors import ShippingError
from ddplab.script import Script, is_code, name_of, refused, runtime

__all__ = ["export"]

_MARK = "Written by ddplab.export"

_HEADER = '''"""{name}, from a notebook. {mark}.

    torchrun --standalone --nproc-per-node={here} {file}

On {nodes} machines, on each of them, with the name of the first one for HOST:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # or ranks that restart meet the addresses of those that are gone
    torchrun --nnodes={nodes} --nproc-per-node={here} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 {file}
{beside}"""

'''

_NCCL = """\
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
"""
_GLOO = 'dist.init_process_group("gloo")\n'
_AUTO = f"""\
if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank of this machine
{textwrap.indent(_NCCL, "    ")}else:
    {_GLOO}"""
_JOIN = {"auto": _AUTO, "gloo": _GLOO, "nccl": _NCCL, None: ""}
_MAIN = '''\
@record  # so that torchrun's report has the traceback
def {main}():
    """Join the other ranks, do the work, leave together."""
{join}    {result} = {call}
    if {result} is not None and os.environ["RANK"] == "0":
        print("{name} returned", str({result})[:500], flush=True)
        torch.save({result}, {file})
    del {result}
    gc.collect()  # nothing may hold the process group when it goes
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    {main}()
'''

_SLURM = """\
#!/bin/bash
# {mark}. In its folder: sbatch {file}
# One task on each machine: a torchrun, which starts {here} ranks. The CPUs are theirs and their DataLoader workers'.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={here}
{gpus}#SBATCH --time=01:00:00

set -euo pipefail
# Here activate the environment that has torch.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that restart meet the addresses of those that are gone
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \\
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={here} --max-restarts=0 \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\
    --rdzv-endpoint="${{hosts[0]}}:$((20000 + SLURM_JOB_ID % 10000))" {script}
"""
_MAYBE = "##SBATCH --gpus-per-node={here}    (with one # less, a GPU for each rank)\n"
_GPUS = {"auto": _MAYBE, "gloo": "", "nccl": "#SBATCH --gpus-per-node={here}\n", None: _MAYBE}


def export(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    *args: Any,
    world_size: int = 2,
    nodes: int = 1,
    backend: str | None = "auto",
    seed: int | None = 0,
    slurm: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``fn(*args)`` as a script that runs under torchrun, on one machine or many, without ddplab; gives its path.

    What ``launch(fn, *args, ...)`` does in the notebook, the script does with the same ``backend``, ``seed`` and number
    of ranks. It has the imports, functions, classes and constants that ``fn`` uses, as running their cells again would
    define them, and a ``main`` that joins the process group, calls ``fn`` and leaves. What comes from a file of yours
    is imported from there too, and the script says so at its top. ``log`` prints rank 0's numbers, ``span`` does
    nothing, ``progress`` gives the items, and data sets of ddplab are written out. What rank 0 returns is printed, and
    saved for ``torch.load`` in ``train.result.pt``.

    world_size: number of ranks on all machines together. It stands in the command lines and the Slurm script only.
    nodes: number of machines, which share the ranks equally.
    backend: "gloo", "nccl", "auto" (nccl where the machine has a GPU for each of its ranks, else gloo), or None:
        ``fn`` calls ``init_process_group`` itself.
    seed: given to torch on every rank, and to random and numpy if the script uses them; None seeds nothing.
    slurm: where to write a script for ``sbatch`` as well.
    overwrite: also replace a file that ``export`` has not written.

    Raises ``ShippingError``, which names what cannot be written and says what to do (for an object that the notebook
    made, code of unknown source, a ``%`` or ``!`` line), ``FileExistsError``, ``ValueError`` or ``TypeError``. Nothing
    is written then.

    >>> export(max, "largest.py", 1, 2, world_size=4, nodes=3)
    Traceback (most recent call last):
    ValueError: world_size=4 ranks cannot be shared equally by nodes=3 machines
    """
    _check(fn, args, world_size, nodes, backend, seed)
    file, batch = Path(path), None if slurm is None else Path(slurm)
    for target in filter(None, (file, batch)):
        _check_target(target, overwrite)
    if batch and batch.resolve() == file.resolve():
        raise ValueError(f"{slurm=} is the script itself")
    script, here = Script(), world_size // nodes
    try:
        text, name = _main(script, fn, args, backend, seed, file.with_suffix(".result.pt").name)
    except RecursionError:
        raise ShippingError("what the function uses is nested too deeply for a script") from None
    beside = f"\nNeeds beside it: {', '.join(sorted(script.beside))}.\n" if script.beside else ""
    words = {"name": name, "mark": _MARK, "here": here, "beside": beside}
    header = _HEADER.format(file=shlex.quote(file.name), nodes=max(nodes, 2), **words)
    file.write_text(f"{header}{script.text()}\n\n\n{text}", encoding="utf-8")
    if batch:
        gpus = _GPUS[backend].format(here=here)
        where = shlex.quote(os.path.relpath(file.resolve(), batch.resolve().parent))
        told = _SLURM.format(file=shlex.quote(batch.name), nodes=nodes, gpus=gpus, script=where, **words)
        batch.write_text(told, encoding="utf-8")
    return file


def _main(
    script: Script, fn: Any, args: tuple[Any, ...], backend: str | None, seed: int | None, file: str
) -> tuple[str, str]:
    """The end of the script, which runs ``fn``, with all that it uses bound; and what ``fn`` is called there."""
    keywords: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        fn, args, keywords = fn.func, fn.args + args, fn.keywords | keywords
    if not is_code(fn):
        raise refused("what to run", fn, "Give a function that makes the object and calls it.")
    name = name_of(fn)
    script.bind(name, fn, "export")
    given = [script.literal(value, f"argument {index} of {name}") for index, value in enumerate(args)]
    given += [f"{key}={script.literal(value, f'argument {key} of {name}')}" for key, value in keywords.items()]
    join = _JOIN[backend]
    if seed is not None:
        used = {entry.module.partition(".")[0] for entry in script.imports}
        numpy = next((entry.name for entry in script.imports if entry.module == "numpy" and not entry.part), "numpy")
        join += f"torch.manual_seed({seed})\n"
        join += f"random.seed({seed})\n" if "random" in used else ""
        join += f"{numpy}.random.seed({seed % 2**32})\n" if "numpy" in used else ""
    others = {"main": f"run_{name}", "result": f"result_of_{name}"}
    own = {word: other if word in script.known else word for word, other in others.items()}
    call = f"{name}({', '.join(given)})"
    text = _MAIN.format(
        join=textwrap.indent(join, "    "), call=call, name=name, file=script.literal(file, "path"), **own
    )
    script.take(text, ChainMap(runtime(), script.known), "the script")
    return text, name


def _check(fn: Any, args: tuple[Any, ...], world_size: Any, nodes: Any, backend: Any, seed: Any) -> None:
    if not callable(fn):
        raise TypeError(f'export needs a function to write, not {fn!r:.80}: export(train, "train.py", 0.1)')
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(f"{fn.__name__} is a coroutine or generator function: calling it runs nothing. Wrap it.")
    with contextlib.suppress(ValueError):  # some built-in functions have no signature
        signature = inspect.signature(fn, follow_wrapped=False)
        try:
            signature.bind(*args)
        except TypeError as error:
            hint = 'Arguments of the function follow the path: export(train, "train.py", 0.1).'
            raise TypeError(f"{getattr(fn, '__name__', fn)}{signature}: {error}. {hint}") from None
    for name, value, least in (("world_size", world_size, 1), ("nodes", nodes, 1), ("seed", seed, 0)):
        if value is None and name == "seed":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is a whole number, not {value!r:.80}")
        if value < least:
            raise ValueError(f"{name}={value} is not {least} or more")
    if world_size % nodes:
        raise ValueError(f"{world_size=} ranks cannot be shared equally by {nodes=} machines")
    if backend not in _JOIN:
        raise ValueError(f'{backend=} is not one of "auto", "gloo", "nccl", None')


def _check_target(file: Path, overwrite: bool) -> None:
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}")
    if file.exists() and not overwrite and _MARK not in file.read_bytes()[:300].decode(errors="replace"):
        raise FileExistsError(f"{file} is there and was not written by export: overwrite=True replaces it")
