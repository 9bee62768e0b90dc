"""Commands in slices: how far they are, what ends them early, and what that leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from fake_engine import until
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import opened

from allocator import work as work_module
from allocator.block_map import FIELDS
from allocator.commands import Abort, Command, Compact, Pause, Resize, SetPolicy, SwapIn, SwapOut
from allocator.engine import Engine
from allocator.plans import CopyJob, MovePlan, Moves, Outcome
from allocator.work import parts_of, slices_of
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.model.observation import Focus
from kvtop.recording.frames import RecordingHeader
from kvtop.recording.rerun import rerun
from kvtop.recording.writer import RecordedEngine, RecordingWriter
from kvtop.runner import EngineRunner

SLICE = 4
STAMPED = EngineOptions(num_blocks=256, stamp=True, speed=None, seed=3, executor="inline")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "SLICE_BLOCKS", SLICE)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with a torn pool, whose slots can be read back."""
    engine, _ = build_engine(STAMPED)
    while engine.step < 500:
        engine.advance(500 - engine.step)
    yield engine
    engine.check()
    engine.close()


def end_after(engine: Engine, command: Command, slices: int) -> Outcome:
    """Do a command, and cancel it after so many slices; the laws hold after each."""
    work = engine.begin(command)
    while (outcome := work.advance()) is None:
        engine.check()
        slices -= 1
        if slices == 0:
            work.cancel()
    return outcome


def shrunk(engine: Engine) -> Resize:
    """Return a resize that has to move blocks, and can."""
    for size in range(engine.manager.device.num_blocks - 1, 0, -1):
        if engine.plan(Resize(size)).moved_blocks > 3 * SLICE:
            return Resize(size)
    raise AssertionError("nothing to move")


@pytest.mark.parametrize("goal", ["pack-low", "longest-run", "by-sequence"])
def test_slices_end_where_one_go_does(engine: Engine, monkeypatch: pytest.MonkeyPatch, goal) -> None:
    planned = engine.plan(Compact(goal))
    outcome = end_after(engine, Compact(goal), 10**6)
    assert (outcome.ok, outcome.moved_blocks) == (True, planned.moved_blocks)
    monkeypatch.setattr(work_module, "SLICE_BLOCKS", 10**6)
    other, _ = build_engine(STAMPED)
    while other.step < 500:
        other.advance(500 - other.step)
    assert other.apply(Compact(goal)).message == outcome.message
    left, right = engine.arrays("device"), other.arrays("device")
    for name, _ in FIELDS:
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    other.close()


@pytest.mark.parametrize("slices", [1, 2])
def test_a_cancelled_compaction_says_what_was_moved_and_can_be_gone_on_with(engine: Engine, slices: int) -> None:
    planned = engine.plan(Compact()).moved_blocks
    assert planned > 2 * SLICE
    outcome = end_after(engine, Compact(), slices)
    moved = outcome.moved_blocks
    assert not outcome.ok
    assert slices <= moved < planned
    assert outcome.message == f"cancelled after {moved} of {planned} blocks: what was moved stays moved"
    assert engine.compactor.records[-1].moved_blocks == moved
    assert engine.compactor.records[-1].ended_early == outcome.message
    assert engine.apply(Compact()).ok
    assert engine.plan(Compact()).moved_blocks == 0


def test_a_cancelled_shrink_keeps_the_pool_s_size(engine: Engine) -> None:
    command = shrunk(engine)
    planned, before = engine.plan(command).moved_blocks, engine.manager.device.num_blocks
    outcome = end_after(engine, command, 2)
    assert not outcome.ok
    assert outcome.moved_blocks == 2 * SLICE
    assert outcome.message == f"cancelled after {2 * SLICE} of {planned} blocks: the pool keeps its {before} blocks"
    assert engine.manager.device.num_blocks == before
    again = engine.apply(command)
    assert again.ok
    assert engine.manager.device.num_blocks == command.num_blocks


