"""Observes a published engine as often as a console does, until its input ends: NAME. Says when it has begun."""

from __future__ import annotations

import sys
import threading

from kvtop.model.observation import Focus
from kvtop.sources.local import LocalSource
from kvtop.sources.named import NamedEngine

EVERY_S = 0.1


def main(name: str) -> None:
    """Look until nobody wants it any more."""
    source = LocalSource(NamedEngine(name))
    source.read(Focus(), 20.0)
    print("looking", flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(EVERY_S):
        source.read(Focus(), 20.0)
    source.close()


if __name__ == "__main__":
    main(sys.argv[1])
