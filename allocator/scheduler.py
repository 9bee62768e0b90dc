"""Scheduler: who runs, who waits and why. First come, first served; owned by the engine.

Sequences are queued by arrival number, preempted ones at the place their arrival gives them. The victim
of a preemption is the running sequence that arrived last, so the first one always gets on.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from allocator.ids import Status
from allocator.sequence import Sequence


class Scheduler:
    """The queue and the running set.

    Attributes:
        running: Sequences with device blocks, by arrival.
        waiting: Sequences without, by arrival: new, preempted, swapped.
        by_row: Running sequences by their row.
    """

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.by_row: dict[int, Sequence] = {}
        self._rows: NDArray[np.int64] | None = None
        self._targets: NDArray[np.int64] | None = None

    def add_waiting(self, sequence: Sequence) -> None:
        """Queue a sequence at the place of its arrival."""
        bisect.insort(self.waiting, sequence, key=_arrival)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence that has got its row from the queue to the running set."""
        assert sequence.row is not None
        self.by_row[sequence.row] = sequence
        self.waiting.remove(sequence)
        sequence.status, sequence.reason = Status.RUNNING, ""
        bisect.insort(self.running, sequence, key=_arrival)
        self._rows = None

    def stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the running set or the queue; its row is still known."""
        if sequence.status is Status.RUNNING:
            assert sequence.row is not None
            del self.by_row[sequence.row]
            self.running.remove(sequence)
            self._rows = None
        else:
            self.waiting.remove(sequence)

    def find(self, seq_id: int) -> Sequence | None:
        """Return the unfinished sequence of that id, or ``None``."""
        for group in (self.running, self.waiting):
            at = bisect.bisect_left(group, seq_id, key=_arrival)
            if at < len(group) and group[at].seq_id == seq_id:
                return group[at]
        return None

    def next_waiting(self) -> Sequence | None:
        """Return the first sequence in the queue that no operator holds and that is not on its way in, or ``None``."""
        return next((s for s in self.waiting if not s.held and (s.transfer is None or s.row is not None)), None)

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the running sequences' rows and the tokens at which each finishes, by arrival. [r], [r]"""
        if self._rows is None or self._targets is None:
            self._rows = np.array([s.row for s in self.running], np.int64)
            self._targets = np.array([s.num_target for s in self.running], np.int64)
        return self._rows, self._targets


def _arrival(sequence: Sequence) -> int:
    return sequence.seq_id
