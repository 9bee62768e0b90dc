"""The vocabulary of the allocator: ids, block states, flags, tiers. Owns no state.

Words used everywhere, in code, keys, help and metrics:

block          a run of ``block_size`` token slots; the unit of allocation
slot           one token's place: block ``slot // block_size``, offset ``slot % block_size``
sequence       one request's tokens, status and block table
block table    a sequence's physical block ids, in token order
ref_count      how many block-table entries name a block
allocatable    free + cached, neither fenced nor pinned: all that the next request could get
tier           where a block lives: ``device`` or ``host``
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final, Literal, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

SeqId = NewType("SeqId", int)
#: Names a full block's content and everything before it: the 16 bytes of a 128-bit chain hash, or of a trace's own
#: id; the first 8 are never all zero.
BlockKey: TypeAlias = bytes

IdArray: TypeAlias = NDArray[np.int64]
Tier = Literal["device", "host"]

#: Why a sequence waits. Of the first in the queue: too few blocks; enough, but for the watermark; no run long enough;
#: as many run as may; this step's prompt tokens are given out; the engine stands; not tried yet. Of any other: it is
#: held by an operator; its blocks are being copied; the host tier had no room for it, so that it is computed again; it
#: is behind the first.
WaitReason = Literal[
    "capacity", "watermark", "contiguous", "limit", "budget", "paused", "next", "held", "copying", "host-full", "behind"
]

#: The id of a block that does not exist, in arrays that cannot hold ``None`` (owner rows, remap tables).
NO_ROW: Final = -1


class BlockState(IntEnum):
    """The exclusive state of a block, as observers see it (DESIGN.md section 4)."""

    FREE = 0
    CACHED = 1
    ACTIVE = 2
    RESERVED = 3
    RETIRED = 4


class BlockFlag(IntFlag):
    """What a block may carry beside its state."""

    NONE = 0
    FENCED = 1
    PINNED = 2


class Status(IntEnum):
    """Where a sequence is in its life; the names are the ``status`` label of metrics and tables."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3
    CANCELLED = 4
    REFUSED = 5
