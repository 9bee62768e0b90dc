"""The map's actions: colours, scale, going somewhere, following, ranges, copying, marks of what moved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from tui_fakes import TABLES, FocusedSource, console, scripted_arrays, scripted_observation

from allocator.commands import Pin
from allocator.events import Event
from allocator.ids import BlockState
from kvtop.sources.scripted import block_arrays
from kvtop.tui import cells
from kvtop.tui.screens.ask import AskNumber
from kvtop.tui.shades import MODES
from kvtop.tui.widgets.block_map import BlockRef


async def test_action_colour():
    async with console() as c:
        pictures = []
        for mode in MODES:
            assert c.app.main.mode == mode
            pictures.append(c.app.main._values.copy())
            await c.press("c")
        assert c.app.main.mode == MODES[0]
        assert all((a != b).any() for a, b in pairwise(pictures))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (240, 70)])
@pytest.mark.parametrize("num_blocks", [1024, 300_000])
async def test_every_mode_has_a_legend_and_a_whole_picture(size, num_blocks):
    states = np.full(num_blocks, BlockState.ACTIVE, np.uint8)
    states[: num_blocks // 3] = BlockState.FREE
    big = block_arrays(states, owner=np.arange(num_blocks) % 9, fill=np.arange(num_blocks) % 17)
    source = FocusedSource([scripted_observation(device=big)])
    words = ["held by", "shared", "holder", "in use", "filled", "allocatable"]
    words[2] = "a colour a sequence" if num_blocks == 1024 else "first holder"
    async with console(source=source, size=size) as c:
        for mode, word in zip(MODES, words, strict=True):
            text = c.screen_text()
            assert word in text, mode
            assert all(len(line) == size[0] for line in text.splitlines())
            await c.press("c")


async def test_action_zoom():
    async with console(size=(80, 24)) as c:
        assert c.app.main.zoom == "fit"
        await c.press("z")
        assert (c.app.main.zoom, c.app.main.scale.per_cell, c.app.main.scale.halves) == ("dense", 1, True)
        await c.press("z")
        assert (c.app.main.zoom, c.app.main.scale.per_cell, c.app.main.scale.halves) == ("glyph", 1, False)
        await c.press("z")
        assert c.app.main.zoom == "fit"


async def test_action_zoom_out():
    source = FocusedSource([scripted_observation(device=block_arrays(np.zeros(300_000, np.uint8)))])
    async with console(source=source) as c:
        fit = c.app.main.scale.per_cell
        assert fit > 16
        await c.press("z")
        assert 1 < c.app.main.scale.per_cell < fit
        assert "blocks half a cell" in c.note()
        await c.press("x")
        assert c.app.main.scale.per_cell == fit
        await c.press("x")
        assert c.app.main.zoom == "glyph"


async def test_action_go_to_block():
    async with console() as c:
        await c.press("g", "1", "2", "0", "enter")
        assert c.app.main.cursor == BlockRef("device", 120)
        await c.poll()
        assert "pinned" in c.text_of("#inspector")
        await c.press("g", "9", "9", "9", "9")
        assert isinstance(c.app.screen, AskNumber)
        assert c.app.screen.problem == "0 to 1023 only"
        await c.press("enter")
        assert isinstance(c.app.screen, AskNumber)
        await c.press("escape")
        assert c.app.main.cursor == BlockRef("device", 120)


async def test_going_to_a_sequence_selects_it_and_goes_to_its_last_block():
    async with console() as c:
        await c.press("g", "s", "8", "enter")
        assert c.app.selected == 8
        await c.poll()
        assert c.app.main.cursor == BlockRef("device", TABLES[8][-1])
        await c.press("g", "s", "9", "9", "enter")
        assert "no sequence 99" in c.note()


async def test_action_follow():
    async with console() as c:
        await c.press("f")
        assert "select a sequence first" in c.note()
        await c.press("tab", "enter", "f")
        await c.poll()
        assert c.app.main.cursor == BlockRef("device", TABLES[7][-1])
        await c.press("1", "home")
        await c.poll()
        assert c.app.main.cursor == BlockRef("device", TABLES[7][-1])
        await c.press("f", "home")
        await c.poll()
        assert c.app.main.cursor == BlockRef("device", 0)


async def test_action_mark():
    async with console() as c:
        await c.point_at("device", 118)
        await c.press("v", *["right"] * 5)
        assert c.app.main.range == ("device", 118, 123)
        await c.poll()
        assert "device 118-123 (6, 6.0 KiB)" in c.text_of("#inspector")
        assert "6 cached" in c.text_of("#inspector")
        lit = c.app.main._values & cells.SELECTED
        assert np.count_nonzero(lit) == 6
        await c.press("P")
        await c.until(lambda: c.operations.planned == [Pin(tuple(range(118, 124)))], "the plan")
        await c.press("escape", "v")
        assert c.app.main.range is None
        await c.press("v", "right", "escape")
        assert c.app.main.range is None


async def test_dragging_marks_a_range_and_a_click_ends_it():
    async with console() as c:
        gutter = c.app.main._gutter
        await c.pilot.mouse_down("#map", offset=(gutter + 2, 1))
        await c.pilot.hover("#map", offset=(gutter + 6, 1))
        await c.pilot.mouse_up("#map", offset=(gutter + 6, 1))
        await c.pilot.pause()
        assert c.app.main.range == ("device", 2, 6)
        await c.pilot.click("#map", offset=(gutter + 10, 1))
        assert c.app.main.range is None
        assert c.app.main.cursor == BlockRef("device", 10)


async def test_action_copy():
    async with console() as c:
        await c.point_at("device", 41)
        await c.press("y")
        assert c.app.clipboard.startswith("block: device block 41")
        assert "held by: 7@1 8@1" in c.app.clipboard
        await c.press("v", "right", "right", "y")
        assert c.app.clipboard.startswith("blocks: device 41-43 (3, ")
        await c.press("escape", "tab", "down", "y")
        assert c.app.clipboard.startswith("seq_id: 8\n")


def _moved(kind: str):
    """Return two readings between which block 600 became cached, with an event of ``kind``."""
    changed = scripted_arrays()
    changed.state[600] = BlockState.CACHED
    later = scripted_observation(device=changed, first_event=3)
    event = Event(9, 1000, kind, "something")
    later = replace(later, snapshot=msgspec.structs.replace(later.snapshot, events=(*later.snapshot.events, event)))
    return FocusedSource([scripted_observation(), later])


@pytest.mark.parametrize(("kind", "flashes"), [("compact", 1), ("swap-out", 1), ("admit", 0)])
async def test_blocks_that_moved_flash_for_a_second(kind, flashes):
    async with console(source=_moved(kind)) as c:
        await c.poll(after_s=0.1)
        assert np.count_nonzero(c.app.main._values & cells.FLASH) == flashes
        await c.poll(after_s=0.5)
        assert np.count_nonzero(c.app.main._values & cells.FLASH) == flashes
        await c.poll(after_s=0.6)
        assert np.count_nonzero(c.app.main._values & cells.FLASH) == 0


async def test_action_watch():
    async with console(source=_moved("admit")) as c:
        await c.press("w")
        assert "every change flashes" in c.note()
        await c.poll(after_s=0.1)
        assert np.count_nonzero(c.app.main._values & cells.FLASH) == 1
        await c.press("w")
        assert "nothing flashes" in c.note()
        await c.poll(after_s=0.1)
        assert np.count_nonzero(c.app.main._values & cells.FLASH) == 0
