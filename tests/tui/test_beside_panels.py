"""The panels on what no engine tells: GPUs."""

from __future__ import annotations

import threading

import pytest
from fake_nvml import LOST, NO_DRIVER, NO_PERMISSION, FakeNvml
from test_remote_screen import facts, source
from tui_fakes import Console, console

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
