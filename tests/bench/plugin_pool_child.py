"""Measures vLLM's scheduler alone, bare and with the plugin, for ``bench_plugin.py``: MODEL ROUNDS BLOCKS."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_plugin import Observer, in_turns, report
from vllm_scheduler import Driver

from kvtop.plugins import vllm as plugin
from kvtop.plugins.publisher import PoolPublisher

#: Enough for several readings: in less, one more or less of them tells.
STEPS = 4000


def steps_a_second(driver: Driver) -> float:
    """Take steps with sixteen requests running, and return them by processor time of this process, threads included."""
    began_s = time.process_time()
    for _ in range(STEPS):
        while len(driver.scheduler.requests) < 20:
            driver.add()
        driver.step()
    return STEPS / (time.process_time() - began_s)


def main(model: str, rounds: int, num_blocks: int) -> None:
    """Print the ratios."""
    bare = Driver(model, num_blocks)
    PoolPublisher.__init__.__kwdefaults__["clock"] = time.process_time
    plugin.register()
    plugged = Driver(model, num_blocks)
    with Observer("bench", "cpu") as observer:
        measures = {
            "bare": lambda: steps_a_second(bare),
            "plugin": lambda: steps_a_second(plugged),
            "plugin, observed": lambda: observer.during(lambda: steps_a_second(plugged)),
        }
        for measure in measures.values():
            measure()
        report(f"pool of {num_blocks} blocks", "steps a processor second", in_turns(measures, rounds))
    plugged.scheduler.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
