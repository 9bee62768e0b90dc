"""Bad company on a published engine's socket: garbage, giants, tricklers, sleepers, crowds. Bounded, told, harmless."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_engine import until
from published import Lines, ThreadedDaemon, own_directories

from allocator.clients import MAX_CLIENTS
from allocator.commands import Pause, Resume
from kvtop.audit import audit_path
from kvtop.errors import SourceError
from kvtop.local_socket import connect, socket_path
from kvtop.model.observation import Focus
from kvtop.server import MAX_CONNECTIONS
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.named import NamedEngine
from kvtop.wire import MAX_REQUEST_BYTES, NO_NUMBER, ApplyCommand, Failed, Hello, Observe, client_connection

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield


@pytest.fixture
def log() -> Lines:
    return Lines()


@pytest.fixture
def daemon(log: Lines) -> Iterator[ThreadedDaemon]:
    d = ThreadedDaemon("t", log=log)
    yield d
    # Whatever was done to it, it steps on, answers, holds its laws and ends as asked.
    step = d.engine.step
    until(lambda: d.engine.step > step)
    source = LocalSource(NamedEngine("t"))
    assert source.read(Focus(), TIMEOUT_S).snapshot.counters.integrity_faults == 0
    source.close()
    assert d.close() is not None


def raw() -> socket.socket:
    sock = connect(socket_path("t"))
    sock.settimeout(TIMEOUT_S)
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    sock.close()
    return data


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def greeting_and_farewell(data: bytes) -> Failed:
    """Return the last message of a connection that the engine ended."""
    messages = []
    while data:
        size = int.from_bytes(data[:4], "big")
        messages.append(msgspec.msgpack.decode(data[4 : 4 + size], type=Hello | Failed))
        data = data[4 + size :]
    assert isinstance(messages[0], Hello)
    assert isinstance(messages[-1], Failed)
    assert messages[-1].number == NO_NUMBER
    return messages[-1]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (framed(b""), "could not be understood"),
        (framed(b"\xc1"), "could not be understood"),
        (framed(b"hello"), "could not be understood"),
        (framed(msgspec.msgpack.encode({"type": "Observe"})), "could not be understood"),
        (framed(msgspec.msgpack.encode({"type": "Observe", "number": "x", "focus": {}, "timeout_s": 1})), "understood"),
        (framed(msgspec.msgpack.encode(["Reboot", 1])), "could not be understood"),
        (framed(b"\x91" * 100_000), "could not be understood"),
        (b"GET / HTTP/1.1\r\n\r\n", "at most 1048576 are allowed"),
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes"),
        ((MAX_REQUEST_BYTES + 1).to_bytes(4, "big"), "at most 1048576 are allowed"),
        (b'{"type": "Pause"}\n', "at most 1048576 are allowed"),
    ],
    ids=["empty", "reserved", "text", "no fields", "wrong type", "unknown", "deep", "http", "4 GB", "1 MB + 1", "json"],
)
def test_nonsense_is_answered_with_its_reason_and_told(
    daemon: ThreadedDaemon, log: Lines, sent: bytes, told: str
) -> None:
    sock = raw()
    sock.sendall(sent)
    assert told in greeting_and_farewell(read_to_end(sock)).text
    until(lambda: any(told in line for line in log.lines))


def test_ten_megabytes_in_a_line_are_not_kept(daemon: ThreadedDaemon) -> None:
    sock = raw()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(b"x" * 10_000_000)
    read_to_end(sock)


def test_random_bytes(daemon: ThreadedDaemon) -> None:
    rng = random.Random(6)
    for _ in range(60):
        sock = raw()
        body = rng.randbytes(rng.randrange(200))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(framed(body) if rng.random() < 0.7 else body)
            sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)


def test_a_request_that_trickles_in_is_cut_off(
    daemon: ThreadedDaemon, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtop.wire.FRAME_TIMEOUT_S", 0.2)
    sock = raw()
    sock.sendall(MAX_REQUEST_BYTES.to_bytes(4, "big"))
    with contextlib.suppress(OSError):  # so fast that something of it always comes, and still not in time
        for _ in range(MAX_REQUEST_BYTES):
            sock.sendall(b"x")
    sock.close()
    until(lambda: any("a message began and was not complete" in line for line in log.lines))


def test_whoever_does_not_read_holds_up_nobody(daemon: ThreadedDaemon, log: Lines) -> None:
    daemon.daemon._published._server._send_timeout_s = 0.3  # type: ignore[union-attr]
    sock = raw()
    encoder = msgspec.msgpack.Encoder()
    asks = framed(encoder.encode(Observe(1, Focus(), 5.0)))
    sock.settimeout(2.0)
    with contextlib.suppress(OSError):
        for _ in range(100_000):
            sock.sendall(asks)
    until(lambda: any("took no message" in line for line in log.lines))
    sock.close()


def test_a_crowd_is_turned_away_and_the_rest_is_served(daemon: ThreadedDaemon, log: Lines) -> None:
    limit = MAX_CLIENTS + MAX_CONNECTIONS
    kept = [raw() for _ in range(limit)]
    for sock in kept:
        assert sock.recv(4)
    for _ in range(30):
        assert read_to_end(raw()) == b""
    until(lambda: any(f"no more than {limit} connections" in line for line in log.lines))
    assert len(log.lines) <= 20 + 5  # the rest is only counted
    with pytest.raises(SourceError):
        NamedEngine("t")
    for sock in kept:
        sock.close()
    until(lambda: not daemon.daemon._published._server._open)  # type: ignore[union-attr]


def test_commands_that_nobody_waits_for_are_done_once_and_audited(daemon: ThreadedDaemon) -> None:
    connection = client_connection(connect(socket_path("t")))
    connection.receive(TIMEOUT_S)
    connection.send(ApplyCommand(1, Pause(), 5.0))
    connection.close()
    until(lambda: audit_path().exists() and len(audit_path().read_text().splitlines()) == 1)
    link = NamedEngine("t")
    assert LocalOperations(link).apply(Resume()).ok
    link.close()
    lines = [json.loads(line) for line in audit_path().read_text().splitlines()]
    assert [line["command"]["type"] for line in lines] == ["Pause", "Resume"]
    assert {(line["engine"], line["outcome"]["ok"]) for line in lines} == {("t", True)}


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_odd_waiting_times(daemon: ThreadedDaemon, timeout_s: float) -> None:
    connection = client_connection(connect(socket_path("t")))
    connection.receive(TIMEOUT_S)
    connection.send(Observe(1, Focus(), timeout_s))
    connection.receive(TIMEOUT_S)
    connection.close()
