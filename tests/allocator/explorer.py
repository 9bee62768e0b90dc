"""Interleaving explorer: runs short programs in real threads, one at a time, and reports the schedule that broke a law.

Yield points are the source lines of ``WATCHED`` modules, seen through ``sys.settrace``, and every wait for the
pool's lock, which is swapped for one that hands over instead of blocking; production code knows nothing of it.

A run is decided by its choices alone: wherever two threads or more could go on, the number of the one that
does. The same choices give the same run, so a failure prints them and ``replay`` repeats it.
"""

from __future__ import annotations

import gc
import linecache
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from allocator import invariants, reservation
from allocator.block_table import BlockTables
from allocator.errors import InvariantViolation, OutOfBlocks
from allocator.facts import FREE, HOLDERS_MASK, SOLE
from allocator.reservation import SharedPool

#: Modules whose lines are yield points unless a scenario names others.
WATCHED: Final[tuple[ModuleType, ...]] = (reservation,)
#: Bound on the points of one run: a program that needs more is caught in a loop.
MAX_POINTS: Final = 20_000
#: Bound on each wait of a real thread for its turn. [s]
MAX_WAIT_S: Final = 20.0


class LawBrokenError(AssertionError):
    """A schedule broke a law. Its text holds the law, the seed if there is one, the choices, and every switch.

    Attributes:
        law: What was broken.
        choices: What ``replay`` needs to repeat the run.
    """

    def __init__(self, scenario: str, law: str, seed: int | None, choices: Sequence[int], switches: list[str]) -> None:
        self.law, self.choices = law, tuple(choices)
        origin = "" if seed is None else f"seed {seed}, "
        super().__init__(
            "\n  ".join([f"{scenario}: {law}", f'{origin}replay choices "{pack(choices)}"', *switches, "← here"])
        )


class BrokenError(Exception):
    """A law does not hold; raised where it is noticed."""


class _Abandoned(BaseException):
    """Unwinds a program whose run is over."""


class Step(NamedTuple):
    """One finished call of a program, as the linear-order check sees it.

    Attributes:
        thread: Its thread.
        kind: ``allocate``, ``release``, ``pin`` or ``unpin``.
        n: Blocks asked for or named.
        ids: Blocks got or named; ``None`` for an allocation that failed.
        called: Time of the call, on a clock that counts calls and returns.
        returned: Time of its return.
    """

    thread: int
    kind: str
    n: int
    ids: frozenset[int] | None
    called: int
    returned: int

    def __str__(self) -> str:
        got = "no blocks" if self.ids is None else sorted(self.ids)
        return f"thread {self.thread}: {self.kind}({self.n}) → {got} [{self.called}–{self.returned}]"


class Chooser(Protocol):
    """Decides which of several threads goes on."""

    def __call__(self, current: int | None, enabled: list[int]) -> int: ...


Program = Callable[["Client"], None]


@dataclass(frozen=True)
class Scenario:
    """What to explore.

    Attributes:
        name: Named in failures.
        build: Makes the pool of one run.
        programs: One for each thread.
        watched: Modules whose lines are yield points.
        opcodes: Whether every bytecode instruction is one too.
        in_order: Whether results must be those of some order of the calls, one after the other.
    """

    name: str
    build: Callable[[], SharedPool]
    programs: tuple[Program, ...]
    watched: tuple[ModuleType, ...] = WATCHED
    opcodes: bool = False
    in_order: bool = True


