"""SharedPool: a pool that any thread may use, with a small reservation of blocks for each thread.

A thread that allocates a few blocks at a time takes ``SLAB`` of them in one go and hands out from there
without the allocator lock; a release goes back to the same place. Under the GIL a list's
``pop`` and ``append`` are atomic, and so is writing a state byte, so a reservation needs no lock even
when another thread steals from it: whoever pops an id has it, and nobody else.

Source: per-thread magazines as in Bonwick and Adams' slab allocator, with stealing so that blocks
cannot be stranded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from allocator.facts import FREE, RESERVED, SOLE
from allocator.free_list import SCALAR_BELOW
from allocator.ids import BlockFlag, IdArray
from allocator.locks import CountedLock
from allocator.pool import BlockPool, Ids

#: Blocks moved between a reservation and the pool in one go.
SLAB: Final = 256
#: Batches below this many blocks use the reservation when the lock is taken by somebody else.
CONTENDED_BELOW: Final = 64


class Reservation:
    """One thread's promised blocks. Only its thread appends; anybody may pop.

    Attributes:
        blocks: Ids in state ``RESERVED``, next to be handed out last.
        handed_out: Blocks given to this thread from here.
        taken_back: Blocks this thread gave back here.
        refills: Times it was filled from the pool.
        spills: Times surplus went back.
        thread: Its owner.
    """

    __slots__ = ("blocks", "handed_out", "refills", "seen", "spills", "taken_back", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.blocks: list[int] = []
        self.handed_out = self.taken_back = self.refills = self.spills = 0
        self.seen = -1
        self.thread = thread


class SharedPool:
    """Thread-safe ``allocate`` and ``release`` over one ``BlockPool``.

    An allocation never fails while reserved blocks exist: it steals them. Blocks with keys, holders
    to count, or flags take the way through the allocator lock, where ``BlockPool`` knows the rules. The pool is
    resized only while no thread allocates or releases, since they write state bytes without the lock.

    Args:
        pool: The pool; use it directly only under ``lock``.
        lock: The allocator lock.
        reserve: Whether threads reserve; without, every call takes the lock.
    """

    def __init__(self, pool: BlockPool, lock: CountedLock | None = None, *, reserve: bool = True) -> None:
        self.pool = pool
        self.lock = lock or CountedLock("allocator")
        self.reserve = reserve
        self.steals = 0
        self._past_refills = 0
        self._try_lock, self._unlock = self.lock.try_acquire, self.lock.release
        self._local = threading.local()
        self._reservations: list[Reservation] = []

    @property
    def num_reserved(self) -> int:
        """Blocks in reservations; exact when no thread is at work."""
        return sum(len(r.blocks) for r in self._reservations)

    @property
    def refills(self) -> int:
        """Times a reservation was filled from the pool."""
        return self._past_refills + sum(r.refills for r in self._reservations)

    def allocate(self, n: int) -> Ids:
        """Take ``n`` blocks with one reference each.

        Returns:
            Their ids: a list from a reservation, an array from the pool. [n]

        Raises:
            OutOfBlocks: Fewer can be had, reserved ones included; nothing is taken.
        """
        if n < SCALAR_BELOW and self.reserve:
            if n != 1:
                return self._allocate_few(n)
            try:
                mine = self._local.mine
                block = mine.blocks.pop()
            except (AttributeError, IndexError):
                return self._allocate_few(1)
            self.pool.facts.state_bytes[block] = SOLE
            mine.handed_out += 1
            return [block]
        if not self._try_lock(False):
            if n < CONTENDED_BELOW and self.reserve:
                return self._allocate_few(n)
            self.lock.acquire()
        try:
            pool = self.pool
            # ``_allocate_locked``, without the call.
            if n > pool.num_free_listed and self._reservations:
                self._steal_all()
            return pool.allocate(n)
        finally:
            self._unlock()

    def release(self, block_ids: Ids) -> None:
        """Drop one reference for each id, as ``BlockPool.release`` does.

        Raises:
            NotHeld: A double free; nothing changes.
        """
        n = len(block_ids)
        if n < SCALAR_BELOW and self.reserve:
            # One block is the commonest case by far, and a call would cost as much as all of this.
            if n == 1 and type(block_ids) is list:
                facts, block = self.pool.facts, block_ids[0]
                mine = getattr(self._local, "mine", None)
                if (
                    0 <= block < self.pool.num_blocks
                    and facts.state_bytes[block] == SOLE
                    and not facts.num_flagged
                    and mine is not None
                    and len(mine.blocks) < 2 * SLAB
                ):
                    facts.state_bytes[block] = RESERVED
                    mine.blocks.append(block)
                    mine.taken_back += 1
                    if self.pool.facts.num_flagged:
                        self._return_surplus(mine)
                    return
            if self._release_few(block_ids):
                return
            self.lock.acquire()
        elif not self._try_lock(False):
            if n < CONTENDED_BELOW and self.reserve and self._release_few(block_ids):
                return
            self.lock.acquire()
        try:
            self.pool.release(block_ids)
        finally:
            self._unlock()

    def share(self, block_ids: Ids) -> None:
        """Add one reference to each block. Distinct ids; see ``BlockPool.share``."""
        with self.lock:
            self.pool.share(block_ids)

    def pin(self, block_ids: IdArray) -> None:
        """Pin blocks; reserved ones go back to the pool first, where they stay."""
        with self.lock:
            self.pool.set_flag(block_ids, BlockFlag.PINNED)
            # After the flag is up every release takes the lock; what was reserved before is fetched here.
            self._steal_all()

    def unpin(self, block_ids: IdArray) -> None:
        """Undo ``pin``."""
        with self.lock:
            self.pool.clear_flag(block_ids, BlockFlag.PINNED)

    def give_back(self) -> int:
        """Return the calling thread's reserved blocks to the pool; return how many."""
        mine = self._mine()
        with self.lock:
            return self._drain(mine)

    def reclaim_idle(self) -> int:
        """Return to the pool what threads reserved and have not touched since the last call, or left behind.

        Returns:
            Blocks that came back.
        """
        with self.lock:
            back = 0
            for reservation in list(self._reservations):
                used = reservation.handed_out + reservation.taken_back
                if used == reservation.seen or not reservation.thread.is_alive():
                    back += self._drain(reservation)
                reservation.seen = used
            return back

    def reclaim_all(self) -> int:
        """Return every reserved block to the pool; return how many.

        Threads may reserve again at once: to resize or check the pool, stop them first.
        """
        with self.lock:
            return self._steal_all()

    # -- without the lock ----------------------------------------------------------------------------

    def _allocate_few(self, n: int) -> Ids:
        try:
            mine: Reservation = self._local.mine
        except AttributeError:
            mine = self._mine()
        blocks, state = mine.blocks, self.pool.facts.state_bytes
        # Looked at first: who takes what it has and then fails for the rest makes others fail meanwhile.
        if len(blocks) < n:
            return self._refill(mine, n)
        taken: list[int] = []
        try:
            for _ in range(n):
                block = blocks.pop()
                state[block] = SOLE
                taken.append(block)
        except IndexError:  # stolen since the look
            for block in taken:
                state[block] = RESERVED
            blocks += taken
            return self._refill(mine, n)
        mine.handed_out += n
        return taken

    def _release_few(self, block_ids: Ids) -> bool:
        """Take blocks with one holder and no key back into this thread's reservation; return whether they all were."""
        pool = self.pool
        facts = pool.facts
        if facts.num_flagged:
            return False
        try:
            mine: Reservation = self._local.mine
        except AttributeError:
            mine = self._mine()
        ids: Sequence[int] = block_ids.tolist() if isinstance(block_ids, np.ndarray) else block_ids
        if not facts.restate_sole(ids, RESERVED):
            return False
        mine.blocks += ids
        mine.taken_back += len(ids)
        # A block may have been pinned, or the pool have asked for everything back, since the look above.
        if len(mine.blocks) > 2 * SLAB or facts.num_flagged:
            self._return_surplus(mine)
        return True

    # -- under the lock ------------------------------------------------------------------------------

    def _refill(self, mine: Reservation, n: int) -> Ids:
        """Fill a reservation that is short of ``n`` blocks, and allocate from it; else from the pool."""
        with self.lock:
            pool = self.pool
            missing = n - len(mine.blocks)
            # Promised blocks are free ones only, and at most half of them, so that reserving never evicts.
            slab = min(SLAB, pool.num_free_listed // 2) if not pool.facts.num_flagged else 0
            if slab > missing:
                fresh = pool.take_free(slab)
                pool.facts.state[fresh] = RESERVED
                mine.blocks += fresh.tolist()
                mine.refills += 1
                pool.num_refills += 1
                taken = [mine.blocks.pop() for _ in range(n)]
                pool.facts.state[taken] = SOLE
                mine.handed_out += n
                return taken
            self._put_back(_pop_until(mine.blocks, 0))
            ids = self._allocate_locked(n)
            return ids.tolist() if isinstance(ids, np.ndarray) else ids

    def _allocate_locked(self, n: int) -> Ids:
        pool = self.pool
        if n > pool.num_free_listed and self._reservations:
            # Blocks that are promised but unused are better given out than cached ones evicted.
            self._steal_all()
        return pool.allocate(n)

    def _steal_all(self) -> int:
        back = sum(self._drain(reservation) for reservation in list(self._reservations))
        self.steals += back > 0
        return back

    def _return_surplus(self, mine: Reservation) -> None:
        """Give back what a reservation has too much of: all of it while any block is flagged."""
        with self.lock:
            keep = 0 if self.pool.facts.num_flagged else SLAB
            self._put_back(_pop_until(mine.blocks, keep))
            mine.spills += 1

    def _drain(self, reservation: Reservation) -> int:
        back = _pop_until(reservation.blocks, 0)
        self._put_back(back)
        if not reservation.thread.is_alive():
            self._forget(reservation)
        return len(back)

    def _forget(self, reservation: Reservation) -> None:
        """Drop the empty reservation of a thread that has ended; its counts go to the pool's."""
        self._reservations.remove(reservation)
        self.pool.reservations[:] = [r.blocks for r in self._reservations]
        self._past_refills += reservation.refills
        self.pool.num_allocated += reservation.handed_out
        self.pool.num_freed += reservation.taken_back

    def _put_back(self, block_ids: list[int]) -> None:
        if block_ids:
            ids = np.array(block_ids, np.int64)
            self.pool.facts.state[ids] = FREE
            self.pool.put_free(ids)

    def _mine(self) -> Reservation:
        try:
            mine: Reservation = self._local.mine
        except AttributeError:
            mine = self._local.mine = Reservation(threading.current_thread())
            self._local.exit = _AtExit(self, mine)
            with self.lock:
                self._reservations.append(mine)
                self.pool.reservations.append(mine.blocks)
        return mine


class _AtExit:
    """Gives a thread's reservation back when the thread ends: its thread-local values are dropped then."""

    __slots__ = ("mine", "pool")

    def __init__(self, pool: SharedPool, mine: Reservation) -> None:
        self.pool, self.mine = pool, mine

    def __del__(self) -> None:
        with self.pool.lock:
            if self.mine in self.pool._reservations:
                self.pool._put_back(_pop_until(self.mine.blocks, 0))
                self.pool._forget(self.mine)


def _pop_until(blocks: list[int], keep: int) -> list[int]:
    """Pop ids until ``keep`` are left; others may pop at the same time, so an empty list just ends it."""
    popped: list[int] = []
    with contextlib.suppress(IndexError):
        while len(blocks) > keep:
            popped.append(blocks.pop())
    return popped
