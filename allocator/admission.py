"""Admission: which prompt tokens a step computes. Who starts, whose prompt goes on, and why the first in line waits.

A step computes at most ``prefill_tokens`` prompt tokens, given out in queue order over those whose prompts are begun
and those that wait; who decodes goes on meanwhile. A sequence is admitted when its whole prompt finds room beside the
watermark and what begun prompts still lack, but takes blocks for the tokens of this step only, and publishes the keys
of no block before the step that computes it. A begun prompt that finds no room preempts whoever gives way before it
does, and otherwise waits. Part of the engine, which calls it once a turn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from allocator.errors import NoContiguousRun, OutOfBlocks
from allocator.ids import Status, WaitReason
from allocator.sequence import Sequence
from allocator.snapshot import Counters

if TYPE_CHECKING:
    from allocator.engine import Engine

#: More tokens than any sequence has.
_NO_LIMIT = 1 << 62


class Chunk(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sequence, to be computed in this step; none of one that was swapped in."""

    sequence: Sequence
    start: int
    stop: int


class Round:
    """The giving out of one step's prompt tokens.

    Args:
        engine: Whose step it is.
        counters: Its totals, which are added to.
        may_start: Whether waiting sequences may start, or only begun prompts go on.
    """

    def __init__(self, engine: Engine, counters: Counters, *, may_start: bool) -> None:
        self._engine, self._counters = engine, counters
        self._may_start = may_start
        # Alone, a prompt in pieces gains nothing, and whole prompts have one right answer whatever the budget.
        self._budget = 0 if engine.config.serial else engine.config.prefill_tokens
        self._left = self._budget or _NO_LIMIT
        self._chunks: list[Chunk] = []
        self._granted: set[int] = set()
        #: Those that run and lack tokens; some may have got them in this round.
        self._begun: list[Sequence] = []

    def give_out(self) -> list[Chunk]:
        """Start sequences and let begun prompts go on while there are tokens, room and someone to give them to."""
        scheduler = self._engine.scheduler
        begun = sorted(scheduler.prefilling.values(), key=lambda s: s.order)
        self._begun = list(begun)
        while True:
            first = scheduler.next_waiting() if self._may_start else None
            if begun and (first is None or begun[0].order < first.order):
                sequence = begun.pop(0)
                if sequence.status is Status.RUNNING and self._left:
                    self._go_on(sequence)
            elif first is None:
                return self._chunks
            elif not self._start(first):
                self._may_start = False

    def _go_on(self, sequence: Sequence) -> None:
        engine, manager, scheduler = self._engine, self._engine.manager, self._engine.scheduler
        assert sequence.row is not None
        start = int(manager.tables.num_tokens[sequence.row])
        count = min(self._left, sequence.num_tokens - start)
        while sequence.row is not None and sequence.status is Status.RUNNING:
            try:
                if not engine.room.make_writable(sequence.row):
                    return  # until a copy has ended
                manager.grow(sequence.row, count)
            except OutOfBlocks as error:
                if engine.room.can_wait(error.needed - error.allocatable):
                    return
                self._counters.failures_capacity += 1
                # Who was granted tokens keeps them: its keys may have been found already.
                victim = scheduler.next_victim(self._granted)
                if victim is None or (victim is sequence and len(scheduler.running) > 1):
                    return
                engine.room.preempt(victim)
            else:
                self._grant(sequence, start, start + count)
                return

    def _start(self, sequence: Sequence) -> bool:
        """Start the first in the queue, or note why it waits; return whether the next may be tried."""
        engine, manager, scheduler = self._engine, self._engine.manager, self._engine.scheduler
        if sequence.transfer is not None:
            return False  # on its way out: nobody behind it starts before it can
        while True:
            num_running = len(scheduler.running) + len(engine.swaps.coming_in())
            if num_running >= self._running_limit():
                if self._preempt_lower(sequence, 0):
                    continue
                why = ", the limit" if engine.thrash.limit is None else ", the limit while thrashing"
                return _wait(sequence, "limit", f"limit: {num_running} sequences run{why}")
            if sequence.host_row is None and not self._left:
                return _wait(sequence, "budget", f"budget: {self._budget} prompt tokens a step are given out")
            watermark, begun = self._to_keep(sequence)
            keep = watermark + begun
            if sequence.resumed and sequence.num_tokens % engine.config.block_size == 0:
                keep += 1  # its next token starts a block: do not bring it back just to preempt it again
            try:
                if not self._take(sequence, keep):
                    return _wait(sequence, "limit", f"limit: {engine.copies.executor.capacity} copies are under way")
            except NoContiguousRun as error:
                if engine.compactor.make_run(error.needed):
                    continue
                if not self._can_wait_for_run(sequence, error):
                    return True
                return _wait(sequence, "contiguous", f"contiguous: {error}")
            except OutOfBlocks as error:
                missing = error.needed - error.allocatable
                if not engine.room.can_wait(missing) and self._preempt_lower(sequence, missing):
                    continue
                needs_more = manager.blocks_for(sequence.num_target) > manager.device.num_blocks
                if not num_running and not len(engine.copies) and needs_more:
                    engine.lifecycle.refuse_late(sequence)
                    return True
                kind: WaitReason = "watermark" if error.needed - watermark <= error.allocatable else "capacity"
                room = f"{error.needed} blocks needed, {error.allocatable} allocatable"
                return _wait(sequence, kind, f"{kind}: {room}")
            return True

    def _take(self, sequence: Sequence, keep: int) -> bool:
        """Give a waiting sequence its blocks and start it, or its way back; return whether a copy could start.

        Raises:
            OutOfBlocks, NoContiguousRun: Nothing changed.
        """
        engine, manager = self._engine, self._engine.manager
        if sequence.host_row is not None:
            has = int(manager.host_tables.num_blocks[sequence.host_row])  # more than it needs, where it is one run
            lacking = max(0, manager.blocks_for(sequence.num_tokens) - has)
            return engine.swaps.begin_in(sequence, keep=keep + lacking)
        admission = manager.admit(
            sequence.keys,
            sequence.num_tokens,
            tokens=sequence.tokens,
            keep=keep,
            max_new=self._left,
            run_blocks=manager.blocks_for(sequence.num_target) if sequence.contiguous else 0,
        )
        sequence.row = admission.row
        engine.scheduler.start(sequence)
        if not sequence.resumed:
            self._count_query(sequence, admission.hit_blocks)
        start, stop = admission.matched_blocks * engine.config.block_size, int(manager.tables.num_tokens[admission.row])
        self._grant(sequence, start, stop)
        # Once, for all of its prompt: what is computed in later steps is found or missing now.
        engine.measures.start(sequence, sequence.num_tokens, engine.step, is_query=not sequence.resumed)
        if stop < sequence.num_tokens:
            self._begun.append(sequence)
        blocks = int(manager.tables.num_blocks[admission.row])
        engine.emit(
            "admit",
            f"sequence {sequence.seq_id} admitted, {admission.hit_blocks} blocks hit",
            sequence.seq_id,
            blocks,
        )
        return True

    def _running_limit(self) -> int:
        """Return how many may run at once: as configured, or fewer while preemptions gain nothing."""
        config, limit = self._engine.config, self._engine.thrash.limit
        if config.serial:
            return 1
        return config.max_running if limit is None else limit

    def _count_query(self, sequence: Sequence, hit_blocks: int) -> None:
        """Count what the prefix cache was asked for and gave when a sequence was first admitted."""
        counters, config = self._counters, self._engine.config
        if sequence.contiguous:
            counters.contiguous_admitted += 1
            counters.contiguous_waited_steps += self._engine.step - sequence.arrived_step
        sequence.hit_blocks = hit_blocks
        counters.prompt_tokens += sequence.num_prompt
        if config.prefix_cache:
            counters.query_blocks += sequence.num_prompt // config.block_size
            counters.query_tokens += sequence.num_prompt
            counters.hit_blocks += hit_blocks
            counters.hit_tokens += hit_blocks * config.block_size

    def _can_wait_for_run(self, sequence: Sequence, error: NoContiguousRun) -> bool:
        """Note that the first in the queue lacks one run of blocks; return whether waiting can give it one.

        What runs, and what is cached, gives way in time. Only pinned blocks and slab ends can leave it without a run
        for ever: then, once nothing runs, it is refused here.
        """
        engine, counters, compactor = self._engine, self._counters, self._engine.compactor
        if sequence.reason_kind != "contiguous":
            counters.failures_contiguous += 1
            counters.contiguous_needed_blocks += error.needed
            counters.contiguous_longest_blocks += error.longest
            counters.contiguous_allocatable_blocks += error.allocatable
            compactor.auto.saw_contiguous(engine.step, error.needed, failed=True)
        compactor.contiguous_wanted = error.needed
        longest = engine.manager.longest_possible_run()
        if engine.scheduler.running or len(engine.copies) or longest >= error.needed:
            return True
        reason = f"needs a run of {error.needed} blocks, pinned blocks or slab ends leave {longest}"
        engine.lifecycle.refuse_late(sequence, reason)
        return False

    def _grant(self, sequence: Sequence, start: int, stop: int) -> None:
        # Whoever finds these keys runs no earlier than the step that computes their blocks: this one.
        size = self._engine.config.block_size
        self._engine.publish(sequence, start // size, stop // size)
        # A prompt that is all there still has its last token computed.
        self._left = max(0, self._left - max(1, stop - start))
        self._granted.add(sequence.seq_id)
        self._chunks.append(Chunk(sequence, start, stop))

    def _to_keep(self, sequence: Sequence) -> tuple[int, int]:
        """Return the blocks to leave allocatable: the watermark, and what begun prompts still lack.

        Both are for those that may not be preempted for ``sequence``. With none of them running the watermark is
        waived, or a large sequence could wait for ever.
        """
        engine, manager, scheduler = self._engine, self._engine.manager, self._engine.scheduler
        kept = [*scheduler.running, *engine.swaps.coming_in()]
        if scheduler.policy == "priority":
            kept = [s for s in kept if s.priority >= sequence.priority]
        if not kept:
            return 0, 0
        lacking = sum(
            max(0, manager.blocks_for(s.num_tokens) - int(manager.tables.num_blocks[s.row]))
            for s in self._begun
            if s.status is Status.RUNNING and (scheduler.policy != "priority" or s.priority >= sequence.priority)
        )
        return math.ceil(engine.watermark_ratio * manager.device.num_blocks), lacking

    def _preempt_lower(self, sequence: Sequence, shortage: int) -> bool:
        """Preempt the first of a lower class, if all of them together would give up ``shortage`` blocks."""
        engine, manager = self._engine, self._engine.manager
        lower = [s for s in engine.scheduler.below(sequence) if s.seq_id not in self._granted]
        if not lower:
            return False
        tables = np.concatenate([manager.tables.table(s.row) for s in lower if s.row is not None])
        if manager.count_released(tables) + engine.copies.pending_blocks < shortage:
            return False
        engine.swaps.preempt(lower[0], engine.config.preempt)
        return True


def _wait(sequence: Sequence, kind: WaitReason, text: str) -> bool:
    sequence.reason_kind, sequence.reason = kind, text
    return False
