"""The loop without a screen: bounds, pacing, stops and endings, on an engine that follows a script."""

from __future__ import annotations

import pytest

from allocator.config import STEP_S
from allocator.errors import InvariantViolation
from allocator.snapshot import Counters
from kvtop.check import PATIENCE_STEPS, ProgressWatch
from kvtop.driving import DEFAULT_STEPS, Bounds, Drive, Ending, bounds_for, drive
from kvtop.engine_setup import EngineOptions
from kvtop.errors import UserError


class ScriptedEngine:
    """Takes ``turn`` steps a turn until ``length`` steps, then is done, or stuck."""

    def __init__(
        self, length: int, turn: int = 1, stuck_reason: str | None = None, fault_at: int | None = None
    ) -> None:
        self.step = 0
        self.length = length
        self.turn = turn
        self.stuck_reason: str | None = None
        self.is_waiting = False
        self.late_s: float | None = None
        self.counters = Counters()
        self.asked: list[int] = []
        self._why = stuck_reason
        self._fault_at = fault_at

    @property
    def time_s(self) -> float:
        return self.step * STEP_S

    @property
    def done(self) -> bool:
        return self.step >= self.length and self._why is None

    def advance(self, max_steps: int) -> int:
        self.asked.append(max_steps)
        if self._fault_at is not None and self.step >= self._fault_at:
            raise InvariantViolation(2, "block 3 has 1 holder and counts 2")
        taken = min(self.turn, max_steps, self.length - self.step)
        if taken == 0:
            self.stuck_reason = self._why
        self.step += taken
        return taken


class Clock:
    """Real time that passes only when somebody sleeps, or by ``tick`` a look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now_s = 0.0
        self.tick = tick
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.now_s += self.tick
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now_s += duration_s


def run(engine: ScriptedEngine, bounds: Bounds | None = None, **settings: object) -> Drive:
    clock = settings.pop("clock", None) or Clock()
    defaults = {"speed": None, "stop": lambda: None, "after_turn": lambda now_s: None}
    return drive(engine, bounds or Bounds(), **{**defaults, **settings}, clock=clock, sleep=clock.sleep)


def test_ends_when_every_request_has():
    engine = ScriptedEngine(length=10, turn=3)
    assert run(engine).ending is Ending.DONE
    assert engine.step == 10


def test_takes_exactly_the_steps_asked_for():
    engine = ScriptedEngine(length=1000, turn=7)
    assert run(engine, Bounds(steps=20)).ending is Ending.STEPS
    assert engine.step == 20


def test_steps_are_counted_from_where_the_engine_stands():
    engine = ScriptedEngine(length=1000)
    run(engine, Bounds(steps=5))
    run(engine, Bounds(steps=5))
    assert engine.step == 10


def test_ends_after_the_real_time_asked_for():
    clock = Clock(tick=0.1)
    driven = run(ScriptedEngine(length=10**9), Bounds(duration_s=2.0), clock=clock)
    assert driven.ending is Ending.DURATION
    assert 2.0 <= clock.now_s < 2.5


def test_an_engine_that_cannot_progress_is_stuck_not_done():
    engine = ScriptedEngine(length=4, stuck_reason="no block can be freed")
    assert run(engine).ending is Ending.STUCK
    assert engine.stuck_reason == "no block can be freed"


def test_a_stop_ends_it_between_two_turns():
    engine = ScriptedEngine(length=1000)
    driven = run(engine, stop=lambda: Ending.INTERRUPTED if engine.step == 6 else None)
    assert driven.ending is Ending.INTERRUPTED
    assert engine.step == 6


def test_a_broken_law_ends_it_and_is_kept():
    driven = run(ScriptedEngine(length=1000, fault_at=3))
    assert driven.ending is Ending.FAULT
    assert driven.fault is not None
    assert driven.fault.law == 2


def test_a_law_broken_in_the_check_after_a_turn_ends_it_too():
    def check(_now_s: float) -> None:
        raise InvariantViolation(5, "contents")

    driven = run(ScriptedEngine(length=1000), after_turn=check)
    assert driven.ending is Ending.FAULT


def test_every_turn_of_a_check_covers_one_step():
    engine = ScriptedEngine(length=6, turn=100)
    turns = []
    run(engine, after_turn=lambda now_s: turns.append(engine.step), max_turn=1)
    assert turns == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("speed", [0.5, 1.0, 20.0])
def test_virtual_time_is_paced_to_real_time(speed):
    clock = Clock()
    engine = ScriptedEngine(length=400, turn=400)
    run(engine, speed=speed, clock=clock)
    assert clock.now_s == pytest.approx(400 * STEP_S / speed, rel=0.1)
    assert max(clock.slept) <= 0.05, "a signal must be noticed soon"


def test_as_fast_as_possible_never_sleeps():
    clock = Clock()
    run(ScriptedEngine(length=400), clock=clock)
    assert clock.slept == []


def test_engine_time_is_what_passed_inside_advance():
    clock = Clock()
    engine = ScriptedEngine(length=10)
    advance = engine.advance

    def slow(max_steps: int) -> int:
        clock.now_s += 0.5
        return advance(max_steps)

    engine.advance = slow  # type: ignore[method-assign]

    def look(_now_s: float) -> None:
        clock.now_s += 3.0

    assert run(engine, Bounds(steps=4), clock=clock, after_turn=look).engine_s == pytest.approx(2.0)


def test_an_endless_workload_is_bounded_and_says_so():
    bounds, notes = bounds_for(EngineOptions(), Bounds())
    assert bounds == Bounds(steps=DEFAULT_STEPS)
    assert "never ends" in notes[0]
    assert bounds_for(EngineOptions(), Bounds(duration_s=1.0)) == (Bounds(duration_s=1.0), ())
    assert bounds_for(EngineOptions(trace="t.jsonl"), Bounds()) == (Bounds(), ())


def test_until_done_needs_an_end():
    with pytest.raises(UserError, match="--until-done"):
        bounds_for(EngineOptions(), Bounds(until_done=True))


def test_the_progress_law_is_broken_by_standing_still_with_work_at_hand():
    engine = ScriptedEngine(length=10**6)
    engine.counters.submitted = 2
    watch = ProgressWatch(engine)
    watch.after_turn()
    engine.step = PATIENCE_STEPS - 1
    watch.after_turn()
    engine.counters.generated_tokens += 1
    engine.step = PATIENCE_STEPS
    watch.after_turn()  # it moved
    engine.step = 2 * PATIENCE_STEPS
    with pytest.raises(InvariantViolation, match="2 unfinished"):
        watch.after_turn()


def test_the_progress_law_holds_while_there_is_nothing_to_do():
    engine = ScriptedEngine(length=10**6)
    engine.counters.submitted = engine.counters.finished = 3
    watch = ProgressWatch(engine)
    watch.after_turn()
    engine.step = 10 * PATIENCE_STEPS
    watch.after_turn()
