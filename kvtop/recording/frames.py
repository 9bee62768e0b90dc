"""Frames: a moment of an engine as bytes, whole or as what differs from the moment before. Pure but for its buffers.

A tier's arrays lie one behind another in one buffer of 64-bit words, so what changed in any of them is found with one
comparison. A delta holds the words that differ, the block tables that do, and the snapshot compressed with the one
before as its dictionary.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BYTES_PER_BLOCK, FIELDS, BlockArrays
from allocator.commands import Command
from allocator.config import MAX_BLOCKS
from allocator.plans import Outcome
from allocator.snapshot import Snapshot
from kvtop.engine_setup import EngineOptions
from kvtop.recording.framing import RecordingError
from kvtop.recording.tables import Tables, no_tables, pack_tables, unpack_tables

#: Of what is hardly compressible, and of text.
_LEVEL: Final = 1
_SNAPSHOT_LEVEL: Final = 3
#: What the compression can look back to. [bytes]
_WINDOW: Final = 32768
#: Bytes of one moment when unpacked, at most: two tiers of the largest pool, and its snapshot.
_MAX_RAW: Final = 2 * MAX_BLOCKS * BYTES_PER_BLOCK + (64 << 20)
_FRONT: Final = struct.Struct("<BI")
_SIZES: Final = struct.Struct("<II")
_COUNT: Final = struct.Struct("<I")
_NO_TIER: Final = (1 << 32) - 1

_T = TypeVar("_T")


class RecordedCommand(msgspec.Struct, frozen=True, tag="command"):
    """A command that was applied between two steps, and what became of it, the time it took aside."""

    step: int
    command: Command
    outcome: Outcome


class Stall(msgspec.Struct, frozen=True, tag="stall"):
    """The engine had tried to get on at ``step``, and could not."""

    step: int


class Note(msgspec.Struct, frozen=True):
    """A mark that somebody set.

    Attributes:
        step: Where.
        text: What was noted.
        at_s: Seconds since 1970 when it was set; ``None`` for one set while the run was recorded.
    """

    step: int
    text: str
    at_s: float | None = None


class Cut(msgspec.Struct, frozen=True):
    """Where a recording was cut out of a longer one.

    Attributes:
        source: The other recording's name.
        first_step, last_step: What was asked for.
        before: What happened until then, without which it could not be run again.
    """

    source: str
    first_step: int
    last_step: int
    before: tuple[RecordedCommand | Stall, ...] = ()


class RecordingHeader(msgspec.Struct, frozen=True):
    """What was recorded, and how to run it again.

    Attributes:
        kvtop_version: The program that wrote the recording.
        options: The engine.
        every: Steps between two moments.
        load_crc: CRC-32 of the trace or workload file; ``None`` without one.
        attached: Whether other programs could use the engine's blocks, so that it cannot be run again.
        has_victims: Whether moments tell the blocks that would be evicted next.
        cut: Where it was cut out of a longer recording; ``None`` for a whole one.
    """

    kvtop_version: str
    options: EngineOptions
    every: int
    load_crc: int | None = None
    attached: bool = False
    has_victims: bool = False
    cut: Cut | None = None


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """A key frame in a closed recording's index: its record, and what of interest lies from it to the next one."""

    number: int
    offset: int
    step: int
    marks: int


