"""What tests of recordings share: short recorded runs, and their moments as plain values."""

from __future__ import annotations

import io
from typing import Any

import msgspec

from allocator.block_map import FIELDS, BlockArrays
from allocator.commands import Command
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.recording.frames import RecordingHeader
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.writer import RecordedEngine, RecordingWriter

SMALL = EngineOptions(num_blocks=96, num_swap_blocks=48, geometry="none", speed=None, seed=3)


class KeptBytes(io.BytesIO):
    """A file in memory whose content outlives its close."""

    content = b""

    def close(self) -> None:
        self.content = self.getvalue() if not self.closed else self.content
        super().close()


def record(
    steps: int,
    *,
    options: EngineOptions = SMALL,
    every: int = 4,
    key_every: int = 8,
    commands: dict[int, Command] | None = None,
) -> bytes:
    """Return the recording of a short run; ``commands`` are applied when their step is reached."""
    file = KeptBytes()
    engine, _ = build_engine(options)
    writer = RecordingWriter(file, RecordingHeader("test", options, every, has_victims=True), key_every=key_every)
    recorded = RecordedEngine(engine, writer, every)
    try:
        for step in sorted({*(commands or {}), steps}):
            while recorded.step < step and recorded.advance(step - recorded.step):
                pass
            if commands and step in commands:
                recorded.apply(commands[step])
    finally:
        recorded.close()
    return file.content


def opened(data: bytes) -> Recording:
    """Return a recording held in memory."""
    return Recording(io.BytesIO(data))


def values(arrays: BlockArrays | None) -> tuple[bytes, ...] | None:
    """Return arrays as comparable bytes."""
    return None if arrays is None else tuple(getattr(arrays, name).tobytes() for name, _ in FIELDS)


def told(moment: Moment) -> tuple[Any, ...]:
    """Return all that a moment tells, as one comparable value."""
    snapshot = msgspec.msgpack.encode(moment.snapshot)
    tables = tuple(part.tolist() for part in moment.tables)
    return moment.number, snapshot, values(moment.device), values(moment.host), moment.stalled, tables, moment.victims
