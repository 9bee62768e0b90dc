"""Threads at work, for the lesson about them: what goes wrong without a lock, and what the allocator's layers count.

All of it is bounded: so many operations by so many threads, which meet at a barrier with a deadline.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from allocator import BlockManager, BlockPool, SharedPool, chain_keys
from allocator.config import EngineConfig
from allocator.content import TokenContent
from allocator.errors import OutOfBlocks
from allocator.locks import CountedLock
from allocator.storage import NoStorage
from kvtop.learn.expression import Value

#: Seconds that threads wait for each other, and for their end.
_MEET_S: Final = 10.0
_END_S: Final = 30.0
#: Seconds after which Python may switch threads while optimistic lookups are shown; usually it is 0.005.
_SWITCH_S: Final = 1e-5
_BLOCK_SIZE: Final = 16
_LOOKUP_BLOCKS: Final = 48
_PROMPT_BLOCKS: Final = 6


class UnlockedPool:
    """A pool as one would write it at first: a count and a list, and nothing that keeps threads apart.

    Args:
        num_blocks: Its blocks.
        between: Called between reading the count and writing it, where the machine may switch threads.
    """

    def __init__(self, num_blocks: int, between: Callable[[], object]) -> None:
        self.num_free = num_blocks
        self._between = between

    def take(self) -> int:
        """Return a free block: the one with the highest number."""
        seen = self.num_free
        self._between()
        self.num_free = seen - 1
        return seen - 1


def lose_updates(threads: int, takes: int) -> dict[str, Value]:
    """Let threads take blocks from an unlocked pool, and from the same pool behind a lock.

    At the first take all threads read the count before any of them writes it; after that it is the machine's choice.

    Returns:
        ``taken``: blocks handed out by each pool; ``counted``: how many the unlocked pool thinks it handed out;
        ``lost``: the difference; ``twice``: blocks that two or more threads hold; ``twice_locked``: the same behind
        the lock.
    """
    total = threads * takes
    meeting = threading.Barrier(threads)
    met = threading.local()

    def between() -> None:
        if getattr(met, "done", False):
            time.sleep(0)  # lets another thread run
        else:
            met.done = True
            meeting.wait(_MEET_S)

    pool = UnlockedPool(total, between)
    handed = _run(threads, lambda: [pool.take() for _ in range(takes)])
    lock, locked = threading.Lock(), UnlockedPool(total, lambda: time.sleep(0))

    def take_locked() -> list[int]:
        mine = []
        for _ in range(takes):
            with lock:
                mine.append(locked.take())
        return mine

    kept = _run(threads, take_locked)
    counted = total - pool.num_free
    return {
        "taken": len(handed),
        "counted": counted,
        "lost": total - counted,
        "twice": _twice(handed),
        "twice_locked": _twice(kept),
    }


def count_lock(threads: int, pairs: int) -> dict[str, Value]:
    """Let threads allocate and release single blocks, without reservations and with them; count takings of the lock.

    Returns:
        ``calls`` of all threads, ``takings`` and ``takings_reserved`` of the allocator lock, how often somebody had to
        wait for it (``waits``, ``waits_reserved``), and ``refills`` of reservations.
    """
    results: dict[str, Value] = {"calls": 2 * threads * pairs}
    for suffix, reserve in (("", False), ("_reserved", True)):
        lock = CountedLock("allocator")
        taken = _counted(lock)
        pool = SharedPool(BlockPool(1024), lock, reserve=reserve)

        def churn(pool: SharedPool = pool) -> list[int]:
            for _ in range(pairs):
                pool.release(pool.allocate(1))
            pool.give_back()
            return []

        _run(threads, churn)
        results[f"takings{suffix}"] = taken[0] + lock.contended
        results[f"waits{suffix}"] = lock.contended
        results["refills"] = pool.refills
    return results


def look_up_optimistically(threads: int, lookups: int) -> dict[str, Value]:
    """Let threads admit prompts into a pool that is too small for all of them, so that blocks are evicted meanwhile.

    Returns:
        ``lookups`` made, ``retries`` of those that somebody had changed something for, and blocks ``found``.
    """
    config = EngineConfig(num_blocks=_LOOKUP_BLOCKS, geometry="none", num_swap_blocks=0, watermark_ratio=0.0)
    manager = BlockManager(config, NoStorage())
    rng = np.random.Generator(np.random.PCG64(12))
    prompts = [rng.integers(0, 1000, _PROMPT_BLOCKS * _BLOCK_SIZE + 4, dtype=np.int32) for _ in range(12)]
    made = [(TokenContent(tokens).stream, chain_keys(tokens, _BLOCK_SIZE)) for tokens in prompts]
    numbers = iter(range(1 << 30))

    def admit() -> list[int]:
        hits = []
        for _ in range(lookups):
            number = next(numbers)
            # Every second lookup is for the same popular prompt, the others are for one after another.
            tokens, keys = made[0 if number % 2 else number // 2 % len(made)]
            try:
                admission = manager.admit(keys, len(tokens), tokens=tokens)
            except OutOfBlocks:
                continue
            first = admission.matched_blocks
            own = tokens[first * _BLOCK_SIZE : len(keys) * _BLOCK_SIZE]
            manager.publish_keys(admission.row, keys[first:], first, tokens=own)
            manager.free(admission.row)
            hits.append(first)
        return hits

    with _switching_often():
        hits = _run(threads, admit)
    return {"lookups": threads * lookups, "retries": manager.optimistic_retries, "found": sum(hits)}


def _run(threads: int, work: Callable[[], list[int]]) -> list[int]:
    """Run ``work`` in so many threads that start together, and return all that they return."""
    results: list[list[int]] = []
    errors: list[BaseException] = []
    start = threading.Barrier(threads)

    def run() -> None:
        try:
            start.wait(_MEET_S)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, name=f"kvtop-lesson-{n}", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + _END_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if any(worker.is_alive() for worker in workers):
        raise ValueError(f"the threads have not ended within {_END_S:g} s")
    return [value for values in results for value in values]


def _twice(handed: list[int]) -> int:
    return sum(count > 1 for count in Counter(handed).values())


def _counted(lock: CountedLock) -> list[int]:
    """Count how often a lock is had at the first try, in the list that is returned."""
    taken, take = [0], lock.try_acquire

    def counted(*arguments: bool) -> bool:
        is_mine: bool = take(*arguments)
        if is_mine:
            taken[0] += 1  # whoever counts holds the lock
        return is_mine

    lock.try_acquire = counted  # type: ignore[assignment]
    return taken


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
