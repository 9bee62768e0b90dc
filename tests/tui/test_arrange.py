"""Arranging panels by key, by line and by mouse; and what of it is remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tui_fakes import console

from kvtop.errors import UserError
from kvtop.options_file import read_options_file
from kvtop.panels.catalog import CONTENTS
from kvtop.tui.arrangement import AT_FIRST, MOVABLE, NONE, PANELS, Arrangement, known_fields, read_field
from kvtop.tui.memory import Memory
from kvtop.tui.screens.arrange import ArrangeScreen
from kvtop.tui.settings import Settings, read_settings

_SIZES = [(80, 24), (100, 30), (120, 40), (240, 70)]


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "kvtop" / "console.json")


def remembered(memory: Memory) -> dict[str, object]:
    return json.loads(memory.path.read_text(encoding="utf-8"))


# By key and by line --------------------------------------------------------------------------------------------------


async def test_action_arrange():
    async with console() as c:
        await c.press("f4")
        assert isinstance(c.app.screen, ArrangeScreen)
        await c.press("j", "b")
        assert c.app.arrangement.beside == "events"
        assert c.app.query_one("#side-log").size.height
        assert not c.app.query_one("#sequences").size.height
        await c.press("b", "k", "u")
        assert (c.app.arrangement.beside, c.app.arrangement.below) == (NONE, "sequences")
        await c.press("space", "K", "s", "minus", "right")
        here = c.app.arrangement
        assert (here.hidden, here.tabs[0], here.side, here.below_height) == (("sequences",), "sequences", "left", 5)
        assert here.side_width is not None
        await c.press("0")
        assert c.app.arrangement == AT_FIRST
        await c.press("f4")
        assert not isinstance(c.app.screen, ArrangeScreen)


async def test_action_beside():
    async with console() as c:
        seen = []
        for _ in range(len(MOVABLE) + 1):
            await c.press("vertical_line")
            await c.poll()
            beside = c.app.arrangement.beside
            seen.append(beside)
            assert f"beside the map: {beside}" in c.note()
            assert bool(c.app.query_one("#right").size.width) == (beside != NONE)
            if beside in CONTENTS:
                assert c.app.query_one("#side").panel == beside
                assert c.text_of("#side").strip("─ \n")
        assert {*seen} == {*MOVABLE, NONE}
        assert c.app.arrangement == AT_FIRST


async def test_action_below():
    async with console() as c:
        height = c.app.main.size.height
        for _ in range(len(MOVABLE) + 1):
            await c.press("underscore")
            await c.poll()
            below = c.app.arrangement.below
            assert bool(c.app.query_one("#bottom").size.height) == (below != NONE)
            assert (c.app.main.size.height > height) == (below == NONE)
        assert c.app.arrangement == AT_FIRST


async def test_action_width_more():
    async with console() as c:
        before = c.app.query_one("#right").size.width
        await c.press("greater_than_sign", "greater_than_sign")
        assert c.app.query_one("#right").size.width > before
        await c.press(*["greater_than_sign"] * 30)
        assert c.app.arrangement.side_width == 80
        assert c.app.main.size.width > 10


async def test_action_width_less():
    async with console() as c:
        before = c.app.query_one("#right").size.width
        await c.press("less_than_sign")
        assert c.app.query_one("#right").size.width < before
        await c.press(*["less_than_sign"] * 30)
        assert c.app.arrangement.side_width == 20


async def test_action_height_more():
    async with console() as c:
        await c.press("right_parenthesis")
        assert c.app.query_one("#bottom").size.height == 7
        for _ in range(30):
            c.app.action_height("more")
        await c.pilot.pause()
        assert c.app.arrangement.below_height == 30
        assert c.app.main.size.height >= 8


async def test_action_height_less():
    async with console() as c:
        await c.press(*["left_parenthesis"] * 9)
        assert c.app.query_one("#bottom").size.height == 3


async def test_lines_arrange_too():
    async with console() as c:
        for line, field, value in (
            ("beside gpu", "beside", "gpu"),
            ("below none", "below", "none"),
            ("side left", "side", "left"),
            ("side-width 50", "side_width", 50),
            ("below-height 9", "below_height", 9),
            ("order events map", "order", ("events", "map")),
            ("hide locks gpu", "hidden", ("locks", "gpu")),
            ("unhide gpu", "hidden", ("locks",)),
        ):
            c.app.run_line(line)
            assert getattr(c.app.arrangement, field) == value, line
        await c.pilot.pause()
        assert c.text_of("Tabs").split()[:4] == ["3", "events", "1", "map"]
        assert "locks" not in c.text_of("Tabs")
        right, main = c.app.query_one("#right").region, c.app.main.region
        assert right.right < main.x + 1
        await c.press("7")  # hidden is not gone
        assert c.app.panel == "locks"
        assert "locks" in c.text_of("Tabs")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("beside map", "beside map: one of sequences"),
        ("beside", "beside (nothing): one of"),
        ("side up", "side up: one of right, left"),
        ("side-width 90", "side-width 90: a whole number from 20 to 80, % of the columns"),
        ("below-height x", "below-height x: a whole number from 3 to 30, lines"),
        ("order nothing", "order nothing: some of map"),
        ("hide map", "hide map: one of sequences"),
        ("unhide gpu", "unhide gpu: one of those hidden: none is"),
    ],
)
async def test_a_bad_line_changes_nothing(line: str, told: str):
    async with console(size=(240, 70)) as c:
        c.app.run_line(line)
        assert c.note().strip().startswith(told)
        assert c.app.arrangement == AT_FIRST


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("side", ["right", "left"])
async def test_every_arrangement_fits_every_layout(size: tuple[int, int], side: str):
    async with console(size=size) as c:
        for panel in ("sequences", "events", "tiers", NONE):
            c.app.arrange(replace(AT_FIRST, beside=panel, below=panel, side=side, side_width=55, below_height=8))
            for shown in ("map", "sequences", "events", "tiers"):
                c.app.action_show(shown)
                await c.pilot.pause()
                rows = c.screen_text().splitlines()
                assert [len(row) for row in rows] == [size[0]] * size[1], (panel, shown)
                assert c.app.focused is not None
                assert c.app.focused.size.height >= 3, (panel, shown)
                assert c.app.focused.size.width >= 20, (panel, shown)


async def test_the_focused_pane_takes_the_screen_wherever_it_stands():
    async with console() as c:
        c.app.arrange(Arrangement(beside="tiers", below="sequences", side="left", side_width=30))
        await c.pilot.pause()
        for selector in ("#side", "#under-list", "#map"):
            c.app.query_one(selector).focus()
            await c.press("e")
            assert c.app.query_one(selector).size.width >= 118, selector
            assert c.app.query_one(selector).size.height >= 30, selector
            await c.press("e")
        assert c.app.query_one("#right").size.width < 40


async def test_the_list_scrolls_where_it_has_no_room():
    async with console(size=(60, 16)) as c:
        await c.press("f4", *["down"] * 20, "space")
        assert c.app.arrangement.hidden == (PANELS[-1],)
        assert PANELS[-1] in c.app.screen.list.line_text(c.app.screen.list.size.height - 6)


# By mouse ------------------------------------------------------------------------------------------------------------


async def _drag(c, start: tuple[int, int], to: tuple[int, int]) -> None:
    await c.pilot.mouse_down(offset=start)
    await c.pilot.hover(offset=to)
    await c.pilot.mouse_up(offset=to)
    await c.pilot.pause()


async def test_the_edge_beside_the_map_is_dragged():
    async with console() as c:
        right = c.app.query_one("#right").region
        await _drag(c, (right.x - 1, 15), (59, 15))
        assert c.app.query_one("#right").region.x == 60
        c.app.run_line("side left")
        await c.pilot.pause()
        await _drag(c, (c.app.query_one("#right").region.right, 15), (36, 15))
        assert c.app.query_one("#right").region.right == 36
        await _drag(c, (80, 15), (20, 15))  # the map's own dragging marks blocks
        assert c.app.query_one("#right").region.right == 36


async def test_the_edge_below_the_map_is_dragged():
    async with console() as c:
        bottom = c.app.query_one("#bottom").region
        await _drag(c, (5, bottom.y), (5, bottom.y - 6))
        assert c.app.query_one("#bottom").region.y == bottom.y - 6
        await _drag(c, (5, bottom.y + 2), (5, 2))
        assert c.app.query_one("#bottom").region.y == bottom.y - 6


async def test_tabs_are_dragged():
    async with console() as c:
        tabs = c.app.query_one("Tabs")
        y, text = tabs.region.y, tabs.line_text(0)
        await _drag(c, (text.index("locks"), y), (text.index("seqs"), y))
        assert c.app.arrangement.tabs[:3] == ("map", "locks", "sequences")
        assert c.app.panel == "map"
        text = tabs.line_text(0)
        await _drag(c, (text.index("tiers"), y), (100, 20))
        assert c.app.arrangement.beside == "tiers"
        await _drag(c, (text.index("prefix"), y), (100, c.app.query_one("#bottom").region.y + 2))
        assert c.app.arrangement.below == "prefix"
        await _drag(c, (text.index("gpu"), y), (10, 15))
        assert "gpu" not in (c.app.arrangement.beside, c.app.arrangement.below)
        await c.pilot.click(offset=(text.index("events"), y))
        await c.pilot.pause()
        assert c.app.panel == "events"


async def test_the_list_is_clicked():
    async with console() as c:
        await c.press("f4")
        area = c.app.screen.list.region
        row = area.y + 1 + PANELS.index("locks")
        await c.pilot.click(offset=(area.x + 23, row))
        assert c.app.arrangement.hidden == ("locks",)
        await c.pilot.click(offset=(area.x + 33, row))
        await c.pilot.click(offset=(area.x + 47, row))
        assert (c.app.arrangement.beside, c.app.arrangement.below) == ("locks", "locks")


# Remembering ---------------------------------------------------------------------------------------------------------


async def test_an_arrangement_is_there_again(memory: Memory):
    async with console(settings=read_settings({}, memory)) as c:
        c.app.run_line("beside tiers")
        c.app.run_line("side-width 50")
        c.app.run_line("hide locks gpu")
        c.app.run_line("theme light")
        c.app._tick()
        await c.until(memory.path.exists, "the file")
    settings = read_settings({}, memory)
    assert settings.arrangement == Arrangement(beside="tiers", side_width=50, hidden=("locks", "gpu"))
    async with console(settings=settings) as c:
        assert c.app.look.theme.name == "light"
        assert c.app.query_one("#side").panel == "tiers"
        assert c.app.query_one("#right").size.width == 59  # and a gap of one


async def test_what_is_left_last_is_written_at_the_end(memory: Memory):
    async with console(settings=read_settings({}, memory)) as c:
        c.app.run_line("side left")
    assert remembered(memory) == {"schema_version": 1, "panels": {"side": "left"}}
    async with console(settings=read_settings({}, memory)) as c:
        c.app.run_line("side right")
    assert remembered(memory) == {"schema_version": 1, "panels": {}}


async def test_nothing_is_written_where_nothing_is_changed_or_remembered(memory: Memory):
    async with console(settings=read_settings({}, memory)):
        pass
    async with console(settings=Settings()) as c:
        c.app.run_line("side left")
    assert not memory.path.exists()


async def test_the_file_wins_over_memory_and_is_not_remembered(memory: Memory, tmp_path: Path):
    memory.save({"panels": {"beside": "tiers", "side": "left"}})
    file = tmp_path / "kvtop.toml"
    file.write_text('[panels]\nbeside = "gpu"\nside-width = 44\n', encoding="utf-8")
    tables = read_options_file(str(file), {}, frozenset()).tables
    settings = read_settings(tables, memory)
    assert settings.arrangement == Arrangement(beside="gpu", side="left", side_width=44)
    async with console(settings=settings) as c:
        c.app.run_line("beside events")
        c.app.run_line("below none")
    assert remembered(memory)["panels"] == {"side": "left", "below": "none"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 9}', "[" * 90_000, "\0" * 70_000, "[" * 9000])
async def test_a_damaged_memory_is_put_aside_and_told_in_one_line(memory: Memory, text: str):
    memory.path.parent.mkdir()
    memory.path.write_text(text, encoding="utf-8")
    async with console(settings=read_settings({}, memory)) as c:
        assert "nothing remembered: console.json could not be understood" in c.note()
        assert c.app.arrangement == AT_FIRST
        c.app.run_line("side left")
    assert remembered(memory)["panels"] == {"side": "left"}
    assert memory.path.with_suffix(".json.bad").read_text(encoding="utf-8") == text


async def test_memory_that_cannot_be_read_or_written_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    memory = Memory(tmp_path / "file" / "console.json")
    async with console(size=(240, 70), settings=read_settings({}, memory)) as c:
        assert "nothing remembered:" in c.note()
        c.app.run_line("side left")
        c.app._tick()
        await c.until(lambda: "not remembered:" in c.note(), "the note")
        assert c.note().count("\n") == 0


def test_two_consoles_at_once_leave_one_whole_file(memory: Memory):
    other = Memory(memory.path)
    memory.save({"panels": {"side": "left"}})
    other.save({"theme": "light"})
    memory.save({"panels": {"side": "right"}})
    assert other.load() == ({"schema_version": 1, "panels": {"side": "right"}, "theme": "light"}, "")
    assert [path.name for path in memory.path.parent.iterdir()] == ["console.json"]


def test_what_can_no_longer_be_used_is_left_out():
    read = known_fields({"beside": "gone", "below": "tiers", "order": ["gone", "map"], "side-width": 7, "x": 1})
    assert read == {"below": "tiers", "order": ("map",)}
    assert known_fields(Arrangement(beside="gpu", order=("gpu",)).to_plain()) == {"beside": "gpu", "order": ("gpu",)}


# The file ------------------------------------------------------------------------------------------------------------

BAD = [
    ('besides = "gpu"', "panels.besides: no such setting; did you mean beside?"),
    ("xyz = 1", "panels.xyz: no such setting; one of beside, below, side, side-width"),
    ('beside = "map"', "panels.beside map: one of sequences"),
    ("beside = 1", "panels.beside 1: one of sequences"),
    ("side-width = 10", "panels.side-width 10: a whole number from 20 to 80, % of the columns"),
    ("below-height = true", "panels.below-height True: a whole number from 3 to 30, lines"),
    ('hidden = "gpu"', "panels.hidden gpu: some of sequences"),
    ('order = ["gpux"]', "panels.order ['gpux']: some of map"),
]


@pytest.mark.parametrize(("text", "told"), BAD, ids=[text for text, _ in BAD])
def test_a_wrong_setting_is_one_line(text: str, told: str, tmp_path: Path):
    file = tmp_path / "kvtop.toml"
    file.write_text(f"\n[panels]\n{text}\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_settings(read_options_file(str(file), {}, frozenset()).tables)
    assert str(error.value).startswith(f"{file}:3: {told}")


def test_every_field_can_be_set_by_its_name():
    for name, value in Arrangement("gpu", "tiers", "left", 30, 9, ("gpu",), ("locks",)).to_plain().items():
        field, read = read_field(name, value)
        assert getattr(Arrangement("gpu", "tiers", "left", 30, 9, ("gpu",), ("locks",)), field) == read
