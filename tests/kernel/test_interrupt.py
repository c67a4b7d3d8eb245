"""The cell is interrupted, or the kernel ends: no rank goes on."""

import os
import signal
import time
from pathlib import Path

import pytest
from watch import TELL, children, wait_for

HANDLERS = "import signal; [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]"


def check_usable(kernel):
    """The kernel still runs ranks, with the start method that is usual there."""
    shown = kernel.run("launch(print, 'again', timeout_s=50)")
    assert shown.error == ""
    assert "rank 0 | again\nrank 1 | again" in shown.text


@pytest.mark.parametrize("times", [1, 2, 5])
def test_an_interrupt_ends_the_ranks_and_the_cell(kernel, ranks, times):
    """However often the stop button is pressed: KeyboardInterrupt, no rank left, handlers as before, all usable."""
    before = kernel.run(HANDLERS).result
    cell = kernel.start(f"launch(hang, {str(ranks.folder)!r})")
    ranks.wait(2)
    began = time.monotonic()
    for _ in range(times):
        kernel.interrupt()
    shown = kernel.wait(cell, 6)
    ranks.check_gone()
    assert time.monotonic() - began < 6  # 2 s are promised
    assert shown.error.startswith("KeyboardInterrupt: ranks 0, 1 of 2: the cell was interrupted")
    assert "launcher.py" not in shown.traceback
    assert kernel.run(HANDLERS).result == before
    check_usable(kernel)


def test_an_interrupt_while_ranks_are_spawned(kernel, ranks):
    """Ranks that still import are ended too, without a word of their own under the cell."""
    cell = kernel.start(f"launch(hang, {str(ranks.folder)!r}, start_method='spawn')")
    wait_for(lambda: sum("spawn_main" in line for line in children(kernel.pid)) == 2, 30, "two ranks spawned")
    kernel.interrupt()
    shown = kernel.wait(cell, 6)
    assert shown.error.startswith("KeyboardInterrupt")
    assert (shown.stdout, shown.stderr) == ("", "")
    assert not [line for line in children(kernel.pid) if "spawn_main" in line]
    check_usable(kernel)


def test_an_interrupt_while_the_forkserver_starts(fresh_kernel, ranks):
    """An interrupt of the very first launch ends it, and the next one starts what it needs."""
    cell = fresh_kernel.start(f"{TELL}\nlaunch(hang, {str(ranks.folder)!r})")
    wait_for(lambda: any("forkserver" in line for line in children(fresh_kernel.pid)), 30, "the forkserver starts")
    fresh_kernel.interrupt()
    shown = fresh_kernel.wait(cell, 30)
    assert shown.error.startswith("KeyboardInterrupt")
    assert (shown.stdout, shown.stderr) == ("", "")
    assert fresh_kernel.run(TELL).error == ""
    check_usable(fresh_kernel)


def test_an_interrupt_where_no_line_is(kernel):
    """It may come at an instruction that belongs to no line, of which IPython cannot show a traceback."""
    kernel.run(
        "class Slow:\n"
        "    def __reduce__(self):\n"
        "        raise KeyboardInterrupt\n"
        "Slow.__reduce__.__code__ = Slow.__reduce__.__code__.replace(co_linetable=b'')"
    )
    shown = kernel.run("launch(print, Slow())")
    assert shown.error == "KeyboardInterrupt: the cell was interrupted before a rank was started"
    assert (shown.stdout, shown.stderr) == ("", "")
    check_usable(kernel)


def test_an_interrupt_while_torch_is_imported(fresh_kernel):
    """Interrupting a first launch that imports torch does not leave half of torch to the kernel."""
    cell = fresh_kernel.start("from ddplab import launch\nlaunch(print, 'first')")
    maps = Path(f"/proc/{fresh_kernel.pid}/maps")
    wait_for(lambda: "libtorch_python" in maps.read_text(), 60, "torch is being imported")
    fresh_kernel.interrupt()
    shown = fresh_kernel.wait(cell, 30)
    assert shown.error.startswith("KeyboardInterrupt")
    check_usable(fresh_kernel)
    shown = fresh_kernel.run("launch(print, 'and').receipt")
    assert shown.result["text/plain"].startswith("Receipt("), shown.error
    assert fresh_kernel.run("str(launch(print, 'again').receipt)").result == {"text/plain": "'nothing is left'"}


@pytest.mark.parametrize("end", ["kill", "restart"])
def test_no_rank_outlives_its_kernel(fresh_kernel, ranks, end):
    """SIGKILL of the kernel, and a restart, end its ranks."""
    fresh_kernel.start(f"{TELL}\nlaunch(hang, {str(ranks.folder)!r})")
    ranks.wait(2)
    if end == "kill":
        os.kill(fresh_kernel.pid, signal.SIGKILL)
    else:
        fresh_kernel.manager.restart_kernel()
    ranks.check_gone()
