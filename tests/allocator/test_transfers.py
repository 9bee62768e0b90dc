"""Transfers: copies that stay open while anything else happens, against what each sequence should read back."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from fake_storage import ListStorage

import allocator.locks
from allocator.config import EngineConfig
from allocator.errors import NotHeld, OutOfBlocks, Refused, StorageError
from allocator.invariants import check_manager
from allocator.manager import BlockManager
from allocator.transfers import Transfer

SIZE = 4
BOUND_S = 20.0


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    """Nothing here waits unless it says so; a wait that should not be is refused soon."""
    monkeypatch.setattr(allocator.locks, "WAIT_BOUND_S", 0.05)


def manager_of(num_blocks: int = 24, *, storage: ListStorage | None = None, **settings: object) -> BlockManager:
    config = EngineConfig(num_blocks=num_blocks, num_swap_blocks=16, block_size=SIZE, **settings)
    return BlockManager(config, storage or ListStorage(SIZE))


@dataclass
class Held:
    """A sequence and the stamps it should read back; ``row`` or ``host_row`` says where."""

    stamps: list[int]
    row: int | None = None
    host_row: int | None = None


@dataclass
class Open:
    """A transfer under way, and the sequence it swaps."""

    transfer: Transfer
    held: Held | None = None
    copied: bool = False


class World:
    """Random operations on one manager, with any number of transfers open, and what they should lead to."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.manager = manager_of(slab_blocks=(None, 7)[seed % 2])
        self.held: list[Held] = []
        self.open: list[Open] = []
        self.next_stamp = 1
        self.counts: dict[str, int] = {}

    def pick(self, held: list[Held]) -> Held | None:
        return held[int(self.rng.integers(len(held)))] if held else None

    def free_rows(self) -> list[Held]:
        """Sequences on the device that no open transfer uses."""
        return [h for h in self.held if h.row is not None and not self.manager.sequences.any_taken((h.row,))]

    def writable(self) -> list[Held]:
        rows = [] if self.manager.transfers.shrinking else self.free_rows()
        tails = {int(r) for r in self.manager.fenced_tails(np.array([h.row for h in rows], np.int64))} if rows else ()
        return [h for h in rows if h.row not in tails]

    def write(self, held: Held, start: int) -> None:
        slots = self.manager.slots("device", held.row, start, len(held.stamps))
        self.manager.storage.write_stamps("device", slots, np.array(held.stamps[start:], np.uint64))

    def fresh(self, n: int) -> list[int]:
        self.next_stamp += n
        return list(range(self.next_stamp - n, self.next_stamp))

    # -- operations --

    def admit(self) -> None:
        n = int(self.rng.integers(1, 4 * SIZE))
        held = Held(self.fresh(n), self.manager.admit((), n).row)
        self.held.append(held)
        self.write(held, 0)

    def append(self) -> None:
        if held := self.pick(self.writable()):
            self.manager.append(np.array([held.row]))
            held.stamps = held.stamps + self.fresh(1)
            self.write(held, len(held.stamps) - 1)

    def fork(self) -> None:
        if held := self.pick(self.free_rows()):
            self.held.append(Held(held.stamps, self.manager.fork(held.row)))

    def free(self) -> None:
        if held := self.pick(self.free_rows()):
            self.manager.free(held.row)
            self.held.remove(held)

    def pin(self) -> None:
        ids = self.rng.integers(0, self.manager.device.num_blocks, 2)
        (self.manager.pin if self.rng.random() < 0.3 else self.manager.unpin)(ids)

    def begin_swap_out(self) -> None:
        if not self.manager.transfers.shrinking and (held := self.pick(self.free_rows())):
            self.open.append(Open(self.manager.transfers.begin_swap_out(held.row), held))

    def begin_swap_in(self) -> None:
        waiting = [h for h in self.held if h.host_row is not None and all(o.held is not h for o in self.open)]
        if held := self.pick(waiting):
            self.open.append(Open(self.manager.transfers.begin_swap_in(held.host_row, ()), held))

    def begin_copy_on_write(self) -> None:
        rows = [h.row for h in self.writable() if len(h.stamps) % SIZE]
        if rows and not self.manager.transfers.shrinking:
            need = self.manager.plan_extension(np.array(rows))
            if len(need.copying):
                self.open.append(Open(self.manager.transfers.begin_copy_on_write(need.copying)))

    def begin_moves(self) -> None:
        goal = ("pack-low", "longest-run", "by-sequence")[int(self.rng.integers(3))]
        for stage in self.manager.plan_compaction(goal, None, 6).stages[:1]:
            self.open.append(Open(self.manager.transfers.begin_moves(stage)))

    def begin_shrink(self) -> None:
        if self.manager.transfers.num_open == 0:
            end = self.manager.device.num_blocks - int(self.rng.integers(1, 5))
            plan = self.manager.plan_resize(max(8, end))
            if plan.stages:
                self.open.append(Open(self.manager.transfers.begin_shrink(plan.stages[0], max(8, end))))

    def grow(self) -> None:
        if self.manager.transfers.num_open == 0:
            self.manager.resize(24)

    def copy(self) -> None:
        """Carry out the copy of one open transfer, whenever that is."""
        if waiting := [o for o in self.open if not o.copied]:
            chosen = waiting[int(self.rng.integers(len(waiting)))]
            self.manager.storage.copy(chosen.transfer.job)
            chosen.copied = True

    def end(self) -> None:
        """Commit a transfer that was copied, or abort one that was not or only in part."""
        if not self.open:
            return
        chosen = self.open.pop(int(self.rng.integers(len(self.open))))
        transfers, transfer, held = self.manager.transfers, chosen.transfer, chosen.held
        if not chosen.copied:
            transfers.abort(transfer)
            return
        try:
            transfers.commit(transfer)
        except Refused:
            assert transfer.kind == "resize"  # a block above the new end was pinned meanwhile
        if held is not None:
            held.row, held.host_row = (None, transfer.host_row) if transfer.kind == "swap-out" else (transfer.row, None)

    OPERATIONS = (
        *("admit", "append", "append", "append", "fork", "free", "pin", "grow"),
        *("begin_swap_out", "begin_swap_in", "begin_copy_on_write", "begin_moves", "begin_shrink"),
        *("copy", "copy", "end", "end"),
    )

    def act(self) -> None:
        name = self.OPERATIONS[int(self.rng.integers(len(self.OPERATIONS)))]
        before = self.manager.transfers.num_open
        try:
            getattr(self, name)()
        except (OutOfBlocks, NotHeld):
            assert self.manager.transfers.num_open == before
        except Refused as error:
            if "kept it for" in str(error):
                raise
        self.counts[name] = self.counts.get(name, 0) + (self.manager.transfers.num_open > before)

    def check(self) -> None:
        check_manager(self.manager)
        for held in self.held:
            tier, row = ("device", held.row) if held.row is not None else ("host", held.host_row)
            slots = self.manager.slots(tier, row, 0, len(held.stamps))
            good = self.manager.storage.check_stamps(tier, slots, np.array(held.stamps, np.uint64))
            assert good.all(), f"{tier} row {row}"


