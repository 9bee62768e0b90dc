"""A published engine at full speed under random commands, observers that come and go, and scrapes: nothing grows."""

from __future__ import annotations

import os
import random
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from published import daemon_process, own_directories

from allocator.commands import (
    Cancel,
    Command,
    Compact,
    EvictCached,
    Fork,
    InjectFault,
    Pause,
    Pin,
    Preempt,
    Resize,
    Resume,
    SetAutoCompaction,
    SetLoad,
    SetPolicy,
    SetWatermark,
    Step,
    SubmitLoad,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
)
from allocator.snapshot import Counters, Snapshot
from kvtop.cli import run
from kvtop.model.observation import Focus
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.named import NamedEngine

TIMEOUT_S = 60.0
#: Counters that are no totals, so that they may go down.
_LEVELS = {"peak_active", "faults_by_law", "injected"}


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield


def any_command(rng: random.Random, snapshot: Snapshot) -> Command:
    seq_id = rng.choice([row.seq_id for row in snapshot.sequences] or [0])
    block = rng.randrange(64)
    return rng.choice(
        [
            SubmitLoad(rng.randrange(1, 300), rng.randrange(100), rng.randrange(1, 4)),
            Cancel(seq_id),
            Fork(seq_id),
            Preempt(seq_id, rng.choice(("swap", "recompute"))),
            SwapOut(seq_id),
            SwapIn(seq_id),
            Compact(rng.choice(("pack-low", "longest-run", "by-sequence"))),
            Resize(rng.randrange(64, 400)),
            EvictCached(rng.choice((None, 5))),
            Pin((block,)),
            Unpin(tuple(range(64))),
            SetWatermark(rng.random() / 4),
            SetLoad(rng.choice((0.5, 1.0, 2.0)), rng.choice((0.5, 1.0))),
            SetPolicy(rng.choice(("fcfs", "priority", "sjf"))),
            SetAutoCompaction(rng.choice(("manual", "auto")), 0.5),
            InjectFault("failing-copy"),
            InjectFault("slow-copy", 1, 0.001),
            VerifyContents(),
            Pause(),
            Step(rng.randrange(1, 200)),
        ]
    )


#: Requests waiting above which the load is lightened: a queue that grows for as long as more is asked for than the pool
#: can serve, with some 4 kB a request, is growth that was ordered.
_LONG_QUEUE = 50
LIGHTER: tuple[Command, ...] = (SetLoad(0.5, 0.5), Resize(400), SetWatermark(0.0), SetPolicy("fcfs"))


def totals(counters: Counters) -> dict[str, int]:
    return {name: getattr(counters, name) for name in counters.__struct_fields__ if name not in _LEVELS}


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and descriptors are read from /proc")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_steps_under_random_commands(steps: int) -> None:
    rng = random.Random(steps)
    with daemon_process("t", "--blocks", "256", "--metrics-port", "0") as process:
        assert process.stderr is not None
        while "metrics on" not in (line := process.stderr.readline()):
            assert line
        url = line.split("metrics on ")[1].strip()
        link = NamedEngine("t")
        source, operations = LocalSource(link), LocalOperations(link)
        snapshot = source.read(Focus(), TIMEOUT_S).snapshot
        before, memory, fds, done, rounds = totals(snapshot.counters), [], [], 0, 0
        while snapshot.step < steps:
            rounds += 1
            for _ in range(5):
                command = any_command(rng, snapshot)
                done += operations.apply(command, TIMEOUT_S).ok
                if isinstance(command, VerifyContents):
                    assert operations.apply(command, TIMEOUT_S).ok
            assert operations.apply(Unpin(tuple(range(64))), TIMEOUT_S).message
            for command in LIGHTER if snapshot.num_waiting > _LONG_QUEUE else ():
                assert operations.apply(command, TIMEOUT_S).message
            assert operations.apply(Step(steps // 400), TIMEOUT_S).message
            assert operations.apply(Resume(), TIMEOUT_S).ok
            if rounds % 20 == 1:  # one who comes, looks and goes; a script; a scrape
                passing = LocalSource(NamedEngine("t"), "local:t")
                passing.read(Focus(), TIMEOUT_S)
                passing.close()
                assert run(["ctl", "--json", "verify"]) == 0
                with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                    assert b"kvtop_blocks" in answer.read()
            snapshot = source.read(Focus(next_event=10**12), TIMEOUT_S).snapshot
            after = totals(snapshot.counters)
            assert all(after[name] >= value for name, value in before.items())
            before = after
            memory.append(memory_bytes(process.pid))
            fds.append(descriptors(process.pid))
        assert operations.apply(VerifyContents(), TIMEOUT_S).ok
        assert done > rounds
        assert snapshot.counters.integrity_faults == 0
        source.close()
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    fifth = len(memory) // 5
    assert max(fds) <= max(fds[: fifth + 1]) + 4, "connections that come and go leave no descriptor"
    if steps >= 1_000_000:  # by then every table and queue has had its largest size
        assert max(memory[-fifth:]) <= 1.1 * max(memory[:fifth]) + (4 << 20)