def test_a_shrink_in_slices_moves_as_much_as_in_one_go(engine: Engine) -> None:
    command = shrunk(engine)
    planned = engine.plan(command)
    outcome = end_after(engine, command, 10**6)
    assert outcome.ok
    assert outcome.moved_blocks == planned.moved_blocks
    assert f"{planned.moved_blocks} moved" in outcome.message


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_cancelled_swap_changes_nothing(mode) -> None:
    engine, _ = build_engine(EngineOptions(num_blocks=256, stamp=True, speed=None, seed=3, executor=mode))
    while engine.step < 500:
        engine.advance(500 - engine.step)
    engine.settle()
    longest = max(engine.scheduler.running, key=lambda s: engine.manager.tables.num_blocks[s.row])
    out = engine.begin(SwapOut(longest.seq_id))
    out.cancel()
    outcome = out.finish()
    assert (outcome.ok, outcome.moved_blocks) == (False, 0)
    assert outcome.message == f"cancelled: sequence {longest.seq_id} stays on the device"
    assert longest.row is not None
    engine.check()
    assert engine.apply(SwapOut(longest.seq_id)).ok
    back = engine.begin(SwapIn(longest.seq_id))
    back.cancel()
    assert back.finish().message == f"cancelled: sequence {longest.seq_id} stays on the host"
    engine.check()
    assert engine.apply(SwapIn(longest.seq_id)).ok
    assert engine.apply(Compact()).ok
    engine.check()
    assert engine.counters.injected == (0,) * len(engine.counters.injected)
    assert not [e for e in engine.events_from(0) if e.kind == "fault"]
    engine.close()


def test_the_copy_of_a_swap_is_ended_between_two_of_its_parts() -> None:
    engine, _ = build_engine(EngineOptions(num_blocks=256, stamp=True, speed=None, seed=3, executor="thread"))
    while engine.step < 500:
        engine.advance(500 - engine.step)
    engine.settle()
    longest = max(engine.scheduler.running, key=lambda s: engine.manager.tables.num_blocks[s.row])
    blocks = int(engine.manager.tables.num_blocks[longest.row])
    assert blocks > 2 * SLICE
    first, go_on, parts = threading.Event(), threading.Event(), []
    copy = engine.manager.storage.copy

    def slow(job: CopyJob) -> int:
        parts.append(len(job.sources))
        first.set()
        assert go_on.wait(10)
        return copy(job)

    engine.manager.storage.copy = slow  # type: ignore[method-assign]
    work = engine.begin(SwapOut(longest.seq_id))
    assert work.advance() is None
    assert first.wait(10)
    assert (work.progress().done_blocks, work.progress().total_blocks) == (0, blocks)
    work.cancel()
    assert work.advance() is None
    go_on.set()
    assert not work.finish().ok
    assert sum(parts) < blocks
    engine.manager.storage.copy = copy  # type: ignore[method-assign]
    engine.check()
    engine.close()


# Through the runner -------------------------------------------------------------------------------------------------


def _asked(runner: EngineRunner, command: Command) -> tuple[threading.Thread, list[Outcome]]:
    """Ask for a command from another thread; it waits in the runner's queue."""
    found: list[Outcome] = []
    waiting = len(runner._queue)
    thread = threading.Thread(target=lambda: found.append(runner.apply(command, 30.0)))
    thread.start()
    until(lambda: len(runner._queue) > waiting)
    return thread, found


def test_others_are_answered_while_a_command_is_in_progress(engine: Engine) -> None:
    clock = [0.0]

    def tick() -> float:
        clock[0] += 0.006  # a slice a turn
        return clock[0]

    runner = EngineRunner(engine, speed=None, paused=True, clock=tick)
    refused = runner.plan(Abort())
    assert refused.refusal == "no command is in progress"
    planned = runner.plan(Compact()).moved_blocks
    runner.claim()
    compacting, outcome = _asked(runner, Compact())
    runner.turn()
    work = runner.observe(Focus()).snapshot.work
    assert work is not None
    assert (work.name, work.total_blocks) == ("compact", planned)
    assert 0 < work.done_blocks < planned
    step = engine.step
    later, later_outcome = _asked(runner, SetPolicy("sjf"))
    pausing, pausing_outcome = _asked(runner, Pause())
    runner.turn()
    until(lambda: pausing_outcome != [])
    assert not later_outcome
    aborting, aborting_outcome = _asked(runner, Abort())
    while not outcome or not later_outcome:
        runner.turn()
    for thread in (compacting, later, pausing, aborting):
        thread.join(10)
    assert aborting_outcome[0].ok
    assert aborting_outcome[0].message.startswith("ends compact after ")
    assert outcome[0].message.startswith("cancelled after ")
    assert later_outcome[0].ok
    assert engine.step == step
    assert runner.observe(Focus()).snapshot.work is None


