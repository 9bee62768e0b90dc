"""Every action of the table, driven by its key."""

from __future__ import annotations

import io
import re
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from textual import events
from textual.containers import VerticalScroll
from tui_fakes import TABLES, FakeOperations, FocusedSource, console, scripted_observation

from allocator.commands import (
    Abort,
    Annotate,
    Cancel,
    Command,
    Compact,
    EvictCached,
    Fork,
    InjectFault,
    Pause,
    Pin,
    Resize,
    Resume,
    SetAutoCompaction,
    SetLoad,
    SetPolicy,
    SetSpeed,
    SetWatermark,
    Step,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
)
from allocator.plans import Outcome, Plan, WorkProgress
from allocator.reuse import Prediction, ReuseSummary
from allocator.workload_facts import WorkloadFacts
from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import SourceError
from kvtop.recording.frames import Note, RecordingHeader
from kvtop.recording.reader import Recording
from kvtop.recording.writer import RecordedEngine, RecordingWriter
from kvtop.sources.recorded import RecordedOperations, RecordedSource
from kvtop.tui.actions import ACTIONS
from kvtop.tui.engine_actions import next_speed
from kvtop.tui.messages import PlanReady
from kvtop.tui.screens.advice import AdviceScreen
from kvtop.tui.screens.help import HelpScreen
from kvtop.tui.screens.marks import MarksScreen
from kvtop.tui.screens.sheet import ActionSheet
from kvtop.tui.undo import inverse_of
from kvtop.tui.widgets.block_map import BlockRef
from kvtop.tui.widgets.panes import Events
from kvtop.tui.widgets.sequences import Sequences


def _test_name(action_name: str) -> str:
    return "test_action_" + "_".join(re.findall(r"\w+", action_name))


_TESTS = {
    name
    for file in Path(__file__).parent.glob("test_*.py")
    for name in re.findall(r"^async def (test_action_\w+)", file.read_text(encoding="utf-8"), re.M)
}


@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: a.name)
def test_every_action_has_a_test(action):
    assert _test_name(action.name) in _TESTS


def test_keys_and_names_are_unique():
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(keys) == len(set(keys))
    assert len({a.name for a in ACTIONS}) == len(ACTIONS)


def test_capitals_act_and_lower_case_looks():
    for action in ACTIONS:
        for key in action.keys:
            assert (len(key) == 1 and key.isupper()) == action.sheet
        assert action.operates or not action.sheet


async def _sheet_of(c, *keys: str) -> ActionSheet:
    await c.press(*keys)
    sheet = c.app.screen
    assert isinstance(sheet, ActionSheet), c.note()
    await c.until(lambda: sheet.plan is not None or bool(sheet.problem), "the plan")
    return sheet


async def _confirmed(c, expected: Command, *keys: str) -> None:
    """Press the keys, check that nothing happens before ``y``, and that ``y`` applies the command."""
    await _sheet_of(c, *keys)
    assert c.operations.applied == []
    assert c.operations.planned[-1] == expected
    await c.press("y")
    await c.until(lambda: "12 blocks moved" in c.note(), "the outcome")
    assert c.operations.applied == [expected]
    assert not isinstance(c.app.screen, ActionSheet)


async def _press_at_once(c, *keys: str) -> None:
    """Press keys faster than the console answers them: all are there before the first one's effect is."""
    for key in keys:
        c.app.post_message(events.Key(key, key if len(key) == 1 else None))
    await c.pilot.pause()
    await c.pilot.pause()


@pytest.mark.parametrize("keys", [("y", "y", "y"), ("y", "escape")])
async def test_a_held_key_confirms_once(keys):
    async with console() as c:
        await _sheet_of(c, "C")
        await _press_at_once(c, *keys)
        await c.until(lambda: "12 blocks moved" in c.note(), "the outcome")
        assert len(c.operations.applied) == 1
        assert c.app.is_running
        assert len(c.app.screen_stack) == 1


@pytest.mark.parametrize(
    ("opens", "closes"), [("C", "n"), ("R", "enter"), ("g", "escape"), ("question_mark", "escape")]
)
async def test_a_held_key_closes_one_dialog(opens, closes):
    async with console() as c:
        await c.press(opens)
        await _press_at_once(c, closes, closes, closes)
        assert c.app.is_running
        assert len(c.app.screen_stack) == 1
        assert c.operations.applied == []


