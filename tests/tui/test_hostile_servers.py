"""Bad company over the network, up to the screen: said in words, never drawn as an engine that is well and idle."""

from __future__ import annotations

import random
import re
import socket
import threading

import pytest
from scripted_http import Misbehave, ScriptedHttp, answer
from tui_fakes import Console, console

from kvtop.sources.remote.probe import MAX_ROWS
from kvtop.sources.remote.source import RemoteSource
from kvtop.tui.screens.sheet import ActionSheet

GOOD = answer(
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\nvllm:num_requests_running{engine="0",model_name="m"} 3\n'
)


def ssh(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\x00\xff" * 20)


def cut(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:")


def endless(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")


NO_ENGINE = "no inference engine that kvtop knows"
STRANGERS: dict[str, tuple[bytes | Misbehave, str]] = {
    "a web page": (answer("<html>Grafana</html>", headers="Content-Type: text/html\r\n"), "HTML page"),
    "JSON": (answer('{"status":"ok"}', headers="Content-Type: application/json\r\n"), "JSON, not metrics"),
    "nothing": (answer(""), "an empty page"),
    "another exporter": (answer("node_load1 0\nnode_memory_MemFree_bytes 0\n"), NO_ENGINE),
    "numbers without names": (answer("1 1\n1 1\n"), "not Prometheus text"),
    "an engine that tells nothing": (answer('vllm:request_success_total{model_name="m"} 0\n'), NO_ENGINE),
    "a redirect": (answer("", status="302 Found", headers="Location: http://e/\r\n"), "redirects to http://e/"),
    "no right": (answer("", status="403 Forbidden"), "--token-file"),
    "a fault": (answer("", status="500 Oh"), "it answers 500"),
    "another protocol": (ssh, "does not speak HTTP"),
    "half an answer": (cut, "broke off"),
    "no end": (endless, "goes on past"),
}


def no_zero(c: Console) -> None:
    """Check that nothing on the screen looks like a measured nought or a usage."""
    header = c.text_of("Header")
    told = r"http\S+|127\.0\.0\.1:\d+|\(\d+\)|answers \d+|past [\d,]+|engine lost[^s]*s ago|\d+ s\b|such as [^;]*"
    numbers = re.sub(told, "", header)
    assert not re.search(r"\b0(\.0%)?\b", numbers), numbers
    assert "—" in header
    assert "available" not in c.screen_text()


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_stranger_is_never_drawn_as_a_healthy_nought(name: str) -> None:
    behaviour, words = STRANGERS[name]
    server = ScriptedHttp({"/metrics": behaviour})
    source = RemoteSource(server.url, every_s=60)
    try:
        async with console(source=source, size=(160, 40)) as c:  # type: ignore[arg-type]
            await c.until(lambda: c.app.view.error is not None, "the reason")
            await c.poll()
            assert "engine lost" in c.text_of("Header")
            assert words in c.text_of("Header") + c.note()
            no_zero(c)
            for key in ("E", "space", "Z"):
                await c.press(key)
                assert not isinstance(c.app.screen, ActionSheet)
    finally:
        source.close()
        server.close()


@pytest.mark.parametrize("name", ["a web page", "another exporter", "no right", "another protocol"])
async def test_an_engine_that_turns_into_one_keeps_its_last_facts_and_says_so(name: str) -> None:
    behaviour, words = STRANGERS[name]
    server = ScriptedHttp({"/metrics": GOOD})
    source = RemoteSource(server.url, every_s=0.02)
    try:
        async with console(source=source, size=(160, 40)) as c:  # type: ignore[arg-type]
            await c.until(lambda: c.app.view.remote is not None, "the first facts")
            server.answers["/metrics"] = behaviour

            def is_lost() -> bool:
                assert c.app.attachment is not None
                return c.app.attachment.poll().error is not None

            await c.until(is_lost, "the loss")
            await c.poll(after_s=7)
            assert re.search(r"engine lost [7-9]\.\d s ago", c.text_of("Header"))
            assert words in c.text_of("Header") + c.note()
            assert "25.0%" in c.screen_text()
            server.answers["/metrics"] = GOOD
            source._poller.hurry()

            def is_back() -> bool:
                assert c.app.attachment is not None
                return c.app.attachment.poll().error is None

            await c.until(is_back, "the return")
            await c.poll()
            assert "engine lost" not in c.screen_text()
    finally:
        source.close()
        server.close()


def nonsense(rng: random.Random) -> bytes:
    """Return a page that an engine could have written, with values and labels that it would not."""
    values = ("NaN", "-1", "+Inf", "1e308", "-1e308", "7", "0x1", "", "1_0", "½")
    labels = ('engine="\\u001b[2J"', 'engine="9"', 'model_name="[bold]\\n"', 'model_name="' + "x" * 5000 + '"', "")
    names = ("kv_cache_usage_perc", "num_requests_running", "prefix_cache_hits_total", "cache_config_info", "\x00")
    rows = (f"vllm:{rng.choice(names)}{{{rng.choice(labels)}}} {rng.choice(values)}" for _ in range(20))
    return answer("\n".join(rows) + "\n")


async def test_nonsense_from_an_engine_is_drawn_without_harm() -> None:
    rng = random.Random(7)
    server = ScriptedHttp({"/metrics": GOOD})
    for path in ("/version", "/kv_event_sources", "/is_sleeping", "/is_paused"):
        server.answers[path] = answer('{"version": ["\\u001b[2J"], "0": {"endpoint": 5}, "is_paused": "\\u001b"}')
    source = RemoteSource(server.url, may_operate=True, every_s=0.001)
    try:
        async with console(source=source, size=(120, 40)) as c:  # type: ignore[arg-type]
            await c.until(lambda: c.app.view.remote is not None, "the first facts")
            for _ in range(40):
                server.answers["/metrics"] = nonsense(rng)
                source._poller.hurry()
                await c.poll(after_s=0.1)
                text = c.screen_text()
                assert "\x1b" not in text
                assert "\x00" not in text
                assert "nan" not in text
                assert "inf" not in text.replace("inference", "").replace("info", "")
    finally:
        source.close()
        server.close()


async def test_a_crowd_of_engines_is_cut_and_said() -> None:
    page = "".join(f'vllm:kv_cache_usage_perc{{engine="{i}",model_name="m"}} 0.5\n' for i in range(MAX_ROWS + 500))
    server = ScriptedHttp({"/metrics": answer(page)})
    source = RemoteSource(server.url, every_s=60)
    try:
        async with console(source=source) as c:  # type: ignore[arg-type]
            await c.until(lambda: c.app.view.remote is not None, "the facts")
            await c.poll()
            assert c.app.view.remote is not None
            assert len(c.app.view.remote.rows) == MAX_ROWS
            assert any(f"{MAX_ROWS + 500:,} engines" in note for note in c.app.view.remote.notes)
    finally:
        source.close()
        server.close()


async def test_side_pages_that_misbehave_cost_only_what_they_would_tell() -> None:
    server = ScriptedHttp({"/metrics": GOOD})
    for path, reply in (("/version", ssh), ("/kv_event_sources", cut), ("/is_sleeping", ssh), ("/is_paused", cut)):
        server.answers[path] = reply
    source = RemoteSource(server.url, may_operate=True, every_s=60)
    try:
        async with console(source=source, size=(120, 50)) as c:  # type: ignore[arg-type]
            await c.until(lambda: c.app.view.remote is not None, "the facts")
            await c.poll()
            text = c.screen_text()
            assert "25.0%" in text
            assert "the server has not answered that yet" in text
    finally:
        source.close()
        server.close()
