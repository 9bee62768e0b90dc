"""Every law of the allocator's state, in functions that raise ``InvariantViolation``. Read only.

One set of checks for tests, for ``kvtop check`` and for live sampling. They recompute everything
from the block tables, so a counter that drifted cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from allocator.block_table import BlockTables
from allocator.content import TokenArray, slot_stamps
from allocator.errors import InvariantViolation
from allocator.facts import CACHED, FREE, HOLDERS_MASK, KEY, RESERVED, SHARED
from allocator.ids import BlockFlag, Tier
from allocator.manager import BlockManager
from allocator.pool import BlockPool


def check_manager(manager: BlockManager) -> None:
    """Check laws 1 to 4 on both tiers. Cost: O(blocks + table entries).

    Raises:
        InvariantViolation: With the law's number and the first offence found.
    """
    with manager.lock:
        _check_pool(manager.device, manager.tables)
        _check_pool(manager.host, manager.host_tables)
        tables = manager.tables
        rows = tables.rows()
        blocks, tokens = tables.num_blocks[rows], tables.num_tokens[rows]
        spare = ~tables.one_run[rows] & (tokens <= (blocks - 1) * manager.block_size)
        wrong = (tokens > blocks * manager.block_size) | spare
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvariantViolation(2, f"row {rows[at]} has {blocks[at]} blocks for {tokens[at]} tokens")
        for row in rows[tables.one_run[rows]].tolist():
            if (np.diff(tables.table(row)) != 1).any():
                raise InvariantViolation(2, f"row {row} needs one run, its blocks are not consecutive")


class _Known(Protocol):
    """The part of a content that says what should be there."""

    def tokens(self, start: int, stop: int) -> TokenArray: ...


class Holder(Protocol):
    """What a check of contents needs to know of a sequence, the engine's own or an attached program's."""

    @property
    def seq_id(self) -> int: ...

    @property
    def content(self) -> _Known: ...

    @property
    def row(self) -> int | None: ...

    @property
    def host_row(self) -> int | None: ...


def check_contents(manager: BlockManager, sequences: Iterable[Holder]) -> None:
    """Check law 5: every slot of every sequence, in either tier, reads back its own stamp.

    Raises:
        InvariantViolation: Names the sequence and the first token whose slot holds something else.
    """
    with manager.lock:
        for tier in ("device", "host"):
            _check_tier_contents(manager, tier, list(sequences))


def _check_tier_contents(manager: BlockManager, tier: Tier, sequences: list[Holder]) -> None:
    tables = manager.tables if tier == "device" else manager.host_tables
    holders: list[Holder] = []
    slots, tokens, positions = [], [], []
    for sequence in sequences:
        row = sequence.row if tier == "device" else sequence.host_row
        if row is None:
            continue
        n = int(tables.num_tokens[row])
        holders.append(sequence)
        slots.append(manager.slots(tier, row, 0, n))
        tokens.append(sequence.content.tokens(0, n))
        positions.append(np.arange(n, dtype=np.int64))
    if not holders:
        return
    stamps = slot_stamps(np.concatenate(tokens), np.concatenate(positions))
    good = manager.storage.check_stamps(tier, np.concatenate(slots), stamps)
    if good.all():
        return
    at = int(np.argmin(good))
    for sequence, own in zip(holders, slots, strict=True):
        if at < len(own):
            block, offset = divmod(int(own[at]), manager.block_size)
            raise InvariantViolation(
                5, f"sequence {sequence.seq_id}, token {at}: {tier} block {block}, offset {offset} holds other content"
            )
        at -= len(own)


def _check_pool(pool: BlockPool, tables: BlockTables) -> None:
    facts, tier = pool.facts, pool.tier
    holders = facts.state & HOLDERS_MASK
    keyed = (facts.state & KEY) != 0
    held = holders != 0
    cached, free, reserved = facts.state == CACHED, facts.state == FREE, facts.state == RESERVED

    # Law 1: the exclusive states cover the pool, and the pool's counters agree with its state array.
    if int(np.count_nonzero(held | cached | free | reserved)) != pool.num_blocks:
        raise InvariantViolation(1, f"{tier}: a block is in no state of the pool")
    for name, counted, claimed in (
        ("free", free, pool.num_free),
        ("cached", cached, pool.num_cached),
        ("active", held, pool.num_active),
        ("reserved", reserved, pool.num_reserved),
        ("allocatable", (free | cached) & (facts.flags == 0), pool.num_allocatable),
    ):
        if int(np.count_nonzero(counted)) != claimed:
            raise InvariantViolation(
                1, f"{tier}: {int(np.count_nonzero(counted))} blocks are {name}, the pool counts {claimed}"
            )

    # Law 2: reference counts are table entries.
    rows, _, ids = tables.entries()
    entries = np.bincount(ids, minlength=pool.num_blocks)
    counts = facts.ref_counts()
    if (entries != counts).any():
        block = int(np.argmax(entries != counts))
        raise InvariantViolation(2, f"{tier} block {block}: ref_count {counts[block]}, {entries[block]} table entries")
    if (facts.refs[holders == SHARED] < 2).any():
        raise InvariantViolation(2, f"{tier}: a block marked shared has fewer than two holders")
    pairs = np.sort(rows * max(1, pool.num_blocks) + ids)
    if (pairs[1:] == pairs[:-1]).any():
        raise InvariantViolation(3, f"{tier}: a block table names a block twice")

    # Law 3: the free list holds each free block once, and nothing else.
    listed = np.sort(pool.free_ids())
    if not np.array_equal(listed, np.flatnonzero(free & (facts.flags == 0))):
        raise InvariantViolation(3, f"{tier}: the free list is not the set of free blocks")
    evictable = np.sort(pool.eviction_order())
    if not np.array_equal(evictable, np.flatnonzero(cached & (facts.flags == 0))):
        raise InvariantViolation(3, f"{tier}: the eviction order is not the set of evictable blocks")

    # Law 4: key to block is one to one, and the state says who has a key.
    if not pool.cache.is_one_to_one():
        raise InvariantViolation(4, f"{tier}: keys and blocks are not one to one")
    with_key = np.fromiter((block for block, _ in pool.cache.items()), np.int64, len(pool.cache))
    if not np.array_equal(np.sort(with_key), np.flatnonzero(keyed)):
        raise InvariantViolation(4, f"{tier}: the state array disagrees with the index on who has a key")
    if (facts.flags & ~np.uint8(BlockFlag.FENCED | BlockFlag.PINNED)).any():
        raise InvariantViolation(1, f"{tier}: an unknown flag is set")