@pytest.mark.parametrize("keys", [("C", "C", "C"), ("R", "question_mark"), ("g", "E")])
async def test_keys_at_once_open_one_dialog(keys):
    async with console() as c:
        await _press_at_once(c, *keys)
        assert len(c.app.screen_stack) == 2


# Looking ------------------------------------------------------------------------------------------------------------


async def test_action_help():
    async with console() as c:
        await c.press("question_mark")
        assert isinstance(c.app.screen, HelpScreen)
        text = c.app.screen.text().plain
        for action in ACTIONS:
            assert action.help in text
        await c.press("escape")
        assert not isinstance(c.app.screen, HelpScreen)
        await c.press("f1")
        assert isinstance(c.app.screen, HelpScreen)


async def test_every_line_of_help_has_room():
    """A line that is wider than the overlay goes on at its left edge, among the keys."""
    async with console(size=(80, 24)) as c:
        await c.press("question_mark")
        pane = c.app.screen.query_one(VerticalScroll)
        room = pane.scrollable_content_region.width
        keys = [row for row in c.app.screen.text().plain.splitlines() if row.startswith("  ")]
        assert [row for row in keys if len(row) > room] == []


async def test_help_goes_on_below_its_words_on_a_narrow_screen():
    async with console(size=(120, 40)) as c:
        await c.press("question_mark")
        wide = " ".join(c.app.screen.text().plain.split())
        await c.pilot.resize_terminal(60, 16)
        await c.pilot.pause()
        pane = c.app.screen.query_one(VerticalScroll)
        rows = c.app.screen.text().plain.splitlines()
        assert max(map(len, rows)) <= pane.scrollable_content_region.width
        assert any(row.startswith(" " * 8) for row in rows)
        assert " ".join(" ".join(rows).split()) == wide


async def test_help_scrolls_by_lines_and_by_screens():
    async with console(size=(80, 24)) as c:
        await c.press("question_mark")
        pane = c.app.screen.query_one(VerticalScroll)
        await c.press("down", "j")
        assert pane.scroll_y == 2
        await c.press("pagedown")
        assert pane.scroll_y == 2 + pane.size.height - 1
        await c.press("pageup", "k", "up")
        assert pane.scroll_y == 0
        await c.press("end")
        assert pane.scroll_y == pane.max_scroll_y > 0
        await c.press("home")
        assert pane.scroll_y == 0


async def test_action_move_right():
    async with console() as c:
        await c.press("right", "l")
        assert c.app.main.cursor == BlockRef("device", 2)


async def test_action_move_left():
    async with console() as c:
        await c.press("right", "right", "left")
        assert c.app.main.cursor == BlockRef("device", 1)
        await c.press("h", "h", "h")
        assert c.app.main.cursor == BlockRef("device", 0)


async def test_action_move_down():
    async with console() as c:
        columns = c.app.main.scale.columns
        await c.press("down", "j")
        assert c.app.main.cursor == BlockRef("device", 2 * columns)


async def test_action_move_up():
    async with console() as c:
        columns = c.app.main.scale.columns
        await c.press("down", "down", "up")
        assert c.app.main.cursor == BlockRef("device", columns)
        await c.press("k", "k")
        assert c.app.main.cursor == BlockRef("device", 0)


async def test_action_move_page_down():
    async with console(size=(80, 24)) as c:
        await c.press("pagedown")
        assert c.app.main.cursor.block_id > 0 or c.app.main.cursor.tier == "host"
        await c.press("2", "pagedown")
        assert c.app.query_one("#list", Sequences).cursor == 11


async def test_action_move_page_up():
    async with console() as c:
        await c.press("end", "pageup")
        assert c.app.main.cursor.block_id < 1023


async def test_action_move_first():
    async with console() as c:
        await c.press("right", "down", "home")
        assert c.app.main.cursor == BlockRef("device", 0)


async def test_action_move_last():
    async with console() as c:
        await c.press("end")
        assert c.app.main.cursor == BlockRef("device", 1023)
        await c.press("down")
        assert c.app.main.cursor.tier == "host"
        await c.press("up")
        assert c.app.main.cursor.tier == "device"


