"""BlockFacts: the flat per-block arrays of one tier's pool. Written by ``BlockPool`` alone.

``state`` is the pool's hot memory: one byte a block, whose low bits say how many holders the
block has and whose ``KEY`` bit says that the prefix cache knows its content. A block that has
the bit and no holder is cached. ``refs`` counts holders of shared blocks only: with one holder the byte
says it all, so the common allocate and release touch one byte a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from allocator.ids import BlockState

FREE: Final = 0
SOLE: Final = 1
SHARED: Final = 2
RESERVED: Final = 4
#: Not a state: what an id outside the pool finds.
INVALID: Final = 7
#: Bit: the block's content has a key in the prefix cache. The top one, so that ``bytes.isascii`` tells at C speed
#: whether any block of a table has a key.
KEY: Final = 128
CACHED: Final = FREE | KEY
#: Steps beyond this one are shown as this one: what a map's ``last_used`` can hold.
LAST_STEP: Final = (1 << 32) - 1
HOLDERS_MASK: Final = SOLE | SHARED


class BlockFacts:
    """Flat arrays over all blocks of one tier.

    Attributes:
        state_bytes: The state bytes, for scalar access, and as many ``INVALID`` ones after them. [2n]
        guarded: The same memory as an array: a negative id or one just beyond the end finds ``INVALID``, so one
            gather checks range and state at once. [2n] uint8
        state: Its first half, the blocks' states. [n] uint8
        mark: Scratch, to see whether ids repeat. [n] int32
        refs: Holders of each shared block; meaningless for others. [n] int32
        flags: ``BlockFlag`` bits. [n] uint8
        stamp: Number of the release that last made the block cached; in LRU one for all blocks of a call. [n] int64
        inserted: Number of the insertion that gave it its key. [n] int64
        uses: Hits since that insertion. [n] int32
        last_used: Step of its last release. [n] uint32
        num_flagged: Blocks with any flag, so that the usual case of none costs nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.state_bytes = bytearray(num_blocks) + bytes([INVALID]) * num_blocks
        self.guarded: NDArray[np.uint8] = np.frombuffer(self.state_bytes, np.uint8)
        self.state: NDArray[np.uint8] = self.guarded[:num_blocks]
        self.mark = np.zeros(num_blocks, np.int32)
        self.refs = np.zeros(num_blocks, np.int32)
        self.flags = np.zeros(num_blocks, np.uint8)
        self.stamp = np.zeros(num_blocks, np.int64)
        self.inserted = np.zeros(num_blocks, np.int64)
        self.uses = np.zeros(num_blocks, np.int32)
        self.last_used = np.zeros(num_blocks, np.uint32)
        self.num_flagged = 0

    @property
    def num_blocks(self) -> int:
        """Blocks the arrays describe."""
        return len(self.state)

    def resized(self, num_blocks: int) -> BlockFacts:
        """Return facts for ``num_blocks`` blocks: the common part copied, new blocks free."""
        other = BlockFacts(num_blocks)
        common = min(num_blocks, self.num_blocks)
        for mine, theirs in zip((self.flags, *self._moving()), (other.flags, *other._moving()), strict=True):
            theirs[:common] = mine[:common]
        other.num_flagged = int(np.count_nonzero(other.flags))
        return other

    def restate_sole(self, block_ids: Sequence[int], state: int) -> bool:
        """Give blocks with one holder and no key a new state; change nothing and return False if any is not that.

        A repeated id fails too: the second time it has the new state. Without numpy, for a handful of ids.
        """
        states, top = self.state_bytes, len(self.state)
        for done, block in enumerate(block_ids):
            if not 0 <= block < top or states[block] != SOLE:
                for other in block_ids[:done]:
                    states[other] = SOLE
                return False
            states[block] = state
        return True

    def ref_counts(self) -> NDArray[np.int32]:
        """Return the reference count of every block. [n]"""
        holders = self.state & HOLDERS_MASK
        return np.where(holders == SHARED, self.refs, (holders == SOLE).astype(np.int32))

    def publish_states(self, out: NDArray[np.uint8]) -> None:
        """Write every block's ``BlockState``. [n]"""
        # The states that matter are single bits or single values: a few byte-wide passes beat any table.
        state = self.state
        np.multiply((state & HOLDERS_MASK) != 0, np.uint8(BlockState.ACTIVE), out=out)
        out += (state == CACHED).view(np.uint8) * np.uint8(BlockState.CACHED)
        out += (state == RESERVED).view(np.uint8) * np.uint8(BlockState.RESERVED)

    def publish_ref_counts(self, out: NDArray[np.uint16]) -> None:
        """Write every block's reference count, saturated. [n]"""
        # SOLE and SHARED are single bits, so two cheap passes replace comparisons over wider types.
        out[:] = self.state & SOLE
        shared = ((self.state & SHARED) >> 1).view(np.bool_).nonzero()[0]
        out[shared] = np.minimum(self.refs[shared], 65535)

    def move(self, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """Give ``destinations`` everything ``sources`` are, flags aside; sources become free."""
        for array in self._moving():
            array[destinations] = array[sources]
        self.state[sources] = FREE

    def _moving(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays that describe content, and so go with it when it moves."""
        return (self.state, self.refs, self.stamp, self.inserted, self.uses, self.last_used)
