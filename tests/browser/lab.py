"""A real JupyterLab in a real browser for tests: open a notebook, run its cells, read what a person would see."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR",
           "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")  # fmt: skip
OPTIONS = ("--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0",
           "--LabApp.extension_manager=readonly")  # fmt: skip
# What JupyterLab itself says on the console, with the reason why it is no fault of ours.
HARMLESS: dict[str, str] = {}
START_S = 60


class Lab:
    """A JupyterLab that knows only the folder ``home``, which holds the notebooks in ``root``."""

    def __init__(self, home: Path) -> None:
        self.root = home / "root"
        folders = {name: str(home / name.lower()) for name in FOLDERS}
        for folder in (self.root, *map(Path, folders.values())):
            folder.mkdir()
        asks = home / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
        asks.mkdir(parents=True)
        (asks / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
        self.token = secrets.token_hex()
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        environ |= folders | {"JUPYTER_TOKEN": self.token, "PYTHONPATH": str(Path(__file__).parents[2])}
        with open(home / "log", "w") as log:
            command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={self.root}"]
            self.process = subprocess.Popen(command, cwd=home, env=environ, stdout=log, stderr=log)
        self.url = self._url(Path(folders["JUPYTER_RUNTIME_DIR"]), home / "log")

    def _url(self, folder: Path, log: Path) -> str:
        """Where the server listens, as it writes it down when it does."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            for path in folder.glob("jpserver-*.json"):
                with contextlib.suppress(ValueError):  # half written
                    return str(json.loads(path.read_text())["url"])
            time.sleep(0.05)
        self.close()
        raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")

    def write(self, name: str, cells: Iterable[str]) -> Path:
        """A notebook of these cells, where JupyterLab finds it."""
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbformat.write(notebook, self.root / name)
        return self.root / name

    def close(self) -> None:
        """End the server, which ends its kernels."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def browser_page() -> Iterator[Page]:
    """A page of a headless browser."""
    with sync_playwright() as playwright:
        # As root, as in a container, Chromium's sandbox cannot be set up. Only our own server is visited.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(30_000)
        yield page
        browser.close()


class Notebook:
    """A notebook that is open in the browser; its cells have names. ``complaints`` are errors on the console."""

    def __init__(self, page: Page, lab: Lab, cells: Mapping[str, str]) -> None:
        self.page, self.path, self._names = page, lab.write("lesson.ipynb", cells.values()), list(cells)
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda told: self.complaints.append(told.text) if told.type == "error" else None)
        page.goto(f"{lab.url}lab/tree/{self.path.name}?token={lab.token}")
        self.wait_for_kernel()

    @property
    def panel(self) -> Locator:
        """The live panel."""
        return self.page.locator(".ddplab-panel")

    @property
    def status(self) -> str:
        """What the status bar says."""
        return self.page.locator("#jp-main-statusbar").inner_text()

    def cell(self, name: str) -> Locator:
        """A cell."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(self._names.index(name))

    def seen(self, is_true: Callable[[], bool], limit_s: float = 10) -> bool:
        """Whether ``is_true()`` within ``limit_s`` seconds."""
        end = time.monotonic() + limit_s
        while not is_true():
            if time.monotonic() > end:
                return False
            self.page.wait_for_timeout(20)  # which lets the page's events in
        return True

    def wait_for_kernel(self) -> None:
        """Wait until the status bar says that the kernel is idle."""
        assert self.seen(lambda: "| Idle" in self.status, 30), self.status

    def type(self, name: str, text: str) -> None:
        """Put ``text`` into a cell."""
        self.cell(name).locator(".cm-content").fill(text)

    def start(self, name: str) -> None:
        """Click into a cell and run it."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        assert self.seen(lambda: not self.is_done(name), 5)

    def is_done(self, name: str) -> bool:
        """Whether the cell does not run."""
        return "*" not in (self.cell(name).locator(".jp-InputPrompt").first.text_content() or "")

    def wait(self, name: str, limit_s: float = 30) -> str:
        """Wait for the end of a cell; gives what it shows."""
        assert self.seen(lambda: self.is_done(name), limit_s), f"{name} still runs after {limit_s} s"
        output = self.cell(name).locator(".jp-OutputArea")
        output.scroll_into_view_if_needed()  # what is out of sight is not laid out, and has no text
        return output.inner_text()

    def save(self, name: str) -> list[nbformat.NotebookNode]:
        """Save as Ctrl+S does; gives what of a cell's outputs then lies on the disk."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        assert self.seen(lambda: self.path.stat().st_mtime_ns > before), "not saved"
        assert self.seen(lambda: self.path.read_text().endswith("}\n")), "not written to the end"
        cells = nbformat.read(self.path, as_version=4).cells
        return list(cells[self._names.index(name)].outputs)
