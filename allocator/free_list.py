"""FreeList: the ids of free blocks, each once; last in, first out. Owned by one ``BlockPool``.

An int64 stack for batches, and in front of it a short Python list for single blocks: numpy wins
from about 8 ids on, a list below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from allocator.ids import IdArray

#: Batches below this many ids take the scalar path.
SCALAR_BELOW: Final = 8
_SLAB: Final = 256


class FreeList:
    """A stack of block ids. A new one hands ids out in ascending order.

    Attributes:
        stack: Ids; those below ``top`` are listed. [capacity] int64
        top: How many ids of ``stack`` are listed.
        front: Ids listed before those of the stack, next to be handed out last.
    """

    def __init__(self, num_blocks: int) -> None:
        self.stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self.top = num_blocks
        self.front: list[int] = []

    def __len__(self) -> int:
        return self.top + len(self.front)

    def take_few(self, n: int) -> list[int]:
        """Remove and return ``n`` ids, fewer than ``SCALAR_BELOW``; the caller has checked that there are as many."""
        front = self.front
        if len(front) < n:
            take = min(_SLAB, self.top)
            self.top -= take
            front[:0] = self.stack[self.top : self.top + take].tolist()
        if n == 1:
            return [front.pop()]
        ids = front[: -n - 1 : -1]
        del front[-n:]
        return ids

    def take_many(self, n: int) -> IdArray:
        """Remove and return ``n`` ids; the caller has checked that there are as many. [n]"""
        top = self.top
        if top < n:
            self._spill(len(self.front))
            top = self.top
        ids = self.stack[top - n : top][::-1].copy()
        self.top = top - n
        return ids

    def put_few(self, ids: Sequence[int]) -> None:
        """Add ids, the last of them to be handed out first."""
        self.front += ids
        if len(self.front) > 2 * _SLAB:
            self._spill(_SLAB)

    def put_many(self, ids: IdArray) -> None:
        """Add ids, the last of them to be handed out first. [n]"""
        top = self.top + len(ids)
        if top + len(self.front) > len(self.stack):
            self._reserve(top + len(self.front))
        self.stack[self.top : top] = ids
        self.top = top

    def ids(self) -> IdArray:
        """Return all ids, next to be handed out last. [len(self)]"""
        return np.concatenate((self.stack[: self.top], np.asarray(self.front, np.int64)))

    def replace(self, ids: IdArray) -> None:
        """Hold exactly these ids. [n]"""
        if len(ids) > len(self.stack):
            self._reserve(len(ids))
        self.front.clear()
        self.stack[: len(ids)] = ids
        self.top = len(ids)

    def _spill(self, count: int) -> None:
        """Move the ``count`` ids that are deepest in the front list to the top of the stack."""
        moved = np.asarray(self.front[:count], np.int64)
        del self.front[:count]
        self.put_many(moved)

    def _reserve(self, capacity: int) -> None:
        grown = np.empty(max(capacity, 2 * len(self.stack)), np.int64)
        grown[: self.top] = self.stack[: self.top]
        self.stack = grown
