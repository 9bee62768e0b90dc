"""BlockManager: sequences' blocks over both tiers: admit, append, fork, free, swap, move, resize.

Every operation is all or nothing, and any thread may call any of them: they hold the allocator lock, but for
the copies (see ``transfers``), during which the rows concerned are taken instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.block_table import BlockTables
from allocator.commands import CompactGoal
from allocator.compaction import PoolShape, plan_by_sequence, plan_longest_run, plan_pack_low, plan_shrink
from allocator.config import EngineConfig
from allocator.content import TokenArray
from allocator.errors import NotHeld, OutOfBlocks, Refused
from allocator.facts import CACHED, HOLDERS_MASK, SHARED
from allocator.ids import NO_ROW, BlockFlag, BlockKey, IdArray, Tier
from allocator.locks import CountedLock, SequenceLocks
from allocator.metrics import find_runs
from allocator.observing import TierObserver
from allocator.plans import MovePlan, Moves
from allocator.pool import BlockPool
from allocator.prefix_cache import ROOT
from allocator.storage import Storage
from allocator.transfers import Transfers

Rows = NDArray[np.int64]
NO_IDS: Final = np.empty(0, np.int64)
# As an array without a dimension: numpy works with it in two thirds of the time that a Python int takes.
_ONE: Final = np.array(1)

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


class Extension(NamedTuple):
    """What the next token of some rows needs.

    Attributes:
        growing: Rows whose last block is full. [g]
        copying: Rows whose last block has other holders, the last writer aside. [c]
        num_blocks: Blocks needed: g + c.
    """

    growing: Rows
    copying: Rows
    num_blocks: int


class BlockManager:
    """Blocks, tables and storage of one engine.

    Args:
        config: Sizes and policies.
        storage: Where keys and values lie; resized to the configured pools.
    """

    def __init__(self, config: EngineConfig, storage: Storage) -> None:
        self.config = config
        self.block_size = config.block_size
        self._size = np.array(config.block_size)
        self.storage = storage
        self.lock = CountedLock("allocator")
        slab_size = config.slab_size
        self.device = BlockPool(config.num_blocks, slab_size=slab_size, eviction=config.eviction)
        self.host = BlockPool(config.num_swap_blocks, slab_size=slab_size, tier="host")
        self.tables = BlockTables()
        self.host_tables = BlockTables()
        self.copy_on_write_blocks = 0
        self.optimistic_retries = 0
        self.sequences = SequenceLocks(self.lock)
        self.transfers = Transfers(self)
        #: Held around an operation that copies: with sequence locks off, the allocator lock, so that it never lets go.
        self._whole: AbstractContextManager[object] = nullcontext() if config.sequence_locks else self.lock
        self._may_share_tails = False
        self._observers: dict[Tier, TierObserver] = {
            "device": TierObserver(self.device, self.tables, self.block_size),
            "host": TierObserver(self.host, self.host_tables, self.block_size),
        }
        storage.resize("device", config.num_blocks)
        storage.resize("host", config.num_swap_blocks)

    # -- sequences -----------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def admit(
        self,
        keys: Sequence[BlockKey],
        num_tokens: int,
        *,
        tokens: TokenArray | None = None,
        keep: int = 0,
        max_new: int | None = None,
        run_blocks: int = 0,
    ) -> Admission:
        """Give a sequence the blocks for its first ``num_tokens`` tokens, shared ones from the prefix cache first.

        A block that the prompt ends on is shared, or taken over in place, even when all of it is cached;
        only the count of hits is one less. Its keys are not published: see ``publish_keys``.

        Args:
            keys: Keys of its leading full blocks, as far as they can be found by content.
            num_tokens: Tokens to be computed or found now, at least 1.
            tokens: Its tokens, to be compared on a hit; ``None`` where keys are exact by themselves.
            keep: Blocks that must stay allocatable.
            max_new: Tokens to be computed now, at most; there must be room for all, but blocks for the rest are left
                to ``grow``. ``None`` is no limit.
            run_blocks: Where above 0, give it one run of that many consecutive blocks, for all the tokens it will
                ever have. It shares none of them, whatever ``keys`` says, they do not move, and ``max_new`` counts
                for nothing: a run is had at once or not at all.

        Raises:
            OutOfBlocks: Too few blocks; nothing changes.
            NoContiguousRun: No run is long enough; nothing changes.
        """
        if run_blocks:
            with self.lock:
                return Admission(self._new_run(run_blocks, num_tokens, keep), 0, 0)
        wanted = keys[: num_tokens // self.block_size] if self.config.prefix_cache else ()
        matched = self._match_and_lock(wanted, tokens)
        try:
            pool = self.device
            fresh = needed = self.blocks_for(num_tokens) - len(matched)
            if max_new is not None:
                num_tokens = min(num_tokens, len(matched) * self.block_size + max_new)
                fresh = self.blocks_for(num_tokens) - len(matched)
            identity = ROOT
            if matched:
                shared = np.array(matched, np.int64)
                self.require(needed + self.count_idle(shared), keep)
                pool.share(shared)
                ids = np.concatenate((shared, np.asarray(pool.allocate(fresh), np.int64)))
                if tokens is not None:
                    identity = pool.cache.identity_of(matched[-1])
            else:
                self.require(needed, keep)
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
            self.wait_for_row(row)
            self.insert_keys(row, keys, first, tokens)

    def extend(self, rows: Rows) -> None:
        """Make room for the next token of every row: a block where the last is full, a copy where it is shared.

        Raises:
            OutOfBlocks: Too few blocks for all of them; no row was extended.
            StorageError: A copy failed; no row was extended, and rows copied before keep their copies.
        """
        self._extend(rows, 0)

    def _extend(self, rows: Rows, num_tokens: int) -> None:
        """``extend``, and in the same moment count ``num_tokens`` more tokens in each row."""
        with self._whole:
            while True:
                with self.lock:
                    need = self.plan_extension(rows)
                    self.require(need.num_blocks, 0)
                    if not len(need.copying):
                        self.add_blocks(need.growing)
                        self.tables.num_tokens[rows] += num_tokens
                        return
                    transfer = self.transfers.begin_copy_on_write(need.copying)
                # Looked at again after each copy: its rows may have been forked meanwhile.
                self.transfers.run(transfer)

    def plan_extension(self, rows: Rows) -> Extension:
        """Return what the next token of every row needs. Waits for copies that use a row or its last block. [n]"""
        tables = self.tables
        self._wait_writable(rows)
        full = tables.num_tokens[rows] == tables.num_blocks[rows] * self.block_size
        growing = rows[full]
        if not self._may_share_tails:
            return Extension(growing, NO_IDS, len(growing))
        sharing = self._shared_tails(rows[~full])
        if len(sharing) == 0:
            # Only a look at every row says that no tail is shared any more.
            self._may_share_tails = len(rows) < len(tables.rows())
            return Extension(growing, sharing, len(growing))
        copying = self._copiers(sharing)
        return Extension(growing, copying, len(growing) + len(copying))

    def add_blocks(self, rows: Rows) -> None:
        """Append a fresh block to each row's table; the caller has seen that there are as many. [n]"""
        if len(rows):
            self.tables.append(rows, np.asarray(self.device.allocate(len(rows)), np.int64))

    def trim(self, row: int) -> None:
        """Release the blocks of a row that hold none of its tokens: what ``extend`` gave and nothing was written to.

        A row that needs one run keeps all of it.
        """
        with self.lock:
            if self.tables.one_run[row]:
                return
            used = self.blocks_for(int(self.tables.num_tokens[row]))
            if used < self.tables.num_blocks[row]:
                self.device.release(self.tables.cut(row, used))

    def append(self, rows: Rows) -> None:
        """Make room for the next token of every row and count it as written: a decode step in one call. [n]

        Raises:
            OutOfBlocks: Too few blocks for all of them; nothing changes.
            StorageError: As ``extend`` does; no token is counted.
        """
        with self.lock:
            tables = self.tables
            if not self._may_share_tails and not self.transfers.num_open:
                tokens, room = tables.num_tokens[rows], tables.num_blocks[rows]
                room *= self._size
                full = rows[tokens == room]
                if len(full):
                    tables.append(full, np.asarray(self.device.allocate(len(full)), np.int64))
                tokens += _ONE
                tables.num_tokens[rows] = tokens
                return
        self._extend(rows, 1)

    def write(self, rows: Rows, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens as written in each row; their blocks are there already."""
        with self.lock:  # another thread's new row may replace the array between its reading and its writing
            self.tables.num_tokens[rows] += num_tokens

    def grow(self, row: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` more tokens of one row and count them as written.

        Raises:
            OutOfBlocks: Too few blocks for all of them; nothing changes.
            StorageError: The copy of a shared last block failed; nothing changes.
            NotHeld, Refused: As ``wait_until_writable``.
        """
        with self.lock:
            tables = self.tables
            self.wait_until_writable(row)
            written, num_blocks = int(tables.num_tokens[row]), int(tables.num_blocks[row])
            fresh = max(0, self.blocks_for(written + num_tokens) - num_blocks)
            is_copied = written < num_blocks * self.block_size and len(self._shared_tails(np.array([row]))) > 0
            self.require(fresh + is_copied, 0)
            if is_copied:
                # One block: the lock is kept, so that all is done or nothing.
                self.transfers.run(self.transfers.begin_copy_on_write(np.array([row])))
            if fresh:
                tables.extend(row, np.asarray(self.device.allocate(fresh), np.int64))
            tables.num_tokens[row] = written + num_tokens

    def wait_until_writable(self, row: int) -> None:
        """Wait until no copy uses a row, nor its last block while that has room.

        Raises:
            NotHeld: The row went away meanwhile.
            Refused: It took too long.
        """
        with self.lock:
            self._wait_writable(np.array([row]))

    def free(self, row: int) -> None:
        """Release a row's blocks, tail first, and forget the row."""
        with self.lock:
            self.wait_for_row(row)
            self.release_row(row)

    def free_many(self, rows: Rows) -> None:
        """Release several rows' blocks, each tail first, and forget the rows. Distinct rows. [n]"""
        with self.lock:
            for row in rows.tolist():
                self.free(row)

    def fork(self, row: int) -> int:
        """Return a new row that shares every block of ``row``. Nothing is copied until one of them is written."""
        with self.lock:
            self.wait_for_row(row)
            ids = self.tables.table(row).copy()
            self.device.share(ids)
            self._may_share_tails = True
            tables = self.tables
            return tables.new_row(ids, int(tables.num_tokens[row]), int(tables.identity[row]))

    def count_released(self, ids: IdArray) -> int:
        """Return how many blocks would become allocatable if these table entries let go of theirs. [n]"""
        blocks, entries = np.unique(ids, return_counts=True)
        facts = self.device.facts
        held = (facts.state[blocks] & HOLDERS_MASK).astype(np.int64)
        counts = np.where(held == SHARED, facts.refs[blocks], held)
        return int(np.count_nonzero((counts == entries) & (facts.flags[blocks] == 0)))

    # -- tiers ---------------------------------------------------------------------------------------

    def swap_out(self, row: int) -> int:
        """Copy a row's blocks to the host tier, release them, and return the host row.

        Raises:
            OutOfBlocks: The host tier has too few free blocks.
            StorageError: The copy failed. In both cases nothing changes.
        """
        with self._whole:
            transfer = self.transfers.begin_swap_out(row)
            self.transfers.run(transfer)
            return transfer.host_row

    def swap_in(
        self,
        host_row: int,
        keys: Sequence[BlockKey],
        *,
        tokens: TokenArray | None = None,
        keep: int = 0,
        one_run: bool = False,
    ) -> tuple[int, int]:
        """Bring a swapped sequence back, into as few runs as there are; return its row and the blocks copied.

        Blocks whose content is still cached on the device are shared instead of copied. ``keys`` and ``tokens`` are
        those of ``admit``. With ``one_run`` it needs one run again, and ``keys`` is empty.

        Raises:
            OutOfBlocks: Too few device blocks, ``keep`` of them left out.
            NoContiguousRun: No run is long enough.
            StorageError: The copy failed. In all cases nothing changes.
        """
        with self._whole:
            transfer = self.transfers.begin_swap_in(host_row, keys, tokens=tokens, keep=keep, one_run=one_run)
            self.transfers.run(transfer)
            return transfer.row, len(transfer.job.sources)

    def plan_swap_in(
        self, host_row: int, keys: Sequence[BlockKey], *, tokens: TokenArray | None = None
    ) -> tuple[int, int]:
        """Return how many blocks ``swap_in`` would copy, and by how many fewer would be allocatable after it."""
        with self.lock:
            ids = self.resident(host_row, keys, tokens)
            missing = int(np.count_nonzero(ids == NO_ROW))
            return missing, missing + self.count_idle(ids[ids != NO_ROW])

    def free_host(self, host_row: int) -> None:
        """Release a swapped sequence's host blocks and forget its host row."""
        with self.lock:
            self.release_host_row(host_row)

    # -- moves and size ------------------------------------------------------------------------------

    def shape(self) -> PoolShape:
        """Return the device pool as planning sees it."""
        facts = self.device.facts
        order, slab_size = self.device.eviction_order(), self.device.slab_size
        return PoolShape(facts.state, facts.flags, order, slab_size, self.fixed_blocks())

    def fixed_blocks(self) -> IdArray:
        """Return the blocks of rows that need one run, which do not move. [f]"""
        rows = np.flatnonzero(self.tables.one_run).tolist()
        return np.concatenate([self.tables.table(row) for row in rows]) if rows else NO_IDS

    def longest_possible_run(self) -> int:
        """Return the longest run there would be if no sequence held a block: between pinned blocks and slab ends."""
        pool = self.device
        _, lengths = find_runs((pool.facts.flags & BlockFlag.PINNED) == 0, pool.slab_size)
        return int(lengths.max(initial=0))

    def plan_compaction(
        self, goal: CompactGoal, run_blocks: int | None, max_moves: int | None, *, keep_cached: bool = False
    ) -> MovePlan:
        """Return the moves towards ``goal``; with ``keep_cached``, to pack low, only those that evict nothing.

        Raises:
            OutOfBlocks, Refused: The goal cannot be reached; see ``allocator.compaction``.
        """
        with self.lock:
            shape = self.shape()
            if goal == "pack-low":
                return plan_pack_low(shape, max_moves, keep_cached=keep_cached)
            if goal == "longest-run":
                return plan_longest_run(shape, run_blocks, max_moves)
            tables = [self.tables.table(row) for row in self.tables.rows().tolist()]
            return plan_by_sequence(shape, tables, max_moves)

    def move(self, plan: MovePlan) -> int:
        """Carry out a plan stage by stage and return the bytes read.

        Each stage reserves its destinations, fences both sides, copies, and then re-points every table in one commit.

        Raises:
            StorageError: A copy failed; its stage is undone, and the stages before it stand.
            Refused: The plan is out of date; the stages before stand.
        """
        with self._whole:
            return sum(self.transfers.run(self.transfers.begin_moves(stage)) for stage in plan.stages)

    def plan_resize(self, num_blocks: int) -> MovePlan:
        """Return the moves that a new pool size needs; none to grow.

        Raises:
            OutOfBlocks: What is held does not fit.
            Refused: A pinned block lies above the new end.
        """
        with self.lock:
            if num_blocks >= self.device.num_blocks:
                return MovePlan()
            # A resize waits for the copies under way, so their fences do not count here.
            facts = self.device.facts
            pinned = facts.flags & np.uint8(BlockFlag.PINNED)
            # Cached blocks behind fences are in no eviction order; by then they are back at its end.
            fenced = np.flatnonzero((facts.state == CACHED) & (facts.flags != 0) & (pinned == 0))
            order = np.concatenate((self.device.eviction_order(), fenced))
            shape = PoolShape(facts.state, pinned, order, self.device.slab_size, self.fixed_blocks())
            return plan_shrink(shape, num_blocks)

    def resize(self, num_blocks: int) -> MovePlan:
        """Grow the device pool, or drain and shrink it; return the moves made.

        Raises:
            OutOfBlocks, Refused: It does not fit; see ``plan_resize``.
            StorageError: No memory, or a copy failed; the pool keeps its size.
        """
        with self._whole:
            with self.lock:
                # A copy under way above the new end has to end first; none begins there while the lock is held.
                self.sequences.wait_until(lambda: self.transfers.num_open == 0, "resize")
                plan = self.plan_resize(num_blocks)
                if num_blocks >= self.device.num_blocks:
                    self.storage.resize("device", num_blocks)
                    self.device.resize(num_blocks)
                    return plan
                stage = plan.stages[0] if plan.stages else Moves(NO_IDS, NO_IDS, NO_IDS)
                transfer = self.transfers.begin_shrink(stage, num_blocks)
            self.transfers.run(transfer)
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
        """Copy one tier's arrays out; ``None`` for a host tier without blocks. Cost: as in ``TierObserver.write``.

        Args:
            tier: Which tier.
            into: Arrays of the pool's size to write to, such as a map's own memory; by default new ones.
        """
        with self.lock:
            pool = self.device if tier == "device" else self.host
            if pool.num_blocks == 0:
                return None
            out = into if into is not None else BlockArrays.empty(pool.num_blocks)
            self._observers[tier].write(out)
            return out

    def fenced_tails(self, rows: Rows) -> Rows:
        """Return the rows that must not be written: a copy uses their last block, and it has room. [n] → [m]"""
        tables = self.tables
        fenced = (self.device.facts.flags[tables.last(rows)] & BlockFlag.FENCED) != 0
        tails: Rows = rows[fenced & (tables.num_tokens[rows] < tables.num_blocks[rows] * self.block_size)]
        return tails

    def row_numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many blocks each device row shares, and in how many runs its table lies. [rows], [rows]"""
        with self.lock:
            return self._observers["device"].row_numbers()

    def slots(self, tier: Tier, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the slots of a row's tokens ``start`` to ``stop``. [stop - start]"""
        tables = self.tables if tier == "device" else self.host_tables
        positions = np.arange(start, stop, dtype=np.int64)
        with self.lock:
            blocks = tables.table(row)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def blocks_of(self, row: int, start: int, stop: int) -> IdArray:
        """Return the device blocks that hold a row's tokens ``start`` to ``stop``. [m]"""
        return self.tables.table(row)[start // self.block_size : self.blocks_for(stop)].copy()

    @contextmanager
    def writing(self, row: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Give the slots of a row's tokens ``start`` to ``stop``, and keep them in place while the context lasts.

        For writers in threads of their own, who do not hold the allocator lock: no compaction moves the blocks, nobody
        swaps or releases the row meanwhile. [stop - start]

        Raises:
            NotHeld: The row went away while a copy used it.
            Refused: A copy used it for too long.
        """
        transfer = self.transfers.begin_write(row, start, stop)
        try:
            yield self.slots("device", row, start, stop)
        finally:
            self.transfers.commit(transfer)

    # -- for transfers, under the lock ---------------------------------------------------------------

    def wait_for_row(self, row: int, *, copying: bool = False) -> None:
        """Wait until no copy uses a row and, before ``copying`` it, the pool is not being shrunk.

        Raises:
            NotHeld: The row went away meanwhile.
            Refused: It took too long.
        """
        if self.transfers.num_open:
            self._wait_until_free(
                [row], lambda: not (self.sequences.any_taken((row,)) or (copying and self.transfers.shrinking))
            )

    def wait_for_blocks(self, row: int, start: int, stop: int) -> None:
        """Wait until no copy uses a row, nor the blocks of its tokens ``start`` to ``stop``.

        Raises:
            NotHeld, Refused: As ``wait_for_row``.
        """
        if not self.transfers.num_open:
            return

        def ready() -> bool:
            if self.transfers.shrinking or self.sequences.any_taken((row,)):
                return False
            return not (self.device.facts.flags[self.blocks_of(row, start, stop)] & BlockFlag.FENCED).any()

        self._wait_until_free([row], ready)

    def release_row(self, row: int) -> None:
        """Release a row's blocks, tail first, and forget the row."""
        self.device.release_distinct(self.tables.table(row)[::-1].copy())
        self.tables.drop_row(row)

    def release_host_row(self, host_row: int) -> None:
        """Release a host row's blocks and forget the row."""
        self.host.release_distinct(self.host_tables.table(host_row)[::-1].copy())
        self.host_tables.drop_row(host_row)

    def insert_keys(self, row: int, keys: Sequence[BlockKey], first: int, tokens: TokenArray | None) -> None:
        """Publish keys of a row's blocks from ``first`` on, and remember how its content goes on from there."""
        tables = self.tables
        ids = tables.table(row)[first : first + len(keys)]
        tables.identity[row] = self.device.insert_keys(ids, keys, tokens, int(tables.identity[row])).identity

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

    def resident(self, host_row: int, keys: Sequence[BlockKey], tokens: TokenArray | None) -> IdArray:
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

    def _new_run(self, num_blocks: int, num_tokens: int, keep: int) -> int:
        """Return a new row with one run of ``num_blocks`` blocks."""
        self.require(num_blocks, keep)
        row = self.tables.new_row(self.device.allocate_contiguous(num_blocks), num_tokens)
        self.tables.one_run[row] = True
        return row

    def require(self, needed: int, keep: int) -> None:
        """Raise ``OutOfBlocks`` unless ``needed`` blocks can be taken and ``keep`` stay allocatable."""
        allocatable = self.device.num_allocatable
        if needed + keep > allocatable:
            raise OutOfBlocks(needed + keep, allocatable)

    def count_idle(self, ids: IdArray) -> int:
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

    def _copiers(self, rows: Rows) -> Rows:
        """Return which of these rows copy their shared last block: its last writer keeps it if nobody else holds it."""
        copying: list[int] = []
        left: dict[int, int] = {}
        for row, block in zip(rows.tolist(), self.tables.last(rows).tolist(), strict=True):
            holders = left.setdefault(block, self.device.ref_count(block))
            if holders > 1:
                copying.append(row)
                left[block] = holders - 1
        return np.array(copying, np.int64)

    def _wait_writable(self, rows: Rows) -> None:
        """Wait until no copy uses any of these rows, nor the last block of one that has room in it."""
        if not self.transfers.num_open:
            return
        ids, transfers = rows.tolist(), self.transfers
        self._wait_until_free(
            ids,
            lambda: not (transfers.shrinking or self.sequences.any_taken(ids) or len(self.fenced_tails(rows))),
        )

    def _wait_until_free(self, rows: list[int], ready: Callable[[], bool]) -> None:
        births = [self.tables.births[row] for row in rows]
        self.sequences.wait_until(ready, f"sequence row {rows[0]}" if len(rows) == 1 else f"{len(rows)} sequence rows")
        if [self.tables.births[row] for row in rows] != births:
            raise NotHeld("a sequence was released while somebody waited for it")

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