class Client:
    """One thread's calls; checks each result, and keeps what the thread holds.

    Attributes:
        held: What it holds now, one list an allocation, oldest first.
    """

    def __init__(self, run: Run, number: int) -> None:
        self._run, self._number = run, number
        self.pool = run.pool
        self.held: list[list[int]] = []

    def allocate(self, n: int) -> bool:
        """Allocate and keep ``n`` blocks; return whether there were as many."""
        run = self._run
        called = run.tick()
        try:
            ids = [int(block) for block in self.pool.allocate(n)]
        except OutOfBlocks:
            run.note(self._number, "allocate", n, None, called)
            return False
        if len(ids) != n:
            raise BrokenError(f"{n} blocks asked for, {len(ids)} got")
        for block in ids:
            if block in run.owner:
                raise BrokenError(
                    f"block {block} given to thread {self._number} while thread {run.owner[block]} holds it"
                )
            run.owner[block] = self._number
        run.check_held(ids)
        run.note(self._number, "allocate", n, ids, called)
        self.held.append(ids)
        return True

    def release(self, which: int = 0) -> None:
        """Release what an allocation gave, the oldest by default; nothing if nothing is held."""
        if self.held:
            ids = self.held.pop(which)
            self._run.check_held(ids)
            for block in ids:
                del self._run.owner[block]
            self._note("release", ids, lambda: self.pool.release(ids))

    def release_all(self) -> None:
        """Release everything held, oldest first."""
        while self.held:
            self.release()

    def pin(self, *block_ids: int) -> None:
        """Pin blocks."""
        self._note("pin", block_ids, lambda: self.pool.pin(np.array(block_ids)))

    def unpin(self, *block_ids: int) -> None:
        """Unpin blocks."""
        self._note("unpin", block_ids, lambda: self.pool.unpin(np.array(block_ids)))

    def end_thread(self) -> None:
        """Do what the end of a thread does to its reservation: drop its thread-local values."""
        self.pool._local.__dict__.clear()

    def _note(self, kind: str, ids: Sequence[int], call: Callable[[], None]) -> None:
        called = self._run.tick()
        call()
        self._run.note(self._number, kind, len(ids), ids, called)


class _HandingOverLock:
    """A re-entrant lock for one thread at a time: whoever would block lets another thread run instead."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        me = self._run.number()
        if self.owner != me:
            if blocking:
                self._run.wait_for(self, me)
            elif self.owner is not None:
                return False
            self.owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self.owner != self._run.number() and not self._run.over:
            raise RuntimeError("cannot release a lock that another thread holds")
        self._depth -= 1
        if self._depth == 0:
            self.owner = None


@dataclass
class _Thread:
    """One program's thread and its turn."""

    program: Program
    client: Client
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits_for: _HandingOverLock | None = None
    finished: bool = False
    real: threading.Thread | None = None

    @property
    def enabled(self) -> bool:
        return not self.finished and (self.waits_for is None or self.waits_for.owner is None)