@dataclass(frozen=True, slots=True, eq=False)
class Tier:
    """One tier's arrays in one buffer.

    Attributes:
        words: The buffer. [w] uint64
        arrays: Its arrays.
    """

    words: NDArray[np.uint64]
    arrays: BlockArrays

    @staticmethod
    def over(words: NDArray[np.uint64], num_blocks: int) -> Tier:
        """Return the tier whose arrays lie in ``words``."""
        views, offset = {}, 0
        data = words.view(np.uint8)
        for name, dtype in FIELDS:
            end = offset + num_blocks * dtype.itemsize
            views[name] = data[offset:end].view(dtype)
            offset = end
        return Tier(words, BlockArrays(**views))

    @staticmethod
    def empty(num_blocks: int) -> Tier:
        """Return a tier of zeros."""
        return Tier.over(np.zeros(num_words(num_blocks), np.uint64), num_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A moment as it is compared and written.

    Attributes:
        snapshot: The snapshot's bytes.
        device, host: The tiers; ``None`` is no host tier.
        stalled: Whether the engine had just found that nothing can get on.
        tables: Every device block table.
        victims: Device blocks that would be evicted next, in order. [v]
    """

    snapshot: bytes
    device: Tier
    host: Tier | None
    stalled: bool = False
    tables: Tables = field(default_factory=no_tables)
    victims: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def sizes(self) -> tuple[int, int | None]:
        """Blocks of both tiers."""
        return self.device.arrays.num_blocks, None if self.host is None else self.host.arrays.num_blocks

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that there are."""
        return (self.device,) if self.host is None else (self.device, self.host)


def num_words(num_blocks: int) -> int:
    """Return the 64-bit words that a tier of so many blocks takes."""
    return -(-num_blocks * BYTES_PER_BLOCK // 8)


def pack_key(frame: Frame) -> bytes:
    """Return ``frame`` whole."""
    num_device, num_host = frame.sizes
    sizes = _SIZES.pack(num_device, _NO_TIER if num_host is None else num_host)
    tiers = [tier.words.tobytes() for tier in frame.tiers]
    return _pack(frame, b"", [sizes, *tiers, pack_tables(frame.tables, no_tables())])


def pack_delta(frame: Frame, before: Frame) -> bytes:
    """Return what differs in ``frame`` from ``before``, which must have the same sizes."""
    parts = []
    for tier, old in zip(frame.tiers, before.tiers, strict=True):
        at = np.flatnonzero(tier.words != old.words)
        gaps = at.astype("<u4")
        gaps[1:] -= gaps[:-1].copy()
        parts += [
            _COUNT.pack(len(at)),
            gaps.tobytes(),
            (tier.words[at] ^ old.words[at]).astype("<u8", copy=False).tobytes(),
        ]
    return _pack(frame, before.snapshot, [*parts, pack_tables(frame.tables, before.tables)])


def unpack_key(payload: bytes) -> Frame:
    """Return the frame that ``pack_key`` packed.

    Raises:
        RecordingError: It is none.
    """
    stalled, snapshot, raw = _unpack(payload, b"")
    try:
        num_device, num_host = _SIZES.unpack_from(raw)
        offset = _SIZES.size
        tiers: list[Tier | None] = []
        for number in (num_device, num_host):
            if number == _NO_TIER:
                tiers.append(None)
                continue
            words = np.frombuffer(raw, "<u8", num_words(number), offset).astype(np.uint64)
            offset += words.nbytes
            tiers.append(Tier.over(words, number))
    except (struct.error, ValueError) as error:
        raise RecordingError(f"holds a moment that cannot be read: {error}") from None
    device, host = tiers
    if device is None:
        raise RecordingError("holds a moment without device blocks")
    tables, offset = unpack_tables(raw, offset, no_tables())
    return Frame(snapshot, device, host, stalled, tables, _unpack_victims(raw, offset))


def unpack_delta(payload: bytes, before: Frame) -> Frame:
    """Return the frame that ``pack_delta`` packed.

    Raises:
        RecordingError: It is none, or does not follow ``before``.
    """
    stalled, snapshot, raw = _unpack(payload, before.snapshot)
    tiers, offset = [], 0
    try:
        for old in before.tiers:
            (count,) = _COUNT.unpack_from(raw, offset)
            offset += _COUNT.size
            at = np.frombuffer(raw, "<u4", count, offset).cumsum(dtype=np.int64)
            offset += 4 * count
            words = old.words.copy()
            words[at] ^= np.frombuffer(raw, "<u8", count, offset).astype(np.uint64)
            offset += 8 * count
            tiers.append(Tier.over(words, old.arrays.num_blocks))
    except (struct.error, ValueError, IndexError) as error:
        raise RecordingError(f"holds a change that cannot be read: {error}") from None
    tables, offset = unpack_tables(raw, offset, before.tables)
    host = tiers[1] if len(tiers) > 1 else None
    return Frame(snapshot, tiers[0], host, stalled, tables, _unpack_victims(raw, offset))


def decode_snapshot(frame: Frame) -> Snapshot:
    """Return a frame's snapshot.

    Raises:
        RecordingError: It cannot be understood.
    """
    return decode(frame.snapshot, Snapshot)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return a message of the recording.

    Raises:
        RecordingError: It cannot be understood.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"holds a {kind.__name__} that cannot be understood: {error}") from None


def _pack(frame: Frame, dictionary: bytes, parts: list[bytes]) -> bytes:
    level = _SNAPSHOT_LEVEL
    packer = zlib.compressobj(level, zdict=dictionary[-_WINDOW:]) if dictionary else zlib.compressobj(level)
    packed = packer.compress(frame.snapshot) + packer.flush()
    raw = b"".join((*parts, frame.victims.astype("<u4").tobytes()))
    return _FRONT.pack(frame.stalled, len(packed)) + packed + zlib.compress(raw, _LEVEL)


def _unpack_victims(raw: bytes, offset: int) -> NDArray[np.int64]:
    try:
        return np.frombuffer(raw, "<u4", -1, offset).astype(np.int64)
    except ValueError as error:
        raise RecordingError(f"holds a moment that cannot be read: {error}") from None


def _unpack(payload: bytes, dictionary: bytes) -> tuple[bool, bytes, bytes]:
    try:
        stalled, size = _FRONT.unpack_from(payload)
        packed = payload[_FRONT.size : _FRONT.size + size]
        unpacker = zlib.decompressobj(zdict=dictionary[-_WINDOW:]) if dictionary else zlib.decompressobj()
        snapshot = unpacker.decompress(packed, _MAX_RAW)
        rest = zlib.decompressobj()
        raw = rest.decompress(payload[_FRONT.size + size :], _MAX_RAW)
    except (struct.error, zlib.error) as error:
        raise RecordingError(f"holds a moment that cannot be unpacked: {error}") from None
    if not (unpacker.eof and rest.eof):
        raise RecordingError("holds a moment that is cut short")
    return bool(stalled), snapshot, raw