async def test_action_focus_next():
    async with console() as c:
        assert c.app.focused is c.app.main
        await c.press("tab")
        assert isinstance(c.app.focused, Sequences)
        await c.press("tab")
        assert isinstance(c.app.focused, Events)
        await c.press("tab")
        assert c.app.focused is c.app.main


async def test_action_select():
    async with console() as c:
        await c.press("tab", "j", "enter")
        assert c.app.selected == 8
        await c.poll()
        assert c.source.asked[-1].seq_id == 8
        assert c.app.view.focus_table.tolist() == list(TABLES[8])
        assert "sequence 8: 56 blocks lit" in c.screen_text()
        assert "sequence 8 running: 56 blocks, 16 shared" in c.text_of("#inspector")
        assert "2: 40-55 300-339" in c.text_of("#inspector")


async def test_select_on_the_map_goes_through_the_holders():
    async with console() as c:
        await c.point_at("device", 41)
        await c.press("enter")
        assert c.app.selected == 7
        await c.press("enter")
        assert c.app.selected == 8
        await c.point_at("device", 3)
        await c.press("enter")
        assert "no sequence is known" in c.note()


async def test_action_deselect():
    async with console(size=(80, 24)) as c:
        await c.press("2", "enter")
        assert c.app.selected == 7
        await c.press("escape")
        assert c.app.main.size.height
        assert c.app.selected == 7
        await c.press("escape")
        assert c.app.selected is None


# Running ------------------------------------------------------------------------------------------------------------


async def test_action_pause():
    source = FocusedSource([scripted_observation(), scripted_observation(phase="paused", first_event=3)])
    async with console(source=source) as c:
        await c.press("space")
        await c.until(lambda: c.operations.applied == [Pause()], "the pause")
        await c.poll()
        assert "PAUSED" in c.text_of("Header")
        await c.press("space")
        await c.until(lambda: c.operations.applied == [Pause(), Resume()], "the resume")


async def test_action_step():
    source = FocusedSource([scripted_observation(), scripted_observation(phase="paused", first_event=3)])
    async with console(source=source) as c:
        await c.press("full_stop")
        assert "pause first" in c.note()
        await c.poll()
        await c.press("full_stop")
        await c.until(lambda: c.operations.applied == [Step(1)], "the step")


async def test_a_run_that_is_done_is_neither_paused_nor_stepped():
    async with console(source=FocusedSource([scripted_observation(phase="done")])) as c:
        for key in ("space", "full_stop"):
            await c.press(key)
            assert "the run is done" in c.note()
        assert c.operations.applied == []


async def test_action_speed_up():
    async with console() as c:
        await c.press("plus")
        await c.until(lambda: c.operations.applied == [SetSpeed(2.0)], "the speed")


async def test_action_speed_down():
    async with console() as c:
        await c.press("minus")
        await c.until(lambda: c.operations.applied == [SetSpeed(0.5)], "the speed")


async def test_action_speed_max():
    async with console() as c:
        await c.press("m")
        await c.until(lambda: c.operations.applied == [SetSpeed(None)], "the speed")


@pytest.mark.parametrize(
    ("speed", "way", "expected"),
    [(1.0, "up", 2.0), (1024.0, "up", None), (None, "up", None), (None, "down", 1024.0), (1 / 64, "down", 1 / 64)],
)
def test_speeds_stay_within_bounds(speed, way, expected):
    assert next_speed(speed, way) == expected


# Acting -------------------------------------------------------------------------------------------------------------


def _recording(steps: int = 400) -> RecordedSource:
    """Return a paused recording of a small engine under pressure, with one command in it."""
    return RecordedSource(Recording(io.BytesIO(_recorded(steps))), paused=True)


def _recorded(steps: int) -> bytes:
    file = io.BytesIO()
    options = EngineOptions(num_blocks=96, num_swap_blocks=48, geometry="none", speed=None, seed=3)
    engine, _ = build_engine(options)
    recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", options, 10)), every=10)
    recorded.advance(200)
    recorded.apply(EvictCached(1))
    recorded.advance(steps - 200)
    data = file.getvalue()
    recorded.close()
    return data


