"""One suite for every source: what a reading holds, and how a source fails and closes."""

from __future__ import annotations

import io
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_vllm import imported, request_of
from published import own_directories

from allocator.block_map import FIELDS
from allocator.ids import NO_ROW
from allocator.metrics import tier_numbers
from kvtop.attachment import Attachment
from kvtop.engine_process import EngineProcess
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.operations import ReadOnly
from kvtop.plugins.vllm import register
from kvtop.recording.frames import RecordingHeader
from kvtop.recording.reader import Recording
from kvtop.recording.writer import RecordedEngine, RecordingWriter
from kvtop.runner import EngineRunner
from kvtop.sources.base import Source
from kvtop.sources.in_process import InProcessSource
from kvtop.sources.local import LocalSource
from kvtop.sources.named import NamedEngine
from kvtop.sources.recorded import RecordedSource
from kvtop.sources.scripted import ScriptedSource
from kvtop.targets import open_target

CAPABILITIES = {"block-map", "sequences", "events", "host-tier", "operations"}
OPTIONS = EngineOptions(num_blocks=64, swap_ratio=0.5, geometry="none", speed=None, seed=3)
TIMEOUT_S = 30.0


@dataclass
class Harness:
    """A source, how its far end fails, and whether it has a host tier where it is given one."""

    source: Source
    fail: Callable[[], None]
    takes_host: bool = True


def in_process(options: EngineOptions, *, runs: bool) -> Iterator[Harness]:
    engine, notes = build_engine(options)
    runner = EngineRunner(engine, speed=options.speed, notes=notes)
    source = InProcessSource(runner, on_close=engine.close)
    if runs:
        source.start()
    else:
        runner.turn()

    def fail() -> None:
        engine.arrays = lambda tier: 1 / 0  # type: ignore[assignment, method-assign, misc]
        runner._publication.outdate()

    yield Harness(source, fail)
    source.close()


def local(options: EngineOptions) -> Iterator[Harness]:
    process = EngineProcess.start(options)
    source = LocalSource(process)

    def fail() -> None:
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait(10)

    yield Harness(source, fail)
    source.close()


def named(options: EngineOptions) -> Iterator[Harness]:
    """A published engine, watched by somebody else too."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory, pytest.MonkeyPatch.context() as patch:
        own_directories(patch, Path(directory))
        process = EngineProcess.start(options, publish="t")
        process.wait_ready(TIMEOUT_S)
        other, source = LocalSource(process), LocalSource(NamedEngine("t"), "local:t")
        other.read(Focus(), TIMEOUT_S)

        def fail() -> None:
            os.kill(process.pid, signal.SIGKILL)
            process._process.wait(10)

        yield Harness(source, fail)
        source.close()
        other.close()


def scripted(options: EngineOptions) -> Iterator[Harness]:
    with_engine = in_process(options, runs=False)
    harness = next(with_engine)
    readings: list[Observation] = [harness.source.read(Focus(), TIMEOUT_S) for _ in range(2)]
    source = ScriptedSource(readings, missing=harness.source.missing)

    def fail() -> None:
        source.failure = "the script says so"

    yield Harness(source, fail)
    next(with_engine, None)


def recorded(options: EngineOptions) -> Iterator[Harness]:
    file = io.BytesIO()
    engine, _ = build_engine(options)
    engine_recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", options, 1)), every=1)
    engine_recorded.advance(50)
    data = file.getvalue()
    engine_recorded.close()
    source = RecordedSource(Recording(io.BytesIO(data)), speed=None)

    def fail() -> None:
        damaged = io.BytesIO(bytes(len(data)))
        source.recording._records._file, source.recording._state = damaged, None

    yield Harness(source, fail)
    source.close()


def plugged_in(options: EngineOptions) -> Iterator[Harness]:
    """The pool of another engine, published by its plugin."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory, pytest.MonkeyPatch.context() as patch:
        own_directories(patch, Path(directory))
        patch.setenv("KVTOP_PUBLISH", "t")
        with imported("0.32.0") as scheduler_class:
            register()
            scheduler = scheduler_class(options.num_blocks)
        request_of(scheduler, "a", list(range(40)), max_tokens=100)
        scheduler.step()
        source = open_target("local:t").source

        def fail() -> None:
            patch.setattr(scheduler.kv_cache_manager, "block_pool", None)
            scheduler.shutdown()

        yield Harness(source, fail, takes_host=False)
        source.close()
        scheduler.shutdown()


