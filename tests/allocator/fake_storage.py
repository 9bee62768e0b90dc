"""ListStorage: a storage of plain lists that checks its callers and fails when told to."""

from __future__ import annotations

import numpy as np

from allocator.errors import StorageError
from allocator.ids import IdArray, Tier
from allocator.plans import CopyJob

GARBAGE = -1


class ListStorage:
    """Keeps one stamp a slot.

    Attributes:
        slots: Stamps of each tier's slots, by slot number.
        copies: Calls of ``copy`` that had something to copy.
        fail_after: Copies that still succeed; ``None`` is all. The one that fails ruins its destinations.
        fail_resize: Whether growing fails.
    """

    device_name = "lists"

    def __init__(self, block_size: int, block_bytes: int = 10) -> None:
        self.block_size, self.block_bytes = block_size, block_bytes
        self.slots: dict[Tier, list[int]] = {"device": [], "host": []}
        self.copies = 0
        self.fail_after: int | None = None
        self.fail_resize = False

    def copy(self, job: CopyJob) -> int:
        sources, destinations = (
            self._checked(job.source_tier, job.sources),
            self._checked(job.destination_tier, job.destinations),
        )
        assert len(sources) == len(destinations) == len(set(destinations))
        if job.source_tier == job.destination_tier:
            assert not set(sources) & set(destinations), "a copy reads what it writes"
        if not sources:
            return 0
        failing = self.fail_after == 0
        if self.fail_after:
            self.fail_after -= 1
        self.copies += 1
        for source, destination in zip(sources, destinations, strict=True):
            content = self._block(job.source_tier, source)
            start = destination * self.block_size
            self.slots[job.destination_tier][start : start + self.block_size] = (
                [GARBAGE] * self.block_size if failing else content
            )
        if failing:
            raise StorageError("told to fail")
        return len(sources) * self.block_bytes

    def resize(self, tier: Tier, num_blocks: int) -> None:
        slots = self.slots[tier]
        missing = num_blocks * self.block_size - len(slots)
        if missing > 0 and self.fail_resize:
            raise StorageError("told to have no memory")
        slots += [GARBAGE] * max(0, missing)
        del slots[num_blocks * self.block_size :]

    def write_stamps(self, tier: Tier, slots: np.ndarray, stamps: np.ndarray) -> None:
        for slot, stamp in zip(slots.tolist(), stamps.tolist(), strict=True):
            assert 0 <= slot < len(self.slots[tier])
            self.slots[tier][slot] = stamp

    def check_stamps(self, tier: Tier, slots: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        return np.array([self.slots[tier][s] == v for s, v in zip(slots.tolist(), stamps.tolist(), strict=True)], bool)

    def flip_bit(self, tier: Tier, slot: int, bit: int) -> None:
        self.slots[tier][slot] ^= 1 << (bit % 64)

    def num_slabs(self, tier: Tier) -> int:
        return 1

    def close(self) -> None:
        for slots in self.slots.values():
            slots.clear()

    def _block(self, tier: Tier, block: int) -> list[int]:
        return self.slots[tier][block * self.block_size : (block + 1) * self.block_size]

    def _checked(self, tier: Tier, ids: IdArray) -> list[int]:
        blocks = ids.tolist()
        assert all(0 <= b < len(self.slots[tier]) // self.block_size for b in blocks)
        return blocks
