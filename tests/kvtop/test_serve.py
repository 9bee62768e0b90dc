"""``kvtop serve`` without a browser: who is answered, what a page may send, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from published import ThreadedDaemon, own_directories
from served import Served, is_gone, serving, wait_gone

from kvtop.attachment import Attachment
from kvtop.browser.access import Access, is_loopback
from kvtop.browser.order import ConsoleOrder
from kvtop.browser.serving import ServeOptions
from kvtop.browser.tab import tab_app
from kvtop.cli import run
from kvtop.engine_setup import EngineOptions
from kvtop.errors import UserError
from kvtop.operations import ReadOnly
from kvtop.panels import command_text
from kvtop.targets import AttachOptions, open_targets
from kvtop.tui.actions import ACTIONS

_ENGINE = ("--blocks", "256", "--geometry", "none")
_PACED = EngineOptions(num_blocks=64, geometry="none", speed=1.0)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("s")
    own_directories(monkeypatch, root)
    return root


# Who is answered -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "is_answered"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("LOCALHOST:8000", "http://localhost:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("192.168.1.7", "http://192.168.1.7", True),
        ("box.example:8000", "http://box.example:8000", True),
        ("kv.example", "https://kv.example", True),
        ("127.0.0.1:8000", "https://kv.example", True),
        ("127.0.0.1:8000", None, False),
        ("127.0.0.1:8000", "null", False),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", False),
        ("127.0.0.1:8000", "http://evil.example", False),
        ("127.0.0.1:8000", "https://kv.example.evil.example", False),
        ("evil.example:8000", "http://evil.example:8000", False),
        ("localhost.evil.example", "http://localhost.evil.example", False),
        ("127.0.0.1.evil.example", "http://127.0.0.1.evil.example", False),
        ("evil.example@127.0.0.1", "http://evil.example@127.0.0.1", False),
        ("127.0.0.1:8000/x", "http://127.0.0.1:8000/x", False),
        ("127.0.0.1:port", "http://127.0.0.1:port", False),
        ("", "http://", False),
        (None, "http://127.0.0.1:8000", False),
    ],
)
def test_only_pages_served_here_may_connect(host, origin, is_answered):
    access = Access(("box.example",), "https://kv.example/")
    assert (access.refusal(host, origin, needs_origin=True) is None) == is_answered
    if origin is None:
        assert access.refusal(host, origin, needs_origin=False) is None


@pytest.mark.parametrize(
    "url", ["kv.example", "ftp://kv.example", "https://", "https://a/b", "https://a?b", "https://a:b", "https://u@a"]
)
def test_a_public_url_is_a_host_alone(url):
    with pytest.raises(UserError, match=r"--public-url .*: http\(s\)://HOST"):
        Access((), url)


def test_the_page_connects_to_where_it_came_from():
    assert Access().websocket_url("127.0.0.1:8000") == "ws://127.0.0.1:8000/ws"
    assert Access((), "https://kv.example").websocket_url("127.0.0.1:8000") == "wss://kv.example/ws"


def test_loopback_is_this_machine_alone():
    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0", "::", "box")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip


# The order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [False, True])
def test_a_tab_is_told_whether_it_may_act(allowed, own):
    order = ServeOptions(allow_operations=allowed).order(("local:x",), AttachOptions(allow_operations=not allowed))
    assert order.options.allow_operations is allowed
    assert msgspec.json.decode(msgspec.json.encode(order), type=ConsoleOrder) == order
    daemon = ThreadedDaemon("x", _PACED)
    attachment: Attachment | None = None
    try:
        attachment = open_targets(order.targets, order.options)
        assert isinstance(attachment.operations, ReadOnly) is not allowed
    finally:
        if attachment is not None:
            attachment.close()
        daemon.close()


async def test_a_console_that_may_only_look_does_nothing_whatever_is_asked(own, tmp_path, monkeypatch):
    """Keys, lines of the command line, and actions called by name: none reaches the engine."""
    monkeypatch.chdir(tmp_path)
    daemon = ThreadedDaemon("x", _PACED)
    app = tab_app(ServeOptions().order(("local:x",), AttachOptions()))
    done: list[object] = []
    try:
        async with app.run_test(size=(120, 40)) as pilot:
            for _ in range(200):
                await pilot.pause(0.02)
                if app.view.snapshot is not None:
                    break
            assert app.attachment is not None
            apply = app.attachment.operations.apply
            monkeypatch.setattr(
                app.attachment.operations, "apply", lambda command, t=60.0: done.append(o := apply(command, t)) or o
            )
            operating = [a for a in ACTIONS if a.operates]
            assert len(operating) > 15
            for action in operating:
                await pilot.press(action.keys[0], "y", "escape")
                await app.run_action(action.name)
            for name in command_text.KINDS:
                app.run_line(name)
                app.run_line(f"{name} 1")
            await pilot.press("enter", "y", "escape")
            await pilot.pause()
            assert app.attachment is not None
        assert [o for o in done if o.ok] == []
        assert not list((own / "state").rglob("audit.jsonl")), "the engine did a command"
    finally:
        daemon.close()


# The server ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(own: Path) -> Iterator[Served]:
    with serving(*_ENGINE) as found:
        yield found


_OPENED: list[aiohttp.ClientSession] = []


@pytest.fixture(autouse=True)
async def _nothing_left_open() -> AsyncIterator[None]:
    yield
    while _OPENED:
        await _OPENED.pop().close()


class _Tab:
    """The socket of a page, without the page; it is read all the time, as a browser's is."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.drawn = b""
        self.texts: list[str] = []
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, size: str = "?width=120&height=40") -> _Tab:
        session = aiohttp.ClientSession()
        _OPENED.append(session)
        return cls(await session.ws_connect(f"{url}/ws{size}", headers={"Origin": url}))

    async def _read(self) -> None:
        async for message in self.socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                self.drawn += message.data
            else:
                self.texts.append(message.data)

    async def until(self, wanted: bytes, timeout_s: float = 60.0) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while wanted not in self.drawn:
            left = deadline - asyncio.get_running_loop().time()
            assert left > 0, f"waited in vain for {wanted!r}: {self.drawn[-3000:]!r}"
            assert not self.reading.done(), f"closed before {wanted!r}: {self.drawn[-3000:]!r}"
            await asyncio.sleep(0.02)

    async def send(self, *what: object) -> None:
        await self.socket.send_str(json.dumps(what))

    async def close(self) -> None:
        await self.socket.close()
        await asyncio.wait_for(self.reading, 20)


