"""The protocol: frames, limits, and peers that misbehave; the server's and the client's end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from fake_engine import FakeEngine, until

from allocator.commands import Compact, Pin, Resize, SetSpeed, Step, VerifyContents
from kvtop import wire
from kvtop.errors import KvtopError, SourceError, UserError
from kvtop.model.observation import BlockHolders, Focus
from kvtop.runner import EngineRunner
from kvtop.server import MAX_CONNECTIONS, EngineServer, table_from_bytes
from kvtop.wire import (
    PROTOCOL_VERSION,
    ApplyCommand,
    Client,
    Failed,
    Hello,
    MessageTooLarge,
    PlanCommand,
    StartFailed,
    WireClosed,
    WireError,
    WireTimeout,
    client_connection,
    server_connection,
)

Pair = tuple[socket.socket, socket.socket]
HELLO = Hello(PROTOCOL_VERSION, 1, "fake")


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    yield near, far
    near.close()
    far.close()


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


# ---- frames


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    near, far = client_connection(pair[0]), server_connection(pair[1])
    commands = [Compact(goal="longest-run", run_blocks=8), Resize(12), SetSpeed(None), Pin((1, 2, 3)), Step()]
    for number, command in enumerate(commands):
        near.send(ApplyCommand(number, command, 1.5))
    assert [far.receive(1) for _ in commands] == [ApplyCommand(n, c, 1.5) for n, c in enumerate(commands)]


def test_a_message_in_single_bytes(pair: Pair) -> None:
    far = server_connection(pair[1])
    request = PlanCommand(7, Resize(3), 1.0)
    data = frame(request) * 2
    for i in range(len(data) - 1):
        pair[0].send(data[i : i + 1])
        if i == 2:
            with pytest.raises(WireTimeout):
                far.receive(0.01)
    assert far.receive(1) == request
    with pytest.raises(WireTimeout, match=r"no answer in 0\.01 s"):
        far.receive(0.01)
    pair[0].send(data[-1:])
    assert far.receive(1) == request


def test_what_has_arrived_is_read_without_time(pair: Pair) -> None:
    pair[0].sendall(frame(PlanCommand(7, Resize(3), 1.0)))
    assert server_connection(pair[1]).receive(0).number == 7


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"GET / HTTP/1.0\r\n", msgspec.msgpack.encode({"type": "Nonsense"}), msgspec.msgpack.encode([1])],
)
def test_malformed_messages(pair: Pair, body: bytes) -> None:
    far = server_connection(pair[1])
    pair[0].sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(WireError, match="could not be understood"):
        far.receive(1)
    with pytest.raises(WireClosed):
        far.receive(1)


def test_a_wrong_type_inside_a_command_is_malformed(pair: Pair) -> None:
    message = {
        "type": "ApplyCommand",
        "number": 1,
        "command": {"type": "Resize", "num_blocks": "many"},
        "timeout_s": 1,
    }
    pair[0].sendall(frame(message))
    with pytest.raises(WireError, match=r"Expected `int`, got `str` - at `\$\.command\.num_blocks`"):
        server_connection(pair[1]).receive(1)


def test_a_length_beyond_the_limit_is_refused_before_it_is_read(pair: Pair) -> None:
    pair[0].sendall((wire.MAX_REQUEST_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match="a message of 1048577 bytes came, at most 1048576"):
        server_connection(pair[1]).receive(1)


def test_a_message_too_large_is_not_sent(pair: Pair) -> None:
    near, far = client_connection(pair[0]), server_connection(pair[1])
    with pytest.raises(MessageTooLarge, match="at most 1048576"):
        near.send(PlanCommand(1, Pin(tuple(range(10**6))), 1.0))
    with pytest.raises(MessageTooLarge, match="64 bits"):
        near.send(PlanCommand(1, Resize(2**80), 1.0))
    near.send(PlanCommand(2, Resize(1), 1.0))
    assert far.receive(1).number == 2


def test_a_message_that_stops_halfway(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_TIMEOUT_S", 0.05)
    pair[0].sendall(frame(PlanCommand(1, Resize(1), 1.0))[:-1])
    with pytest.raises(WireError, match="a message began and was not complete"):
        server_connection(pair[1]).receive(5)


def test_a_peer_that_takes_nothing(pair: Pair) -> None:
    near = client_connection(pair[0])

    def send_on() -> None:
        while True:
            near.send(PlanCommand(1, Pin(tuple(range(10_000))), 1.0), 0.05)

    with pytest.raises(WireError, match=r"took no message in 0\.05 s"):
        send_on()


def test_a_closed_peer(pair: Pair) -> None:
    pair[1].close()
    near = client_connection(pair[0])
    with pytest.raises(WireClosed, match="the far end closed"):
        near.receive(1)
    with pytest.raises(WireClosed):
        near.send(PlanCommand(1, Resize(1), 1.0))


def test_shut_down_ends_a_wait_in_another_thread(pair: Pair) -> None:
    near = client_connection(pair[0])
    errors: list[Exception] = []

    def wait() -> None:
        try:
            near.receive(30)
        except WireError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    near.shut_down()
    thread.join(5)
    assert not thread.is_alive()
    assert errors
    near.close()


# ---- the client


def test_the_client_refuses_another_protocol(pair: Pair) -> None:
    pair[1].sendall(frame(Hello(99, 1, "fake")))
    with pytest.raises(SourceError, match="the engine speaks protocol 99, this console 1"):
        Client(pair[0]).hello(1)


@pytest.mark.parametrize(("exit_code", "kind"), [(2, UserError), (1, KvtopError)])
def test_a_failed_start_is_told_with_its_exit_code(pair: Pair, exit_code: int, kind: type[KvtopError]) -> None:
    pair[1].sendall(frame(StartFailed("--blocks 0: at least 1", exit_code)))
    client = Client(pair[0])
    for _ in range(2):
        with pytest.raises(KvtopError, match="--blocks 0: at least 1") as caught:
            client.hello(1)
        assert type(caught.value) is kind
        assert caught.value.exit_code == exit_code
    with pytest.raises(SourceError, match="--blocks 0"):
        client.plan(Resize(1), 1)


def test_an_answer_that_came_too_late_is_not_the_next_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_GRACE_S", 0.0)
    client, far = Client(pair[0]), server_connection(pair[1])
    far.send(HELLO)
    with pytest.raises(WireTimeout):
        client.plan(Resize(1), 0.05)
    far.send(Failed(1, "late"))
    far.send(Failed(2, "in time"))
    with pytest.raises(SourceError, match="in time"):
        client.plan(Resize(1), 1)


def test_a_second_caller_waits_no_longer_than_it_said(pair: Pair) -> None:
    client = Client(pair[0])
    server_connection(pair[1]).send(HELLO)

    def wait() -> None:
        with contextlib.suppress(SourceError):
            client.plan(Resize(1), 0.5)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: client._number == 1)
    with pytest.raises(WireTimeout, match=r"another request is not answered after 0\.05 s"):
        client.plan(Resize(1), 0.05)
    thread.join(5)


@pytest.mark.parametrize("first", [Failed(1, "x"), {"type": "Nonsense"}])
def test_an_engine_that_does_not_greet(pair: Pair, first: object) -> None:
    pair[1].sendall(frame(first))
    with pytest.raises(WireError, match=r"did not greet|could not be understood"):
        Client(pair[0]).hello(1)


# ---- the server


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def gone() -> list[int]:
    return []


@pytest.fixture
def server(engine: FakeEngine, gone: list[int]) -> Iterator[EngineServer]:
    runner = EngineRunner(engine, paused=True)
    stop = threading.Event()
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    server = EngineServer(runner, engine="fake", notes=("a note",), on_disconnect=lambda: gone.append(1))
    yield server
    server.close()
    stop.set()
    runner.wake()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def connect(server: EngineServer) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def connect() -> Client:
        near, far = socket.socketpair()
        clients.append(Client(near))
        server.serve(far)
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_every_request_is_answered(connect: Callable[[], Client]) -> None:
    client = connect()
    assert client.hello(5) == Hello(PROTOCOL_VERSION, os.getpid(), "fake", ("a note",))
    assert client.plan(Compact(), 5).summary == "would compact"
    assert client.apply(Step(3), 5).message == "3 steps"
    seen = client.observe(Focus(1, 2, 0), 5)
    assert (seen.snapshot.step, seen.snapshot.phase) == (3, "paused")
    table = table_from_bytes(seen.focus_table)
    assert table is not None
    assert table.tolist() == [0, 1, 2]
    assert seen.focus_block == BlockHolders(2, ((1, 2),), 1)
    assert client.observe(Focus(), 5).focus_table is None


def test_a_long_command_holds_up_no_other_connection(connect: Callable[[], Client], engine: FakeEngine) -> None:
    gate, entered = threading.Event(), threading.Event()

    def block(command: object) -> None:
        entered.set()
        assert gate.wait(10)

    engine.apply_with = block
    slow, other = connect(), connect()
    thread = threading.Thread(target=slow.apply, args=(VerifyContents(), 10))
    thread.start()
    try:
        assert entered.wait(5)
        began_s = time.monotonic()
        with pytest.raises(SourceError, match="no answer from the engine in 0"):
            other.observe(Focus(), 0.1)  # the engine itself is busy; the answer to that comes at once
        assert time.monotonic() - began_s < 8
    finally:
        gate.set()
        thread.join(10)
    assert other.observe(Focus(), 5).snapshot.step == 0


def test_the_server_notices_a_console_that_is_gone(connect: Callable[[], Client], gone: list[int]) -> None:
    client = connect()
    client.hello(5)
    client.close()
    until(lambda: gone == [1])


def test_a_malformed_request_ends_only_its_own_connection(
    server: EngineServer, connect: Callable[[], Client], gone: list[int]
) -> None:
    good = connect()
    near, far = socket.socketpair()
    server.serve(far)
    near.sendall(b"\0\0\0\2{}")
    until(lambda: gone == [1])
    near.close()
    assert good.plan(Compact(), 5).summary == "would compact"


def test_connections_are_bounded(server: EngineServer, connect: Callable[[], Client]) -> None:
    clients = [connect() for _ in range(MAX_CONNECTIONS)]
    with pytest.raises(SourceError, match="no more than 16 connections"):
        connect()
    clients[0].close()
    until(lambda: len(server._open) == MAX_CONNECTIONS - 1)
    assert connect().hello(5).engine == "fake"


def test_close_ends_every_thread(server: EngineServer, connect: Callable[[], Client]) -> None:
    threads_before = threading.active_count()
    clients = [connect() for _ in range(4)]
    for client in clients:
        client.hello(5)
    server.close()
    until(lambda: threading.active_count() <= threads_before)
    with pytest.raises(SourceError):
        clients[0].plan(Compact(), 1)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_senseless_timeouts_are_no_time(server: EngineServer, engine: FakeEngine, timeout_s: float) -> None:
    near, far = socket.socketpair()
    server.serve(far)
    connection = client_connection(near)
    assert isinstance(connection.receive(5), Hello)
    connection.send(PlanCommand(1, Compact(), timeout_s))
    assert connection.receive(5).number == 1  # type: ignore[union-attr]
    connection.close()
