"""Placement: kvtop's own numbering of the resident blocks that events tell of, so that a map can draw them.

Events carry no place. A copy takes the lowest free place of its medium and rank, and keeps it until it is removed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

import numpy as np

from allocator.block_map import BlockArrays
from allocator.config import STEP_S
from allocator.ids import NO_ROW, BlockState, Tier
from kvtop.model.mirror import MirrorPlace

#: The medium that is drawn as the device tier; all others are the host tier.
DEVICE: Final = "GPU"
#: A place of unknown size is drawn in whole lines of this many.
_ROUND: Final = 64
_MAX_FILL: Final = 0xFFFF
_MAX_OWNER: Final = 0x7FFFFFFF
_MAX_STEP: Final = 0xFFFFFFFF

#: Rank, medium.
Medium = tuple[int, str]


class Region:
    """The places of one medium of one rank.

    Attributes:
        resident: Places taken.
        hashes, groups, owners: Of the copy at each place: hash, cache group, and number of its branch.
        last_s: When it was last stored, followed, or found by a request. [s]
    """

    __slots__ = ("_fill", "_free", "_state", "groups", "hashes", "last_s", "owners", "resident")

    def __init__(self) -> None:
        self.resident = 0
        self.hashes, self.groups, self.owners = array("Q"), array("q"), array("q")
        self.last_s = array("d")
        self._fill, self._state = array("H"), array("B")
        self._free: list[int] = []

    @property
    def top(self) -> int:
        """Places that were ever taken."""
        return len(self.hashes)

    def place(self, h: int, group: int, owner: int, tokens: int, time_s: float) -> int:
        """Take a place for a copy and return it."""
        self.resident += 1
        tokens = min(tokens, _MAX_FILL)
        if not self._free:
            self.hashes.append(h)
            self.groups.append(group)
            self.owners.append(owner)
            self.last_s.append(time_s)
            self._fill.append(tokens)
            self._state.append(BlockState.CACHED)
            return len(self.hashes) - 1
        at = heappop(self._free)
        self.hashes[at], self.groups[at], self.owners[at] = h, group, owner
        self.last_s[at], self._fill[at], self._state[at] = time_s, tokens, BlockState.CACHED
        return at

    def leave(self, at: int) -> None:
        """Give a place back."""
        self.resident -= 1
        self._state[at] = BlockState.FREE
        heappush(self._free, at)

    def is_taken(self, at: int) -> bool:
        """Return whether a copy is there."""
        return 0 <= at < len(self._state) and self._state[at] == BlockState.CACHED

    def tokens(self, at: int) -> int:
        """Return the tokens in the copy at a place; 0 when not told."""
        return self._fill[at]

    def write(self, arrays: BlockArrays, first: int, size: int, base_s: float) -> None:
        """Write this region into a map's arrays, from block ``first`` on."""
        whole = slice(first, first + size)
        arrays.state[whole], arrays.owner[whole] = BlockState.FREE, NO_ROW
        for name in ("hash64", "fill", "last_used"):
            getattr(arrays, name)[whole] = 0
        if not self.top:
            return
        part = slice(first, first + self.top)
        taken = np.frombuffer(self._state, np.uint8) == BlockState.CACHED
        steps = (np.frombuffer(self.last_s, np.float64) - base_s) / STEP_S
        arrays.state[part][taken] = BlockState.CACHED
        for into, told in (
            (arrays.owner, np.frombuffer(self.owners, np.int64) & _MAX_OWNER),
            (arrays.hash64, np.frombuffer(self.hashes, np.uint64)),
            (arrays.fill, np.frombuffer(self._fill, np.uint16)),
            (arrays.last_used, np.clip(steps, 0, _MAX_STEP)),
        ):
            into[part][taken] = told[taken]


def places_of(regions: Mapping[Medium, Region], sizes: Mapping[int, int]) -> tuple[MirrorPlace, ...]:
    """Return where each region is drawn: the device by rank, then the other mediums by name and rank.

    Args:
        regions: What there is.
        sizes: Blocks of the device by rank, where the engine tells it.
    """
    found = []
    firsts: dict[Tier, int] = {"device": 0, "host": 0}
    for rank, medium in sorted(regions, key=lambda key: (key[1] != DEVICE, key[1], key[0])):
        region, tier = regions[rank, medium], _tier(medium)
        told = sizes.get(rank) if tier == "device" else None
        size = max(told or 0, region.top)
        if told is None:
            size = -(-size // _ROUND) * _ROUND
        found.append(MirrorPlace(tier, firsts[tier], size, medium, rank, region.resident, told is not None))
        firsts[tier] += size
    return tuple(found)


def arrays_of(
    tier: Tier, places: Sequence[MirrorPlace], regions: Mapping[Medium, Region], base_s: float
) -> BlockArrays | None:
    """Return one tier's arrays; ``None`` when nothing is there. Cost: a few vector passes."""
    shown = [place for place in places if place.tier == tier]
    if not sum(place.size for place in shown):
        return None
    arrays = BlockArrays.empty(sum(place.size for place in shown))
    arrays.ref_count[:] = 0
    arrays.flags[:] = 0
    for place in shown:
        regions[place.rank, place.medium].write(arrays, place.first, place.size, base_s)
    return arrays


def _tier(medium: str) -> Tier:
    return "device" if medium == DEVICE else "host"
