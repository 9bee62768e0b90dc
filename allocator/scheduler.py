"""Scheduler: who runs, who waits, in which order, and who gives way. Owned by the engine.

The queue is ordered by policy, ties by arrival; a preempted sequence takes the place that its order gives it:

fcfs       by arrival
priority   higher class first; one that finds no room preempts lower classes
sjf        fewest tokens left first, aged: ``AGEING_TOKENS`` tokens are forgiven for each step since arrival

Ageing bounds the wait: whoever has n tokens left is passed by nobody that arrives n ÷ ``AGEING_TOKENS`` steps later
than it, or more. Since all age alike, an order is a fixed number, tokens left + ``AGEING_TOKENS`` × step of arrival,
and no queue is ever sorted anew.

The victim of a preemption is the last arrived of the lowest class; only the priority policy tells classes apart. So
the first arrived of the highest class among those that run always gets on.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from allocator.config import Policy
from allocator.ids import Status, WaitReason
from allocator.sequence import Sequence

#: Tokens left that ``sjf`` forgives a sequence for each step since it arrived.
AGEING_TOKENS: Final = 1


class Scheduler:
    """The queue and the running set.

    Attributes:
        policy: What orders the queue; changed by ``set_policy``.
        running: Sequences with device blocks, by arrival.
        waiting: Sequences without, in queue order: new, preempted, swapped.
        prefilling: The running sequences that do not decode yet, by id.
        by_row: Running sequences by their row.
    """

    def __init__(self, policy: Policy = "fcfs") -> None:
        self.policy: Policy = policy
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.prefilling: dict[int, Sequence] = {}
        self.by_row: dict[int, Sequence] = {}
        self._by_id: dict[int, Sequence] = {}
        self._rows: NDArray[np.int64] | None = None
        self._targets: NDArray[np.int64] | None = None

    def set_policy(self, policy: Policy) -> None:
        """Order the queue by another policy from here on."""
        self.policy = policy
        for sequence in self._by_id.values():
            sequence.order = queue_order(sequence, policy)
        self.waiting.sort(key=_order)

    def add_waiting(self, sequence: Sequence) -> None:
        """Queue a sequence at the place of its order."""
        sequence.order = queue_order(sequence, self.policy)
        if not self.waiting or self.waiting[-1].order < sequence.order:
            self.waiting.append(sequence)
        else:
            bisect.insort(self.waiting, sequence, key=_order)
        self._by_id[sequence.seq_id] = sequence

    def start(self, sequence: Sequence) -> None:
        """Move a sequence that has got its row from the queue to the running set; it does not decode yet."""
        assert sequence.row is not None
        self._unqueue(sequence)
        self.by_row[sequence.row] = sequence
        sequence.status, sequence.reason, sequence.reason_kind = Status.RUNNING, "", None
        if not self.running or self.running[-1].seq_id < sequence.seq_id:
            self.running.append(sequence)
        else:
            bisect.insort(self.running, sequence, key=_arrival)
        self.prefilling[sequence.seq_id] = sequence

    def begin_decoding(self, sequence: Sequence) -> None:
        """Let a running sequence decode, since all its tokens to date are computed."""
        del self.prefilling[sequence.seq_id]
        self._rows = None

    def stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the running set or the queue; its row is still known."""
        if sequence.status is Status.RUNNING:
            assert sequence.row is not None
            del self.by_row[sequence.row]
            del self.running[bisect.bisect_left(self.running, _arrival(sequence), key=_arrival)]
            self.prefilling.pop(sequence.seq_id, None)
            self._rows = None
        else:
            self._unqueue(sequence)
        del self._by_id[sequence.seq_id]

    def find(self, seq_id: int) -> Sequence | None:
        """Return the unfinished sequence of that id, or ``None``."""
        return self._by_id.get(seq_id)

    def next_waiting(self, policy: Policy | None = None) -> Sequence | None:
        """Return the first sequence in the queue that no operator holds and that is not on its way in, or ``None``.

        Args:
            policy: By this one instead of the policy in force.
        """
        free = (s for s in self.waiting if not s.held and (s.transfer is None or s.row is not None))
        if policy is None:
            return next(free, None)
        return min(free, key=lambda s: queue_order(s, policy), default=None)

    def next_victim(self, spared: Container[int] = ()) -> Sequence | None:
        """Return the running sequence that gives way first: the last arrived of the lowest class.

        Args:
            spared: Ids of sequences that must not.
        """
        candidates = [s for s in self.running if s.seq_id not in spared] if spared else self.running
        if not candidates:
            return None
        if self.policy != "priority":
            return candidates[-1]
        return min(candidates, key=lambda s: (s.priority, -s.seq_id))

    def below(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that ``sequence`` may preempt to be admitted, next victim first."""
        if self.policy != "priority":
            return []
        lower = [s for s in self.running if s.priority < sequence.priority]
        return sorted(lower, key=lambda s: (s.priority, -s.seq_id))

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the decoding sequences' rows and the tokens at which each finishes or forks, by arrival. [r], [r]"""
        if self._rows is None or self._targets is None:
            decoding = self.running
            if self.prefilling:
                decoding = [s for s in self.running if s.seq_id not in self.prefilling]
            self._rows = np.array([s.row for s in decoding], np.int64)
            self._targets = np.array([s.next_stop for s in decoding], np.int64)
        return self._rows, self._targets

    def reasons(self, *, paused: bool = False) -> Iterator[tuple[Sequence, WaitReason, str]]:
        """Yield every waiting sequence in queue order, with why it waits: the kind, and the text with the numbers.

        Args:
            paused: Whether the engine stands, so that nobody is tried.
        """
        first = self.next_waiting()
        for sequence in self.waiting:
            if sequence.held:
                yield sequence, "held", "held by the operator"
            elif sequence.transfer is not None:
                way = "back to the device" if sequence.row is None else "to the host tier"
                yield sequence, "copying", f"copying: on its way {way}"
            elif sequence is not first:
                assert first is not None
                if sequence.reason_kind == "host-full":
                    yield sequence, "host-full", f"{sequence.reason}; behind #{first.seq_id}"
                else:
                    yield sequence, "behind", f"behind #{first.seq_id}"
            elif sequence.reason_kind is not None:
                yield sequence, sequence.reason_kind, sequence.reason
            elif paused:
                yield sequence, "paused", "paused: nobody is admitted"
            else:
                yield sequence, "next", "first in the queue, to be tried in the next step"

    def _unqueue(self, sequence: Sequence) -> None:
        # Nearly always it is the first that starts.
        at = 0 if self.waiting[0] is sequence else bisect.bisect_left(self.waiting, sequence.order, key=_order)
        assert self.waiting[at] is sequence
        del self.waiting[at]


def queue_order(sequence: Sequence, policy: Policy) -> tuple[int, int]:
    """Return the place of a sequence in the queue of ``policy``: the lowest goes first."""
    if policy == "priority":
        return -sequence.priority, sequence.seq_id
    if policy == "sjf":
        left = sequence.num_target - sequence.num_computed
        return left + AGEING_TOKENS * sequence.arrived_step, sequence.seq_id
    return 0, sequence.seq_id


def _arrival(sequence: Sequence) -> int:
    return sequence.seq_id


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
