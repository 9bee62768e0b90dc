"""EngineRunner: runs an engine, and lets other threads ask of it. Owns the engine; only its thread touches it.

Requests from other threads wait in a bounded queue and are answered at a step boundary. ``Pace`` says how many steps
are due, ``Publication`` what observers are shown, and how often.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

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
from allocator.errors import InvariantViolation
from allocator.plans import Outcome, Plan
from allocator.snapshot import Snapshot
from allocator.work import Work
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.pacing import MAX_BATCHES, Pace
from kvtop.publication import MapWriter, Publication
from kvtop.runner_request import RequestState, RunnerRequest, describe
from kvtop.stepped_engine import SteppedEngine

#: Seconds a turn may ask to sleep, at most: the engine's heartbeat stays young.
MAX_IDLE_S: Final = 0.5
MAX_QUEUED: Final = 64
MAX_SPEED: Final = 1e6
_MAX_NOTES: Final = 16
#: Commands that copy blocks, slice by slice; and those that are done while one of them is in progress.
_SLICED: Final = (Compact, Resize, SwapOut, SwapIn)
_AT_ONCE: Final = (Abort, Pause, Resume, SetSpeed)


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
        self._paused = paused
        self._max_steps = max_steps
        self._notes = notes
        self._on_turn = on_turn
        self._clock = clock
        self._engine_lock = threading.RLock()
        self._stalled = False
        self._stepping: tuple[RunnerRequest, int] | None = None  # a Step command and the step at which it ends
        self._work: tuple[RunnerRequest, Work] | None = None  # a command in progress, and what waits for its end
        self._deferred: deque[RunnerRequest] = deque()
        self._pace = Pace(engine.step, speed=speed, clock=clock, step_s=step_s)
        self._publication = Publication(engine, self._snapshot, block_map, clock)
        # The queue and who runs; the lock is reentrant so that a signal handler may call wake().
        self._wake = threading.Condition(threading.RLock())
        self._queue: deque[RunnerRequest] = deque()
        self._thread_id: int | None = None
        self._is_retired = False

    # ---- for any thread

    def plan(self, command: Command, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; a refusal is a plan with its reason.

        Raises:
            SourceError: The engine has stopped, or reached no step boundary in ``timeout_s``.
        """
        request = RunnerRequest(command, wants_plan=True)
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
        request = RunnerRequest(command)
        if not self._ask(request, timeout_s):
            return Outcome(ok=False, message=f"{command_name(command)}: {_BUSY}")
        assert isinstance(request.answer, Outcome)
        return request.answer

    def observe(self, focus: Focus, timeout_s: float = 2.0) -> Observation:
        """Return snapshot, arrays and focus of one and the same step boundary, at most 50 ms old when answered.

        Raises:
            SourceError: The engine has stopped, cannot be read, or reached no step boundary in ``timeout_s``.
        """
        request = RunnerRequest(focus)
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
        return self._max_steps is not None and self.engine.step >= self._max_steps

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
                elif self._pace.lets_others_in():
                    time.sleep(0)
        finally:
            with self._wake:
                self._thread_id = None
                left = [*self._queue, *self._publication.observers, *self._deferred]
                self._queue.clear()
            self._publication.observers.clear()
            self._deferred.clear()
            if self._work is not None:
                left.append(self._work[0])
                self._work = None
            if self._stepping is not None:
                left.append(self._stepping[0])
                self._stepping = None
            for request in left:
                request.finish(None, _STOPPED)

    def turn(self) -> float:
        """Answer what was asked, take the steps that are due, and return the seconds that may be slept now."""
        with self._engine_lock:
            requests = self._take_requests()
            if requests:
                self._pace.talk()
            for request in requests:
                self._begin(request)
            self._pace.begin_turn()
            if self._stalled and self.engine.is_waiting:
                self._try_again()  # an attached program came: time goes on
            if self._work is not None:
                self._go_on()
            else:
                self._take_due_steps()
                if self._paused and self._stepping is None:
                    self.engine.rest()
            if self._publication.observers and self._publication.wait_s() <= 0:
                self._publication.answer(at_full_speed=self._at_full_speed)
            if self._on_turn is not None:
                self._on_turn()
            return self._idle_s()

    # ---- requests

    def _ask(self, request: RunnerRequest, timeout_s: float) -> bool:
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
                begun = request.state is RequestState.TAKEN
                if not begun:
                    request.state = RequestState.ABANDONED
            if not request.answered.is_set():
                what = "has begun and is not finished" if begun else "was not begun"
                raise SourceError(f"no answer from the engine in {timeout_s:g} s; the request {what}")
        if request.error is not None:
            raise SourceError(request.error)
        return True

    def _answer_directly(self, request: RunnerRequest) -> None:
        with self._engine_lock:
            self._begin(request)
            while self._work is not None and (self._work[0] is request or request in self._deferred):
                self._go_on()
            while self._stepping is not None and self._stepping[0] is request:
                self._take_due_steps()
            if self._paused and self._stepping is None:
                self.engine.rest()
            if request in self._publication.observers:
                self._publication.answer(at_full_speed=self._at_full_speed)

    def _take_requests(self) -> list[RunnerRequest]:
        with self._wake:
            taken = [request for request in self._queue if request.state is RequestState.QUEUED]
            self._queue.clear()
            for request in taken:
                request.state = RequestState.TAKEN
        return taken

    def _begin(self, request: RunnerRequest) -> None:
        payload = request.payload
        if isinstance(payload, Focus):
            self._publication.observers.append(request)
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
            return Plan(summary=command_name(command), refusal=f"cannot be planned: {describe(error)}")

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
                self._pace.restart(self.engine.step)
                return Outcome(ok=True, message="running")
            case SetSpeed(speed):
                self._pace.set_speed(speed, self.engine.step)
                return Outcome(ok=True, message=f"speed {_speed_text(speed)}")
            case Abort():
                assert self._work is not None
                self._work[1].cancel()
                return Outcome(ok=True, message=f"ends {self._in_progress()}")
        self._publication.outdate()
        self._try_again()
        faults = self.engine.counters.integrity_faults
        try:
            return self.engine.apply(command)
        except Exception as error:
            self._fail(error, faults)
            return Outcome(ok=False, message=f"{command_name(command)}: {describe(error)}")

    def _refusal(self, command: Command) -> str | None:
        """Return why this command cannot be done at all, as far as the runner knows."""
        if self.failure is not None and not isinstance(command, Pause):
            return f"the engine failed: {self.failure}"
        match command:
            case Step(steps) if steps < 1:
                return f"steps {steps}: at least 1"
            case SetSpeed(speed) if speed is not None and not (0 < speed <= MAX_SPEED):
                return f"speed {speed}: above 0 and at most {MAX_SPEED:g}, or none for as fast as possible"
            case Step() | Resume() if self.has_ended:
                return "the run is done"
            case Abort() if self._work is None:
                return "no command is in progress"
        return None

    # ---- commands in slices

    def _can_slice(self) -> bool:
        """Return whether the engine does commands in slices; another does them whole."""
        return hasattr(self.engine, "begin")

    def _begin_work(self, request: RunnerRequest, command: Command) -> None:
        self._try_again()
        work: Work = self.engine.begin(command)  # type: ignore[attr-defined]
        self._work = (request, work)
        self._go_on()

    def _go_on(self) -> None:
        """Go on with the command in progress for a turn; at its end, begin what waited for that."""
        assert self._work is not None
        request, work = self._work
        began_s, faults = self._clock(), self.engine.counters.integrity_faults
        self._publication.outdate()
        outcome: Outcome | None = None
        try:
            while outcome is None:
                outcome = work.advance()
                if self._clock() - began_s >= self._pace.turn_s:
                    break
        except Exception as error:
            self._fail(error, faults)
            outcome = Outcome(ok=False, message=f"{work.name}: {describe(error)}")
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

    def _begin_steps(self, request: RunnerRequest, command: Step) -> None:
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
        for _ in range(MAX_BATCHES):
            if due <= 0:
                break
            taken = self._advance(min(due, self._pace.batch_steps))
            due = due - taken if taken else 0
            if self._clock() - started_s >= self._pace.turn_s:
                break
        now_s = self._clock()
        if self._stepping is not None:
            if due <= 0:
                failed = self._notes[-1] if self._notes is not notes else None
                self._end_steps(failed or self.engine.stuck_reason or "the run is done")
        else:
            self._pace.drop_lag(self.engine.step, due)
        self._pace.sample(self.engine.step, now_s)

    def _due_steps(self, now_s: float) -> int:
        if self.failure is not None or self._stalled or self.has_ended:
            return 0
        step = self.engine.step
        if self._stepping is not None:
            due = self._stepping[1] - step
        elif self._paused:
            return 0
        else:
            due = self._pace.due_steps(step, now_s, is_waiting=self.engine.is_waiting)
        return due if self._max_steps is None else min(due, self._max_steps - step)

    def _advance(self, max_steps: int) -> int:
        faults = self.engine.counters.integrity_faults
        began_s = self._clock()
        try:
            taken = self.engine.advance(max_steps)
        except Exception as error:
            self._publication.outdate()
            self._fail(error, faults)
            return 0
        if taken:
            self._publication.outdate()
        else:
            self._stalled = self.engine.late_s is None
        self._pace.took(taken, self._clock() - began_s)
        return taken

    def _fail(self, error: Exception, faults_before: int) -> None:
        """Keep the news of a failure. A broken law pauses the run; anything else ends it."""
        text = describe(error)
        note = f"step {self.engine.step}: {text}"
        self._notes = (*self._notes, note)[-_MAX_NOTES:]
        if isinstance(error, InvariantViolation):
            if self.engine.counters.integrity_faults == faults_before:
                self.engine.counters.integrity_faults += 1
            self._paused = True
        else:
            self.failure = text

    def _try_again(self) -> None:
        """Let time go on from here if nothing could happen until now."""
        if self._stalled:
            self._stalled = False
            self._pace.restart(self.engine.step)

    def _idle_s(self) -> float:
        if self._work is not None:
            return 0.0
        now_s = self._clock()
        idle_s = MAX_IDLE_S
        if self._publication.observers:
            idle_s = min(idle_s, self._publication.wait_s())
        if self.failure is None and not self._stalled and not self.has_ended:
            if self._stepping is not None:
                return 0.0
            if not self._paused:
                wait_s = self._pace.wait_s(self.engine.step, now_s, is_waiting=self.engine.is_waiting)
                idle_s = min(idle_s, wait_s)
        return max(0.0, idle_s)

    # ---- observing

    @property
    def _at_full_speed(self) -> bool:
        return self._stepping is not None or (not self._paused and self._pace.speed is None)

    def _snapshot(self, next_event: int, max_events: int | None) -> Snapshot:
        snapshot = self.engine.snapshot(
            phase=self._phase(),
            speed=self._pace.speed,
            steps_per_s=self._pace.steps_per_s(self.engine.step),
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
        if self.has_ended or self.engine.done:
            return "done"
        if self._paused:
            return "paused"
        if self._stalled and self.engine.stuck_reason is not None:
            return f"stuck: {self.engine.stuck_reason}"
        return "running"


_STOPPED: Final = "the engine has stopped"
_BUSY: Final = f"the engine is busy: {MAX_QUEUED} requests wait already"


def _speed_text(speed: float | None) -> str:
    return "max" if speed is None else f"{speed:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
