"""Recordings compared, run again, and told: ``kvtop replay`` without a screen."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorded_runs import SMALL, opened, record

from allocator.commands import (
    Cancel,
    Compact,
    EvictCached,
    InjectFault,
    Pin,
    Resize,
    SetLoad,
    SetPolicy,
    SubmitLoad,
    VerifyContents,
)
from kvtop import cli
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import UserError
from kvtop.recording.compare import first_difference
from kvtop.recording.frames import RecordedCommand, RecordingHeader
from kvtop.recording.reader import Recording
from kvtop.recording.rerun import rerun
from kvtop.recording.writer import RecordedEngine, RecordingWriter, load_crc
from kvtop.runner import EngineRunner
from kvtop.workloads.catalog import WORKLOADS

COMMANDS = {
    110: SubmitLoad(40, 20, 30),
    113: EvictCached(None),
    150: Resize(140),
    155: Compact("pack-low"),
    160: SetLoad(rate_scale=2.0, size_scale=0.5),
    171: SetPolicy("sjf"),
    188: Cancel(10**6),
    205: Resize(90),
}


@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        EngineOptions(num_blocks=80, swap_ratio=1.0, geometry="tiny", stamp=True, speed=None, compact="auto", seed=8),
        EngineOptions(num_blocks=64, num_swap_blocks=16, geometry="tiny", speed=None, policy="sjf", executor="inline"),
        EngineOptions(num_blocks=96, swap_ratio=0.5, geometry="tiny", speed=None, inject=(("failing-copy", 0.05),)),
    ],
    ids=["books", "stamped", "sjf", "faults"],
)
@pytest.mark.parametrize("every", [1, 7])
def test_a_run_is_the_same_when_it_is_run_again(options: EngineOptions, every: int) -> None:
    recording = opened(record(600, options=options, every=every, key_every=64, commands=dict(COMMANDS)))
    done = rerun(recording)
    assert done.what == ()
    assert done.commands == len(COMMANDS)
    assert done.step == recording.last_step
    assert done.moments >= 600 // every


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_every_workload_is_the_same_when_it_is_run_again(workload: str) -> None:
    geometry = "model" if workload == "model" else "none"
    options = EngineOptions(num_blocks=2048, geometry=geometry, speed=None, seed=2, workload=workload)
    recording = opened(record(250, options=options, every=9, commands={100: SetLoad(2.0, 0.5)}))
    done = rerun(recording)
    assert (done.what, done.commands) == ((), 1)


def test_a_run_that_was_paced_by_a_runner_is_the_same_at_full_speed() -> None:
    now_s = 0.0
    file = io.BytesIO()
    engine, _ = build_engine(SMALL)
    recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", SMALL, 3)), every=3)
    runner = EngineRunner(recorded, speed=16.0, clock=lambda: now_s)
    for turn in range(200):
        now_s += 0.001 * (turn % 17)
        runner.turn()
        if turn == 100:
            runner.apply(EvictCached(2))
    data = file.getvalue()
    recorded.close()
    done = rerun(opened(data))
    assert (done.what, done.commands) == ((), 1)
    assert done.step > 300


def test_a_run_that_comes_to_a_stop_is_the_same_again() -> None:
    """Nothing can get on when an operator holds all of the pool."""
    commands = {20: EvictCached(None), 21: Resize(40), 22: Pin(tuple(range(40)))}
    recording = opened(record(120, commands=dict(commands), every=5))
    done = rerun(recording)
    assert (done.what, done.commands) == ((), 3)


def test_what_happens_in_a_last_turn_without_a_step_is_the_same_again(tmp_path: Path) -> None:
    """The last request of a trace is refused, and then nothing is left to do."""
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 2), (4000, 500)]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": ms, "input_length": 512 * n, "output_length": 3, "hash_ids": [*range(n)]}) + "\n"
            for ms, n in rows
        )
    )
    options = EngineOptions(num_blocks=20, num_swap_blocks=0, geometry="none", speed=None, trace=str(trace))
    file = io.BytesIO()
    engine, _ = build_engine(options)
    header = RecordingHeader("test", options, 40, load_crc(options))
    recorded = RecordedEngine(engine, RecordingWriter(file, header), every=40)
    while recorded.advance(1000):
        pass
    data = file.getvalue()
    recorded.close()
    recording = opened(data)
    assert recording.moment(recording.last).snapshot.counters.refused == 1
    assert rerun(recording).what == ()
    trace.write_text(trace.read_text().replace("4000", "5000"))
    with pytest.raises(UserError, match="has changed since"):
        rerun(recording)


def test_a_forged_recording_differs() -> None:
    """Another seed in the header than the one that ran."""
    file = io.BytesIO()
    engine, _ = build_engine(SMALL)
    header = RecordingHeader("test", EngineOptions(num_blocks=96, num_swap_blocks=48, geometry="none", seed=4), 5)
    recorded = RecordedEngine(engine, RecordingWriter(file, header), every=5)
    recorded.advance(100)
    data = file.getvalue()
    recorded.close()
    done = rerun(opened(data))
    assert done.what
    assert done.step < 100


def test_the_first_difference_is_where_a_command_came() -> None:
    plain = record(300, every=1)
    other = record(300, every=1, commands={123: Resize(97)})
    found = first_difference(opened(plain), opened(other))
    assert (found.step, found.same_until) == (123, 122)
    assert any("device blocks: 96 and 97" in line for line in found.what)
    same = first_difference(opened(plain), opened(record(200, every=7)))
    assert (same.step, same.same_until) == (None, 200)


def test_attached_programs_cannot_be_run_again() -> None:
    file = io.BytesIO()
    RecordedEngine(
        build_engine(SMALL)[0], RecordingWriter(file, RecordingHeader("test", SMALL, 1, attached=True)), every=1
    )
    with pytest.raises(UserError, match="cannot be run again"):
        rerun(opened(file.getvalue()))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two recorded runs of different seeds."""
    paths = tuple(str(tmp_path / name) for name in ("a.kvrec", "b.kvrec"))
    for seed, path in enumerate(paths):
        arguments = ["run", "--geometry", "none", "--blocks", "64", "--steps", "200", "--seed", str(seed)]
        assert cli.run([*arguments, "--record", path, "--record-every", "10"]) == 0
    return paths[0], paths[1]


