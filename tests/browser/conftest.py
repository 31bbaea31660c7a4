"""Chapters in a real JupyterLab and a real Chromium: a server with nothing of the user's, and a page to act on."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from minillm.bench.doctor import BROWSERS

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 200_000  # ms for whatever a page waits for; a busy machine needs most of it
LAB_STARTS_WITHIN = 120  # seconds

SETTINGS = {
    # The pop-up that offers Jupyter's news stands in front of the notebook, and fetches.
    "apputils-extension/notification": {"fetchNews": "false"},
    # Cells that are scrolled out of sight stay in the page, where their numbers can be read.
    "notebook-extension/tracker": {"windowingMode": "none"},
}
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


class Chapter:
    """A notebook that is open in JupyterLab; ``complaints`` fills with all that should not have happened."""

    def __init__(self, page, lab: str, name: str, cells: list[dict]):
        self.page = page
        self.ids = [cell["id"] for cell in cells]
        self.code_cells = sum(cell["cell_type"] == "code" for cell in cells)
        self.complaints: list[str] = []
        ours = (f"{lab}/", f"{lab.replace('http', 'ws', 1)}/", "data:", "blob:", "about:")

        def check_address(request) -> None:
            if not request.url.startswith(ours):
                self.complaints.append(f"request to {request.url}")

        def check_message(message) -> None:
            if message.type == "error":
                self.complaints.append(f"console: {message.text} ({message.location.get('url')})")

        page.context.set_default_timeout(PATIENCE)
        page.context.on("request", check_address)
        page.on("websocket", check_address)
        page.on("console", check_message)
        page.on("pageerror", lambda error: self.complaints.append(f"page: {error}"))
        page.goto(f"{lab}/lab/tree/chapters/{name}?reset")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.panel.wait_for()
        self.wait_for_kernel(lab, name)

    def wait_for_kernel(self, lab: str, name: str) -> None:
        """The page's indicator says idle too early; the server knows whether the page is connected."""
        ask, end = self.page.locator(".jp-Dialog", has_text="Select Kernel"), time.monotonic() + PATIENCE / 1000
        while not any(
            session["path"].endswith(name)
            and session["kernel"]["execution_state"] == "idle"
            and session["kernel"]["connections"] > 0
            for session in self.page.request.get(f"{lab}/api/sessions").json()
        ):
            if ask.is_visible():  # JupyterLab on a busy machine asks which kernel: the one it offers
                ask.locator(".jp-mod-accept").click()
            assert time.monotonic() < end, "no kernel in time"
            self.page.wait_for_timeout(200)
        self.panel.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()

    def prompts(self, pattern: str):
        """Where code cells show their execution count, those whose text matches."""
        prompts = self.panel.locator(".jp-CodeCell .jp-InputArea-prompt")
        return prompts.filter(has_text=re.compile(pattern))

    def run_all(self) -> None:
        """Run All, and again if JupyterLab, just connected, ran the first cell only. A cell that fails ends it."""
        for seconds in (0.5, 1, 2, 5, 10, 20):
            self.page.get_by_role("menuitem", name="Run", exact=True).click()
            self.page.locator('.lm-Menu [data-command="runmenu:run-all"]').click()
            self.page.wait_for_timeout(1000 * seconds)  # a cell that waits has a star from now on
            self.prompts(r"^\[\*\]:$").first.wait_for(state="detached")
            if self.prompts(r"^\[\d+\]:$").count() == self.code_cells or self.errors():
                return
        raise AssertionError(f"of {self.code_cells} cells have run: {self.prompts(r'[0-9]').all_inner_texts()}")

    def errors(self) -> list[str]:
        """Tracebacks of cells. JupyterLab shows them as text of stderr, like a warning."""
        texts = self.panel.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()
        return [text for text in texts if re.search(r"Traceback \(most recent|^\w*Error: ", text, re.MULTILINE)]

    def broken_images(self) -> list[str]:
        """Addresses of images that did not come."""
        return self.panel.locator("img").evaluate_all(
            "images => images.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )

    def cell(self, cell_id: str):
        return self.panel.locator(".jp-Notebook-cell").nth(self.ids.index(cell_id))


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """Chapters and figures as they lie in the repository, for JupyterLab to write to."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "figures", folder / "figures")
    (folder / "chapters").mkdir()
    return folder


@pytest.fixture(scope="session")
def lab(clone, tmp_path_factory):
    """Address of a JupyterLab whose root is ``clone``, with fresh settings and without a token."""
    own = tmp_path_factory.mktemp("jupyter")
    for name, values in SETTINGS.items():
        file = own / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={clone}"),
        *("--IdentityProvider.token=", "--LabApp.extension_manager=readonly"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = own / "log"
    with log.open("w") as to:
        environment = os.environ | {name: str(own / folder) for name, folder in folders.items()}
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=to, stderr=to)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api/status", server, log)
        yield address
    finally:
        server.terminate()  # takes its kernels with it
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + LAB_STARTS_WITHIN
    while server.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


# Not for the whole session: while Playwright is on, no other test of this process can start an event loop.
@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    path = next(path for name in BROWSERS if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def open_chapter(chromium, lab, clone):
    """f("01_flashattention.ipynb") -> Chapter, a copy without outputs: a count that is there was counted now.

    f(name, notebook) opens another notebook in the chapters' place.
    """
    pages = []

    def open_it(name: str, notebook: dict | None = None) -> Chapter:
        notebook = notebook or json.loads((ROOT / "chapters" / name).read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = [], None
        (clone / "chapters" / name).write_text(json.dumps(notebook), encoding="utf-8")
        pages.append(chromium.new_page(viewport={"width": 1400, "height": 1000}))
        return Chapter(pages[-1], lab, name, notebook["cells"])

    yield open_it
    for page in pages:
        page.close()
