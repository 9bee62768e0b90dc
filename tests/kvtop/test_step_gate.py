"""StepGate: readings between steps, while the engine works, rests, or is in the middle of one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvtop.errors import SourceError
from kvtop.plugins.step_gate import StepGate

TIMEOUT_S = 20.0


class Counted:
    """An engine whose state is two numbers that are equal between steps."""

    def __init__(self) -> None:
        self.left = self.right = 0
        self.in_between: Callable[[], None] = lambda: None
        self.reading: Callable[[], None] = lambda: None
        self.is_idle = False
        self.gate: StepGate[tuple[int, int]] = StepGate(self.collect, lambda: self.is_idle)
        self.step = self.gate.guard(self._step, read="after", is_step=True)
        self.change = self.gate.guard(self._step)

    def _step(self) -> str:
        self.left += 1
        self.in_between()
        self.right += 1
        return "done"

    def collect(self) -> tuple[int, int]:
        left = self.left
        self.reading()
        return left, self.right


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_an_idle_engine_is_read_at_once_in_the_readers_thread() -> None:
    engine = Counted()
    engine.is_idle = True
    assert engine.gate.read(TIMEOUT_S) == (0, 0)
    assert engine.step() == "done"
    assert engine.gate.steps == 1
    assert engine.gate.read(TIMEOUT_S) == (1, 1)


def test_a_step_that_nobody_asks_in_reads_nothing() -> None:
    engine = Counted()
    engine.reading = lambda: pytest.fail("nobody asked")
    engine.step()


def test_a_busy_engine_reads_for_itself_at_the_end_of_a_step() -> None:
    engine = Counted()
    by: list[int] = []
    engine.reading = lambda: by.append(threading.get_ident())
    inside, go_on = threading.Event(), threading.Event()

    def stop_inside() -> None:
        inside.set()
        assert go_on.wait(TIMEOUT_S)

    engine.in_between = stop_inside
    thread = in_thread(engine.step)
    assert inside.wait(TIMEOUT_S)
    found: list[tuple[int, int]] = []
    reader = in_thread(lambda: found.append(engine.gate.read(TIMEOUT_S)))
    while not engine.gate._wanted:
        pass
    go_on.set()
    reader.join(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert found == [(1, 1)]
    assert by == [thread.ident]


def test_a_reading_that_a_step_ran_into_is_thrown_away() -> None:
    engine = Counted()
    engine.is_idle = True
    times: list[int] = []

    def step_meanwhile() -> None:
        times.append(1)
        if len(times) == 1:
            engine.change()

    engine.reading = step_meanwhile
    assert engine.gate.read(TIMEOUT_S) == (1, 1)
    assert len(times) == 2


def test_a_reading_that_failed_because_a_step_ran_into_it_is_made_again() -> None:
    engine = Counted()
    engine.is_idle = True
    times: list[int] = []

    def fail_once() -> None:
        times.append(1)
        if len(times) == 1:
            engine.change()
            raise RuntimeError("dictionary changed size during iteration")

    engine.reading = fail_once
    assert engine.gate.read(TIMEOUT_S) == (1, 1)


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_failed_reading_is_the_readers_and_not_the_engines(is_idle: bool) -> None:
    engine = Counted()
    engine.is_idle = is_idle

    def fail() -> None:
        raise ValueError("broken")

    engine.reading = fail
    stop = threading.Event()
    thread = in_thread(lambda: [engine.step() for _ in iter(stop.is_set, True)] if not is_idle else None)
    with pytest.raises(ValueError, match="broken"):
        engine.gate.read(TIMEOUT_S)
    stop.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_step_that_does_not_end_is_not_waited_for_longer_than_told() -> None:
    engine = Counted()
    inside, go_on = threading.Event(), threading.Event()

    def stop_inside() -> None:
        inside.set()
        assert go_on.wait(TIMEOUT_S)

    engine.in_between = stop_inside
    thread = in_thread(engine.step)
    assert inside.wait(TIMEOUT_S)
    with pytest.raises(SourceError, match="no step"):
        engine.gate.read(0.01)
    go_on.set()
    thread.join(TIMEOUT_S)
    engine.reading = lambda: pytest.fail("nobody waits any more")
    engine.in_between = lambda: None
    engine.step()


def test_what_the_engine_raises_is_its_own() -> None:
    engine = Counted()

    def fail() -> None:
        raise KeyError("theirs")

    engine.in_between = fail
    with pytest.raises(KeyError, match="theirs"):
        engine.step()
    engine.in_between = lambda: None
    engine.right = engine.left
    engine.is_idle = True
    assert engine.gate.read(TIMEOUT_S) == (1, 1)
