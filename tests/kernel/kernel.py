"""A real Jupyter kernel for tests: send it cells, get back what they showed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import start_new_kernel


@dataclass
class Shown:
    """What one cell showed: its number, streams, displays (their last state), result and error."""

    number: int = 0
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""
    is_done: bool = False
    handles: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All that a reader of the cell sees, as text."""
        shown = [display.get("text/plain", "") for display in self.displays]
        return "\n".join([self.stdout, *shown, self.result.get("text/plain", ""), self.traceback])


class Kernel:
    """A kernel process; ``env`` is added to its environment."""

    def __init__(self, folder: str | None = None, env: dict[str, str] | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.manager, self.client = start_new_kernel(
            startup_timeout=60, kernel_name="python3", cwd=folder, env=environment | (env or {})
        )
        self._shown: dict[str, Shown] = {}

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        provisioner = self.manager.provisioner
        assert provisioner is not None
        return int(provisioner.pid)  # type: ignore[attr-defined]

    def start(self, code: str) -> str:
        """Send a cell and do not wait for it; gives the id to wait for."""
        return str(self.client.execute(code, store_history=True))

    def run(self, code: str, timeout_s: float = 60) -> Shown:
        """Run a cell to its end."""
        return self.wait(self.start(code), timeout_s)

    def wait(self, message_id: str, timeout_s: float = 60, until: Callable[[Shown], bool] | None = None) -> Shown:
        """Wait for a cell that was started: for its end, or until it has shown something; ``queue.Empty`` if it does not."""
        shown = self._shown.setdefault(message_id, Shown())
        end = time.monotonic() + timeout_s
        while not shown.is_done and not (until and until(shown)):
            message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") == message_id:
                _take_in(shown, message["msg_type"], message["content"])
        return shown

    def interrupt(self) -> None:
        """What the stop button of JupyterLab does."""
        self.manager.interrupt_kernel()

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def _take_in(shown: Shown, kind: str, content: dict[str, Any]) -> None:
    if kind == "execute_input":
        shown.number = content["execution_count"]
    elif kind == "stream":
        setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
    elif kind == "display_data":
        if handle := content.get("transient", {}).get("display_id"):
            shown.handles[handle] = len(shown.displays)
        shown.displays.append(content["data"])
    elif kind == "update_display_data":
        shown.displays[shown.handles[content["transient"]["display_id"]]] = content["data"]
    elif kind == "execute_result":
        shown.result = content["data"]
    elif kind == "error":
        shown.error = f"{content['ename']}: {content['evalue']}"
        shown.traceback = "\n".join(content["traceback"])
    elif kind == "status":
        shown.is_done = content["execution_state"] == "idle"