@asynccontextmanager
async def _winding(at: int):
    """A console on a recording, stopped at a step."""
    source = _recording()
    source.go_to(at)
    async with console(source=source, operations=RecordedOperations(source)) as c:

        async def wind(key: str, step: int, note: str = "") -> None:
            await c.press(key)
            await c.until(lambda: note in c.note() and source.step == step, f"step {step} after {key}: {c.note()}")
            await c.poll()
            assert c.app.view.snapshot.step == step
            assert all(event.step <= step for event in c.app.view.events)
            assert f" step {step:,} " in c.text_of("Header")

        yield c, wind


async def test_action_wind_back():
    async with _winding(100) as (_c, wind):
        await wind("left_square_bracket", 60, "step 60")
        await wind("left_square_bracket", 20)
        await wind("left_square_bracket", 0)
        await wind("left_square_bracket", 0)


async def test_action_wind_on():
    async with _winding(330) as (_c, wind):
        await wind("right_square_bracket", 370, "step 370")
        await wind("right_square_bracket", 400)
        await wind("right_square_bracket", 400)


async def test_action_wind_moment():
    async with _winding(100) as (_c, wind):
        await wind("comma", 90)
        await wind("full_stop", 100)


async def test_action_jump_kind():
    async with _winding(0) as (c, _wind):
        for kind in ("preemption", "eviction", "fault", "command", "mark", "event of interest"):
            await c.press("i")
            assert c.note().strip() == f"n and b go to the next and the last {kind}"


async def test_action_jump_next():
    async with _winding(0) as (c, wind):
        await c.press("i", "i", "i", "i")
        await wind("n", 200, "command at step 200")
        assert any(event.kind == "command" for event in c.app.view.events)
        await wind("n", 200, "no command after this moment")


async def test_action_jump_last():
    async with _winding(400) as (c, wind):
        await c.press("i", "i", "i", "i")
        await wind("b", 200, "command at step 200")
        await wind("b", 200, "no command before this moment")


async def test_action_annotate():
    async with console() as c:
        await c.press("apostrophe", *"slow", "enter")
        await c.until(lambda: c.operations.applied == [Annotate("slow")], "the mark")
        await c.press("apostrophe", "escape")
        assert c.operations.applied == [Annotate("slow")]


async def test_a_recording_is_marked(tmp_path):
    path = tmp_path / "run.kvrec"
    data = _recorded(400)
    path.write_bytes(data)
    source = RecordedSource(Recording.open(path), paused=True)
    source.go_to(123)
    async with console(source=source, operations=RecordedOperations(source)) as c:
        await c.press("apostrophe", *"odd", "enter")
        await c.until(lambda: "marked step 120: odd" in c.note(), f"the mark: {c.note()}")
    assert path.read_bytes().startswith(data)
    assert [(note.step, note.text) for note in source.notes] == [(120, "odd")]


async def test_action_marks():
    async with _winding(0) as (c, wind):
        await c.press("quotation_mark")
        await c.until(lambda: "no marks yet; ' sets one" in c.note(), "the refusal")
        notes = [Note(step, f"mark at {step}") for step in (50, 205, 310)]
        c.app.attachment.source.recording._added[:] = notes
        await c.press("quotation_mark")
        await c.until(lambda: isinstance(c.app.screen, MarksScreen), "the list")
        assert "▸ step  50  mark at 50" in c.app.screen.text().plain
        await c.press("j", "j", "j", "k")
        assert "▸ step 205  mark at 205" in c.app.screen.text().plain
        await wind("enter", 200, "step 200")
        await c.press("quotation_mark")
        await c.until(lambda: isinstance(c.app.screen, MarksScreen), "the list")
        assert c.app.screen.cursor == 0
        await c.press("escape")
        await c.press("i", "i", "i", "i", "i")
        await wind("n", 310, "mark at step 310: mark at 310")
        await wind("b", 200, "mark at step 200: mark at 205")
        await wind("b", 50)


async def test_a_recording_plays_and_takes_no_commands():
    async with _winding(100) as (c, _wind):
        assert "PAUSED" in c.text_of("Header")
        await c.press("space")
        await c.until(lambda: "playing" in c.note(), "the play")
        await c.press("C")
        assert c.note().strip() == "refused: a recording takes no commands"
        await c.press("question_mark")
        text = c.app.screen.text().plain
        assert "Wind a recording\n" in text
        assert "Run\n" in text
        assert "not here: a recording takes no commands" in text