KINDS: dict[str, Callable[[EngineOptions], Iterator[Harness]]] = {
    "in-process": lambda options: in_process(options, runs=True),
    "stepped": lambda options: in_process(options, runs=False),
    "local": local,
    "named": named,
    "scripted": scripted,
    "recorded": recorded,
    "plugin": plugged_in,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    made: list[Iterator[Harness]] = []

    def make(options: EngineOptions = OPTIONS) -> Harness:
        made.append(KINDS[request.param](options))
        return next(made[-1])

    yield make
    for harness in reversed(made):  # each puts the environment back as it found it
        next(harness, None)


def test_a_reading_is_whole(make: Callable[..., Harness]) -> None:
    harness = make()
    seen = harness.source.read(Focus(), TIMEOUT_S)
    assert seen.snapshot.block_size == 16
    assert seen.device is not None
    assert (seen.host is not None) == harness.takes_host
    for arrays, total in ((seen.device, 64), (seen.host, 32)):
        if arrays is None:
            continue
        assert arrays.num_blocks == total
        for name, dtype in FIELDS:
            assert getattr(arrays, name).shape == (total,)
            assert getattr(arrays, name).dtype == dtype
        numbers = tier_numbers(arrays, seen.snapshot.block_size, seen.snapshot.slab_size)
        assert numbers.total == total
    assert (seen.focus_table, seen.focus_block) == (None, None)


def test_arrays_belong_to_their_snapshot(make: Callable[..., Harness]) -> None:
    source = make().source
    for _ in range(5):
        seen = source.read(Focus(), TIMEOUT_S)
        assert seen.device is not None
        rows = {row.row for row in seen.snapshot.sequences if row.row is not None}
        assert set(seen.device.owner.tolist()) - {NO_ROW} <= rows
        assert int(seen.device.last_used.max()) <= seen.snapshot.step


def test_time_does_not_go_back(make: Callable[..., Harness]) -> None:
    source = make().source
    steps = [source.read(Focus(), TIMEOUT_S).snapshot.step for _ in range(5)]
    assert steps == sorted(steps)


def test_what_is_missing_is_named(make: Callable[..., Harness]) -> None:
    for num_swap in (0, 8):
        harness = make(EngineOptions(num_blocks=64, num_swap_blocks=num_swap, geometry="none", speed=None))
        source = harness.source
        seen = source.read(Focus(), TIMEOUT_S)
        assert set(source.missing) <= CAPABILITIES
        assert all(source.missing.values())
        assert (seen.host is None) == ("host-tier" in source.missing) == (num_swap == 0 or not harness.takes_host)


def test_readings_are_frozen(make: Callable[..., Harness]) -> None:
    seen = make().source.read(Focus(), TIMEOUT_S)
    assert seen.device is not None
    with pytest.raises(ValueError, match="read-only"):
        seen.device.state[0] = 0
    with pytest.raises(AttributeError):
        seen.snapshot.step = 0  # type: ignore[misc]


def test_a_failure_is_a_source_error_and_the_view_keeps_the_last_facts(make: Callable[..., Harness]) -> None:
    harness = make()
    attachment = Attachment(harness.source, ReadOnly("a test"))
    before = attachment.poll(TIMEOUT_S)
    assert before.error is None
    harness.fail()
    for _ in range(2):
        with pytest.raises(SourceError):
            harness.source.read(Focus(), TIMEOUT_S)
    after = attachment.poll(TIMEOUT_S)
    assert after.error
    assert "\n" not in after.error
    assert (after.snapshot, after.device) == (before.snapshot, before.device)


def test_close_twice(make: Callable[..., Harness]) -> None:
    source = make().source
    source.read(Focus(), TIMEOUT_S)
    source.close()
    source.close()


@pytest.mark.parametrize("kind", ["in-process", "stepped", "local", "named", "plugin"])
def test_the_focus_is_answered(kind: str) -> None:
    """Not by a script, which knows only its lines."""
    made = KINDS[kind](EngineOptions(num_blocks=64, geometry="none", speed=1.0))
    try:
        source = next(made).source
        while not (seen := source.read(Focus(), TIMEOUT_S)).snapshot.num_running:
            if isinstance(source, InProcessSource) and kind == "stepped":
                source._runner.turn()
        # The engine goes on meanwhile: look at sequences until one is caught alive.
        while True:
            row = next(row for row in seen.snapshot.sequences if row.row is not None)
            seen = source.read(Focus(seq_id=row.seq_id, block_id=10**9), TIMEOUT_S)
            if seen.focus_table is not None:
                break
        assert seen.focus_block is None
        block = int(seen.focus_table[0])
        seen = source.read(Focus(block_id=block, seq_id=10**9), TIMEOUT_S)
        assert seen.focus_table is None
        assert seen.focus_block is not None
        assert seen.focus_block.block_id == block
        assert seen.focus_block.total >= len(seen.focus_block.holders)
    finally:
        next(made, None)


@pytest.mark.parametrize("kind", ["in-process", "stepped", "local", "named", "recorded", "plugin"])
def test_after_close_there_is_nothing_to_read(kind: str) -> None:
    made = KINDS[kind](OPTIONS)
    source = next(made).source
    source.read(Focus(), TIMEOUT_S)
    source.close()
    with pytest.raises(SourceError, match="closed"):
        source.read(Focus(), TIMEOUT_S)
    next(made, None)
