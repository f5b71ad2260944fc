"""A real Chromium without a window, driven over the DevTools protocol on two pipes: no port, no driver, no package.

Knows nothing of the page. What a tab complains about (errors, what its policy forbids) and asks for is written down.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.server.serving import gone

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root, as in most containers, has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
PATIENCE = 90.0  # seconds nothing here takes, on however busy a machine
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
KEYS |= {f"Arrow{side}": (code, "") for side, code in {"Left": 37, "Up": 38, "Right": 39, "Down": 40}.items()}


class Browser:
    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._last_id = 0
        self.tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str = "", /, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._next(end)
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, end: float) -> dict[str, Any] | None:
        """One message; an event is handed to its tab on the way."""
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message and message.get("sessionId") in self.tabs:
            self.tabs[message["sessionId"]].on_event(message["method"], message["params"])
        return message

    @contextlib.contextmanager
    def tab(self, width: int = 1280, height: int = 800, *, phone: bool = False, dark: bool = False) -> Iterator[Tab]:
        """With nothing kept of the tabs before it."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self.tabs[session] = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        scale = 3 if phone else 1
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        tab.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        yield tab
        del self.tabs[session]
        self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.browser, self.session, self.context = browser, session, context
        self.complaints: list[str] = []
        self.urls: list[str] = []

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE) -> Any:
        """What it is once it is true."""
        end = time.monotonic() + seconds
        while not (found := self.js(expression)):
            assert time.monotonic() < end, f"never: {expression}; {self.complaints}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).textContent"))

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """modifiers: 8 is Shift."""
        code, text = KEYS[key]
        about = {"key": key, "code": "Space" if key == " " else key, "modifiers": modifiers}
        about |= {"windowsVirtualKeyCode": code}
        kind = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def box(self, selector: str) -> dict[str, float]:
        """Where it is on the screen, scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'nearest'}})")
        found: dict[str, float] = self.js(f"{element}.getBoundingClientRect().toJSON()")
        return found

    def click(self, selector: str) -> None:
        box = self.box(selector)
        self.point("mousePressed", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.point("mouseReleased", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def point(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))


def _as_3_and_4(read: int, write: int) -> None:
    """Where Chromium reads commands and writes answers. By way of others: one of the two may be 3 or 4 itself."""
    read, write = (fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (read, write))
    os.dup2(read, 3)
    os.dup2(write, 4)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)))
    to_it, our_write = os.pipe()
    our_read, from_it = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=lambda: _as_3_and_4(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        browser = Browser(our_read, our_write)
        try:
            yield browser
            browser.call("Browser.close")
        finally:
            children = []
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
            os.close(our_write)  # it ends when nobody talks to it any more
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            end = time.monotonic() + 5
            while time.monotonic() < end and not all(gone(child.pid) for child in children):
                time.sleep(0.02)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.close(our_read)
