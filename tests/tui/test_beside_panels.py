"""The panels on what no engine tells: GPUs, alerts, the audit log."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from fake_nvml import LOST, NO_DRIVER, NO_PERMISSION, FakeNvml
from test_remote_screen import facts, source
from tui_fakes import Console, FocusedSource, console, scripted_observation

from allocator.commands import Compact, Pause, Resize, SetPolicy
from allocator.ids import BlockState
from allocator.plans import Outcome, Plan
from kvtop.audit import AuditLog, audit_path
from kvtop.sources.scripted import block_arrays
from kvtop.tui.widgets.stage import Stage

_SIZES = [(80, 24), (100, 30), (120, 40), (240, 70)]


async def _gpu_panel(c: Console, words: str) -> str:
    await c.press("u")
    assert isinstance(c.app.focused, Stage)

    def is_there() -> bool:
        c.app._show(everything=True)
        return words in c.text_of("#stage")

    await c.until(is_there, words)
    return c.text_of("#stage")


async def test_action_show_gpu():
    async with console(nvml=FakeNvml(), size=(120, 60)) as c:
        text = await _gpu_panel(c, "NVIDIA H200")
        for words in (
            "GPU 0",
            "GPU 1",
            "12.5%",
            "1000 B of 7.8 KiB",
            "75.0%",
            "250 W",
            "of 700 W",
            "61 °C",
            "2.0 KiB/s",
        ):
            assert words in text, words
        for words in ("Processes on GPU 0", "pid 7", "50 B"):
            assert words in text, words


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"init": 12}, "no NVIDIA library (NVML)"),
        ({"init": NO_DRIVER}, "driver is not loaded"),
        ({"init": NO_PERMISSION}, "may not ask"),
        ({("memory", "1"): LOST}, "fell off the bus"),
        ({"processes": NO_PERMISSION}, "some facts may not be seen"),
    ],
)
async def test_the_gpu_panel_says_why_there_is_none(size, fails, words):
    async with console(nvml=FakeNvml(fails), size=size) as c:
        text = await _gpu_panel(c, words)
        assert all(len(row) <= c.app.query_one("#stage").size.width for row in text.splitlines())


async def test_a_slice_of_a_gpu_is_named_as_one():
    async with console(nvml=FakeNvml(slices={0: 1}), size=(120, 60)) as c:
        assert "GPU 0:0 (slice)" in await _gpu_panel(c, "slice")


async def test_a_stuck_driver_keeps_no_key_waiting():
    go_on, asked = threading.Event(), threading.Event()

    class Stuck(FakeNvml):
        def nvmlInit(self) -> None:
            asked.set()
            assert go_on.wait(10)

    async with console(nvml=Stuck()) as c:
        try:
            text = await _gpu_panel(c, "asking the NVIDIA driver")
            assert asked.wait(10)
            assert "no GPU" in text
            await c.press("1")
            assert c.app.focused is c.app.main
        finally:
            go_on.set()


async def test_the_driver_is_asked_only_by_those_who_look():
    nvml = FakeNvml()
    async with console(nvml=nvml) as c:
        await c.press("4")
        assert nvml.inits == 0


async def test_panels_beside_stand_for_engines_over_the_network_too():
    async with console(source=source(facts()), nvml=FakeNvml(), size=(100, 30)) as c:
        text = await _gpu_panel(c, "NVIDIA H200")
        assert "not of the servers that are watched" in text
        await c.press("end", "escape")
        await c.poll()
        assert c.app.panel == "map"
        assert "big" in c.text_of("#remote")


@pytest.mark.parametrize("size", _SIZES)
async def test_every_tab_can_be_clicked_at_every_width(size):
    async with console(size=size) as c:
        tabs = c.app.query_one("Tabs")
        await c.pilot.click("Tabs", offset=(tabs.line_text(0).index("u g"), 0))
        await c.pilot.pause()
        assert c.app.panel == "gpu"
        assert "gpu" in tabs.line_text(0)


# Alerts -------------------------------------------------------------------------------------------------------------


def _full_pool() -> FocusedSource:
    """Return an engine of which nineteen in twenty blocks are held."""
    states = np.full(1000, BlockState.ACTIVE, np.uint8)
    states[:50] = BlockState.FREE
    return FocusedSource([scripted_observation(device=block_arrays(states, fill=16))])


async def _alerts_after(c: Console, seconds: float) -> str:
    while seconds > 0:
        await c.poll(after_s=min(seconds, 60.0))
        seconds -= 60.0
    await c.press("exclamation_mark")
    await c.poll()
    return c.text_of("#stage")


@pytest.mark.parametrize("size", _SIZES)
async def test_action_show_alerts(size):
    async with console(source=_full_pool(), size=size) as c:
        text = await _alerts_after(c, 60)
        assert isinstance(c.app.focused, Stage)
        for words in ("KvtopCacheNearlyFull, warning", "pending", "for 1m 00s", "fires in 4m 00s", "95.0% > 90.0%"):
            assert words in text, words
        assert "ALERT" not in c.text_of("Header")
        text = await _alerts_after(c, 300)
        for words in ("KvtopCacheNearlyFull, warning", "FIRING", "for 6m 00s", "docs/runbooks/cache-nearly-full.md"):
            assert words in text, words
        assert "The next growth preempts somebody." in " ".join(text.split())
        assert "ALERT" in c.text_of("Header")
        assert all(len(row) <= c.app.query_one("#stage").size.width for row in text.splitlines())


async def test_alerts_that_do_not_fire_tell_what_is_far_from_what():
    async with console() as c:
        text = await _alerts_after(c, 0)
        assert "fires above 90.0% for 5m 00s" in text
        await c.press("end")
        text = c.text_of("#stage")
        assert "only Prometheus knows" in text


async def test_a_lost_engine_is_an_alert():
    async with console() as c:
        c.source.failure = "ended by signal 9"
        text = await _alerts_after(c, 130)
        assert "KvtopSourceDown, critical" in text
        assert "FIRING" in text


async def test_alerts_on_an_engine_over_the_network_go_as_far_as_its_numbers():
    async with console(source=source(facts()), size=(120, 40)) as c:
        text = await _alerts_after(c, 60)
        assert "KvtopCacheNearlyFull" in text.partition("Cannot be told here")[0]
        assert "KvtopIntegrityFault" in text.partition("Cannot be told here")[2]
        assert "kvtop_integrity_faults_total" in text
        assert "60.0%" in text


async def test_a_recording_that_is_wound_back_begins_anew():
    later = scripted_observation(step=2000)
    async with console(source=FocusedSource([later, later, later, scripted_observation(step=10)])) as c:
        assert "KvtopFragmentationHigh, warning\n pending for 30.0 s" in await _alerts_after(c, 30)
        assert "KvtopFragmentationHigh, warning\n pending for 0.0 s" in await _alerts_after(c, 30)


async def test_where_nothing_fires_that_is_said():
    states = np.full(64, BlockState.FREE, np.uint8)
    async with console(source=FocusedSource([scripted_observation(device=block_arrays(states, fill=16))])) as c:
        assert "Nothing fires, nothing is about to" in await _alerts_after(c, 0)


# The audit log ------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path, monkeypatch) -> AuditLog:
    """This user's audit log, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return AuditLog(audit_path(), now=lambda: 1_700_000_000.0)


