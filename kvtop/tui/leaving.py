"""Leaving: quitting, signals, the shell's job control, and a terminal that takes no more output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import termios
import threading
from types import FrameType
from typing import Any, Final

from rich.console import RenderableType

from kvtop.errors import EXIT_INTERRUPTED
from kvtop.tui.watching import Watching

#: How long after a signal a terminal that takes no output may hold up the end.
_STALLED_S: Final = 5.0
#: Between looks at whether the console was left, while the terminal is watched. [s]
_LOOK_S: Final = 1.0


class Leaving(Watching):
    """How the console ends, and how it gives the terminal back. ``KvtopApp`` is the only subclass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._left = threading.Event()
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._terminal: int | None = None

    def _listen_to_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # Plain handlers rather than the loop's: those would wait for a loop that a stalled terminal holds up.
        loop = asyncio.get_running_loop()

        def leave(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.action_interrupt)
            threading.Thread(target=self._leave_at_last, name="kvtop-leave", daemon=True).start()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old_handlers[number] = signal.signal(number, leave)
        if not self.is_headless and sys.__stdin__ is not None and sys.__stdin__.isatty():
            self._terminal = sys.__stdin__.fileno()
            threading.Thread(target=self._watch_terminal, args=(loop,), name="kvtop-terminal", daemon=True).start()

    def _watch_terminal(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave when the terminal is gone. Only those whose controlling terminal it is get a signal then."""
        while not self._left.is_set():
            if self._hung_up(_LOOK_S):
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self.action_interrupt)
                self._leave_at_last()
                return

    def _hung_up(self, wait_s: float) -> bool:
        """Return whether the terminal is gone, or goes in ``wait_s``."""
        watch = select.poll()
        if self._terminal is not None:
            watch.register(self._terminal, 0)  # nothing is asked for: a hang-up is always told
        return bool(watch.poll(wait_s * 1000))

    def _leave_at_last(self) -> None:
        """End the process if the screen cannot be left, because its terminal takes no more output."""
        if self._left.wait(_STALLED_S):
            return
        before = getattr(self._driver, "attrs_before", None)
        if before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.__stdin__.fileno() if sys.__stdin__ else 0, termios.TCSANOW, before)
        os._exit(EXIT_INTERRUPTED)

    def run(self, **options: Any) -> Any:
        """Show the console until it is left; ``return_code`` tells how."""
        try:
            return super().run(**options)
        finally:
            self._left.set()

    def panic(self, *renderables: RenderableType) -> None:
        """End with a fault shown; that a terminal which is gone cannot be read is none."""
        if self._hung_up(0):
            self.action_interrupt()
        else:
            super().panic(*renderables)

    async def action_quit(self) -> None:
        self.exit()

    def action_suspend(self) -> None:
        """Stop this job and give the terminal back to the shell, as Ctrl-Z does elsewhere. The engine goes on."""
        driver = self._driver
        # A job that a shell controls has a process group of its own; without such a shell nobody could continue it.
        if driver is None or not driver.can_suspend or os.getpgrp() == os.getsid(0):
            self.say("no shell to go back to")
            return
        driver.suspend_application_mode()
        # All of the job: stopped alone, this process would leave a `make` in front of it waiting unseen. SIGSTOP
        # rather than SIGTSTP, so that nobody takes the terminal before it is restored. The driver sees to SIGCONT.
        os.killpg(0, signal.SIGSTOP)

    def action_interrupt(self) -> None:
        """Leave at once, by Ctrl-C or a signal."""
        self.exit(return_code=EXIT_INTERRUPTED)

    async def on_unmount(self) -> None:
        """Put the signals back and let the engine go."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self.remember_now()
        await self.let_go()
