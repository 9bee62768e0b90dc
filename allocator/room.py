"""Room: blocks for the next tokens of running sequences, and who gives way when they are short. Part of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from allocator.errors import StorageError
from allocator.ids import IdArray
from allocator.manager import Extension
from allocator.sequence import Sequence
from allocator.snapshot import Counters

if TYPE_CHECKING:
    from allocator.engine import Engine


class Room:
    """The making of room in one engine.

    Args:
        engine: The engine.
        counters: Its totals, which are added to.
    """

    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._engine, self._counters = engine, counters
        self._manager, self._scheduler = engine.manager, engine.scheduler

    def make(self) -> tuple[IdArray, IdArray, bool]:
        """Give decoding sequences room for their next token, preempting whoever gives way first when blocks are short.

        A sequence whose last block is being copied, or that finds no block while some are on their way, sits this step
        out.

        Returns:
            Rows that decode in this step, the tokens at which each finishes, and whether blocks were short. [d], [d]
        """
        manager, scheduler, short = self._manager, self._scheduler, False
        for sequence in list(scheduler.prefilling.values()):
            if manager.tables.num_tokens[sequence.row] >= sequence.num_tokens:
                scheduler.begin_decoding(sequence)
        while True:
            rows, targets = scheduler.rows()
            ready = self._writable(rows)
            if ready is not None:
                rows, targets = rows[ready], targets[ready]
            if not len(rows):
                return rows, targets, short
            with manager.lock:
                need, room = manager.plan_extension(rows), manager.device.num_allocatable
                if need.num_blocks <= room:
                    return *self._extend(rows, targets, need), short
                if self.can_wait(need.num_blocks - room):
                    needy = np.isin(rows, np.concatenate((need.growing, need.copying)))
                    fits = ~needy | (np.cumsum(needy) <= room)
                    rows, targets = rows[fits], targets[fits]
                    if not len(rows):
                        return rows, targets, True
                    return *self._extend(rows, targets, manager.plan_extension(rows)), True
            short = True
            self._counters.failures_capacity += 1
            victim = scheduler.next_victim()
            assert victim is not None
            self.preempt(victim)

    def can_wait(self, missing: int) -> bool:
        """Whether copies under way will give ``missing`` blocks, or nobody can be preempted before one has ended."""
        copies = self._engine.copies
        return missing <= copies.pending_blocks or (self._engine.config.preempt == "swap" and not copies.has_room)

    def make_writable(self, row: int) -> bool:
        """Return whether the next token of a row may be written now; begin the copy of a shared last block.

        Raises:
            OutOfBlocks: None is left for that copy.
        """
        rows = np.array([row])
        ready = self._writable(rows)
        if ready is not None and not ready.all():
            return False
        manager = self._manager
        with manager.lock:
            copying = manager.plan_extension(rows).copying
            if len(copying):
                manager.require(1, 0)
                self._copy_on_write(copying)
        return not len(copying)

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence since another finds no blocks, and weigh whether that still pays."""
        assert sequence.row is not None
        engine = self._engine
        lost = int(self._manager.tables.num_tokens[sequence.row])
        engine.swaps.preempt(sequence, engine.config.preempt)
        generated, running = self._counters.generated_tokens, len(self._scheduler.running)
        if (text := engine.thrash.preempted(engine.step, lost, generated, running)) is not None:
            engine.emit("note", text)

    def _writable(self, rows: IdArray) -> NDArray[np.bool_] | None:
        """Return which rows no copy keeps from being written; ``None`` stands for all of them. [n]"""
        manager = self._manager
        if not manager.transfers.num_open:
            return None
        taken = [manager.sequences.any_taken((row,)) for row in rows.tolist()]
        return ~(np.array(taken, bool) | np.isin(rows, manager.fenced_tails(rows)))

    def _extend(self, rows: IdArray, targets: IdArray, need: Extension) -> tuple[IdArray, IdArray]:
        """Give blocks to growing rows and start the copies of others; return the rows that can be written at once."""
        manager = self._manager
        manager.add_blocks(need.growing)
        copying = need.copying
        if not len(copying):
            return rows, targets
        self._copy_on_write(copying)
        at_once = ~np.isin(rows, copying)
        # A block that is being copied must not change; the last of its writers waits too.
        at_once &= ~np.isin(rows, manager.fenced_tails(rows))
        return rows[at_once], targets[at_once]

    def _copy_on_write(self, rows: IdArray) -> None:
        """Begin to give each of these rows a last block of its own; without a slot they try again at the next step."""
        self._engine.copies.start(
            lambda: self._manager.transfers.begin_copy_on_write(rows),
            self._engine.step,
            lambda: None,
            lambda error: self._recompute_copying(rows, error),
        )

    def _recompute_copying(self, rows: IdArray, error: StorageError) -> None:
        """Preempt sequences whose copy-on-write failed: computing anew needs no copy, so it cannot fail too."""
        self._engine.emit("fault", f"copy-on-write failed: {error}")
        for row in rows.tolist():
            self._engine.swaps.preempt(self._scheduler.by_row[row], "recompute")
