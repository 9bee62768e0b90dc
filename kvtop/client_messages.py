"""What an attached program asks of an engine over its socket, and the answers. Part of the protocol of ``wire``."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from allocator.clients import ClientSession, SequenceState
from allocator.content import TokenArray
from allocator.errors import AllocatorError, OutOfBlocks, Refused, SequenceGone, StorageError, UnknownSequence


class Greet(msgspec.Struct, frozen=True, tag=True):
    """Says who the program is; comes once, before everything else."""

    name: str


class StartSequence(msgspec.Struct, frozen=True, tag=True):
    """Starts a sequence. ``tokens`` holds little-endian int32."""

    tokens: bytes
    label: str = ""
    salt: bytes = b""


class AppendTokens(msgspec.Struct, frozen=True, tag=True):
    """Appends to a sequence. ``tokens`` holds little-endian int32."""

    seq_id: int
    tokens: bytes


class ForkSequence(msgspec.Struct, frozen=True, tag=True):
    """Forks a sequence."""

    seq_id: int
    label: str = ""


class ReadState(msgspec.Struct, frozen=True, tag=True):
    """Asks how a sequence stands."""

    seq_id: int


class ReadTable(msgspec.Struct, frozen=True, tag=True):
    """Asks for a sequence's block table."""

    seq_id: int


class ReleaseSequence(msgspec.Struct, frozen=True, tag=True):
    """Ends a sequence."""

    seq_id: int


#: Everything that is done to sequences.
Call: TypeAlias = StartSequence | AppendTokens | ForkSequence | ReadState | ReadTable | ReleaseSequence


class ClientCall(msgspec.Struct, frozen=True, tag=True):
    """One request of an attached program; it is answered at once, without waiting for a step."""

    number: int
    call: Greet | Call
    timeout_s: float


class ClientAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answers a ``ClientCall``: the sequence's state where it has one, its table where it was asked for."""

    number: int
    state: SequenceState | None = None
    table: bytes | None = None


class ClientRefused(msgspec.Struct, frozen=True, tag=True):
    """Answers a ``ClientCall`` that was refused, with what it takes to raise the same error at the other end."""

    number: int
    kind: Literal["out-of-blocks", "gone", "unknown", "refused", "storage"]
    text: str
    needed: int = 0
    allocatable: int = 0
    seq_id: int = 0


class Done(NamedTuple):
    """What a call gave, in the order of ``ClientAnswer``'s fields."""

    state: SequenceState | None = None
    table: bytes | None = None


_INT32: Final = np.dtype("<i4")
_INT64: Final = np.dtype("<i8")


def tokens_to_bytes(tokens: TokenArray) -> bytes:
    """Return tokens as they travel. [n]"""
    return tokens.astype(_INT32, copy=False).tobytes()


def tokens_from_bytes(data: bytes) -> TokenArray:
    """Return the tokens that came. [n]

    Raises:
        Refused: They are no whole number of tokens.
    """
    if len(data) % _INT32.itemsize:
        raise Refused(f"{len(data)} bytes of tokens: {_INT32.itemsize} a token")
    return np.frombuffer(data, _INT32).astype(np.int32, copy=False)


def do_call(session: ClientSession, call: Call) -> Done:
    """Do what a program asks. Raises as ``ClientSession``'s methods."""
    match call:
        case StartSequence(tokens, label, salt):
            return Done(session.start(tokens_from_bytes(tokens), label, salt))
        case AppendTokens(seq_id, tokens):
            return Done(session.append(seq_id, tokens_from_bytes(tokens)))
        case ForkSequence(seq_id, label):
            return Done(session.fork(seq_id, label))
        case ReadState(seq_id):
            return Done(session.state(seq_id))
        case ReadTable(seq_id):
            return Done(table=session.table(seq_id).astype(_INT64, copy=False).tobytes())
        case ReleaseSequence(seq_id):
            session.release(seq_id)
            return Done()
        case _:
            assert_never(call)


def refusal_of(number: int, error: AllocatorError) -> ClientRefused:
    """Return an error as it travels."""
    text = str(error)
    match error:
        case OutOfBlocks():
            return ClientRefused(number, "out-of-blocks", text, error.needed, error.allocatable)
        case SequenceGone():
            return ClientRefused(number, "gone", error.reason, seq_id=error.seq_id)
        case UnknownSequence():
            return ClientRefused(number, "unknown", text, seq_id=error.seq_id)
        case StorageError():
            return ClientRefused(number, "storage", text)
        case _:
            return ClientRefused(number, "refused", text)


def error_from(refused: ClientRefused) -> AllocatorError:
    """Return the error that was refused with, to be raised here."""
    match refused.kind:
        case "out-of-blocks":
            return OutOfBlocks(refused.needed, refused.allocatable)
        case "gone":
            return SequenceGone(refused.seq_id, refused.text)
        case "unknown":
            return UnknownSequence(refused.seq_id)
        case "storage":
            return StorageError(refused.text)
        case "refused":
            return Refused(refused.text)


def table_from(data: bytes | None) -> NDArray[np.int64]:
    """Return the block table that an answer carries. [n]"""
    return np.frombuffer(data or b"", _INT64).astype(np.int64, copy=False)
