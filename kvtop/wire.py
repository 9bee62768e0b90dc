"""The protocol between a console and an engine: length-prefixed MessagePack over a stream socket. Owns no engine.

A frame is four bytes of length, big-endian, and as many bytes of MessagePack. The engine speaks first, with
``Hello`` or ``StartFailed``; then every request gets one reply with the request's number, in order.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar

import msgspec

from allocator.commands import Command
from allocator.plans import Outcome, Plan
from allocator.snapshot import Snapshot
from kvtop.client_messages import ClientAnswer, ClientCall, ClientRefused
from kvtop.errors import EXIT_FAILED, KvtopError, SourceError, UserError
from kvtop.model.observation import BlockHolders, Focus, Kin

PROTOCOL_VERSION: Final = 1
#: Number of the answer to a request whose number is not known; requests are numbered from 1.
NO_NUMBER: Final = 0
#: Bytes of one message, at most: to the engine, and from it.
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_REPLY_BYTES: Final = 64 << 20
#: Seconds in which a message that has begun must be complete.
FRAME_TIMEOUT_S: Final = 5.0
#: Seconds a reader waits longer than the engine was told to take, so that the engine's own words arrive.
_GRACE_S: Final = 0.25
_CHUNK: Final = 1 << 18
_NO_TIME_S: Final = 0.001


class WireError(SourceError):
    """The far end sent what it may not, or too slowly. The connection is of no further use."""


class WireClosed(WireError):
    """The far end closed the connection."""


class WireTimeout(SourceError):
    """Nothing complete arrived in time. The connection is still good."""


class MessageTooLarge(SourceError):
    """A message was not sent, since the far end would not take it. The connection is still good."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready.

    Attributes:
        protocol: ``PROTOCOL_VERSION`` of the engine.
        pid: Its process.
        engine: Its name.
        notes: Lines for the user, from building it.
        missing: Capabilities that it does not offer, with the reason; see ``kvtop.sources.base.Source``.
    """

    protocol: int
    pid: int
    engine: str
    notes: tuple[str, ...] = ()
    missing: dict[str, str] = {}


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be built. ``exit_code`` is the one the command line promises for it."""

    text: str
    exit_code: int = EXIT_FAILED


class Observe(msgspec.Struct, frozen=True, tag=True):
    """Asks for an observation; its arrays are in the block map before the reply is sent."""

    number: int
    focus: Focus
    timeout_s: float


class PlanCommand(msgspec.Struct, frozen=True, tag=True):
    """Asks what ``command`` would do."""

    number: int
    command: Command
    timeout_s: float


