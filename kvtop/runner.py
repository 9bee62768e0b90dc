"""EngineRunner: paces an engine, and lets other threads ask of it. Owns the engine; only its thread touches it.

Requests from other threads wait in a bounded queue and are answered at a step boundary. An observation
makes the publication it needs, at most 20 a second, so an engine that nobody watches publishes nothing. Those who ask
meanwhile are answered together.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol, TypeAlias

import msgspec

from allocator.block_map import FIELDS, BlockArrays
from allocator.block_table import Listing
from allocator.commands import (
    Abort,
    Command,
    Compact,
    Pause,
    Resize,
    Resume,
    SetSpeed,
    Step,
    SwapIn,
    SwapOut,
    command_name,
)
from allocator.config import STEP_S
from allocator.errors import AllocatorError, InvariantViolation
from allocator.ids import IdArray, Tier
from allocator.plans import Outcome, Plan
from allocator.snapshot import Counters, Snapshot
from allocator.work import Work
from kvtop.errors import SourceError
from kvtop.model.lineage import lineage
from kvtop.model.observation import MAX_VICTIMS, BlockHolders, Focus, Observation

#: Seconds between two publications, at least; more where one takes long, so that they take no more than this share of
#: the engine's time, up to a bound that keeps the screen moving.
PUBLISH_EVERY_S: Final = 0.05
PUBLISH_SHARE: Final = 0.01
MAX_PUBLISH_EVERY_S: Final = 0.5
#: Seconds of engine work after which a turn ends, so that commands and observers are answered in time.
TURN_S: Final = 0.01
#: Seconds of such a turn while somebody is being answered, and seconds since the last request for which that is so; and
#: turns after which the others are let in otherwise.
_TALK_TURN_S: Final = 0.002
_TALK_S: Final = 0.02
_QUIET_TURNS: Final = 4
#: Seconds a turn may ask to sleep, at most: the engine's heartbeat stays young.
MAX_IDLE_S: Final = 0.5
MAX_QUEUED: Final = 64
MAX_SPEED: Final = 1e6
#: Seconds the engine may lag behind its pace before the lag is dropped.
_MAX_LAG_S: Final = 0.1
#: Steps one call of ``advance`` may cover, at first and at most, and calls in one turn. The number follows the time
#: a call takes: a quiet engine takes hundreds of steps in no time, a busy one must not hold up commands.
_FIRST_BATCH_STEPS: Final = 64
_MAX_BATCH_STEPS: Final = 256
_BATCHES: Final = 1000
#: Seconds over which the step rate is taken, and between its samples.
_RATE_WINDOW_S: Final = 1.0
_RATE_SAMPLE_S: Final = 0.1
_MAX_NOTES: Final = 16
#: Commands that copy blocks, slice by slice; and those that are done while one of them is in progress.
_SLICED: Final = (Compact, Resize, SwapOut, SwapIn)
_AT_ONCE: Final = (Abort, Pause, Resume, SetSpeed)


#: Which events an observer wants: from which number on, and how many of the newest are enough.
_Events: TypeAlias = tuple[int, int | None]


class SteppedEngine(Protocol):
    """What the runner needs of an engine; ``allocator.engine.Engine`` is one."""

    step: int

    @property
    def counters(self) -> Counters: ...

    @property
    def done(self) -> bool: ...

    @property
    def stuck_reason(self) -> str | None: ...

    @property
    def is_waiting(self) -> bool: ...

    @property
    def late_s(self) -> float | None: ...

    def rest(self) -> None: ...

    def advance(self, max_steps: int) -> int: ...

    def plan(self, command: Command) -> Plan: ...

    def apply(self, command: Command) -> Outcome: ...

    def snapshot(
        self,
        *,
        phase: str,
        speed: float | None,
        steps_per_s: float | None,
        next_event: int = 0,
        max_events: int | None = None,
    ) -> Snapshot: ...

    def pool_size(self, tier: Tier) -> int | None: ...

    def arrays(self, tier: Tier, into: BlockArrays | None = None) -> BlockArrays | None: ...

    def table(self, seq_id: int) -> IdArray | None: ...

    def holders(self, block_id: int, limit: int = 64) -> tuple[tuple[tuple[int, int], ...], int]: ...

    def next_victims(self, limit: int) -> tuple[int, ...]: ...

    def tables(self) -> Listing: ...


class MapWriter(Protocol):
    """Where publications go; ``allocator.block_map.BlockMapWriter`` is one."""

    def begin(self, step: int, num_device: int, num_host: int | None) -> tuple[BlockArrays, BlockArrays | None]: ...

    def finish(self) -> None: ...


class _State(Enum):
    QUEUED = "queued"
    TAKEN = "taken"
    ABANDONED = "abandoned"


class _Request:
    """One question of another thread; ``state`` changes under the queue's lock only."""

    __slots__ = ("answer", "answered", "error", "payload", "state", "wants_plan")

    def __init__(self, payload: Command | Focus, wants_plan: bool = False) -> None:
        self.payload = payload
        self.wants_plan = wants_plan
        self.state = _State.QUEUED
        self.answered = threading.Event()
        self.answer: Plan | Outcome | Observation | None = None
        self.error: str | None = None

    def finish(self, answer: Plan | Outcome | Observation | None, error: str | None = None) -> None:
        self.answer, self.error = answer, error
        self.answered.set()