@pytest.mark.parametrize("seed", range(12))
def test_anything_may_happen_while_copies_are_open(seed):
    world = World(seed)
    for _ in range(500):
        world.act()
        world.check()
    for name in ("begin_swap_out", "begin_swap_in", "begin_copy_on_write", "begin_moves"):
        assert world.counts[name] > 0, name
    while world.open:
        world.copy()
        world.end()
        world.check()
    manager = world.manager
    assert (manager.transfers.num_open, manager.sequences.num_taken) == (0, 0)
    manager.unpin(np.arange(manager.device.num_blocks))
    assert manager.device.facts.num_flagged == 0


def test_a_block_that_two_copies_use_is_fenced_until_both_have_ended():
    manager = manager_of()
    a = manager.admit((), 2 * SIZE).row
    b = manager.fork(a)
    one, two = manager.transfers.begin_swap_out(a), manager.transfers.begin_swap_out(b)
    manager.transfers.run(one)
    assert manager.device.facts.num_flagged == 2
    assert manager.device.num_free == 22
    check_manager(manager)
    manager.transfers.run(two)
    assert (manager.device.facts.num_flagged, manager.device.num_free) == (0, 24)


def test_nothing_above_the_new_end_is_handed_out_once_a_shrink_has_begun():
    manager = manager_of()
    rows = [manager.admit((), SIZE).row for _ in range(24)]
    for row in rows[:20]:
        manager.free(row)
    plan = manager.plan_resize(12)
    transfer = manager.transfers.begin_shrink(plan.stages[0], 12)
    taken = np.asarray(manager.device.allocate(manager.device.num_allocatable))
    assert len(taken) == 8
    assert taken.max() < 12
    manager.device.release(taken)
    manager.transfers.run(transfer)
    assert manager.device.num_blocks == 12
    check_manager(manager)


