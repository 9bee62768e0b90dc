"""What a recording costs a run at full speed, and how large it is: the same run with one and without, by turns."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allocator.block_map import BYTES_PER_BLOCK
from kvtop.bench.figures import Figure, figure, ratio_figure
from kvtop.driving import Bounds, drive
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.recording.reader import Recording
from kvtop.recording.writer import RecordOrder, default_every, record_engine


@dataclass(frozen=True, slots=True)
class RecordSizes:
    """How much is measured: steps of each run, the pool, and the run's seed. The engine keeps books only."""

    steps: int = 6_000
    num_blocks: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: its time, and its recording's size and number of moments. [s], [bytes]"""

    seconds: float
    size: int = 0
    moments: int = 0


def measure_recording(rounds: int, sizes: RecordSizes) -> Iterator[Figure]:
    """Yield what recordings of a run cost, at the default interval and with a moment every step.

    Raises:
        KvtopError: A recording cannot be written.
    """
    options = EngineOptions(num_blocks=sizes.num_blocks, geometry="none", speed=None, seed=sizes.seed)
    usual = default_every(options, every_step=False)
    sides: dict[int | None, list[_Run]] = {None: [], usual: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="kvtop-bench-") as folder:
        for index in range(rounds):
            for every in list(sides) if index % 2 == 0 else [*sides][::-1]:
                path = Path(folder) / f"{index}-{every}.kvrec"
                sides[every].append(_run(options, sizes.steps, every, path))
                path.unlink(missing_ok=True)
    alone = [run.seconds for run in sides[None]]
    yield figure("recording", "steps alone", "steps/s", [sizes.steps / s for s in alone])
    for every in (usual, 1):
        runs = sides[every]
        what = f"every {every} steps" if every > 1 else "every step"
        yield ratio_figure("recording", f"{what}, time ÷ alone", [run.seconds for run in runs], alone)
        yield figure("recording", f"{what}, size", "bytes/step", [run.size / sizes.steps for run in runs])
        raw = sizes.num_blocks * 3 // 2 * BYTES_PER_BLOCK  # both tiers
        yield figure(
            "recording", f"{what}, size ÷ raw block map", "x", [run.size / (run.moments * raw) for run in runs]
        )


def _run(options: EngineOptions, steps: int, every: int | None, path: Path) -> _Run:
    engine, _ = build_engine(options)
    if every is not None:
        engine = record_engine(engine, options, RecordOrder(str(path), every))
    began_s = time.perf_counter()
    try:
        drive(engine, Bounds(steps=steps), speed=None, stop=lambda: None, after_turn=lambda _now_s: None)
    finally:
        engine.close()
    seconds = time.perf_counter() - began_s
    if every is None:
        return _Run(seconds)
    recording = Recording.open(path)
    try:
        return _Run(seconds, os.path.getsize(path), recording.last - recording.first + 1)
    finally:
        recording.close()