class Run:
    """One run of a scenario.

    Attributes:
        pool: The scenario's pool.
        owner: Thread that holds each held block.
        choices: Decisions so far.
        decisions: The same with who was running and who could have: ``(current, enabled, chosen)``.
        over: Whether threads have stopped taking turns.
    """

    MAIN: Final = -1

    def __init__(self, scenario: Scenario, choose: Chooser) -> None:
        self.scenario = scenario
        self.over = True  # until it starts: building takes the lock as it likes
        self._local = threading.local()
        self._lock = _HandingOverLock(self)
        with _instead_of_rlock(self._lock):
            self.pool = scenario.build()
        self.owner: dict[int, int] = {}
        self.decisions: list[tuple[int | None, list[int], int]] = []
        self.switches: list[str] = []
        self._choose = choose
        self._clock = self._points = 0
        self._steps: list[Step] = []
        self._broken: str | None = None
        self._done = threading.Semaphore(0)
        self._files = {module.__file__ for module in scenario.watched}
        self._last_point = "start"
        self._threads = [_Thread(program, Client(self, i)) for i, program in enumerate(scenario.programs)]

    @property
    def choices(self) -> list[int]:
        return [chosen for _, _, chosen in self.decisions]

    def start(self, seed: int | None = None) -> None:
        """Run to the end and check every law.

        Raises:
            LawBrokenError: One does not hold.
        """
        for number, thread in enumerate(self._threads):
            thread.real = threading.Thread(target=self._work, args=(number,), daemon=True)
            thread.real.start()
        self.over = False
        with _unraisable(self._break), _no_collection():
            self._go_on(None, "start")
            if not self._done.acquire(timeout=MAX_WAIT_S):
                self._break(f"a thread did not reach its next point within {MAX_WAIT_S:g} s")
            self.over = True
            self._lock.owner, self._lock._depth = None, 0
            if self._broken is None:
                try:
                    self._check_end()
                except (InvariantViolation, BrokenError) as error:
                    self._break(str(error))
                except Exception as error:
                    self._break(f"{type(error).__name__} at the end: {error}")
            # One after the other: each drops its reservation as it ends, and the lock excludes nobody by now.
            for thread in self._threads:
                thread.turn.release()
                assert thread.real is not None
                thread.real.join(MAX_WAIT_S)
        if self._broken is not None:
            raise LawBrokenError(self.scenario.name, self._broken, seed, self.choices, self.switches)

    # -- called by the running thread -----------------------------------------------------------------

    def number(self) -> int:
        """Return the calling thread's number."""
        number: int = getattr(self._local, "number", self.MAIN)
        return number

    def tick(self) -> int:
        """Return the next time of the clock of calls and returns."""
        self._clock += 1
        return self._clock

    def note(self, thread: int, kind: str, n: int, ids: Iterable[int] | None, called: int) -> None:
        """Note a call that returned."""
        self._steps.append(Step(thread, kind, n, None if ids is None else frozenset(ids), called, self.tick()))

    def check_held(self, ids: Sequence[int]) -> None:
        """Check that blocks about to be used or released are marked as held once."""
        for block in ids:
            if self.pool.pool.facts.state_bytes[block] & HOLDERS_MASK != SOLE:
                raise BrokenError(f"block {block} is held, its state is {self.pool.pool.facts.state_bytes[block]}")

    def wait_for(self, lock: _HandingOverLock, me: int) -> None:
        """Let others run until ``lock`` is free."""
        if self.over:
            return
        self._point(me, "waits for the lock" if lock.owner is not None else "takes the lock")
        while lock.owner is not None and not self.over:
            self._threads[me].waits_for = lock
            self._hand_over(me, "waits for the lock")
        self._threads[me].waits_for = None

    def _point(self, me: int, point: str) -> None:
        if self.over:
            if self._broken is not None:
                raise _Abandoned
            return
        self._points += 1
        if self._points > MAX_POINTS:
            self._break(f"no end after {MAX_POINTS} points")
            self._done.release()
            raise _Abandoned
        self._hand_over(me, point)

    def _hand_over(self, me: int, point: str) -> None:
        self._last_point = point
        chosen = self._go_on(me, point)
        if chosen == me:
            return
        if not self._threads[me].turn.acquire(timeout=MAX_WAIT_S):
            self._break("a thread waited too long for its turn")
        if self.over:
            raise _Abandoned

    def _go_on(self, me: int | None, point: str) -> int | None:
        """Choose who runs next and wake it; return its number, ``None`` if nobody can."""
        enabled = [number for number, thread in enumerate(self._threads) if thread.enabled]
        if not enabled:
            if not all(thread.finished for thread in self._threads):
                self._break("deadlock: every thread waits for the lock")
            self.over = self.over or self._broken is not None
            self._done.release()
            return None
        current = me if me in enabled else None
        chosen = enabled[0]
        if len(enabled) > 1:
            chosen = self._choose(current, enabled)
            self.decisions.append((current, enabled, chosen))
        if chosen != me:
            if me is not None:
                self.switches.append(f"thread {me} @ {point}")
            self._threads[chosen].turn.release()
        return chosen

    def _work(self, number: int) -> None:
        thread = self._threads[number]
        self._local.number = number
        thread.turn.acquire(timeout=MAX_WAIT_S)
        if self.over:
            return
        try:
            sys.settrace(self._trace)
            thread.program(thread.client)
        except _Abandoned:
            return
        except BrokenError as error:
            self._stop(number, str(error))
        except BaseException as error:
            self._stop(number, f"thread {number} raised {type(error).__name__}: {error}")
        else:
            sys.settrace(None)
            thread.finished = True
            self._go_on(number, "end")
        finally:
            sys.settrace(None)
        # Ending for real drops this thread's reservation: only after the checks.
        thread.turn.acquire(timeout=MAX_WAIT_S)

    def _stop(self, number: int, law: str) -> None:
        if self._broken is None:
            self.switches.append(f"thread {number} @ {self._last_point}")
        self._break(law)
        self.over = True
        self._done.release()

    def _break(self, law: str) -> None:
        if self._broken is None:
            self._broken = law

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = self.scenario.opcodes
        return self._trace_lines

    def _trace_lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" or event == "opcode":
            self._point(self.number(), _name(frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno))
        return self._trace_lines

    # -- laws --------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        shared, pool = self.pool, self.pool.pool
        held = sorted(self.owner)
        self.check_held(held)
        if self.scenario.in_order:
            check_order(self._steps, pool.num_blocks)
        got = sum(step.n for step in self._steps if step.kind == "allocate" and step.ids is not None)
        given_back = sum(step.n for step in self._steps if step.kind == "release")
        for name, counted, claimed in (
            ("allocated", got, pool.num_allocated + sum(r.handed_out for r in shared._reservations)),
            ("freed", given_back, pool.num_freed + sum(r.taken_back for r in shared._reservations)),
        ):
            if counted != claimed:
                raise BrokenError(f"{counted} blocks were {name}, the pool counts {claimed}")
        tables = BlockTables()
        if held:
            tables.new_row(np.array(held, np.int64), len(held))
        invariants._check_pool(pool, tables)
        shared.reclaim_all()
        if shared.num_reserved:
            raise BrokenError(f"{shared.num_reserved} blocks stay reserved after all were called back")
        invariants._check_pool(pool, tables)
        for block in held:
            shared.release([block])
        shared.reclaim_all()
        unflagged = np.flatnonzero(pool.facts.flags == 0)
        if (pool.facts.state != FREE).any() or sorted(pool.free_ids().tolist()) != unflagged.tolist():
            raise BrokenError("not every block is free after all were released")
        shared._local.__dict__.clear()


