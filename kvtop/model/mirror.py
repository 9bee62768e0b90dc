"""Mirror: a remote cache's resident blocks, laid out by kvtop as a block map of its own. Frozen; unknown is None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from allocator.block_map import BlockArrays
from allocator.ids import Tier

#: What must stand beside every picture of a mirror.
PLACEMENT: Final = "placement is kvtop's, not the engine's"


@dataclass(frozen=True, slots=True)
class MirrorPlace:
    """A stretch of a mirror's blocks: one medium of one rank.

    Attributes:
        tier, first, size: Where it is drawn.
        medium, rank: What it is.
        resident: Block copies in it.
        is_sized: Whether the engine tells its size; otherwise it ends where the blocks seen so far did.
    """

    tier: Tier
    first: int
    size: int
    medium: str
    rank: int
    resident: int
    is_sized: bool


@dataclass(frozen=True, slots=True)
class MirrorBlock:
    """One resident block, as far as events tell it.

    Attributes:
        tier, block_id: Where kvtop draws it.
        hash64, parent64: Its hash, and that of the block before it; ``None`` for a first block, or when not told.
        is_first: Whether it begins a prompt.
        depth: Blocks from the first one to this one; ``None`` when the chain's beginning is not resident.
        tokens: Tokens in it; ``None`` when not told.
        copies: Copies of it in this medium of this rank.
        groups: Cache groups that have it there.
        branches: Resident blocks that follow it; ``None`` when there are too many blocks to count.
        stores: How often it was stored since the console joined.
        age_s, quiet_s: Seconds since it was first stored, and since it was last stored or found, by the engine's
            clock at its newest batch.
    """

    tier: Tier
    block_id: int
    hash64: int
    parent64: int | None
    is_first: bool
    depth: int | None
    tokens: int | None
    copies: int
    groups: tuple[int, ...]
    branches: int | None
    stores: int
    age_s: float
    quiet_s: float


@dataclass(frozen=True, slots=True, eq=False)
class MirrorReading:
    """One reading of a mirror.

    Attributes:
        version: Equal versions have equal arrays.
        device: The ranks' device blocks, one rank after the other.
        host: All other mediums, one after the other; ``None`` without any.
        places: What is drawn where.
        block_size: Tokens a block; 0 when not told.
        step: The newest batch's time, in the steps of ``last_used``.
        state: ``complete``, or why what is known is only part.
        block: The block that was asked for; ``None`` when nothing is known of it.

    In the arrays a resident block is ``CACHED``: events do not tell whether a request holds it. Its ``owner`` is a
    number for the branch of the prefix tree that it lies on; ``ref_count`` is 0 throughout, since nobody tells it.
    """

    version: int
    device: BlockArrays
    host: BlockArrays | None
    places: tuple[MirrorPlace, ...]
    block_size: int
    step: int
    state: str
    block: MirrorBlock | None = None
