"""BlockPool and its prefix cache against ``PoolModel``, after every step of random sessions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_model import PoolModel

from allocator.config import EngineConfig
from allocator.errors import NoContiguousRun, NotHeld, OutOfBlocks, Refused
from allocator.ids import BlockFlag
from allocator.invariants import check_manager
from allocator.manager import BlockManager
from allocator.pool import BlockPool
from allocator.storage import NoStorage

KEYS = [bytes([i + 1]) * 16 for i in range(12)]
FLAGS = st.sampled_from([BlockFlag.FENCED, BlockFlag.PINNED])


def ids_array(ids) -> np.ndarray:
    return np.asarray(list(ids), np.int64)


#: Callers pass lists and arrays; each has its own fast path.
FORM = st.sampled_from([list, ids_array])


class PoolAgainstModel(RuleBasedStateMachine):
    """Holders are rows of real block tables, so that the shipped law checks apply too."""

    @initialize(num_blocks=st.integers(1, 14), slab=st.integers(1, 14), policy=st.sampled_from(["lru", "fifo", "lfu"]))
    def build(self, num_blocks, slab, policy):
        config = EngineConfig(
            num_blocks=num_blocks, num_swap_blocks=0, block_size=1, slab_blocks=slab, eviction=policy, geometry="none"
        )
        self.manager = BlockManager(config, NoStorage())
        self.pool: BlockPool = self.manager.device
        self.model = PoolModel(num_blocks, slab, policy)
        self.rows: list[int] = []

    def hold(self, ids) -> None:
        self.rows.append(self.manager.tables.new_row(ids_array(ids), len(ids)))

    def table(self, row: int) -> list[int]:
        return self.manager.tables.table(row).tolist()

    def draw_row(self, data, label="row") -> int:
        return data.draw(st.sampled_from(self.rows), label)

    # -- taking ------------------------------------------------------------------------------------

    @rule(n=st.integers(0, 15), how=st.sampled_from(["allocate", "allocate_compact"]))
    def allocate(self, n, how):
        available = self.model.allocatable()
        if n > available:
            with pytest.raises(OutOfBlocks) as error:
                getattr(self.pool, how)(n)
            assert (error.value.needed, error.value.allocatable) == (n, available)
            return
        free = self.model.loose_free()
        ids = [int(b) for b in getattr(self.pool, how)(n)]
        assert len(ids) == n
        if how == "allocate_compact" and n <= len(free):
            lengths = sorted((length for _, length in self.model.runs(free)), reverse=True)
            fewest = next(i for i in range(len(lengths) + 1) if sum(lengths[:i]) >= n)
            assert len(self.model.runs(ids)) == fewest
        self.model.take(ids)
        self.hold(ids)

    @rule(n=st.integers(1, 15))
    def allocate_contiguous(self, n):
        model = self.model
        free, loose = model.loose_free(), model.loose_free() | set(model.order())
        choices = [(length, start) for ids in (free, loose) for length, start in self.fitting(ids, n)[:1]]
        if n > len(loose):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate_contiguous(n)
        elif not choices:
            with pytest.raises(NoContiguousRun) as error:
                self.pool.allocate_contiguous(n)
            longest = max(length for _, length in model.runs(loose))
            assert (error.value.needed, error.value.longest, error.value.allocatable) == (n, longest, len(loose))
        else:
            start = choices[0][1]
            ids = self.pool.allocate_contiguous(n).tolist()
            assert ids == list(range(start, start + n))
            lost = [b for b in ids if model.is_cached(b)]
            for block in lost:
                model.forget(block)
            model.num_evicted += len(lost)
            model.take(ids)
            self.hold(ids)

    def fitting(self, ids, n) -> list[tuple[int, int]]:
        return sorted((length, start) for start, length in self.model.runs(ids) if length >= n)

    @rule(data=st.data())
    def share(self, data):
        live = self.model.all(lambda b: self.model.is_held(b) or self.model.is_cached(b))
        if live:
            ids = data.draw(st.lists(st.sampled_from(live), unique=True, min_size=1))
            self.pool.share(data.draw(FORM)(ids))
            self.model.share(ids)
            self.hold(ids)

    share_more = share

    @rule(data=st.data())
    def share_an_idle_block(self, data):
        """Among any others: refused whole."""
        idle = self.model.all(self.model.is_free)
        if idle:
            ids = data.draw(st.lists(st.integers(0, self.model.num_blocks - 1), unique=True))
            ids = list(dict.fromkeys([*ids, data.draw(st.sampled_from(idle))]))
            with pytest.raises(NotHeld):
                self.pool.share(ids)

    @rule(data=st.data(), count=st.integers(0, 5))
    def hit(self, data, count):
        keys = data.draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=count))
        found = self.pool.cache.match(keys)
        assert found == self.model.match(keys)
        if found:
            self.pool.share(found)
            self.model.share(found)
            self.hold(found)

    # -- giving back -------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release_some(self, data):
        """Whole tables in one call, so that shared blocks repeat; in any order."""
        chosen = data.draw(st.lists(st.sampled_from(self.rows), unique=True, min_size=1))
        ids = data.draw(st.permutations([b for row in chosen for b in self.table(row)]))
        assert self.pool.release(data.draw(FORM)(ids)) == self.model.release(ids)
        for row in chosen:
            self.manager.tables.drop_row(row)
            self.rows.remove(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release_one_twice(self, data):
        """A double free of blocks that have one holder, beside others that are well held."""
        sole = [b for row in self.rows for b in self.table(row) if self.model.ref(b) == 1]
        if sole:
            twice = data.draw(st.sampled_from(sole))
            others = data.draw(st.lists(st.sampled_from(sole), unique=True))
            ids = data.draw(st.permutations([twice, twice, *(b for b in others if b != twice)]))
            with pytest.raises(NotHeld):
                self.pool.release(data.draw(FORM)(ids))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release_tail_first(self, data):
        row = self.draw_row(data)
        ids = self.table(row)[::-1]
        assert self.pool.release_distinct(ids_array(ids)) == self.model.release(ids)
        self.manager.tables.drop_row(row)
        self.rows.remove(row)

    @rule(data=st.data())
    def release_too_much(self, data):
        """Anything with one reference too many, or of a block that does not exist: refused whole."""
        n = self.model.num_blocks
        extra = data.draw(
            st.sampled_from([-1, n, -1 - n, -1 - 3 * n, 2 * n - 1, 5 * n, 1 << 40, *range(n), *range(-2 * n, -n)])
        )
        held = [b for row in self.rows for b in self.table(row)]
        ids = data.draw(st.permutations([*held, extra]))
        with pytest.raises(NotHeld):
            self.pool.release(data.draw(FORM)(ids))
        if 0 <= extra < n and not self.model.is_held(extra):
            with pytest.raises(NotHeld):
                self.pool.release_distinct(ids_array(dict.fromkeys(ids)))

    # -- keys ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def insert_keys(self, data):
        ids = self.table(self.draw_row(data))
        keys = data.draw(st.lists(st.sampled_from(KEYS), max_size=len(ids)))
        ids = ids[: len(keys)]
        assert self.pool.insert_keys(ids, keys).num_keys == self.model.insert(ids, keys)

    insert_more_keys = insert_keys

    @rule(n=st.one_of(st.none(), st.integers(0, 6)))
    def evict(self, n):
        expected = self.model.evict(len(self.model.order()) if n is None else n)
        assert self.pool.evict(n) == len(expected)

    @rule(data=st.data())
    def evict_exactly(self, data):
        cached = self.model.all(self.model.is_cached)
        ids = data.draw(st.lists(st.sampled_from(cached), unique=True)) if cached else []
        self.pool.evict_exactly(ids_array(ids))
        for block in ids:
            self.model.forget(block)
        self.model.num_evicted += len(ids)

    # -- flags, moves, size --------------------------------------------------------------------------

    @rule(data=st.data(), flag=FLAGS, raised=st.booleans())
    def change_flag(self, data, flag, raised):
        ids = data.draw(st.lists(st.integers(0, self.model.num_blocks - 1), unique=True, max_size=4))
        change = self.pool.set_flag if raised else self.pool.clear_flag
        change(ids_array(ids), flag)
        for block in ids:
            flags = self.model.flags.get(block, 0)
            self.model.flags[block] = flags | flag if raised else flags & ~flag

    @rule(data=st.data(), commit=st.booleans())
    def move(self, data, commit):
        model = self.model
        movable = [b for b in model.all(lambda b: not model.is_free(b)) if not model.flags.get(b)]
        n = data.draw(st.integers(0, min(len(movable), len(model.loose_free()))))
        sources = data.draw(st.permutations(movable))[:n]
        destinations = data.draw(st.permutations(sorted(model.loose_free())))[:n]
        self.pool.reserve_exactly(ids_array(destinations))
        model.reserved |= set(destinations)
        model.compare(self.pool)
        if not commit:
            self.pool.unreserve(ids_array(destinations))
            model.reserved.clear()
            return
        self.pool.commit_moves(ids_array(sources), ids_array(destinations))
        model.move(sources, destinations)
        remap = np.arange(model.num_blocks)
        remap[sources] = destinations
        self.manager.tables.rename(remap)

    @rule(data=st.data())
    def reserve_what_is_not_free(self, data):
        block = data.draw(st.integers(0, self.model.num_blocks - 1))
        if block not in self.model.loose_free():
            with pytest.raises(Refused):
                self.pool.reserve_exactly(ids_array([block]))

    @rule(num_blocks=st.integers(1, 20))
    def resize(self, num_blocks):
        above = range(num_blocks, self.model.num_blocks)
        if any(not self.model.is_free(b) for b in above):
            with pytest.raises(Refused):
                self.pool.resize(num_blocks)
        elif not any(self.model.flags.get(b) for b in above):
            self.pool.resize(num_blocks)
            self.model.num_blocks = num_blocks

    @invariant()
    def same(self):
        if hasattr(self, "model"):
            self.model.compare(self.pool)
            check_manager(self.manager)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=max(100, settings().max_examples), stateful_step_count=max(50, settings().stateful_step_count)
)


def test_a_new_pool_hands_out_ascending_ids():
    pool = BlockPool(600)
    assert list(pool.allocate(3)) == [0, 1, 2]
    assert list(pool.allocate(1)) == [3]
    assert list(pool.allocate(7)) == [4, 5, 6, 7, 8, 9, 10]
    assert sorted(pool.allocate(589)) == list(range(11, 600))
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


@pytest.mark.parametrize("seed", range(4))
def test_large_batches_and_single_blocks_mix(seed):
    """Pools large enough for every path of the free list: stack, front list, spill, growth."""
    rng = np.random.default_rng(seed)
    pool, model = BlockPool(1500), PoolModel(1500, 1500, "lru")
    held: list[list[int]] = []
    for _ in range(400):
        if held and (rng.random() < 0.5 or pool.num_allocatable < 400):
            ids = held.pop(int(rng.integers(len(held))))
            pool.release(ids[::-1])
            model.release(ids[::-1])
        else:
            n = int(rng.choice([1, 2, 7, 8, 9, 300]))
            ids = [int(b) for b in pool.allocate(n)]
            model.take(ids)
            held.append(ids)
    # Give back hundreds one by one: the front list overflows into the stack.
    for ids in held:
        for block in ids:
            pool.release([block])
    assert sorted(pool.free_ids().tolist()) == list(range(1500))
    assert sorted(pool.allocate(1500)) == list(range(1500))


@pytest.mark.parametrize("num_blocks", [40, 5000])
@pytest.mark.parametrize("form", [list, ids_array])
@pytest.mark.parametrize("n", [1, 5, 8, 20])
def test_a_double_free_is_refused_whole_on_every_path(num_blocks, form, n):
    """Small and large batches, in small and large pools, as lists and arrays."""
    pool = BlockPool(num_blocks)
    ids = [int(b) for b in pool.allocate(n)]
    outside = (n, num_blocks, 2 * num_blocks, 1 << 40, -1, -1 - num_blocks, ids[0] - 2 * num_blocks)
    for wrong in ([*ids, ids[0]], [ids[-1], *ids], *([*ids, block] for block in outside)):
        with pytest.raises(NotHeld):
            pool.release(form(wrong))
        assert (pool.num_active, pool.num_free) == (n, num_blocks - n)
        assert [pool.ref_count(b) for b in ids] == [1] * n
    assert pool.release(form(ids)) == n
    assert sorted(pool.free_ids().tolist()) == list(range(num_blocks))


def test_an_id_outside_the_pool_is_refused_by_number():
    pool = BlockPool(4)
    pool.allocate(4)
    with pytest.raises(NotHeld, match="no block 4 "):
        pool.release([0, 4])
    with pytest.raises(NotHeld, match="no block -1 "):
        pool.release([-1, 0])
    assert pool.num_active == 4


def test_the_first_block_keeps_a_key_and_a_block_keeps_its_first_key():
    pool = BlockPool(6)
    a, b, c = (int(x) for x in pool.allocate(3))
    assert pool.insert_keys([a, b], [KEYS[0], KEYS[0]]).num_keys == 1
    assert pool.insert_keys([a, c], [KEYS[1], KEYS[2]]).num_keys == 1
    assert dict(pool.cache.items()) == {a: KEYS[0], c: KEYS[2]}
    assert pool.cache.match(KEYS[:3]) == [a]
    assert pool.cache.is_one_to_one()
    assert pool.release([a, b, c]) == 3
    assert (pool.num_cached, pool.num_free) == (2, 4)


def test_a_shared_block_is_held_until_its_last_holder_lets_go():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.share([block])
    assert pool.ref_count(block) == 3
    assert [pool.release([block]) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(NotHeld):
        pool.release([block])
    assert pool.num_free == 3
