"""BrowserDriver: Textual's driver for a browser, ended by the end of its input and never by its output's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from functools import partial
from typing import Any, Final

from textual import messages
from textual.drivers.web_driver import WebDriver

from kvtop.errors import EXIT_FAILED

#: Seconds the console has to end by itself once nobody feeds it any more.
_END_S: Final = 5.0


class BrowserDriver(WebDriver):
    """Draws into the pipe of the server that started this process, and leaves when that server is gone.

    The library's driver goes on without a server, for ever and unseen.
    """

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        self._write = partial(self._put)

    def _put(self, data: bytes) -> int:
        with contextlib.suppress(BrokenPipeError):  # the end of the input tells of the same, and is acted on
            return os.write(self.fileno, data)
        return len(data)

    def start_application_mode(self) -> None:
        """Begin to draw and to take input."""
        self._loop = asyncio.get_running_loop()
        super().start_application_mode()

    def run_input_thread(self) -> None:
        """Take what the browser sends until there is no more, and end the console then."""
        # The library announces the first size by a task; a window that changes its size meanwhile must come after it.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(_END_S)
        super().run_input_thread()
        if self.exit_event.is_set():
            return
        deadline = threading.Timer(_END_S, os._exit, (EXIT_FAILED,))
        deadline.daemon = True
        deadline.start()
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._app.post_message(messages.ExitApp())
