"""kvtop attach without a target: what it finds, and how one of several is chosen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from published import ThreadedDaemon, own_directories
from scripted_http import ScriptedHttp, answer

from kvtop.discovery import Found, choose, discover
from kvtop.errors import SourceError, UserError

TWO = (Found("local:a", "kvtop"), Found("http://127.0.0.1:8000", "vLLM 0.33.0"))


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield


def test_engines_are_found_and_other_services_are_not() -> None:
    engine = ScriptedHttp({"/metrics": answer("sglang:token_usage 0.5\n")})
    other = ScriptedHttp({"/metrics": answer("<html>")})
    closed = ScriptedHttp({})
    closed.close()
    assert discover((other.port, engine.port, closed.port)) == (Found(engine.url, "SGLang"),)
    daemon = ThreadedDaemon("t")
    assert discover((engine.port,)) == (Found("local:t", "kvtop"), Found(engine.url, "SGLang"))
    assert discover(()) == (Found("local:t", "kvtop"),)
    daemon.close()
    for server in (engine, other):
        server.close()


def test_the_only_one_is_taken() -> None:
    assert choose(TWO[:1], None) == "local:a"


def test_nothing_found_says_where_it_looked() -> None:
    with pytest.raises(SourceError, match=r"ports 8000, .*kvtop attach http://HOST:PORT"):
        choose((), None)


def test_several_are_asked_about() -> None:
    asked: list[str] = []

    def ask(text: str) -> str:
        asked.append(text)
        return " 2 "

    assert choose(TWO, ask) == "http://127.0.0.1:8000"
    assert "1  local:a  kvtop\n2  http://127.0.0.1:8000  vLLM 0.33.0" in asked[0]


@pytest.mark.parametrize("typed", ["", "0", "3", "x", "-1", "²", "9" * 5000])
def test_an_answer_that_is_none_of_them(typed: str) -> None:
    with pytest.raises(UserError, match="a number from 1 to 2"):
        choose(TWO, lambda text: typed)


def test_several_and_nobody_to_ask() -> None:
    with pytest.raises(UserError, match=r"local:a, http://127.0.0.1:8000; name one"):
        choose(TWO, None)
