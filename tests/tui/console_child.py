"""A console of its own process, for tests of start and stop: ``console_child.py MODE``."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from tui_fakes import FakeOperations, FocusedSource, scripted_arrays, scripted_observation

from kvtop.attachment import Attachment
from kvtop.model.observation import Focus, Observation
from kvtop.tui.app import KvtopApp


class _Source(FocusedSource):
    """Reads well three times, and then hangs or fails as the mode says."""

    mode = sys.argv[1]

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        if len(self.asked) >= 3 and self.mode == "hang":
            threading.Event().wait(60)
        if len(self.asked) >= 3 and self.mode == "fault":
            raise ZeroDivisionError("a fault in the poll thread")
        return super().read(focus, timeout_s)

    def close(self) -> None:
        if self.mode == "close-hang":
            threading.Event().wait(60)


class _App(KvtopApp):
    def on_view_changed(self) -> None:
        super().on_view_changed()
        if _Source.mode == "screen-fault":
            raise ZeroDivisionError("a fault in the screen")


def _connect() -> Attachment:
    if _Source.mode == "slow":
        threading.Event().wait(60)
    readings = [scripted_observation(step=1000 + i, device=scripted_arrays(1024 + i % 2)) for i in range(400)]
    return Attachment(_Source(readings), FakeOperations(), time.monotonic)


app = _App(_connect, refresh_hz=50 if _Source.mode == "flood" else 10)
app.run()
with contextlib.suppress(OSError):  # the terminal may be gone
    print("torch loaded:", "torch" in sys.modules, flush=True)
sys.exit(app.return_code)
