"""Observation and RemoteObservation: one reading of one engine. What a source cannot know is ``None``. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.snapshot import Snapshot
from kvtop.model.mirror import MirrorReading
from kvtop.model.remote import RemoteFacts

#: Victims that one reading tells, at most.
MAX_VICTIMS: Final = 64


class Focus(msgspec.Struct, frozen=True):
    """What the reader wants in detail, besides the whole.

    Attributes:
        seq_id: A sequence whose block table is wanted.
        block_id: A device block whose holders are wanted.
        next_event: Number of the first event not yet seen.
        max_events: How many of the newest are enough; ``None`` is all that are kept.
        num_victims: How many of the next blocks to be evicted are wanted, at most ``MAX_VICTIMS``.
        lineage: Whether it is wanted who shares blocks with whom.
    """

    seq_id: int | None = None
    block_id: int | None = None
    next_event: int = 0
    num_victims: int = 0
    lineage: bool = False
    max_events: int | None = None


class BlockHolders(msgspec.Struct, frozen=True):
    """Who holds one device block.

    Attributes:
        block_id: The block.
        holders: (sequence id, position in its block table), at most 64 of them.
        total: How many holders there are in all.
    """

    block_id: int
    holders: tuple[tuple[int, int], ...]
    total: int


class Kin(msgspec.Struct, frozen=True):
    """What one sequence shares with an older one.

    Attributes:
        seq_id: The sequence.
        parent: The older one.
        blocks: How many of the first blocks of both are the same.
    """

    seq_id: int
    parent: int
    blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One reading.

    Attributes:
        snapshot: The engine's state, arrays aside.
        device: Device tier arrays; ``None`` when this source does not offer them.
        host: Host tier arrays; ``None`` when there is no host tier or it is not offered.
        focus_table: Device block ids of the focused sequence, in token order; ``None`` when not asked or gone.
        focus_block: Holders of the focused block; ``None`` when not asked or not offered.
        next_victims: Device blocks that would be evicted next, in order; ``None`` when not asked or not offered.
        lineage: What sequences share with older ones; ``None`` when not asked or not offered.
    """

    snapshot: Snapshot
    device: BlockArrays | None
    host: BlockArrays | None
    focus_table: NDArray[np.int64] | None = None
    focus_block: BlockHolders | None = None
    next_victims: tuple[int, ...] | None = None
    lineage: tuple[Kin, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RemoteObservation:
    """One reading of an engine over the network, which is not one of ours: no snapshot, no arrays of its own.

    Attributes:
        facts: What it tells.
        mirror: Its resident blocks as kvtop lays them out; ``None`` without cache events.
    """

    facts: RemoteFacts
    mirror: MirrorReading | None = None
