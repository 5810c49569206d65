"""A page in a real browser: headless chromium, driven through its DevTools pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 120.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Seen:
    """What a page did when it was opened: what it complained of, what it asked for, its width."""

    errors: list[str]
    requests: list[str]
    width: int
    scrolls: bool
    """Whether it is wider than the window, so that one has to scroll sideways."""
    text: str


class Browser:
    """A running browser. `open` shows a page in it and says what happened."""

    def __init__(self, process: subprocess.Popen[bytes], sent: int, heard: int) -> None:
        self._process, self._sent, self._heard = process, sent, heard
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(
        self, path: Path, *, width: int = 1280, dark: bool = False, shot: Path | None = None
    ) -> Seen:
        """Show a file, perhaps keep a picture of all of it as a PNG."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        url = path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        self._await("Page.loadEventFired")
        inner = self.evaluate("document.documentElement.clientWidth")
        outer = self.evaluate("document.documentElement.scrollWidth")
        if shot is not None:
            picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            shot.write_bytes(base64.b64decode(picture))
        asked = [e["params"]["request"]["url"] for e in self._said("Network.requestWillBeSent")]
        return Seen(
            errors=[json.dumps(event["params"]) for event in self._complaints()],
            requests=[each for each in asked if each != url and not each.startswith("data:")],
            width=outer,
            scrolls=outer > inner,
            text=self.evaluate("document.body.innerText"),
        )

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"][
            "value"
        ]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and wait for what it returns."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._sent, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def _await(self, method: str) -> None:
        while not any(self._said(method)):
            self._events.append(self._next())

    def _said(self, method: str) -> Iterator[dict[str, Any]]:
        return (event for event in self._events if event.get("method") == method)

    def _complaints(self) -> Iterator[dict[str, Any]]:
        yield from self._said("Log.entryAdded")
        yield from self._said("Runtime.exceptionThrown")
        yield from self._said("Runtime.consoleAPICalled")

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._heard], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("chromium says nothing")
            block = os.read(self._heard, 1 << 20)
            if not block:
                raise RuntimeError(f"chromium is gone, with code {self._process.poll()}")
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def program() -> str | None:
    """The browser that is here, if there is one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its profile in `folder`, until the block ends."""
    found = program()
    if found is None:
        raise FileNotFoundError("no chromium")
    from_here, sent = os.pipe()
    heard, to_here = os.pipe()
    command = [
        found,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]
    # It reads file descriptor 3 and writes 4, whatever numbers they have here.
    shell = f'exec "$@" 3<&{from_here} 4>&{to_here}'
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "bash", *command],
            pass_fds=(from_here, to_here),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(from_here)
    os.close(to_here)
    try:
        yield Browser(process, sent, heard)
    finally:
        os.close(sent)
        os.close(heard)
        try:
            process.wait(5)  # it leaves when its pipe is closed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
