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
    """A stack of block ids. A new one hands ids out in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._top = num_blocks
        self._front: list[int] = []

    def __len__(self) -> int:
        return self._top + len(self._front)

    def take_few(self, n: int) -> list[int]:
        """Remove and return ``n`` ids, fewer than ``SCALAR_BELOW``; the caller has checked that there are as many."""
        front = self._front
        if len(front) < n:
            take = min(_SLAB, self._top)
            self._top -= take
            front[:0] = self._stack[self._top : self._top + take].tolist()
        if n == 1:
            return [front.pop()]
        ids = front[: -n - 1 : -1]
        del front[-n:]
        return ids

    def take_many(self, n: int) -> IdArray:
        """Remove and return ``n`` ids; the caller has checked that there are as many. [n]"""
        top = self._top
        if top < n:
            self._spill(len(self._front))
            top = self._top
        ids = self._stack[top - n : top][::-1].copy()
        self._top = top - n
        return ids

    def put_few(self, ids: Sequence[int]) -> None:
        """Add ids, the last of them to be handed out first."""
        self._front += ids
        if len(self._front) > 2 * _SLAB:
            self._spill(_SLAB)

    def put_many(self, ids: IdArray) -> None:
        """Add ids, the last of them to be handed out first. [n]"""
        top = self._top + len(ids)
        if top + len(self._front) > len(self._stack):
            self._reserve(top + len(self._front))
        self._stack[self._top : top] = ids
        self._top = top

    def ids(self) -> IdArray:
        """Return all ids, next to be handed out last. [len(self)]"""
        return np.concatenate((self._stack[: self._top], np.asarray(self._front, np.int64)))

    def replace(self, ids: IdArray) -> None:
        """Hold exactly these ids. [n]"""
        if len(ids) > len(self._stack):
            self._reserve(len(ids))
        self._front.clear()
        self._stack[: len(ids)] = ids
        self._top = len(ids)

    def _spill(self, count: int) -> None:
        """Move the ``count`` ids that are deepest in the front list to the top of the stack."""
        moved = np.asarray(self._front[:count], np.int64)
        del self._front[:count]
        self.put_many(moved)

    def _reserve(self, capacity: int) -> None:
        grown = np.empty(max(capacity, 2 * len(self._stack)), np.int64)
        grown[: self._top] = self._stack[: self._top]
        self._stack = grown
