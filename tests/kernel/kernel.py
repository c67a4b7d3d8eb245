"""A real Jupyter kernel for tests: send it cells, get back what they showed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import start_new_kernel


@dataclass
class Shown:
    """What one cell showed: its streams, displays (first and last state), result and error."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""
    took_s: float = 0.0

    @property
    def text(self) -> str:
        """All that a reader of the cell sees, as text."""
        shown = [display.get("text/plain", "") for display in self.displays]
        return "\n".join([self.stdout, *shown, self.result.get("text/plain", ""), self.traceback])


class Kernel:
    """A kernel process; ``env`` is added to its environment."""

    def __init__(self, folder: str | None = None, env: dict[str, str] | None = None) -> None:
        import os

        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.manager, self.client = start_new_kernel(
            startup_timeout=60, kernel_name="python3", cwd=folder, env=environment | (env or {})
        )

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

    def wait(self, message_id: str, timeout_s: float = 60) -> Shown:
        """Wait for a cell that was started."""
        shown, began = Shown(), time.monotonic()
        handles: dict[str, int] = {}
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, began + timeout_s - time.monotonic()))
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
            elif kind == "display_data":
                if handle := content.get("transient", {}).get("display_id"):
                    handles[handle] = len(shown.displays)
                shown.displays.append(content["data"])
            elif kind == "update_display_data":
                shown.displays[handles[content["transient"]["display_id"]]] = content["data"]
            elif kind == "execute_result":
                shown.result = content["data"]
            elif kind == "error":
                shown.error = f"{content['ename']}: {content['evalue']}"
                shown.traceback = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                shown.took_s = time.monotonic() - began
                return shown

    def interrupt(self) -> None:
        """What the stop button of JupyterLab does."""
        self.manager.interrupt_kernel()

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
