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
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from recorded_runs import SMALL, opened, record, told

from allocator.commands import (
    Annotate,
    Cancel,
    Command,
    Compact,
    EvictCached,
    InjectFault,
    Pause,
    Pin,
    Resize,
    Resume,
    SetLoad,
    SetPolicy,
    SetSpeed,
    Step,
    SubmitLoad,
    VerifyContents,
)
from kvtop import cli, replay
from kvtop.driving import Ending
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import UserError
from kvtop.exporting import serve_metrics
from kvtop.metrics_address import MetricsAddress
from kvtop.recording.compare import first_difference
from kvtop.recording.cut import cut
from kvtop.recording.frames import Note, RecordedCommand, RecordingHeader
from kvtop.recording.framing import Mark
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.rerun import rerun
from kvtop.recording.writer import RecordedEngine, RecordingWriter, load_crc
from kvtop.runner import EngineRunner
from kvtop.workloads.catalog import WORKLOADS

if TYPE_CHECKING:
    from allocator.engine import Engine
    from allocator.snapshot import Snapshot

COMMANDS: dict[int, Command] = {
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


def test_events_are_compared_too() -> None:
    plain = record(300, every=10)
    noted = record(300, every=10, commands={124: Annotate("only here")})
    found = first_difference(opened(noted), opened(plain))
    assert (found.step, found.same_until) == (124, 120) or found.step == 130
    assert any("command at step 124: marked: only here and " in line for line in found.what)
    # Moments of other steps hold the events in other pieces.
    assert first_difference(opened(plain), opened(record(300, every=7))).step is None


def test_a_forged_event_is_found_when_a_run_is_run_again() -> None:
    class Through:
        """An engine that tells one event otherwise than it was."""

        def __init__(self, engine: Engine) -> None:
            self._engine = engine

        def snapshot(self, **asked: Any) -> Snapshot:
            seen = self._engine.snapshot(**asked)
            events = tuple(msgspec.structs.replace(e, text="forged") if e.number == 40 else e for e in seen.events)
            return msgspec.structs.replace(seen, events=events)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    file = io.BytesIO()
    engine, _ = build_engine(SMALL)
    header = RecordingHeader("test", SMALL, 10)
    forged = cast("Engine", Through(engine))
    recorded = RecordedEngine(forged, RecordingWriter(file, header), every=10)
    recorded.advance(400)
    data = file.getvalue()
    recorded.close()
    done = rerun(opened(data))
    assert len(done.what) == 1
    assert done.what[0].startswith("event 40: ")
    assert ": forged and " in done.what[0]


def test_a_piece_is_a_recording_and_can_be_run_again(tmp_path: Path) -> None:
    path, out = tmp_path / "run.kvrec", tmp_path / "piece.kvrec"
    commands = {**COMMANDS, 240: Annotate("seen")}
    path.write_bytes(record(600, every=7, key_every=16, commands=dict(commands)))
    whole = Recording.open(path)
    whole.add_notes([Note(100, "before", 1.0), Note(245, "inside", 2.0)])
    moments = cut(whole, 160, 300, str(out))
    piece = Recording.open(out)
    assert piece.damage is None
    assert piece.header.cut is not None
    assert (piece.header.cut.source, piece.header.options) == ("run.kvrec", SMALL)
    assert (piece.first_step, piece.last_step) == (160, 294)
    assert [note.text for note in piece.notes] == ["seen", "inside"]
    told_whole = [told(whole.moment(n))[1:] for n in range(whole.at(160), whole.last) if whole_moment(whole, n)]
    story = [item for item in piece.story() if isinstance(item, Moment)]
    assert [told(item)[1:] for item in story] == told_whole[:moments]
    done = rerun(piece)
    assert (done.what, done.moments) == ((), moments)
    assert done.step == 294
    assert first_difference(piece, whole).what == ()
    again = cut(piece, 200, 250, str(tmp_path / "again.kvrec"))
    smaller = Recording.open(tmp_path / "again.kvrec")
    assert (rerun(smaller).what, rerun(smaller).moments) == ((), again)
    with pytest.raises(UserError, match="exists"):
        cut(whole, 160, 300, str(out))
    with pytest.raises(UserError, match="the recording has steps 0 to 600"):
        cut(whole, 601, 700, str(tmp_path / "none.kvrec"))
    assert not (tmp_path / "none.kvrec").exists()
    for recording in (whole, piece, smaller):
        recording.close()


def whole_moment(recording: Recording, number: int) -> bool:
    """Return whether a record is a moment."""
    return recording.beside(number - 1, 1) == number


def test_a_piece_after_a_stop_is_the_same_again(tmp_path: Path) -> None:
    """What the engine tried in vain before the piece must be tried again."""
    path, out = tmp_path / "run.kvrec", tmp_path / "piece.kvrec"
    commands: dict[int, Command] = {20: EvictCached(None), 21: Resize(40), 22: Pin(tuple(range(40)))}
    path.write_bytes(record(120, commands=commands, every=5))
    whole = Recording.open(path)
    cut(whole, whole.last_step, whole.last_step, str(out))
    piece = Recording.open(out)
    assert piece.header.cut is not None
    assert len(piece.header.cut.before) >= 3
    assert rerun(piece).what == ()
    whole.close()
    piece.close()


def test_the_pace_is_kept_and_is_not_of_the_run() -> None:
    file = io.BytesIO()
    engine, _ = build_engine(SMALL)
    recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", SMALL, 10)), every=10)
    runner = EngineRunner(recorded, paused=True)
    outcomes = [runner.apply(command) for command in (Step(15), SetSpeed(8.0), Resume(), Pause(), Step(0), Step(7))]
    assert [outcome.ok for outcome in outcomes] == [True, True, True, True, False, True]
    data = file.getvalue()
    recorded.close()
    recording = opened(data)
    commands = [(done.step, done.command) for done in recording.commands()]
    assert commands == [(0, Step(15)), (15, SetSpeed(8.0)), (15, Resume()), (15, Pause()), (15, Step(7))]
    assert recording.step_of(recording.marked(recording.first, Mark.COMMAND, 1) or 0) == 0
    assert rerun(recording).what == ()


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


def test_marks_and_pieces_from_the_command_line(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", files[0], "--mark", "look here", "--at", "57"]) == 0
    assert cli.run(["replay", files[0], "--mark", "the end"]) == 0
    capsys.readouterr()
    assert cli.run(["replay", files[0], "--marks"]) == 0
    assert capsys.readouterr().out == "step  50  look here\nstep 200  the end\n"
    assert cli.run(["replay", files[0], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["recording"]
    assert [(mark["step"], mark["text"]) for mark in told["marks"]] == [(50, "look here"), (200, "the end")]
    piece = files[0] + ".piece"
    assert cli.run(["replay", files[0], "--cut", "40..120", "--out", piece]) == 0
    capsys.readouterr()
    assert cli.run(["replay", piece, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["recording"]
    assert told["cut"] == {"source": "a.kvrec", "first_step": 40, "last_step": 120}
    assert [mark["text"] for mark in told["marks"]] == ["look here"]
    assert cli.run(["replay", piece, "--verify"]) == 0
    assert "9 moments" in capsys.readouterr().out


def test_what_was_never_closed_is_marked_beside_it(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(files[0])
    data = path.read_bytes()[:-300]
    path.write_bytes(data)
    assert cli.run(["replay", files[0], "--mark", "crashed"]) == 0
    assert f"kept in {path}.marks" in capsys.readouterr().err
    assert path.read_bytes() == data
    assert cli.run(["replay", files[0], "--mark", "again"]) == 0
    assert cli.run(["replay", files[0], "--marks"]) == 0
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == ["crashed", "again"]
    beside = Path(f"{path}.marks")
    whole = beside.read_bytes()
    for size in range(len(whole)):
        beside.write_bytes(whole[:size])
        recording = Recording.open(path)
        assert [note.text for note in recording.notes] in ([], ["crashed"])
        recording.close()
    beside.write_bytes(b"something else")
    capsys.readouterr()
    assert cli.run(["replay", files[0], "--mark", "third"]) == 1
    assert "it holds no marks" in capsys.readouterr().err
    assert beside.read_bytes() == b"something else"


def test_a_recording_is_served_and_printed(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", files[0], "--plain", "--once", "--at", "60"]) == 0
    assert "step: 60" in capsys.readouterr().out
    attachment = replay._attach(files[0], 150, None)
    scraped = []

    def stop() -> Ending:
        scraped.append(attachment.view)
        return Ending.TERMINATED

    assert serve_metrics(attachment, address=MetricsAddress("127.0.0.1", 0), stop=stop) == 0
    assert scraped[0].snapshot is not None
    assert scraped[0].snapshot.step == 150


def test_what_was_different_to_begin_with_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_bytes(record(100, commands={40: Resize(90)}))
    paths[1].write_bytes(record(100, commands={60: EvictCached(1)}))
    assert cli.run(["replay", "--diff", *map(str, paths)]) == 1
    out = capsys.readouterr().out
    assert "device blocks: 90 and 96 of them" in out
    assert "the first other command: resize 90 at step 40 and nothing" in out


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
            "standard input is not a terminal: open the recording in a terminal, "
            "or use --plain, --report, --json or --export",
        ),
        (["replay", "a", "b"], "FILE: 2 given; --diff takes two, everything else one"),
        (["replay", "a", "--diff", "--verify"], "--diff and --verify: one of the two, not both"),
        (["replay", "a", "--cut", "5"], "--cut 5: two steps, such as 100..250"),
        (["replay", "a", "--cut", "9..5", "--out", "x"], "--cut 9..5: two steps, such as 100..250"),
        (["replay", "a", "--cut", "5..9"], "--cut: --out FILE says where to"),
        (["replay", "a", "--out", "x"], "--out: only together with --export or --cut"),
        (["replay", "a", "--steps", "1..2"], "--steps: only together with --export"),
        (["replay", "a", "--steps", "x", "--export", "gif"], "--steps x: two steps, such as 100..250"),
        (["replay", "a", "--frames", "1", "--export", "gif"], "--frames 1: a whole number from 2 to 1000"),
        (["replay", "a", "--frames", "5", "--export", "png"], "--frames: only with gif, or with svg and --steps"),
        (
            ["replay", "a", "--steps", "1..2", "--export", "png"],
            "--steps: a png is of one step (--at); gif and svg move",
        ),
        (
            ["replay", "a", "--steps", "1..2", "--at", "1", "--export", "svg"],
            "--at and --steps: one of the two, not both",
        ),
        (["replay", "a", "--once"], "--once: only together with --plain"),
        (["replay", "a", "--headless"], "--headless and --metrics-port N: only together"),
        (["replay", "a", "--metrics-port", "0"], "--headless and --metrics-port N: only together"),
        (["replay", "a", "--metrics-host", "h"], "--metrics-host h: only together with --metrics-port N"),
        (["replay", "a", "--mark", " "], "a mark's text: 1 to 200 printable characters"),
        (["replay", "a", "--mark", "x", "--marks"], "--mark and --marks: one of the two, not both"),
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
