"""Colour modes: what each block and each group of blocks shows, against a plain restatement."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.ids import BlockFlag, BlockState
from kvtop.sources.scripted import block_arrays
from kvtop.tui import cells, shades
from kvtop.tui.look import Look
from kvtop.tui.paint import CURSOR, Painter, ansi_of, glyph_of, rgb_of
from kvtop.tui.themes import NUM_LEVELS, NUM_OWNER_COLOURS, THEMES

_BLOCK_SIZE, _STEP = 16, 500
_BLOCKS = st.lists(
    st.tuples(
        st.sampled_from([BlockState.FREE, BlockState.CACHED, BlockState.ACTIVE, BlockState.RESERVED]),
        st.integers(0, 4),
        st.integers(0, _BLOCK_SIZE),
        st.integers(0, _STEP),
        st.sampled_from([0, 0, 0, 0, int(BlockFlag.FENCED), int(BlockFlag.PINNED)]),
    ),
    min_size=1,
    max_size=60,
)


def _arrays(blocks):
    state, owner, fill, used, flags = (np.array(part) for part in zip(*blocks, strict=True))
    owner = np.where(state == BlockState.ACTIVE, owner, -1)
    return block_arrays(state, owner=owner, fill=fill, last_used=used, flags=flags)


def _facts(slab_size=16):
    return shades.Facts(_STEP, _BLOCK_SIZE, slab_size, np.array([0, *map(shades.owner_slot, range(5))], np.uint8))


def _codes(mode, arrays, facts):
    return shades.block_codes(mode, arrays, shades.shades(mode, arrays, facts), 0, arrays.num_blocks)


@given(_BLOCKS)
def test_owners_keep_their_colour(blocks):
    arrays = _arrays(blocks)
    for code, (state, owner, _, _, flags) in zip(_codes("owner", arrays, _facts()), blocks, strict=True):
        if state is BlockState.ACTIVE and not flags:
            assert code == shades.SHADE + shades.owner_slot(owner)
        else:
            assert code < shades.SHADE


@given(_BLOCKS)
def test_age_and_fill_are_levels(blocks):
    arrays, facts = _arrays(blocks), _facts()
    ages, fills = _codes("age", arrays, facts), _codes("fill", arrays, facts)
    for age, fill, (state, _, tokens, used, flags) in zip(ages, fills, blocks, strict=True):
        if flags or state not in (BlockState.ACTIVE, BlockState.CACHED):
            assert age < shades.SHADE
            assert fill < shades.SHADE
            continue
        assert fill == shades.SHADE + tokens * (NUM_LEVELS - 1) // _BLOCK_SIZE
        level = age - shades.SHADE
        if state is BlockState.ACTIVE:
            assert level == 0
        else:
            steps = _STEP - used
            assert level >= 1
            assert level == 1 or steps > shades.AGE_STEPS[level - 2]
            assert level == NUM_LEVELS - 1 or steps <= shades.AGE_STEPS[level - 1]


@given(_BLOCKS, st.sampled_from([1, 7, 16, 100]))
def test_contiguity_is_the_length_of_the_run(blocks, slab):
    arrays, facts = _arrays(blocks), _facts(slab)
    codes = _codes("contiguity", arrays, facts)
    kinds = []
    for i, (state, owner, _, _, flags) in enumerate(blocks):
        free = state in (BlockState.FREE, BlockState.CACHED) and not flags
        kind = ("free", -1) if free else ("held", owner) if state is BlockState.ACTIVE else ("no", i)
        kinds.append((kind, i // slab))
    at = 0
    for (kind, _), members in groupby(kinds):
        length = len(list(members))
        level = int(np.searchsorted(shades.RUN_BLOCKS, length))
        for i in range(at, at + length):
            if kind[0] == "no" or blocks[i][4]:
                assert codes[i] < shades.SHADE
            else:
                assert codes[i] == shades.SHADE + level + (shades.OTHER if kind[0] == "free" else 0)
        at += length


@pytest.mark.parametrize("mode", shades.MODES)
@given(blocks=_BLOCKS, per_cell=st.integers(2, 9))
def test_groups_show_alarms_first_and_else_one_of_their_shades(mode, blocks, per_cell):
    arrays, facts = _arrays(blocks), _facts()
    made = shades.shades(mode, arrays, facts)
    codes = shades.group_codes(mode, arrays, made, per_cell)
    each = shades.block_codes(mode, arrays, made, 0, arrays.num_blocks)
    assert len(codes) == -(-len(blocks) // per_cell)
    for i, code in enumerate(codes):
        group = each[i * per_cell : (i + 1) * per_cell]
        if cells.FENCED in group:
            assert code == cells.FENCED
        elif cells.PINNED in group:
            assert code == cells.PINNED
        elif mode == "owner" and (group >= shades.SHADE).any():
            assert code == group[group >= shades.SHADE][0]
        elif mode in ("age", "fill", "contiguity") and (group >= shades.SHADE).any():
            shown = group[group >= shades.SHADE]
            assert shown.min() <= code <= shown.max()


def test_state_groups_show_the_majority():
    states = [BlockState.ACTIVE] * 3 + [BlockState.FREE] + [BlockState.CACHED] * 2 + [BlockState.ACTIVE] * 2
    arrays = block_arrays(states, ref_count=[1, 1, 1, 0, 0, 0, 5, 5])
    made = shades.shades("state", arrays, _facts())
    assert shades.group_codes("state", arrays, made, 4).tolist() == [cells.ACTIVE, cells.CACHED]
    assert shades.block_codes("state", arrays, made, 0, 8).tolist()[-1] == shades.SHARED


def test_shades_leave_the_cursor_and_the_marks_alone():
    assert shades.SHADE + NUM_OWNER_COLOURS <= CURSOR
    assert shades.OTHER + NUM_LEVELS <= NUM_OWNER_COLOURS


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda t: t.name)
def test_every_theme_tells_states_and_levels_apart(theme):
    def lightness(rgb):
        return sum(weight * (part / 255) ** 2.2 for weight, part in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))

    ramp = [cells.FREE, cells.CACHED, *(cells.ACTIVE + start - 1 for start in cells.LEVEL_STARTS)]
    shown = [lightness(rgb_of(code, theme=theme)) for code in ramp]
    assert shown in (sorted(shown), sorted(shown, reverse=True))
    for mode in ("age", "fill"):
        levels = [lightness(rgb_of(shades.SHADE + i, mode, theme)) for i in range(NUM_LEVELS)]
        assert levels in (sorted(levels), sorted(levels, reverse=True))
    owners = {rgb_of(shades.SHADE + i, "owner", theme) for i in range(NUM_OWNER_COLOURS)}
    assert len(owners) == NUM_OWNER_COLOURS
    assert set(theme.styles) == set(THEMES["dark"].styles)


def test_one_block_a_cell_writes_its_references_in_the_colour_of_the_mode():
    look = Look()
    painter = Painter(look, "owner")
    value = (cells.ACTIVE + 2) << 12 | (shades.SHADE + 5)
    (segment,) = painter.runs(np.array([value], np.uint32), halves=False)
    assert segment.text == "3"
    assert segment.style.color.triplet == rgb_of(shades.SHADE + 5, "owner")


def test_without_colour_the_shade_is_the_character():
    painter = Painter(Look("none"), "fill")
    (segment,) = painter.runs(np.array([(cells.ACTIVE << 12) | (shades.SHADE + 9)], np.uint32), halves=False)
    assert segment.text == "9"
    assert glyph_of(shades.SHADE + 1, "owner") == "b"
    assert glyph_of(shades.SHADE + shades.OTHER, "contiguity") == "a"
    assert ansi_of(shades.SHADE, "age") != ansi_of(shades.SHADE + 9, "age")
