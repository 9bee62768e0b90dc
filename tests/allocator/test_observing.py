"""What observers see: after any operations the map says what pool and tables say, block for block."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_model_manager import ManagerAgainstModel

from allocator import observing
from allocator.block_map import FIELDS, BlockArrays, BlockMapReader, BlockMapWriter
from allocator.config import EngineConfig
from allocator.facts import ChangeLog
from allocator.ids import BlockState
from allocator.manager import BlockManager
from allocator.metrics import count_runs
from allocator.storage import NoStorage


def told_by_tables(manager: BlockManager, tier: str) -> dict[str, list[int]]:
    """The published facts of every block, made one by one from the pool's own answers and the tables."""
    pool = manager.device if tier == "device" else manager.host
    tables = manager.tables if tier == "device" else manager.host_tables
    facts, size = pool.facts, manager.block_size
    found: dict[str, list[int]] = {name: [] for name, _ in FIELDS}
    holders = [
        [(row, i) for row in tables.rows().tolist() for i, b in enumerate(tables.table(row).tolist()) if b == block]
        for block in range(pool.num_blocks)
    ]
    free, cached = set(np.flatnonzero(facts.state == 0).tolist()), set(np.flatnonzero(facts.state == 128).tolist())
    for block, held in enumerate(holders):
        state = BlockState.FREE if block in free else BlockState.CACHED if block in cached else BlockState.ACTIVE
        fills = [min(size, max(0, int(tables.num_tokens[row]) - i * size)) for row, i in held]
        key = pool.cache.key_of(block)
        found["state"].append(int(state))
        found["ref_count"].append(len(held))
        found["flags"].append(int(facts.flags[block]))
        found["owner"].append(min((row for row, _ in held), default=-1))
        found["fill"].append(fills[-1] if fills else size if state is BlockState.CACHED else 0)
        found["last_used"].append(int(facts.last_used[block]))
        found["hash64"].append(0 if key is None else int.from_bytes(key[:8], "little"))
    return found


def as_lists(arrays: BlockArrays) -> dict[str, list[int]]:
    return {name: getattr(arrays, name).tolist() for name, _ in FIELDS}