def test_replay_tells_a_moment(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.run(["replay", files[0], "--json", "--at", "55"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["snapshot"]["step"] == told["report"]["steps"] == 50
    assert told["recording"]["last_step"] == 200
    assert told["recording"]["options"]["num_blocks"] == 64
    assert told["report"]["wall_s"] is None
    assert cli.run(["replay", files[0], "--report"]) == 0
    assert "200 steps in —" in capsys.readouterr().out


def test_replay_compares_and_verifies(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", "--diff", files[0], files[0]]) == 0
    assert cli.run(["replay", "--diff", *files]) == 1
    assert "differ at step 10" in capsys.readouterr().out
    assert cli.run(["replay", files[1], "--verify"]) == 0
    assert "the same run: 21 moments and 0 commands, to step 200" in capsys.readouterr().out
    assert cli.run(["replay", files[1], "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["replay", "missing.kvrec", "--json"], "missing.kvrec: No such file or directory"),
        (["replay", "--diff", "one"], "FILE: 1 given; --diff takes two, everything else one"),
        (
            ["replay", "a"],
            "standard input is not a terminal: open the recording in a terminal, or use --report, --json or --export",
        ),
        (["replay", "a", "b"], "FILE: 2 given; --diff takes two, everything else one"),
        (["replay", "a", "--diff", "--verify"], "--diff and --verify: one of the two, not both"),
        (["replay", __file__, "--json"], f"{__file__} is not a recording of kvtop"),
        (["run", "--record-every", "2"], "--record-every 2: only together with --record FILE"),
        (["run", "--record", __file__], f"--record {__file__}: exists already; choose another name"),
    ],
)
def test_wrong_requests_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err == f"kvtop: {text}\n"


def test_a_run_that_is_killed_leaves_all_but_its_last_record(tmp_path: Path) -> None:
    path = tmp_path / "killed.kvrec"
    command = [sys.executable, "-m", "kvtop", "run", "--geometry", "none", "--steps", "1000000", "--record", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 200_000:
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            os.sched_yield()
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    recording = Recording.open(path)
    assert recording.damage is not None
    assert path.stat().st_size - recording._records.end < 100_000
    assert rerun(recording).what == ()
    recording.close()


def test_a_fault_that_is_caught_is_caught_again() -> None:
    options = EngineOptions(num_blocks=64, geometry="tiny", stamp=True, speed=None, seed=1)
    recording = opened(
        record(200, options=options, every=10, commands={90: InjectFault("flipped-bit"), 91: VerifyContents()})
    )
    done = rerun(recording)
    assert (done.what, done.commands) == ((), 2)
    outcomes = [item.outcome for item in recording.story() if isinstance(item, RecordedCommand)]
    assert [outcome.ok for outcome in outcomes] == [True, False]
