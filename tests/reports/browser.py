"""A headless Chromium driven through its debugging pipe: no port, no network, no driver program.

Messages are JSON objects ended by a zero byte, on descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--hide-scrollbars",
    "--mute-audio",
    "--remote-debugging-pipe",
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """Return the path of the system's Chromium, None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser went away, was silent too long, or refused a command."""


@dataclass
class Page:
    """One tab: what it logged, what it asked the network for, and its session."""

    browser: Browser
    session: str
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the debugging protocol and return its result."""
        return self.browser.call(method, self.session, **params)

    def run(self, script: str) -> Any:
        """Evaluate JavaScript; a promise is awaited; an exception is raised as BrowserError."""
        params = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **params)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Show a file at this size and colour scheme, and wait until its script says `ready`."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript condition holds."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > end:
                raise BrowserError(f"not within {seconds} s: {condition}; {self.messages}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key on the focused element: Enter, Tab or a letter."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        codes = {"Enter": 13, "Tab": 9}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0), "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def screenshot(self, path: Path, full: bool = True) -> None:
        """Write a PNG of the whole page, or of the viewport."""
        clip = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            box = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            clip = {"clip": box, "captureBeyondViewport": True}
        answer = self.call("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """Note an event of the tab."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(f"{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.messages.append(str(params["entry"]["text"]))


class Browser:
    """One Chromium process with a profile of its own; use as a context manager."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # the shell moves the pipe's ends to descriptors 3 and 4, which may be taken here
        shuffle = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
        command = ["bash", "-c", shuffle, executable, *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(profile)},
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._count = 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._out)
        os.close(self._in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)

    def page(self) -> Page:
        """Open a tab that records its console and its requests."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, answer["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are handed on."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            page = self._pages.get(answer.get("sessionId", ""))
            if page and "method" in answer:
                page.hear(answer["method"], answer["params"])

    def _receive(self, seconds: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer within {seconds} s")
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                raise BrowserError("the browser went away")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)
