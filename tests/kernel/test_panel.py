"""The panel in a real kernel: its button is heard while the cell runs, and no panel comes where it would not be seen."""

from __future__ import annotations

import time

import pytest

WIDGET = "application/vnd.jupyter.widget-view+json"


def send(kernel, channel, kind, content, metadata=None, subshell=None):
    """Send a message as JupyterLab does; gives its id."""
    message = kernel.client.session.msg(kind, content, metadata=metadata)
    message["header"]["subshell_id"] = subshell
    getattr(kernel.client, f"{channel}_channel").send(message)
    return message["header"]["msg_id"]


def start(kernel, code):
    """Start a cell as JupyterLab does, which says that it is one."""
    return send(kernel, "shell", "execute_request", {"code": code, "silent": False}, {"cellId": "a"})


@pytest.fixture
def button(kernel):
    """The comm id of the Stop button."""
    kernel.wait(start(kernel, "import ddplab.panel\nlaunch(print, 'ready')"))
    return kernel.run("print(ddplab.panel.Panel._made._button.comm.comm_id)").stdout.strip()


def shows_panel(shown):
    """Whether a cell shows the panel."""
    return any(WIDGET in display for display in shown.displays)


@pytest.mark.parametrize("way", ["subshell", "main"])
def test_the_button_is_heard_while_the_cell_runs(kernel, ranks, button, way):
    """Whether the notebook sends on a subshell or to the shell that is busy, the ranks end and the cell says why."""
    subshell = None
    if way == "subshell":
        send(kernel, "control", "create_subshell_request", {})
        subshell = kernel.client.get_control_msg(timeout=10)["content"]["subshell_id"]
    cell = start(kernel, f"launch(hang, {str(ranks.folder)!r})")
    kernel.wait(cell, until=shows_panel)
    ranks.wait(2)
    began = time.monotonic()
    data = {"method": "custom", "content": {"event": "click"}}
    send(kernel, "shell", "comm_msg", {"comm_id": button, "data": data}, subshell=subshell)
    shown = kernel.wait(cell, 6)
    assert time.monotonic() - began < 6  # 3 s are promised
    assert shown.error == "KeyboardInterrupt: the Stop button was pressed; ranks 0, 1 of 2: the cell was interrupted"
    assert "next: " in shown.traceback
    assert shown.displays == [{}]
    ranks.check_gone()


TALK = "def talk():\n    print('first', flush=True)\n    time.sleep(1)\nlaunch(talk, world_size=1)"
LAST = {"text/plain": "rank 0 | first"}


def test_the_panel_becomes_text(kernel):
    """What is displayed in the end is what a run without a panel displays."""
    cell = start(kernel, TALK)
    assert not kernel.wait(cell, until=shows_panel).is_done
    assert kernel.wait(cell).displays == [LAST]


def test_a_short_run_shows_no_panel(kernel):
    """A function that returns at once does not let a panel flash."""
    assert not shows_panel(kernel.wait(start(kernel, "launch(print, 'hi', world_size=1)"), until=shows_panel))


@pytest.mark.parametrize("view", ["auto", "live", "static", "quiet"])
def test_programs_that_execute_a_notebook_get_no_panel(kernel, view):
    """A cell that no notebook sent, and views that ask for none, show text at most."""
    code = TALK.replace("world_size=1", f"world_size=1, view={view!r}")
    for cell in (kernel.start(code), *([start(kernel, code)] if view in ("static", "quiet") else [])):
        shown = kernel.wait(cell, until=shows_panel)
        assert shown.displays == ([] if view == "quiet" else [LAST])


def test_a_notebook_without_widgets_gets_text(kernel, button):
    """One that closes what it cannot show sees the lines as they come, and then and later the same text."""
    cell = start(kernel, TALK)
    kernel.wait(cell, until=shows_panel)
    send(kernel, "shell", "comm_close", {"comm_id": button, "data": {}})
    assert not kernel.wait(cell, until=lambda shown: LAST in shown.displays).is_done
    assert kernel.wait(cell).displays == [LAST]


def test_only_one_launch_at_a_time_has_the_panel(kernel, button):
    """A second launch shows text."""
    code = "panel = ddplab.panel.Panel\nmine = panel.take('f', 2, print)\nmine is not None, panel.take('g', 2, print)"
    assert kernel.run(code).result["text/plain"] == "(True, None)"
    kernel.run("mine.leave()")


def test_asking_for_the_panel_draws_no_random_number(fresh_kernel):
    """Was a bug: ipykernel draws a tip for its banner when it is asked what it can do, and random went on by one."""
    code = (
        "import random\nfrom ddplab import launch\nrandom.seed(0)\nwanted = random.random()\nrandom.seed(0)\n"
        "launch(print)\nassert random.random() == wanted"
    )
    assert fresh_kernel.wait(start(fresh_kernel, code)).error == ""
