"""The board as a panel of widgets in JupyterLab, with a Stop button that is heard while the cell runs.

Runs in the notebook's process.
"""

from __future__ import annotations

import html
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddplab.board import MARKS, Board, Row, clock, printable
from ddplab.events import Line

__all__ = ["Panel", "to_html"]

SUBSHELL_S = 0.5  # for JupyterLab to ask for a subshell
WIDTHS = ("44px", "195px", "135px", "88px", "68px", "80px", "auto", "52px")
HEAD = (
    "".join(f"<col style='width:{width}'>" for width in WIDTHS)
    + "<tr><th class='right'>rank</th><th>state</th><th>progress</th>"
    "<th class='right'>metric</th><th></th><th></th><th>last line</th><th class='right'>time</th></tr>"
)


def to_html(rows: Iterable[Row]) -> str:
    """The rows as a table."""
    return f"<table>{HEAD}{''.join(map(_row, rows))}</table>"


def _row(row: Row) -> str:
    bar = "" if row.done is None else f"<span class='bar'><i style='width:{100 * row.done:.0f}%'></i></span>"
    return (
        f"<tr class='{row.state.partition(' ')[0]}'><td class='right'>{row.rank}</td>"
        f"<td><b>{MARKS.get(row.state, '◐')}</b>{html.escape(row.state)}</td><td>{bar}{row.progress}</td>"
        f"<td class='right'>{html.escape(row.metric)}</td><td class='right'>{row.value}</td>"
        f"<td>{_sparkline(row.trend)}</td><td class='line'>{html.escape(row.line)}</td>"
        f"<td class='right'>{clock(row.seconds)}</td></tr>"
    )


def _sparkline(values: Sequence[float]) -> str:
    """The finite values as a line through a box of 100 by 20."""
    finite = [(x, y) for x, y in enumerate(values) if math.isfinite(y)]
    if len(finite) < 2:
        return ""
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    across, up = 100 / (len(values) - 1), 16 / (high - low) if high > low and math.isfinite(high - low) else 0.0
    points = " ".join(
        f"{x * across:.0f},{18 - (y - low) * up:.1f}" if up else f"{x * across:.0f},10" for x, y in finite
    )
    return f"<svg viewBox='0 0 100 20' preserveAspectRatio='none'><polyline points='{points}'/></svg>"


def _listing(lines: Iterable[Line]) -> str:
    """Lines of one rank, those of stderr marked."""
    parts = [f"<span class='{line.stream}'>{html.escape(printable(line.text))}</span>" for line in lines]
    return f"<pre>{chr(10).join(parts) or 'nothing printed yet'}</pre>"


# As widgets ---------------------------------------------------------------------------------------------


