"""Published engines for tests: one in a thread of this process, and one as a real process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import until

from kvtop.daemon import Daemon
from kvtop.driving import Bounds, Drive, Ending, Signals
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.local_socket import connect, socket_path
from kvtop.log import Log

OPTIONS = EngineOptions(num_blocks=64, swap_ratio=0.5, geometry="none", speed=None, seed=3)


def own_directories(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Let this test's sockets, logs and configuration lie below ``root``, which must be a short path."""
    for variable in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        directory = root / variable[4:7].lower()
        directory.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(directory))


class ThreadedDaemon:
    """A daemon whose engine runs in a thread of this process, until ``close``."""

    def __init__(
        self, name: str, options: EngineOptions = OPTIONS, bounds: Bounds | None = None, **how: object
    ) -> None:
        self.signals = Signals()
        self.driven: Drive | None = None
        self.daemon: Daemon | None = None
        self.error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(name, options, bounds or Bounds(), how), daemon=True)
        self._thread.start()
        assert self._started.wait(30)
        if self.daemon is None:
            assert self.error is not None
            raise self.error

    def _run(self, name: str, options: EngineOptions, bounds: Bounds, how: dict[str, object]) -> None:
        engine, notes = build_engine(options)
        settings = {"stays": True, "after_turn": lambda now_s: None, "notes": notes, **how}
        try:
            self.daemon = Daemon(engine, name, options, bounds, signals=self.signals, **settings)  # type: ignore[arg-type]
            self.engine = engine
            self._started.set()
            self.driven = self.daemon.run()
        except BaseException as error:
            self.error = error
        finally:
            if self.daemon is not None:
                self.daemon.close()
            engine.close()
            self._started.set()

    def join(self) -> Drive | None:
        """Wait for its end and return how it ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.driven

    def close(self) -> Drive | None:
        """Ask it to end as SIGTERM does, and wait for it."""
        self.signals.ending = self.signals.ending or Ending.TERMINATED
        return self.join()


class Lines(Log):
    """A log that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _write(self, level: str, text: str, facts: dict[str, object]) -> None:  # type: ignore[override]
        self.lines.append(text)


@contextlib.contextmanager
def daemon_process(name: str, *args: str, command: str = "run") -> Iterator[subprocess.Popen[str]]:
    """Run ``kvtop run --publish NAME`` until the block ends; it is there when the block begins."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtop", command, "--publish", name, "--geometry", "none", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: process.poll() is not None or is_listening(name), 60)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def is_listening(name: str) -> bool:
    """Return whether an engine of that name answers."""
    try:
        connect(socket_path(name)).close()
    except Exception:
        return False
    return True
