"""The engine without a screen: ``kvtop run`` and ``kvtop check``. Progress on stderr, the report on stdout.

The engine runs on the calling thread; attached programs use its blocks from threads of their own. Once a second, while
metrics are served, the loop leaves a frozen view for the exporter's thread to read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from kvtop.check import ProgressWatch, is_uncaught, told_faults, verdict
from kvtop.driving import MAX_TURN, Bounds, Drive, Ending, Signals, bounds_for, drive
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvtop.log import Log, LogFormat
from kvtop.metrics_address import MetricsAddress
from kvtop.model.format import count, size
from kvtop.report import Report, build_report, to_json, to_text

if TYPE_CHECKING:
    from allocator.engine import Engine
    from kvtop.daemon import Daemon
    from kvtop.exporter import Exporter
    from kvtop.recording.writer import RecordOrder

#: Operations of a check with threads when none are asked for.
DEFAULT_OPERATIONS: Final = 100_000
_PROGRESS_EVERY_S: Final = 0.5
_PUBLISH_EVERY_S: Final = 1.0


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
    log_format: LogFormat = "text",
    reload: Callable[[], EngineOptions] | None = None,
) -> int:
    """Run one engine to its end, print the report, and return the exit code.

    Args:
        options: The engine.
        bounds: When to end at the latest.
        metrics: Where to serve metrics meanwhile.
        publish: The name by which programs may attach meanwhile, and others watch and drive it.
        record: The recording to write meanwhile.
        as_json: Print one JSON object instead of lines for people.
        is_check: Check every law after every step, and say what was proved.
        started_s: ``time.perf_counter()`` when the command began, for ``wall_s``.
        log_format: Form of the messages on stderr.
        reload: Reads the options again, for a published run that gets SIGHUP.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    log = Log(log_format)
    stays = publish is not None and not is_check
    bounds, bound_notes = bounds_for(options, bounds, stays=stays)
    if record is not None:
        from kvtop.recording.writer import check_order, record_engine

        check_order(record)
    engine, notes = build_engine(options)
    exporter: Exporter | None = None
    daemon: Daemon | None = None
    try:
        if record is not None:
            engine = record_engine(engine, options, record, attached=publish is not None)
        with Signals(takes_hangup=publish is not None) as signals:
            progress = _Progress(engine, sys.stderr if log_format == "text" else None)
            hooks: list[Callable[[float], None]] = [progress.after_turn]

            def after_turn(now_s: float) -> None:
                for hook in hooks:
                    hook(now_s)

            check = _checker(engine) if is_check else None
            if publish is not None:
                from kvtop.daemon import Daemon
                from kvtop.sd_notify import ServiceManager

                daemon = Daemon(
                    engine,
                    publish,
                    options,
                    bounds,
                    stays=stays and options.is_endless and bounds == Bounds(),
                    signals=signals,
                    after_turn=after_turn,
                    after_step=check,
                    reload=reload,
                    notes=notes,
                    log=log,
                    service=ServiceManager(),
                )
                log.info(
                    f'published: kvtop attach local:{publish}, kvtop ctl, kvtop.attach("local:{publish}"); '
                    f"socket {daemon.path}",
                    socket=daemon.path,
                )
            if metrics is not None:
                publisher = _Publisher(engine, options.speed)
                exporter = publisher.serve(metrics, log.complain)
                log.info(f"metrics on {exporter.url}")
                hooks.append(publisher.after_turn)
            for note in (*notes, *bound_notes):
                log.info(note)
            try:
                if daemon is not None:
                    driven = daemon.run()
                else:
                    if check is not None:
                        hooks.insert(0, lambda now_s: check())
                    driven = drive(
                        engine,
                        bounds,
                        speed=options.speed,
                        stop=lambda: signals.ending,
                        after_turn=after_turn,
                        max_turn=1 if is_check else MAX_TURN,
                        keep_open=options.takes_all_load,
                    )
            finally:
                progress.clear()
            report = _report(engine, driven, options.speed, time.perf_counter() - started_s)
            write_out(to_json(report) if as_json else to_text(report))
            code = _conclude(engine, report, driven, is_check=is_check, log=log)
            if record is not None:
                code = max(code, _end_recording(engine, record.path, log))
            if not is_check:
                return code
            for line in told_faults(report, (kind for kind, _ in options.inject), driven.fault):
                log.info(line)
            return EXIT_FAILED if is_uncaught(report, driven.fault) else code
    finally:
        if exporter is not None:
            exporter.close()
        if daemon is not None:
            daemon.close()
        engine.close()


def _end_recording(engine: Engine, path: str, log: Log) -> int:
    """Close the recording, and say what became of it; return the exit code."""
    from kvtop.recording.writer import RecordedEngine

    assert isinstance(engine, RecordedEngine)
    engine.end_recording()
    if engine.failure is not None:
        log.info(f"--record {path}: {engine.failure}")
        return EXIT_FAILED
    log.info(f"recorded in {path}, {size(engine.written_bytes)}; kvtop replay {path}")
    return EXIT_OK


def _checker(engine: Engine) -> Callable[[], None]:
    """Return what checks every law after a step, that of progress among them."""
    watch = ProgressWatch(engine)

    def check() -> None:
        engine.check()
        watch.after_turn()

    return check


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


def _conclude(engine: Engine, report: Report, driven: Drive, *, is_check: bool, log: Log) -> int:
    """Say on stderr how it ended, where that is not plain, and return the exit code."""
    ending = driven.ending
    if driven.fault is not None:
        log.error(f"FAULT at step {engine.step}: {driven.fault}")
        return EXIT_FAILED
    if is_check:
        snapshot = engine.snapshot(phase="paused", speed=None, steps_per_s=None)
        log.info(verdict(report, engine.stuck_reason, snapshot))
    if ending is Ending.STUCK:
        log.error(f"stopped at step {engine.step}: {engine.stuck_reason or ending.value}")
        return EXIT_FAILED
    if ending is Ending.INTERRUPTED:
        log.info(f"interrupted at step {engine.step}; the report is of the work done so far")
        return EXIT_INTERRUPTED
    if ending is Ending.TERMINATED:
        log.info(f"stopped at step {engine.step} as asked; the report is of the work done so far")
    if report["integrity"]["faults"]:
        log.error(f"FAULT: {report['integrity']['faults']} checks that were asked for found a broken law")
        return EXIT_FAILED
    return EXIT_OK


class _Progress:
    """One line on a terminal's stderr, twice a second at most; silent elsewhere."""

    def __init__(self, engine: Engine, stream: TextIO | None) -> None:
        self._engine = engine
        self._stream = stream if stream is not None and stream.isatty() else None
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

    def serve(self, address: MetricsAddress, complain: Callable[[str], None]) -> Exporter:
        """Publish a first view and start serving."""
        from kvtop.exporter import start_exporter

        self.after_turn(time.perf_counter())
        return start_exporter(lambda: self.view, address, complain=complain)

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
    Log().info(text)


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