class Panel:
    """The widgets in which JupyterLab shows a board. Made once in a kernel; each launch in turn shows them as its own.

    A kernel is deaf while a cell runs: ipykernel holds a message to a widget back for the thread that last
    sent one from it, and that is the cell's. So the buttons are heard where each message arrives, in the
    thread of the shell channel; see ``_listen``.
    """

    _made: Panel | None = None

    def __init__(self, kernel: Any) -> None:
        import ipywidgets

        self._kernel, before = kernel, _num_subshells()
        css = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
        self._title = ipywidgets.HTML(layout={"flex": "1 1 auto"})
        tip = "end the ranks, and with them the cell, as its interrupt does"
        self._button = ipywidgets.Button(description="Stop", icon="stop", tooltip=tip, layout={"width": "100px"})
        self._table = ipywidgets.HTML()
        self._table.add_class("ddplab-table")
        self._choice = ipywidgets.ToggleButtons(
            description="output of rank", style={"button_width": "auto", "description_width": "auto"}
        )
        self._output = ipywidgets.HTML()
        self._output.add_class("ddplab-output")
        style = ipywidgets.HTML(f"<style>{css}</style>", layout={"display": "none"})
        head = ipywidgets.HBox([self._title, self._button])
        self._box = ipywidgets.VBox([style, head, self._table, self._choice, self._output])
        self._box.add_class("ddplab-panel")
        _listen(self._button, self._hear_button)
        _listen(self._choice, self._hear_choice)
        self.is_refused = False  # by a notebook that knows no widgets
        self._in_use = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._pressed = self._heard = False
        self._chosen = 0
        self._lines: tuple[Line, ...] = ()
        # JupyterLab has its first widgets served by a thread of their own: no receipt shall name it as left.
        end = time.monotonic() + SUBSHELL_S
        while _num_subshells() == before and time.monotonic() < end:
            time.sleep(0.01)

    @classmethod
    def ready(cls) -> bool:
        """Whether the cell comes from a notebook that shows widgets, and can be heard by this kernel while it runs."""
        state = random.getstate()  # ipykernel draws a tip for its banner when it is asked what it can do
        try:
            import ipywidgets  # noqa: F401

            kernel = sys.modules["IPython"].get_ipython().kernel
            # Notebooks say which cell they send; programs that execute one (nbclient, papermill) do not.
            asked = "cellId" in kernel.get_parent("shell")["metadata"]
            if not (asked and "kernel subshells" in kernel.kernel_info["supported_features"]):
                return False
        except (AttributeError, ImportError, KeyError):  # another kernel than ipykernel 7, or no ipywidgets
            return False
        finally:
            random.setstate(state)
        if cls._made is None or cls._made.is_refused:
            cls._made = cls(kernel)
        return True

    @classmethod
    def take(cls, title: str, world_size: int, stop: Callable[[], None]) -> Panel | None:
        """The panel, emptied, until ``leave``; None if another launch has it. ``stop`` comes from another thread."""
        panel = cls._made
        if panel is None or not panel._in_use.acquire(blocking=False):
            return None
        panel._title.value = html.escape(title)
        panel._button.description, panel._button.disabled = "Stop", False
        panel._choice.options = [str(rank) for rank in range(world_size)]
        panel._choice.index = None  # the browser's own choice is not known here as such
        panel._choice.index = panel._chosen = 0
        panel._stop, panel._pressed = stop, False
        panel.draw(Board(world_size), 0.0)
        return panel

    def leave(self) -> None:
        """Let the next launch have the panel."""
        self._stop = None
        self._in_use.release()

    def bundle(self) -> dict[str, Any]:
        """What to display to show the panel."""
        return dict(self._box._repr_mimebundle_())

    def draw(self, board: Board, now_s: float) -> None:
        """Show the board; what has not changed is not sent."""
        self._table.value = to_html(board.rows(now_s))
        if (lines := board.output(self._chosen)) != self._lines or not lines:
            self._lines, self._output.value = lines, _listing(lines)
        if self._pressed:
            self._button.description, self._button.disabled = "Stopping", True
        if self._heard:  # and so the notebook was told that the kernel is idle again
            self._heard = False
            busy, parent = {"execution_state": "busy"}, self._kernel.get_parent("shell")
            self._kernel.session.send(self._kernel.iopub_socket, "status", busy, parent=parent)

    def _hear_button(self, data: Mapping[str, Any]) -> None:
        self.is_refused |= not data  # it was closed by the other side
        if data.get("method") == "custom" and (stop := self._stop):
            self._pressed = self._heard = True
            stop()

    def _hear_choice(self, data: Mapping[str, Any]) -> None:
        self._heard = True
        chosen = data.get("state", {}).get("index")
        self._chosen = chosen if chosen in range(len(self._choice.options)) else self._chosen


def _listen(widget: Any, hear: Callable[[Mapping[str, Any]], None]) -> None:
    """Let ``hear`` have what the browser says of ``widget``, at once and in another thread, also while a cell runs.

    ipykernel 7.4 asks a comm, on arrival, for which thread a message to it is. It is told: the one that the browser
    meant. JupyterLab means a subshell. What other notebooks mean for the cell's own thread is heard by the asking.
    """

    def route(data: Any, subshell: Any) -> Any:
        hear(data or {})
        return subshell

    widget.comm._reply_subshell_for = route
    widget.comm.handle_msg = lambda message: hear(message["content"]["data"])


def _num_subshells() -> int:
    """The threads in which ipykernel serves what does not wait for a cell."""
    return sum(thread.name.startswith("subshell") for thread in threading.enumerate())
