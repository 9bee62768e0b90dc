"""Growing by many tokens at once, tokens that keep coming, and what other threads may not come between."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from fake_storage import ListStorage
from hypothesis import given
from hypothesis import strategies as st

from allocator.commands import Compact
from allocator.config import EngineConfig
from allocator.content import GrowingTokens
from allocator.engine import Engine
from allocator.errors import OutOfBlocks, StorageError
from allocator.hashing import chain_keys
from allocator.invariants import check_manager
from allocator.manager import BlockManager

SIZE = 4


def make_manager(num_blocks: int = 16) -> BlockManager:
    return BlockManager(EngineConfig(num_blocks, SIZE, num_swap_blocks=4), ListStorage(SIZE))


def shape(manager: BlockManager, row: int) -> tuple[int, list[int]]:
    return int(manager.tables.num_tokens[row]), manager.tables.table(row).tolist()


@pytest.mark.parametrize(("start", "more", "blocks"), [(1, 0, 1), (1, 3, 1), (1, 4, 2), (4, 1, 2), (4, 40, 11)])
def test_room_for_many_tokens(start: int, more: int, blocks: int) -> None:
    manager = make_manager()
    row = manager.admit((), start).row
    manager.grow(row, more)
    assert shape(manager, row) == (start + more, list(range(blocks)))
    check_manager(manager)


def test_a_shared_tail_is_copied_once() -> None:
    manager = make_manager()
    row = manager.admit((), 6).row
    child = manager.fork(row)
    manager.grow(child, 0)
    manager.grow(child, 7)
    manager.grow(row, 2)
    assert shape(manager, row) == (8, [0, 1])
    assert shape(manager, child) == (13, [0, 2, 3, 4])
    assert manager.copy_on_write_blocks == 1
    check_manager(manager)


def test_a_full_shared_tail_is_not_copied() -> None:
    manager = make_manager()
    row = manager.admit((), 8).row
    child = manager.fork(row)
    manager.grow(child, 1)
    assert shape(manager, child) == (9, [0, 1, 2])
    assert manager.copy_on_write_blocks == 0


@pytest.mark.parametrize("more", [4 * SIZE + 1, 3 * SIZE + 1])
def test_too_few_blocks_change_nothing(more: int) -> None:
    manager = make_manager(6)
    row = manager.admit((), 7).row
    child = manager.fork(row)
    with pytest.raises(OutOfBlocks) as refused:
        manager.grow(child, more + 1)  # its own copy of the last block counts too
    assert refused.value.needed == 1 + -(-(more + 1 - 1) // SIZE)
    assert shape(manager, child) == shape(manager, row) == (7, [0, 1])
    check_manager(manager)


def test_a_failed_copy_changes_nothing() -> None:
    storage = ListStorage(SIZE)
    manager = BlockManager(EngineConfig(16, SIZE, num_swap_blocks=4), storage)
    row = manager.admit((), 6).row
    child = manager.fork(row)
    storage.fail_after = 0
    with pytest.raises(StorageError):
        manager.grow(child, 20)
    assert shape(manager, child) == (6, [0, 1])
    assert manager.device.num_active == 2
    check_manager(manager)


@given(st.lists(st.integers(0, 9), max_size=12), st.sampled_from(["xxh3", "sha256"]), st.binary(max_size=3))
def test_keys_do_not_depend_on_how_the_tokens_came(pieces: list[int], algorithm: str, salt: bytes) -> None:
    stream = np.arange(1 + sum(pieces), dtype=np.int32)
    grown = GrowingTokens(stream[:1], SIZE, salt, algorithm)  # type: ignore[arg-type]
    copies = []
    for piece in pieces:
        copies.append((grown.num_tokens, grown.copy()))
        grown.extend(stream[grown.num_tokens : grown.num_tokens + piece])
    assert grown.tokens(0, grown.num_tokens).tolist() == stream.tolist()
    assert grown.keys == chain_keys(stream, SIZE, salt, algorithm)  # type: ignore[arg-type]
    for at, copy in copies:  # a copy went on by itself, and so goes on to the same end
        assert (copy.num_tokens, copy.keys) == (at, chain_keys(stream[:at], SIZE, salt, algorithm))  # type: ignore[arg-type]
        copy.extend(stream[at:])
        assert copy.keys == grown.keys


class Meanwhile:
    """Another thread that does ``work`` when paused for, if it can; who pauses goes on when that is kept waiting."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=work)

    def pause(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(0.2)

    def finish(self) -> None:
        self._thread.join(30)


def test_nobody_adds_rows_between_reading_and_writing_the_counts() -> None:
    manager = make_manager(64)
    row = manager.admit((), 1).row
    other = Meanwhile(lambda: [manager.admit((), 1) for _ in range(40)])

    class Counts(np.ndarray):
        def __getitem__(self, at: object) -> object:
            other.pause()
            return super().__getitem__(at)

    manager.tables.num_tokens = manager.tables.num_tokens.view(Counts)
    manager.write(np.array([row]), 2)
    other.finish()
    assert int(np.asarray(manager.tables.num_tokens)[row]) == 3


def test_nobody_takes_what_a_compaction_counts_on() -> None:
    engine = Engine(EngineConfig(num_blocks=16, block_size=SIZE, geometry="none", num_swap_blocks=0))
    manager = engine.manager
    low, high = manager.admit((), 5 * SIZE).row, manager.admit((), 5 * SIZE).row
    manager.free(low)
    other = Meanwhile(lambda: manager.admit((), 5 * SIZE))
    plan_compaction = manager.plan_compaction
    plans: list[object] = []

    def plan_and_pause(*arguments: object) -> object:
        plans.append(plan_compaction(*arguments))  # type: ignore[arg-type]
        if len(plans) == 2:  # the first is only shown, the second is carried out
            other.pause()
        return plans[-1]

    manager.plan_compaction = plan_and_pause  # type: ignore[method-assign, assignment]
    assert engine.apply(Compact("pack-low", None, None)).ok
    other.finish()
    check_manager(manager)
    assert sorted(manager.tables.table(high).tolist()) == list(range(5))