def test_what_was_released_or_pinned_during_a_compaction_does_not_move():
    manager = manager_of()
    rows = [manager.admit((), SIZE).row for _ in range(6)]
    for row in rows[:3]:
        manager.free(row)
    plan = manager.plan_compaction("pack-low", None, None)
    transfer = manager.transfers.begin_moves(plan.stages[0])
    blocks = [int(manager.tables.table(row)[0]) for row in rows[3:]]
    manager.free(rows[3])
    manager.pin(np.array(blocks[1:2]))
    assert manager.device.num_reserved == 3
    manager.transfers.run(transfer)
    check_manager(manager)
    moved_to = dict(zip(transfer.job.sources.tolist(), transfer.job.destinations.tolist(), strict=True))
    assert [int(manager.tables.table(row)[0]) for row in rows[4:]] == [blocks[1], moved_to[blocks[2]]]
    assert manager.device.num_reserved == 0


def test_a_transfer_ends_once():
    manager = manager_of()
    transfer = manager.transfers.begin_swap_out(manager.admit((), 3).row)
    manager.transfers.run(transfer)
    with pytest.raises(Refused, match="ended already"):
        manager.transfers.abort(transfer)


@pytest.mark.parametrize("change", ["released", "pinned", "taken"])
def test_a_plan_that_is_out_of_date_is_refused_and_changes_nothing(change):
    manager = manager_of()
    rows = [manager.admit((), SIZE).row for _ in range(4)]
    manager.free(rows[0])
    plan = manager.plan_compaction("pack-low", None, None)
    if change == "released":
        manager.free(rows[3])
    elif change == "pinned":
        manager.pin(plan.stages[0].destinations)
    else:
        manager.device.allocate_contiguous(1)
    before = manager.device.num_free, manager.device.num_reserved
    with pytest.raises(Refused, match="out of date"):
        manager.move(plan)
    assert (manager.device.num_free, manager.device.num_reserved) == before


# -- threads -----------------------------------------------------------------------------------------


