"""A Jupyter server and an offline Chromium for tests: private settings, nothing leaves the machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCAL = re.compile(r"(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|(data|blob|about|file):")
# Notebook 7.6 says these by itself, with an empty notebook too
NOISE = re.compile(r"Cannot read properties of undefined \(reading 'schema'\)|Command 'filebrowser:open-path' not registered")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
SETTINGS: dict[str, dict[str, Any]] = {
    # without the first two a dialog about news covers the page and the server looks outward
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "extensionmanager-extension/plugin": {"enabled": False},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # draw what is out of sight as well
    "apputils-extension/themes": {"theme": "JupyterLab Light", "adaptive-theme": False},
}
PANEL = "[...jupyterapp.shell.widgets('main')].find(w => w.sessionContext && w.content?.widgets)"
# Notebook 7 doesn't hand on that its app shall be visible to the page
EXPOSE = """new MutationObserver((_, seen) => { const config = document.getElementById('jupyter-config-data');
  if (!config?.textContent.trimEnd().endsWith('}')) return;
  seen.disconnect(); config.textContent = config.textContent.replace('"exposeAppInBrowser": false', '"exposeAppInBrowser": true');
}).observe(document, {childList: true, subtree: true, characterData: true});"""


@contextlib.contextmanager
def server(folder: Path, home: Path) -> Iterator[str]:
    """Serve JupyterLab and Notebook 7 from one process; yields the address with its token, to format with a path."""
    for name, value in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "notebook", "--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--ServerApp.allow_root=True"]
    command += [
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
        "--LabApp.extension_manager=readonly",
        "--JupyterNotebookApp.extension_manager=readonly",
    ]
    command += [
        f"--{app}.{what}_dir={home / where}"
        for app in ("LabApp", "JupyterNotebookApp")
        for what, where in (("user_settings", "settings"), ("workspaces", f"workspaces-{app}"))
    ]
    # the data folder holds the signatures of trusted notebooks
    private = {f"JUPYTER_{n.upper()}_DIR": str(home / n) for n in ("config", "runtime", "data")} | {"IPYTHONDIR": str(home / "ipython")}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | private, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}/api/status?token={token}", home / "log")
            yield f"http://127.0.0.1:{port}/{{}}?token={token}"
        finally:
            process.terminate()  # the server ends its kernels
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], status: str, log: Path) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError, urllib.error.URLError):
            if urllib.request.urlopen(status, timeout=5).status == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"Jupyter did not start: {log.read_text()[-2000:]}")


class Watched:
    """A page, what it asked of the outside, and what its console complained of."""

    def __init__(self, page: Any) -> None:
        self.page, self.outside, self.errors = page, [], []
        page.context.route("**/*", self._gate)
        page.context.add_init_script(EXPOSE)
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" and not NOISE.search(m.text) else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)) if not NOISE.search(str(e)) else None)

    def _gate(self, route: Any) -> None:
        if LOCAL.match(route.request.url):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def open(self, address: str, *, kernel: bool = True) -> None:
        """Open a notebook, and nothing that was open before, and wait until it is drawn."""
        self.page.goto(address + ("&reset" if "/lab/" in address else ""), wait_until="domcontentloaded")
        self.page.wait_for_function("window.jupyterapp?.started", timeout=30_000)
        self.page.evaluate("jupyterapp.started.then(() => jupyterapp.restored)")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=30_000)
        if not kernel:  # it asks for one
            self.page.wait_for_selector(".jp-Dialog", timeout=15_000)
            self.page.keyboard.press("Escape")
            self.page.wait_for_selector(".jp-Dialog", state="detached", timeout=5_000)

    def run_all(self) -> None:
        """Run every cell and wait for the last one."""
        self.page.wait_for_function(f"({PANEL})?.sessionContext?.session?.kernel?.connectionStatus === 'connected'", timeout=30_000)
        self.page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(f"({PANEL}).sessionContext.session.kernel.status === 'idle'", timeout=60_000)

    def theme(self, name: str) -> None:
        """Change the theme of the running app."""
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
        self.page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=str("Light" in name).lower())

    def pictures(self, count: int) -> list[dict[str, Any]]:
        """Describe the drawn pictures once there are ``count``: alt, size, number of colours, and whether one sticks out."""
        self.page.wait_for_function(
            "n => { const all = [...document.querySelectorAll('.nbm img')]; return all.length >= n && all.every(i => i.complete); }", arg=count, timeout=20_000
        )
        found: list[dict[str, Any]] = self.page.evaluate(
            """() => [...document.querySelectorAll('.nbm img')].map(image => {
                const canvas = new OffscreenCanvas(image.naturalWidth || 1, image.naturalHeight || 1), pen = canvas.getContext('2d');
                pen.drawImage(image, 0, 0);
                const colours = new Set(new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer));
                const box = image.getBoundingClientRect(), host = image.closest('.nbm').parentElement.getBoundingClientRect();
                return {alt: image.alt, width: image.naturalWidth, shown: box.width, colours: colours.size, cut: box.right > host.right + 1 || box.left < host.left - 1};
            })"""
        )
        return found
