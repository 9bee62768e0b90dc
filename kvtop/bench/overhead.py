"""What those who look on cost a published engine: its steps alone, with observers, and with scrapes, by turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

from allocator.commands import Command, Pause, Resume
from kvtop.bench.figures import Figure, figure, ratio_figure
from kvtop.bench.observer import cpu_seconds
from kvtop.errors import KvtopError, SourceError
from kvtop.model.observation import Focus
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.named import NamedEngine

#: Seconds in which an engine must start, answer, or end.
_LIMIT_S: Final = 60.0
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class OverheadSizes:
    """How much is measured.

    Attributes:
        num_blocks: Pool size of the engine, which keeps books only.
        observers: Consoles that watch at once, each in a process of its own.
        rate_hz: Readings a second of each.
        scrapes: Scrapes of the metrics in one measurement, a second apart.
        warm_up_s: Time each engine runs before the first. [s]
    """

    num_blocks: int = 1_000_000
    observers: int = 4
    rate_hz: float = 10.0
    scrapes: int = 3
    warm_up_s: float = 4.0

    @property
    def window_s(self) -> float:
        """Time of one measurement. [s]"""
        return float(self.scrapes)


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of an engine in one measurement: a second, and a second of its processor time where the system tells."""

    steps_per_s: float
    steps_per_cpu_s: float | None


class PublishedProcess:
    """A real ``kvtop run --publish``, paused except while it is measured.

    Args:
        name: Its name.
        num_blocks: Its size.
        metrics: Whether it serves metrics.

    Attributes:
        name: Its name.
        metrics_url: Where it serves metrics.
    """

    def __init__(self, name: str, num_blocks: int, *, metrics: bool) -> None:
        self.name = name
        self.metrics_url: str | None = None
        more = ["--metrics-port", "0"] if metrics else []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvtop", "run", "--publish", name, "--blocks", str(num_blocks)),
                *("--geometry", "none", "--swap-blocks", "0", "--speed", "max", "--config", os.devnull, *more),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._process.stderr is not None
            self.metrics_url = _read_start(self._process.stderr, metrics)
            self._link = NamedEngine(name)
        except BaseException:
            self._end()
            raise
        self._source, self._operations = LocalSource(self._link), LocalOperations(self._link)

    def apply(self, command: Command) -> None:
        """Do a command; must be done."""
        outcome = self._operations.apply(command, _LIMIT_S)
        if not outcome.ok:
            raise KvtopError(f"the engine refused: {outcome.message}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run while the context lasts."""
        self.apply(Resume())
        try:
            yield
        finally:
            self.apply(Pause())

    def mark(self) -> tuple[float, int, float | None]:
        """Return the time, the engine's step, and its processor time so far. [s], steps, [s]"""
        step = self._source.read(Focus(), _LIMIT_S).snapshot.step
        return time.perf_counter(), step, cpu_seconds(self._link.pid)

    def close(self) -> None:
        """End it."""
        self._source.close()
        self._end()

    def _end(self) -> None:
        for end in (self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
        assert self._process.stderr is not None
        self._process.stderr.close()


class Onlookers:
    """Several processes that watch one engine when told to."""

    def __init__(self, name: str, count: int, rate_hz: float) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "kvtop.bench.onlooker", name, str(rate_hz)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        try:
            for process in self._processes:
                self._line(process)
        except BaseException:
            self.close()
            raise

    def begin(self, duration_s: float) -> None:
        """Let all of them watch for a while."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{duration_s}\n")
            process.stdin.flush()

    def finish(self) -> int:
        """Wait for their end and return the readings of all of them."""
        return sum(int(self._line(process)) for process in self._processes)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_S)
            process.stdout.close()

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line or line.startswith("lost"):
            raise SourceError(f"an onlooker ended: {line or 'without a word'}")
        return line


def measure_overhead(rounds: int, sizes: OverheadSizes) -> Iterator[Figure]:
    """Yield an engine's steps a second alone, watched and scraped, and the ratios to alone.

    Raises:
        KvtopError: An engine or an onlooker cannot be started, or is lost.
    """
    with contextlib.ExitStack() as opened:
        engines = []
        for name, metrics in (("plain", False), ("metered", True)):
            engine = PublishedProcess(f"bench-{name}-{os.getpid()}", sizes.num_blocks, metrics=metrics)
            opened.callback(engine.close)
            engine.mark()
            time.sleep(sizes.warm_up_s)
            engine.apply(Pause())
            engines.append(engine)
        plain, metered = engines
        onlookers = Onlookers(plain.name, sizes.observers, sizes.rate_hz)
        opened.callback(onlookers.close)
        alone: list[Pace] = []
        watched: list[Pace] = []
        scraped: list[Pace] = []
        readings: list[float] = []

        def watch() -> None:
            began_s = time.perf_counter()
            onlookers.begin(sizes.window_s)
            readings.append(onlookers.finish() / (time.perf_counter() - began_s))

        turns = [
            (alone, plain, lambda: time.sleep(sizes.window_s)),
            (watched, plain, watch),
            (scraped, metered, lambda: _scrape(metered, sizes.scrapes)),
        ]
        for index in range(rounds):
            for paces, engine, act in turns if index % 2 == 0 else reversed(turns):
                with engine.running():
                    began_s, first, first_cpu_s = engine.mark()
                    act()
                    ended_s, last, last_cpu_s = engine.mark()
                steps = last - first
                cpu_s = None if first_cpu_s is None or last_cpu_s is None else last_cpu_s - first_cpu_s
                paces.append(Pace(steps / (ended_s - began_s), steps / cpu_s if cpu_s else None))
    yield from _figures(sizes, alone, watched, scraped, readings)


def _figures(
    sizes: OverheadSizes, alone: list[Pace], watched: list[Pace], scraped: list[Pace], readings: list[float]
) -> Iterator[Figure]:
    what = f"{sizes.num_blocks:,} blocks"
    yield figure("overhead", f"{what}, steps alone", "steps/s", [pace.steps_per_s for pace in alone])
    yield figure("overhead", "readings of all observers", "/s", readings)
    for who, paces in ((f"with {sizes.observers} observers", watched), ("scraped every second", scraped)):
        wall = [[pace.steps_per_s for pace in side] for side in (paces, alone)]
        yield ratio_figure("overhead", f"{what}, steps {who} ÷ alone", *wall, at_least=0.98)
        cpu = [[pace.steps_per_cpu_s for pace in side if pace.steps_per_cpu_s] for side in (paces, alone)]
        if len(cpu[0]) == len(cpu[1]) == len(alone):
            yield ratio_figure("overhead", f"{who} ÷ alone, by the engine's processor time", *cpu)


def _scrape(engine: PublishedProcess, scrapes: int) -> None:
    """Scrape an engine's metrics once a second."""
    began_s = time.perf_counter()
    for index in range(scrapes):
        time.sleep(max(0.0, began_s + index + 0.5 - time.perf_counter()))
        assert engine.metrics_url is not None
        with urllib.request.urlopen(engine.metrics_url, timeout=_END_S) as answer:
            answer.read()
    time.sleep(max(0.0, began_s + scrapes - time.perf_counter()))


def _read_start(messages: IO[str], metrics: bool) -> str | None:
    """Read what an engine says until it is published and serves its metrics; return where."""
    said = ""
    while line := messages.readline():
        said = line.strip()
        if not metrics and "published" in said:
            return None
        if metrics and "metrics on " in said:
            return said.partition("metrics on ")[2]
    raise KvtopError(f"the engine did not start: {said.removeprefix('kvtop: ')}")
