"""Observes a published engine as often as a console does: NAME [cpu]. Told ``look`` and ``rest``; ends with its input.

With ``cpu`` the engine's own processor time is the clock, as if it had a processor for itself.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

EVERY_S = 0.1


def main(name: str, by_cpu: bool) -> None:
    """Do as told until nobody tells anything any more."""
    from kvtop.model.observation import Focus
    from kvtop.sources.local import LocalSource
    from kvtop.sources.named import NamedEngine

    link = NamedEngine(name)
    source = LocalSource(link)
    looks, over = threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            (looks.set if line == "look\n" else looks.clear)()
            print(line, end="", flush=True)
        over.set()
        looks.set()

    threading.Thread(target=listen, daemon=True).start()
    looked_s = 0.0
    while looks.wait() and not over.wait(EVERY_S / 10 if by_cpu else EVERY_S):
        now_s = cpu_s(link.pid) if by_cpu else looked_s + EVERY_S
        if now_s - looked_s >= EVERY_S:
            looked_s = now_s
            source.read(Focus(), 20.0)
    source.close()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, all its threads together. [s]"""
    spent_s = 0.0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            spent_s += int(task.read_text().split()[0]) / 1e9
        except OSError:
            continue  # the thread has ended
    return spent_s


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["cpu"])
