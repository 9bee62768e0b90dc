"""Bad weather: windows that are dragged about, engines that die and come back, engines that say nothing for long."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tui_fakes import (
    FakeOperations,
    FocusedSource,
    StillClock,
    console,
    screen_text,
    scripted_arrays,
    scripted_observation,
    wait_until,
)

from kvtop.attachment import Attachment
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.tui.app import KvtopApp
from kvtop.tui.look_actions import PANELS

_SIZES = [(80, 24), *(pytest.param(s, marks=pytest.mark.slow) for s in ((100, 30), (120, 40))), (240, 70)]


def _changing(count: int = 40) -> list[Observation]:
    return [
        scripted_observation(step=1000 + i, device=scripted_arrays(1024 + 8 * (i % 3)), first_event=3 * i)
        for i in range(count)
    ]


@pytest.mark.parametrize("size", _SIZES)
async def test_every_panel_comes_out_of_a_storm_of_resizes_as_if_there_had_been_none(size):
    """Resizes and readings come faster than they are drawn; what is left is what a still console shows."""
    rng = np.random.default_rng(size[0])
    stormy, still = FocusedSource(_changing(1)), FocusedSource(_changing(1))
    async with console(source=still, size=size) as calm, console(source=stormy) as c:
        for panel in PANELS:
            c.app.action_show(panel)
            for _ in range(3):
                width, height = (int(rng.integers(low, high)) for low, high in ((20, 250), (6, 80)))
                await c.pilot.resize_terminal(width, height)
                c.app.on_view_changed()
            await c.pilot.resize_terminal(*size)
            await c.poll()
            calm.app.action_show(panel)
            await calm.poll()
            shown, wanted = (screen_text(one.app).splitlines() for one in (c, calm))
            assert [len(row) for row in shown] == [size[0]] * size[1]
            assert shown[5:-2] == wanted[5:-2], panel  # without the header's ages and the event line


async def test_an_engine_that_dies_and_returns_again_and_again():
    async with console(source=FocusedSource(_changing())) as c:
        for turn in range(5):
            c.source.failure = f"engine process {turn} ended"
            await c.poll(after_s=2.0)
            assert "engine lost" in c.text_of("Header")
            for key in ("2", "R", "escape", "z", "1", "/", "escape", "question_mark", "escape"):
                await c.press(key)
            c.source.failure = None
            await c.poll(after_s=1.0)
            assert "engine lost" not in c.text_of("Header")
            assert "RUNNING" in c.text_of("Header")
        assert c.app.view.device is not None
        assert c.operations.applied == []


class _Stalling(FocusedSource):
    """Answers at once until it is told to stall; then only when it is let go."""

    def __init__(self, observations: list[Observation]) -> None:
        super().__init__(observations)
        self.is_stalled, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        if not self.go_on.is_set():
            self.is_stalled.set()
            if not self.go_on.wait(30):
                raise SourceError("the engine did not answer")
        return super().read(focus, timeout_s)


async def test_a_screen_whose_engine_stalls_takes_keys_and_says_how_old_it_is():
    clock = StillClock()
    source = _Stalling(_changing(400))
    app = KvtopApp(lambda: Attachment(source, FakeOperations(), clock), refresh_hz=50, clock=clock)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(source.asked) > 3, "some readings")
        source.go_on.clear()
        await wait_until(pilot, source.is_stalled.is_set, "the stall")
        clock.now_s += 7.0
        await wait_until(pilot, lambda: "no news for 7.0 s" in screen_text(app), "the age")
        for key, words in (("8", "over time"), ("question_mark", "Esc closes")):
            await pilot.press(key)
            await wait_until(pilot, lambda words=words: words in screen_text(app), words)
        await pilot.press("escape", "1")
        clock.now_s += 60.0
        await wait_until(pilot, lambda: "no news for 1m 07s" in screen_text(app), "the age again")
        source.go_on.set()
        await wait_until(pilot, lambda: "no news" not in screen_text(app), "news")
        assert "RUNNING" in screen_text(app)
