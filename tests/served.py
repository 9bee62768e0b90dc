"""A server of the console in a browser, for tests: a real process, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

#: Seconds for an engine to start, and for a server to end.
_START_S, _END_S = 60.0, 20.0


class Served:
    """A server that runs.

    Attributes:
        url: Where it serves, without a slash at the end.
        process: Its process.
        said: What it has written on standard error so far.
    """

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "kvtop", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, process_group=0)
        self.said = ""
        try:
            self.url = self.hear(r"console on (http://\S+?)/?;")
        except BaseException:
            self.process.kill()
            raise

    def hear(self, pattern: str) -> str:
        """Wait until it has said something, and return the pattern's first group."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        deadline = time.monotonic() + _START_S
        while (found := re.search(pattern, self.said)) is None:
            assert time.monotonic() < deadline, f"never said {pattern}: {self.said}"
            assert self.process.poll() is None or self.said, f"ended with {self.process.returncode}: {self.said}"
            self.said += (self.process.stderr.read() or b"").decode()
            time.sleep(0.02)
        return found[1] if found.groups() else found[0]

    def tabs(self) -> list[int]:
        """Return the processes of its tabs."""
        return [pid for pid, command in _children(self.process.pid) if "kvtop.browser.tab" in command]

    def descendants(self) -> list[int]:
        """Return all processes it has started."""
        return [pid for pid, _ in _children(self.process.pid)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_END_S)

    def close(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_END_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    """Run ``kvtop serve`` with these options."""
    served = Served(*options)
    try:
        yield served
    finally:
        served.close()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pids: list[int], timeout_s: float = _END_S) -> None:
    """Wait until these processes have ended."""
    deadline = time.monotonic() + timeout_s
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[p for p in pids if not is_gone(p)]}"
        time.sleep(0.05)


def _children(parent: int) -> list[tuple[int, str]]:
    """Return the processes below one, with their command lines."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    below.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[tuple[int, str]] = []
    waiting = [parent]
    while waiting:
        for child in below.get(waiting.pop(), []):
            with contextlib.suppress(OSError):
                found.append((child, Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")))
                waiting.append(child)
    return found