async def test_tabs_show_one_engine_and_end_alone(served):
    first, second = await _Tab.open(served.url), await _Tab.open(served.url)
    for tab in (first, second):
        await tab.until(b"RUNNING")
    processes = served.tabs()
    assert len(processes) == 2
    await first.close()
    await asyncio.to_thread(served.hear, r"browser 1 \(.*?\) closed")
    assert sum(map(is_gone, processes)) == 1
    assert len(served.descendants()) == 2  # the engine, and the other tab
    second.drawn = b""
    await second.send("stdin", "8")
    await second.until(b"One point a second")
    await second.send("stdin", "q")
    await asyncio.wait_for(second.reading, 20)
    await asyncio.to_thread(wait_gone, processes)
    assert await asyncio.to_thread(served.end) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
async def test_a_signal_ends_everything(number, code, served):
    tabs = [await _Tab.open(served.url) for _ in range(2)]
    for tab in tabs:
        await tab.until(b"RUNNING")
    processes = served.descendants()
    assert len(processes) == 3
    assert await asyncio.to_thread(served.end, number) == code
    wait_gone(processes, 2.0)
    assert "Traceback" not in served.said
    for tab in tabs:
        await tab.close()


async def test_nothing_outlives_a_server_that_is_killed(served):
    tab = await _Tab.open(served.url)
    await tab.until(b"RUNNING")
    processes = served.descendants()
    await asyncio.to_thread(served.end, signal.SIGKILL)
    await asyncio.to_thread(wait_gone, processes)
    await tab.close()


