"""Compute: what fills the slots of the tokens that an engine computes. The protocol, and its plainest kind, stamps."""

from __future__ import annotations

import collections.abc
from typing import Protocol

import numpy as np

from allocator import invariants
from allocator.content import slot_stamps
from allocator.manager import BlockManager
from allocator.sequence import Sequence
from allocator.snapshot import Verified
from allocator.storage import Storage


class Compute(Protocol):
    """Fills slots, and can tell later whether they still hold what they should.

    The engine calls it in the step that computes, for sequences that prefill or decode in it and no others. Their
    blocks are there, and those written to are held by nobody else.
    """

    def prefill(self, sequence: Sequence, start: int, stop: int) -> None:
        """Compute tokens ``start`` to ``stop`` of a sequence, all known beforehand; those before ``start`` are there.

        A prompt may come in several pieces. One that was found whole in the prefix cache comes as an empty piece:
        nothing is to be written, but what follows it may have to be computed.
        """

    def decode(self, sequences: collections.abc.Sequence[Sequence], steps: int) -> None:
        """Compute the next ``steps`` tokens of every sequence, after those its row counts as written."""

    def settle(self, steps: int) -> None:
        """End the steps in which the calls since the last one fell.

        Raises:
            InvariantViolation: Law 5: what was read from the pool is not what had been written.
        """

    def check(self, sequences: collections.abc.Sequence[invariants.Holder]) -> None:
        """Check law 5: every slot of these sequences, in either tier, holds what it should.

        Attached programs' sequences are among them, though they write what is theirs without this.

        Raises:
            InvariantViolation: Names the sequence and the first token whose slot holds something else.
        """

    @property
    def verified(self) -> Verified | None:
        """What was compared while computing; ``None`` where nothing is."""


class Stamps:
    """Writes a pattern into every slot in place of keys and values, and reads it back when asked to check."""

    verified = None

    def __init__(self, manager: BlockManager, storage: Storage) -> None:
        self._manager, self._storage = manager, storage

    def prefill(self, sequence: Sequence, start: int, stop: int) -> None:
        if start < stop:
            self._write([(sequence, start, stop)])

    def decode(self, sequences: collections.abc.Sequence[Sequence], steps: int) -> None:
        written = self._manager.tables.num_tokens
        starts = [int(written[sequence.row]) for sequence in sequences]
        self._write([(s, start, start + steps) for s, start in zip(sequences, starts, strict=True)])

    def settle(self, steps: int) -> None:
        pass

    def check(self, sequences: collections.abc.Sequence[invariants.Holder]) -> None:
        invariants.check_contents(self._manager, sequences)

    def _write(self, pieces: list[tuple[Sequence, int, int]]) -> None:
        manager = self._manager
        slots, tokens, positions = [], [], []
        for sequence, start, stop in pieces:
            assert sequence.row is not None
            slots.append(manager.slots("device", sequence.row, start, stop))
            tokens.append(sequence.content.tokens(start, stop))
            positions.append(np.arange(start, stop, dtype=np.int64))
        stamps = slot_stamps(np.concatenate(tokens), np.concatenate(positions))
        self._storage.write_stamps("device", np.concatenate(slots), stamps)
