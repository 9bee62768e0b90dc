"""Changes: which blocks of a tier have just moved, so that the map can mark them for a moment. Owns their expiry."""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.events import Event

Watch = Literal["moves", "all", "off"]
WATCHES: Final[tuple[Watch, ...]] = ("moves", "all", "off")
#: How long a change stays marked. [s]
FLASH_S: Final = 1.0
#: Kinds of events after which blocks have moved.
MOVING: Final = frozenset({"compact", "swap-out", "swap-in", "resize", "fork", "pin"})
_MAX_MARKS: Final = 64


class Changes:
    """Compares each reading of one tier with the one before."""

    def __init__(self) -> None:
        self._last: BlockArrays | None = None
        self._marks: deque[tuple[float, NDArray[np.int64]]] = deque(maxlen=_MAX_MARKS)

    def note(self, arrays: BlockArrays, now_s: float, *, marks: bool) -> None:
        """Take the next reading; with ``marks``, mark the blocks that differ from the one before."""
        last, self._last = self._last, arrays
        if not marks or last is None or last is arrays or last.num_blocks != arrays.num_blocks:
            return
        differs = (last.state != arrays.state) | (last.owner != arrays.owner) | (last.flags != arrays.flags)
        ids = np.flatnonzero(differs)
        if len(ids):
            self._marks.append((now_s + FLASH_S, ids))

    def marked(self, now_s: float) -> NDArray[np.int64]:
        """Return the blocks marked at ``now_s``; repeats allowed. [n]"""
        while self._marks and self._marks[0][0] <= now_s:
            self._marks.popleft()
        return np.concatenate([ids for _, ids in self._marks]) if self._marks else np.empty(0, np.int64)

    def forget(self) -> None:
        """Drop every mark."""
        self._marks.clear()


def have_moved(events: tuple[Event, ...], since: int) -> bool:
    """Return whether an event numbered ``since`` or later moved blocks."""
    return any(e.kind in MOVING for e in reversed(events) if e.number >= since)
