"""The engine without a screen: ``kvtop run`` and ``kvtop check``. Progress on stderr, the report on stdout.

The engine runs on the calling thread; attached programs use its blocks from threads of their own. Once a second, while
metrics are served, the loop leaves a frozen view for the exporter's thread to read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from allocator.config import STEP_S
from allocator.errors import InvariantViolation
from kvtop.check import ProgressWatch, is_uncaught, told_faults, verdict
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from kvtop.metrics_address import MetricsAddress
from kvtop.model.format import count, size
from kvtop.report import Report, build_report, to_json, to_text

if TYPE_CHECKING:
    from allocator.engine import Engine
    from kvtop.exporter import Exporter
    from kvtop.recording.writer import RecordOrder
    from kvtop.server import PublishedEngine

#: Bound of an endless workload when none is asked for.
DEFAULT_STEPS: Final = 10_000
#: Operations of a check with threads when none are asked for.
DEFAULT_OPERATIONS: Final = 100_000
#: Steps of a turn: at the start, and at most. In between a turn grows and shrinks to take about ``_TURN_S``,
#: so that signals and progress are not kept waiting by a busy engine, nor an idle one held up by looking at them.
_FIRST_TURN: Final = 64
_MAX_TURN: Final = 1 << 40
_TURN_S: Final = 0.05
_PROGRESS_EVERY_S: Final = 0.5
_PUBLISH_EVERY_S: Final = 1.0
#: Longest sleep while paced, so that a signal is noticed. [s]
_NAP_S: Final = 0.05
#: Seconds for which a copy that does not come back may hold a run up.
_LATE_BOUND_S: Final = 10.0


class Ending(Enum):
    """Why a run ended."""

    DONE = "every request has ended"
    STEPS = "the steps asked for were taken"
    DURATION = "the time asked for is over"
    STUCK = "nothing can progress"
    FAULT = "a law was broken"
    INTERRUPTED = "interrupted"
    TERMINATED = "asked to stop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run ends, besides when its requests have all ended; ``None`` is no bound.

    Attributes:
        steps: Engine steps.
        duration_s: Real seconds.
        until_done: Insist on the end of the requests: refused for a workload that has none.
    """

    steps: int | None = None
    duration_s: float | None = None
    until_done: bool = False


@dataclass(frozen=True, slots=True)
class Drive:
    """How a drive ended, the real seconds spent inside the engine, and the broken law where there is one."""

    ending: Ending
    engine_s: float
    fault: InvariantViolation | None = None