class EngineRunner:
    """Runs one engine. ``turn`` is the whole loop body; ``run`` only repeats it.

    ``plan``, ``apply`` and ``observe`` may be called from any thread. While no thread is in ``run``, they are
    answered at once in the caller's thread: the way of tests and lessons, which call ``turn`` by hand.

    Args:
        engine: The engine; nobody else may touch it from here on.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.
        paused: Start paused.
        max_steps: Steps after which the run is done; ``None`` is no limit.
        notes: Lines for the user, carried by every snapshot.
        block_map: Where the arrays of each publication are written, before its observation is answered; without one
            they travel in the observation.
        on_turn: Called once a turn, such as to give a sign of life.
        clock: Real seconds, monotonic.
        step_s: Virtual seconds a step.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        *,
        speed: float | None = 1.0,
        paused: bool = False,
        max_steps: int | None = None,
        notes: tuple[str, ...] = (),
        block_map: MapWriter | None = None,
        on_turn: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_s: float = STEP_S,
    ) -> None:
        self.engine = engine
        self.failure: str | None = None
        #: An engine that is recorded keeps these commands too, though they are none of its own.
        self._note_pace: Callable[[Command, Outcome], object] = getattr(engine, "note_pace", lambda command, outcome: 0)
        self._speed = speed
        self._turns, self._talked_s, self._turn_s = 0, -math.inf, TURN_S
        self._paused = paused
        self._max_steps = max_steps
        self._notes = notes
        self._block_map = block_map
        self._on_turn = on_turn
        self._clock = clock
        self._step_s = step_s
        self._engine_lock = threading.RLock()
        self._stalled = False
        self._batch_steps = _FIRST_BATCH_STEPS
        self._stepping: tuple[_Request, int] | None = None  # a Step command and the step at which it ends
        self._work: tuple[_Request, Work] | None = None  # a command in progress, and what waits for its end
        self._deferred: deque[_Request] = deque()
        self._observers: list[_Request] = []
        self._arrays: tuple[BlockArrays | None, BlockArrays | None] = (None, None)
        self._arrays_are_current = False
        self._published_s = -math.inf
        self._publish_every_s = PUBLISH_EVERY_S
        self._rate_samples: deque[tuple[float, int]] = deque([(clock(), engine.step)])
        self._anchor()
        # The queue and who runs; the lock is reentrant so that a signal handler may call wake().
        self._wake = threading.Condition(threading.RLock())
        self._queue: deque[_Request] = deque()
        self._thread_id: int | None = None
        self._is_retired = False

    # ---- for any thread

    def plan(self, command: Command, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; a refusal is a plan with its reason.

        Raises:
            SourceError: The engine has stopped, or reached no step boundary in ``timeout_s``.
        """
        request = _Request(command, wants_plan=True)
        if not self._ask(request, timeout_s):
            return Plan(summary=command_name(command), refusal=_BUSY)
        assert isinstance(request.answer, Plan)
        return request.answer

    def apply(self, command: Command, timeout_s: float = 60.0) -> Outcome:
        """Do ``command`` at the next step boundary; a refusal is an outcome. ``Step`` ends when its steps are taken.

        Raises:
            SourceError: The engine has stopped, or the command was not finished in ``timeout_s``; the text says
                whether it had begun.
        """
        request = _Request(command)
        if not self._ask(request, timeout_s):
            return Outcome(ok=False, message=f"{command_name(command)}: {_BUSY}")
        assert isinstance(request.answer, Outcome)
        return request.answer

    def observe(self, focus: Focus, timeout_s: float = 2.0) -> Observation:
        """Return snapshot, arrays and focus of one and the same step boundary, at most 50 ms old when answered.

        Raises:
            SourceError: The engine has stopped, cannot be read, or reached no step boundary in ``timeout_s``.
        """
        request = _Request(focus)
        if not self._ask(request, timeout_s):
            raise SourceError(_BUSY)
        assert isinstance(request.answer, Observation)
        return request.answer

    def retire(self) -> None:
        """Answer nothing any more: from here on whoever asks is told that the engine has stopped."""
        with self._wake:
            self._is_retired = True

    @property
    def has_ended(self) -> bool:
        """Whether the steps asked for were taken."""
        return self._has_ended()

    @property
    def is_stalled(self) -> bool:
        """Whether the engine takes no step because nothing can happen, until a command or a program comes."""
        return self._stalled

    def wake(self) -> None:
        """End the runner's sleep, such as after setting its stop."""
        with self._wake:
            self._wake.notify_all()

    # ---- for the thread that owns the engine

    def claim(self) -> None:
        """Make the calling thread the engine's owner: other threads' requests wait for its ``run``.

        Raises:
            RuntimeError: Another thread owns the engine.
        """
        with self._wake:
            if self._thread_id not in (None, threading.get_ident()):
                raise RuntimeError("another thread runs the engine already")
            self._thread_id = threading.get_ident()

    def run(self, stop: threading.Event) -> None:
        """Repeat ``turn`` until ``stop`` is set, sleeping while nothing is due. Ends at most half a second later."""
        self.claim()
        try:
            while not stop.is_set():
                idle_s = self.turn()
                if idle_s > 0:
                    with self._wake:
                        if not self._queue and not stop.is_set():
                            self._wake.wait(idle_s)
                elif self._lets_others_in():
                    time.sleep(0)
        finally:
            with self._wake:
                self._thread_id = None
                left = [*self._queue, *self._observers, *self._deferred]
                self._queue.clear()
            self._observers.clear()
            self._deferred.clear()
            if self._work is not None:
                left.append(self._work[0])
                self._work = None
            if self._stepping is not None:
                left.append(self._stepping[0])
                self._stepping = None
            for request in left:
                request.finish(None, _STOPPED)

    def _lets_others_in(self) -> bool:
        """Return whether other threads are to be let in now that a turn is over and the next is due.

        An engine at full speed gives the interpreter's lock back and takes it again many times a turn, in its copies
        and sums. Each time, whoever waits for the lock begins to wait anew: it would get it after hundreds of
        milliseconds, rather than after the switch interval.
        """
        self._turns += 1
        return self._turns % _QUIET_TURNS == 0 or self._turn_s < TURN_S

    def turn(self) -> float:
        """Answer what was asked, take the steps that are due, and return the seconds that may be slept now."""
        with self._engine_lock:
            requests = self._take_requests()
            if requests:
                self._talked_s = self._clock()
            for request in requests:
                self._begin(request)
            self._turn_s = _TALK_TURN_S if self._clock() - self._talked_s < _TALK_S else TURN_S
            if self._stalled and self.engine.is_waiting:
                self._stalled = False  # an attached program came: time goes on
                self._anchor()
            if self._work is not None:
                self._go_on()
            else:
                self._take_due_steps()
                if self._paused and self._stepping is None:
                    self.engine.rest()
            if self._observers and self._publish_wait_s() <= 0:
                self._answer_observers()
            if self._on_turn is not None:
                self._on_turn()
            return self._idle_s()

    # ---- requests

    def _ask(self, request: _Request, timeout_s: float) -> bool:
        """Have ``request`` answered; false when the queue is full. A failed request raises."""
        with self._wake:
            if self._is_retired:
                raise SourceError(_STOPPED)
            is_direct = self._thread_id in (None, threading.get_ident())
            if not is_direct:
                if len(self._queue) >= MAX_QUEUED:
                    return False
                self._queue.append(request)
                self._wake.notify_all()
        if is_direct:
            self._answer_directly(request)
        elif not request.answered.wait(timeout_s):
            with self._wake:
                begun = request.state is _State.TAKEN
                if not begun:
                    request.state = _State.ABANDONED
            if not request.answered.is_set():
                what = "has begun and is not finished" if begun else "was not begun"
                raise SourceError(f"no answer from the engine in {timeout_s:g} s; the request {what}")
        if request.error is not None:
            raise SourceError(request.error)
        return True

    def _answer_directly(self, request: _Request) -> None:
        with self._engine_lock:
            self._begin(request)
            while self._work is not None and (self._work[0] is request or request in self._deferred):
                self._go_on()
            while self._stepping is not None and self._stepping[0] is request:
                self._take_due_steps()
            if self._paused and self._stepping is None:
                self.engine.rest()
            if request in self._observers:
                self._answer_observers()

    def _take_requests(self) -> list[_Request]:
        with self._wake:
            taken = [request for request in self._queue if request.state is _State.QUEUED]
            self._queue.clear()
            for request in taken:
                request.state = _State.TAKEN
        return taken

    def _begin(self, request: _Request) -> None:
        payload = request.payload
        if isinstance(payload, Focus):
            self._observers.append(request)
        elif request.wants_plan:
            request.finish(self._plan(payload))
        elif self._work is not None and not isinstance(payload, _AT_ONCE):
            self._deferred.append(request)
        elif isinstance(payload, Step):
            self._begin_steps(request, payload)
        elif isinstance(payload, _SLICED) and self._refusal(payload) is None and self._can_slice():
            self._begin_work(request, payload)
        else:
            outcome = self._apply(payload)
            if outcome.ok and isinstance(payload, Pause | Resume | SetSpeed):
                self._note_pace(payload, outcome)
            request.finish(outcome)

    def _plan(self, command: Command) -> Plan:
        refusal = self._refusal(command)
        if refusal is not None:
            return Plan(summary=command_name(command), refusal=refusal)
        match command:
            case Pause():
                return Plan(summary="stop stepping")
            case Resume():
                return Plan(summary="go on")
            case Step(steps):
                return Plan(summary=f"take {_count(steps, 'step')}, then stay paused")
            case SetSpeed(speed):
                return Plan(summary=f"run at speed {_speed_text(speed)}")
            case Abort():
                return Plan(summary=f"end {self._in_progress()}; what was moved stays moved")
        try:
            return self.engine.plan(command)
        except Exception as error:
            return Plan(summary=command_name(command), refusal=f"cannot be planned: {_describe(error)}")

    def _apply(self, command: Command) -> Outcome:
        refusal = self._refusal(command)
        if refusal is not None:
            return Outcome(ok=False, message=f"{command_name(command)}: {refusal}")
        match command:
            case Pause():
                self._end_steps("paused")
                self._paused = True
                return Outcome(ok=True, message="paused")
            case Resume():
                self._end_steps("resumed")
                self._paused = False
                self._stalled = False
                self._anchor()
                return Outcome(ok=True, message="running")
            case SetSpeed(speed):
                self._speed = speed
                self._anchor()
                return Outcome(ok=True, message=f"speed {_speed_text(speed)}")
            case Abort():
                assert self._work is not None
                self._work[1].cancel()
                return Outcome(ok=True, message=f"ends {self._in_progress()}")
        self._arrays_are_current = False
        if self._stalled:
            self._stalled = False
            self._anchor()
        faults = self.engine.counters.integrity_faults
        try:
            return self.engine.apply(command)
        except Exception as error:
            self._fail(error, faults)
            return Outcome(ok=False, message=f"{command_name(command)}: {_describe(error)}")

    def _refusal(self, command: Command) -> str | None:
        """Return why this command cannot be done at all, as far as the runner knows."""
        if self.failure is not None and not isinstance(command, Pause):
            return f"the engine failed: {self.failure}"
        match command:
            case Step(steps) if steps < 1:
                return f"steps {steps}: at least 1"
            case SetSpeed(speed) if speed is not None and not (0 < speed <= MAX_SPEED):
                return f"speed {speed}: above 0 and at most {MAX_SPEED:g}, or none for as fast as possible"
            case Step() | Resume() if self._has_ended():
                return "the run is done"
            case Abort() if self._work is None:
                return "no command is in progress"
        return None

    # ---- commands in slices

    def _can_slice(self) -> bool:
        """Return whether the engine does commands in slices; another does them whole."""
        return hasattr(self.engine, "begin")

    def _begin_work(self, request: _Request, command: Command) -> None:
        if self._stalled:
            self._stalled = False
            self._anchor()
        work: Work = self.engine.begin(command)  # type: ignore[attr-defined]
        self._work = (request, work)
        self._go_on()

    def _go_on(self) -> None:
        """Go on with the command in progress for a turn; at its end, begin what waited for that."""
        assert self._work is not None
        request, work = self._work
        began_s, faults = self._clock(), self.engine.counters.integrity_faults
        self._arrays_are_current = False
        outcome: Outcome | None = None
        try:
            while outcome is None:
                outcome = work.advance()
                if self._clock() - began_s >= self._turn_s:
                    break
        except Exception as error:
            self._fail(error, faults)
            outcome = Outcome(ok=False, message=f"{work.name}: {_describe(error)}")
        if outcome is None:
            return
        self._work = None
        request.finish(outcome)
        while self._deferred and self._work is None:
            self._begin(self._deferred.popleft())

    def _in_progress(self) -> str:
        assert self._work is not None
        progress = self._work[1].progress()
        return f"{progress.name} after {progress.done_blocks:,} of {progress.total_blocks:,} blocks"

    # ---- stepping

    def _begin_steps(self, request: _Request, command: Step) -> None:
        refusal = self._refusal(command)
        if refusal is not None:
            request.finish(Outcome(ok=False, message=f"step: {refusal}"))
            return
        self._end_steps("another step command came")
        self._paused = True
        self._stalled = False
        self._stepping = (request, self.engine.step + command.steps)
        self._note_pace(command, Outcome(ok=True, message=f"{_count(command.steps, 'step')} to take"))

    def _end_steps(self, reason: str) -> None:
        """Answer the ``Step`` command in progress, if there is one; ``reason`` is why it ends early, if it does."""
        if self._stepping is None:
            return
        (request, end), self._stepping = self._stepping, None
        assert isinstance(request.payload, Step)
        asked = request.payload.steps
        taken = asked - max(0, end - self.engine.step)
        text = _count(taken, "step") if taken == asked else f"{taken} of {_count(asked, 'step')}: {reason}"
        request.finish(Outcome(ok=taken > 0, message=text))

    def _take_due_steps(self) -> None:
        started_s = self._clock()
        due = self._due_steps(started_s)
        notes = self._notes
        for _ in range(_BATCHES):
            if due <= 0:
                break
            taken = self._advance(min(due, self._batch_steps))
            due = due - taken if taken else 0
            if self._clock() - started_s >= self._turn_s:
                break
        now_s = self._clock()
        if self._stepping is not None:
            if due <= 0:
                failed = self._notes[-1] if self._notes is not notes else None
                self._end_steps(failed or self.engine.stuck_reason or "the run is done")
        elif self._speed is not None and due * self._step_s / self._speed > _MAX_LAG_S:
            self._anchor()  # too slow for this pace: the lag is dropped, the step rate tells
        if now_s - self._rate_samples[-1][0] >= _RATE_SAMPLE_S:
            self._sample_rate(now_s)

    def _due_steps(self, now_s: float) -> int:
        if self.failure is not None or self._stalled or self._has_ended():
            return 0
        step = self.engine.step
        if self._stepping is not None:
            due = self._stepping[1] - step
        elif self._paused:
            return 0
        elif self._speed is None:
            # Waiting for attached programs is no work: it goes at the pace of real time.
            due = 1 if self.engine.is_waiting else _BATCHES * _MAX_BATCH_STEPS
        else:
            # A hair is added: 0.1 / 0.025 must be 4 steps whatever the clock's last digit says.
            due = self._anchor_step + math.floor((now_s - self._anchor_s) * self._speed / self._step_s + 1e-6) - step
        return due if self._max_steps is None else min(due, self._max_steps - step)

    def _advance(self, max_steps: int) -> int:
        faults = self.engine.counters.integrity_faults
        began_s = self._clock()
        try:
            taken = self.engine.advance(max_steps)
        except Exception as error:
            self._arrays_are_current = False
            self._fail(error, faults)
            return 0
        if taken:
            self._arrays_are_current = False
        else:
            self._stalled = self.engine.late_s is None
        took_s = self._clock() - began_s
        if took_s > TURN_S / 2:
            # At once to what fits: a quiet engine may have become a thousand times as busy.
            self._batch_steps = max(1, min(self._batch_steps // 2, int(taken * TURN_S / 2 / took_s)))
        elif took_s < TURN_S / 8 and taken == self._batch_steps:
            self._batch_steps = min(_MAX_BATCH_STEPS, 2 * self._batch_steps)
        return taken

    def _fail(self, error: Exception, faults_before: int) -> None:
        """Keep the news of a failure. A broken law pauses the run; anything else ends it."""
        text = _describe(error)
        note = f"step {self.engine.step}: {text}"
        self._notes = (*self._notes, note)[-_MAX_NOTES:]
        if isinstance(error, InvariantViolation):
            if self.engine.counters.integrity_faults == faults_before:
                self.engine.counters.integrity_faults += 1
            self._paused = True
        else:
            self.failure = text

    def _has_ended(self) -> bool:
        return self._max_steps is not None and self.engine.step >= self._max_steps

    def _anchor(self) -> None:
        """Pace from here: what was not done until now is not caught up."""
        self._anchor_s, self._anchor_step = self._clock(), self.engine.step

    def _idle_s(self) -> float:
        if self._work is not None:
            return 0.0
        now_s = self._clock()
        idle_s = MAX_IDLE_S
        if self._observers:
            idle_s = min(idle_s, self._publish_wait_s())
        if self.failure is None and not self._stalled and not self._has_ended():
            if self._stepping is not None:
                return 0.0
            if not self._paused:
                if self._speed is None:
                    return min(idle_s, self._step_s) if self.engine.is_waiting else 0.0
                next_s = self._anchor_s + (self.engine.step + 1 - self._anchor_step) * self._step_s / self._speed
                idle_s = min(idle_s, next_s - now_s)
        return max(0.0, idle_s)

    # ---- observing

    def _publish_wait_s(self) -> float:
        """Return the seconds until an observer can be answered with arrays of this very step."""
        if self._arrays_are_current:
            return 0.0
        return self._published_s + self._publish_every_s - self._clock()

    def _answer_observers(self) -> None:
        observers, self._observers = self._observers, []
        began_s, is_new = self._clock(), not self._arrays_are_current
        try:
            if is_new:
                self._publish()
        except Exception as error:
            for request in observers:
                request.finish(None, f"the engine cannot be read: {_describe(error)}")
            return
        snapshots: dict[_Events, Snapshot] = {}  # consoles in step share one
        for request in observers:
            assert isinstance(request.payload, Focus)
            try:
                request.finish(self._observation(request.payload, snapshots))
            except Exception as error:
                request.finish(None, f"the engine cannot be read: {_describe(error)}")
        if is_new:
            cost_s = self._clock() - began_s
            self._publish_every_s = min(max(PUBLISH_EVERY_S, cost_s / PUBLISH_SHARE), MAX_PUBLISH_EVERY_S)

    def _publish(self) -> None:
        engine = self.engine
        if self._block_map is None:
            self._arrays = (engine.arrays("device"), engine.arrays("host"))
            for arrays in self._arrays:
                if arrays is not None:
                    _freeze(arrays)
        else:
            # Straight into the map's own memory: fresh arrays for a large pool cost more than writing them.
            num_host = engine.pool_size("host")
            device, host = self._block_map.begin(engine.step, engine.pool_size("device") or 0, num_host)
            engine.arrays("device", device)
            if host is not None:
                engine.arrays("host", host)
            self._block_map.finish()
        self._arrays_are_current = True
        self._published_s = self._clock()

    def _observation(self, focus: Focus, snapshots: dict[_Events, Snapshot]) -> Observation:
        device, host = self._arrays
        engine = self.engine
        events = focus.next_event, focus.max_events
        snapshot = snapshots.get(events)
        if snapshot is None:
            snapshot = snapshots[events] = self._snapshot(*events)
        table = engine.table(focus.seq_id) if focus.seq_id is not None else None
        block = None
        if focus.block_id is not None and 0 <= focus.block_id < (engine.pool_size("device") or 0):
            holders, total = engine.holders(focus.block_id)
            block = BlockHolders(focus.block_id, holders, total)
        victims = engine.next_victims(min(focus.num_victims, MAX_VICTIMS)) if focus.num_victims > 0 else None
        kin = None
        if focus.lineage:
            ids = {row.row: row.seq_id for row in snapshot.sequences if row.row is not None}
            kin = lineage({ids[row]: table for row, table in engine.tables().each() if row in ids})
        return Observation(snapshot, device, host, table, block, victims, kin)

    def _snapshot(self, next_event: int, max_events: int | None) -> Snapshot:
        snapshot = self.engine.snapshot(
            phase=self._phase(),
            speed=self._speed,
            steps_per_s=self._rate(),
            next_event=next_event,
            max_events=max_events,
        )
        is_empty = snapshot.num_running + snapshot.num_waiting + snapshot.num_swapped == 0
        phase = "idle" if snapshot.phase == "running" and is_empty else snapshot.phase
        work = None if self._work is None else self._work[1].progress()
        return msgspec.structs.replace(snapshot, phase=phase, notes=(*snapshot.notes, *self._notes), work=work)

    def _phase(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self._has_ended() or self.engine.done:
            return "done"
        if self._paused:
            return "paused"
        if self._stalled and self.engine.stuck_reason is not None:
            return f"stuck: {self.engine.stuck_reason}"
        return "running"

    def _rate(self) -> float | None:
        now_s = self._clock()
        since_s, step = self._rate_samples[0]
        if now_s - since_s < _RATE_SAMPLE_S:
            return None
        return (self.engine.step - step) / (now_s - since_s)

    def _sample_rate(self, now_s: float) -> None:
        samples = self._rate_samples
        samples.append((now_s, self.engine.step))
        while len(samples) > 1 and samples[1][0] <= now_s - _RATE_WINDOW_S:
            samples.popleft()


_STOPPED: Final = "the engine has stopped"
_BUSY: Final = f"the engine is busy: {MAX_QUEUED} requests wait already"


def _freeze(arrays: BlockArrays) -> None:
    for name, _ in FIELDS:
        getattr(arrays, name).setflags(write=False)


def _describe(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, AllocatorError) else f"{type(error).__name__}: {text}"


def _speed_text(speed: float | None) -> str:
    return "max" if speed is None else f"{speed:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
