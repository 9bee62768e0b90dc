"""BlockManager: sequences' blocks over both tiers: admit, append, fork, free, swap, move, resize.

Every operation is all or nothing, and holds the allocator lock, so any thread may call any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.block_table import BlockTables
from allocator.commands import CompactGoal
from allocator.compaction import PoolShape, plan_by_sequence, plan_longest_run, plan_pack_low, plan_shrink
from allocator.config import EngineConfig
from allocator.content import TokenArray
from allocator.errors import NotHeld, OutOfBlocks, Refused, StorageError
from allocator.facts import CACHED, LAST_STEP, SHARED
from allocator.ids import NO_ROW, BlockFlag, BlockKey, IdArray, Tier
from allocator.locks import CountedLock
from allocator.metrics import run_starts
from allocator.plans import CopyJob, MovePlan, Moves
from allocator.pool import BlockPool
from allocator.prefix_cache import ROOT
from allocator.storage import Storage

Rows = NDArray[np.int64]

#: Matches without the lock before one is made under it.
OPTIMISTIC_TRIES: Final = 3


class Admission(NamedTuple):
    """What admitting a sequence gave.

    Attributes:
        row: Its row in the device block tables.
        matched_blocks: Blocks taken over from the prefix cache.
        hit_blocks: Of these, blocks whose tokens need no computing: one fewer when the whole prompt matched,
            since at least one token is always computed.
    """

    row: int
    matched_blocks: int
    hit_blocks: int


class BlockManager:
    """Blocks, tables and storage of one engine.

    Args:
        config: Sizes and policies.
        storage: Where keys and values lie; resized to the configured pools.
    """

    def __init__(self, config: EngineConfig, storage: Storage) -> None:
        self.config = config
        self.block_size = config.block_size
        self.storage = storage
        self.lock = CountedLock("allocator")
        slab_size = config.slab_size
        self.device = BlockPool(config.num_blocks, slab_size=slab_size, eviction=config.eviction)
        self.host = BlockPool(config.num_swap_blocks, slab_size=slab_size, tier="host")
        self.tables = BlockTables()
        self.host_tables = BlockTables()
        self.copy_on_write_blocks = 0
        self.optimistic_retries = 0
        self._may_share_tails = False
        storage.resize("device", config.num_blocks)
        storage.resize("host", config.num_swap_blocks)

    # -- sequences -----------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def admit(
        self, keys: Sequence[BlockKey], num_tokens: int, *, tokens: TokenArray | None = None, keep: int = 0
    ) -> Admission:
        """Give a sequence the blocks for its first ``num_tokens`` tokens, shared ones from the prefix cache first.

        A block that the prompt ends on is shared, or taken over in place, even when all of it is cached;
        only the count of hits is one less. Its keys are not published: see ``publish_keys``.

        Args:
            keys: Keys of its leading full blocks, as far as they can be found by content.
            num_tokens: Tokens to be computed or found now, at least 1.
            tokens: Its tokens, to be compared on a hit; ``None`` where keys are exact by themselves.
            keep: Blocks that must stay allocatable.

        Raises:
            OutOfBlocks: Too few blocks; nothing changes.
        """
        wanted = keys[: num_tokens // self.block_size] if self.config.prefix_cache else ()
        matched = self._match_and_lock(wanted, tokens)
        try:
            pool = self.device
            fresh = self.blocks_for(num_tokens) - len(matched)
            identity = ROOT
            if matched:
                shared = np.array(matched, np.int64)
                self._require(fresh + self._count_idle(shared), keep)
                pool.share(shared)
                ids = np.concatenate((shared, np.asarray(pool.allocate(fresh), np.int64)))
                if tokens is not None:
                    identity = pool.cache.identity_of(matched[-1])
            else:
                self._require(fresh, keep)
                ids = np.asarray(pool.allocate(fresh), np.int64)
            row = self.tables.new_row(ids, num_tokens, identity)
        finally:
            self.lock.release()
        hits = len(matched) - (len(matched) * self.block_size == num_tokens)
        return Admission(row, len(matched), max(0, hits))

    def publish_keys(self, row: int, keys: Sequence[BlockKey], first: int, *, tokens: TokenArray | None = None) -> None:
        """Let a row's full blocks from ``first`` on be found by their content.

        Args:
            row: The sequence; its blocks before ``first`` were matched or published already.
            keys: Keys of these blocks. [n]
            first: Position of the first of them in the block table.
            tokens: Their tokens, where admission got tokens too. [n * block_size]
        """
        if not self.config.prefix_cache or not keys:
            return
        with self.lock:
            tables = self.tables
            ids = tables.table(row)[first : first + len(keys)]
            tables.identity[row] = self.device.insert_keys(ids, keys, tokens, int(tables.identity[row])).identity

    def extend(self, rows: Rows) -> None:
        """Make room for the next token of every row: a block where the last is full, a copy where it is shared.

        Raises:
            OutOfBlocks: Too few blocks for all of them; nothing changes.
            StorageError: A copy failed; no row was extended, and rows copied before keep their copies.
        """
        with self.lock:
            tables = self.tables
            full = tables.num_tokens[rows] == tables.num_blocks[rows] * self.block_size
            growing = rows[full]
            copying = self._shared_tails(rows[~full]) if self._may_share_tails else rows[:0]
            if len(copying) == 0 and self._may_share_tails:
                # Only a look at every row says that no tail is shared any more.
                self._may_share_tails = len(rows) < len(tables.rows())
            if len(growing) + len(copying) == 0:
                return
            self._require(len(growing) + (self._count_copies(copying) if len(copying) else 0), 0)
            for row in copying.tolist():
                self._copy_on_write(row)
            if len(growing):
                tables.append(growing, np.asarray(self.device.allocate(len(growing)), np.int64))

    def append(self, rows: Rows) -> None:
        """Make room for the next token of every row and count it as written: a decode step in one call. [n]

        Raises:
            OutOfBlocks: Too few blocks for all of them; nothing changes.
            StorageError: As ``extend`` does; no token is counted.
        """
        with self.lock:
            tables = self.tables
            if self._may_share_tails:
                self.extend(rows)
                tables.num_tokens[rows] += 1
                return
            tokens = tables.num_tokens[rows]
            full = rows[tokens == tables.num_blocks[rows] * self.block_size]
            if len(full):
                tables.append(full, np.asarray(self.device.allocate(len(full)), np.int64))
            tokens += 1
            tables.num_tokens[rows] = tokens

    def write(self, rows: Rows, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens as written in each row; their blocks are there already."""
        self.tables.num_tokens[rows] += num_tokens

    def free(self, row: int) -> None:
        """Release a row's blocks, tail first, and forget the row."""
        with self.lock:
            self.device.release_distinct(self.tables.table(row)[::-1].copy())
            self.tables.drop_row(row)

    def free_many(self, rows: Rows) -> None:
        """Release several rows' blocks, each tail first, and forget the rows. Distinct rows. [n]"""
        with self.lock:
            for row in rows.tolist():
                self.free(row)

    def fork(self, row: int) -> int:
        """Return a new row that shares every block of ``row``. Nothing is copied until one of them is written."""
        with self.lock:
            ids = self.tables.table(row).copy()
            self.device.share(ids)
            self._may_share_tails = True
            tables = self.tables
            return tables.new_row(ids, int(tables.num_tokens[row]), int(tables.identity[row]))

    # -- tiers ---------------------------------------------------------------------------------------

    def swap_out(self, row: int) -> int:
        """Copy a row's blocks to the host tier, release them, and return the host row.

        Raises:
            OutOfBlocks: The host tier has too few free blocks.
            StorageError: The copy failed. In both cases nothing changes.
        """
        with self.lock:
            ids = self.tables.table(row).copy()
            host_ids = np.asarray(self.host.allocate(len(ids)), np.int64)
            try:
                self.storage.copy(CopyJob("device", ids, "host", host_ids))
            except StorageError:
                self.host.release(host_ids)
                raise
            host_row = self.host_tables.new_row(host_ids, int(self.tables.num_tokens[row]))
            self.free(row)
            return host_row

    def swap_in(
        self, host_row: int, keys: Sequence[BlockKey], *, tokens: TokenArray | None = None, keep: int = 0
    ) -> tuple[int, int]:
        """Bring a swapped sequence back, into as few runs as there are; return its row and the blocks copied.

        Blocks whose content is still cached on the device are shared instead of copied. ``keys`` and ``tokens`` are
        those of ``admit``.

        Raises:
            OutOfBlocks: Too few device blocks, ``keep`` of them left out.
            StorageError: The copy failed. In both cases nothing changes.
        """
        with self.lock:
            pool = self.device
            host_ids = self.host_tables.table(host_row).copy()
            num_tokens = int(self.host_tables.num_tokens[host_row])
            keys = keys[: num_tokens // self.block_size]
            ids = self._resident(host_row, keys, tokens)
            resident = ids[ids != NO_ROW]
            missing = np.flatnonzero(ids == NO_ROW)
            self._require(len(missing) + self._count_idle(resident), keep)
            pool.share(resident)
            fresh = pool.allocate_compact(len(missing))
            ids[missing] = fresh
            try:
                self.storage.copy(CopyJob("host", host_ids[missing], "device", fresh))
            except StorageError:
                pool.release(ids[::-1])
                raise
            row = self.tables.new_row(ids, num_tokens)
            if self.config.prefix_cache and keys:
                size, first = self.block_size, int(missing[0]) if len(missing) and tokens is not None else 0
                identity = pool.cache.identity_of(int(ids[first - 1])) if first else ROOT
                own = None if tokens is None else tokens[first * size : len(keys) * size]
                self.tables.identity[row] = identity
                self.publish_keys(row, keys[first:], first, tokens=own)
            self.free_host(host_row)
            return row, len(missing)

    def plan_swap_in(
        self, host_row: int, keys: Sequence[BlockKey], *, tokens: TokenArray | None = None
    ) -> tuple[int, int]:
        """Return how many blocks ``swap_in`` would copy, and by how many fewer would be allocatable after it."""
        with self.lock:
            ids = self._resident(host_row, keys, tokens)
            missing = int(np.count_nonzero(ids == NO_ROW))
            return missing, missing + self._count_idle(ids[ids != NO_ROW])

    def free_host(self, host_row: int) -> None:
        """Release a swapped sequence's host blocks and forget its host row."""
        with self.lock:
            self.host.release_distinct(self.host_tables.table(host_row)[::-1].copy())
            self.host_tables.drop_row(host_row)

    # -- moves and size ------------------------------------------------------------------------------

    def shape(self) -> PoolShape:
        """Return the device pool as planning sees it."""
        facts = self.device.facts
        return PoolShape(facts.state, facts.flags, self.device.eviction_order(), self.device.slab_size)

    def plan_compaction(self, goal: CompactGoal, run_blocks: int | None, max_moves: int | None) -> MovePlan:
        """Return the moves towards ``goal``.

        Raises:
            OutOfBlocks, Refused: The goal cannot be reached; see ``allocator.compaction``.
        """
        with self.lock:
            shape = self.shape()
            if goal == "pack-low":
                return plan_pack_low(shape, max_moves)
            if goal == "longest-run":
                return plan_longest_run(shape, run_blocks, max_moves)
            tables = [self.tables.table(row) for row in self.tables.rows().tolist()]
            return plan_by_sequence(shape, tables, max_moves)

    def move(self, plan: MovePlan) -> int:
        """Carry out a plan stage by stage and return the bytes read.

        Each stage reserves its destinations, fences both sides, copies, and then re-points every table in one commit.

        Raises:
            StorageError: A copy failed; its stage is undone, and the stages before it stand.
        """
        with self.lock:
            return sum(self._move_stage(stage) for stage in plan.stages)

    def plan_resize(self, num_blocks: int) -> MovePlan:
        """Return the moves that a new pool size needs; none to grow.

        Raises:
            OutOfBlocks: What is held does not fit.
            Refused: A pinned block lies above the new end.
        """
        with self.lock:
            if num_blocks >= self.device.num_blocks:
                return MovePlan()
            return plan_shrink(self.shape(), num_blocks)

    def resize(self, num_blocks: int) -> MovePlan:
        """Grow the device pool, or drain and shrink it; return the moves made.

        Raises:
            OutOfBlocks, Refused: It does not fit; see ``plan_resize``.
            StorageError: No memory, or a copy failed; the pool keeps its size.
        """
        with self.lock:
            plan = self.plan_resize(num_blocks)
            if num_blocks > self.device.num_blocks:
                self.storage.resize("device", num_blocks)
                self.device.resize(num_blocks)
            else:
                self.move(plan)
                self.device.resize(num_blocks)
                self.storage.resize("device", num_blocks)
            return plan

    def pin(self, block_ids: IdArray) -> None:
        """Pin device blocks.

        Raises:
            NotHeld: No such block.
        """
        with self.lock:
            self.device.set_flag(self._existing(block_ids), BlockFlag.PINNED)

    def unpin(self, block_ids: IdArray) -> None:
        """Unpin device blocks.

        Raises:
            NotHeld: No such block.
        """
        with self.lock:
            self.device.clear_flag(self._existing(block_ids), BlockFlag.PINNED)

    # -- for observers -------------------------------------------------------------------------------

    def arrays(self, tier: Tier, into: BlockArrays | None = None) -> BlockArrays | None:
        """Copy one tier's arrays out; ``None`` for a host tier without blocks. Cost: O(blocks + entries).

        Args:
            tier: Which tier.
            into: Arrays of the pool's size to write to, such as a map's own memory; by default new ones.
        """
        with self.lock:
            pool, tables = (self.device, self.tables) if tier == "device" else (self.host, self.host_tables)
            if pool.num_blocks == 0:
                return None
            facts = pool.facts
            out = into if into is not None else BlockArrays.empty(pool.num_blocks)
            rows, position, ids = tables.entries()
            facts.publish_states(out.state)
            facts.publish_ref_counts(out.ref_count)
            out.flags[:] = facts.flags
            out.hash64[:] = pool.cache.hash64()
            out.owner.fill(NO_ROW)
            # Reversed, so that the first row of those that share a block is the one shown.
            out.owner[ids[::-1]] = rows[::-1]
            np.multiply(facts.state == CACHED, self.block_size, out=out.fill, dtype=np.uint16)
            out.fill[ids] = np.clip(tables.num_tokens[rows] - position * self.block_size, 0, self.block_size)
            out.last_used[:] = facts.last_used
            out.last_used[ids] = min(pool.step, LAST_STEP)
            return out

    def row_numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many blocks each device row shares, and in how many runs its table lies. [rows], [rows]"""
        rows, position, ids = self.tables.entries()
        shared = (self.device.facts.state[ids] & SHARED) != 0
        starts = run_starts(ids, self.device.slab_size) | (position == 0)
        n = len(self.tables.num_blocks)
        return np.bincount(rows[shared], minlength=n), np.bincount(rows[starts], minlength=n)

    def slots(self, tier: Tier, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the slots of a row's tokens ``start`` to ``stop``. [stop - start]"""
        tables = self.tables if tier == "device" else self.host_tables
        positions = np.arange(start, stop, dtype=np.int64)
        return tables.table(row)[positions // self.block_size] * self.block_size + positions % self.block_size

    # -- inside --------------------------------------------------------------------------------------

    def _match_and_lock(self, keys: Sequence[BlockKey], tokens: TokenArray | None) -> list[int]:
        """Take the allocator lock, and return the matched blocks, which nobody can take away while it is held.

        The match is made without the lock and thrown away if a key was dropped meanwhile; after
        ``OPTIMISTIC_TRIES`` conflicts it is made under the lock.
        """
        cache, lock = self.device.cache, self.lock
        if not keys:
            lock.acquire()
            return []
        for _ in range(OPTIMISTIC_TRIES if self.config.optimistic_lookup else 0):
            version = cache.version
            try:
                matched = cache.match(keys, tokens)
            except IndexError:  # the pool shrank under the match
                matched, version = [], -1
            lock.acquire()
            if cache.version == version:
                return matched
            self.optimistic_retries += 1
            lock.release()
        lock.acquire()
        return cache.match(keys, tokens)

    def _resident(self, host_row: int, keys: Sequence[BlockKey], tokens: TokenArray | None) -> IdArray:
        """Return the device blocks that hold the content of a swapped row; ``NO_ROW`` where none does. [blocks]"""
        ids = np.full(int(self.host_tables.num_blocks[host_row]), NO_ROW, np.int64)
        if not self.config.prefix_cache:
            return ids
        keys = keys[: int(self.host_tables.num_tokens[host_row]) // self.block_size]
        cache = self.device.cache
        if tokens is not None:
            matched = cache.match(keys, tokens)
            ids[: len(matched)] = matched
            return ids
        for position, key in enumerate(keys):
            block = cache.block_of(key)
            if block is not None:
                ids[position] = block
        return ids

    def _require(self, needed: int, keep: int) -> None:
        """Raise ``OutOfBlocks`` unless ``needed`` blocks can be taken and ``keep`` stay allocatable."""
        allocatable = self.device.num_allocatable
        if needed + keep > allocatable:
            raise OutOfBlocks(needed + keep, allocatable)

    def _count_idle(self, ids: IdArray) -> int:
        """Return how many of these cached or held blocks are allocatable now, and so will be used up by sharing. [n]"""
        facts = self.device.facts
        if facts.num_flagged:
            ids = ids[facts.flags[ids] == 0]
        return facts.state[ids].tobytes().count(CACHED)

    def _shared_tails(self, rows: Rows) -> Rows:
        """Return the rows whose last block has other holders."""
        shared = (self.device.facts.state[self.tables.last(rows)] & SHARED) != 0
        tails: Rows = rows[shared]
        return tails

    def _count_copies(self, rows: Rows) -> int:
        """Return how many blocks copy-on-write takes: the last writer of a block keeps it if nobody else holds it."""
        blocks, writers = np.unique(self.tables.last(rows), return_counts=True)
        return sum(
            min(n, self.device.ref_count(block) - 1) for block, n in zip(blocks.tolist(), writers.tolist(), strict=True)
        )

    def _copy_on_write(self, row: int) -> None:
        at = np.array([row])
        old = self.tables.last(at)
        if self.device.ref_count(int(old[0])) < 2:
            return
        new = np.asarray(self.device.allocate(1), np.int64)
        try:
            self.storage.copy(CopyJob("device", old, "device", new))
        except StorageError:
            self.device.release(new)
            raise
        self.tables.set_last(at, new)
        self.device.release(old)
        self.copy_on_write_blocks += 1

    def _move_stage(self, stage: Moves) -> int:
        pool = self.device
        if len(stage.evicted):
            pool.evict_exactly(stage.evicted)
        pool.reserve_exactly(stage.destinations)
        both = np.concatenate((stage.sources, stage.destinations))
        pool.set_flag(both, BlockFlag.FENCED)
        try:
            moved_bytes = self.storage.copy(CopyJob("device", stage.sources, "device", stage.destinations))
        except StorageError:
            pool.clear_flag(both, BlockFlag.FENCED)
            pool.unreserve(stage.destinations)
            raise
        pool.clear_flag(both, BlockFlag.FENCED)
        pool.commit_moves(stage.sources, stage.destinations)
        remap = np.arange(pool.num_blocks, dtype=np.int64)
        remap[stage.sources] = stage.destinations
        self.tables.rename(remap)
        return moved_bytes

    def _existing(self, block_ids: IdArray) -> IdArray:
        ids = np.unique(np.asarray(block_ids, np.int64))
        if len(ids) and (ids[0] < 0 or ids[-1] >= self.device.num_blocks):
            raise NotHeld(f"blocks are numbered 0 to {self.device.num_blocks - 1}")
        return ids


def require_host(manager: BlockManager, num_blocks: int) -> None:
    """Raise ``Refused`` unless the host tier has room for ``num_blocks``."""
    host = manager.host
    if host.num_blocks == 0:
        raise Refused("there is no host tier (--swap-blocks 0)")
    if num_blocks > host.num_allocatable:
        raise Refused(f"host tier: {num_blocks} blocks needed, {host.num_allocatable} of {host.num_blocks} free")
