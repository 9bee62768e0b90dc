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

from allocator.ids import BlockState, IdArray

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


class ChangeLog:
    """Blocks of which something changed that their states need not show, once somebody wants to know.

    Args:
        room: Blocks it holds; with more it gives up until it is read again.
    """

    def __init__(self, room: int) -> None:
        self._room = self._left = room
        self._noted: list[IdArray] | None = None

    def note(self, block_ids: IdArray) -> None:
        """Write these blocks down. [n]"""
        if self._noted is None:
            return
        self._left -= len(block_ids)
        if self._left < 0:
            self._noted = None
        else:
            self._noted.append(block_ids.copy())

    def take(self) -> IdArray | None:
        """Return the blocks noted since the last call, repeats included; ``None`` when some may be missing. [n]"""
        noted, self._noted, self._left = self._noted, [], self._room
        if noted is None:
            return None
        return np.concatenate(noted) if noted else np.empty(0, np.int64)


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
        rekeyed: Blocks that lost a key, or moved.
        reused: Blocks with another ``last_used``.
        unshared: Blocks that several held and that lost a holder.
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
        # With more than an eighth of the pool written down, copying all of it costs no more.
        self.rekeyed, self.reused, self.unshared = (ChangeLog(max(64, num_blocks // 8)) for _ in range(3))

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

    def move(self, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """Give ``destinations`` everything ``sources`` are, flags aside; sources become free."""
        for array in self._moving():
            array[destinations] = array[sources]
        self.state[sources] = FREE

    def _moving(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays that describe content, and so go with it when it moves."""
        return (self.state, self.refs, self.stamp, self.inserted, self.uses, self.last_used)


def publish_states(state: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write the ``BlockState`` that each of a pool's state bytes stands for. [n], [n]"""
    # The states that matter are single bits or single values: a few byte-wide passes beat any table.
    np.multiply((state & HOLDERS_MASK) != 0, np.uint8(BlockState.ACTIVE), out=out)
    out += (state == CACHED).view(np.uint8) * np.uint8(BlockState.CACHED)
    reserved = state == RESERVED
    if reserved.any():
        out += reserved.view(np.uint8) * np.uint8(BlockState.RESERVED)
