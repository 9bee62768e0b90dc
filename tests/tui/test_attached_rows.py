"""An attached program's sequence is told from the engine's own wherever it is shown."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from tui_fakes import FocusedSource, console, scripted_observation

from allocator.snapshot import SequenceRow
from kvtop.model.view import is_attached

SOURCE = "client:42 my-app job 1"


async def test_an_attached_programs_sequence_is_told_from_the_engines_own():
    observation = scripted_observation()
    own = observation.snapshot.sequences[:2]
    rows = (*own, SequenceRow(9, 2, SOURCE, "running", "", 300, 320, None, 20, 0, 0, 1, 30))
    assert [is_attached(row) for row in rows] == [False, False, True]
    snapshot = msgspec.structs.replace(observation.snapshot, sequences=rows)
    async with console(source=FocusedSource([replace(observation, snapshot=snapshot)]), size=(150, 40)) as c:
        lines = c.text_of("#sequences").splitlines()
        (line,) = [line for line in lines if line.lstrip().startswith("9 att ")]
        assert line.split()[:2] == ["9", "att"]
        assert "320/—" in line
        await c.press("2", "end", "enter")
        assert f"sequence 9: {SOURCE}, " in " ".join(c.text_of("#inspector").split())
    async with console(source=FocusedSource([replace(observation, snapshot=snapshot)]), size=(240, 40)) as c:
        assert SOURCE in c.text_of("#sequences")
