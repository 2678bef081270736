"""Debian's Chromium without a screen, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

__all__ = ["Browser", "Page", "PageError", "find_chromium"]

PATIENCE = 120.0
"""Seconds after which what was waited for is not going to happen."""

_KEYS = {"Enter": ("\r", 13), "Escape": ("", 27)}


class PageError(AssertionError):
    """A script in the page failed, or a condition never became true."""


def find_chromium() -> str | None:
    """The path of a Chromium; None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One browser process, while it is entered.

    :param path: of the program.
    :param profile: an empty folder for what it keeps.
    """

    def __init__(self, path: str, profile: Path) -> None:
        self._path = path
        self._profile = profile
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        command = [
            self._path,
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile}",
            "--disable-gpu",
            "--disable-dev-shm-usage",  # /dev/shm is small in containers
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--disable-sync",
            "--no-default-browser-check",
            "--no-first-run",
            "--no-proxy-server",
        ]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # it refuses to run as root with one
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with ExitStack() as stack:
            stack.callback(self._end)
            self._socket: ClientConnection = stack.enter_context(
                connect(self._address(), max_size=None, proxy=None)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def open(self, url: str, *, width: int = 900, height: int = 900, mobile: bool = False) -> Page:
        """A page with a session of its own, as in another window, loaded."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        page = Page(self, session)
        page.command("Runtime.enable")
        page.command("Page.enable")
        page.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        # Only one page has the focus of a real window; each of ours shall behave as if it had.
        page.command("Emulation.setFocusEmulationEnabled", enabled=True)
        page.command("Page.navigate", url=url)
        page.until(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'"
        )
        return page

    def command(self, method: str, session: str | None = None, /, **parameters: Any) -> Any:
        """Have a command done, and return its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") == number:
                break
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def events(self, method: str, session: str) -> list[dict[str, Any]]:
        """The parameters of the events of a kind that a page has had."""
        return [
            event["params"]
            for event in self._events
            if event.get("method") == method and event.get("sessionId") == session
        ]

    def _address(self) -> str:
        # Written when the port is open: its number, and the path to connect to.
        port_file = self._profile / "DevToolsActivePort"
        end = time.monotonic() + PATIENCE
        while True:
            lines = port_file.read_text().splitlines() if port_file.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._path} ended with {self._process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self._path} does not open its port")
            time.sleep(0.02)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    """One page of a browser; made by `Browser.open`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def command(self, method: str, **parameters: Any) -> Any:
        """Have a DevTools command done in this page."""
        return self._browser.command(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it gives.

        :raises PageError: if it throws.
        """
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            thrown = details.get("exception", {}).get("description") or details["text"]
            raise PageError(f"{expression}: {thrown}")
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression in the page is true, and return its value.

        :raises PageError: if it does not become true.
        """
        end = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                shown = self.evaluate("document.body.innerText")
                raise PageError(f"never true: {expression}; the page shows:\n{shown}")
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def texts(self, selector: str) -> list[str]:
        """The text of each element that matches."""
        matching = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.evaluate(f"{matching}.map((e) => e.textContent)"))

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of the first element that matches."""
        x, y = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "center" }});
                const box = element.getClientRects()[0];
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def type(self, text: str) -> None:
        """Type text where the focus is."""
        self.command("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key: Enter or Escape."""
        text, code = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        down = {**event, "text": text} if text else event
        self.command("Input.dispatchKeyEvent", type="keyDown", **down)
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def errors(self) -> list[str]:
        """What went wrong in the page and nobody handled."""
        self.evaluate("0")  # what has been sent is read with the answer
        return [
            event["exceptionDetails"]["text"]
            + " "
            + str(event["exceptionDetails"].get("exception", {}).get("description"))
            for event in self._browser.events("Runtime.exceptionThrown", self._session)
        ]

    def screenshot(self) -> bytes:
        """The visible part, as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
