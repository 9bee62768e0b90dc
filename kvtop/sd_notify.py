"""ServiceManager: tells systemd how a daemon is doing, over the socket it names in the environment. Owns that socket.

Without ``NOTIFY_SOCKET`` every call does nothing, so that the same program runs under a shell.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Final

#: Seconds between two signs of life where the service manager asks for none.
_NO_WATCHDOG_S: Final = float("inf")


class ServiceManager:
    """The service manager that started this process, if one did.

    Args:
        environment: Where its socket and watchdog are named; the names are taken out, so that no child uses them.
        clock: Monotonic seconds.
    """

    def __init__(
        self, environment: MutableMapping[str, str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        environment = os.environ if environment is None else environment
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._clock = clock
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = _NO_WATCHDOG_S
        if microseconds.isdecimal() and int(microseconds) > 0 and pid in ("", str(os.getpid())):
            self._every_s = int(microseconds) / 1e6 / 3
        self._due_s = clock()
        self._socket: socket.socket | None = None
        if self._address.startswith(("/", "\0")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @property
    def is_there(self) -> bool:
        """Whether a service manager listens."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Say that the service does its work, and in what state."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that the configuration is being read again; ``ready`` ends it."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """Say that the service ends."""
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """Give a sign of life if one is due. Call it often."""
        if self._every_s != _NO_WATCHDOG_S and (now_s := self._clock()) >= self._due_s:
            self._due_s = now_s + self._every_s
            self._tell("WATCHDOG=1")

    def close(self) -> None:
        """Let go of the socket. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # a service manager that does not listen changes nothing
                self._socket.sendto("\n".join(lines).encode(), self._address)
