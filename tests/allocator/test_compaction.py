"""Compaction and shrinking plans on small pools, against brute force.

A pool is a word: f free, c cached, h held, F and H the same but pinned. Cached blocks are evicted in
ascending order of id unless a test says otherwise.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.compaction import (
    PoolShape,
    pack_boundary,
    plan_by_sequence,
    plan_longest_run,
    plan_pack_low,
    plan_shrink,
)
from allocator.errors import OutOfBlocks, Refused
from allocator.facts import CACHED, FREE, SOLE
from allocator.metrics import count_runs
from allocator.plans import MovePlan

WORDS = st.text("fchFHC", min_size=1, max_size=10)
BUDGET = st.one_of(st.none(), st.integers(1, 5))


def shape(word: str, slab: int = 100, order: list[int] | None = None) -> PoolShape:
    state = np.array([{"f": FREE, "c": CACHED, "h": SOLE}[letter.lower()] for letter in word], np.uint8)
    flags = np.array([2 * letter.isupper() for letter in word], np.uint8)
    cached = [i for i, letter in enumerate(word) if letter == "c"]
    return PoolShape(state, flags, np.array(cached if order is None else order, np.int64), slab)


def follow(word: str, plan: MovePlan) -> str:
    """Return the pool after a plan, having checked that each stage may be copied in any order and then committed."""
    pool = list(word)
    for stage in plan.stages:
        sources, destinations = stage.sources.tolist(), stage.destinations.tolist()
        assert sources or stage.evicted.size, "an empty stage"
        assert len(set(sources)) == len(sources) == len(destinations) == len(set(destinations))
        assert not set(sources) & set(destinations)
        for block in stage.evicted.tolist():
            assert pool[block] == "c"
            pool[block] = "f"
        assert all(pool[b] == "f" for b in destinations)
        assert all(pool[b] in "ch" for b in sources), "a free or pinned block was moved"
        for source, destination in zip(sources, destinations, strict=True):
            pool[destination], pool[source] = pool[source], "f"
    return "".join(pool)


def held_moves(word: str, plan: MovePlan) -> int:
    """Held blocks moved; a plan moves each block once, so the word before it tells."""
    return sum(word[b] == "h" for stage in plan.stages for b in stage.sources.tolist())


def check_budget(plan: MovePlan, budget: int | None, needed: int, moved: int) -> None:
    assert moved + plan.left == needed
    if budget is not None:
        assert plan.moved_blocks <= budget
        assert moved > 0 or needed == 0, "a budget must not stop all progress"
    else:
        assert plan.left == 0


def check_losses(word: str, after: str, plan: MovePlan, targets: set[int], moved: int) -> None:
    """Without a budget, cached blocks are lost only where no free block could take them; next victims first."""
    short = max(0, moved - sum(word[b] == "f" for b in targets))
    free_elsewhere = sum(word[b] == "f" for b in range(len(word)) if b not in targets)
    assert plan.evicted_blocks == max(0, short - free_elsewhere)
    assert after.count("c") == word.count("c") - plan.evicted_blocks
    in_way = sorted(b for b in targets if word[b] == "c")[:short]
    evicted = [b for stage in plan.stages for b in stage.evicted.tolist()]
    assert evicted == in_way[: len(evicted)]


# -- pack low ----------------------------------------------------------------------------------------


def check_pack_low(word: str, budget: int | None) -> None:
    held = word.count("h")
    boundary = next(b for b in range(len(word) + 1) if sum(x in "fch" for x in word[:b]) >= held)
    assert pack_boundary(shape(word)) == boundary
    plan = plan_pack_low(shape(word), budget)
    after = follow(word, plan)
    moved = held_moves(word, plan)
    check_budget(plan, budget, word[boundary:].count("h"), moved)
    assert after.count("h") == held
    assert after[boundary:].count("h") == plan.left
    if budget is None:
        check_losses(word, after, plan, set(range(boundary)), moved)
        assert plan_pack_low(shape(after)) == MovePlan()


@given(WORDS, BUDGET)
@settings(max_examples=300)
def test_pack_low_moves_exactly_the_held_blocks_above_the_boundary(word, budget):
    check_pack_low(word, budget)


@pytest.mark.parametrize("length", range(1, 6))
def test_pack_low_on_every_small_pool(length):
    for word in map("".join, itertools.product("fchH", repeat=length)):
        check_pack_low(word, None)
        check_pack_low(word, 1)
        check_pack_low(word, 2)


def fewest_moves_to_pack(word: str) -> int:
    """The fewest moves to any arrangement whose held blocks lie in the lowest places; tried one by one."""
    places = [i for i, letter in enumerate(word) if letter.islower()]
    held = {i for i in places if word[i] == "h"}
    lowest = max(places[: len(held)], default=-1)
    choices = itertools.combinations(places, len(held))
    return min(len(held - set(choice)) for choice in choices if not choice or choice[-1] <= lowest)


@given(st.text("fhH", min_size=1, max_size=8))
def test_pack_low_uses_the_fewest_moves(word):
    assert plan_pack_low(shape(word)).moved_blocks == fewest_moves_to_pack(word)


def test_pack_low_saves_cached_blocks_while_there_is_room():
    plan = plan_pack_low(shape("chfh"))
    assert follow("chfh", plan) == "hhcf"
    assert plan.evicted_blocks == 0
    # Two cached blocks in the way, one free place above: the next victim goes, the other is saved.
    word = "cchhf"
    plan = plan_pack_low(shape(word, order=[1, 0]))
    assert follow(word, plan).count("c") == 1
    assert [stage.evicted.tolist() for stage in plan.stages] == [[], [1]]


# -- longest run -------------------------------------------------------------------------------------


def windows(word: str, n: int, slab: int) -> list[int]:
    starts = range(len(word) - n + 1)
    return [i for i in starts if i // slab == (i + n - 1) // slab and word[i : i + n].islower()]


def check_longest_run(word: str, slab: int, n: int | None, budget: int | None) -> None:
    pool = shape(word, slab)
    allocatable = sum(x in "fc" for x in word)
    widest = max((m for m in range(1, len(word) + 1) if windows(word, m, slab)), default=0)
    wanted = min(allocatable, widest) if n is None else n
    if wanted > allocatable:
        with pytest.raises(OutOfBlocks) as error:
            plan_longest_run(pool, n, budget)
        assert (error.value.needed, error.value.allocatable) == (wanted, allocatable)
        return
    if wanted > widest:
        with pytest.raises(Refused, match=f"leave {widest} at most"):
            plan_longest_run(pool, n, budget)
        return
    plan = plan_longest_run(pool, n, budget)
    after = follow(word, plan)
    moved = held_moves(word, plan)
    cost = {i: (word[i : i + wanted].count("h"), word[i : i + wanted].count("c")) for i in windows(word, wanted, slab)}
    least = min(cost.values(), default=(0, 0))
    check_budget(plan, budget, least[0], moved)
    assert sum(x in "fc" for x in after) == allocatable
    if budget is not None or wanted == 0:
        return
    cleared = [i for i in cost if set(after[i : i + wanted]) <= set("fc")]
    assert any(cost[i] == least for i in cleared)
    if moved:
        start = min(i for i in cost if cost[i] == least)
        check_losses(word, after, plan, set(range(len(word))) - set(range(start, start + wanted)), moved)
    assert not plan_longest_run(shape(after, slab), n).moved_blocks


@given(WORDS, st.integers(1, 10), st.one_of(st.none(), st.integers(1, 10)), BUDGET)
@settings(max_examples=400)
def test_longest_run_clears_the_window_with_the_fewest_held_blocks(word, slab, n, budget):
    check_longest_run(word, slab, n, budget)


@pytest.mark.parametrize("slab", [2, 4, 9])
def test_longest_run_on_every_small_pool(slab):
    for word in map("".join, itertools.product("fchH", repeat=5)):
        for n in (None, 1, 2, 3, 4):
            check_longest_run(word, slab, n, None)


# -- by sequence -------------------------------------------------------------------------------------


@st.composite
def tabled_pools(draw):
    """A pool with up to four sequences, some sharing a prefix; the rest free, cached or pinned."""
    n = draw(st.integers(1, 14))
    ids = draw(st.permutations(range(n)))
    tables, used = [], 0
    for _ in range(draw(st.integers(0, 4))):
        own = draw(st.integers(0, min(5, n - used)))
        head = draw(st.sampled_from([t[: draw(st.integers(0, len(t)))] for t in tables] or [[]]))
        table = [*head, *ids[used : used + own]]
        used += own
        if table:
            tables.append(table)
    rest = {b: draw(st.sampled_from("ffffc")) for b in ids[used:]}
    word = [rest.get(b, "h") for b in range(n)]
    for b in draw(st.lists(st.integers(0, n - 1), max_size=2)):
        word[b] = word[b].upper()
    return "".join(word), [np.array(t, np.int64) for t in tables]


def total_runs(tables, slab):
    return sum(count_runs(t, slab) for t in tables)


@given(tabled_pools(), st.integers(1, 14), BUDGET)
@settings(max_examples=300)
def test_by_sequence_lowers_the_number_of_runs_until_it_cannot(pool, slab, budget):
    word, tables = pool
    before = [t.tolist() for t in tables]
    plan = plan_by_sequence(shape(word, slab), tables, budget)
    assert [t.tolist() for t in tables] == before
    if budget is not None:
        assert plan.moved_blocks <= budget
    assert plan.evicted_blocks == 0
    runs = total_runs(tables, slab)
    for stage in plan.stages:
        word = follow(word, MovePlan((stage,)))
        remap = np.arange(len(word))
        remap[stage.sources] = stage.destinations
        tables = [remap[t] for t in tables]
        assert total_runs(tables, slab) < runs
        runs = total_runs(tables, slab)
    assert word.count("c") == pool[0].count("c")
    if budget is None:
        assert not plan_by_sequence(shape(word, slab), tables).stages


def test_by_sequence_makes_one_run_of_a_scattered_table():
    word = "hfhfhffff"
    plan = plan_by_sequence(shape(word), [np.array([4, 0, 2])])
    (stage,) = plan.stages
    assert dict(zip(stage.sources.tolist(), stage.destinations.tolist(), strict=True)) == {4: 5, 0: 6, 2: 7}


def test_by_sequence_keeps_a_shared_prefix_and_moves_the_own_part():
    tables = [np.array([0, 1, 5]), np.array([0, 1, 7])]
    word = "hhfffhfh"
    plan = plan_by_sequence(shape(word), tables)
    remap = np.arange(8)
    for stage in plan.stages:
        remap[stage.sources] = stage.destinations
    assert total_runs([remap[t] for t in tables], 100) < 4


# -- shrink ------------------------------------------------------------------------------------------


@given(WORDS, st.data())
@settings(max_examples=300)
def test_shrinking_empties_the_end_and_loses_the_oldest_cached_blocks_only(word, data):
    n = data.draw(st.integers(1, len(word)))
    order = data.draw(st.permutations([i for i, x in enumerate(word) if x == "c"]))
    pool = shape(word, order=order)
    pinned, held, cached = sum(x.isupper() for x in word[n:]), word.count("h"), word.count("c")
    room = n - sum(x.isupper() for x in word[:n])
    if pinned:
        with pytest.raises(Refused, match=f"{pinned} blocks above"):
            plan_shrink(pool, n)
        return
    if held > room:
        with pytest.raises(OutOfBlocks) as error:
            plan_shrink(pool, n)
        assert (error.value.needed, error.value.allocatable) == (held, room)
        return
    plan = plan_shrink(pool, n)
    after = follow(word, plan)
    assert set(after[n:]) <= {"f"}
    assert after.count("h") == held
    lost = [b for stage in plan.stages for b in stage.evicted.tolist()]
    assert lost == order[: max(0, held + cached - room)]
    kept = [b for b in order if b not in lost and b >= n]
    assert plan.moved_blocks == word[n:].count("h") + len(kept)


def test_a_budget_says_what_it_left_of_moving_by_sequence() -> None:
    state = np.array([SOLE, FREE, SOLE, FREE, SOLE, FREE, FREE, FREE, FREE], np.uint8)
    shape = PoolShape(state, np.zeros(9, np.uint8), np.empty(0, np.int64), 9)
    table = np.array([0, 2, 4])
    assert plan_by_sequence(shape, [table]).moved_blocks == 3
    tight = plan_by_sequence(shape, [table], max_moves=2)
    assert (tight.moved_blocks, tight.left) == (0, 3)
