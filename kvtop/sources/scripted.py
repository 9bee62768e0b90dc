"""ScriptedSource: plays a given list of observations, and fails when told to. For tests and lessons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from allocator.block_map import BlockArrays
from allocator.ids import NO_ROW, BlockState
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation, RemoteObservation


class ScriptedSource:
    """Gives the observations of a list in turn, and the last one ever after.

    Attributes:
        failure: While set, every reading raises ``SourceError`` with this text.
        asked: The focus of every reading, oldest first.
        closed: Whether ``close`` was called.
    """

    def __init__(
        self,
        observations: Sequence[Observation | RemoteObservation],
        *,
        name: str = "scripted",
        missing: Mapping[str, str] | None = None,
    ) -> None:
        if not observations:
            raise ValueError("observations: at least one is needed")
        self.name = name
        self.missing: Mapping[str, str] = dict(missing or {})
        self.failure: str | None = None
        self.asked: list[Focus] = []
        self.closed = False
        self._observations = list(observations)
        self._next = 0

    def read(self, focus: Focus, timeout_s: float) -> Observation | RemoteObservation:
        """Return the next observation, as it was written: the focus is noted, not answered."""
        self.asked.append(focus)
        if self.failure is not None:
            raise SourceError(self.failure)
        observation = self._observations[self._next]
        self._next = min(self._next + 1, len(self._observations) - 1)
        return observation

    def close(self) -> None:
        """Note that the reader let go."""
        self.closed = True


def block_arrays(
    state: ArrayLike,
    *,
    ref_count: ArrayLike | None = None,
    flags: ArrayLike | int = 0,
    fill: ArrayLike | int = 0,
    owner: ArrayLike | int = NO_ROW,
    last_used: ArrayLike | int = 0,
    hash64: ArrayLike | int = 0,
) -> BlockArrays:
    """Return arrays of as many blocks as there are states; a single value stands for all blocks.

    Args:
        state: ``BlockState`` of each block. [n]
        ref_count: References of each block; by default 1 where the block is active, else 0. [n]
        flags, fill, owner, last_used, hash64: As in ``BlockArrays``. [n] or one value
    """
    states = np.asarray(state, np.uint8)

    def spread(values: ArrayLike, dtype: type[np.generic]) -> np.ndarray:
        return np.array(np.broadcast_to(np.asarray(values), states.shape), dtype)

    return BlockArrays(
        state=states,
        flags=spread(flags, np.uint8),
        ref_count=spread(states == BlockState.ACTIVE if ref_count is None else ref_count, np.uint16),
        fill=spread(fill, np.uint16),
        owner=spread(owner, np.int32),
        last_used=spread(last_used, np.uint32),
        hash64=spread(hash64, np.uint64),
    )
