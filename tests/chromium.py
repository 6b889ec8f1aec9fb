"""A Chromium, driven by the DevTools protocol over a pipe: no port, no library, no driver.

Commands and events are JSON, each ended by a NUL, on the browser's descriptors 3 and 4
(`--remote-debugging-pipe`).
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import STACK_PATIENCE_S

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None: there is none here (Debian: apt-get install chromium)."""
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--mute-audio",
)


class Page:
    """One tab. Messages of the page's console that are errors, and its exceptions, gather in `faults`."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self._context = ""
        self.faults: list[str] = []

    def attach(self) -> None:
        """A new tab, which remembers nothing of the one before."""
        if self._session is not None:
            self._session = None
            self.call("Target.disposeBrowserContext", browserContextId=self._context)
        self.faults.clear()
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)[
            "targetId"
        ]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result. Raises AssertionError when it fails or takes too long."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._send, json.dumps(command).encode() + b"\0")
        deadline_s = time.monotonic() + STACK_PATIENCE_S
        while True:
            message = self._next(deadline_s, method)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=is_phone, **size)

    def evaluate(self, expression: str) -> Any:
        """The value of some JavaScript, awaited if it is a promise. Raises AssertionError when it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, within_s: float = STACK_PATIENCE_S) -> Any:
        """Waits for it to be true; its value. Raises AssertionError when it does not become so."""
        deadline_s = time.monotonic() + within_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline_s, f"never: {expression}; faults: {self.faults}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """One key, as a person would."""
        text = {"text": key} if len(key) == 1 else {"Enter": {"text": "\r"}}.get(key, {})
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, ord(key[0].upper()))
        named = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _next(self, deadline_s: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"the browser did not answer {waiting_for} in time"
            received = os.read(self._receive, 1 << 20)
            assert received, f"the browser ended during {waiting_for}"
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(parameters["exceptionDetails"])[:2000])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.faults.append(json.dumps(parameters["entry"])[:2000])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a browser with a fresh profile in that folder; it leaves no process behind."""
    assert EXECUTABLE is not None, "there is no Chromium"
    to_read, send = os.pipe()
    receive, to_write = os.pipe()

    # The protocol's descriptors have these numbers, which a shell can give them.
    exec_with = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    argv = ["bash", "-c", exec_with, "bash", EXECUTABLE, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        argv,
        pass_fds=(to_read, to_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    page = Page(send, receive)
    try:
        page.attach()
        yield page
    finally:
        os.write(send, b'{"id":0,"method":"Browser.close"}\0')
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(10)
        os.close(send)
        os.close(receive)
