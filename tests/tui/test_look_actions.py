"""Panels, filters, the command line, sorting, holding the screen, time, themes, exports."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import msgspec
import pytest
from PIL import Image
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.color import Color
from textual.strip import Strip
from tui_fakes import TABLES, FocusedSource, console, scripted_arrays, scripted_observation

from allocator.commands import Compact, EvictCached, Pause, Pin, Resize, SetSpeed, Step
from allocator.ids import BlockState
from allocator.snapshot import CompactionRecord, CopyNumbers, LockNumbers
from kvtop.errors import UserError
from kvtop.model.observation import Focus
from kvtop.panels.catalog import CONTENTS
from kvtop.tui.actions import ACTIONS
from kvtop.tui.arrangement import PANELS
from kvtop.tui.picture import to_png
from kvtop.tui.screens.prompt import Prompt
from kvtop.tui.screens.sheet import ActionSheet
from kvtop.tui.themes import THEMES
from kvtop.tui.widgets.panes import Events
from kvtop.tui.widgets.sequences import ORDERS, Sequences
from kvtop.tui.widgets.stage import Stage

_SIZES = [(80, 24), (100, 30), (120, 40), (240, 70)]


def _observation():
    """Return a reading with everything that an engine may tell."""
    seen = scripted_observation()
    snapshot = msgspec.structs.replace(
        seen.snapshot,
        copies=CopyNumbers("thread", 2, 8, 30, 44, 1, 0.25, 0.01, None, 16.0),
        compactions=(CompactionRecord("manual", "pack-low", None, 900, 940, 12, 12, 12_288, 0, 0.1, 0.5, 0.25),),
        locks=(LockNumbers("sequence", 900, 3, 0.002, 0.001), LockNumbers("allocator", 5000, 0, 0.0, 0.0)),
    )
    return replace(seen, snapshot=snapshot, next_victims=(101, 103, 102))


def _source():
    return FocusedSource([_observation()])


async def _open(c, key: str) -> str:
    await c.press(key)
    await c.poll()
    assert isinstance(c.app.focused, Stage)
    return c.text_of("#stage")


async def test_action_show_sequences():
    async with console(size=(80, 24)) as c:
        await c.press("2")
        assert c.app.focused is c.app.query_one("#list")
        assert "TOKENS" in c.screen_text()


async def test_action_show_map():
    async with console(size=(80, 24)) as c:
        await c.press("2", "1")
        assert c.app.focused is c.app.main
        await c.press("4", "1")
        assert c.app.focused is c.app.main
        assert "held by" in c.screen_text()


async def test_action_show_events():
    async with console(size=(80, 24)) as c:
        await c.press("3")
        assert c.app.focused is c.app.query_one("#log")
        assert "block 311, idle 82 steps" in c.screen_text()


async def test_action_show_prefix():
    async with console(source=_source()) as c:
        text = await _open(c, "4")
        assert c.source.asked[-1].num_victims > 0
        for words in ("hit ratio, since start", "27.5%", "blocks 40-55", "2 holders", "saves 16 blocks", "block 103"):
            assert words in text, words
        await c.press("1")
        await c.poll()
        assert c.source.asked[-1].num_victims == 0


async def test_action_show_fragmentation():
    async with console(source=_source()) as c:
        text = await _open(c, "5")
        for words in (
            "external",
            "longest run",
            "Runs of allocatable",
            "What still fits",
            "by number alone",
            "50.0% → 25.0%",
        ):
            assert words in text, words


async def test_action_show_tiers():
    async with console(source=_source()) as c:
        text = await _open(c, "6")
        for words in ("Device", "Host", "2 of 8", "210", "16 GB/s", "0.2 s"):
            assert words in text, words


async def test_action_show_locks():
    async with console(source=_source()) as c:
        text = await _open(c, "7")
        for words in ("sequence lock", "900 taken", "3 waited", "allocator lock"):
            assert words in text, words


async def test_action_show_history():
    async with console(source=_source()) as c:
        text = await _open(c, "8")
        for words in ("used", "hit ratio", "evictions", "up to now"):
            assert words in text, words
        await c.poll(after_s=1.0)
        await c.poll(after_s=1.0)
        text = c.text_of("#stage")
        assert "blocks given out" in text
        assert "steps a second" in text
        seen = _source().read(Focus(), 1.0)
        silent = replace(seen, snapshot=msgspec.structs.replace(seen.snapshot, copies=None, locks=None), host=None)
    async with console(source=FocusedSource([silent])) as c:
        await c.poll(after_s=1.0)
        text = await _open(c, "8")
        for words in ("waits for locks", "copies in flight"):
            assert words not in text, "what an engine never tells is left out"


async def test_action_show_details():
    async with console(source=_source()) as c:
        assert "none selected" in await _open(c, "d")
        await c.press("2", "down", "enter")
        text = await _open(c, "d")
        for words in ("896", "0-15", "→ 40-55", "16 blocks, 16 shared by up to 2", "16-55", "→ 300-339"):
            assert words in text, words


@pytest.mark.parametrize("size", _SIZES)
async def test_every_panel_fits_every_layout(size):
    async with console(source=_source(), size=size) as c:
        await c.poll(after_s=1.0)
        for panel in PANELS:
            c.app.action_show(panel)
            await c.pilot.pause()
            await c.poll()
            rows = c.screen_text().splitlines()
            assert len(rows) == size[1]
            assert all(len(row) == size[0] for row in rows), panel
            if panel in CONTENTS:
                stage = c.app.query_one("#stage", Stage)
                assert stage.size.height >= 12
                assert (c.app.main.size.width > 0) == (size[0] >= 160)


async def test_what_an_engine_does_not_tell_is_a_dash():
    async with console() as c:
        assert "—" in await _open(c, "7")
        assert "—" in await _open(c, "6")
        assert "order" in await _open(c, "4")


async def test_panels_before_the_engine_answers_say_so():
    source = FocusedSource([scripted_observation()])
    source.failure = "still starting"
    async with console(source=source) as c:
        for panel in PANELS:
            c.app.action_show(panel)
            await c.pilot.pause()
        assert "nothing known" in await _open(c, "5")


async def test_tabs_and_footer_are_clicked():
    async with console() as c:
        tabs = c.app.query_one("Tabs")
        await c.pilot.click("Tabs", offset=(tabs.line_text(0).index("prefix"), 0))
        await c.pilot.pause()
        assert c.app.panel == "prefix"
        footer = c.app.query_one("Footer")
        await c.pilot.click("Footer", offset=(footer.line_text(0).index("help"), 0))
        await c.pilot.pause()
        assert "Keys" in c.screen_text()


async def test_panels_scroll():
    async with console(source=_source(), size=(80, 24)) as c:
        before = await _open(c, "4")
        assert "more below" in before
        await c.press("pagedown", "down", "end")
        assert "more below" not in c.text_of("#stage")
        await c.press("home")
        assert c.text_of("#stage") == before
        await c.press("escape")
        assert c.app.focused is c.app.main


# Finding and sorting ------------------------------------------------------------------------------------------------


async def test_action_filter():
    async with console() as c:
        table, events = c.app.query_one("#sequences", Sequences), c.app.query_one("#events", Events)
        await c.press("slash", *"wait")
        assert isinstance(c.app.screen, Prompt)
        assert [row.seq_id for row in table._rows] == [10]
        await c.press("enter")
        assert "/wait" in c.text_of("#sequences")
        assert "no event with wait" in c.text_of("#events")
        await c.press("slash", "escape")
        assert len(table._rows) == 1
        await c.press("escape")
        assert len(table._rows) == 5
        assert len(events._events) == 3
        await c.press("slash", *"311", "enter")
        assert "block 311" in c.text_of("#events")
        assert "1 of 3" in c.text_of("#events")


async def test_filtered_events_keep_their_place():
    readings = [scripted_observation(step=1000 + i, first_event=3 * i) for i in range(40)]
    async with console(source=FocusedSource(readings), size=(80, 24)) as c:
        for _ in range(35):
            await c.poll()
        await c.press("3", "slash", *"evict", "enter", "down", "down")
        first = c.text_of("#log").splitlines()[1]
        await c.poll()
        assert c.text_of("#log").splitlines()[1] == first


async def test_action_sort():
    async with console() as c:
        table = c.app.query_one("#sequences", Sequences)
        await c.press("s", "s", "s")
        assert table.order == "blocks"
        blocks = [row.num_blocks for row in table._rows]
        assert blocks == sorted(blocks, reverse=True)
        for _ in range(len(ORDERS) - 3):
            await c.press("s")
        assert [row.seq_id for row in table._rows] == [7, 8, 9, 10, 11]


async def test_action_invert():
    async with console() as c:
        table = c.app.query_one("#sequences", Sequences)
        await c.press("o")
        assert [row.seq_id for row in table._rows] == [11, 10, 9, 8, 7]
        await c.press("o")
        assert [row.seq_id for row in table._rows] == [7, 8, 9, 10, 11]


async def test_a_click_on_a_heading_sorts_by_it():
    async with console() as c:
        table = c.app.query_one("#sequences", Sequences)
        at = c.text_of("#sequences").splitlines()[1].index("TOKENS")
        await c.pilot.click("#sequences", offset=(at + 2, 1))
        await c.pilot.pause()
        assert [row.seq_id for row in table._rows][:2] == [8, 7]
        await c.pilot.click("#sequences", offset=(at + 2, 1))
        await c.pilot.pause()
        assert [row.seq_id for row in table._rows][-2:] == [7, 8]


# Time ---------------------------------------------------------------------------------------------------------------


async def test_action_hold():
    later = scripted_observation(step=2000, first_event=3)
    async with console(source=FocusedSource([scripted_observation(), later])) as c:
        await c.press("p")
        await c.poll(after_s=2.0)
        assert "HELD 2.0 s" in c.text_of("Header")
        assert "1,000" in c.text_of("Header")
        await c.press("escape")
        assert "2,000" in c.text_of("Header")
        assert "HELD" not in c.text_of("Header")


async def test_action_history_back():
    readings = [scripted_observation(step=1000 + i, first_event=3 * i) for i in range(80)]
    async with console(source=FocusedSource(readings)) as c:
        for _ in range(79):
            await c.poll(after_s=1.0)
        await c.press("left_curly_bracket")
        assert c.app.panel == "history"
        assert "up to 30.0 s ago" in c.text_of("#stage")
        await c.press("left")
        assert "up to 1m 00s ago" in c.text_of("#stage")
        for _ in range(5):
            await c.press("left_curly_bracket")
        assert "up to 1m 18s ago" in c.text_of("#stage")


async def test_action_history_forward():
    readings = [scripted_observation(step=1000 + i, first_event=3 * i) for i in range(80)]
    async with console(source=FocusedSource(readings)) as c:
        for _ in range(79):
            await c.poll(after_s=1.0)
        await c.press("left_curly_bracket", "right_curly_bracket")
        assert "up to now" in c.text_of("#stage")


async def test_action_history_live():
    readings = [scripted_observation(step=1000 + i, first_event=3 * i) for i in range(80)]
    async with console(source=FocusedSource(readings)) as c:
        for _ in range(79):
            await c.poll(after_s=1.0)
        await c.press("left_curly_bracket", "left_curly_bracket", "0")
        assert "up to now" in c.text_of("#stage")


# Looks --------------------------------------------------------------------------------------------------------------


async def test_action_expand():
    async with console() as c:
        width = c.app.main.size.width
        await c.press("e")
        await c.pilot.pause()
        assert c.app.main.size.width == 120
        await c.press("escape")
        await c.pilot.pause()
        assert c.app.main.size.width == width
        await c.press("tab", "e")
        await c.pilot.pause()
        assert c.app.query_one("#sequences").size.width == 120
        await c.press("e", "tab", "e")
        await c.pilot.pause()
        assert c.app.query_one("#events").size.height > 20


async def test_action_theme():
    async with console() as c:
        seen = []
        for name in THEMES:
            assert c.app.look.theme.name == name
            seen.append(str(c.app.screen.styles.background))
            await c.press("4", "1", "t")
        assert c.app.look.theme.name == "dark"
        assert len(set(seen)) == 3  # two dark themes share their background
        await c.press("t", "question_mark")
        assert c.app.screen.query_one("VerticalScroll").styles.background.hex == "#F6F8FA"


@pytest.mark.parametrize("storm", [((60, 16), (240, 70), (80, 24), (50, 10), (120, 40), (100, 30)) * 3])
async def test_a_storm_of_resizes_leaves_a_right_screen(storm):
    async with console(source=_source()) as c:
        for i, (width, height) in enumerate(storm):
            c.app.action_show(PANELS[i % len(PANELS)])
            await c.pilot.resize_terminal(width, height)
            await c.poll()
        rows = c.screen_text().splitlines()
        assert (len(rows[0]), len(rows)) == (100, 30)
        assert "USED" in rows[1]


# The command line ---------------------------------------------------------------------------------------------------


async def _say(c, line: str) -> None:
    await c.press("colon")
    screen = c.app.screen
    assert isinstance(screen, Prompt)
    screen.query_one("Input").value = line
    await c.press("enter")
    await c.pilot.pause()


async def test_action_command_line():
    async with console() as c:
        await c.press("colon", *"res")
        assert "Grow or shrink" in c.screen_text()
        await c.press("tab")
        assert c.app.screen.query_one("Input").value == "resize"
        await c.press("escape")
        await _say(c, "resize 512")
        await c.until(lambda: c.operations.planned == [Resize(512)], "the plan")
        assert isinstance(c.app.screen, ActionSheet)
        await c.press("y")
        await c.until(lambda: c.operations.applied == [Resize(512)], "the command")
        await c.press("colon", "up")
        assert c.app.screen.query_one("Input").value == "resize 512"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("compact longest-run max_moves=100", Compact("longest-run", None, 100)),
        ("pin 4 10-12", Pin((4, 10, 11, 12))),
        ("compact", Compact("pack-low")),
        ("evict 5", EvictCached(5)),
    ],
)
async def test_lines_that_change_the_engine_show_their_plan(line, command):
    async with console() as c:
        await _say(c, line)
        await c.until(lambda: bool(c.operations.planned), "the plan")
        assert c.operations.planned == [command]
        assert c.operations.applied == []


@pytest.mark.parametrize(
    ("line", "command"), [("step 5", Step(5)), ("set-speed max", SetSpeed(None)), ("pause", Pause())]
)
async def test_lines_that_only_set_the_pace_act_at_once(line, command):
    async with console() as c:
        await _say(c, line)
        await c.until(lambda: c.operations.applied == [command], "the command")


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("nonsense", "nonsense: no such command"),
        ("set-speed", "SPEED is missing"),
        ("resize many", "resize: num_blocks: a whole number"),
        ("resize 4 5", "resize 5: resize NUM_BLOCKS takes no more"),
        ("resize size=4", "resize size: not a field"),
        ("pin x", "pin x: block ids, such as 4 10-20"),
        ("pin 0-99999", "at most 10000 blocks"),
        ("pin 12-7", "pin 12-7: a range begins with its lower end, such as 7-12"),
        ("theme pink", "theme pink: one of dark, light, contrast, colour-blind"),
        ("block -1", "block -1: a whole number"),
        ("sequence 99", "no sequence 99"),
        ("compact sideways", "compact: goal: one of pack-low, longest-run, by-sequence"),
        ("set-load much", "set-load: rate_scale: a number"),
        ("preempt 1 gently", "preempt: mode: one of swap, recompute"),
        ("speed fast", "set-speed: speed: a number"),
        ("evict some", "evict-cached: num_blocks: a whole number"),
        ("watermark 5", "watermark 5: watermark takes no more"),
        ("quit now", "quit now: quit takes no more"),
    ],
)
async def test_a_bad_line_is_told_in_one_line(line, note):
    async with console() as c:
        await _say(c, line)
        assert note in c.note()
        assert c.operations.planned == []


async def test_lines_that_look():
    async with console() as c:
        await _say(c, "block 300")
        assert c.app.main.cursor.block_id == 300
        await _say(c, "sequence 8")
        assert c.app.selected == 8
        await _say(c, "colour fill")
        assert c.app.main.mode == "fill"
        await _say(c, "panel locks")
        assert c.app.panel == "locks"
        await _say(c, "sort runs")
        await _say(c, "find chat")
        assert c.app.query_one("#sequences", Sequences).wanted == "chat"
        await _say(c, "theme light")
        assert c.app.look.theme.name == "light"
        await _say(c, "zoom")
        assert c.app.main.zoom != "fit"
        await _say(c, "help")
        assert "Keys" in c.screen_text()


async def test_every_action_can_be_typed():
    async with console() as c:
        names = {name for name, _ in c.app.suggest("")}
        for action in ACTIONS:
            if action.help:
                assert action.line in names, action.name


# Exports ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_action_export(folder):
    async with console() as c:
        await c.press("ctrl+s")
        assert "written: kvtop-map-step1000.svg" in c.note()
        assert (folder / "kvtop-map-step1000.svg").read_text().startswith("<svg")
        await c.press("ctrl+s")
        assert (folder / "kvtop-map-step1000-1.svg").exists()


async def test_panels_are_written_as_rows(folder):
    async with console(source=_source()) as c:
        await _say(c, "export csv blocks.csv")
        await c.until(lambda: "1536 rows" in c.note(), "the file")
        rows = list(csv.DictReader((folder / "blocks.csv").read_text().splitlines()))
        assert rows[41]["ref_count"] == "2"
        assert rows[-1]["tier"] == "host"
        c.app.action_show("sequences")
        await _say(c, "export json")
        await c.until(lambda: "kvtop-sequences-step1000.json, 5 rows" in c.note(), "the file")
        written = json.loads((folder / "kvtop-sequences-step1000.json").read_text())
        assert written["rows"][0]["num_blocks"] == len(TABLES[7])
        for panel in ("events", "history", "prefix", "fragmentation", "tiers", "locks", "audit", "details"):
            c.app.action_show(panel)
            await _say(c, "export csv")
            await c.until(lambda panel=panel: f"kvtop-{panel}-step1000.csv" in c.note(), "the file")


def _has_font() -> bool:
    try:
        to_png([Strip([Segment("a")])], (0, 0, 0))
    except UserError:
        return False
    return True


needs_font = pytest.mark.skipif(not _has_font(), reason="no font of one width is installed")


@needs_font
@pytest.mark.parametrize("size", _SIZES)
async def test_export_png(folder, size):
    async with console(source=_source(), size=size) as c:
        c.app.run_line("export png screen.png")
        await c.until(lambda: "written: screen.png" in c.note(), "the picture")
        image = Image.open(folder / "screen.png")
        assert image.size == (size[0] * 12, size[1] * image.height // size[1])
        background = Color.parse(c.app.look.theme.background).rgb
        colours = image.getcolors(1 << 20)
        assert max(colours)[1] == background
        assert len(colours) > 20
        c.app.run_line("export png screen.png")
        assert "exists already" in c.note()
        c.app.run_line("export png screen.jpg")
        assert "must end with .png" in c.note()
        c.app.run_line("export png nowhere/screen.png")
        await c.until(lambda: "No such file" in c.note(), "the refusal")


@needs_font
def test_a_picture_has_every_sign_in_its_own_cell():
    strips = [
        Strip([Segment("█▀▄░", Style.parse("#ff0000 on #0000ff")), Segment("a", Style.parse("reverse"))]),
        Strip([Segment("", Style.parse("on red")), Segment("│─会b", Style.parse("#00ff00"))]),
        Strip([Segment("[red]", Style.parse("bold underline dim red"))]),
    ]
    image = Image.open(io.BytesIO(to_png(strips, (9, 9, 9)))).convert("RGB")
    width, height = image.width // 5, image.height // 3
    red, blue, green = (255, 0, 0), (0, 0, 255), (0, 255, 0)
    middle = {x: image.getpixel((x * width + width // 2, height // 4)) for x in range(5)}
    below = {x: image.getpixel((x * width + width // 2, height * 3 // 4)) for x in range(5)}
    assert (middle[0], middle[1], middle[2]) == (red, red, blue)
    assert (below[0], below[1], below[2]) == (red, blue, red)
    assert middle[3] == (64, 0, 191)
    assert image.getpixel((4 * width + 1, 1)) == (197, 200, 198)
    assert image.getpixel(((width - 1) // 2, height + 2)) == green
    assert image.getpixel((width + 1, height + (height - 1) // 2)) == green
    assert green not in {image.getpixel((2 * width - 1, height + y)) for y in (1, 2, 3)}
    letters = image.crop((4 * width, height, 5 * width, 2 * height))
    assert len(letters.getcolors()) > 1, "b stands behind two cells"
    assert image.getpixel((1, 3 * height - 2)) != (9, 9, 9)


async def test_without_a_font_it_says_what_to_do(folder, monkeypatch):
    monkeypatch.setattr("kvtop.tui.picture._FONTS", (("NoSuchFont-Regular.ttf", "NoSuchFont-Bold.ttf"),))
    async with console(size=(160, 40)) as c:
        c.app.run_line("export png")
        await c.until(lambda: "no font of one width" in c.note(), "the refusal")
        assert "export svg needs none" in c.note()
        assert list(folder.iterdir()) == []


async def test_exports_never_overwrite(folder):
    (folder / "there.csv").write_text("mine")
    async with console() as c:
        await _say(c, "export csv there.csv")
        assert "the file exists already" in c.note()
        await _say(c, "export csv other.json")
        assert "must end with .csv" in c.note()
        await _say(c, "export csv no/such/folder.csv")
        await c.until(lambda: "No such file" in c.note(), "the failure")
        assert (folder / "there.csv").read_text() == "mine"


# The tree ------------------------------------------------------------------------------------------------------------


async def test_action_tree():
    async with console(source=_source(), size=(120, 40)) as c:
        await c.press("backslash")
        await c.poll()
        rows = c.text_of("#sequences").splitlines()
        assert "PREFIX" in rows[1]
        names = [row[:13].rstrip() for row in rows[2:7]]
        assert names == ["7", "└8", "9", "10", "11"]
        assert rows[3].split()[3] == "16"
        assert "below those with which they share" in c.note()
        await c.press("slash", "8", "enter")
        assert [row[:13].rstrip() for row in c.text_of("#sequences").splitlines()[2:4]] == ["7", "└8"]
        await c.press("escape", "backslash")
        await c.poll()
        assert "TOKENS" in c.text_of("#sequences").splitlines()[1]
        assert "PREFIX" not in c.text_of("#sequences")


async def test_details_tell_with_whom_blocks_are_shared():
    async with console(source=_source()) as c:
        c.app.choose(8)
        text = await _open(c, "d")
        await c.poll()
        text = c.text_of("#stage")
        assert "with 7" in text
        assert "16 blocks" in text
        c.app.choose(9)
        await c.poll()
        assert "with nobody" in c.text_of("#stage")


@pytest.mark.parametrize("size", _SIZES)
async def test_wide_characters_and_brackets_in_names_are_shown_as_they_are(size):
    seen = _observation()
    label = "会話 [red]x[/]"
    rows = tuple(msgspec.structs.replace(row, label=label) for row in seen.snapshot.sequences)
    source = FocusedSource([replace(seen, snapshot=msgspec.structs.replace(seen.snapshot, sequences=rows))])
    async with console(source=source, size=size) as c:
        for order in ORDERS:
            c.app.sort_by(order)
            c.app.action_show("sequences")
            await c.pilot.pause()
            await c.poll()
            widths = {cell_len(row) for row in c.screen_text().splitlines()}
            assert widths == {size[0]}, order
        if size[0] != 120:
            assert "会話 [red]x[/]" in c.screen_text()
        c.app.choose(7)
        c.app.action_show("details")
        await c.pilot.pause()
        await c.poll()
        assert "会話 [red]x[/]" in c.screen_text()


# One block -----------------------------------------------------------------------------------------------------------


async def test_action_show_block():
    async with console(source=_source(), size=(240, 70)) as c:
        await c.point_at("device", 41)
        text = await _open(c, "semicolon")
        assert "device block 41" in text
        assert "held by sequence 7, 8" in text
        arrays = scripted_arrays()
        arrays.state[41], arrays.ref_count[41] = BlockState.FREE, 0
        c.source._observations[:] = [scripted_observation(step=1010, device=arrays)]
        await c.poll()
        text = c.text_of("#stage")
        assert "step 1,010" in text
        assert "let go" in text
        await c.press("1")
        assert "@1010" in c.text_of("#inspector")


async def test_a_line_is_checked_while_it_is_typed():
    async with console() as c:
        for typed, problem in (
            ("resi", ""),
            ("resize", ""),
            ("resize 9", ""),
            ("resize 9x", "resize: num_blocks"),
            ("resize 9 9", "takes no more"),
            ("compact sideways", "compact: goal"),
            ("pin 4 x", "pin x: block ids"),
            ("frobnicate", "frobnicate: no such command"),
            ("panel gpu", ""),
        ):
            await c.press("colon")
            c.app.screen.query_one("Input").value = typed
            await c.pilot.pause()
            if problem:
                assert problem in c.screen_text(), typed
            else:
                assert c.app.problem_of(typed) == "", typed
            await c.press("escape")
        assert c.operations.planned == []


async def test_what_is_typed_ahead_of_a_dialog_is_the_dialogs():
    """All of these keys are there before the first is looked at, as in a paste or over a slow line."""
    async with console() as c:
        for key in (":", *"panel gpu", "\r"):
            c.app.post_message(events.Key({":": "colon", " ": "space", "\r": "enter"}.get(key, key), key))
        await c.until(lambda: "GPUs of this machine" in c.screen_text(), "the panel")
        assert len(c.app.screen_stack) == 1
        for key in "R512":
            c.app.post_message(events.Key(key, key))
        await c.until(lambda: Resize(512) in c.operations.planned, "the plan")
        assert c.operations.applied == []
