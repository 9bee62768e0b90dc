"""Pace: how many steps of an engine are due, how long a turn may take, and the step rate. Owns speed and batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

#: Seconds of engine work after which a turn ends, so that commands and observers are answered in time.
TURN_S: Final = 0.01
#: Calls of ``advance`` in one turn, at most.
MAX_BATCHES: Final = 1000
#: Seconds of a turn while somebody is being answered, and seconds since the last request for which that is so; and
#: turns after which other threads are let in otherwise.
_TALK_TURN_S: Final = 0.002
_TALK_S: Final = 0.02
_QUIET_TURNS: Final = 4
#: Seconds the engine may lag behind its pace before the lag is dropped.
_MAX_LAG_S: Final = 0.1
#: Steps one call of ``advance`` may cover, at first and at most. The number follows the time a call takes: a quiet
#: engine takes hundreds of steps in no time, a busy one must not hold up commands.
_FIRST_BATCH_STEPS: Final = 64
_MAX_BATCH_STEPS: Final = 256
#: Seconds over which the step rate is taken, and between its samples.
_RATE_WINDOW_S: Final = 1.0
_RATE_SAMPLE_S: Final = 0.1


class Pace:
    """The pace of one engine.

    Args:
        step: Where the engine is.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.
        clock: Real seconds, monotonic.
        step_s: Virtual seconds a step.

    Attributes:
        speed: As given; set anew by ``set_speed``.
        batch_steps: Steps that the next call of ``advance`` may cover.
        turn_s: Seconds of engine work after which this turn ends.
    """

    def __init__(self, step: int, *, speed: float | None, clock: Callable[[], float], step_s: float) -> None:
        self.speed = speed
        self.batch_steps = _FIRST_BATCH_STEPS
        self.turn_s = TURN_S
        self._clock, self._step_s = clock, step_s
        self._turns, self._talked_s = 0, -math.inf
        self._samples: deque[tuple[float, int]] = deque([(clock(), step)])
        self.restart(step)

    def restart(self, step: int) -> None:
        """Pace from here: what was not done until now is not caught up."""
        self._anchor_s, self._anchor_step = self._clock(), step

    def set_speed(self, speed: float | None, step: int) -> None:
        """Go at another speed from here on."""
        self.speed = speed
        self.restart(step)

    # ---- turns

    def talk(self) -> None:
        """Note that somebody asks: turns are short for a while."""
        self._talked_s = self._clock()

    def begin_turn(self) -> None:
        """Decide how long this turn may take."""
        self.turn_s = _TALK_TURN_S if self._clock() - self._talked_s < _TALK_S else TURN_S

    def lets_others_in(self) -> bool:
        """Return whether other threads are to be let in now that a turn is over and the next is due.

        An engine at full speed gives the interpreter's lock back and takes it again many times a turn, in its copies
        and sums. Each time, whoever waits for the lock begins to wait anew: it would get it after hundreds of
        milliseconds, rather than after the switch interval.
        """
        self._turns += 1
        return self._turns % _QUIET_TURNS == 0 or self.turn_s < TURN_S

    # ---- steps

    def due_steps(self, step: int, now_s: float, *, is_waiting: bool) -> int:
        """Return how many steps are due.

        Args:
            step: Where the engine is.
            now_s: Now.
            is_waiting: Whether it only waits for attached programs: that is no work, and goes at the pace of real time.
        """
        if self.speed is None:
            return 1 if is_waiting else MAX_BATCHES * _MAX_BATCH_STEPS
        # A hair is added: 0.1 / 0.025 must be 4 steps whatever the clock's last digit says.
        return self._anchor_step + math.floor((now_s - self._anchor_s) * self.speed / self._step_s + 1e-6) - step

    def wait_s(self, step: int, now_s: float, *, is_waiting: bool) -> float:
        """Return the seconds until the next step is due, 0 or less when it is. Arguments as in ``due_steps``."""
        if self.speed is None:
            return self._step_s if is_waiting else 0.0
        return self._anchor_s + (step + 1 - self._anchor_step) * self._step_s / self.speed - now_s

    def took(self, steps: int, seconds: float) -> None:
        """Fit the size of the next batch to what the last call of ``advance`` took."""
        if seconds > TURN_S / 2:
            # At once to what fits: a quiet engine may have become a thousand times as busy.
            self.batch_steps = max(1, min(self.batch_steps // 2, int(steps * TURN_S / 2 / seconds)))
        elif seconds < TURN_S / 8 and steps == self.batch_steps:
            self.batch_steps = min(_MAX_BATCH_STEPS, 2 * self.batch_steps)

    def drop_lag(self, step: int, left: int) -> None:
        """Drop the lag of an engine that is too slow for this pace, so that ``left`` steps were not taken in time."""
        if self.speed is not None and left * self._step_s / self.speed > _MAX_LAG_S:
            self.restart(step)  # the step rate tells

    # ---- the step rate

    def sample(self, step: int, now_s: float) -> None:
        """Note where the engine is, now and then."""
        samples = self._samples
        if now_s - samples[-1][0] < _RATE_SAMPLE_S:
            return
        samples.append((now_s, step))
        while len(samples) > 1 and samples[1][0] <= now_s - _RATE_WINDOW_S:
            samples.popleft()

    def steps_per_s(self, step: int) -> float | None:
        """Return the step rate of the last second; ``None`` before there is one."""
        now_s = self._clock()
        since_s, since_step = self._samples[0]
        if now_s - since_s < _RATE_SAMPLE_S:
            return None
        return (step - since_step) / (now_s - since_s)
