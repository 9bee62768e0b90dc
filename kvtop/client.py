"""Client and ClientSequence: how any Python program uses an engine's blocks, in its own process or over a socket.

The calls are the same for both. A program that ends, in whatever way, leaves nothing behind: over a socket the engine
sees the connection close; in the engine's own process the last reference to a sequence is the end of it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from allocator.clients import ClientRegistry, ClientSession, SequenceState
from allocator.errors import AllocatorError, OutOfBlocks, Refused, SequenceGone, StorageError
from kvtop.client_messages import (
    AppendTokens,
    Call,
    ClientAnswer,
    ClientCall,
    ClientRefused,
    Done,
    ForkSequence,
    Greet,
    ReadState,
    ReadTable,
    ReleaseSequence,
    StartSequence,
    do_call,
    error_from,
    table_from,
    tokens_to_bytes,
)
from kvtop.errors import SourceError, UserError
from kvtop.local_socket import connect, socket_path
from kvtop.wire import Client as Wire
from kvtop.wire import WireError, WireTimeout

if TYPE_CHECKING:
    from allocator.engine import Engine
    from kvtop.runner import EngineRunner

__all__ = [
    "Client",
    "ClientSequence",
    "OutOfBlocks",
    "Refused",
    "SequenceGone",
    "SourceError",
    "StorageError",
    "attach",
]

#: Token ids, each from 0 to 2^31 - 1.
Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"

#: Seconds between two tries for blocks, and for one answer over the socket.
_RETRY_S: Final = 0.01
_ANSWER_S: Final = 10.0
_END_S: Final = 2.0


class Link(Protocol):
    """How calls reach the engine."""

    def do(self, call: Call) -> Done:
        """Do one call at once. Raises as ``ClientSession``'s methods, and ``SourceError`` when the engine is gone."""

    def close(self) -> None:
        """Let go; whatever is still held is released. Safe to call twice."""


class InProcessLink:
    """Calls an engine in this process, on the caller's own thread."""

    def __init__(self, clients: ClientRegistry, name: str) -> None:
        self._session: ClientSession = clients.open(name, os.getpid())

    def do(self, call: Call) -> Done:
        return do_call(self._session, call)

    def close(self) -> None:
        self._session.close()


class SocketLink:
    """Calls an engine in another process, over a connection of its own; the engine answers at once."""

    def __init__(self, path: Path, name: str) -> None:
        self._wire = Wire(connect(path))
        try:
            self._wire.hello(_ANSWER_S)
            self._call(Greet(name))
        except BaseException:
            self._wire.close()
            raise

    def do(self, call: Call) -> Done:
        answer = self._call(call)
        return Done(answer.state, answer.table)

    def close(self) -> None:
        self._wire.close()

    def _call(self, call: Greet | Call) -> ClientAnswer:
        try:
            reply = self._wire.call(ClientCall, call, _ANSWER_S)
        except WireTimeout as error:
            # Whether it was done is not known: better to let go of everything than to go on in doubt.
            self.close()
            raise SourceError(f"{error}: detached") from None
        if isinstance(reply, ClientRefused):
            raise error_from(reply)
        if not isinstance(reply, ClientAnswer):
            raise WireError(f"the engine answered with {type(reply).__name__}")
        return reply


def attach(
    target: Engine | EngineRunner | str | os.PathLike[str], *, name: str | None = None, timeout_s: float = 5.0
) -> Client:
    """Return a client of an engine: in this process, or on this machine by name.

    Args:
        target: An engine or its runner; or ``local:NAME``, or the path of an engine's socket.
        name: Shown beside its sequences; by default the program's own.
        timeout_s: Seconds to wait for blocks, at most, where a call does not say.

    Raises:
        UserError: ``target`` is none of these.
        SourceError: No engine listens there.
        Refused: It takes no more clients.
    """
    name = Path(sys.argv[0] or "python").name[:40] if name is None else name
    if isinstance(target, str) and target.startswith("local:"):
        return Client(SocketLink(socket_path(target.removeprefix("local:")), name), timeout_s)
    if isinstance(target, str | os.PathLike):
        if not os.fspath(target):
            raise UserError("attach to '': an engine, local:NAME, or the path of a socket")
        return Client(SocketLink(Path(target), name), timeout_s)
    clients = getattr(getattr(target, "engine", target), "clients", None)
    if not isinstance(clients, ClientRegistry):
        raise UserError(f"attach to {type(target).__name__}: an engine, local:NAME, or the path of a socket")
    return Client(InProcessLink(clients, name), timeout_s)


