"""Storage: where keys and values lie. The protocol, the kind that keeps none, and how copies are cut into runs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allocator.ids import IdArray, Tier
from allocator.plans import CopyJob


class Storage(Protocol):
    """Memory for the blocks of both tiers.

    Attributes:
        block_bytes: Bytes of one block; 0 when nothing is kept.
        device_name: ``cpu``, ``cuda:0`` or ``none``.
    """

    block_bytes: int
    device_name: str

    def copy(self, job: CopyJob) -> int:
        """Copy blocks and return the bytes read. Sources and destinations do not overlap.

        Raises:
            StorageError: A copy failed; destinations may hold anything, sources are whole.
        """

    def resize(self, tier: Tier, num_blocks: int) -> None:
        """Grow by adding slabs, or shrink by giving back whole slabs above the end.

        Raises:
            StorageError: No memory; the size is as it was.
        """

    def write_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> None:
        """Write a stamp into every layer and part of each slot. [n], [n]"""

    def check_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which slots hold their stamp in every layer and part. [n]"""

    def flip_bit(self, tier: Tier, slot: int, bit: int) -> None:
        """Flip one bit of what ``check_stamps`` reads in a slot: a fault for tests. ``bit`` wraps around."""

    def num_slabs(self, tier: Tier) -> int:
        """Return how many slabs a tier has."""

    def close(self) -> None:
        """Give all memory back."""


class NoStorage:
    """Keeps nothing: for bookkeeping alone, where copies cost nothing and stamps are refused by the configuration."""

    block_bytes = 0
    device_name = "none"

    def copy(self, job: CopyJob) -> int:
        return 0

    def resize(self, tier: Tier, num_blocks: int) -> None:
        pass

    def write_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> None:
        pass

    def check_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return np.ones(len(slots), bool)

    def flip_bit(self, tier: Tier, slot: int, bit: int) -> None:
        pass

    def num_slabs(self, tier: Tier) -> int:
        return 0

    def close(self) -> None:
        pass


def copy_runs(
    sources: IdArray, destinations: IdArray, source_slab: int, destination_slab: int
) -> list[tuple[int, int, int]]:
    """Cut a copy into the fewest runs of consecutive blocks on both sides, within slabs.

    Returns:
        (first source, first destination, blocks) of each run, sorted by source. [r]

    Source: sorting and coalescing before copying, measured against gather and scatter; a loop of
        plain copies wins on a CPU because it makes no temporary.
    """
    if len(sources) == 0:
        return []
    order = np.argsort(sources, kind="stable")
    src, dst = sources[order], destinations[order]
    starts = np.flatnonzero(
        (np.diff(src) != 1) | (np.diff(dst) != 1) | (src[1:] % source_slab == 0) | (dst[1:] % destination_slab == 0)
    )
    first = np.concatenate(([0], starts + 1))
    lengths = np.diff(np.concatenate((first, [len(src)])))
    return list(zip(src[first].tolist(), dst[first].tolist(), lengths.tolist(), strict=True))
