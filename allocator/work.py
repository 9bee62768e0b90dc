"""Work: a command under way, done a slice at a time, so that others are answered in between and it can be ended early.

Between two slices every law holds. An engine takes no step meanwhile: what a command does, it does at one step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

import numpy as np

from allocator.errors import Cancelled
from allocator.plans import CopyJob, MovePlan, Moves, Outcome, WorkProgress

#: A slice has at most so many blocks, and bytes. Small enough to be answered between two, large enough not to matter.
SLICE_BLOCKS: Final = 16_384
SLICE_BYTES: Final = 64 << 20
#: How the outcome of a cancelled command begins.
CANCELLED: Final = "cancelled"


class Work:
    """One command.

    Args:
        name: Its name.
        carry_out: Does it; yields between two slices, and returns the outcome.

    Attributes:
        total_blocks: Blocks to be copied; 0 where nothing is known to be.
        done_blocks: Blocks copied so far.
        settled_blocks: Of these, blocks of slices that cannot be taken back any more.
        is_cancelled: Whether it is to end before its next slice.
    """

    def __init__(self, name: str, carry_out: Callable[[Work], Generator[None, None, Outcome]]) -> None:
        self.name = name
        self.total_blocks = self.done_blocks = self.settled_blocks = 0
        self.is_cancelled = False
        self._slices = carry_out(self)

    def advance(self) -> Outcome | None:
        """Do the next slice; return the outcome after the last one, ``None`` before."""
        try:
            next(self._slices)
        except StopIteration as ended:
            outcome: Outcome = ended.value
            return outcome
        return None

    def finish(self) -> Outcome:
        """Do all that is left."""
        while (outcome := self.advance()) is None:
            pass
        return outcome

    def cancel(self) -> None:
        """Let it end before its next slice; what is done stays done, and the outcome says how much that is."""
        self.is_cancelled = True

    def check(self, what: str) -> None:
        """Raise if it was cancelled.

        Args:
            what: What that leaves behind.

        Raises:
            Cancelled: It was.
        """
        if self.is_cancelled:
            raise self.ended(what)

    def ended(self, what: str) -> Cancelled:
        """Return why it ends now; see ``check``."""
        return Cancelled(f"{CANCELLED} after {self.done_blocks:,} of {self.total_blocks:,} blocks: {what}")

    def progress(self) -> WorkProgress:
        """Return how far it is."""
        return WorkProgress(self.name, self.done_blocks, self.total_blocks)


def slice_blocks(block_bytes: int) -> int:
    """Return how many blocks of a size make a slice."""
    return max(1, min(SLICE_BLOCKS, SLICE_BYTES // max(1, block_bytes)))


def slices_of(plan: MovePlan, size: int) -> tuple[Moves, ...]:
    """Return a plan's stages in pieces of at most ``size`` moves, in an order in which they can be made.

    Each piece evicts what stands in its own way; what a stage evicts besides goes with the first.
    """
    return tuple(piece for stage in plan.stages for piece in _pieces(stage, size))


def _pieces(stage: Moves, size: int) -> tuple[Moves, ...]:
    if len(stage.sources) <= size:
        return (stage,)
    besides = stage.evicted[~np.isin(stage.evicted, stage.destinations)]
    pieces = []
    for start in range(0, len(stage.sources), size):
        targets = stage.destinations[start : start + size]
        evicted = targets[np.isin(targets, stage.evicted)]
        if start == 0:
            evicted = np.concatenate((evicted, besides))
        pieces.append(Moves(stage.sources[start : start + size], targets, evicted))
    return tuple(pieces)


def parts_of(job: CopyJob, size: int) -> tuple[CopyJob, ...]:
    """Return a copy in parts of at most ``size`` blocks."""
    n = len(job.sources)
    if n <= size:
        return (job,)
    return tuple(
        CopyJob(job.source_tier, job.sources[i : i + size], job.destination_tier, job.destinations[i : i + size])
        for i in range(0, n, size)
    )
