"""Hits are exact: a collision of keys is a miss, whatever was evicted in between, and never serves foreign content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.config import EngineConfig
from allocator.content import TokenContent
from allocator.hashing import chain_keys
from allocator.invariants import check_manager
from allocator.manager import BlockManager
from allocator.storage import NoStorage

SIZE = 2


def weak_keys(tokens: np.ndarray, kinds: int) -> list[bytes]:
    """Chain keys that take only ``kinds`` values, so that most of them collide."""
    strong = chain_keys(tokens, SIZE)
    return [bytes([1 + key[0] % kinds]) * 16 for key in strong]


class Library:
    """A manager driven with weak keys, and beside it what each block truly holds: its whole prefix."""

    def __init__(self, num_blocks: int, kinds: int, eviction: str) -> None:
        config = EngineConfig(num_blocks, SIZE, geometry="none", num_swap_blocks=0, eviction=eviction)  # type: ignore[arg-type]
        self.manager = BlockManager(config, NoStorage())
        self.kinds = kinds
        self.holds: dict[int, tuple[int, ...]] = {}
        self.rows: list[int] = []
        self.hits = 0

    def read(self, stream: list[int]) -> None:
        """Admit one stream, compare what its hits hold with what it needs, and publish the rest."""
        tokens = np.array(stream, np.int32)
        full = len(stream) // SIZE
        if self.manager.blocks_for(len(stream)) > self.manager.device.num_allocatable:
            return
        keys = weak_keys(tokens, self.kinds)
        row, matched, _ = self.manager.admit(keys, len(stream), tokens=tokens)
        table = self.manager.tables.table(row).tolist()
        for position in range(matched):
            assert self.holds[table[position]] == tuple(stream[: (position + 1) * SIZE])
        self.hits += matched
        for position in range(matched, full):
            self.holds[table[position]] = tuple(stream[: (position + 1) * SIZE])
        own = tokens[matched * SIZE : full * SIZE]
        self.manager.publish_keys(row, keys[matched:full], matched, tokens=own)
        self.rows.append(row)
        check_manager(self.manager)

    def drop(self, index: int) -> None:
        """Finish one of the sequences."""
        if self.rows:
            self.manager.free(self.rows.pop(index % len(self.rows)))
            check_manager(self.manager)


streams = st.lists(st.integers(0, 1), min_size=1, max_size=9)
acts = st.lists(st.one_of(streams, st.integers(0, 5)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=150)
@given(st.integers(3, 14), st.integers(1, 4), st.sampled_from(["lru", "fifo", "lfu"]), acts)
def test_colliding_keys_never_serve_foreign_content(num_blocks: int, kinds: int, eviction: str, acts: list) -> None:
    library = Library(num_blocks, kinds, eviction)
    for act in acts:
        if isinstance(act, int):
            library.drop(act)
        else:
            library.read(act)


def test_strong_keys_hit_as_often_as_there_is_something_to_hit() -> None:
    library = Library(64, 1 << 60, "lru")
    library.read([1, 2, 3, 4, 5, 6, 7])
    library.read([1, 2, 3, 4, 9, 9, 9])
    assert library.hits == 2
    library.read([1, 2, 3, 4, 9, 9])
    assert library.hits == 5
    assert library.manager.device.cache.num_collisions == 0


def test_a_collision_is_counted_and_missed() -> None:
    library = Library(16, 1, "lru")
    library.read([1, 1, 2, 2])
    library.drop(0)
    library.read([3, 3, 2, 2])
    assert library.hits == 0
    assert library.manager.device.cache.num_collisions > 0


def test_a_child_of_an_evicted_parent_is_not_taken_for_a_child_of_its_namesake() -> None:
    # [a][x] is cached, then [a] alone goes; [b] takes [a]'s key. [b][x] has the key and the tokens of the
    # block [a][x], but not its history.
    library = Library(16, 1, "lru")
    manager, cache = library.manager, library.manager.device.cache
    one, two = bytes([1]) * 16, bytes([2]) * 16
    a, b = np.array([1, 1, 5, 5], np.int32), np.array([3, 3, 5, 5], np.int32)
    row = manager.admit([one, two], 4, tokens=a).row
    manager.publish_keys(row, [one, two], 0, tokens=a)
    parent, child = manager.tables.table(row).tolist()
    manager.free(row)
    manager.device.evict_exactly(np.array([parent]))
    row = manager.admit([one], 2, tokens=b[:2]).row
    manager.publish_keys(row, [one], 0, tokens=b[:2])
    assert cache.block_of(two) == child
    assert cache.match([one, two], b) == manager.tables.table(row).tolist()
    check_manager(manager)


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
def test_salts_isolate_tenants(algorithm: str) -> None:
    tokens = np.arange(32, dtype=np.int32)
    ours = TokenContent(tokens, b"ours").keys(16, algorithm)  # type: ignore[arg-type]
    theirs = TokenContent(tokens, b"theirs").keys(16, algorithm)  # type: ignore[arg-type]
    assert not set(ours) & set(theirs)
    assert ours == TokenContent(tokens, b"ours").keys(16, algorithm)  # type: ignore[arg-type]
    assert all(len(key) == 16 for key in ours)


def test_a_sha256_key_names_the_whole_prefix() -> None:
    tokens = np.arange(48, dtype=np.int32)
    other = tokens.copy()
    other[0] = 99
    a, b = chain_keys(tokens, 16, algorithm="sha256"), chain_keys(other, 16, algorithm="sha256")
    assert not set(a) & set(b)
    assert chain_keys(tokens[:32], 16, algorithm="sha256") == a[:2]