async def test_an_engine_cannot_be_wound_back():
    async with console() as c:
        for action in ACTIONS:
            if action.group == "wind":
                await c.press(action.keys[0])
                assert c.note().strip() == "refused: only a recording can be wound back", action.name


async def test_action_swap_out():
    async with console() as c:
        await c.press("S")
        assert "select a sequence first" in c.note()
        await c.press("tab", "enter")
        await _confirmed(c, SwapOut(7), "S")


async def test_action_swap_in():
    async with console() as c:
        await _confirmed(c, SwapIn(11), "tab", "end", "I")


async def test_action_compact():
    async with console() as c:
        sheet = await _sheet_of(c, "C")
        assert c.operations.planned == [Compact("pack-low")]
        await c.press("right")
        await c.until(lambda: len(c.operations.planned) == 2 and sheet.plan is not None, "the second plan")
        text = sheet.text().plain
        assert "copies 12 blocks (12.0 KiB), evicts 3 blocks, touches 2 sequences (7, 8)" in text
        assert re.search(r"external fragmentation +61\.0% → 12\.0%", text)
        await c.press("y")
        await c.until(lambda: c.operations.applied == [Compact("longest-run")], "the command")


async def test_an_open_plan_is_made_again_once_the_engine_has_gone_on():
    source = FocusedSource([scripted_observation(step=step) for step in (5000, 5000, 5000, 5001, 5002, 5003)])
    async with console(source=source) as c:
        sheet = await _sheet_of(c, "C")
        first = sheet.plan
        for _ in range(2):  # no step was taken, however much time goes by
            await c.poll(after_s=5.0)
        assert len(c.operations.planned) == 1
        await c.poll(after_s=5.0)
        await c.until(lambda: len(c.operations.planned) == 2 and sheet.plan is not first, "the plan made again")
        await c.poll(after_s=0.1)  # too soon
        assert len(c.operations.planned) == 2
        await c.poll(after_s=5.0)
        await c.until(lambda: len(c.operations.planned) == 3, "the third plan")
        assert set(c.operations.planned) == {Compact("pack-low")}
        assert c.operations.applied == []


async def test_action_policy():
    async with console() as c:
        sheet = await _sheet_of(c, "O")
        assert c.operations.planned == [SetPolicy("fcfs")]
        assert sheet.text().plain.splitlines()[0].startswith(" first come (now)   by class   shortest job ")
        await c.press("right", "right")
        await c.until(lambda: SetPolicy("sjf") in c.operations.planned and sheet.plan is not None, "the third plan")
        await c.press("y")
        await c.until(lambda: c.operations.applied == [SetPolicy("sjf")], "the command")


async def test_action_resize():
    async with console() as c:
        sheet = await _sheet_of(c, "R")
        assert sheet.problem == "the pool has 1,024 blocks"
        await c.press("y")
        assert c.app.screen is sheet
        await c.press("0")
        assert "from 1 to" in sheet.problem
        await c.press("backspace", "5", "1", "2")
        await c.until(lambda: sheet.plan is not None, "the plan")
        await c.press("y")
        await c.until(lambda: c.operations.applied == [Resize(512)], "the command")


async def test_action_evict():
    async with console() as c:
        await _confirmed(c, EvictCached(None), "E")
    async with console() as c:
        await _confirmed(c, EvictCached(40), "E", "4", "0")


async def test_action_load():
    observation = scripted_observation()
    snapshot = msgspec.structs.replace(observation.snapshot, rate_scale=2.0, size_scale=0.5)
    async with console(size=(160, 40), source=FocusedSource([replace(observation, snapshot=snapshot)])) as c:
        assert "chat ×2 size ×0.5" in c.text_of("Header")
        await _confirmed(c, SetLoad(4.0, None), "L")
        c.operations.applied.clear()
        await _confirmed(c, SetLoad(None, 0.25), "L", "right", "right", "right")
    async with console() as c:
        await c.press("L")
        assert "cannot be changed" in c.note()


async def test_action_fork():
    async with console() as c:
        await c.press("tab", "enter")
        await _confirmed(c, Fork(7), "F")


async def test_action_cancel():
    async with console() as c:
        await c.press("tab", "enter")
        await _confirmed(c, Cancel(7), "X")


