"""A long recording is run again, under load, and is the same to its last moment. Takes minutes: ``make test-long``."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from recorded_runs import KeptBytes

from allocator.commands import (
    Annotate,
    Command,
    Compact,
    EvictCached,
    Resize,
    SetLoad,
    SetPolicy,
    SubmitLoad,
)
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.recording.frames import RecordingHeader
from kvtop.recording.reader import Recording
from kvtop.recording.rerun import rerun
from kvtop.recording.writer import RecordedEngine, RecordingWriter

STEPS = 100_000
#: Real copies in a thread of their own, a pool that is too small, and faults.
OPTIONS = EngineOptions(
    num_blocks=160,
    swap_ratio=0.5,
    geometry="tiny",
    speed=None,
    seed=11,
    compact="auto",
    executor="thread",
    inject=(("failing-copy", 0.001),),
)


@pytest.fixture
def load() -> Iterator[None]:
    """As many busy processes as disturb everything else."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def commands(rng: random.Random) -> Iterator[tuple[int, Command]]:
    """Yield commands and the steps before which they come."""
    step = 0
    while (step := step + rng.randrange(200, 1500)) < STEPS:
        choices: tuple[Command, ...] = (
            EvictCached(rng.randrange(1, 40)),
            Resize(rng.randrange(120, 200)),
            Compact(rng.choice(("pack-low", "longest-run", "by-sequence"))),
            SetLoad(rng.uniform(0.5, 1.5), rng.uniform(0.7, 1.2)),
            SetPolicy(rng.choice(("fcfs", "sjf", "priority"))),
            SubmitLoad(rng.randrange(1, 300), rng.randrange(1, 60), rng.randrange(1, 5)),
            Annotate(f"at {step}"),
        )
        yield step, rng.choice(choices)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("load")
def test_a_hundred_thousand_steps_are_the_same_again() -> None:
    file = KeptBytes()
    engine, _ = build_engine(OPTIONS)
    recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", OPTIONS, 40)), every=40)
    given = 0
    for step, command in [*commands(random.Random(5)), (STEPS, Annotate("the end"))]:
        while recorded.step < step:
            assert recorded.advance(step - recorded.step)
        given += 1
        recorded.apply(command)
    recorded.close()
    done = rerun(Recording(io.BytesIO(file.content)))
    assert done.what == ()
    assert (done.step, done.commands) == (STEPS, given)
    assert done.moments > STEPS // 40