class Watcher:
    """A map written by a manager, and its reader."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.fd = os.memfd_create("test-map")
        self.map = BlockMapWriter(self.fd, engine="test", block_size=1, block_bytes=0, slab_size=1)
        self.reader = BlockMapReader(self.fd)

    def publish(self) -> None:
        num_host = self.manager.host.num_blocks or None
        places = self.map.begin(0, self.manager.device.num_blocks, num_host)
        for tier, place in zip(("device", "host"), places, strict=True):
            if place is not None:
                self.manager.arrays(tier, place)
        del place, places
        self.map.finish()

    def check(self) -> None:
        self.publish()
        seen = self.reader.read()
        for tier, arrays in (("device", seen.device), ("host", seen.host)):
            if arrays is not None:
                expected = told_by_tables(self.manager, tier)
                assert as_lists(arrays) == expected
                assert as_lists(self.manager.arrays(tier)) == expected

    def close(self) -> None:
        # The writer's mapping goes with its last view: a failed test may show arrays that lie in it.
        self.reader.close()
        os.close(self.fd)


@pytest.fixture(autouse=True)
def every_pool_is_large(monkeypatch):
    monkeypatch.setattr(observing, "SMALL_POOL", 0)


class ManagerUnderWatch(ManagerAgainstModel):
    """Every kind of operation, with a look at the map now and then: by turns in either of its buffers."""

    watcher: Watcher | None = None

    @initialize()
    def every_pool_is_large(self):
        self.small_pool, observing.SMALL_POOL = observing.SMALL_POOL, 0

    @precondition(lambda self: hasattr(self, "manager"))
    @rule(looks=st.integers(1, 2))
    def look(self, looks):
        if self.watcher is None:
            self.watcher = Watcher(self.manager)
        for _ in range(looks):
            self.watcher.check()
        self.manager.device.step += 1

    @precondition(lambda self: self.watcher is not None)
    @rule()
    def count_by_row(self):
        tables, slab = self.manager.tables, self.manager.device.slab_size
        shared, runs = self.manager.row_numbers()
        for row in tables.rows().tolist():
            table = tables.table(row)
            assert int(shared[row]) == sum(self.manager.device.ref_count(b) > 1 for b in table.tolist())
            assert int(runs[row]) == count_runs(table, slab)

    def books_and_contents(self):
        """Not looked at here: the machine itself does, and it takes most of the time."""

    def teardown(self):
        if self.watcher is not None:
            self.watcher.close()
        if hasattr(self, "small_pool"):
            observing.SMALL_POOL = self.small_pool


TestManagerUnderWatch = ManagerUnderWatch.TestCase


def watched_manager(num_blocks: int = 64, **config: object) -> tuple[BlockManager, Watcher]:
    settings = {"num_swap_blocks": 0, "block_size": 4, "geometry": "none", **config}
    manager = BlockManager(EngineConfig(num_blocks=num_blocks, **settings), NoStorage())
    watcher = Watcher(manager)
    for _ in range(2):
        watcher.check()
    return manager, watcher


def test_a_key_that_other_content_takes_over_is_seen():
    manager, watcher = watched_manager()
    keys = [bytes([7] * 16)]
    first, second = (np.full(4, token, np.int32) for token in (1, 2))
    rows = [manager.admit((), 4).row for _ in range(2)]
    manager.publish_keys(rows[0], keys, 0, tokens=first)
    watcher.check()
    watcher.check()
    manager.publish_keys(rows[1], keys, 0, tokens=second)
    manager.publish_keys(rows[0], [bytes([8] * 16)], 0, tokens=first)
    watcher.check()
    watcher.check()
    watcher.close()


def test_a_block_that_gets_another_key_and_the_old_state_is_seen():
    manager, watcher = watched_manager(num_blocks=1)

    def hold(number: int) -> None:
        row = manager.admit((), 4).row
        manager.publish_keys(row, [bytes([number] * 16)], 0)
        manager.free(row)

    manager.device.step = 3
    hold(1)
    watcher.check()
    watcher.check()
    manager.device.evict()
    manager.device.step = 4
    hold(2)
    watcher.check()
    watcher.check()
    watcher.close()


def test_a_block_whose_first_holders_left_shows_the_one_that_stays():
    manager, watcher = watched_manager()
    rows = [manager.admit((), 6).row]
    rows += [manager.fork(rows[0]) for _ in range(2)]
    for row in (None, *sorted(rows)):
        if row is not None:
            manager.free(row)
        watcher.check()
        watcher.check()
    watcher.close()


def test_a_tail_that_filled_up_is_shown_full():
    manager, watcher = watched_manager()
    row = manager.admit((), 6).row
    for num_tokens in (0, 1, 1):
        manager.write(np.array([row]), num_tokens)
        watcher.check()
        watcher.check()
    watcher.close()


def test_a_full_change_log_means_that_everything_is_written():
    manager, watcher = watched_manager(num_blocks=400)
    for number in range(300):
        row = manager.admit((), 4).row
        manager.publish_keys(row, [number.to_bytes(16, "little").replace(b"\0", b"x")], 0)
        manager.free(row)
    watcher.check()
    watcher.check()
    watcher.close()


def test_a_resize_there_and_back_between_two_looks_is_seen():
    manager, watcher = watched_manager(num_blocks=8)
    rows = [manager.admit((), 4).row for _ in range(8)]
    for number, row in enumerate(rows):
        manager.publish_keys(row, [bytes([number + 1] * 16)], 0)
    manager.device.step = 9
    manager.free_many(np.array(rows))
    watcher.check()
    watcher.check()
    manager.device.evict()
    watcher.check()
    watcher.check()
    manager.resize(2)
    manager.resize(8)
    watcher.check()
    watcher.check()
    watcher.close()


def test_a_write_that_failed_halfway_is_made_good(monkeypatch):
    manager, watcher = watched_manager()
    row = manager.admit((), 10).row

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(observing, "publish_states", fail)
        with pytest.raises(MemoryError):
            watcher.publish()
    manager.free(row)
    watcher.check()
    watcher.check()
    watcher.close()


def test_another_writer_in_the_same_place_is_noticed():
    manager, watcher = watched_manager()
    manager.admit((), 10)
    watcher.map.publish(1, BlockArrays(**{n: np.full(64, 9, dtype) for n, dtype in FIELDS}), None)
    watcher.check()
    watcher.check()
    watcher.close()


def test_what_is_noted_is_told_once_and_copied():
    log = ChangeLog(5)
    log.note(np.array([1]))
    assert log.take() is None
    ids = np.array([3, 4])
    log.note(ids)
    ids[:] = 0
    log.note(np.array([3]))
    assert log.take().tolist() == [3, 4, 3]
    assert log.take().tolist() == []
    log.note(np.arange(6))
    log.note(np.arange(1))
    assert log.take() is None
    assert log.take().tolist() == []
