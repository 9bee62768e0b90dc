"""A real Chromium without a window, driven over its DevTools protocol: pages, keys, pictures, and what sockets get."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

#: Seconds for the browser to start, for an answer, and for something to be seen.
_START_S, _ANSWER_S, _SEEN_S = 60.0, 30.0, 20.0
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?<>=$]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
}


def find_chromium() -> str | None:
    """Return a Chromium of this machine."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """A browser that runs while the ``async with`` lasts.

    Args:
        profile: An empty folder for it.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def __aenter__(self) -> Chromium:
        program = find_chromium()
        assert program is not None
        self._process = await asyncio.create_subprocess_exec(
            program, *_SWITCHES, f"--user-data-dir={self._profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        try:
            port, path = await asyncio.wait_for(self._address(), _START_S)
            self._http = aiohttp.ClientSession()
            self._socket = await self._http.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0)
        except BaseException:
            await self._end()
            raise
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await self._socket.close()
        await self._http.close()
        await self._end()

    async def _address(self) -> tuple[str, str]:
        file = self._profile / "DevToolsActivePort"
        while True:
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2:
                return lines[0], lines[1]
            await asyncio.sleep(0.05)

    async def _end(self) -> None:
        """End the browser with all of its processes, which are a group of their own."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                page.hear(told["method"], told["params"])

    async def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        body = {"id": number, "method": method, "params": params}
        await self._socket.send_json(body if session is None else {**body, "sessionId": session})
        told = await asyncio.wait_for(answer, _ANSWER_S)
        assert "error" not in told, f"{method}: {told['error']}"
        result: dict[str, Any] = told["result"]
        return result

    async def open(self, url: str, width: int = 1200, height: int = 760) -> Page:
        """Open a page in a tab of its own, of that size in pixels."""
        target = (await self.ask("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        await page.resize(width, height)
        for domain in ("Page", "Network", "Runtime", "Log"):
            await page.ask(f"{domain}.enable")
        await page.ask("Page.navigate", url=url)
        return page


class Page:
    """One tab.

    Attributes:
        text: All that its web sockets have received, as text without escape sequences.
        complaints: Errors that the page met: of its scripts, of its rules, of what it could not load.
        urls: What it asked for.
    """

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self._raw = bytearray()
        self._closed = False
        self.complaints: list[str] = []
        self.urls: list[str] = []

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """Take an event of the protocol."""
        match method:
            case "Network.webSocketFrameReceived" if params["response"]["opcode"] == 2:
                self._raw += base64.b64decode(params["response"]["payloadData"])
            case "Network.webSocketClosed":
                self._closed = True
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._raw.decode(errors="replace"))

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command about this tab and return its result."""
        return await self._browser.ask(method, self._session, **params)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        told = await self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, wanted: str, since: int = 0, timeout_s: float = _SEEN_S) -> None:
        """Wait until the console has drawn these words, after the first ``since`` characters."""
        await self.until_true(lambda: wanted in self.text[since:], wanted, timeout_s)

    async def until_closed(self, timeout_s: float = _SEEN_S) -> None:
        """Wait until the page's socket is closed."""
        await self.until_true(lambda: self._closed, "the end", timeout_s)

    async def until_true(self, condition: Any, what: str, timeout_s: float = _SEEN_S) -> None:
        """Wait for something to become true."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            left = deadline - asyncio.get_running_loop().time()
            assert left > 0, f"waited in vain for {what!r}; {self.complaints}; {self.text[-1500:]!r}"
            await asyncio.sleep(0.05)

    async def resize(self, width: int, height: int) -> None:
        """Give the tab a size in pixels."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def press(self, *keys: str) -> None:
        """Press keys: characters, or names such as ``Escape``."""
        for key in keys:
            name, code, text = _KEYS.get(key, (key, ord(key[0].upper()), key))
            event = {"key": name, "windowsVirtualKeyCode": code, "text": text}
            await self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
            await self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    async def click(self, x: int, y: int) -> None:
        """Click a point of the page."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def picture(self) -> bytes:
        """Return what the tab shows, as PNG."""
        return base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])

    async def close(self) -> None:
        """Close the tab."""
        await self._browser.ask("Target.closeTarget", targetId=self._target)
