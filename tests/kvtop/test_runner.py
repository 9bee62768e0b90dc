"""The runner: pacing, commands, observations, and what it does when the engine fails."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_engine import FakeEngine, ManualClock, broken_law, until

from allocator.block_map import BlockArrays
from allocator.commands import Compact, Pause, Resize, Resume, SetSpeed, SetWatermark, Step, SubmitLoad, VerifyContents
from allocator.errors import StorageError
from allocator.ids import Tier
from allocator.plans import Outcome
from kvtop import runner as runner_module
from kvtop.errors import SourceError
from kvtop.model.observation import BlockHolders, Focus
from kvtop.runner import MAX_QUEUED, EngineRunner
from kvtop.runner_request import RunnerRequest

LOOK = Focus()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def started() -> Iterator[Callable[[EngineRunner], EngineRunner]]:
    """Start runners in threads of their own, and stop them in the end."""
    stop = threading.Event()
    runners: list[tuple[EngineRunner, threading.Thread]] = []

    def start(runner: EngineRunner) -> EngineRunner:
        thread = threading.Thread(target=runner.run, args=(stop,))
        thread.start()
        runners.append((runner, thread))
        until(lambda: runner._thread_id is not None)
        return runner

    yield start
    stop.set()
    for runner, thread in runners:
        runner.wake()
        thread.join(10)
        assert not thread.is_alive()


# ---- pacing


def test_speed_one_takes_forty_steps_a_second(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, speed=1.0, clock=clock)
    runner.turn()
    assert engine.step == 0
    for tenth in range(1, 11):
        clock.now_s = 1000 + tenth / 10
        runner.turn()
        assert engine.step == tenth * 4
    assert runner.turn() == pytest.approx(0.025)


@pytest.mark.parametrize(("speed", "steps"), [(0.5, 2), (2.0, 8), (10.0, 40)])
def test_other_speeds(engine: FakeEngine, clock: ManualClock, speed: float, steps: int) -> None:
    runner = EngineRunner(engine, speed=speed, clock=clock)
    clock.now_s += 0.1
    runner.turn()
    assert engine.step == steps


def test_a_skipping_engine_keeps_to_the_pace(engine: FakeEngine, clock: ManualClock) -> None:
    engine.skips = True
    runner = EngineRunner(engine, speed=1.0, clock=clock)
    clock.now_s += 1.0
    runner.turn()
    assert (engine.step, engine.calls) == (40, ["advance"])


def test_speed_max_never_sleeps_and_ends_its_turns(engine: FakeEngine, clock: ManualClock) -> None:
    def cost() -> None:
        clock.now_s += 0.003

    engine.step_cost = cost
    runner = EngineRunner(engine, speed=None, clock=clock)
    assert runner.turn() == 0
    assert engine.step == 4  # 10 ms of work a turn


def test_turns_are_short_while_somebody_is_answered(engine: FakeEngine, clock: ManualClock) -> None:
    def cost() -> None:
        clock.now_s += 0.0011

    engine.step_cost = cost
    runner = EngineRunner(engine, speed=None, clock=clock)

    def steps() -> int:
        before = engine.step
        runner.turn()
        return engine.step - before

    assert [steps() for _ in range(3)] == [10] * 3
    with runner._wake:
        runner._queue.append(RunnerRequest(SetWatermark(0.5)))
    assert [steps() for _ in range(12)] == [2] * 10 + [10] * 2  # 20 ms of short ones, and long ones again


def test_an_engine_at_full_speed_lets_others_in_now_and_then_and_always_while_it_answers(
    engine: FakeEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[int] = []
    monkeypatch.setattr("kvtop.runner.time.sleep", lambda seconds: sleeps.append(engine.step))
    stop = threading.Event()

    def cost() -> None:
        clock.now_s += 0.011
        if engine.step == 8:
            with runner._wake:
                runner._queue.append(RunnerRequest(SetWatermark(0.5)))
        if engine.step == 16:
            stop.set()

    engine.step_cost = cost
    runner = EngineRunner(engine, speed=None, clock=clock)
    runner.run(stop)
    assert sleeps == [4, 8, 10, 11, 12, 16]


def test_an_engine_that_becomes_busy_holds_nobody_up_for_long(clock: ManualClock) -> None:
    class Working(FakeEngine):
        cost_s = 1e-6

        def advance(self, max_steps: int) -> int:
            clock.now_s += self.cost_s * max_steps
            return super().advance(max_steps)

    def turn_s() -> float:
        began_s = clock.now_s
        runner.turn()
        return clock.now_s - began_s

    engine = Working()
    engine.skips = True
    runner = EngineRunner(engine, speed=None, clock=clock)
    for _ in range(20):
        turn_s()
    engine.cost_s = 0.002
    turns_s = [turn_s() for _ in range(20)]
    assert turns_s[0] < 0.6
    assert max(turns_s[1:]) < 0.02


def test_lag_is_dropped(engine: FakeEngine, clock: ManualClock) -> None:
    def cost() -> None:
        clock.now_s += 0.05  # twice as slow as its pace

    engine.step_cost = cost
    runner = EngineRunner(engine, speed=1.0, clock=clock)
    clock.now_s += 60  # such as a machine that slept
    for _ in range(100):
        runner.turn()
    engine.step_cost = lambda: None
    step = engine.step
    assert step <= 100
    runner.turn()
    assert engine.step - step <= 4


def test_an_engine_with_nothing_to_do_sleeps(engine: FakeEngine, clock: ManualClock) -> None:
    engine.steps_left = 3
    runner = EngineRunner(engine, speed=None, clock=clock)
    assert runner.turn() == runner_module.MAX_IDLE_S
    assert runner.observe(LOOK).snapshot.phase == "done"
    calls = len(engine.calls)
    runner.turn()
    assert "advance" not in engine.calls[calls:]


def test_max_steps(engine: FakeEngine, clock: ManualClock) -> None:
    engine.skips = True
    runner = EngineRunner(engine, speed=None, max_steps=100, clock=clock)
    assert runner.turn() == runner_module.MAX_IDLE_S
    assert engine.step == 100
    assert runner.observe(LOOK).snapshot.phase == "done"
    assert runner.plan(Step()).refusal == "the run is done"
    assert runner.apply(Resume()) == Outcome(ok=False, message="resume: the run is done")


def test_the_step_rate(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, speed=2.0, clock=clock)
    assert runner.observe(LOOK).snapshot.steps_per_s is None
    for _ in range(300):
        clock.now_s += 0.01
        runner.turn()
    assert runner.observe(LOOK).snapshot.steps_per_s == pytest.approx(80, rel=0.05)
    runner.apply(Pause())
    for _ in range(5):
        clock.now_s += 0.5
        runner.turn()
    assert runner.observe(LOOK).snapshot.steps_per_s == 0


# ---- the runner's own commands


def test_pause_step_resume(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, clock=clock)
    assert runner.apply(Pause()) == Outcome(ok=True, message="paused")
    clock.now_s += 5
    assert runner.turn() == runner_module.MAX_IDLE_S
    assert engine.step == 0
    assert runner.observe(LOOK).snapshot.phase == "paused"
    assert runner.apply(Step(3)) == Outcome(ok=True, message="3 steps")
    assert runner.apply(Step()) == Outcome(ok=True, message="1 step")
    assert engine.step == 4
    assert runner.apply(Resume()) == Outcome(ok=True, message="running")
    runner.turn()
    assert engine.step == 4  # the pause is not caught up
    clock.now_s += 0.1
    runner.turn()
    assert engine.step == 8
    assert runner.observe(LOOK).snapshot.phase == "running"


def test_step_is_exact_even_when_the_engine_skips(engine: FakeEngine, clock: ManualClock) -> None:
    engine.skips = True
    runner = EngineRunner(engine, paused=True, clock=clock)
    runner.apply(Step(1_000_000))
    assert engine.step == 1_000_000


def test_step_beyond_the_end_says_how_far_it_came(engine: FakeEngine, clock: ManualClock) -> None:
    engine.steps_left = 2
    runner = EngineRunner(engine, paused=True, clock=clock)
    assert runner.apply(Step(5)) == Outcome(ok=True, message="2 of 5 steps: the run is done")
    assert runner.apply(Step(5)) == Outcome(ok=False, message="0 of 5 steps: the run is done")


def test_a_stuck_engine_is_tried_again_after_a_command(engine: FakeEngine, clock: ManualClock) -> None:
    engine.stuck_reason = "every block is pinned"
    runner = EngineRunner(engine, speed=None, clock=clock)
    assert runner.turn() == runner_module.MAX_IDLE_S
    assert runner.observe(LOOK).snapshot.phase == "stuck: every block is pinned"
    assert runner.apply(Step(2)).message == "0 of 2 steps: every block is pinned"
    runner.apply(Resume())
    runner.apply(SubmitLoad(1, 1))
    assert runner.turn() == 0
    assert engine.step > 0


def test_set_speed(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, speed=1.0, clock=clock)
    assert runner.plan(SetSpeed(4.0)).summary == "run at speed 4"
    assert runner.apply(SetSpeed(4.0)) == Outcome(ok=True, message="speed 4")
    clock.now_s += 0.1
    runner.turn()
    assert engine.step == 16
    assert runner.apply(SetSpeed(None)) == Outcome(ok=True, message="speed max")
    assert runner.observe(LOOK).snapshot.speed is None


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_speeds_that_make_no_sense_are_refused(engine: FakeEngine, speed: float) -> None:
    runner = EngineRunner(engine, speed=1.0)
    assert runner.plan(SetSpeed(speed)).refusal is not None
    outcome = runner.apply(SetSpeed(speed))
    assert not outcome.ok
    assert "above 0 and at most 1e+06" in outcome.message
    assert runner.observe(LOOK).snapshot.speed == 1.0


def test_zero_steps_are_refused(engine: FakeEngine) -> None:
    runner = EngineRunner(engine, paused=True)
    assert runner.apply(Step(0)) == Outcome(ok=False, message="step: steps 0: at least 1")


def test_other_commands_go_to_the_engine(engine: FakeEngine) -> None:
    runner = EngineRunner(engine, paused=True)
    assert runner.plan(Compact()).summary == "would compact"
    assert runner.apply(Compact()).message == "did compact"
    assert runner.plan(Resize(0)).refusal == "at least 1 block"
    assert runner.apply(Resize(0)) == Outcome(ok=False, message="at least 1 block")
    assert engine.calls == ["plan compact", "apply compact", "plan resize", "apply resize"]


# ---- observing


def test_an_observation_is_of_one_step(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, clock=clock)
    clock.now_s += 1
    runner.turn()
    assert "arrays" not in engine.calls  # nobody watches
    seen = runner.observe(Focus(seq_id=1, block_id=5))
    assert seen.snapshot.step == 40
    assert seen.device is not None
    assert set(seen.device.last_used.tolist()) == {40}
    assert seen.host is not None
    assert seen.focus_table is not None
    assert seen.focus_table.tolist() == [0, 1, 2]
    assert seen.focus_block == BlockHolders(5, ((1, 5),), 1)
    with pytest.raises(ValueError, match="read-only"):
        seen.device.state[0] = 1


def test_a_map_is_written_in_place_and_before_the_answer(engine: FakeEngine, clock: ManualClock) -> None:
    class Map:
        def __init__(self) -> None:
            self.places = (BlockArrays.empty(engine.num_blocks), BlockArrays.empty(engine.num_host))
            self.steps: list[tuple[int, bool]] = []

        def begin(self, step: int, num_device: int, num_host: int | None) -> tuple[BlockArrays, BlockArrays]:
            assert (num_device, num_host) == (engine.num_blocks, engine.num_host)
            self.steps.append((step, False))
            return self.places

        def finish(self) -> None:
            self.steps[-1] = (self.steps[-1][0], True)

    block_map = Map()
    runner = EngineRunner(engine, block_map=block_map, clock=clock)
    clock.now_s += 1
    runner.turn()
    assert block_map.steps == []
    seen = runner.observe(Focus(block_id=5))
    assert block_map.steps == [(40, True)]
    assert (seen.device, seen.host) == (None, None)
    assert seen.focus_block == BlockHolders(5, ((1, 5),), 1)
    assert all(set(place.last_used.tolist()) == {40} for place in block_map.places)


def test_nothing_is_copied_while_nothing_changes(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, paused=True, clock=clock)
    first, second = runner.observe(LOOK), runner.observe(LOOK)
    assert first.device is second.device
    runner.apply(Compact())
    third = runner.observe(LOOK)
    assert third.device is not first.device
    assert engine.calls.count("arrays") == 2


def test_those_who_ask_together_share_one_publication_and_its_snapshot(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, clock=clock)
    asked = [RunnerRequest(Focus(next_event=number)) for number in (0, 0, 7)]
    clock.now_s += 1
    runner._queue.extend(asked)
    runner.turn()
    first, second, third = (request.answer for request in asked)
    assert engine.calls.count("arrays") == 1
    assert first.snapshot is second.snapshot  # type: ignore[union-attr]
    assert first.snapshot is not third.snapshot  # type: ignore[union-attr]
    assert first.device is third.device  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cost_s", "observers", "speed", "wait_s"),
    [
        (0.0, 1, None, 0.05),
        (0.0004, 1, None, 0.05),
        (0.004, 1, None, 0.4),
        (0.004, 2, None, 0.8),
        (0.004, 4, None, 1.0),
        (3.0, 1, None, 1.0),
        (0.004, 4, 1.0, 0.05),
        (0.03, 4, 1.0, 0.3),
    ],
)
def test_publishing_takes_a_bounded_share_of_the_time(
    engine: FakeEngine, clock: ManualClock, cost_s: float, observers: int, speed: float | None, wait_s: float
) -> None:
    arrays = engine.arrays

    def slow(tier: Tier, into: BlockArrays | None = None) -> BlockArrays | None:
        clock.now_s += cost_s if tier == "device" else 0.0
        return arrays(tier, into)

    engine.arrays = slow  # type: ignore[method-assign]
    runner = EngineRunner(engine, speed=speed, clock=clock, max_steps=10**9)

    def advance(max_steps: int) -> int:
        clock.now_s += 0.02 if speed is None else 0.0
        engine.step += 1
        return 1

    engine.advance = advance  # type: ignore[method-assign]
    seen_s = []
    for _ in range(3):
        requests = [RunnerRequest(LOOK) for _ in range(observers)]
        runner._queue.extend(requests)
        while not requests[0].answered.is_set():
            clock.now_s += 0.0 if speed is None else 0.02
            runner.turn()
        assert all(request.answered.is_set() for request in requests)
        seen_s.append(clock.now_s)
    for before, after in itertools.pairwise(seen_s):
        assert wait_s <= after - before - cost_s + 1e-9 < wait_s + 0.05


def test_after_its_end_nobody_is_answered(engine: FakeEngine) -> None:
    runner = EngineRunner(engine)
    runner.retire()
    for ask in (lambda: runner.observe(LOOK), lambda: runner.apply(Pause()), lambda: runner.plan(Pause())):
        with pytest.raises(SourceError, match="the engine has stopped"):
            ask()
    assert engine.calls == []


def test_unknown_sequences_and_blocks_are_none(engine: FakeEngine) -> None:
    runner = EngineRunner(engine)
    seen = runner.observe(Focus(seq_id=77, block_id=engine.num_blocks))
    assert (seen.focus_table, seen.focus_block) == (None, None)
    assert runner.observe(Focus(block_id=-1)).focus_block is None


def test_events_from_the_one_asked_for(engine: FakeEngine) -> None:
    runner = EngineRunner(engine)
    for _ in range(3):
        runner.apply(Compact())

    def told(focus: Focus) -> list[int]:
        return [event.number for event in runner.observe(focus).snapshot.events]

    assert told(Focus(next_event=1)) == [1, 2]
    assert told(Focus(max_events=2)) == [1, 2]
    assert told(Focus(next_event=2, max_events=2)) == [2]
    assert told(Focus(max_events=0)) == []


def test_an_engine_without_sequences_is_idle(engine: FakeEngine) -> None:
    engine.num_running = 0
    runner = EngineRunner(engine)
    assert runner.observe(LOOK).snapshot.phase == "idle"


def test_notes_are_carried(engine: FakeEngine) -> None:
    runner = EngineRunner(engine, notes=("two rows were left out",))
    assert runner.observe(LOOK).snapshot.notes == ("two rows were left out",)


# ---- failures


def test_a_broken_law_pauses_and_is_told(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, clock=clock)
    engine.fail_with = broken_law()
    clock.now_s += 0.1
    runner.turn()
    seen = runner.observe(LOOK).snapshot
    assert (seen.phase, seen.counters.integrity_faults) == ("paused", 1)
    assert seen.notes == ("step 0: law 2: block 3 has ref_count 1, tables name it twice",)
    assert runner.apply(Compact()).ok
    assert runner.apply(Resume()).ok
    clock.now_s += 0.1
    runner.turn()
    assert engine.step == 4


def test_a_fault_that_the_engine_counted_counts_once(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, clock=clock, paused=True)

    def fail() -> None:
        engine.counters.integrity_faults += 1
        raise broken_law()

    engine.step_cost = fail
    outcome = runner.apply(Step(3))
    assert (outcome.ok, outcome.message[:27]) == (False, "0 of 3 steps: step 0: law 2")
    assert engine.counters.integrity_faults == 1


def test_a_failed_engine_can_still_be_looked_at(engine: FakeEngine, clock: ManualClock) -> None:
    runner = EngineRunner(engine, clock=clock)
    engine.fail_with = StorageError("the copy to the host failed")
    clock.now_s += 0.1
    assert runner.turn() == runner_module.MAX_IDLE_S
    assert runner.observe(LOOK).snapshot.phase == "failed: the copy to the host failed"
    for outcome in (runner.apply(Resume()), runner.apply(Step()), runner.apply(Compact())):
        assert not outcome.ok
        assert "the engine failed: the copy to the host failed" in outcome.message
    assert runner.plan(Compact()).refusal == "the engine failed: the copy to the host failed"
    assert "apply compact" not in engine.calls


def test_a_command_that_breaks_a_law_is_told(engine: FakeEngine) -> None:
    def fail(command: object) -> None:
        raise broken_law()

    engine.apply_with = fail
    runner = EngineRunner(engine)
    assert runner.apply(Compact()).message.startswith("compact: law 2")
    assert runner.observe(LOOK).snapshot.phase == "paused"


def test_an_engine_that_cannot_be_read_is_a_source_error(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = EngineRunner(engine)
    monkeypatch.setattr(engine, "arrays", lambda tier: 1 / 0)
    with pytest.raises(SourceError, match="cannot be read: ZeroDivisionError"):
        runner.observe(LOOK)


# ---- from other threads


def test_requests_of_other_threads(engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]) -> None:
    runner = started(EngineRunner(engine, speed=None))
    first = runner.observe(LOOK)
    assert runner.plan(Compact()).summary == "would compact"
    assert runner.apply(Pause()).ok
    step = runner.observe(LOOK).snapshot.step
    assert step > first.snapshot.step
    assert runner.apply(Step(500)).message == "500 steps"
    seen = runner.observe(LOOK)
    assert seen.snapshot.step == step + 500
    assert seen.device is not None
    assert set(seen.device.last_used.tolist()) == {(step + 500) % 128}


def test_publications_are_at_most_twenty_a_second(
    engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]
) -> None:
    runner = started(EngineRunner(engine, speed=None))
    began_s = time.monotonic()  # before the first one: an observer may be told of it late
    runner.observe(LOOK)
    for _ in range(6):
        seen = runner.observe(LOOK)
        assert seen.device is not None
        assert int(seen.device.last_used[0]) == seen.snapshot.step % 128
    assert time.monotonic() - began_s >= 6 * 0.05
    assert engine.calls.count("arrays") == 7


def test_a_paused_engine_sleeps(engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]) -> None:
    turns: list[float] = []
    runner = started(EngineRunner(engine, paused=True, on_turn=lambda: turns.append(time.monotonic())))
    runner.observe(LOOK)
    busy_s = time.process_time()
    before = len(turns)
    until(lambda: len(turns) >= before + 2, 5)
    assert turns[-1] - turns[before] > 0.3
    assert time.process_time() - busy_s < 0.3


def test_a_busy_engine_is_not_waited_for_longer_than_asked(
    engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]
) -> None:
    gate, entered = threading.Event(), threading.Event()

    def block(command: object) -> None:
        entered.set()
        assert gate.wait(10)

    engine.apply_with = block
    runner = started(EngineRunner(engine, paused=True))
    try:
        with pytest.raises(SourceError, match=r"no answer from the engine in 0.2 s; the request has begun and is not"):
            runner.apply(VerifyContents(), 0.2)
        assert entered.is_set()
        with pytest.raises(SourceError, match="the request was not begun"):
            runner.apply(Compact(), 0.05)
    finally:
        gate.set()
    assert runner.apply(Resize(4)).ok
    assert "apply compact" not in engine.calls  # given up before it began: never done


def test_a_full_queue_refuses(engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]) -> None:
    gate, entered = threading.Event(), threading.Event()

    def block(command: object) -> None:
        entered.set()
        assert gate.wait(10)

    engine.apply_with = block
    runner = started(EngineRunner(engine, paused=True))
    threads = [threading.Thread(target=runner.apply, args=(Compact(),)) for _ in range(MAX_QUEUED + 1)]
    try:
        threads[0].start()
        assert entered.wait(10)
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(runner._queue) == MAX_QUEUED)
        busy = "the engine is busy: 64 requests wait already"
        assert runner.apply(Compact()).message == f"compact: {busy}"
        assert runner.plan(Compact()).refusal == busy
        with pytest.raises(SourceError, match=busy):
            runner.observe(LOOK)
    finally:
        gate.set()
        for thread in threads:
            thread.join(10)
    assert engine.calls.count("apply compact") == MAX_QUEUED + 1


def test_a_pause_ends_a_long_step_command(engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]) -> None:
    runner = started(EngineRunner(engine, paused=True))
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(runner.apply(Step(10**9))))
    thread.start()
    until(lambda: engine.step > 100)
    assert runner.observe(LOOK).snapshot.step > 0
    runner.apply(Pause())
    thread.join(10)
    assert outcomes[0].message == f"{engine.step} of 1000000000 steps: paused"


def test_the_end_of_the_runner_ends_every_wait(engine: FakeEngine) -> None:
    runner = EngineRunner(engine, paused=True)
    stop = threading.Event()
    errors: list[str] = []

    def step_on() -> None:
        try:
            runner.apply(Step(10**9))
        except SourceError as error:
            errors.append(str(error))

    owner = threading.Thread(target=runner.run, args=(stop,))
    owner.start()
    until(lambda: runner._thread_id is not None)
    asker = threading.Thread(target=step_on)
    asker.start()
    until(lambda: engine.step > 0)
    stop.set()
    owner.join(10)
    asker.join(10)
    assert errors == ["the engine has stopped"]
    assert runner.observe(LOOK).snapshot.phase == "paused"  # answered directly again


def test_many_threads_at_once(engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]) -> None:
    """Every request gets its own answer, whoever asks and however often the engine publishes."""
    runner = started(EngineRunner(engine, speed=None))
    faults: list[BaseException] = []
    barrier = threading.Barrier(6)

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            barrier.wait(10)
            for _ in range(15):
                match rng.integers(3):
                    case 0:
                        seen = runner.observe(LOOK, 10)
                        assert seen.device is not None
                        assert set(seen.device.fill.tolist()) == {seen.snapshot.step % 128}
                    case 1:
                        assert runner.plan(Compact(), 10).summary == "would compact"
                    case _:
                        assert runner.apply(Resize(8 + seed), 10).message == "did resize"
        except BaseException as error:
            faults.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    assert not any(thread.is_alive() for thread in threads)


def test_a_claimed_engine_is_its_owners_alone(engine: FakeEngine) -> None:
    """Between the claim and the run, other threads wait instead of helping themselves."""
    runner = EngineRunner(engine, paused=True)
    runner.claim()
    errors: list[str] = []

    def ask() -> None:
        try:
            runner.apply(Compact(), 0.05)
        except SourceError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10)
    assert errors == ["no answer from the engine in 0.05 s; the request was not begun"]
    assert engine.calls == []
    assert runner.apply(Compact()).ok  # the owner itself does not wait for itself


def test_two_owners_are_refused(engine: FakeEngine, started: Callable[[EngineRunner], EngineRunner]) -> None:
    runner = started(EngineRunner(engine, paused=True))
    with pytest.raises(RuntimeError, match="runs the engine already"):
        runner.run(threading.Event())
