"""From blocks to cells: against a plain model, one block at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.block_map import BlockArrays
from allocator.ids import BlockFlag, BlockState
from kvtop.sources.scripted import block_arrays
from kvtop.tui import cells

_BLOCKS = st.lists(
    st.tuples(st.sampled_from(list(BlockState)), st.integers(1, 40), st.sampled_from([0, 0, 0, 0, 1, 2, 3])),
    min_size=1,
    max_size=200,
)


def _arrays(blocks: list[tuple[BlockState, int, int]]) -> BlockArrays:
    states = [state for state, _, _ in blocks]
    refs = [refs if state == BlockState.ACTIVE else 0 for state, refs, _ in blocks]
    return block_arrays(states, ref_count=refs, flags=[flags for _, _, flags in blocks])


def _plain_code(state: BlockState, refs: int, flags: int) -> int:
    if flags & BlockFlag.FENCED:
        return cells.FENCED
    if flags & BlockFlag.PINNED:
        return cells.PINNED
    if state == BlockState.ACTIVE:
        return cells.ACTIVE + min(refs, 10) - 1
    names = {
        BlockState.FREE: cells.FREE,
        BlockState.CACHED: cells.CACHED,
        BlockState.RESERVED: cells.RESERVED,
        BlockState.RETIRED: cells.RETIRED,
    }
    return names[state]


def _plain_group(group: list[tuple[BlockState, int, int]]) -> int | cells.Mixture:
    if any(flags & BlockFlag.FENCED for _, _, flags in group):
        return cells.FENCED
    if any(flags & BlockFlag.PINNED for _, _, flags in group):
        return cells.PINNED
    counts = Counter(state for state, _, _ in group)
    held = counts[BlockState.ACTIVE] + counts[BlockState.RESERVED]
    known = len(group) - counts[BlockState.RETIRED]
    if known == 0:
        return cells.RETIRED
    active = int(4 * held / known + 0.5)
    cached = min(int(4 * counts[BlockState.CACHED] / known + 0.5), 4 - active)
    refs = sum(min(refs, 10) for state, refs, _ in group if state == BlockState.ACTIVE)
    mean = min(max(int(refs / held + 0.5), 1), 10) if held else 1
    level = max(i for i, start in enumerate(cells.LEVEL_STARTS) if start <= mean)
    return cells.Mixture(cached, active, level if active else 0)


@given(_BLOCKS)
def test_block_codes_are_those_of_each_block(blocks):
    expected = [_plain_code(*block) for block in blocks]
    assert cells.block_codes(_arrays(blocks)).tolist() == expected
    assert cells.block_codes(_arrays(blocks), 2, 7).tolist() == expected[2:7]


@given(_BLOCKS, st.sampled_from([2, 3, 5, 8, 16, 24, 200, 1000]))
def test_group_codes_are_means_and_alarms_of_each_group(blocks, per_cell):
    codes = cells.group_codes(_arrays(blocks), per_cell).tolist()
    groups = [blocks[i : i + per_cell] for i in range(0, len(blocks), per_cell)]
    shown = [cells.MIXTURES[code - cells.MIXED] if code >= cells.MIXED else code for code in codes]
    assert shown == [_plain_group(group) for group in groups]


def test_blocks_above_a_shrunk_pool_are_no_part_of_a_mixture():
    states = [BlockState.ACTIVE] * 5 + [BlockState.RETIRED] * 11
    codes = cells.group_codes(block_arrays(states), 8).tolist()
    assert cells.MIXTURES[codes[0] - cells.MIXED] == cells.Mixture(0, 4, 0)
    assert codes[1] == cells.RETIRED


def test_one_alarm_among_a_million_blocks_is_seen():
    states = np.zeros(1_000_000, np.uint8)
    flags = np.zeros(1_000_000, np.uint8)
    flags[777_777] = BlockFlag.FENCED
    codes = cells.group_codes(block_arrays(states, flags=flags), 496)
    assert np.flatnonzero(codes == cells.FENCED).tolist() == [777_777 // 496]


def test_large_groups_of_shared_blocks_do_not_overflow():
    arrays = block_arrays(np.full(60_000, BlockState.ACTIVE, np.uint8), ref_count=65_535)
    for per_cell in (30_000, 26_208, 8):
        code = int(cells.group_codes(arrays, per_cell)[0])
        assert cells.MIXTURES[code - cells.MIXED] == cells.Mixture(0, 4, 4)


def test_every_code_fits_below_the_selection_bits():
    assert cells.NUM_CODES < 127


@given(st.lists(st.integers(0, 99), max_size=30), st.integers(1, 9))
def test_selection_marks_exactly_the_cells_of_its_blocks(block_ids, per_cell):
    codes = np.full(-(-100 // per_cell), cells.FREE, np.uint16)
    marked = cells.mark_selected(codes, np.array(block_ids, np.int64), per_cell)
    wanted = {block // per_cell for block in block_ids}
    for cell, value in enumerate(marked.tolist()):
        assert value == cells.FREE | (cells.SELECTED if cell in wanted else cells.DIMMED)


@given(
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=2),
    st.integers(1, 250),
    st.integers(2, 80),
    st.booleans(),
)
def test_a_fitting_scale_shows_every_block_within_the_lines(tiers, columns, lines, glyphs_only):
    scale = cells.choose_scale(tuple(tiers), columns, lines, "fit", glyphs_only)
    assert sum(scale.lines(n) for n in tiers) <= lines
    for n in tiers:
        rows = scale.lines(n) * (2 if scale.halves else 1)
        assert rows * scale.columns * scale.per_cell >= n
    assert not (glyphs_only and scale.halves)


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ((600,), cells.Scale(False, 1, 64)),
        ((641,), cells.Scale(True, 1, 64)),
        ((1280,), cells.Scale(True, 1, 64)),
        ((1281,), cells.Scale(True, 2, 64)),
        ((1_000_000,), cells.Scale(True, 784, 64)),
    ],
)
def test_the_largest_picture_that_fits_is_taken(tiers, expected):
    assert cells.choose_scale(tiers, 64, 10, "fit", False) == expected
