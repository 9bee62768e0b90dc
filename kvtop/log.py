"""Log: what a run tells its user on stderr, as lines for people or as JSON lines for machines. Owns no file."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

LogFormat = Literal["text", "json"]
LOG_FORMATS: Final = ("text", "json")
Level = Literal["info", "warning", "error"]

#: Complaints that are written in one window; a far end that sends nonsense all day must not fill the disk.
_MAX_COMPLAINTS: Final = 20
_WINDOW_S: Final = 60.0


class Log:
    """Writes one line a message. Any thread may use it.

    Args:
        form: ``text`` writes ``kvtop: TEXT``; ``json`` one object with ``time`` (UTC), ``level``, ``text`` and facts.
        stream: Where to; standard error by default.
        now: Seconds since 1970, for the lines.
        clock: Monotonic seconds, for what is left out.
    """

    def __init__(
        self,
        form: LogFormat = "text",
        stream: TextIO | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.form: LogFormat = form
        self._stream = stream
        self._now, self._clock = now, clock
        self._lock = threading.Lock()
        self._window_ends_s = clock() + _WINDOW_S
        self._complaints = 0

    def info(self, text: str, **facts: Any) -> None:
        """Write a line that tells how things go."""
        self._write("info", text, facts)

    def warning(self, text: str, **facts: Any) -> None:
        """Write a line about something to look into."""
        self._write("warning", text, facts)

    def error(self, text: str, **facts: Any) -> None:
        """Write a line about what broke."""
        self._write("error", text, facts)

    def complain(self, text: str, **facts: Any) -> None:
        """Write a warning about a far end, at most 20 a minute; then how many were left out."""
        with self._lock:
            left_out = 0
            if self._clock() >= self._window_ends_s:
                left_out = max(0, self._complaints - _MAX_COMPLAINTS)
                self._complaints, self._window_ends_s = 0, self._clock() + _WINDOW_S
            self._complaints += 1
            is_written = self._complaints <= _MAX_COMPLAINTS
        if left_out:
            self.warning(f"{left_out} more complaints about connections were left out", left_out=left_out)
        if is_written:
            self.warning(text, **facts)

    def _write(self, level: Level, text: str, facts: dict[str, Any]) -> None:
        # What is told may hold what a far end sent: nothing of it may start a line of its own or steer a terminal.
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
        if self.form == "json":
            when = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": when, "level": level, "text": text, **facts}, ensure_ascii=False, default=str)
        else:
            line = f"kvtop: {text}"
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading the messages; the work goes on
            print(line, file=self._stream or sys.stderr, flush=True)
