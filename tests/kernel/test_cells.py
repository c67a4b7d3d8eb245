"""A cell of a real kernel runs ranks: what is shown while they run, at the end, and after a failure."""

import re
from pathlib import Path

import pytest
from watch import wait_for


def test_a_function_of_a_cell_runs_on_ranks(kernel):
    """The value of each rank comes back to the next cell."""
    kernel.run("def mine(n):\n    return n * 10 + dist.get_rank()\nrun = launch(mine, 4)")
    assert kernel.run("run.results").result["text/plain"] == "[40, 41]"


def test_output_is_shown_while_the_ranks_still_run(kernel, tmp_path):
    """The first lines are there before the ranks end; at the end one display holds all lines, by rank."""
    gate = tmp_path / "gate"
    text = "def talk(gate):\n    print('first', flush=True)\n    while not os.path.exists(gate):\n        time.sleep(0.01)\n"
    cell = kernel.start(text + f"    print('second')\nlaunch(talk, {str(gate)!r});")
    shown = kernel.wait(cell, until=lambda shown: "rank 0 | first" in shown.text and "rank 1 | first" in shown.text)
    assert not shown.is_done
    assert "second" not in shown.text
    gate.touch()
    shown = kernel.wait(cell)
    assert [display["text/plain"] for display in shown.displays] == [
        "rank 0 | first\nrank 0 | second\nrank 1 | first\nrank 1 | second"
    ]
    assert (shown.stdout, shown.stderr) == ("", "")


def test_the_first_launch_of_a_kernel_leaves_nothing(fresh_kernel):
    """The receipt is clean from the start: what serves all launches counts as there before."""
    shown = fresh_kernel.run("from ddplab import launch\nrun = launch(print, 'first')\nstr(run.receipt)")
    assert shown.result == {"text/plain": "'nothing is left'"}


def plain(text):
    """Text without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_failure_shows_the_lines_that_matter(kernel):
    """The error names the cell and the line, and its traceback has the learner's code and none of ddplab's."""
    shown = kernel.run(
        "def bad():\n    if dist.get_rank() == 1:\n        raise ValueError('no')\n    dist.barrier()\nlaunch(bad)"
    )
    place = f"cell In[{shown.number}], line 3"
    assert shown.error == f"RankFailedError: rank 1 of 2 failed first: ValueError in {place}: no"
    traceback = plain(shown.traceback)
    assert f"{place}, in bad\n" in traceback
    assert "raise ValueError('no')" in traceback
    assert f"next: mend {place}" in traceback
    assert not re.search(r"\w+\.py", traceback)
    assert len(traceback.splitlines()) < 15


@pytest.mark.parametrize(
    "call", ["launch(bad, world_size=0)", "launch(bad, 1)", "launch(None)", "launch(bad, view='x')"]
)
def test_a_refusal_shows_the_call_and_the_message(kernel, call):
    """The message of a bad argument is shown without the lines of ddplab that check it."""
    shown = kernel.run(f"def bad():\n    pass\n{call}")
    traceback = plain(shown.traceback)
    assert shown.error.startswith(("TypeError", "ValueError"))
    assert shown.error in traceback
    assert not re.search(r"(launcher|machine|view)\.py", traceback)


def test_importing_ddplab_warms_up(fresh_kernel):
    """After the import, without a launch, torch is imported here and in a forkserver."""
    assert fresh_kernel.run("import sys, ddplab").error == ""
    name = "ddplab.processes.forkserver._forkserver._forkserver_pid"
    pid = int(fresh_kernel.run(name).result["text/plain"])
    wait_for(lambda: "libtorch_python" in Path(f"/proc/{pid}/maps").read_text(), 60, "torch in the forkserver")
    wait_for(
        lambda: fresh_kernel.run("'torch.multiprocessing' in sys.modules").result["text/plain"] == "True", 60, "torch"
    )
    run = fresh_kernel.run("ddplab.launch(print, 'hello', world_size=1)")
    assert "rank 0 | hello" in run.text
    assert int(fresh_kernel.run(name).result["text/plain"]) == pid
