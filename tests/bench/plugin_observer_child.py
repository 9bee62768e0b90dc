"""Observes a published engine as often as a console does, until its input ends: NAME [cpu]. Says when it has begun.

With ``cpu`` the engine's own processor time is the clock, as if it had a processor for itself.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from kvtop.model.observation import Focus
from kvtop.sources.local import LocalSource
from kvtop.sources.named import NamedEngine

EVERY_S = 0.1


def main(name: str, by_cpu: bool) -> None:
    """Look until nobody wants it any more."""
    link = NamedEngine(name)
    source = LocalSource(link)
    source.read(Focus(), 20.0)
    print("looking", flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    looked_s = 0.0
    while not over.wait(EVERY_S / 10 if by_cpu else EVERY_S):
        now_s = cpu_s(link.pid) if by_cpu else looked_s + EVERY_S
        if now_s - looked_s >= EVERY_S:
            looked_s = now_s
            source.read(Focus(), 20.0)
    source.close()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process's main thread. [s]"""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["cpu"])