class Signals:
    """Turns Ctrl-C and SIGTERM into a flag that the loop reads between turns; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.ending: Ending | None = None

    def __enter__(self) -> Signals:
        self._before = [(s, signal.signal(s, self._note)) for s in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.ending is Ending.INTERRUPTED:
            raise KeyboardInterrupt
        self.ending = Ending.INTERRUPTED if number == signal.SIGINT else Ending.TERMINATED


def bounds_for(options: EngineOptions, asked: Bounds) -> tuple[Bounds, tuple[str, ...]]:
    """Return the bounds in force, and a note when they were not asked for.

    Raises:
        UserError: A workload without an end was asked to run until it is done.
    """
    if asked.until_done and options.is_endless:
        raise UserError(
            f"--until-done: the workload {options.load_name} never ends; give --requests, --steps or --duration"
        )
    if options.takes_all_load:
        return asked, (f"the workload {options.load_name} never ends: Ctrl-C stops it, or --duration",)
    if options.is_endless and asked == Bounds():
        note = f"the workload {options.load_name} never ends: stopping after {count(DEFAULT_STEPS)} steps (--steps N)"
        return Bounds(steps=DEFAULT_STEPS), (note,)
    return asked, ()


def drive(
    engine: Engine,
    bounds: Bounds,
    *,
    speed: float | None,
    stop: Callable[[], Ending | None],
    after_turn: Callable[[float], None],
    max_turn: int = _MAX_TURN,
    keep_open: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Drive:
    """Advance ``engine`` until a bound, its end, or a stop; return why it ended.

    Args:
        engine: The engine; attached programs aside, nobody else may touch it meanwhile.
        bounds: When to end at the latest.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.
        stop: Asked before every turn; an answer ends the drive.
        after_turn: Called after every turn with the time.
        max_turn: Most steps one turn may cover.
        keep_open: Whether attached programs may still come when every request has ended.
        clock, sleep: Real time. [s]
    """
    started_s, engine_s, first_step, first_time_s = clock(), 0.0, engine.step, engine.time_s
    if speed is not None:
        max_turn = max(1, min(max_turn, int(speed * _NAP_S / STEP_S)))
    turn = min(_FIRST_TURN, max_turn)
    while True:
        ending = stop()
        now_s = clock()
        if ending is None and bounds.duration_s is not None and now_s - started_s >= bounds.duration_s:
            ending = Ending.DURATION
        budget = turn
        if ending is None and bounds.steps is not None:
            budget = min(turn, bounds.steps - (engine.step - first_step))
            if budget <= 0:
                ending = Ending.STEPS
        # Waiting for attached programs is no work: it goes at the pace of real time.
        is_waiting = speed is None and engine.is_waiting
        if is_waiting:
            budget = min(budget, 1)
        if ending is not None:
            return Drive(ending, engine_s)
        if speed is not None:
            ahead_s = (engine.time_s - first_time_s) / speed - (now_s - started_s)
            if ahead_s > 0:
                sleep(min(ahead_s, _NAP_S))
                continue
        try:
            taken = engine.advance(budget)
            after_s = clock()
            engine_s += after_s - now_s
            after_turn(after_s)
        except InvariantViolation as fault:
            return Drive(Ending.FAULT, engine_s, fault)
        if taken == 0 and engine.late_s is not None and engine.late_s < _LATE_BOUND_S:
            continue  # the turn has waited for the copy already
        if taken == 0 and not (keep_open and engine.done):
            return Drive(Ending.DONE if engine.done else Ending.STUCK, engine_s)
        if taken == 0 or is_waiting:
            sleep(STEP_S)
            continue
        if after_s - now_s < _TURN_S / 2:
            turn = min(turn * 2, max_turn)
        elif after_s - now_s > _TURN_S:
            turn = max(1, turn // 2)


def run_headless(
    options: EngineOptions,
    bounds: Bounds,
    *,
    metrics: MetricsAddress | None = None,
    publish: str | None = None,
    record: RecordOrder | None = None,
    as_json: bool = False,
    is_check: bool = False,
    started_s: float | None = None,
) -> int:
    """Run one engine to its end, print the report, and return the exit code.

    Args:
        options: The engine.
        bounds: When to end at the latest.
        metrics: Where to serve metrics meanwhile.
        publish: The name by which programs may attach meanwhile.
        record: The recording to write meanwhile.
        as_json: Print one JSON object instead of lines for people.
        is_check: Check every law after every step, and say what was proved.
        started_s: ``time.perf_counter()`` when the command began, for ``wall_s``.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    bounds, bound_notes = bounds_for(options, bounds)
    if record is not None:
        from kvtop.recording.writer import check_order, record_engine

        check_order(record)
    engine, notes = build_engine(options)
    exporter: Exporter | None = None
    published: PublishedEngine | None = None
    try:
        if record is not None:
            engine = record_engine(engine, options, record, attached=publish is not None)
        with Signals() as signals:
            if publish is not None:
                published = _publish(publish, engine)
            progress = _Progress(engine, sys.stderr)
            hooks: list[Callable[[float], None]] = [progress.after_turn]
            if metrics is not None:
                publisher = _Publisher(engine, options.speed)
                exporter = publisher.serve(metrics)
                say(f"metrics on {exporter.url}")
                hooks.append(publisher.after_turn)
            for note in (*notes, *bound_notes):
                say(note)
            if is_check:
                watch = ProgressWatch(engine)

                def check(now_s: float) -> None:
                    engine.check()
                    watch.after_turn()

                hooks.insert(0, check)

            def after_turn(now_s: float) -> None:
                for hook in hooks:
                    hook(now_s)

            try:
                driven = drive(
                    engine,
                    bounds,
                    speed=options.speed,
                    stop=lambda: signals.ending,
                    after_turn=after_turn,
                    max_turn=1 if is_check else _MAX_TURN,
                    keep_open=options.takes_all_load,
                )
            finally:
                progress.clear()
            report = _report(engine, driven, options.speed, time.perf_counter() - started_s)
            write_out(to_json(report) if as_json else to_text(report))
            code = _conclude(engine, report, driven, is_check=is_check)
            if record is not None:
                code = max(code, _end_recording(engine, record.path))
            if not is_check:
                return code
            for line in told_faults(report, (kind for kind, _ in options.inject), driven.fault):
                say(line)
            return EXIT_FAILED if is_uncaught(report, driven.fault) else code
    finally:
        if exporter is not None:
            exporter.close()
        if published is not None:
            published.close()
        engine.close()


def _end_recording(engine: Engine, path: str) -> int:
    """Close the recording, and say what became of it; return the exit code."""
    from kvtop.recording.writer import RecordedEngine

    assert isinstance(engine, RecordedEngine)
    engine.end_recording()
    if engine.failure is not None:
        say(f"--record {path}: {engine.failure}")
        return EXIT_FAILED
    say(f"recorded in {path}, {size(engine.written_bytes)}; kvtop replay {path}")
    return EXIT_OK


def _publish(name: str, engine: Engine) -> PublishedEngine:
    from kvtop.server import PublishedEngine

    published = PublishedEngine(name, engine.clients)
    say(f'programs attach with kvtop.attach("local:{name}"), socket {published.path}')
    return published