async def test_action_pin():
    async with console() as c:
        await _confirmed(c, Pin((0,)), "P")
    async with console() as c:
        await c.point_at("device", 121)
        await _confirmed(c, Unpin((121,)), "P")
    async with console() as c:
        await c.point_at("host", 3)
        await c.press("P")
        assert "only device blocks" in c.note()


async def test_action_verify():
    async with console() as c:
        await _confirmed(c, VerifyContents(), "V")


async def test_action_inject():
    async with console() as c:
        await _confirmed(c, InjectFault("failing-copy"), "B")
    async with console() as c:
        await _confirmed(c, InjectFault("leaked-reference"), "B", "left")


@pytest.mark.parametrize("key", ["enter", "escape", "n"])
async def test_a_sheet_takes_these_keys_for_no(key):
    async with console() as c:
        await _sheet_of(c, "V")
        await c.press(key)
        assert not isinstance(c.app.screen, ActionSheet)
        assert c.operations.applied == []


async def test_a_sheet_ignores_y_before_the_plan_and_after_a_refusal():
    operations = FakeOperations(refusal="1,870 blocks are held, 512 would remain")
    async with console(operations=operations) as c:
        sheet = await _sheet_of(c, "V")
        assert "refused: 1,870 blocks are held" in sheet.text().plain
        await c.press("y")
        assert c.app.screen is sheet
        assert operations.applied == []


async def test_a_sheet_drops_the_plan_of_an_earlier_choice():
    async with console() as c:
        sheet = await _sheet_of(c, "C")
        await c.press("right")
        await c.until(lambda: sheet.plan is not None and sheet.plan.summary == "plan 2", "the second plan")
        sheet.post_message(PlanReady(1, Plan(summary="late")))
        await c.pilot.pause()
        assert sheet.plan.summary == "plan 2"


async def test_a_sheet_ignores_the_keys_of_the_screen_below():
    async with console() as c:
        sheet = await _sheet_of(c, "V")
        await c.press("q", "space", "V", "z", "x")
        assert c.app.screen is sheet
        assert c.app.is_running
        assert c.operations.applied == []


async def test_a_refused_outcome_and_a_lost_engine_are_said():
    operations = FakeOperations(outcome=Outcome(ok=False, message="no sequence [7]"))
    async with console(operations=operations) as c:
        await _sheet_of(c, "V")
        await c.press("y")
        await c.until(lambda: "refused: no sequence [7]" in c.note(), "the outcome")
        operations.failure = SourceError("the engine did not answer in 5 s")
        await c.press("m")
        await c.until(lambda: "did not answer" in c.note(), "the failure")
        operations.failure = ZeroDivisionError("division by zero")
        sheet = await _sheet_of(c, "V")
        assert "internal fault: ZeroDivisionError: division by zero" in sheet.text().plain


async def test_a_source_without_operations_refuses_at_the_door():
    source = FocusedSource([scripted_observation()], missing={"operations": "attached read-only"})
    async with console(source=source) as c:
        for action in ACTIONS:
            if action.operates:
                await c.press(action.keys[0])
                assert c.note().strip() == "refused: attached read-only", action.name
        assert c.operations.planned == []
        assert c.operations.applied == []
        await c.press("question_mark")
        assert "not here: attached read-only" in c.app.screen.text().plain


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
async def test_action_advice(size):
    def reading(step: int, finished: int):
        observation = scripted_observation(step=step)
        facts = WorkloadFacts(
            num_finished=finished, finished_tokens=100 * finished,
            blocks_at_half=13 * finished, blocks_at_size=7 * finished, blocks_at_double=4 * finished,
        )  # fmt: skip
        reuse = ReuseSummary(
            False, 2000, 10, None, (Prediction(512, 100), Prediction(1024, None), Prediction(2048, 1900))
        )
        return replace(observation, snapshot=msgspec.structs.replace(observation.snapshot, facts=facts, reuse=reuse))

    source = FocusedSource([reading(1000, 40), reading(1040, 41)])
    async with console(size=size, source=source) as c:
        await c.press("a")
        screen = c.app.screen
        assert isinstance(screen, AdviceScreen)
        assert "Block size" in c.screen_text()
        assert "40 finished sequences of 100 tokens" in " ".join(screen.text().plain.split())
        assert "2,048  95.0% █" in screen.text().plain
        assert "1,024      — \n" in screen.text().plain
        await c.poll(after_s=1.0)
        assert "41 finished sequences" in screen.text().plain  # it follows the engine
        await c.press("j", "k", "S")
        assert c.app.screen is screen
        await c.press("a")
        assert len(c.app.screen_stack) == 1
        assert c.operations.planned == []


