"""Every number of one tier, against hand-made pools and plain counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.ids import BlockFlag
from allocator.metrics import count_runs, external_ratio, find_runs, ratio, run_lengths, tier_numbers


def plain_runs(mask: list[bool], slab: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for i, wanted in enumerate(mask):
        if not wanted:
            continue
        if i % slab and runs and sum(runs[-1]) == i:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return runs


@given(st.lists(st.booleans(), max_size=24), st.integers(1, 30))
def test_runs_end_at_slab_ends(mask, slab):
    starts, lengths = find_runs(np.array(mask, bool), slab)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == plain_runs(mask, slab)
    assert run_lengths(np.array(mask, bool), slab).tolist() == lengths.tolist()


@given(st.lists(st.integers(0, 20), unique=True, max_size=12), st.integers(1, 24))
def test_contiguity_counts_the_copies_a_swap_needs(table, slab):
    runs = sum(i == 0 or b != table[i - 1] + 1 or b % slab == 0 for i, b in enumerate(table))
    assert count_runs(np.array(table, np.int64), slab) == runs


def test_the_numbers_of_a_pool(make_arrays):
    arrays = make_arrays("ffaacrffca", block_size=16, ref_counts={2: 3, 9: 70})
    arrays.fill[3] = 4
    arrays.flags[6] = BlockFlag.PINNED
    arrays.flags[4] = BlockFlag.FENCED
    arrays.flags[9] = BlockFlag.PINNED
    n = tier_numbers(arrays, 16, 100)
    assert (n.total, n.free, n.cached, n.active, n.reserved) == (10, 4, 2, 3, 1)
    assert (n.shared, n.fenced, n.pinned) == (2, 1, 2)
    assert (n.allocatable, n.largest_free_run, n.free_runs) == (4, 2, 2)
    assert n.external_ratio == pytest.approx(0.5)
    assert n.internal_ratio == pytest.approx(12 / 48)
    assert n.usage_ratio == pytest.approx(0.4)
    assert n.ref_histogram == (7, 1, 0, 1, 0, 0, 1)
    assert sum(n.ref_histogram) == n.total
    assert tier_numbers(arrays, 16, 1).largest_free_run == 1


@pytest.mark.parametrize(
    ("refs", "bucket"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (8, 4), (9, 5), (16, 5), (17, 6), (65535, 6)]
)
def test_reference_count_buckets(make_arrays, refs, bucket):
    histogram = tier_numbers(make_arrays("a", ref_counts={0: refs}), 16, 1).ref_histogram
    assert [i for i, count in enumerate(histogram) if count] == [bucket]


def test_retired_blocks_are_not_part_of_the_pool(make_arrays):
    n = tier_numbers(make_arrays("afxxx"), 16, 5)
    assert (n.total, n.usage_ratio, n.ref_histogram) == (2, 0.5, (1, 1, 0, 0, 0, 0, 0))


def test_an_empty_and_a_full_pool(make_arrays):
    empty = tier_numbers(make_arrays("ffff"), 16, 4)
    assert (empty.external_ratio, empty.internal_ratio, empty.usage_ratio, empty.free_runs) == (0, None, 0, 1)
    full = tier_numbers(make_arrays("aa"), 16, 4)
    assert (full.external_ratio, full.internal_ratio, full.allocatable, full.largest_free_run) == (0, 0, 0, 0)


def test_ratios():
    assert external_ratio(3, 12) == pytest.approx(0.75)
    assert external_ratio(0, 0) == 0
    assert ratio(1, 4) == pytest.approx(0.25)
    assert ratio(0, 0) is None
