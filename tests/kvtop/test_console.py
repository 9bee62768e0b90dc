"""Opening the console: the terminal it needs."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from kvtop.console import ConsoleOptions, Session, require_terminal, run_attached
from kvtop.engine_setup import EngineOptions
from kvtop.errors import SourceError, UserError
from kvtop.targets import AttachOptions


class Stream:
    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


TERMINAL, PIPE = Stream(True), Stream(False)


def test_a_terminal_will_do():
    require_terminal(TERMINAL, TERMINAL, TERMINAL, {"TERM": "xterm-256color"})
    require_terminal(TERMINAL, TERMINAL, TERMINAL, {})


@pytest.mark.parametrize(
    ("stdin", "stdout", "stderr", "environment", "reason"),
    [
        (PIPE, TERMINAL, TERMINAL, {"TERM": "xterm"}, "standard input is not a terminal"),
        (TERMINAL, PIPE, TERMINAL, {"TERM": "xterm"}, "standard output is not a terminal"),
        (None, TERMINAL, TERMINAL, {"TERM": "xterm"}, "standard input is not a terminal"),
        (TERMINAL, TERMINAL, PIPE, {"TERM": "xterm"}, "standard error is not a terminal"),
        (TERMINAL, TERMINAL, TERMINAL, {"TERM": "dumb"}, "TERM=dumb cannot draw a screen"),
    ],
)
def test_anything_else_is_refused_with_what_to_do(stdin, stdout, stderr, environment, reason):
    with pytest.raises(UserError, match=reason) as caught:
        require_terminal(stdin, stdout, stderr, environment)
    assert "kvtop run" in str(caught.value)


SMALL = EngineOptions(num_blocks=32, geometry="none", device="cpu", speed=None)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_session_starts_an_engine_and_ends_it(in_process):
    session = Session(SMALL, max_steps=5, in_process=in_process)
    assert session.view().snapshot is None
    attachment = session.connect()
    try:
        view = attachment.poll()
        assert view.error is None
        assert view.device is not None
        assert view.device.numbers.total == 32
        assert session.view() is view, "the exporter sees what the screen sees"
    finally:
        session.close()
    assert attachment.poll().error is not None


def test_a_restart_ends_the_engine_before():
    session = Session(SMALL, in_process=True)
    first = session.connect()
    second = session.connect()
    try:
        assert first.poll().error is not None
        assert second.poll().error is None
    finally:
        session.close()


def test_closing_ends_an_engine_that_is_still_starting():
    session = Session(SMALL)
    failure: list[Exception] = []

    def connect() -> None:
        try:
            session.connect()
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while session._starting is None and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    session.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert failure, "the engine was cut off while it started"
    assert session.view().snapshot is None


def test_a_session_that_was_closed_keeps_no_engine():
    session = Session(SMALL, in_process=True)
    session.close()
    with pytest.raises(UserError, match="closed while the engine was starting"):
        session.connect()
    assert session.view().snapshot is None


def test_options_are_refused_before_an_engine_is_waited_for(tmp_path):
    trace = tmp_path / "empty.jsonl"
    trace.write_text("")
    session = Session(EngineOptions(trace=str(trace)))
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        session.connect()
    session.close()


def test_a_server_that_is_not_there_is_told_without_a_promise_to_ask_again(monkeypatch):
    monkeypatch.setattr("kvtop.console.require_terminal", lambda *_: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and nobody answers
        target = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SourceError) as caught:
            run_attached([target], AttachOptions(), ConsoleOptions())
    assert str(caught.value) == f"{target}: nothing listens there"
