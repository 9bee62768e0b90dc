"""Swaps: sequences that leave the device before their end, and come back. Owns which of them are being copied.

A sequence leaves by swap, where the host tier has room, or gives its blocks up to be computed anew. Part of the
engine, which says who leaves and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.errors import CopyCancelled, OutOfBlocks, StorageError
from allocator.events import EventKind
from allocator.ids import Status
from allocator.sequence import Sequence
from allocator.snapshot import Counters
from allocator.transfers import Transfer

if TYPE_CHECKING:
    from allocator.engine import Engine


class Swaps:
    """The swaps and preemptions of one engine.

    Args:
        engine: The engine.
        counters: Its totals, which are added to.

    Attributes:
        by_row: Sequences being copied, by the device row that their copy reads or writes.
        given_way: Device rows of those preempted since a step began to give prompt tokens out.
    """

    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._engine, self._counters = engine, counters
        self.by_row: dict[int, Sequence] = {}
        self.given_way: list[int] = []

    def coming_in(self) -> list[Sequence]:
        """Return the sequences on their way back to the device."""
        return [s for s in self.by_row.values() if s.row is None]

    def preempt(self, sequence: Sequence, mode: str) -> str:
        """Take a running sequence off the device: by swap while the host tier has room, else by recompute.

        Returns:
            How: ``swap`` or ``recompute``.
        """
        engine, manager = self._engine, self._engine.manager
        engine.settle_for(sequence)
        if sequence.row is None:
            return "recompute"  # a copy that it waited for has failed meanwhile
        manager.trim(sequence.row)  # in the middle of a step it may have got room for a token it never wrote
        self.given_way.append(sequence.row)
        blocks = int(manager.tables.num_blocks[sequence.row])
        room, asked = manager.host.num_allocatable, mode
        if mode != "swap" or not self._start_out(sequence, preempted=True):
            mode = "recompute"
            engine.scheduler.stop(sequence)
            self._to_recompute(sequence)
            engine.scheduler.add_waiting(sequence)
        sequence.resumed = True
        sequence.waiting_since = engine.step
        if asked == "swap" and room < blocks:
            sequence.reason_kind = "host-full"
            sequence.reason = f"host tier full: {blocks} blocks needed, {room} free; to be computed again"
        engine.emit("preempt", f"sequence {sequence.seq_id} preempted by {mode}", sequence.seq_id, blocks)
        return mode

    def begin_out(self, sequence: Sequence) -> bool:
        """Begin to swap a running sequence out for an operator, who must bring it back; return whether it had room."""
        self._engine.settle_for(sequence)
        if not self._start_out(sequence, preempted=False):
            return False
        sequence.held, sequence.resumed = True, True
        return True

    def end_out(self, sequence: Sequence) -> bool:
        """Commit what ``begin_out`` began; return whether the copy worked."""
        engine = self._engine
        engine.settle()
        if sequence.host_row is None:
            return False
        blocks = int(engine.manager.host_tables.num_blocks[sequence.host_row])
        engine.emit("swap-out", f"sequence {sequence.seq_id} swapped out", sequence.seq_id, blocks)
        return True

    def begin_in(self, sequence: Sequence, *, keep: int = 0) -> bool:
        """Begin to bring a swapped sequence back; it runs once that is committed. Return whether a copy can start.

        Raises:
            OutOfBlocks: As in ``BlockManager.swap_in``; nothing changes.
        """
        assert sequence.host_row is not None
        engine, counters, host_row = self._engine, self._counters, sequence.host_row
        begun: list[Transfer] = []

        def begin() -> Transfer:
            transfer = engine.manager.transfers.begin_swap_in(
                host_row, sequence.keys, tokens=sequence.tokens, keep=keep, one_run=sequence.contiguous
            )
            begun.append(transfer)
            sequence.transfer = transfer
            self.by_row[transfer.row] = sequence
            return transfer

        def done() -> None:
            transfer = begun[0]
            copied = len(transfer.job.sources)
            del self.by_row[transfer.row]
            sequence.row, sequence.host_row, sequence.held, sequence.transfer = transfer.row, None, False, None
            engine.measures.swapped_in(sequence, transfer.job.destinations, engine.step)
            engine.scheduler.start(sequence)
            counters.swap_in_blocks += copied
            counters.swap_in_bytes += copied * engine.manager.storage.block_bytes
            engine.emit("swap-in", f"sequence {sequence.seq_id} swapped in", sequence.seq_id, copied)

        def failed(error: StorageError) -> None:
            del self.by_row[begun[0].row]
            sequence.transfer = None
            if sequence.held or isinstance(error, CopyCancelled):
                engine.emit(_kind_of(error), f"swap in failed: {error}", sequence.seq_id)
                return
            # Computing anew needs no copy, so it cannot fail again and again.
            engine.emit("fault", f"swap in failed, to be computed anew: {error}", sequence.seq_id)
            self.leave_host(sequence)
            sequence.status = Status.WAITING

        return engine.copies.start(begin, engine.step, done, failed) is not None

    def end_in(self, sequence: Sequence) -> bool:
        """Commit what ``begin_in`` began for an operator; return whether the copy worked."""
        self._engine.settle()
        return sequence.status is Status.RUNNING

    def leave_host(self, sequence: Sequence) -> None:
        """Give a sequence's host blocks back."""
        assert sequence.host_row is not None
        self._engine.manager.free_host(sequence.host_row)
        sequence.host_row = None

    def _start_out(self, sequence: Sequence, *, preempted: bool) -> bool:
        """Begin to copy a running sequence to the host tier; return whether there was room."""
        assert sequence.row is not None
        engine, counters, row = self._engine, self._counters, sequence.row
        manager, facts = engine.manager, engine.measures.facts
        needed = manager.host.num_active + int(manager.tables.num_blocks[row])

        def done() -> None:
            assert transfer is not None
            del self.by_row[row]
            sequence.row, sequence.host_row, sequence.transfer = None, transfer.host_row, None
            engine.measures.swapped_out(sequence, transfer.job.sources)
            counters.preemptions_swap += preempted
            counters.swap_out_blocks += len(transfer.job.sources)
            counters.swap_out_bytes += len(transfer.job.sources) * manager.storage.block_bytes

        def failed(error: StorageError) -> None:
            del self.by_row[row]
            sequence.transfer, sequence.held = None, False
            if preempted:
                engine.emit("fault", f"swap out failed, to be computed anew: {error}", sequence.seq_id)
                self._to_recompute(sequence)
            else:
                engine.emit(_kind_of(error), f"swap out failed: {error}", sequence.seq_id)
                engine.scheduler.start(sequence)

        try:
            transfer = engine.copies.start(lambda: manager.transfers.begin_swap_out(row), engine.step, done, failed)
        except OutOfBlocks:
            facts.swap_out(needed, has_room=False)
            return False
        if transfer is None:
            return False
        engine.scheduler.stop(sequence)
        facts.swap_out(needed, has_room=True)
        sequence.status, sequence.transfer = Status.SWAPPED, transfer
        _note_progress(sequence, int(manager.tables.num_tokens[row]))
        self.by_row[row] = sequence
        engine.scheduler.add_waiting(sequence)
        return True

    def _to_recompute(self, sequence: Sequence) -> None:
        """Release what a sequence that has left the running set holds on the device, to be computed anew."""
        assert sequence.row is not None
        engine = self._engine
        _note_progress(sequence, int(engine.manager.tables.num_tokens[sequence.row]))
        engine.measures.release(sequence)
        engine.manager.free(sequence.row)
        sequence.row, sequence.status = None, Status.WAITING
        self._counters.preemptions_recompute += 1


def _note_progress(sequence: Sequence, num_tokens: int) -> None:
    """Note how far a sequence that leaves the device has come."""
    sequence.num_computed = num_tokens
    sequence.num_tokens = max(sequence.num_tokens, num_tokens)


def _kind_of(error: StorageError) -> EventKind:
    """Return the kind of event that a copy's failure is: what an operator cancels is no fault."""
    return "command" if isinstance(error, CopyCancelled) else "fault"