def run_threads(options: EngineOptions, *, threads: int, operations: int | None, as_json: bool) -> int:
    """Drive the allocator of an engine from many threads at random, print what was proved, and return the exit code.

    Args:
        options: The engine whose pools, storage and policies are used; it takes no step.
        threads: Client threads.
        operations: Operations of all clients; ``None`` takes ``DEFAULT_OPERATIONS``.
        as_json: Print one JSON object instead of a line for people.
    """
    from allocator.stress import run_stress

    engine, _ = build_engine(options)
    try:
        report = run_stress(
            engine.manager, threads=threads, operations=operations or DEFAULT_OPERATIONS, seed=options.seed
        )
    finally:
        engine.close()
    done = report.operations.total()
    if as_json:
        fault = None if report.fault is None else str(report.fault)
        counts = {"operations": dict(report.operations), "operator": dict(report.operator)}
        summary = {**counts, "refused": report.refused, "checks": report.checks, "fault": fault}
        write_out(msgspec.json.encode(summary).decode())
    else:
        kinds = ", ".join(f"{count(n)} {kind}" for kind, n in report.operations.most_common())
        write_out(f"{count(done)} operations by {threads} threads ({kinds}); {count(report.refused)} refused")
    if report.fault is not None:
        say(f"FAULT: {report.fault}")
        return EXIT_FAILED
    say(f"no fault in {count(report.checks)} checks during {count(done)} operations by {threads} threads")
    return EXIT_OK


def _report(engine: Engine, driven: Drive, speed: float | None, wall_s: float) -> Report:
    phase = "done" if engine.done else "paused"
    snapshot = engine.snapshot(phase=phase, speed=speed, steps_per_s=None)
    device = engine.arrays("device")
    assert device is not None
    num_host = engine.pool_size("host") or 0
    return build_report(snapshot, device, wall_s, driven.engine_s, num_host_blocks=num_host)


def _conclude(engine: Engine, report: Report, driven: Drive, *, is_check: bool) -> int:
    """Say on stderr how it ended, where that is not plain, and return the exit code."""
    ending = driven.ending
    if driven.fault is not None:
        say(f"FAULT at step {engine.step}: {driven.fault}")
        return EXIT_FAILED
    if is_check:
        snapshot = engine.snapshot(phase="paused", speed=None, steps_per_s=None)
        say(verdict(report, engine.stuck_reason, snapshot))
    if ending is Ending.STUCK:
        say(f"stopped at step {engine.step}: {engine.stuck_reason or ending.value}")
        return EXIT_FAILED
    if ending is Ending.INTERRUPTED:
        say(f"interrupted at step {engine.step}; the report is of the work done so far")
        return EXIT_INTERRUPTED
    if ending is Ending.TERMINATED:
        say(f"stopped at step {engine.step} as asked; the report is of the work done so far")
    return EXIT_OK


class _Progress:
    """One line on a terminal's stderr, twice a second at most; silent elsewhere."""

    def __init__(self, engine: Engine, stream: TextIO) -> None:
        self._engine = engine
        self._stream = stream if stream.isatty() else None
        self._due_s = 0.0
        self._width = 0

    def after_turn(self, now_s: float) -> None:
        if self._stream is None or now_s < self._due_s:
            return
        self._due_s = now_s + _PROGRESS_EVERY_S
        counters = self._engine.counters
        text = (
            f"step {count(self._engine.step)}   {count(counters.finished)} of {count(counters.submitted)} requests "
            f"finished   {count(counters.refused)} refused   {count(counters.evictions)} evictions"
        )
        self._write(f"\r{text:<{self._width}}")
        self._width = len(text)

    def clear(self) -> None:
        if self._width:
            self._write(f"\r{' ' * self._width}\r")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        self._stream.write(text)
        self._stream.flush()


class _Publisher:
    """Leaves a fresh view for the exporter once a second, made on the engine's own thread."""

    def __init__(self, engine: Engine, speed: float | None) -> None:
        from kvtop.model.view import View

        self._engine = engine
        self._speed = speed
        self._due_s = 0.0
        self.view = View(source="embedded")

    def serve(self, address: MetricsAddress) -> Exporter:
        """Publish a first view and start serving."""
        from kvtop.exporter import start_exporter

        self.after_turn(time.perf_counter())
        return start_exporter(lambda: self.view, address)

    def after_turn(self, now_s: float) -> None:
        if now_s < self._due_s:
            return
        from kvtop.model.observation import Observation
        from kvtop.model.reduce import reduce

        self._due_s = now_s + _PUBLISH_EVERY_S
        snapshot = self._engine.snapshot(phase="running", speed=self._speed, steps_per_s=None)
        observation = Observation(snapshot, self._engine.arrays("device"), self._engine.arrays("host"))
        self.view = reduce(self.view, observation, time.monotonic())


def say(text: str) -> None:
    """Write one line to stderr, as every message of the command line is written."""
    with contextlib.suppress(OSError):  # nobody may be reading the messages; the work goes on
        print(f"kvtop: {text}", file=sys.stderr, flush=True)


def write_out(text: str) -> None:
    """Write ``text`` and a line end to stdout.

    Raises:
        SystemExit: The reader has gone away, or the disk is full; with exit code 1.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # What is still buffered has nowhere to go: without this, Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            say(f"the report could not be written: {error.strerror}")
        raise SystemExit(EXIT_FAILED) from None
