"""Lifecycle: how sequences come, branch and end, by the engine, by their clients or by an operator. Owns their numbers.

Part of the engine, which says when. What a client does by itself, its script says: acts at token counts stand in the
sequence, the times at which clients hang up are kept here.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from allocator.content import Request
from allocator.ids import SeqId, Status
from allocator.scripts import Deadlines, ForkAt, Script, patience_steps, token_acts
from allocator.sequence import Sequence
from allocator.snapshot import Counters

if TYPE_CHECKING:
    from allocator.engine import Engine


class Lifecycle:
    """The comings and goings of one engine's own sequences.

    Args:
        engine: The engine.
        counters: Its totals, which are added to.
    """

    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._engine, self._counters = engine, counters
        self._seq_ids = itertools.count()
        self._deadlines = Deadlines()

    def new_seq_id(self) -> SeqId:
        """Return the next number; from any thread."""
        return SeqId(next(self._seq_ids))

    # -- come ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> SeqId | None:
        """Queue a request; return its sequence id, or ``None`` when it can never fit and is refused."""
        engine, config, counters = self._engine, self._engine.config, self._counters
        seq_id = self.new_seq_id()
        counters.submitted += 1
        needed, size = engine.manager.blocks_for(request.content.num_tokens), engine.manager.device.num_blocks
        if needed > size:
            counters.refused += 1
            engine.measures.refuse(needed)
            engine.emit("refuse", f"{request.label}: needs {needed} blocks, the pool has {size}", seq_id, needed)
            return None
        if request.contiguous:
            engine.compactor.auto.saw_contiguous(engine.step, needed)
        # A run of its own shares nothing, so nothing of it is to be found either.
        has_keys = config.prefix_cache and not request.contiguous
        engine.scheduler.add_waiting(
            Sequence(
                seq_id,
                request.content,
                request.label,
                request.num_prompt,
                request.content.num_tokens,
                request.content.keys(config.block_size, config.key_hash) if has_keys else (),
                request.content.exact_tokens(),
                engine.step,
                num_tokens=request.num_prompt,
                waiting_since=engine.step,
                priority=request.priority,
                contiguous=request.contiguous,
                acts=token_acts(request.script),
            )
        )
        self._set_deadline(seq_id, request.script)
        return seq_id

    def fork(self, sequence: Sequence, script: Script = ()) -> Sequence:
        """Return a new running sequence that shares every block of a running one and goes its own way from here.

        Args:
            sequence: The running one; not a contiguous one, whose blocks are its own.
            script: What the new one's client does.
        """
        engine = self._engine
        engine.settle_for(sequence)
        assert sequence.row is not None
        assert not sequence.contiguous
        config, manager = engine.config, engine.manager
        at = int(manager.tables.num_tokens[sequence.row])
        seq_id = self.new_seq_id()
        content = sequence.content.forked(at, nonce=seq_id)
        child = Sequence(
            seq_id,
            content,
            f"fork of {sequence.seq_id}",
            sequence.num_prompt,
            sequence.num_target,
            content.keys(config.block_size, config.key_hash) if config.prefix_cache else (),
            content.exact_tokens(),
            engine.step,
            num_tokens=max(at, sequence.num_tokens),
            priority=sequence.priority,
            acts=token_acts(script),
        )
        child.row = manager.fork(sequence.row)
        child.waiting_since = engine.step
        engine.measures.disturb()
        engine.measures.start(child, at, engine.step, is_query=False)
        self._counters.submitted += 1
        engine.scheduler.add_waiting(child)
        engine.scheduler.start(child)
        engine.emit("fork", f"sequence {sequence.seq_id} forked as {seq_id}", seq_id)
        self._set_deadline(seq_id, script)
        self.act(child)
        return child

    # -- go ------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """End a running sequence that has all its tokens."""
        self._leave_device(sequence)
        sequence.status = Status.FINISHED
        self._engine.measures.facts.finish(sequence.num_target)
        self._counters.finished += 1
        self._engine.emit("finish", f"sequence {sequence.seq_id} finished", sequence.seq_id)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence in whatever stage it is, giving back all it holds."""
        self._drop(sequence)
        sequence.status = Status.CANCELLED
        self._counters.cancelled += 1
        self._engine.emit("cancel", f"sequence {sequence.seq_id} cancelled", sequence.seq_id)

    def refuse_late(self, sequence: Sequence, reason: str = "") -> None:
        """End a sequence that cannot get its blocks any more; by default since the pool shrank."""
        self._drop(sequence)
        sequence.status = Status.REFUSED
        self._counters.refused += 1
        manager = self._engine.manager
        needed = manager.blocks_for(sequence.num_target)
        shrank = f"needs {needed} blocks, the pool now has {manager.device.num_blocks}"
        self._engine.emit("refuse", f"sequence {sequence.seq_id}: {reason or shrank}", sequence.seq_id, needed)

    def _leave_device(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        engine = self._engine
        engine.measures.release(sequence)
        engine.manager.free(sequence.row)
        engine.scheduler.stop(sequence)
        sequence.row = None

    def _drop(self, sequence: Sequence) -> None:
        self._engine.settle_for(sequence)
        if sequence.row is not None:
            self._leave_device(sequence)
            return
        if sequence.host_row is not None:
            self._engine.swaps.leave_host(sequence)
        self._engine.scheduler.stop(sequence)

    # -- what clients do -----------------------------------------------------------------------------

    def act(self, sequence: Sequence) -> None:
        """Do what the client of a running sequence does at the tokens written so far."""
        assert sequence.row is not None
        written = int(self._engine.manager.tables.num_tokens[sequence.row])
        while sequence.acts and sequence.acts[0].num_tokens <= written:
            act, sequence.acts = sequence.acts[0], sequence.acts[1:]
            if not isinstance(act, ForkAt):
                self.cancel(sequence)
                return
            for script in act.children:
                self.fork(sequence, script)

    def hang_up(self) -> None:
        """End the sequences whose clients have waited long enough."""
        for seq_id in self._deadlines.pop_due(self._engine.step):
            sequence = self._engine.scheduler.find(seq_id)
            if sequence is not None:
                self.cancel(sequence)

    def next_deadline(self) -> int | None:
        """Return the step at which a client next hangs up; ``None`` when none does."""
        find = self._engine.scheduler.find
        return self._deadlines.next_step(lambda seq_id: find(seq_id) is not None)

    def _set_deadline(self, seq_id: SeqId, script: Script) -> None:
        steps = patience_steps(script)
        if steps is not None:
            self._deadlines.add(self._engine.step + steps, seq_id)
