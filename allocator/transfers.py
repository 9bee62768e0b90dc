"""Transfers: copies of blocks in three steps, begin, copy and commit, of which only the copy takes long.

``begin`` and ``commit`` hold the allocator lock for a moment. In between the blocks on both sides are fenced and the
rows concerned are taken, so nobody writes, moves, evicts or hands out what a copy uses; the copy itself needs
no lock and may run in any thread, in any order beside others. A transfer that fails is aborted, and everything
is as if it had not begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

from allocator.content import TokenArray
from allocator.errors import Refused
from allocator.facts import CACHED, FREE
from allocator.ids import NO_ROW, BlockFlag, BlockKey, IdArray
from allocator.plans import CopyJob, Moves
from allocator.pool import BlockPool
from allocator.prefix_cache import ROOT
from allocator.timings import Stopwatch

if TYPE_CHECKING:
    from allocator.manager import BlockManager

TransferKind = Literal["swap-out", "swap-in", "copy-on-write", "compaction", "resize", "write"]
#: Those that copy anything.
COPY_KINDS: Final[tuple[TransferKind, ...]] = tuple(kind for kind in get_args(TransferKind) if kind != "write")


class Transfer:
    """A copy that has begun, to be committed or aborted exactly once.

    Attributes:
        kind: Why blocks are copied.
        job: What is to be copied.
        rows: Device rows taken until the end. [n]
        row: The device row that loses or gets the blocks of a swap; ``NO_ROW`` for other kinds.
        host_row: The host row on the other side.
        frees: Device blocks that will be allocatable once it is committed, as far as known now.
    """

    __slots__ = ("_abort", "_commit", "_ended", "frees", "host_row", "job", "kind", "row", "rows")

    def __init__(
        self,
        kind: TransferKind,
        job: CopyJob,
        *,
        commit: Callable[[], None],
        abort: Callable[[], None],
        rows: Sequence[int] = (),
        row: int = NO_ROW,
        host_row: int = NO_ROW,
        frees: int = 0,
    ) -> None:
        self.kind: TransferKind = kind
        self.job = job
        self.rows = tuple(rows)
        self.row, self.host_row = row, host_row
        self.frees = frees
        self._commit, self._abort = commit, abort
        self._ended = False


def _nothing() -> None:
    """What ends a write: its blocks are no longer fenced, and that is all."""


class Transfers:
    """Begins and ends the transfers of one manager.

    Args:
        manager: Whose blocks, tables and storage these are.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.num_open = 0
        #: What copies that were committed took, by their kind.
        self.times = {kind: Stopwatch() for kind in COPY_KINDS}
        #: Whether the pool is being shrunk. What lies above its new end may then be read by that copy alone.
        self.shrinking = False

    # -- the three steps -----------------------------------------------------------------------------

    def run(self, transfer: Transfer) -> int:
        """Copy in this thread, commit, and return the bytes read.

        Raises:
            StorageError: The copy failed; the transfer is aborted.
        """
        started_s = time.perf_counter()
        try:
            moved_bytes = self._manager.storage.copy(transfer.job)
        except BaseException:
            self.abort(transfer)
            raise
        self.commit(transfer, time.perf_counter() - started_s)
        return moved_bytes

    def commit(self, transfer: Transfer, seconds: float | None = None) -> None:
        """Let the copy count: tables name the new blocks, the old ones are given back.

        Args:
            transfer: What was begun.
            seconds: What its copy took; ``None`` where nothing had to be copied.
        """
        self._end(transfer, transfer._commit, seconds)

    def abort(self, transfer: Transfer) -> None:
        """Undo what ``begin`` did."""
        self._end(transfer, transfer._abort)

    def _begin(self, transfer: Transfer) -> Transfer:
        for pool, block_ids in self._each_side(transfer.job):
            pool.fence(block_ids)
        self._manager.sequences.take(transfer.rows)
        self.num_open += 1
        return transfer

    def _end(self, transfer: Transfer, way: Callable[[], None], seconds: float | None = None) -> None:
        manager = self._manager
        with manager.lock:
            if transfer._ended:
                raise Refused(f"this {transfer.kind} has ended already")
            transfer._ended = True
            self.num_open -= 1
            if seconds is not None:
                self.times[transfer.kind].add(seconds)
            for pool, block_ids in self._each_side(transfer.job):
                pool.unfence(block_ids)
            try:
                way()
            finally:
                manager.sequences.drop(transfer.rows)

    def _each_side(self, job: CopyJob) -> tuple[tuple[BlockPool, IdArray], tuple[BlockPool, IdArray]]:
        manager = self._manager
        pools = {"device": manager.device, "host": manager.host}
        # Several writers may copy one block, which is fenced once for all of them.
        return (pools[job.source_tier], np.unique(job.sources)), (pools[job.destination_tier], job.destinations)

    # -- kinds ---------------------------------------------------------------------------------------

    def begin_swap_out(self, row: int) -> Transfer:
        """Begin to copy a row's blocks to the host tier; committed, the row is gone and ``host_row`` has them.

        Raises:
            OutOfBlocks: The host tier has too few free blocks; nothing changes.
        """
        manager = self._manager
        with manager.lock:
            manager.wait_for_row(row, copying=True)
            tables, host = manager.tables, manager.host
            ids = tables.table(row).copy()
            host_ids = np.asarray(host.allocate(len(ids)), np.int64)
            host_row = manager.host_tables.new_row(host_ids, int(tables.num_tokens[row]))
            flags = manager.device.facts.flags
            alone = len(ids) - manager.device.count_shared(ids)
            pinned = int(np.count_nonzero(flags[ids] & BlockFlag.PINNED)) if manager.device.facts.num_flagged else 0

            def abort() -> None:
                host.release(host_ids)
                manager.host_tables.drop_row(host_row)

            return self._begin(
                Transfer(
                    "swap-out",
                    CopyJob("device", ids, "host", host_ids),
                    commit=lambda: manager.release_row(row),
                    abort=abort,
                    rows=(row,),
                    row=row,
                    host_row=host_row,
                    frees=max(0, alone - pinned),
                )
            )

    def begin_swap_in(
        self,
        host_row: int,
        keys: Sequence[BlockKey],
        *,
        tokens: TokenArray | None = None,
        keep: int = 0,
        one_run: bool = False,
    ) -> Transfer:
        """Begin to bring a swapped sequence back, into as few runs as there are; committed, ``row`` has its blocks.

        Blocks whose content is still cached on the device are shared instead of copied. ``keys`` and ``tokens`` are
        those of ``BlockManager.admit``. With ``one_run`` it needs one run again, and ``keys`` is empty.

        Raises:
            OutOfBlocks: Too few device blocks, ``keep`` of them left out; nothing changes.
            NoContiguousRun: No run is long enough; nothing changes.
        """
        manager = self._manager
        with manager.lock:
            pool = manager.device
            host_ids = manager.host_tables.table(host_row).copy()
            num_tokens = int(manager.host_tables.num_tokens[host_row])
            keys = keys[: num_tokens // manager.block_size]
            ids = manager.resident(host_row, keys, tokens)
            resident = ids[ids != NO_ROW]
            missing = np.flatnonzero(ids == NO_ROW)
            manager.require(len(missing) + manager.count_idle(resident), keep)
            pool.share(resident)
            fresh = pool.allocate_contiguous(len(missing)) if one_run else pool.allocate_compact(len(missing))
            ids[missing] = fresh
            row = manager.tables.new_row(ids, num_tokens)
            manager.tables.one_run[row] = one_run

            def commit() -> None:
                if manager.config.prefix_cache and keys:
                    self._publish(row, keys, tokens, int(missing[0]) if len(missing) else len(ids))
                manager.release_host_row(host_row)

            return self._begin(
                Transfer(
                    "swap-in",
                    CopyJob("host", host_ids[missing], "device", fresh),
                    commit=commit,
                    abort=lambda: manager.release_row(row),
                    rows=(row,),
                    row=row,
                    host_row=host_row,
                )
            )

    def _publish(self, row: int, keys: Sequence[BlockKey], tokens: TokenArray | None, first_copied: int) -> None:
        """Let what a swap brought back be found again; blocks before ``first_copied`` were found by their content."""
        manager = self._manager
        size, first = manager.block_size, min(first_copied, len(keys)) if tokens is not None else 0
        ids = manager.tables.table(row)
        manager.tables.identity[row] = manager.device.cache.identity_of(int(ids[first - 1])) if first else ROOT
        if first < len(keys):
            own = None if tokens is None else tokens[first * size : len(keys) * size]
            manager.insert_keys(row, keys[first:], first, own)

    def begin_copy_on_write(self, rows: IdArray) -> Transfer:
        """Begin to give each of these rows a last block of its own; the blocks they end on have other holders. [n]

        The caller has waited for the rows to be writable, and still holds the allocator lock.

        Raises:
            OutOfBlocks: Too few blocks; nothing changes.
        """
        manager = self._manager
        with manager.lock:
            pool = manager.device
            old = manager.tables.last(rows)
            new = pool.reserve(len(rows))

            def commit() -> None:
                pool.hand_out(new)
                manager.tables.set_last(rows, new)
                pool.release(old)  # which nobody moved: it was fenced by this copy alone
                manager.copy_on_write_blocks += len(rows)

            return self._begin(
                Transfer(
                    "copy-on-write",
                    CopyJob("device", old, "device", new),
                    commit=commit,
                    abort=lambda: pool.unreserve(new),
                    rows=rows.tolist(),
                )
            )

    def begin_write(self, row: int, start: int, stop: int) -> Transfer:
        """Keep the blocks of a row's tokens ``start`` to ``stop`` where they are until committed, for their writer.

        There is nothing to copy. Waits for copies that use the row or these blocks.
        """
        manager = self._manager
        with manager.lock:
            manager.wait_for_blocks(row, start, stop)
            ids = manager.blocks_of(row, start, stop)
            nothing = CopyJob("device", ids, "device", ids[:0])
            return self._begin(Transfer("write", nothing, commit=_nothing, abort=_nothing, rows=(row,), row=row))

    def begin_moves(self, stage: Moves) -> Transfer:
        """Begin one stage of a compaction. Blocks that nobody holds any more at its commit, or that
        were pinned meanwhile, stay where they are.

        Raises:
            Refused: Blocks have changed since the plan was made; nothing changes.
        """
        manager = self._manager
        with manager.lock:
            self._check_current(stage)
            pool = manager.device
            if len(stage.evicted):
                pool.evict_exactly(stage.evicted)
            pool.reserve_exactly(stage.destinations)
            return self._begin(
                Transfer(
                    "compaction",
                    CopyJob("device", stage.sources, "device", stage.destinations),
                    commit=lambda: self._commit_moves(stage),
                    abort=lambda: pool.unreserve(stage.destinations),
                )
            )

    def begin_shrink(self, stage: Moves, num_blocks: int) -> Transfer:
        """Begin to empty all blocks from ``num_blocks`` on; committed, the pool ends there.

        Until then nothing above the new end is handed out.

        Raises:
            Refused: Blocks have changed since the plan was made; nothing changes.
        """
        manager = self._manager
        with manager.lock:
            self._check_current(stage)
            pool = manager.device
            if len(stage.evicted):
                pool.evict_exactly(stage.evicted)
            above = np.flatnonzero(pool.facts.state[num_blocks:] == FREE) + num_blocks
            pool.reserve_exactly(np.concatenate((stage.destinations, above)))
            self.shrinking = True

            def commit() -> None:
                self.shrinking = False
                self._commit_moves(stage)
                pool.unreserve(above)
                pool.resize(num_blocks)
                manager.storage.resize("device", num_blocks)

            def abort() -> None:
                self.shrinking = False
                pool.unreserve(np.concatenate((stage.destinations, above)))

            return self._begin(
                Transfer(
                    "resize",
                    CopyJob("device", stage.sources, "device", stage.destinations),
                    commit=commit,
                    abort=abort,
                )
            )

    # -- inside --------------------------------------------------------------------------------------

    def _check_current(self, stage: Moves) -> None:
        """Raise ``Refused`` unless the blocks of a stage still are what its plan took them for."""
        facts = self._manager.device.facts
        state, flags = facts.state, facts.flags
        touched = np.concatenate((stage.sources, stage.destinations, stage.evicted))
        if len(touched) and int(touched.max()) >= facts.num_blocks:
            raise Refused("the plan is out of date: the pool has shrunk")
        free = state[stage.destinations] == FREE
        free |= np.isin(stage.destinations, stage.evicted)
        if (
            flags[touched].any()
            or not free.all()
            or (state[stage.evicted] != CACHED).any()
            or (state[stage.sources] == FREE).any()
            or np.isin(stage.sources, self._manager.fixed_blocks()).any()
        ):
            raise Refused("the plan is out of date: its blocks have changed")

    def _commit_moves(self, stage: Moves) -> None:
        manager = self._manager
        pool, facts = manager.device, manager.device.facts
        stay = (facts.state[stage.sources] == FREE) | ((facts.flags[stage.sources] & BlockFlag.PINNED) != 0)
        sources, destinations = stage.sources, stage.destinations
        if stay.any():
            pool.unreserve(destinations[stay])
            sources, destinations = sources[~stay], destinations[~stay]
        pool.commit_moves(sources, destinations)
        remap = np.arange(pool.num_blocks, dtype=np.int64)
        remap[sources] = destinations
        manager.tables.rename(remap)