def explore_randomly(scenario: Scenario, seeds: Iterable[int], switch: float = 0.25) -> int:
    """Run one random schedule for each seed, changing threads at a ``switch`` share of points; return how many.

    Raises:
        LawBrokenError: Names the seed and the choices.
    """
    done = 0
    for done, seed in enumerate(seeds, 1):  # noqa: B007
        rng = random.Random(seed)

        def choose(current: int | None, enabled: list[int], rng: random.Random = rng) -> int:
            if current is not None and rng.random() > switch:
                return current
            return rng.choice(enabled)

        Run(scenario, choose).start(seed)
    return done


def explore_exhaustively(scenario: Scenario, preemptions: int, limit: int | None = None) -> int:
    """Run every schedule with at most this many switches away from a thread that could go on; return how many.

    Args:
        scenario: What to run.
        preemptions: Bound on such switches; others are free.
        limit: Stop after this many runs, fewest switches first.

    Raises:
        LawBrokenError: Names the choices.

    Source: bounding preemptions, not steps, as in Musuvathi and Qadeer's CHESS.
    """
    runs = 0
    # One list a number of preemptions, so that the simplest schedule that breaks a law is found first.
    # Within a list, in a random order that is always the same: neighbours tend to break, or keep, the same laws.
    rng = random.Random(0)
    pending: list[list[tuple[int, ...]]] = [[()], *([] for _ in range(preemptions))]
    for used, todo in enumerate(pending):
        while todo:
            if runs == limit:
                return runs
            at = rng.randrange(len(todo))
            todo[at], todo[-1] = todo[-1], todo[at]
            prefix = todo.pop()
            run = Run(scenario, _follow(prefix))
            run.start()
            runs += 1
            choices = tuple(run.choices)
            for at in range(len(prefix), len(choices)):
                current, enabled, chosen = run.decisions[at]
                cost = used + (current is not None)
                if cost <= preemptions:
                    pending[cost] += [(*choices[:at], other) for other in enabled if other != chosen]
    return runs