class ApplyCommand(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``command`` to be done."""

    number: int
    command: Command
    timeout_s: float


class Observed(msgspec.Struct, frozen=True, tag=True):
    """Answers ``Observe``; the block arrays lie in the map. ``focus_table`` holds little-endian int64."""

    number: int
    snapshot: Snapshot
    focus_table: bytes | None
    focus_block: BlockHolders | None
    next_victims: tuple[int, ...] | None = None
    lineage: tuple[Kin, ...] | None = None


class Planned(msgspec.Struct, frozen=True, tag=True):
    """Answers ``PlanCommand``."""

    number: int
    plan: Plan


class Applied(msgspec.Struct, frozen=True, tag=True):
    """Answers ``ApplyCommand``."""

    number: int
    outcome: Outcome


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Answers any request that could not be answered, with the reason.

    With ``NO_NUMBER`` it answers what could not even be read, and is the last message.
    """

    number: int
    text: str


Request: TypeAlias = Observe | PlanCommand | ApplyCommand | ClientCall
Reply: TypeAlias = Hello | StartFailed | Observed | Planned | Applied | Failed | ClientAnswer | ClientRefused

_M = TypeVar("_M")


class Connection(Generic[_M]):
    """Messages over one stream socket, for one thread at a time; ``shut_down`` may come from any.

    Args:
        sock: A connected stream socket, the connection's own from here on.
        receives: Type of the messages that may come.
        max_received, max_sent: Bytes of one message, at most.
        farewell: Makes the last message to a far end that sent what it may not, from the reason; by default none.
    """

    def __init__(
        self,
        sock: socket.socket,
        receives: Any,
        *,
        max_received: int,
        max_sent: int,
        farewell: Callable[[str], Any] | None = None,
    ) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[_M] = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_received = max_received
        self._max_sent = max_sent
        self._farewell = farewell
        self._received = bytearray()
        self._frame_began_s: float | None = None

    def send(self, message: Any, timeout_s: float = FRAME_TIMEOUT_S) -> None:
        """Send one message.

        Raises:
            MessageTooLarge: It was not sent; the connection is still good.
            WireClosed: The far end is gone.
            WireError: The far end did not take it in ``timeout_s``.
        """
        try:
            body = self._encoder.encode(message)
        except OverflowError:
            raise MessageTooLarge("a number in the message does not fit in 64 bits") from None
        if len(body) > self._max_sent:
            raise MessageTooLarge(f"the message takes {len(body)} bytes, at most {self._max_sent} are allowed")
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(len(body).to_bytes(4, "big") + body)
        except TimeoutError:
            self.close()  # half a message may be on its way: nothing after it could be understood
            raise WireError(f"the far end took no message in {timeout_s:g} s") from None
        except OSError as error:
            raise WireClosed(f"the connection is closed ({error.strerror or error})") from None

    def receive(self, timeout_s: float) -> _M:
        """Return the next message.

        Raises:
            WireTimeout: None arrived in ``timeout_s``; what came of it is kept.
            WireClosed: The far end is gone.
            WireError: It is malformed, too large, or stopped halfway.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            body = self._take_frame()
            if body is not None:
                return self._decode(body)
            # What has arrived already is read even when time is up: this process may have been suspended meanwhile.
            if self._receive_some(max(deadline_s - time.monotonic(), _NO_TIME_S)):
                continue
            now_s = time.monotonic()
            if self._frame_began_s is not None and now_s - self._frame_began_s > FRAME_TIMEOUT_S:
                self.close()
                raise WireError(f"a message began and was not complete after {FRAME_TIMEOUT_S:g} s")
            if now_s >= deadline_s:
                raise WireTimeout(f"no answer in {timeout_s:g} s")

    def shut_down(self) -> None:
        """End the connection and keep its descriptor: a thread that waits in it sees ``WireClosed``."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its descriptor back. Safe to call twice."""
        self.shut_down()
        self._sock.close()

    def _receive_some(self, timeout_s: float) -> bool:
        try:
            self._sock.settimeout(min(timeout_s, FRAME_TIMEOUT_S))
            chunk = self._sock.recv(_CHUNK)
        except TimeoutError:
            return False
        except OSError as error:
            raise WireClosed(f"the connection is closed ({error.strerror or error})") from None
        if not chunk:
            raise WireClosed("the far end closed the connection")
        if self._frame_began_s is None:
            self._frame_began_s = time.monotonic()
        self._received += chunk
        return True

    def _take_frame(self) -> bytes | None:
        received = self._received
        if len(received) < 4:
            return None
        size = int.from_bytes(received[:4], "big")
        if size > self._max_received:
            self._give_up(f"a message of {size} bytes came, at most {self._max_received} are allowed")
        if len(received) < 4 + size:
            return None
        body = bytes(received[4 : 4 + size])
        del received[: 4 + size]
        self._frame_began_s = time.monotonic() if received else None
        return body

    def _decode(self, body: bytes) -> _M:
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            self._give_up(f"a message could not be understood: {error}")

    def _give_up(self, text: str) -> NoReturn:
        if self._farewell is not None:
            with contextlib.suppress(SourceError):
                self.send(self._farewell(text))
        self.close()
        raise WireError(text) from None


def server_connection(sock: socket.socket) -> Connection[Request]:
    """Return the engine's end: requests come in."""
    return Connection(
        sock,
        Request,
        max_received=MAX_REQUEST_BYTES,
        max_sent=MAX_REPLY_BYTES,
        farewell=lambda text: Failed(NO_NUMBER, text),
    )


def client_connection(sock: socket.socket) -> Connection[Reply]:
    """Return the console's end: replies come in."""
    return Connection(sock, Reply, max_received=MAX_REPLY_BYTES, max_sent=MAX_REQUEST_BYTES)


class Client:
    """The console's end of one connection: one request at a time, each answered or failed in bounded time.

    Safe from several threads; a second caller waits for the first, within its own time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._connection = client_connection(sock)
        self._lock = threading.Lock()
        self._number = 0
        self._hello: Hello | StartFailed | None = None

    def hello(self, timeout_s: float) -> Hello:
        """Return the engine's greeting, waiting for it the first time.

        Raises:
            UserError: The engine refused its options.
            KvtopError: The engine could not be built.
            SourceError: It is gone, did not greet in ``timeout_s``, or speaks another protocol.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._turn(timeout_s):
            return self._greeting(deadline_s)

    def observe(self, focus: Focus, timeout_s: float) -> Observed:
        """Ask for an observation. Raises as ``call``."""
        reply = self.call(Observe, focus, timeout_s)
        return reply if isinstance(reply, Observed) else _unexpected(reply)

    def plan(self, command: Command, timeout_s: float) -> Plan:
        """Ask what ``command`` would do. Raises as ``call``."""
        reply = self.call(PlanCommand, command, timeout_s)
        return reply.plan if isinstance(reply, Planned) else _unexpected(reply)

    def apply(self, command: Command, timeout_s: float) -> Outcome:
        """Ask for ``command`` to be done. Raises as ``call``."""
        reply = self.call(ApplyCommand, command, timeout_s)
        return reply.outcome if isinstance(reply, Applied) else _unexpected(reply)

    def call(self, kind: type[Request], payload: Any, timeout_s: float) -> Reply:
        """Send one request and return its reply.

        Raises:
            SourceError: The engine could not answer, with its reason; or it is gone, or did not answer in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._turn(timeout_s):
            try:
                self._greeting(deadline_s)
            except SourceError:
                raise
            except KvtopError as error:
                raise SourceError(str(error)) from None
            self._number += 1
            left_s = max(0.0, deadline_s - time.monotonic())
            self._connection.send(kind(self._number, payload, left_s))
            while True:
                try:
                    reply = self._connection.receive(max(0.0, deadline_s + _GRACE_S - time.monotonic()))
                except WireTimeout:
                    raise WireTimeout(f"no answer in {timeout_s:g} s") from None
                if isinstance(reply, Failed) and reply.number == NO_NUMBER:
                    self._connection.close()
                    raise WireError(reply.text)
                if isinstance(reply, Hello | StartFailed):
                    raise WireError("the engine greeted twice")
                if reply.number == self._number:
                    break
                # An answer that its caller no longer waited for: the next one is ours.
        if isinstance(reply, Failed):
            raise SourceError(reply.text)
        return reply

    def close(self) -> None:
        """End the connection; a call in progress fails. Safe to call twice."""
        self._connection.shut_down()
        # The descriptor is given back when nobody waits in it: its number may be another file's at once.
        with contextlib.suppress(WireTimeout), self._turn(1.0):
            self._connection.close()

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise WireTimeout(f"another request is not answered after {timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _greeting(self, deadline_s: float) -> Hello:
        if self._hello is None:
            first = self._connection.receive(max(0.0, deadline_s - time.monotonic()))
            if not isinstance(first, Hello | StartFailed):
                raise WireError("the engine did not greet")
            self._hello = first
        if isinstance(self._hello, StartFailed):
            error = UserError if self._hello.exit_code == UserError.exit_code else KvtopError
            raise error(self._hello.text)
        if self._hello.protocol != PROTOCOL_VERSION:
            raise WireError(
                f"the engine speaks protocol {self._hello.protocol}, this console {PROTOCOL_VERSION}: "
                "both must be of the same version of kvtop"
            )
        return self._hello


def _unexpected(reply: Reply) -> Any:
    raise WireError(f"the engine answered with {type(reply).__name__}")