class Client:
    """One program attached to an engine; ``attach`` makes it. Any thread may use it, several at once.

    It is closed by ``close``, by a ``with`` block, or when it and its sequences are no longer referred to.
    """

    def __init__(
        self,
        link: Link,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._clock, self._sleep = clock, sleep
        # What nobody refers to any more is released by a thread: a finaliser may run in the middle of anything.
        self._lost: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._janitor = threading.Thread(
            target=_release_lost, args=(link, self._lost), name="kvtop-client-janitor", daemon=True
        )
        self._janitor.start()
        self._finalizer = weakref.finalize(self, self._lost.put, None)
        self._finalizer.atexit = False

    def sequence(
        self, prompt: Tokens, *, label: str = "", salt: bytes = b"", timeout_s: float | None = None
    ) -> ClientSequence:
        """Start a sequence; blocks that the prefix cache knows are shared.

        Args:
            prompt: Its first tokens, at least one.
            label: Shown behind the client's name.
            salt: Isolates tenants: only sequences with the same salt share blocks.
            timeout_s: Seconds to wait for blocks, at most; ``None`` takes the client's.

        Raises:
            OutOfBlocks: There were too few until the end; carries the numbers.
            Refused: An argument is out of bounds, or the client is closed.
            SourceError: The engine is gone.
        """
        start = StartSequence(tokens_to_bytes(_token_array(prompt)), label, bytes(salt))
        return ClientSequence(self, self._state(self._patiently(start, timeout_s)))

    def close(self) -> None:
        """Release whatever the client still holds and detach. Safe to call twice."""
        self._finalizer()
        if threading.current_thread() is not self._janitor:
            self._janitor.join(_END_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, call: Call) -> Done:
        if not self._finalizer.alive:
            raise Refused("this client is closed")
        return self._link.do(call)

    def _patiently(self, call: Call, timeout_s: float | None) -> Done:
        """Do a call, again and again while there are too few blocks and time is left."""
        deadline_s = self._clock() + (self._timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return self._do(call)
            except OutOfBlocks:
                left_s = deadline_s - self._clock()
                if not left_s > 0:
                    raise
            self._sleep(min(_RETRY_S, left_s))

    @staticmethod
    def _state(done: Done) -> SequenceState:
        if done.state is None:
            raise WireError("the engine answered without the sequence's state")
        return done.state


class ClientSequence:
    """One sequence of a client, from its prompt until ``release``; a ``with`` block releases it at its end.

    Every method raises ``SequenceGone`` once it has ended, such as when an operator cancelled it, and
    ``SourceError`` when the engine is gone.

    Attributes:
        seq_id: Its number, as the console shows it.
        num_tokens: Tokens written.
        hit_tokens: Prompt tokens that the prefix cache had; a fork has its parent's.
    """

    def __init__(self, client: Client, state: SequenceState) -> None:
        self.seq_id, self.num_tokens, self.hit_tokens = state
        self._client = client
        self._finalizer = weakref.finalize(self, client._lost.put, self.seq_id)
        self._finalizer.atexit = False

    def append(self, tokens: Tokens, *, timeout_s: float | None = None) -> None:
        """Write tokens at the end. A last block that other sequences hold too is copied first.

        Args:
            tokens: All of them or none are written.
            timeout_s: Seconds to wait for blocks, at most; ``None`` takes the client's.

        Raises:
            OutOfBlocks: There were too few until the end; carries the numbers.
            StorageError: The copy failed.
        """
        call = AppendTokens(self.seq_id, tokens_to_bytes(_token_array(tokens)))
        self.num_tokens = self._client._state(self._client._patiently(call, timeout_s)).num_tokens

    def fork(self, *, label: str = "") -> ClientSequence:
        """Return a second sequence that shares every block until one of the two writes to it."""
        return ClientSequence(self._client, self._client._state(self._client._do(ForkSequence(self.seq_id, label))))

    def table(self) -> NDArray[np.int64]:
        """Return the ids of its blocks, in token order. A compaction may move them at any time. [blocks]"""
        return table_from(self._client._do(ReadTable(self.seq_id)).table)

    def refresh(self) -> None:
        """Read how it stands; raises ``SequenceGone`` if it has ended."""
        self.seq_id, self.num_tokens, self.hit_tokens = self._client._state(self._client._do(ReadState(self.seq_id)))

    def release(self) -> None:
        """End it and release its blocks. Nothing happens when it has ended, in whatever way."""
        if self._finalizer.detach() is None:
            return
        if self._client._finalizer.alive:  # a client that is closed has released everything
            self._client._do(ReleaseSequence(self.seq_id))

    def __enter__(self) -> ClientSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _release_lost(link: Link, lost: queue.SimpleQueue[int | None]) -> None:
    """Release sequences that nobody refers to any more, until ``None`` comes; then let go of the engine."""
    while (seq_id := lost.get()) is not None:
        with contextlib.suppress(AllocatorError, SourceError):
            link.do(ReleaseSequence(seq_id))
    link.close()


def _token_array(tokens: Tokens) -> NDArray[np.int32]:
    try:
        array = np.asarray(tokens)
        if array.ndim != 1:
            raise Refused("tokens: one row of numbers")
        if len(array) and not (np.issubdtype(array.dtype, np.integer) and array.min() >= 0 and array.max() < 1 << 31):
            raise Refused(f"tokens: whole numbers from 0 to {2**31 - 1}")
        return array.astype(np.int32)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(f"tokens: whole numbers from 0 to {2**31 - 1} ({error})") from None
