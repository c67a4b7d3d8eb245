"""A notebook in JupyterLab, used as a person does: what runs is seen, can be stopped, and leaves text."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("playwright", reason="tests/browser needs the package playwright: pip install playwright")

STOP_S = 3  # what is promised


def test_the_panel_appears_moves_and_becomes_text(lesson):
    """While ranks run there is a row for each, which moves; afterwards only text, also in the file."""
    lesson.start("train")
    lesson.panel.wait_for()
    assert lesson.panel.locator("tr").count() == 3
    assert lesson.seen(lambda: "running" in lesson.panel.inner_text())
    first = lesson.panel.locator("tr").nth(1).inner_text()
    assert lesson.seen(lambda: lesson.panel.locator("tr").nth(1).inner_text() != first)
    assert lesson.panel.locator("polyline").count() == 2
    lesson.panel.get_by_role("button", name="1", exact=True).click()
    assert lesson.seen(lambda: "of rank 1" in lesson.panel.locator("pre").inner_text())
    assert lesson.seen(lambda: "| Busy" in lesson.status, 2)
    shown = lesson.wait("train")
    text = "\n".join(f"rank {rank} | step {step} of rank {rank}" for rank in range(2) for step in range(30))
    assert shown.strip() == f"{text}\nnothing is left"
    outputs = lesson.save("train")
    assert [output.get("data") for output in outputs] == [{"text/plain": text}, None]


def test_a_run_that_prints_nothing_leaves_nothing(lesson):
    """The panel of a silent run goes without a trace."""
    lesson.start("silent")
    lesson.panel.wait_for()
    assert lesson.wait("silent").strip() == ""
    assert lesson.panel.count() == 0
    assert [output.data for output in lesson.save("silent")] == [{}]


def press_stop(lesson):
    """The Stop button of the panel."""
    lesson.panel.get_by_role("button", name="Stop").click()


def interrupt(lesson):
    """The button with the square in JupyterLab's tool bar."""
    lesson.page.locator("[data-command='notebook:interrupt-kernel']").click()


def use_keys(lesson):
    """Up to the running cell, Tab until Stop has the focus, and Enter."""
    lesson.page.keyboard.press("Escape")
    lesson.page.keyboard.press("ArrowUp")
    for _ in range(20):
        lesson.page.keyboard.press("Tab")
        if lesson.page.evaluate("document.activeElement.innerText").strip() == "Stop":
            return lesson.page.keyboard.press("Enter")
    raise AssertionError("Tab does not reach Stop")


@pytest.mark.parametrize("end", [press_stop, interrupt, use_keys])
def test_a_hang_is_ended(lesson, ranks, end):
    """Stop, JupyterLab's own interrupt, and Stop by keyboard alone: the cell ends in time, says so, and no rank is left.

    Before, the panel says which rank waits in what.
    """
    lesson.start("hang")
    lesson.panel.get_by_text("waits in barrier #1").wait_for()
    ranks.wait(2)
    end(lesson)
    began = time.monotonic()
    shown = lesson.wait("hang", 2 * STOP_S)
    assert time.monotonic() - began < STOP_S
    assert "KeyboardInterrupt: " in shown
    assert ("the Stop button was pressed" in shown) == (end is not interrupt)
    assert lesson.panel.count() == 0
    ranks.check_gone()


def test_a_flood_leaves_the_page_usable(lesson):
    """While 100,000 lines come, and afterwards, the page answers at once; of the lines a part is shown."""
    lesson.start("flood")
    waits = []
    while not lesson.is_done("flood"):
        began = time.monotonic()
        lesson.page.evaluate("new Promise(requestAnimationFrame)")
        waits.append(time.monotonic() - began)
        time.sleep(0.05)
    assert max(waits) < 0.5
    shown = lesson.wait("flood")
    assert "rank 0 | line 99999" in shown
    assert "lines left out" in shown
    assert len(shown.splitlines()) < 200


def test_outputs_survive_a_reload(lesson):
    """What was shown before the page is loaded anew is shown after it."""
    before = lesson.wait("train")
    lesson.save("train")
    lesson.page.reload()
    lesson.wait_for_kernel()
    assert lesson.wait("train") == before
    assert "step 29 of rank 1" in before


def test_a_restart_of_the_kernel_leaves_no_rank(lesson, ranks):
    """Restarting the kernel in the middle of a run ends its ranks."""
    lesson.start("hang")
    lesson.panel.wait_for()
    ranks.wait(2)
    lesson.page.locator("[data-command='notebook:restart-kernel']").click()
    lesson.page.locator(".jp-Dialog .jp-mod-accept").click()
    ranks.check_gone()
    lesson.wait_for_kernel()
