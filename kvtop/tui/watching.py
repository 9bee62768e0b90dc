"""Watching: the thread that reads the engine, from connecting to letting it go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rich.text import Text
from textual.message import Message

from kvtop.attachment import Attachment
from kvtop.errors import EXIT_FAILED, KvtopError
from kvtop.model.view import TierView, View
from kvtop.tui.background import Background, reason
from kvtop.tui.messages import BackgroundCrashed, Connected, ConnectFailed, ViewChanged
from kvtop.tui.serving_actions import ServingActions

#: Seconds between two updates of tables and numbers; the map follows every view.
_PANES_EVERY_S: Final = 0.25
#: Readings a second while the engine is lost.
_LOST_HZ: Final = 2.0
#: Readings alike after which an engine is taken to stand still, and readings a second from then on until a key asks
#: for something.
_STILL_AFTER: Final = 10
_STILL_HZ: Final = 2.0
#: What quitting may take: for the threads to end, and for the engine to be let go.
_STOP_THREADS_S: Final = 0.5
_STOP_ENGINE_S: Final = 1.2


class Watching(ServingActions):
    """Connects, polls on a thread of its own, and posts ``ViewChanged``. ``KvtopApp`` is the only subclass.

    Args:
        connect: Gives the attachment.
        restart: Gives a new one after the engine was lost; ``None`` when that is not on offer.
        again: What the key for that does.
        refresh_hz: Readings a second.
        auto_poll: Read by itself.
        clock: Monotonic seconds, the same as the attachment's.
        options: For the framework.
    """

    def __init__(
        self,
        connect: Callable[[], Attachment],
        *,
        restart: Callable[[], Attachment] | None,
        again: str,
        refresh_hz: float,
        auto_poll: bool,
        clock: Callable[[], float],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.attachment = None
        self.selected = None
        self.clock = clock
        self._connect = connect
        self._restart = restart
        self._again = again
        self._refresh_hz = refresh_hz
        self._auto_poll = auto_poll
        self._background = Background(lambda error: self._post(BackgroundCrashed(error)))
        self._drawn = threading.Event()
        self._poll_now = threading.Event()
        self._polling: threading.Event | None = None
        self._panes_at_s: float | None = None
        self._told: tuple[str, ...] = ()
        self._busy = False

    @property
    def view(self) -> View:
        """The current view; an empty one before the engine answered."""
        return self.attachment.view if self.attachment else View(source="")

    def _show_header(self) -> None:
        raise NotImplementedError

    # Connecting and polling -----------------------------------------------------------------------------------------

    def _start(self, connect: Callable[[], Attachment]) -> None:
        def work() -> None:
            try:
                attachment = connect()
            except Exception as error:
                self._post(ConnectFailed(error))
                return
            if self._background.stopping.is_set() or not self._post(Connected(attachment)):
                attachment.close()

        self._background.start("connect", work)

    @property
    def has_panes(self) -> bool:
        """Whether there is anything to draw on: at the end the panes go before the last messages are handled."""
        return bool(self.screen_stack) and bool(self._base.query("#map"))

    def _stop_polling(self) -> None:
        """Let the engine be read no more that another takes the place of."""
        if self._polling is not None:
            self._polling.set()

    def on_connected(self, message: Connected) -> None:
        if not self.has_panes:
            message.attachment.close()
            return
        self._stop_polling()
        self.attachment = message.attachment
        if self._busy:
            self._busy = False
            self.say("a new engine runs", "good")
        self.selected = None
        self._held, self._back = None, 0
        self._told = ()
        self._changes.clear()
        self.main.say("reading the first block map…")
        self._look_at()
        if self._auto_poll:
            stop = self._polling = threading.Event()
            attachment = message.attachment
            self._background.start("poll", lambda: self._poll_loop(attachment, stop))
        self._show(everything=True)

    def on_connect_failed(self, message: ConnectFailed) -> None:
        error = message.error
        if self.attachment is not None:
            self._busy = False
            self.say(f"restart failed: {reason(error)}", "bad")
            return
        code = error.exit_code if isinstance(error, KvtopError) else EXIT_FAILED
        self.exit(return_code=code, message=Text(f"kvtop: {reason(error)}"))

    def on_background_crashed(self, message: BackgroundCrashed) -> None:
        self.exit(return_code=EXIT_FAILED, message=Text(f"kvtop: {reason(message.error)}"))

    def _poll_loop(self, attachment: Attachment, stop: threading.Event) -> None:
        stopping = self._background.stopping
        due_s = time.monotonic()
        seen: tuple[int | None, TierView | None] = (None, None)
        unchanged = 0
        while not stopping.is_set() and not stop.is_set():
            self._poll_now.clear()
            view = attachment.poll()
            self._beside.follow(view, self.clock())
            if stop.is_set():
                return
            self._drawn.clear()
            if not self._post(ViewChanged()):
                return
            # A slow terminal is sent fewer frames, rather than a queue of them.
            self._drawn.wait(1.0)
            facts = (view.snapshot.step if view.snapshot else None, view.maps.get("device"))
            unchanged = unchanged + 1 if facts == seen else 0
            seen = facts
            hz = self._refresh_hz
            if view.error is not None:
                hz = min(_LOST_HZ, hz)
            elif unchanged >= _STILL_AFTER:
                hz = min(_STILL_HZ, hz)
            now_s = time.monotonic()
            # From due time to due time, so that what a reading takes does not lower the rate; lag is not caught up.
            due_s = max(due_s + 1 / hz, now_s)
            self._poll_now.wait(max(0.005, due_s - now_s))
            if self._poll_now.is_set():
                due_s = time.monotonic()

    async def poll_once(self) -> None:
        """Read once and draw the reading: the step of a console without ``auto_poll``."""
        if self.attachment is not None:
            self._beside.follow(self.attachment.poll(), self.clock())
            self._show(everything=True)

    def on_view_changed(self) -> None:
        if self.has_panes:
            self._show(everything=self._panes_at_s is None or self.clock() - self._panes_at_s >= _PANES_EVERY_S)
        self._drawn.set()

    def _post(self, message: Message) -> bool:
        """Post from any thread; false once the screen is gone."""
        try:
            return self.post_message(message)
        except RuntimeError:
            return False

    def action_restart(self) -> None:
        if self.view.error is None:
            self.say("the engine is there; nothing to restart")
        elif self._restart is None:
            self.say("this engine was not started here, so it cannot be restarted here", "bad")
        elif not self._busy:
            self._busy = True
            self.say(f"{self.look.key('restart')} {self._again}…")
            self._stop_polling()
            lost, restart = self.attachment, self._restart

            def again() -> Attachment:
                if lost is not None:
                    lost.close()
                return restart()

            self._start(again)

    async def let_go(self) -> None:
        """Stop the threads and let the engine go, within two seconds even if it hangs."""
        attachment = self.attachment

        def close() -> None:
            if attachment is not None:
                attachment.close()
            self._beside.close()

        closing = threading.Thread(target=close, name="kvtop-close", daemon=True)
        self._background.stopping.set()
        self._drawn.set()
        self._poll_now.set()
        closing.start()
        await asyncio.to_thread(self._background.stop, _STOP_THREADS_S)
        await asyncio.to_thread(closing.join, _STOP_ENGINE_S)
