"""What the console costs: frames a second, processor time and bytes to the terminal, at several sizes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from kvtop.bench.figures import Figure, figure
from kvtop.errors import KvtopError

#: What is promised: frames a second, share of a core when busy at the largest pool, and when idle.
FRAMES_PER_S: Final = 9.5
BUSY_CORE: Final = 1 / 3
IDLE_CORE: Final = 0.02
#: Longest time one measurement may take. [s]
_LIMIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ConsoleSizes:
    """How much is measured.

    Attributes:
        block_counts: Device pool sizes; the host tier has half of each.
        screens: Columns and lines.
        seconds: Time of one measurement. [s]
    """

    block_counts: tuple[int, ...] = (4_096, 65_536, 1_000_000)
    screens: tuple[tuple[int, int], ...] = ((120, 40), (240, 70))
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement.

    Attributes:
        frames_per_s: Frames drawn a second.
        core: Processor time ÷ real time.
        bytes_per_frame: Bytes written to the terminal a frame.
        first_frame_s: From the start of the process to the first frame. [s]
    """

    frames_per_s: float
    core: float
    bytes_per_frame: float
    first_frame_s: float


def measure_console(rounds: int, sizes: ConsoleSizes) -> Iterator[Figure]:
    """Yield the figures of each pool size, screen size, busy and idle.

    Raises:
        KvtopError: A console did not come to its end.
    """
    for blocks in sizes.block_counts:
        for columns, lines in sizes.screens:
            for load in ("busy", "idle"):
                taken = [measure_once(blocks, columns, lines, load, sizes.seconds) for _ in range(rounds)]
                group = f"{blocks:,} {columns}x{lines} {load}"
                if load == "busy":
                    frames = [m.frames_per_s for m in taken]
                    yield figure(group, "frames a second", "/s", frames, at_least=FRAMES_PER_S)
                    yield figure(group, "first frame", "s", [m.first_frame_s for m in taken])
                limit = BUSY_CORE if load == "busy" else IDLE_CORE
                yield figure(group, "processor", "cores", [m.core for m in taken], at_most=limit)
                yield figure(group, "bytes a frame", "B", [m.bytes_per_frame for m in taken])


def measure_once(blocks: int, columns: int, lines: int, load: str, seconds: float) -> Measured:
    """Run one console in a terminal of its own, which takes whatever it writes at once."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    told, tell = os.pipe()
    command = [sys.executable, "-m", "kvtop.bench.console_child", str(blocks), load, str(seconds), str(tell)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
    environment.pop("NO_COLOR", None)
    started_s = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, pass_fds=[tell], env=environment, start_new_session=True
    )
    os.close(slave)
    os.close(tell)
    try:
        return _watch(master, told, started_s)
    finally:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)
        os.close(told)


def _watch(master: int, told: int, started_s: float) -> Measured:
    written = began = 0
    first_frame_s = 0.0
    words = b""
    tail = b""
    while time.perf_counter() - started_s < _LIMIT_S:
        ready, _, _ = select.select([master, told], [], [], 1.0)
        if master in ready:
            try:
                chunk = os.read(master, 1 << 16)
            except OSError:
                chunk = b""
            written += len(chunk)
            tail = (tail + chunk)[-400:]
        if told in ready:
            said = os.read(told, 4096)
            words += said
            if not said:
                break
            *complete, words = words.split(b"\n")
            for word in complete:
                if word == b"drawn":
                    first_frame_s = time.perf_counter() - started_s
                elif word == b"begin":
                    began = written
                else:
                    report = msgspec.json.decode(word)
                    frames = max(1, report["frames"])
                    return Measured(
                        report["frames"] / report["wall_s"],
                        report["cpu_s"] / report["wall_s"],
                        (written - began) / frames,
                        first_frame_s,
                    )
    last = "".join(c for c in tail.decode(errors="replace") if c.isprintable())[-200:]
    raise KvtopError(f"the console did not come to its end; its last words: {last}")
