"""The engine process around a fake engine. ``options.workload`` chooses how it behaves: see ``build``."""

from __future__ import annotations

import os
import sys
import time

from fake_engine import FakeEngine

from allocator.commands import Command, VerifyContents
from allocator.errors import ConfigError
from kvtop import engine_process
from kvtop.engine_setup import EngineOptions


def build(options: EngineOptions) -> tuple[FakeEngine, tuple[str, ...]]:
    match options.workload:
        case "refuse":
            raise ConfigError("--blocks", options.num_blocks, "a whole number from 1 to 9")
        case "raise":
            raise ZeroDivisionError("by zero")
        case "die":
            print("cannot find the thing", file=sys.stderr, flush=True)
            os._exit(3)
        case "slow":
            time.sleep(60)
        case "chatter":
            print("x" * 5_000_000, flush=True)
    engine = FakeEngine(options.num_blocks, options.num_swap_blocks or 0)

    def obey(command: Command) -> None:
        if isinstance(command, VerifyContents):
            if options.workload == "hang":
                time.sleep(60)
            time.sleep(0.5)

    engine.apply_with = obey
    engine.skips = options.workload == "skip"
    return engine, ("built for a test",)


if __name__ == "__main__":
    engine_process.build_engine = build
    sys.exit(engine_process.main(sys.argv[1:]))