class SlowStorage(ListStorage):
    """Copies that do not end before they are let go."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.started, self.go = threading.Event(), threading.Event()

    def copy(self, job):
        if len(job.sources):
            self.started.set()
            assert self.go.wait(BOUND_S)
        return super().copy(job)


def in_thread(call) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("sequence_locks", [True, False])
def test_others_go_on_during_a_copy_and_its_own_sequence_waits(sequence_locks, monkeypatch):
    monkeypatch.setattr(allocator.locks, "WAIT_BOUND_S", BOUND_S)
    storage = SlowStorage()
    manager = manager_of(storage=storage, sequence_locks=sequence_locks)
    mine, other = manager.admit((), SIZE).row, manager.admit((), SIZE).row
    host_rows: list[int] = []
    swapper, swap_errors = in_thread(lambda: host_rows.append(manager.swap_out(mine)))
    assert storage.started.wait(BOUND_S)
    appender, append_errors = in_thread(lambda: manager.append(np.array([other])))
    if sequence_locks:
        appender.join(BOUND_S)
        assert not appender.is_alive()
        waiter, wait_errors = in_thread(lambda: manager.append(np.array([mine])))
        while not waiter_waits(manager):
            assert waiter.is_alive()
        storage.go.set()
        waiter.join(BOUND_S)
        # The row went away while it waited, so it must not touch whoever has its number next.
        assert [type(e) for e in wait_errors] == [NotHeld]
        assert manager.sequences.contended == 1
        assert manager.sequences.longest_wait_s > 0
    else:
        # The whole swap holds the allocator lock.
        assert not manager.lock.try_acquire(False)
        storage.go.set()
        appender.join(BOUND_S)
    swapper.join(BOUND_S)
    assert not swapper.is_alive()
    assert not swap_errors
    assert not append_errors
    assert len(host_rows) == 1
    check_manager(manager)


def waiter_waits(manager: BlockManager) -> bool:
    with manager.lock:
        return bool(manager.sequences._changed._waiters)


def test_blocks_stay_in_place_while_they_are_written(monkeypatch):
    manager = manager_of()
    rows = [manager.admit((), 2 * SIZE).row for _ in range(3)]
    manager.free(rows[0])
    with manager.writing(rows[2], SIZE + 1, 2 * SIZE) as slots:
        assert slots.tolist() == manager.slots("device", rows[2], SIZE + 1, 2 * SIZE).tolist()
        written = manager.tables.table(rows[2])[1:].tolist()
        plan = manager.plan_compaction("pack-low", None, None)
        assert not np.isin(written, plan.stages[0].sources).any()
        manager.move(plan)
        assert manager.tables.table(rows[2])[1:].tolist() == written
        for call in (lambda: manager.free(rows[2]), lambda: manager.swap_out(rows[2])):
            with pytest.raises(Refused, match="a copy has kept it"):
                call()
        check_manager(manager)
    manager.free(rows[2])
    # And who wants to write waits for a copy of these very blocks.
    plan = manager.plan_compaction("longest-run", None, None)
    transfer = manager.transfers.begin_swap_out(rows[1])
    with pytest.raises(Refused, match="a copy has kept it"), manager.writing(rows[1], 0, 1):
        raise AssertionError("not reached")
    manager.transfers.abort(transfer)
    with manager.writing(rows[1], 0, 1):
        pass
    assert manager.device.facts.num_flagged == 0


def test_holds_of_the_lock_are_sampled_and_leave_out_what_is_waited():
    manager = manager_of()
    row = manager.admit((), 2).row
    for _ in range(allocator.locks.HOLD_SAMPLE * 3):
        with manager.lock:
            pass
    counted = sum(manager.lock.holds.read().counts)
    assert 2 <= counted <= 4
    transfer = manager.transfers.begin_swap_out(row)
    before = manager.lock.holds.read()
    while manager.lock.acquisitions % allocator.locks.HOLD_SAMPLE != allocator.locks.HOLD_SAMPLE - 1:
        with manager.lock:
            pass
    # This one is to be measured, but lets go of the lock in its middle.
    with pytest.raises(Refused):
        manager.free(row)
    assert manager.lock.holds.read() == before
    manager.transfers.abort(transfer)


def test_a_wait_is_bounded_and_says_for_what():
    manager = manager_of()
    row = manager.admit((), 2).row
    transfer = manager.transfers.begin_swap_out(row)
    for call in (lambda: manager.free(row), lambda: manager.append(np.array([row])), lambda: manager.fork(row)):
        with pytest.raises(Refused, match=f"sequence row {row}: a copy has kept it"):
            call()
    with pytest.raises(Refused, match="resize"):
        manager.resize(30)
    manager.transfers.abort(transfer)
    manager.append(np.array([row]))
    check_manager(manager)


def test_a_copy_that_fails_in_a_thread_leaves_everything_as_it_was():
    storage = ListStorage(SIZE)
    manager = manager_of(storage=storage)
    row = manager.admit((), 2 * SIZE + 1).row
    child = manager.fork(row)
    before = manager.tables.table(row).tolist(), manager.device.num_free, manager.host.num_free
    for call in (lambda: manager.swap_out(row), lambda: manager.append(np.array([row, child]))):
        storage.fail_after = 0
        with pytest.raises(StorageError):
            call()
        storage.fail_after = None
        assert (manager.tables.table(row).tolist(), manager.device.num_free, manager.host.num_free) == before
        assert (manager.sequences.num_taken, manager.device.facts.num_flagged) == (0, 0)
        check_manager(manager)
