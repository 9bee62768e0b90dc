"""The whole screen: sizes, colours, a source that fails, data that looks like markup."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tui_fakes import FocusedSource, console, scripted_observation

from allocator.snapshot import Verified
from kvtop.model import format as fmt
from kvtop.model.history import hit_ratios
from kvtop.model.reduce import reduce
from kvtop.model.view import View
from kvtop.sources.scripted import block_arrays
from kvtop.tui.look import AsciiFilter, detect_look
from kvtop.tui.widgets.lines import fit, printable, rule, spark
from kvtop.tui.widgets.sequences import Sequences

_ALWAYS = ["RUNNING", "USED", "FRAG", "SWAP", "HIT", "EVICT 12.3k", "PREEMPT 4", "FAIL 2", "? help", "q quit"]


@pytest.mark.parametrize(
    ("size", "present", "absent"),
    [
        ((60, 16), ["kvtop scripted", "device block 0"], ["Trends", "TOKENS"]),
        ((80, 24), ["1024×16 tok", "1.0 MiB", "device block 0", "evict"], ["Trends", "Inspector", "TOKENS"]),
        ((80, 50), ["device block 0"], ["Trends", "TOKENS"]),
        ((120, 24), ["Inspector", "TOKENS"], ["Trends"]),
        ((120, 40), ["Inspector", "TOKENS", "Trends", "Events", "waiting"], []),
        ((240, 70), ["Inspector", "TOKENS", "Trends", "Events", "SOURCE", "V verify"], []),
    ],
)
async def test_layout(size, present, absent):
    async with console(size=size) as c:
        text = c.screen_text()
        lines = text.splitlines()
        assert len(lines) == size[1]
        assert all(len(line) == size[0] for line in lines)
        for word in [*(_ALWAYS if size[0] >= 80 else ["RUNNING", "USED", "FRAG", "EVICT"]), *present]:
            assert word in text, word
        for word in absent:
            assert word not in text, word


async def test_a_terminal_too_small_keeps_the_number_and_the_console_comes_back():
    async with console(size=(50, 12)) as c:
        text = c.screen_text()
        assert "kvtop needs 60x16, this terminal has 50x12" in text
        assert re.search(r"used \d+\.\d%", text)
        await c.pilot.resize_terminal(120, 40)
        await c.pilot.pause()
        assert "Inspector" in c.screen_text()
        assert c.app.main.scale.columns > 8
        await c.pilot.resize_terminal(80, 24)
        await c.pilot.pause()
        assert "Inspector" not in c.screen_text()
        assert "USED" in c.screen_text()


async def test_no_field_moves_when_numbers_grow():
    later = scripted_observation(step=123_456, speed=0.25, first_event=3)
    async with console(source=FocusedSource([scripted_observation(), later]), size=(120, 40)) as c:
        before = c.text_of("Header").splitlines()
        await c.poll()
        after = c.text_of("Header").splitlines()
        for label in ("step", "time", "free", "cached", "longest run", "SWAP", "HIT", "PREEMPT", "FAIL"):
            at = [line.find(label) for line in before]
            assert [line.find(label) for line in after] == at, label


def _told(observation, **changes):
    """Return the observation with changes to its snapshot; ``faults`` is a counter."""
    faults = changes.pop("faults", 0)
    counters = msgspec.structs.replace(observation.snapshot.counters, integrity_faults=faults)
    return replace(observation, snapshot=msgspec.structs.replace(observation.snapshot, counters=counters, **changes))


@pytest.mark.parametrize("size", [(60, 16), (120, 40)])
@pytest.mark.parametrize(("phase", "badge"), [("stuck: 9 blocks needed", " STUCK "), ("failed: no memory", " FAILED ")])
async def test_a_phase_with_a_reason_is_a_badge_and_the_reason_stands_below(size, phase, badge):
    async with console(source=FocusedSource([scripted_observation(phase=phase)]), size=size) as c:
        head = c.text_of("Header").splitlines()[0]
        assert badge in head
        assert "step" in head
        assert "needed" not in head
        assert phase in c.note()


async def test_what_the_engine_has_to_tell_is_said_once_and_kept_among_the_events():
    first = _told(scripted_observation(), notes=("swap space is small", "2 bad rows skipped"))
    second = _told(scripted_observation(step=1001, first_event=3), notes=first.snapshot.notes)
    third = _told(scripted_observation(step=1002, first_event=6), notes=(*first.snapshot.notes, "law 2"), faults=1)
    async with console(source=FocusedSource([first, second, third])) as c:
        assert "swap space is small; 2 bad rows skipped" in c.note()
        assert "FAULT" not in c.text_of("Header")
        c.app.say("")
        await c.poll()
        assert "swap space" not in c.note()
        await c.poll()
        assert c.note().strip() == "law 2"
        assert " 1 FAULT " in c.text_of("Header")
        assert [e.text for e in c.app.view.events if e.kind == "note"] == [*first.snapshot.notes, "law 2"]


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (100, 30), (120, 40)])
@pytest.mark.parametrize(("difference", "text"), [(0.0, "0"), (1.19e-7, "1.2e-07")])
async def test_the_header_tells_what_was_verified(size, difference, text):
    seen = _told(scripted_observation(), verified=Verified(123_456, 2_000_000, difference))
    async with console(source=FocusedSource([seen]), size=size) as c:
        last = c.text_of("Header").splitlines()[3]
        assert last.rstrip().endswith(f" max difference {text}")
        assert ("verified 123k steps," in last) == (size[0] >= 80)
        assert "FAIL 2" in last


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_an_engine_without_tensors_is_told_as_books_only(size):
    bare = _told(scripted_observation(), geometry="none", device="none", block_bytes=0)
    async with console(source=FocusedSource([bare]), size=size) as c:
        top = c.text_of("Header").splitlines()[0]
        assert "books only" in top or size[0] == 80  # where there may be no room for it
        assert "none" not in top
        assert "—" not in top
    async with console(size=(120, 40)) as c:
        assert "on cpu tiny" in c.text_of("Header")


async def test_the_header_and_the_map_tell_the_same_numbers():
    other = scripted_observation(first_event=3, device=block_arrays(np.zeros(1024, np.uint8)))
    async with console(source=FocusedSource([scripted_observation(), other])) as c:
        assert c.app.attachment is not None
        for _ in range(2):
            c.app.on_view_changed()
            used = fmt.percent(c.app.view.device.numbers.usage_ratio)
            assert used in c.text_of("Header")
            await c.pilot.pause()
            assert f"{used} used" in c.screen_text()
            c.app.attachment.poll()


async def test_no_color_draws_glyphs_and_no_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with console() as c:
        c.app.choose(7)
        await c.poll()
        text = c.screen_text()
        assert "▀" not in text
        strips = c.app.screen._compositor.render_strips(c.app.screen.size)
        styles = [segment.style for strip in strips for segment in strip if segment.style]
        assert all(s.color is None or s.color.is_default for s in styles)
        assert all(s.bgcolor is None or s.bgcolor.is_default for s in styles)
        assert any(s.reverse for s in styles)


async def test_sixteen_colours_use_the_terminals_own(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM")
    async with console() as c:
        assert c.app.look.depth == "ansi"
        strips = c.app.screen._compositor.render_strips(c.app.screen.size)
        colours = [s.style.color for strip in strips for s in strip if s.style and s.style.color]
        assert all(colour.triplet is None for colour in colours)


async def test_the_row_under_the_cursor_is_of_one_colour_in_sixteen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM", raising=False)
    async with console() as c:
        for chosen in (None, 7):
            c.app.choose(chosen)
            rows = {y: c.app.query_one("#sequences", Sequences).render_line(y) for y in (2, 3)}
            styles = {(s.style.color, s.style.bgcolor, s.style.reverse) for s in rows[2] if s.text.strip() and s.style}
            assert len(styles) == 1
            assert len({s.style.color for s in rows[3] if s.text.strip() and s.style}) > 1


async def test_ascii_only_writes_nothing_else():
    async with console(ascii_only=True) as c:
        assert c.screen_text().isascii()
        await c.press("question_mark")
        assert c.screen_text().isascii()
        await c.press("escape", "V")
        assert c.screen_text().isascii()


def test_ascii_keeps_the_width_of_wide_signs():
    from rich.segment import Segment
    from textual.color import Color

    (segment,) = AsciiFilter().apply([Segment("─日×")], Color(0, 0, 0))
    assert segment.text == "-??x"


@pytest.mark.parametrize(
    ("environment", "depth"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "rgb"),
        ({"TERM": "xterm-256color"}, "rgb"),
        ({"TERM": "linux"}, "ansi"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "none"),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, "rgb"),
    ],
)
def test_the_look_follows_the_environment(monkeypatch, environment, depth):
    for name in ("TERM", "COLORTERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert detect_look().depth == depth


async def test_a_source_that_fails_keeps_its_facts_and_returns():
    async with console() as c:
        c.source.failure = "engine process 4711 ended [9]"
        await c.poll(after_s=3.2)
        header = c.text_of("Header")
        assert "engine lost 3.2 s ago" in header
        assert "engine process 4711 ended [9]" in header
        assert "engine lost: engine process 4711 ended [9]" in c.note()
        assert "USED" in header
        assert "EVICT 12.3k" in header
        await c.poll(after_s=60)
        assert "engine lost 1m 03s ago" in c.text_of("Header")
        c.source.failure = None
        await c.poll()
        assert "engine lost" not in c.text_of("Header")
        assert "RUNNING" in c.text_of("Header")


async def test_markup_and_control_signs_in_data_are_shown_as_they_are():
    async with console(size=(240, 70)) as c:
        assert "chat [bold]turn 2[/]" in c.screen_text()
        c.operations.outcome = type(c.operations.outcome)(True, "done \x1b[2J [red]x")
        await c.press("m")
        await c.until(lambda: "done" in c.note(), "the outcome")
        assert "\x1b" not in c.screen_text()
        assert "done \N{REPLACEMENT CHARACTER}[2J [red]x" in c.screen_text()


async def test_the_reason_of_a_waiting_sequence_is_in_the_table():
    async with console(size=(240, 70)) as c:
        assert "40 blocks needed, 12 allocatable · chat" in c.screen_text()
    async with console(size=(120, 40)) as c:
        c.app.choose(10)
        await c.pilot.pause()
        assert "sequence 10 waiting: 40 blocks needed, 12 al" in c.text_of("#inspector")
        # There is no column for it here, so it takes the place of the numbers.
        assert " 10 wait 40 blocks needed, 12 allocat" in c.text_of("#sequences")


async def test_the_focused_pane_is_marked():
    async with console() as c:
        ink = c.app.look.style("rule-focus")

        def marked(selector: str) -> bool:
            return c.app.query_one(selector)._lines[0].spans[0].style == ink

        assert not marked("#sequences")
        await c.press("tab")
        assert marked("#sequences")
        await c.press("tab")
        assert marked("#events")
        assert not marked("#sequences")


async def test_notes_give_the_event_line_back():
    async with console() as c:
        await c.press("z")
        assert "map:" in c.note()
        c.clock.now_s += 9
        await c.until(lambda: "finish" in c.note(), "the event")


async def test_the_row_cursor_stays_on_its_sequence_when_rows_move():
    first = scripted_observation()
    snapshot = first.snapshot
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}
    moved = type(snapshot)(**{**fields, "sequences": snapshot.sequences[::-1], "events": ()})
    source = FocusedSource([first, type(first)(moved, first.device, first.host)])
    async with console(source=source) as c:
        await c.press("tab", "j")
        table = c.app.query_one("#sequences")
        assert table.cursor == 8
        await c.poll()
        assert table.cursor == 8
        await c.pilot.click("#sequences", offset=(3, 2))
        assert c.app.selected == 11


async def test_scrolled_events_keep_their_place():
    readings = [scripted_observation(step=1000 + i, first_event=3 * i) for i in range(20)]
    async with console(source=FocusedSource(readings), size=(80, 24)) as c:
        for _ in range(12):
            await c.poll()
        await c.press("3", "down", "down", "down")
        before = c.text_of("#log").splitlines()[1:]
        await c.poll()
        assert c.text_of("#log").splitlines()[1:] == before
        assert "6 newer above" in c.text_of("#log")


def test_hit_ratios_are_taken_between_points():
    view = View(source="x")
    for i, step in enumerate((0, 40, 40, 80)):
        view = reduce(view, scripted_observation(step=step), 1000.0 + 2 * i)
    assert hit_ratios(view.history) == [0.25, None, 0.25]


def test_spark_and_rule_and_fit():
    assert spark([0, None, 0.5, 1], 6, 1.0) == "  ▁ ▅█"
    assert spark([1, 2], 1) == "█"
    assert spark([], 3) == "   "
    assert fit("日本語", 5) == "日本…"
    assert fit("ab", 4) == "ab  "
    assert printable("a\tb") == "a\N{REPLACEMENT CHARACTER}b"
    line = rule(detect_look(), 30, "Title", ["a note that is long", "short"])
    assert line.cell_len == 30
    assert "short" in line.plain
    assert "long" not in line.plain
