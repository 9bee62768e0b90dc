"""ConsoleServer: the page, its socket, and one console process for each open tab. All a browser can do is bounded.

The page, the terminal in it and the protocol between them are textual-serve's; which requests are answered, what a
browser may send, and how a tab's process ends are ours.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import aiohttp_jinja2
import msgspec
from aiohttp import WSMsgType, web
from aiohttp.client_exceptions import ClientConnectionResetError
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

from kvtop.browser.access import Access
from kvtop.engine_process import child_environment
from kvtop.log import Log

#: Tabs that may be open at once; each is a process.
MAX_TABS: Final = 16
#: Seconds a console has to end by itself when its tab is closed, before it is killed.
END_S: Final = 3.0
#: Seconds between two signs of life that a browser must give; one that gives none for half of that again is let go of.
_HEARTBEAT_S: Final = 10.0
#: What a browser may send at once: the largest paste. [B]
_MAX_MESSAGE: Final = 1 << 20
#: Smallest and largest screen: columns, lines.
_COLUMNS, _LINES = (20, 1000), (10, 400)
_LARGEST_FONT: Final = 64
_LINE_BYTES: Final = 500
_TEMPLATES: Final = Path(__file__).with_name("templates")
_GOING_AWAY: Final = 1001
#: Says that all that follows are packets.
_PRELUDE: Final = b"__GANGLION__\n"
_HEADERS: Final = {
    "Server": "kvtop",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class ConsoleServer(Server):
    """Serves one console to browsers.

    Args:
        command: What is run for each tab.
        access: Which requests are answered.
        log: Told of tabs that open and close, and of what went wrong in them.
        ready: Called before each tab, in a thread of its own; returns why there can be none.
    """

    def __init__(self, command: Sequence[str], access: Access, log: Log, ready: Callable[[], str | None]) -> None:
        super().__init__("kvtop", title="kvtop", templates_path=_TEMPLATES)
        self._argv = tuple(command)
        self._access = access
        self._log = log
        self._ready = ready
        self._tabs: dict[Tab, web.WebSocketResponse] = {}
        self._num_opened = 0

    async def application(self) -> web.Application:
        """Return the application to be run."""
        app = await self._make_app()
        app.middlewares.append(self._guard)
        app.on_response_prepare.append(self._add_headers)
        return app

    async def close_tabs(self) -> None:
        """End every tab's process, within ``END_S``."""
        endings = [tab.stop() for tab in self._tabs]
        goodbyes = [socket.close(code=_GOING_AWAY) for socket in self._tabs.values()]
        await asyncio.gather(*endings, *goodbyes, return_exceptions=True)

    async def on_startup(self, app: web.Application) -> None:
        """Say nothing: the command says where it serves."""

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refusal = self._access.refusal(
            request.headers.get("Host"), request.headers.get("Origin"), needs_origin=request.path == "/ws"
        )
        if refusal is not None:
            self._log.complain(f"a request from {request.remote} was refused: {refusal}")
            raise web.HTTPForbidden(text=f"kvtop: {refusal}\n")
        response: web.StreamResponse = await handler(request)
        return response

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
            f"font-src 'self'; connect-src 'self' {self._access.websocket_url(request.headers.get('Host', ''))}; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    @aiohttp_jinja2.template("app_index.html")
    async def handle_index(self, request: web.Request) -> dict[str, Any]:
        """Return what the page is made with."""
        return {
            "title": self.title,
            "websocket_url": self._access.websocket_url(request.headers["Host"]),
            "font_size": min(_LARGEST_FONT, max(1, to_int(request.query.get("fontsize", ""), 16))),
        }

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a console for as long as the tab is open."""
        websocket = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=_MAX_MESSAGE)
        await websocket.prepare(request)
        refusal = "too many consoles are open" if len(self._tabs) >= MAX_TABS else None
        tab = Tab(self._argv, websocket, self.download_manager, self._log)
        self._tabs[tab] = websocket
        self._num_opened += 1
        name = f"browser {self._num_opened} ({request.remote})"
        try:
            refusal = refusal or await asyncio.to_thread(self._ready)
            if refusal is not None:
                self._log.complain(f"{name}: {refusal}")
                await tab.say(refusal)
                return websocket
            await tab.start(*_size(request.query.get("width"), request.query.get("height")))
            self._log.info(f"{name} opened")
            async for message in websocket:
                if message.type == WSMsgType.TEXT:
                    await tab.receive(message.data)
        except OSError as error:
            self._log.complain(f"{name}: {error}")
        finally:
            # Shielded: the server's own end must not leave the process behind.
            await asyncio.shield(tab.stop())
            del self._tabs[tab]
            await websocket.close()
            self._log.info(f"{name} closed")
        return websocket


class Tab(AppService):
    """The console process of one tab.

    Args:
        argv: What is run.
        websocket: The tab's connection.
        downloads: Passes files on to the browser.
        log: Told of a process that ended with complaints.
    """

    def __init__(self, argv: Sequence[str], websocket: web.WebSocketResponse, downloads: Any, log: Log) -> None:
        super().__init__(
            "kvtop",
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=self._close,
            download_manager=downloads,
        )
        self._argv = argv
        self._websocket = websocket
        self._log = log
        self._ending: asyncio.Task[None] | None = None

    async def _close(self) -> None:
        await self._websocket.close()

    async def say(self, text: str) -> None:
        """Write a line on an empty screen: why there is no console, or none any more."""
        with contextlib.suppress(ClientConnectionResetError):
            await self._websocket.send_bytes(f"\x1b[?1049l\x1b[2J\x1b[Hkvtop: {text}\r\n".encode())

    async def _open_app_process(self, width: int = 80, height: int = 24) -> asyncio.subprocess.Process:
        # A group of its own: Ctrl-C in the server's terminal is the server's to handle.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(width, height),
            process_group=0,
        )
        assert process.stdin is not None
        self._stdin = process.stdin
        return process

    async def receive(self, text: str) -> None:
        """Pass on what the browser sent: keys, the size of its window, where its focus is. Anything else is ignored."""
        with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError):
            match msgspec.json.decode(text):
                case ["stdin", str(keys)]:
                    await self.send_bytes(keys.encode())
                case ["resize", {"width": int(width), "height": int(height)}]:
                    await self.set_terminal_size(*_size(str(width), str(height)))
                case ["ping", str(sent)]:
                    await self.remote_write_str(msgspec.json.encode(["pong", sent]).decode())
                case ["blur"]:
                    await self.blur()
                case ["focus"]:
                    await self.focus()

    async def run(self) -> None:
        """Pass on what the console draws, until it ends; then tell its last words, and close the connection."""
        assert self._process is not None
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None
        assert stderr is not None
        words = asyncio.create_task(_last_line(stderr))
        kinds = {b"D": self.on_data, b"M": self._on_meta, b"P": self.on_packed}
        is_asked = False
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await stdout.readuntil(_PRELUDE)
            while True:
                head = await stdout.readexactly(5)
                payload = await stdout.readexactly(int.from_bytes(head[1:], "big"))
                # To a browser that is gone nothing is sent; the console must still be able to write, or never ends.
                with contextlib.suppress(ClientConnectionResetError):
                    await kinds[head[:1]](payload)
        is_asked = self._ending is not None
        last = await words
        if last and not is_asked:
            self._log.complain(f"a browser's console ended: {last}")
            await self.say(last.removeprefix("kvtop: "))
        await self.remote_close()

    async def _on_meta(self, payload: bytes) -> None:
        # Its last words come after it says that it ends.
        if msgspec.json.decode(payload) != {"type": "exit"}:
            await self.on_meta(payload)

    async def stop(self) -> None:
        """End the process and wait for it, within ``END_S``. Safe to call twice, and at once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await self._ending

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        await self._download_manager.cancel_app_downloads(app_service_id=self.app_service_id)
        try:
            async with asyncio.timeout(END_S):
                await self.send_meta({"type": "quit"})
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, END_S)