async def test_advice_without_data_says_so():
    async with console() as c:
        await c.press("a")
        text = c.app.screen.text().plain
        assert "Watermark" in text  # the scripted engine has preempted
        assert "Block size" not in text
        assert "Hit ratio" not in text


# Program ------------------------------------------------------------------------------------------------------------


async def test_action_restart():
    fresh = Attachment(FocusedSource([scripted_observation(step=5)]), FakeOperations(), lambda: 1000.0)
    async with console(restart=lambda: fresh) as c:
        await c.press("r")
        assert "nothing to restart" in c.note()
        c.source.failure = "ended by signal 9"
        await c.poll(after_s=3.2)
        assert "engine lost 3.2 s ago" in c.text_of("Header")
        assert "ended by signal 9" in c.text_of("Header")
        assert "r restarts it" in c.text_of("Header")
        await c.press("r")
        await c.until(lambda: c.app.attachment is fresh, "the new engine")
        assert c.source.closed
        await c.poll()
        assert "a new engine runs" in c.note()
        assert "engine lost" not in c.text_of("Header")
        assert c.app.view.snapshot.step == 5


async def test_restart_is_not_offered_for_an_engine_of_others():
    async with console() as c:
        c.source.failure = "gone"
        await c.poll(after_s=1.0)
        assert "r restarts" not in c.text_of("Header")
        await c.press("r")
        assert "cannot be restarted here" in c.note()


async def test_action_quit():
    async with console() as c:
        await c.press("q")
        await c.until(lambda: not c.app.is_running, "the end")
    assert c.app.return_code == 0
    assert c.source.closed


async def test_action_suspend():
    # Stopping for real, and coming back, is a test of a terminal: see test_lifecycle.py.
    async with console() as c:
        await c.press("ctrl+z")
        assert "no shell to go back to" in c.note()


async def test_action_interrupt():
    async with console() as c:
        await _sheet_of(c, "V")
        await c.press("ctrl+c")
        await c.until(lambda: not c.app.is_running, "the end")
    assert c.app.return_code == 130
    assert c.source.closed


# A command in progress ----------------------------------------------------------------------------------------------


def _in_progress(done: int = 120, total: int = 400) -> FocusedSource:
    seen = scripted_observation()
    working = msgspec.structs.replace(seen.snapshot, work=WorkProgress("compact", done, total))
    return FocusedSource([replace(seen, snapshot=working), seen])


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (100, 30), (120, 40), (240, 70)])
async def test_a_command_in_progress_shows_how_far_it_is_and_what_ends_it(size):
    async with console(source=_in_progress(), size=size) as c:
        for words in ("compact", "30.0%", "120 of 400 blocks", "A ends it"):
            assert words in c.note(), words
        await c.press("R")
        assert not isinstance(c.app.screen, ActionSheet)
        await c.poll()
        assert "120 of 400" not in c.note()


async def test_action_abort():
    async with console(source=_in_progress()) as c:
        sheet = await _sheet_of(c, "A")
        assert "end compact after 120 of 400 blocks; 280 are not moved" in sheet.text().plain
        assert c.operations.planned == []
        await c.press("y")
        await c.until(lambda: c.operations.applied == [Abort()], "the abort")
        await c.poll()
        await c.press("A")
        assert not isinstance(c.app.screen, ActionSheet)
        assert "no compaction, resize or swap is in progress" in c.note()


async def test_what_ends_a_command_does_not_wait_for_it():
    class Busy(FakeOperations):
        going, ended = threading.Event(), threading.Event()

        def apply(self, command, timeout_s=60.0):
            if isinstance(command, Abort):
                self.ended.set()
            else:
                self.going.set()
                assert self.ended.wait(10)
            return super().apply(command, timeout_s)

    operations = Busy()
    source = _in_progress()
    async with console(source=source, operations=operations) as c:
        await c.poll()  # nothing is in progress any more
        await _sheet_of(c, "C")
        await c.press("y")
        await c.until(operations.going.is_set, "the compaction")
        source._next = 0
        await c.poll()
        await _sheet_of(c, "A")
        await c.press("y")
        await c.until(lambda: len(operations.applied) == 2, "both")
        assert [type(command) for command in operations.applied] == [Abort, Compact]