def test_the_end_of_the_runner_ends_a_command_in_progress(engine: Engine) -> None:
    clock = [0.0]

    def tick() -> float:
        clock[0] += 0.006
        return clock[0]

    runner = EngineRunner(engine, speed=None, paused=True, clock=tick)
    runner.claim()
    failed: list[Exception] = []

    def ask() -> None:
        try:
            runner.apply(Compact(), 30.0)
        except Exception as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: len(runner._queue) > 0)
    runner.turn()
    stop = threading.Event()
    stop.set()
    runner.run(stop)
    asking.join(10)
    assert str(failed[0]) == "the engine has stopped"


def test_a_whole_command_is_done_by_who_asks_while_nobody_runs_the_engine(engine: Engine) -> None:
    runner = EngineRunner(engine, speed=None, paused=True)
    assert runner.apply(Compact()).ok
    assert runner.observe(Focus()).snapshot.work is None


# Recorded and run again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compact", "resize", "swap-out"])
def test_a_cancelled_command_is_cancelled_again_when_the_run_is(kind: str, tmp_path) -> None:
    path = tmp_path / "run.kvrec"
    options = EngineOptions(num_blocks=256, geometry="none", speed=None, seed=3)
    engine, _ = build_engine(options)
    with path.open("wb") as file:
        recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", options, 4)), 4)
        while recorded.step < 500:
            recorded.advance(500 - recorded.step)
        engine.settle()
        if kind == "compact":
            command: Command = Compact()
        elif kind == "resize":
            command = shrunk(engine)
        else:
            command = SwapOut(engine.scheduler.running[0].seq_id)
        work = recorded.begin(command)
        if kind == "swap-out":
            work.cancel()
        while (outcome := work.advance()) is None:
            work.cancel()
        assert outcome.message.startswith("cancelled")
        recorded.advance(200)
        recorded.close()
    assert rerun(opened(path.read_bytes())).what == ()


# Slices -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 5), st.data())
def test_pieces_make_the_stage_again(n: int, size: int, besides: int, data: st.DataObject) -> None:
    ids = data.draw(st.permutations(range(2 * n + besides)))
    sources, targets, others = (np.array(part, np.int64) for part in (ids[:n], ids[n : 2 * n], ids[2 * n :]))
    in_way = np.array([t for t in targets.tolist() if data.draw(st.booleans())], np.int64)
    stage = Moves(sources, targets, np.concatenate((in_way, others)))
    pieces = slices_of(MovePlan((stage,)), size)
    assert np.concatenate([p.sources for p in pieces]).tolist() == sources.tolist()
    assert np.concatenate([p.destinations for p in pieces]).tolist() == targets.tolist()
    assert sorted(np.concatenate([p.evicted for p in pieces]).tolist()) == sorted(stage.evicted.tolist())
    assert all(len(p.sources) <= size for p in pieces) or n <= size
    done: set[int] = set()
    for piece in pieces:
        done.update(piece.evicted.tolist())
        assert all(t in done for t in piece.destinations.tolist() if t in in_way)


def test_parts_of_a_copy() -> None:
    job = CopyJob("device", np.arange(10), "host", np.arange(10, 20))
    parts = parts_of(job, 4)
    assert [len(part.sources) for part in parts] == [4, 4, 2]
    assert np.concatenate([part.destinations for part in parts]).tolist() == list(range(10, 20))
    assert parts_of(job, 10) == (job,)
