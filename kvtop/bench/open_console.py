"""The real console in a terminal: what it costs an engine at full speed, and that its first frame waits for nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtop.bench.figures import Figure, figure, ratio_figure
from kvtop.bench.overhead import PublishedProcess
from kvtop.errors import KvtopError

#: Seconds in which a console must draw what is waited for, and end.
_LIMIT_S: Final = 60.0
_END_S: Final = 10.0
#: What a console shows before it knows anything of its engine, and once it does.
_FIRST_FRAME: Final = b"STARTING"
_FIRST_READING: Final = b"RUNNING"
#: Bytes of the output that are kept to look for words in.
_KEPT: Final = 1 << 16
_ESCAPES: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """How much is measured.

    Attributes:
        block_counts: Pool sizes of the engines, which keep books only.
        screen: Columns and lines.
        window_s: Time of one measurement. [s]
        warm_up_s: Time each engine runs before the first. [s]
    """

    block_counts: tuple[int, ...] = (4_096, 1_000_000)
    screen: tuple[int, int] = (120, 40)
    window_s: float = 3.0
    warm_up_s: float = 3.0


class TerminalProgram:
    """A program in a terminal of its own, which takes whatever is written at once.

    Args:
        arguments: Of ``kvtop``.
        screen: Columns and lines.
    """

    def __init__(self, arguments: Sequence[str], screen: tuple[int, int]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", screen[1], screen[0], 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
        environment.pop("NO_COLOR", None)
        self._seen: dict[bytes, float] = {}
        self._changed = threading.Condition()
        self.began_s = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtop", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._reading = threading.Thread(target=self._read, name="kvtop-bench-terminal", daemon=True)
        self._reading.start()

    def until(self, word: bytes) -> float:
        """Wait until a word was drawn, and return the seconds that took from the start.

        Raises:
            KvtopError: It never was.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: word in self._seen, _LIMIT_S):
                raise KvtopError(f"the console never showed {word.decode()}")
            return self._seen[word]

    def close(self) -> None:
        """End it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
        self._reading.join(_END_S)
        os.close(self._master)

    def _read(self) -> None:
        kept = b""
        while self._process.poll() is None:
            if not select.select([self._master], [], [], 0.2)[0]:
                continue
            try:
                kept = (kept + os.read(self._master, 1 << 16))[-_KEPT:]
            except OSError:  # nobody has the other end open any more
                return
            text = _ESCAPES.sub(b"", kept)
            with self._changed:
                for word in (_FIRST_FRAME, _FIRST_READING):
                    if word in text:
                        self._seen.setdefault(word, time.perf_counter() - self.began_s)
                self._changed.notify_all()
            if len(self._seen) == 2:
                kept = b""


def measure_open_console(rounds: int, sizes: OpenSizes) -> Iterator[Figure]:
    """Yield an engine's steps with the console open ÷ without, and how far ahead of the engine the first frame is.

    Raises:
        KvtopError: An engine or a console did not start.
    """
    for blocks in sizes.block_counts:
        yield from _slow_down(rounds, blocks, sizes)
    frames, readings = [], []
    for _ in range(rounds):
        console = TerminalProgram(("--config", os.devnull, "--no-remember"), sizes.screen)
        try:
            frames.append(console.until(_FIRST_FRAME))
            readings.append(console.until(_FIRST_READING))
        finally:
            console.close()
    yield figure("start", "first frame", "s", frames)
    yield ratio_figure("start", "first frame ÷ engine ready, torch loaded", frames, readings, at_most=1.0)


def _slow_down(rounds: int, blocks: int, sizes: OpenSizes) -> Iterator[Figure]:
    engine = PublishedProcess(f"bench-open-{os.getpid()}", blocks, metrics=False)
    alone: list[tuple[float, float | None]] = []
    watched: list[tuple[float, float | None]] = []
    try:
        engine.mark()
        time.sleep(sizes.warm_up_s)
        for index in range(rounds):
            turns = [alone, watched] if index % 2 == 0 else [watched, alone]
            for rates in turns:
                rates.append(_rate(engine, sizes, with_console=rates is watched))
    finally:
        engine.close()
    group = f"{blocks:,} at full speed"
    yield figure(group, "steps alone", "steps/s", [wall for wall, _ in alone])
    yield ratio_figure(
        group, "steps with the console open ÷ without", [w for w, _ in watched], [w for w, _ in alone], at_least=0.98
    )
    by_cpu = [[cpu for _, cpu in side if cpu] for side in (watched, alone)]
    if len(by_cpu[0]) == len(by_cpu[1]) == rounds:
        yield ratio_figure(group, "the same by the engine's processor time", *by_cpu)


def _rate(engine: PublishedProcess, sizes: OpenSizes, *, with_console: bool) -> tuple[float, float | None]:
    """Return an engine's steps a second, and a second of its processor time where the system tells."""
    console = None
    if with_console:
        words = ("attach", f"local:{engine.name}", "--config", os.devnull, "--no-remember")
        console = TerminalProgram(words, sizes.screen)
    try:
        if console is not None:
            console.until(_FIRST_READING)
        began_s, first, first_cpu_s = engine.mark()
        time.sleep(sizes.window_s)
        ended_s, last, last_cpu_s = engine.mark()
    finally:
        if console is not None:
            console.close()
    cpu_s = None if first_cpu_s is None or last_cpu_s is None else last_cpu_s - first_cpu_s
    steps = last - first
    return steps / (ended_s - began_s), steps / cpu_s if cpu_s else None