# Settings, and taking them back -------------------------------------------------------------------------------------


async def test_action_watermark():
    async with console() as c:
        sheet = await _sheet_of(c, "W")
        assert "percent  1" in sheet.text().plain
        await c.press(*"120")
        assert "120: from 0 to 100 percent" in sheet.text().plain
        await c.press("ctrl+u")
        assert "type a share" in sheet.text().plain
        await c.press(*"2.5.")
        await c.until(lambda: sheet.plan is not None, "the plan")
        assert c.operations.planned[-1] == SetWatermark(0.025)
        await c.press("y")
        await c.until(lambda: c.operations.applied == [SetWatermark(0.025)], "the outcome")


async def test_action_when_to_compact():
    async with console() as c:
        sheet = await _sheet_of(c, "M")
        assert sheet.text().plain.splitlines()[0].startswith(" auto   manual (now)   off ")
        await c.press("escape")
        await _confirmed(c, SetAutoCompaction("auto", 0.5), "M")
    async with console() as c:
        await _confirmed(c, SetAutoCompaction("off", 0.5), "M", "left")


@pytest.mark.parametrize(
    ("keys", "command", "back"),
    [
        (("R", *"900"), Resize(900), Resize(1024)),
        (("O", "right"), SetPolicy("priority"), SetPolicy("fcfs")),
        (("W", *"5"), SetWatermark(0.05), SetWatermark(0.01)),
        (("M",), SetAutoCompaction("auto", 0.5), SetAutoCompaction("manual", 0.5)),
    ],
)
async def test_action_undo(keys, command, back):
    async with console() as c:
        await c.press("U")
        assert "nothing to undo" in c.note()
        await _confirmed(c, command, *keys)
        sheet = await _sheet_of(c, "U")
        assert c.operations.planned[-1] == back
        assert "plan" in sheet.text().plain
        assert c.operations.applied == [command]
        assert str(sheet._fixed) == str(back)
        await c.press("escape")
        assert c.operations.applied == [command]
        await _sheet_of(c, "U")
        await c.press("y")
        await c.until(lambda: c.operations.applied == [command, back], "the undo")
        await c.poll()
        await c.press("U")
        assert "nothing to undo" in c.note()


async def test_changes_are_taken_back_newest_first_and_on_the_command_line_too():
    async with console() as c:
        await _confirmed(c, Resize(900), "R", *"900")
        c.app.run_line("set-policy sjf")
        await c.until(lambda: isinstance(c.app.screen, ActionSheet) and c.app.screen.plan is not None, "the plan")
        await c.press("y")
        await c.until(lambda: len(c.operations.applied) == 2, "the second")
        await c.poll()
        c.app.run_line("undo")
        await c.until(lambda: isinstance(c.app.screen, ActionSheet), "the sheet")
        assert c.app.screen.heading == "Undo set-policy sjf"


async def test_what_was_refused_or_cannot_be_taken_back_is_no_change():
    operations = FakeOperations(outcome=Outcome(False, "no room"))
    async with console(operations=operations) as c:
        await _sheet_of(c, "R", *"900")
        await c.press("y")
        await c.until(lambda: "refused: no room" in c.note(), "the refusal")
        operations.outcome = Outcome(True, "12 blocks moved")
        await _sheet_of(c, "C")
        await c.press("y")
        await c.until(lambda: "12 blocks moved" in c.note(), "the outcome")
        await c.press("U")
        assert "nothing to undo" in c.note()


def test_an_inverse_brings_back_what_the_view_shows():
    view = Attachment(FocusedSource([scripted_observation()]), FakeOperations()).poll()
    loaded = replace(view, snapshot=msgspec.structs.replace(view.snapshot, rate_scale=2.0, size_scale=0.5))
    assert inverse_of(SetLoad(4.0, None), loaded) == SetLoad(2.0, None)
    assert inverse_of(SetLoad(None, 1.0), loaded) == SetLoad(None, 0.5)
    assert inverse_of(Resize(1024), view) is None
    assert inverse_of(Compact(), view) is None
    assert inverse_of(Resize(5), replace(view, snapshot=None)) is None
