"""The map: what it draws, and that it redraws no more than changed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tui_fakes import TABLES, FocusedSource, console, scripted_arrays, scripted_observation, wait_until

from allocator.ids import BlockFlag, BlockState
from kvtop.sources.scripted import block_arrays
from kvtop.tui import cells
from kvtop.tui.look import Look
from kvtop.tui.paint import Painter, ansi_of, glyph_of, rgb_of
from kvtop.tui.widgets.block_map import BlockRef

_SHOWN = [cells.FREE, cells.CACHED, *range(cells.ACTIVE, cells.ACTIVE + 10), cells.FENCED, cells.PINNED, cells.RESERVED]


def _lightness(rgb: tuple[int, int, int]) -> float:
    linear = [(c / 255) ** 2.2 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_free_cached_and_held_blocks_rise_in_lightness():
    ramp = [cells.FREE, cells.CACHED, *(cells.ACTIVE + start - 1 for start in cells.LEVEL_STARTS)]
    shades = [_lightness(rgb_of(code)) for code in ramp]
    assert shades == sorted(shades)
    assert all(bright > 1.15 * dark for dark, bright in pairwise(shades))


def test_each_state_has_its_own_glyph():
    assert [glyph_of(code) for code in _SHOWN] == list("·o123456789+sxr")


def test_sixteen_colours_keep_the_states_apart():
    states = [cells.FREE, cells.CACHED, cells.ACTIVE, cells.ACTIVE + 1, cells.FENCED, cells.PINNED, cells.RESERVED]
    assert len({ansi_of(code) for code in states}) == len(states)


def test_equal_neighbours_become_one_segment():
    segments = Painter(Look()).runs(np.array([1, 1, 1, 2, 2, 1], np.uint32), halves=False)
    assert [s.text for s in segments] == ["···", "oo", "·"]


def test_two_halves_have_two_colours():
    pair = np.array([cells.FREE << cells.BITS | cells.ACTIVE], np.uint32)
    (segment,) = Painter(Look()).runs(pair, halves=True)
    assert segment.text == "▀"
    assert segment.style.color.triplet == rgb_of(cells.FREE)
    assert segment.style.bgcolor.triplet == rgb_of(cells.ACTIVE)


def test_without_colour_the_selection_is_reversed():
    plain = Painter(Look("none"))
    values = np.array([cells.ACTIVE | cells.SELECTED, cells.ACTIVE | cells.DIMMED], np.uint32)
    lit, other = plain.runs(values, halves=False)
    assert lit.style.reverse
    assert not other.style.reverse
    assert lit.style.color is None


async def test_an_unchanged_frame_draws_no_line():
    async with console() as c:
        before = c.app.main.strips_built
        await c.poll()
        assert c.app.main.strips_built == before


async def test_only_the_line_with_a_changed_block_is_drawn():
    changed = scripted_arrays()
    changed.state[600] = BlockState.CACHED
    source = FocusedSource([scripted_observation(), scripted_observation(device=changed, first_event=3)])
    async with console(source=source, size=(80, 24)) as c:
        before = c.app.main.strips_built
        await c.poll()
        assert c.app.main.strips_built == before + 1


async def test_the_whole_pool_in_glyphs():
    async with console(size=(240, 70)) as c:
        lines = c.screen_text().splitlines()
        text = "".join(line[6 : 6 + c.app.main.scale.columns] for line in lines[6 : 6 + 7])
        assert text.startswith("·" * 40 + "2" * 16 + "1" * 16 + "·" * 28 + "o" * 20 + "xxx")
        assert "rrrr" in text
        assert "ssss" in text


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (240, 70)])
async def test_position_and_block_agree_everywhere(size):
    async with console(size=size) as c:
        block_map = c.app.main
        seen = {block_map.block_at(x, y) for y in range(block_map.size.height) for x in range(block_map.size.width)} - {
            None
        }
        step = block_map.scale.per_cell
        halves = 2 if block_map.scale.halves else 1
        for tier, count in (("device", 1024), ("host", 512)):
            ids = sorted(b.block_id for b in seen if b.tier == tier)
            assert ids[0] == 0
            assert len(ids) >= count // step // halves - block_map.scale.columns
            assert all(block_id % step == 0 for block_id in ids)


async def test_click_and_hover_choose_the_block():
    async with console(size=(240, 70)) as c:
        block_map = c.app.main
        gutter = next(x for x in range(20) if block_map.block_at(x, 1) is not None)
        await c.pilot.click("#map", offset=(gutter + 45, 1))
        assert block_map.cursor == BlockRef("device", 45)
        await c.poll()
        assert "device block 45" in c.text_of("#inspector")
        assert "7@5 8@5" in c.text_of("#inspector")
        await c.pilot.hover("#map", offset=(gutter + 120, 1))
        await c.poll()
        assert c.source.asked[-1].block_id == 120
        assert "device block 120" in c.text_of("#inspector")
        assert "pinned" in c.text_of("#inspector")
        await c.pilot.hover("#inspector")
        await c.pilot.pause()
        assert "device block 45" in c.text_of("#inspector")


async def test_the_selected_table_is_lit_and_the_rest_dimmed():
    async with console(size=(240, 70)) as c:
        c.app.choose(9)
        await c.poll()
        values = c.app.main._values.ravel()
        lit = np.flatnonzero(values & cells.SELECTED)
        assert lit.tolist() == list(TABLES[9])
        assert np.count_nonzero(values & cells.DIMMED) == 1024 + 512 - len(TABLES[9])


async def test_the_selected_table_is_lit_where_the_map_is_scrolled():
    async with console(size=(80, 24), source=FocusedSource([scripted_observation(device=scripted_arrays(8192))])) as c:
        await c.press("z", "z")
        c.app.choose(9)
        await c.point_at("device", 1500)
        block_map = c.app.main
        lit = [block_map.block_at(int(x) + 6, int(y) + 1) for y, x in np.argwhere(block_map._values & cells.SELECTED)]
        assert {b.block_id for b in lit} <= set(TABLES[9])
        assert lit


async def test_an_aggregated_map_follows_the_blocks():
    before, after = scripted_arrays(8192), scripted_arrays(8192)
    after.state[:64] = BlockState.ACTIVE
    readings = [scripted_observation(device=before), scripted_observation(device=after, first_event=3)]
    async with console(size=(80, 24), source=FocusedSource(readings)) as c:
        assert c.app.main.scale.per_cell > 1
        first, drawn = c.app.main._values.copy(), c.app.main.strips_built
        await c.poll()
        assert (c.app.main._values != first).any()
        assert drawn < c.app.main.strips_built <= drawn + 2


async def test_a_sequence_that_ended_is_deselected():
    async with console() as c:
        c.app.choose(99)
        await c.poll()
        assert c.app.selected is None
        assert "sequence 99 has ended" in c.note()


async def test_the_cursor_stays_inside_a_pool_that_shrank():
    small = block_arrays(np.zeros(100, np.uint8))
    source = FocusedSource([scripted_observation(), scripted_observation(device=small, first_event=3)])
    async with console(source=source) as c:
        await c.press("end")
        await c.poll()
        assert c.app.main.cursor == BlockRef("device", 99)


async def test_one_to_one_scales_scroll_to_the_cursor():
    async with console(size=(80, 24)) as c:
        await c.press("z", "z", "end", "down")
        assert c.app.main.cursor.tier == "host"
        await c.press("end")
        last = c.screen_text().splitlines()
        assert any(line.startswith("  504 ") for line in last)
        await c.press("home", "up", "home")
        assert c.app.main.cursor == BlockRef("device", 0)
        assert any(line.startswith("    0 ") for line in c.screen_text().splitlines())


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 1_000_000])
async def test_pools_of_any_size_are_drawn(num_blocks):
    states = np.zeros(num_blocks, np.uint8)
    states[num_blocks // 2] = BlockState.ACTIVE
    flags = np.zeros(num_blocks, np.uint8)
    flags[-1] = BlockFlag.PINNED
    device = block_arrays(states, flags=flags)
    async with console(source=FocusedSource([scripted_observation(device=device)])) as c:
        await c.press("end")
        assert c.app.main.cursor.block_id > num_blocks - 1 - c.app.main.scale.per_cell
        assert f"{num_blocks:,} block" in c.screen_text()


async def test_no_block_map_is_said():
    observation = scripted_observation()
    bare = type(observation)(observation.snapshot, None, None)
    async with console(source=FocusedSource([bare])) as c:
        await wait_until(c.pilot, lambda: "gives no block map" in c.screen_text(), "the message")
        assert "—" in c.text_of("Header")
        await c.press("right", "down", "end", "enter", "g")