async def test_an_engine_that_was_killed_is_started_anew_for_the_next_page(served):
    tab = await _Tab.open(served.url)
    await tab.until(b"RUNNING")
    (engine,) = set(served.descendants()) - set(served.tabs())
    os.kill(engine, signal.SIGKILL)
    await tab.until(b"engine lost")
    again = await _Tab.open(served.url)
    await again.until(b"RUNNING")
    assert "the engine was started anew" in served.hear("the engine was started anew")
    tab.drawn = b""
    await tab.send("stdin", "r")
    await tab.until(b"RUNNING")
    for one in (tab, again):
        await one.close()
    assert await asyncio.to_thread(served.end) == 0


async def test_what_is_no_message_is_ignored_and_sizes_have_bounds(served):
    tab = await _Tab.open(served.url, "?width=999999999999&height=-3")
    await tab.until(b"\x1b[?1049h")  # so early that the console is not laid out yet
    bad = ["no json", "[]", "{}", '["stdin"]', '["stdin", 3]', '["stdin", "\\ud800"]', '["resize", {}]', '["quit"]']
    for text in (*bad, '["resize", {"width": "9", "height": 2}]', '["resize", {"width": 1e9, "height": true}]'):
        await tab.socket.send_str(text)
    await tab.socket.send_bytes(b"\0" * 100)
    await tab.send("resize", {"width": -1, "height": 10**9})
    await tab.send("resize", {"width": 80, "height": 24})
    await tab.until(b"RUNNING")
    await tab.send("stdin", "?")
    await tab.until(b"Esc closes")
    await tab.send("ping", "7")
    async with asyncio.timeout(20):
        while not tab.texts:
            await asyncio.sleep(0.02)
    assert json.loads(tab.texts[0]) == ["pong", "7"]
    await tab.close()
    assert served.end() == 0
    assert "Traceback" not in served.said


async def test_strangers_are_turned_away_and_the_page_may_load_from_here_alone(served):
    async with aiohttp.ClientSession() as session:
        async with session.get(served.url) as page:
            assert page.status == 200
            assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
            assert "default-src 'none'" in page.headers["Content-Security-Policy"]
            assert "//" not in (await page.text()).replace("ws://" + served.url[7:], "").replace("<!DOCTYPE", "")
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with session.get(served.url, headers=headers) as page:
                assert page.status == 403
        for origin in (None, "null", "http://evil.example"):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await session.ws_connect(f"{served.url}/ws", headers={"Origin": origin} if origin else {})
        async with session.get(f"{served.url}/download/x") as page:
            assert page.status == 404
    assert served.tabs() == []


# What is refused at the start ----------------------------------------------------------------------------------------

_REFUSED = [
    (["--port", "65536"], "--port 65536: a whole number from 0 to 65535"),
    (["--port", "-1"], "--port -1: a whole number from 0 to 65535"),
    (["--host", "no host"], "--port 8000 (host no host): "),
    (["--public-url", "x"], "--public-url x: http(s)://HOST or http(s)://HOST:PORT, without a path"),
    (["--blocks", "0"], "--blocks 0: a whole number from 1 to 67108864"),
    (["local:x", "--blocks", "64"], "--blocks: only without TARGET"),
    (["--token-file", "x"], "--token-file: only together with a TARGET"),
    (["nonsense"], "nonsense: a target is one of "),
    (["--publish", "a/b"], "a/b: an engine's name is "),
]


@pytest.mark.parametrize(("words", "said"), _REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_wrong_request_is_one_line(words, said, own, capsys):
    port = [] if "--port" in words or "--host" in words else ["--port", "0"]
    assert run(["serve", *words, *port]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.splitlines()[-1].startswith("kvtop: ")


def test_a_target_that_is_not_there_is_told_before_anything_is_served(own, capsys):
    assert run(["serve", "local:nobody", "--port", "0"]) == 3
    assert "nobody" in capsys.readouterr().err


def test_a_port_in_use_is_one_line(own, capsys):
    with serving(*_ENGINE) as served:
        port = served.url.rpartition(":")[2]
        assert run(["serve", "--port", port]) == 2
    assert f"--port {port} (host 127.0.0.1): in use already; choose another port" in capsys.readouterr().err


def test_serving_to_everybody_warns(own):
    with serving(*_ENGINE, "--host", "0.0.0.0") as served:
        assert "there is no password" in served.hear("--host 0.0.0.0: everyone .* no password")
        assert served.end() == 0