def replay(scenario: Scenario, choices: Sequence[int] | str) -> None:
    """Repeat a run from its choices, or from the text that a failure printed."""
    Run(scenario, _follow(unpack(choices) if isinstance(choices, str) else choices)).start()


def _follow(choices: Sequence[int]) -> Chooser:
    """Follow the choices, then stay with whoever runs."""
    left = iter(choices)

    def choose(current: int | None, enabled: list[int]) -> int:
        chosen = next(left, None)
        if chosen is None:
            return enabled[0] if current is None else current
        if chosen not in enabled:
            raise ValueError(f"thread {chosen} cannot run here: these choices belong to another scenario")
        return chosen

    return choose


def pack(choices: Iterable[int]) -> str:
    """Return choices as text, repeats counted: ``0x12 1x3``."""
    return " ".join(f"{thread}x{len(list(group))}" for thread, group in groupby(choices))


def unpack(text: str) -> list[int]:
    """Undo ``pack``."""
    pairs = (part.split("x") for part in text.split())
    return [thread for thread, count in pairs for thread in [int(thread)] * int(count)]


def check_order(steps: Sequence[Step], num_blocks: int) -> None:
    """Check that calls one after the other, in some order, would have given the same results.

    A call may come before another unless that one had returned when it was made. So two threads cannot both
    fail where one of them must have succeeded, and none can get a block that was pinned before it asked.

    Raises:
        BrokenError: There is no such order.

    Source: the search for a linearization by Wing and Gong.
    """
    everything = frozenset(range(num_blocks))
    seen: set[tuple[frozenset[int], frozenset[int], tuple[tuple[int, int], ...]]] = set()

    def can_finish(left: frozenset[int], held: frozenset[int], pins: Counter[int]) -> bool:
        if not left:
            return True
        key = (left, held, tuple(sorted(pins.items())))
        if key in seen:
            return False
        seen.add(key)
        first_return = min(steps[at].returned for at in left)
        for at in sorted(left):
            step = steps[at]
            if step.called > first_return:
                continue
            allocatable = everything - held - frozenset(+pins)
            ids = step.ids if step.ids is not None else frozenset()
            if step.kind == "allocate":
                fits = len(allocatable) < step.n if step.ids is None else ids <= allocatable
                if fits and can_finish(left - {at}, held | ids, pins):
                    return True
            elif step.kind == "release":
                if ids <= held and can_finish(left - {at}, held - ids, pins):
                    return True
            else:
                after = Counter(dict.fromkeys(frozenset(+pins) | ids, 1))
                if step.kind == "unpin":
                    after.subtract(ids)
                if can_finish(left - {at}, held, +after):
                    return True
        return False

    if not can_finish(frozenset(range(len(steps))), frozenset(), Counter()):
        raise BrokenError("no order of these calls gives these results: " + "; ".join(map(str, steps)))


def _name(code: CodeType, line: int) -> str:
    module = code.co_filename.rsplit("/", 1)[-1].removesuffix(".py")
    return f"{module}.{code.co_qualname}:{line}: {linecache.getline(code.co_filename, line).strip()}"


@contextmanager
def _instead_of_rlock(lock: _HandingOverLock) -> Iterator[None]:
    """Make whatever asks for a re-entrant lock get this one."""
    before = threading.RLock
    threading.RLock = lambda: lock  # type: ignore[assignment,misc,return-value]
    try:
        yield
    finally:
        threading.RLock = before  # type: ignore[misc]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector from ending an earlier run's objects in the middle of this one, where that could be seen."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _unraisable(report: Callable[[str], None]) -> Iterator[None]:
    """Report errors that Python would only print, such as those of a thread's end."""
    before = sys.unraisablehook

    def hook(what: Any) -> None:
        if not isinstance(what.exc_value, _Abandoned):
            report(f"{type(what.exc_value).__name__} that nobody can catch: {what.exc_value}")

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