@pytest.mark.parametrize("size", _SIZES)
async def test_action_show_audit(log, size):
    async with console(size=size) as c:
        await c.press("9")
        await c.poll()
        assert "nobody has asked for anything yet" in c.text_of("#stage")
        plan = Plan("shrink from 1024 to 900 blocks: 12 blocks moved", moved_blocks=12)
        log.write("scripted", (1, None), Resize(900), plan, Outcome(True, "pool shrunk, 12 moved", 12))
        log.write("scripted", (os.getpid(), os.getuid()), SetPolicy("sjf"), None, Outcome(False, "not now"))
        log.write("scripted", (1, None), Compact(), None, Outcome(False, "cancelled after 4 of 9 blocks: it stays", 4))
        log.write("another", (1, None), Pause(), None, Outcome(True, "paused"))
        await c.poll()
        text = " ".join(c.text_of("#stage").split())
        for words in (
            "resize 900: shrink from 1024",
            "→ done: pool shrunk, 12 moved",
            "this console",
            "→ refused: not now",
        ):
            assert words in text, words
        assert "11-14" in text or "11-15" in text
        assert "→ cancelled after 4 of 9 blocks" in text
        assert "paused" not in text
        await c.press("slash", *"sjf", "enter")
        text = c.text_of("#stage")
        assert "/sjf: 1 of 3" in text
        assert "resize" not in text
        assert all(len(row) <= c.app.query_one("#stage").size.width for row in text.splitlines())


async def test_what_a_door_without_lines_was_asked_is_known_to_the_console(log):
    async with console() as c:
        await c.press("space")
        await c.until(lambda: "12 blocks moved" in c.note(), "the outcome")
        await c.press("9")
        await c.poll()
        text = c.text_of("#stage")
        assert "this console" in text
        assert "pause → done: 12 blocks moved" in text


async def test_the_commands_of_other_consoles_private_engines_are_theirs(log):
    log.write("embedded", (1, None), Pause(), None, Outcome(True, "paused"))
    log.write("embedded", (os.getpid(), None), Resize(900), None, Outcome(True, "resized"))
    seen = scripted_observation()
    async with console(source=FocusedSource([seen], name="embedded")) as c:
        await c.press("9")
        await c.poll()
        text = c.text_of("#stage")
        assert "resized" in text
        assert "paused" not in text
