"""Cache events as engines publish them: MessagePack batches of every schema → frozen events. Counts what it skips.

A batch is an array; its events are arrays with the tag in front (vLLM before 0.24, SGLang before 0.5.20) or maps.
SGLang's arrays end where the engines' orders begin to differ, so one order of fields serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

_MASK: Final = (1 << 64) - 1
#: Field → place in the array form, the tag being 0.
_STORED: Final = {
    "block_hashes": 1,
    "parent_block_hash": 2,
    "token_ids": 3,
    "block_size": 4,
    "medium": 6,
    "group_idx": 9,
}
_REMOVED: Final = {"block_hashes": 1, "medium": 2, "group_idx": 3}
#: Names longer than this are cut: they are shown.
_MAX_NAME: Final = 32


class BadBatch(ValueError):
    """A message that is no batch of events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that can be found again from here on.

    Attributes:
        hashes: Their hashes, in order; may be empty.
        parent: Hash of the block before the first; ``None`` at the start of a prompt, or when not told.
        is_chain: Whether each block follows the one before it: otherwise nothing is known of what precedes them.
        block_size: Tokens a block; 0 when not told.
        medium, group: Where they are.
        num_tokens: Tokens in a chain's blocks together; 0 when not told. The last may have fewer than the others.
    """

    hashes: tuple[int, ...]
    parent: int | None
    is_chain: bool
    block_size: int
    medium: str
    group: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """Copies of blocks that are gone."""

    hashes: tuple[int, ...]
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""


KvEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch.

    Attributes:
        time_s: When it was published, by the engine's clock.
        events: The events that were understood, in order.
        rank: Data-parallel rank; ``None`` when not told.
        unknown: Events of a type that is not known.
        broken: Events of a known type that could not be read.
    """

    time_s: float
    events: tuple[KvEvent, ...]
    rank: int | None
    unknown: int = 0
    broken: int = 0


def decode(payload: bytes) -> Batch:
    """Return the batch in a message's last frame.

    Raises:
        BadBatch: It is no batch.
    """
    try:
        body = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadBatch(f"not MessagePack: {error}") from None
    if not isinstance(body, list) or len(body) < 2 or not isinstance(body[1], list):
        raise BadBatch("not a batch of events")
    time_s, told = body[0], body[1]
    rank = body[2] if len(body) > 2 and _is_count(body[2]) else None
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise BadBatch("no time in front of the batch")
    events: list[KvEvent] = []
    unknown = broken = 0
    for event in told:
        try:
            known = _event(event)
        except BadBatch:
            broken += 1
            continue
        if known is None:
            unknown += 1
        else:
            events.append(known)
    return Batch(float(time_s), tuple(events), rank, unknown, broken)


def hash_of(value: object) -> int:
    """Return any published form of a hash as 64 unsigned bits: signed and unsigned integers, and digests.

    Raises:
        BadBatch: It is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value & _MASK
    if isinstance(value, bytes) and len(value) >= 8:
        return int.from_bytes(value[-8:], "big")
    raise BadBatch("not a hash")


def _event(event: object) -> KvEvent | None:
    """Return one event; ``None`` when its type is not known."""
    if isinstance(event, list) and event and isinstance(event[0], str):
        tag = event[0]
    elif isinstance(event, dict):
        tag = event.get("type", "")
    else:
        raise BadBatch("neither array nor map")
    if tag == "BlockStored":
        return _stored(_fields(event, _STORED))
    if tag == "BlockRemoved":
        fields = _fields(event, _REMOVED)
        return Removed(_hashes(fields), _medium(fields), _group(fields))
    return Cleared() if tag == "AllBlocksCleared" else None


def _fields(event: Sequence[Any] | Mapping[Any, Any], places: Mapping[str, int]) -> dict[str, Any]:
    if isinstance(event, Mapping):
        return {name: event.get(name) for name in places}
    return {name: event[place] if place < len(event) else None for name, place in places.items()}


def _stored(fields: Mapping[str, Any]) -> Stored:
    hashes = _hashes(fields)
    parent, size, tokens = fields["parent_block_hash"], fields["block_size"], fields["token_ids"]
    if size is not None and not _is_count(size):
        raise BadBatch("not a block size")
    if tokens is not None and not isinstance(tokens, list):
        raise BadBatch("not a list of tokens")
    # Groups with a window leave out the blocks that have slid out, and placeholders tell no tokens: neither says what
    # comes before a block. The last block of a chain may be shorter than the others.
    num_tokens = len(tokens or ())
    is_chain = bool(size) and (len(hashes) - 1) * size < num_tokens <= len(hashes) * size
    return Stored(
        hashes,
        None if parent is None else hash_of(parent),
        is_chain,
        size or 0,
        _medium(fields),
        _group(fields),
        num_tokens if is_chain else 0,
    )


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    told = fields["block_hashes"]
    if not isinstance(told, list):
        raise BadBatch("no list of hashes")
    # By far the most are plain integers, and there are many.
    return tuple(value & _MASK if type(value) is int else hash_of(value) for value in told)


def _medium(fields: Mapping[str, Any]) -> str:
    """Return the medium in capitals; engines before there were several mean the device."""
    told = fields["medium"]
    if told is not None and not isinstance(told, str):
        raise BadBatch("not a medium")
    return told[:_MAX_NAME].upper() if told else "GPU"


def _group(fields: Mapping[str, Any]) -> int:
    told = fields["group_idx"]
    if told is not None and not _is_count(told):
        raise BadBatch("not a group")
    return told or 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
