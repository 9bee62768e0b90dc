"""What an observer in its own process costs an engine: steps with one looking on and without, by turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from allocator.snapshot import Snapshot
from kvtop.bench.figures import Figure, figure, ratio_figure
from kvtop.engine_process import EngineProcess
from kvtop.engine_setup import EngineOptions
from kvtop.model.observation import Focus
from kvtop.model.reduce import MAX_EVENTS
from kvtop.sources.local import LocalSource

#: Seconds an observation may take.
_READ_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ObserverSizes:
    """How much is measured.

    Attributes:
        num_blocks: Pool size of the engine, which keeps books only.
        rate_hz: Observations a second.
        window_s: Time of one measurement. [s]
        warm_up_s: Time the engine runs before the first. [s]
    """

    num_blocks: int = 1_000_000
    rate_hz: float = 10.0
    window_s: float = 1.5
    warm_up_s: float = 4.0


@dataclass(frozen=True, slots=True)
class Window:
    """What an engine did in one measurement.

    Attributes:
        steps_per_s: Steps a second.
        steps_per_cpu_s: Steps a second of processor time of all its threads; ``None`` where the system does not tell.
        observations: Observations made.
    """

    steps_per_s: float
    steps_per_cpu_s: float | None
    observations: int


def measure_observer(rounds: int, sizes: ObserverSizes) -> Iterator[Figure]:
    """Yield an engine's steps a second with an observer and without, and their ratio.

    Raises:
        KvtopError: The engine process cannot be started, or is lost.
    """
    options = EngineOptions(num_blocks=sizes.num_blocks, geometry="none", num_swap_blocks=0, speed=None)
    process = EngineProcess.start(options)
    source = LocalSource(process)
    windows: dict[bool, list[Window]] = {True: [], False: []}
    try:
        process.wait_ready()
        _measure(source, process.pid, sizes.warm_up_s, sizes.rate_hz)
        for index in range(rounds):
            for watched in (True, False) if index % 2 == 0 else (False, True):
                rate_hz = sizes.rate_hz if watched else None
                windows[watched].append(_measure(source, process.pid, sizes.window_s, rate_hz))
    finally:
        source.close()
    alone, watched_ones = windows[False], windows[True]
    seen = [window.observations for window in watched_ones]
    yield figure("observer", "steps alone", "steps/s", [window.steps_per_s for window in alone])
    yield figure("observer", "steps watched", "steps/s", [window.steps_per_s for window in watched_ones])
    yield figure("observer", "observations", "/s", [count / sizes.window_s for count in seen])
    what = f"{sizes.num_blocks:,} blocks at {sizes.rate_hz:g} Hz"
    yield ratio_figure(
        "observer",
        f"{what}, steps watched ÷ alone",
        [window.steps_per_s for window in watched_ones],
        [window.steps_per_s for window in alone],
        at_least=0.98,
    )
    cpu = [
        [window.steps_per_cpu_s for window in side if window.steps_per_cpu_s is not None]
        for side in (watched_ones, alone)
    ]
    if len(cpu[0]) == len(cpu[1]) == rounds:
        yield ratio_figure("observer", f"{what}, by the engine's processor time", *cpu)


def _measure(source: LocalSource, pid: int, window_s: float, rate_hz: float | None) -> Window:
    """Let the engine run for a while, observed at ``rate_hz`` or at the two ends only."""
    began_s, begin, cpu_s = _mark(source, pid)
    focus = _following(begin, Focus(max_events=MAX_EVENTS))
    end_s, count = began_s + window_s, 0
    while (now_s := time.perf_counter()) < end_s:
        due_s = end_s if rate_hz is None else min(end_s, began_s + (count + 1) / rate_hz)
        if now_s < due_s:
            time.sleep(due_s - now_s)
        if rate_hz is not None:
            snapshot = source.read(focus, _READ_LIMIT_S).snapshot
            assert snapshot is not None
            focus = _following(snapshot, focus)
            count += 1
    ended_s, end, last_cpu_s = _mark(source, pid)
    steps = end.step - begin.step
    per_cpu_s = steps / (last_cpu_s - cpu_s) if cpu_s is not None and last_cpu_s is not None else None
    return Window(steps / (ended_s - began_s), per_cpu_s, count)


def _following(snapshot: Snapshot, focus: Focus) -> Focus:
    """Return what a console asks for next: the events it has not seen."""
    return msgspec.structs.replace(focus, next_event=snapshot.events[-1].number + 1) if snapshot.events else focus


def _mark(source: LocalSource, pid: int) -> tuple[float, Snapshot, float | None]:
    """Return the time, the engine's state, and its processor time so far. [s], [s]"""
    snapshot = source.read(Focus(), _READ_LIMIT_S).snapshot
    assert snapshot is not None
    return time.perf_counter(), snapshot, cpu_seconds(pid)


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process's threads; ``None`` where the system does not tell. [s]"""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9 if files else None
    except (OSError, ValueError, IndexError):
        return None
