"""Pictures of the screen, compared with those of the repository: few, of a view that never changes."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from tui_fakes import FakeOperations, FocusedSource, StillClock, scripted_observation, wait_until

from kvtop.attachment import Attachment
from kvtop.tui.app import KvtopApp


def _app() -> KvtopApp:
    clock = StillClock()
    readings = [scripted_observation(step=1000 + 40 * i, first_event=3 * i) for i in range(30)]
    attachment = Attachment(FocusedSource(readings), FakeOperations(), clock)
    for _ in range(29):
        attachment.poll()
        clock.now_s += 1
    return KvtopApp(lambda: attachment, auto_poll=False, clock=clock)


def _keys(*keys: str):
    async def run(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, KvtopApp)
        await wait_until(pilot, lambda: app.attachment is not None, "the attachment")
        await app.poll_once()
        await pilot.press(*keys)
        await pilot.pause()
        await app.poll_once()
        await pilot.pause()
        if keys[-1:] == ("C",):
            await wait_until(pilot, lambda: app.screen.plan is not None, "the plan")

    return run


@pytest.mark.parametrize(
    ("size", "keys"),
    [((120, 40), ("tab", "enter")), ((80, 24), ("right",)), ((80, 24), ("C",))],
    ids=["wide-selected", "narrow", "narrow-compact"],
)
def test_picture(snap_compare, size, keys):
    assert snap_compare(_app(), terminal_size=size, run_before=_keys(*keys))
