"""Measures: what an engine measures of its run for advice and predictions. Told by it, changes nothing in it."""

from __future__ import annotations

import numpy as np

from allocator.config import EngineConfig
from allocator.facts import HOLDERS_MASK
from allocator.ids import IdArray
from allocator.manager import BlockManager
from allocator.metrics import count_runs
from allocator.reuse import ReuseDistances, ReuseSummary
from allocator.sequence import Sequence
from allocator.workload_facts import FactsRecorder


class Measures:
    """Facts for advice, and the reuse distances where they are followed.

    Args:
        config: Settings of the engine.
        manager: Its blocks, which are only looked at.

    Attributes:
        facts: Lengths, waits, swaps, copies.
        reuse: Hits at other pool sizes; ``None`` where they are not asked for, or there is no prefix cache.
    """

    def __init__(self, config: EngineConfig, manager: BlockManager) -> None:
        self.facts = FactsRecorder(config.block_size)
        self.reuse: ReuseDistances | None = None
        if config.reuse_distances and config.prefix_cache:
            self.reuse = ReuseDistances(config.num_blocks, is_exact=config.serial and config.eviction == "lru")
        self._block_size = config.block_size
        self._manager = manager

    def refuse(self, needed: int) -> None:
        """Note a request that was refused for its size. [blocks]"""
        if self.reuse is not None:
            self.reuse.refuse(needed)

    def start(self, sequence: Sequence, num_tokens: int, step: int, *, is_query: bool) -> None:
        """Note that a sequence was given blocks for its first ``num_tokens`` tokens.

        Args:
            sequence: It has a row.
            num_tokens: Tokens that its blocks hold, or will hold once its prompt is computed.
            step: Now.
            is_query: Whether its lookup counts in the hit ratio.
        """
        assert sequence.row is not None
        self.facts.start(step - sequence.waiting_since)
        reuse, manager = self.reuse, self._manager
        if reuse is None:
            return
        if sequence.contiguous:
            reuse.is_exact = False  # where its run is free depends on the pool, and what it evicts too
        full, hittable = num_tokens // self._block_size, 0
        if is_query:
            reuse.query(full, manager.blocks_for(sequence.num_target))
            hittable = full - (full * self._block_size == num_tokens)
        taken, held = int(manager.tables.num_blocks[sequence.row]), manager.device.num_active
        reuse.start(sequence.seq_id, sequence.keys, full, hittable=hittable, taken=taken, held=held)

    def release(self, sequence: Sequence) -> None:
        """Note that a running sequence is about to give its blocks back."""
        if self.reuse is None:
            return
        assert sequence.row is not None
        device, tables = self._manager.device, self._manager.tables
        table, full = tables.table(sequence.row), int(tables.num_tokens[sequence.row]) // self._block_size
        held = device.num_active
        shared = 0 if held == len(table) else device.count_shared(table)
        self.reuse.release(sequence.seq_id, full, shared=shared, taken=len(table), held=held)

    def swapped_out(self, sequence: Sequence, block_ids: IdArray) -> None:
        """Note that a sequence's device blocks were copied to the host tier and given back. [n]"""
        device = self._manager.device
        self.facts.copy(len(block_ids), count_runs(block_ids, device.slab_size))
        if self.reuse is not None:
            shared = int(np.count_nonzero(device.facts.state[block_ids] & HOLDERS_MASK))
            full, before = sequence.num_computed // self._block_size, device.num_active + len(block_ids) - shared
            self.reuse.release(sequence.seq_id, full, shared=shared, taken=len(block_ids), held=before)

    def swapped_in(self, sequence: Sequence, copied_ids: IdArray, step: int) -> None:
        """Note that a sequence came back from the host tier, and which of its device blocks were copied. [n]"""
        if len(copied_ids):
            self.facts.copy(len(copied_ids), count_runs(copied_ids, self._manager.device.slab_size))
        self.start(sequence, sequence.num_tokens, step, is_query=False)

    def disturb(self) -> None:
        """Note that somebody else than the requests changed what is held or cached: predictions are estimates."""
        if self.reuse is not None:
            self.reuse.is_exact = False

    def predictions(self, *, is_final: bool) -> ReuseSummary | None:
        """Return the summary of the reuse distances, see ``ReuseDistances.summary``."""
        return None if self.reuse is None else self.reuse.summary(self._manager.device.num_blocks, is_final=is_final)
