"""A headless Chromium over its DevTools protocol, with nothing but the standard library.

It speaks through a pair of pipes, one JSON document per zero byte, so no websocket is needed.
Pending calls, and events that no call asked for (exceptions, console, finished downloads), are kept
until a test reads them. One tab; every call waits for its answer.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--force-prefers-reduced-motion", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)
WINDOW = 1280, 800
DEADLINE_S = 120.0
ERRORS = ("error", "assert")


def path() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


DIFFERING = """async (...pictures) => {
  const [a, b] = await Promise.all(pictures.map(async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const drawn = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const pen = new OffscreenCanvas(drawn.width, drawn.height).getContext("2d");
    pen.drawImage(drawn, 0, 0);
    return pen.getImageData(0, 0, drawn.width, drawn.height);
  }));
  const pixels = (image) => new Uint32Array(image.data.buffer);
  const [left, right] = [pixels(a), pixels(b)];
  if (a.width !== b.width || a.height !== b.height) return Math.max(left.length, right.length);
  return left.reduce((count, pixel, at) => count + (pixel !== right[at]), 0);
}"""


class Browser:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self.downloads = Path(self._folder.name) / "downloads"
        self.downloads.mkdir()
        ours, theirs = os.pipe(), os.pipe()
        child_in, child_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (ours[0], theirs[1]))
        self._to, self._from = ours[1], theirs[0]
        redirect = f'exec "$@" 3<&{child_in} 4>&{child_out} {child_in}<&- {child_out}>&-'
        chromium = path()
        assert chromium is not None, "Chromium is not installed"
        self._process = subprocess.Popen(
            [
                *("bash", "-c", redirect, "bash", chromium, *FLAGS),
                *(f"--user-data-dir={self._folder.name}", "--window-size={},{}".format(*WINDOW)),
            ],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (ours[0], theirs[1], child_in, child_out):
            os.close(fd)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        self._open_tab()
        self.resize(*WINDOW)

    def _open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    # ---- the protocol

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": given}
        if self._session and not method.startswith(("Target.", "Browser.")):
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            said = self._hear(deadline_s)
            if said.get("id") == number:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]
            self.events.append(said)

    def _hear(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(0.0, left_s))
            assert ready, "Chromium does not answer"
            fresh = os.read(self._from, 1 << 16)
            assert fresh, "Chromium has ended"
            self._unread += fresh
        said, _, self._unread = self._unread.partition(b"\0")
        return json.loads(said)

    # ---- the page

    def resize(self, width: int, height: int, *, scale: float = 1.0, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )

    def dress(self, scheme: str) -> None:
        """What the page is told that its reader prefers: light or dark."""
        prefers = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=prefers)

    def go(self, url: str) -> None:
        went = self.call("Page.navigate", url=url)
        assert "errorText" not in went, f"{url}: {went['errorText']}"
        self.until("document.readyState === 'complete'")

    def leave(self) -> None:
        """Ends the page, which may still ask a server that is gone, and forgets its errors."""
        self.go("about:blank")
        self.events.clear()

    def value(self, expression: str) -> Any:
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, f"{expression}: {reply['exceptionDetails']}"
        return reply["result"].get("value")

    def until(self, expression: str, *, within_s: float = DEADLINE_S) -> Any:
        """The expression's value once it is true."""
        deadline_s = time.monotonic() + within_s
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline_s, f"never true: {expression}; {self.errors()}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": {"Enter": 13, "Tab": 9}.get(key, 0)}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **code, **text)
            text = {}

    def downloaded(self, name: str) -> bytes:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (self.downloads / name).exists():
            assert time.monotonic() < deadline_s, f"{name} was not downloaded"
            time.sleep(0.05)
        return (self.downloads / name).read_bytes()

    def errors(self) -> list[str]:
        """Exceptions, errors on the console and in the browser's log, so far."""
        self.value("0")
        return [message for each in self.events if (message := _error(each))]

    def still(self, *, whole: bool = False) -> bytes:
        """A picture once nothing moves any more: layout has settled, scroll bars have faded."""
        before = b""
        for _ in range(40):
            taken = self.picture(whole=whole)
            if taken == before:
                return taken
            before = taken
            time.sleep(0.3)
        raise AssertionError("the page never stands still")

    def picture(self, *, whole: bool = False) -> bytes:
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def differing(self, first: bytes, second: bytes) -> int:
        """How many pixels of two pictures differ; all of the larger one if their sizes do."""
        given = ", ".join(f'"{base64.b64encode(each).decode()}"' for each in (first, second))
        count: int = self.value(f"({DIFFERING})({given})")
        return count


def _error(event: dict[str, Any]) -> str:
    given = event.get("params", {})
    match event.get("method"):
        case "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            return str(details.get("exception", {}).get("description", details["text"]))
        case "Runtime.consoleAPICalled" if given["type"] in ERRORS:
            return " ".join(str(each.get("value", "")) for each in given["args"])
        case "Log.entryAdded" if given["entry"]["level"] == "error":
            return f"{given['entry']['text']} {given['entry'].get('url', '')}"
    return ""
