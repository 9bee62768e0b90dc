"""Stress: threads that use one ``BlockManager`` at random, and the proof that nothing was lost or mixed up.

Each client thread owns its sequences: it admits, extends, forks, swaps and frees them, stamps every token it
writes and reads its own back. One more thread acts as an operator: it compacts, resizes, evicts and pins
underneath them, and checks every law.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from allocator.commands import CompactGoal
from allocator.content import Content, TokenContent, slot_stamps
from allocator.errors import InvariantViolation, RequestError
from allocator.ids import Tier
from allocator.invariants import check_manager
from allocator.manager import BlockManager

_GOALS: tuple[CompactGoal, ...] = ("pack-low", "longest-run", "by-sequence")
#: Different tokens in the streams: few, so that prefixes are often shared.
_VOCABULARY = 3
#: Sequences a client holds at most.
_HELD = 4


@dataclass(slots=True)
class StressReport:
    """What a stress run did.

    Attributes:
        operations: Operations of the clients that succeeded, by kind.
        refused: Operations refused for want of blocks.
        operator: Operations of the operator that succeeded, by kind.
        checks: Times every law was checked.
        fault: The first broken law; ``None`` when all held.
        error: What ended the operator, if neither a refusal nor a broken law.
    """

    operations: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    operator: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    fault: InvariantViolation | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Held:
    """One sequence of a client: on the device or on the host."""

    content: Content
    num_tokens: int
    row: int | None
    host_row: int | None = None


def run_stress(
    manager: BlockManager,
    *,
    threads: int,
    operations: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> StressReport:
    """Drive ``manager`` from ``threads`` client threads and one operator until ``operations`` were tried.

    Args:
        manager: An empty manager with a storage that keeps stamps, or none.
        threads: Client threads, at least 1.
        operations: Operations of all clients together.
        seed: Seed of every thread's choices; the interleaving is the machine's.
        progress: Called now and then with the operations done.

    Returns:
        The report. At the end every block is given back, and every law was checked once more.

    Raises:
        Exception: Whatever a thread met that is neither a refusal nor a broken law.
    """
    report = StressReport()
    clients = [_Client(manager, seed * 1000 + n, operations // threads) for n in range(threads)]
    stop = threading.Event()
    operator = threading.Thread(target=_operate, args=(manager, seed, stop, report), daemon=True)
    workers = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in (*workers, operator):
        thread.start()
    for thread in workers:
        while thread.is_alive():
            thread.join(timeout=0.5)
            if progress is not None:
                progress(sum(client.done for client in clients))
            if report.fault is not None or any(client.fault or client.error for client in clients):
                for client in clients:
                    client.quota = 0
    stop.set()
    operator.join(timeout=60)
    if report.error is not None:
        raise report.error
    for client in clients:
        if client.error is not None:
            raise client.error
        report.operations += client.operations
        report.refused += client.refused
        report.fault = report.fault or client.fault
    if report.fault is None:
        try:
            _check_empty(manager)
            report.checks += 1
        except InvariantViolation as violation:
            report.fault = violation
    return report


class _Client:
    """One client thread's choices, sequences and counts."""

    def __init__(self, manager: BlockManager, seed: int, quota: int) -> None:
        self.manager = manager
        self.quota = quota
        self.done = self.refused = 0
        self.operations: Counter[str] = Counter()
        self.fault: InvariantViolation | None = None
        self.error: Exception | None = None
        self._rng = random.Random(seed)
        self._numbers = np.random.Generator(np.random.PCG64(seed))
        self._held: list[_Held] = []
        self._longest = max(1, min(8 * manager.block_size, manager.device.num_blocks * manager.block_size // 3))

    def run(self) -> None:
        """Do operations until the quota is used up, then give everything back."""
        try:
            while self.done < self.quota:
                self.done += 1
                try:
                    self._act()
                except RequestError:
                    self.refused += 1
                    if self._held:
                        self._free(self._held.pop())
            for held in self._held:
                self._verify(held)
                self._free(held)
        except InvariantViolation as violation:
            self.fault = violation
        except Exception as error:
            self.error = error

    def _act(self) -> None:
        rng, held = self._rng, self._held
        if not held or (len(held) < _HELD and rng.random() < 0.25):
            held.append(self._admit())
            return
        sequence = rng.choice(held)
        if sequence.host_row is not None:
            self._swap_in(sequence)
            return
        roll = rng.random()
        if roll < 0.55:
            self._append(sequence)
        elif roll < 0.65:
            self._verify(sequence)
        elif roll < 0.72 and len(held) < _HELD:
            held.append(self._fork(sequence))
        elif roll < 0.80:
            self._swap_out(sequence)
        else:
            held.remove(sequence)
            self._verify(sequence)
            self._free(sequence)

    def _admit(self) -> _Held:
        manager, size = self.manager, self.manager.block_size
        num_tokens = self._rng.randint(1, self._longest)
        content = TokenContent(self._numbers.integers(0, _VOCABULARY, num_tokens + 4 * size).astype(np.int32))
        # Most streams begin alike, so that prefixes are found again.
        content.stream[: num_tokens // 2] = 1
        keys = content.keys(size)
        row, matched, _ = manager.admit(keys, num_tokens, tokens=content.stream)
        held = _Held(content, num_tokens, row)
        self._write(held, matched * size, num_tokens)
        full = num_tokens // size
        manager.publish_keys(row, keys[matched:full], matched, tokens=content.stream[matched * size : full * size])
        self.operations["admit"] += 1
        return held

    def _append(self, held: _Held) -> None:
        if held.num_tokens == held.content.num_tokens:
            return
        assert held.row is not None
        self.manager.append(np.array([held.row]))
        held.num_tokens += 1
        self._write(held, held.num_tokens - 1, held.num_tokens)
        size = self.manager.block_size
        tokens, block = held.content.exact_tokens(), held.num_tokens // size
        if held.num_tokens % size == 0 and tokens is not None:
            own = tokens[(block - 1) * size : block * size]
            self.manager.publish_keys(held.row, held.content.keys(size)[block - 1 : block], block - 1, tokens=own)
        self.operations["append"] += 1

    def _fork(self, held: _Held) -> _Held:
        assert held.row is not None
        row = self.manager.fork(held.row)
        self.operations["fork"] += 1
        return _Held(held.content.forked(held.num_tokens, self._rng.getrandbits(40)), held.num_tokens, row)

    def _swap_out(self, held: _Held) -> None:
        assert held.row is not None
        held.host_row, held.row = self.manager.swap_out(held.row), None
        self.operations["swap-out"] += 1

    def _swap_in(self, held: _Held) -> None:
        assert held.host_row is not None
        keys, tokens = held.content.keys(self.manager.block_size), held.content.exact_tokens()
        held.row, _ = self.manager.swap_in(held.host_row, keys, tokens=tokens)
        held.host_row = None
        self.operations["swap-in"] += 1

    def _free(self, held: _Held) -> None:
        if held.row is not None:
            self.manager.free(held.row)
        elif held.host_row is not None:
            self.manager.free_host(held.host_row)
        self.operations["free"] += 1

    def _write(self, held: _Held, start: int, stop: int) -> None:
        if stop <= start or self.manager.storage.block_bytes == 0:
            return
        assert held.row is not None
        stamps = slot_stamps(held.content.tokens(start, stop), np.arange(start, stop, dtype=np.int64))
        with self.manager.writing(held.row, start, stop) as slots:
            self.manager.storage.write_stamps("device", slots, stamps)

    def _verify(self, held: _Held) -> None:
        """Read every slot of one sequence back."""
        manager, n = self.manager, held.num_tokens
        if manager.storage.block_bytes == 0:
            return
        stamps = slot_stamps(held.content.tokens(0, n), np.arange(n, dtype=np.int64))
        tier: Tier = "device" if held.row is not None else "host"
        row = held.row if held.row is not None else held.host_row
        assert row is not None
        with manager.lock:
            good = manager.storage.check_stamps(tier, manager.slots(tier, row, 0, n), stamps)
        if not good.all():
            raise InvariantViolation(5, f"{tier} row {row}, token {int(np.argmin(good))} holds other content")
        self.operations["verify"] += 1


def _operate(manager: BlockManager, seed: int, stop: threading.Event, report: StressReport) -> None:
    """Compact, resize, evict and pin until told to stop, and check every law in between."""
    rng = random.Random(~seed)
    first_size = manager.device.num_blocks
    pinned: list[int] = []
    try:
        while not stop.wait(0.001):
            try:
                roll = rng.random()
                if roll < 0.4:
                    with manager.lock:
                        manager.move(manager.plan_compaction(rng.choice(_GOALS), None, rng.choice((None, 4))))
                    report.operator["compact"] += 1
                elif roll < 0.6:
                    manager.resize(max(1, first_size + rng.randint(-first_size // 3, first_size // 3)))
                    report.operator["resize"] += 1
                elif roll < 0.7:
                    with manager.lock:
                        manager.device.evict(rng.randint(1, 8))
                    report.operator["evict"] += 1
                elif pinned:
                    manager.unpin(np.array([pinned.pop()]))
                    report.operator["unpin"] += 1
                else:
                    block = rng.randrange(max(1, first_size // 2))
                    manager.pin(np.array([block]))
                    pinned.append(block)
                    report.operator["pin"] += 1
            except RequestError:
                report.operator["refused"] += 1
            check_manager(manager)
            report.checks += 1
        if pinned:
            manager.unpin(np.array(pinned))
    except InvariantViolation as violation:
        report.fault = violation
    except Exception as error:
        report.error = error


def _check_empty(manager: BlockManager) -> None:
    check_manager(manager)
    for pool in (manager.device, manager.host):
        if pool.num_active or pool.num_reserved:
            raise InvariantViolation(
                1, f"{pool.tier}: {pool.num_active} active and {pool.num_reserved} reserved blocks are left over"
            )
