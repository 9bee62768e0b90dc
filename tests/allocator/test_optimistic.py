"""Matches made before the lock is taken are thrown away when a key was dropped meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.config import EngineConfig
from allocator.content import TokenContent
from allocator.invariants import check_manager
from allocator.manager import OPTIMISTIC_TRIES, BlockManager
from allocator.storage import NoStorage

CONTENT = TokenContent(np.arange(40, dtype=np.int32))
KEYS = CONTENT.keys(16)


def make_manager(*, optimistic_lookup: bool = True) -> BlockManager:
    """Return a manager whose cache holds both full blocks of ``CONTENT``."""
    config = EngineConfig(8, 16, geometry="none", num_swap_blocks=0, optimistic_lookup=optimistic_lookup)
    manager = BlockManager(config, NoStorage())
    row = manager.admit(KEYS, 40, tokens=CONTENT.stream).row
    manager.publish_keys(row, KEYS, 0, tokens=CONTENT.stream[:32])
    manager.free(row)
    return manager


def interfere(manager: BlockManager, monkeypatch: pytest.MonkeyPatch, times: int, act) -> list[bool]:
    """Let ``act`` happen between a match and the lock, ``times`` times; return for each match whether it was locked."""
    match, locked = manager.device.cache.match, []

    def slow_match(*arguments):
        # Only the owner can release: so this says whether the matching thread holds the lock.
        try:
            manager.lock.release()
            locked.append(True)
            manager.lock.acquire()
        except RuntimeError:
            locked.append(False)
        found = match(*arguments)
        if len(locked) <= times:
            act()
        return found

    monkeypatch.setattr(manager.device.cache, "match", slow_match)
    return locked


def test_an_undisturbed_match_is_taken_as_it_is(monkeypatch):
    manager = make_manager()
    locked = interfere(manager, monkeypatch, 0, lambda: None)
    assert manager.admit(KEYS, 40, tokens=CONTENT.stream).matched_blocks == 2
    assert locked == [False]
    assert manager.optimistic_retries == 0


def test_a_match_whose_blocks_were_evicted_is_made_again(monkeypatch):
    manager = make_manager()
    locked = interfere(manager, monkeypatch, 1, lambda: manager.device.evict())
    assert manager.admit(KEYS, 40, tokens=CONTENT.stream).matched_blocks == 0
    assert locked == [False, False]
    assert manager.optimistic_retries == 1
    check_manager(manager)


def test_after_three_conflicts_the_match_is_made_under_the_lock(monkeypatch):
    manager = make_manager()

    def drop_a_key() -> None:
        manager.device.cache.version += 1

    locked = interfere(manager, monkeypatch, OPTIMISTIC_TRIES, drop_a_key)
    assert manager.admit(KEYS, 40, tokens=CONTENT.stream).matched_blocks == 2
    assert locked == [False] * OPTIMISTIC_TRIES + [True]
    assert manager.optimistic_retries == OPTIMISTIC_TRIES


def test_a_pool_that_shrinks_under_a_match_is_a_conflict(monkeypatch):
    manager = make_manager()
    match, calls = manager.device.cache.match, []

    def failing_match(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise IndexError("index 7 is out of bounds")
        return match(*arguments)

    monkeypatch.setattr(manager.device.cache, "match", failing_match)
    assert manager.admit(KEYS, 40, tokens=CONTENT.stream).matched_blocks == 2
    assert manager.optimistic_retries == 1


def test_switched_off_every_match_is_made_under_the_lock(monkeypatch):
    manager = make_manager(optimistic_lookup=False)
    locked = interfere(manager, monkeypatch, 0, lambda: None)
    assert manager.admit(KEYS, 40, tokens=CONTENT.stream).matched_blocks == 2
    assert locked == [True]