def _size(width: str | None, height: str | None) -> tuple[int, int]:
    """Return the size a browser asks for, within bounds; the usual one where it is no size."""
    columns, lines = to_int((width or "")[:9], 80), to_int((height or "")[:9], 24)
    return min(_COLUMNS[1], max(_COLUMNS[0], columns)), min(_LINES[1], max(_LINES[0], lines))


def _environment(width: int, height: int) -> dict[str, str]:
    """Return the environment of a console that draws in a browser, which has all colours and characters."""
    return {
        **child_environment(),
        "TEXTUAL_DRIVER": "kvtop.tui.browser_driver:BrowserDriver",
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "PYTHONUTF8": "1",
        "TERM_PROGRAM": "textual",
        "TERM_PROGRAM_VERSION": version("textual-serve"),
        "COLUMNS": str(width),
        "ROWS": str(height),
    }


async def _last_line(stream: asyncio.StreamReader) -> str:
    """Return the last line of what is written there, once it ends."""
    kept: deque[str] = deque(maxlen=1)
    rest = b""
    while chunk := await stream.read(4096):
        *lines, rest = (rest + chunk).split(b"\n")
        kept.extend(text for line in (*lines,) if (text := line[:_LINE_BYTES].decode(errors="replace").strip()))
        rest = rest[:_LINE_BYTES]
    if text := rest.decode(errors="replace").strip():
        kept.append(text)
    return kept[-1] if kept else ""
