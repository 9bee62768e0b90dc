"""Attached programs in processes of their own, killed ones, ones that send nonsense; and the engine beside them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fake_engine import until

import kvtop
from allocator.commands import Pause
from allocator.config import EngineConfig
from allocator.content import OpaqueContent, Request
from allocator.engine import Engine
from kvtop.check import ProgressWatch
from kvtop.client import Client, OutOfBlocks
from kvtop.client_messages import AppendTokens, ClientAnswer, ClientCall, ClientRefused, Greet, StartSequence
from kvtop.driving import Bounds, Ending, drive
from kvtop.engine_process import EngineProcess
from kvtop.engine_setup import EngineOptions
from kvtop.errors import SourceError, UserError
from kvtop.local_socket import connect, socket_path
from kvtop.model.observation import Focus
from kvtop.runner import EngineRunner
from kvtop.server import EngineServer, PublishedEngine
from kvtop.sources.in_process import InProcessSource
from kvtop.wire import Failed, Hello, Observe, PlanCommand, client_connection

BOOKS_ONLY = {"geometry": "none", "block_size": 4, "num_swap_blocks": 0}

#: A program that holds a sequence of 12 tokens, says so, and waits to be killed.
HOLDER = """
import sys, threading, kvtop
client = kvtop.attach("local:test", name="holder")
sequences = [client.sequence(range(12)), client.sequence(range(100, 112))]
sequences.append(sequences[0].fork())
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


@pytest.fixture
def engine() -> Iterator[Engine]:
    e = Engine(EngineConfig(num_blocks=32, **BOOKS_ONLY))
    yield e
    e.close()


@pytest.fixture
def published(engine: Engine) -> Iterator[PublishedEngine]:
    p = PublishedEngine("test", engine.clients)
    yield p
    p.close()


def start(program: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=30)


def test_the_example_in_the_readme() -> None:
    page = (Path(kvtop.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code, output = re.search(
        r"## Programs of your own\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]) <= 10
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (output, "")


# ---- programs of their own


def test_a_killed_program_leaves_nothing(engine: Engine, published: PublishedEngine) -> None:
    with kvtop.attach("local:test") as survivor, survivor.sequence(range(12)) as kept:
        processes = [start(HOLDER) for _ in range(3)]
        assert engine.clients.num_sequences == 10
        labels = {row.label for row in engine.snapshot(phase="", speed=None, steps_per_s=None).sequences}
        assert {f"client:{process.pid} holder" for process in processes} < labels
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: engine.clients.num_clients == 1)
        assert engine.clients.num_sequences == 1
        assert engine.manager.device.num_active == 3
        kept.append([1])
        engine.check()
        texts = [event.text for event in engine.snapshot(phase="", speed=None, steps_per_s=None).events]
        assert f"client:{processes[0].pid} holder detached" in texts
        for process in processes:
            end(process)


def test_a_child_that_inherits_the_connection_does_not_keep_it(engine: Engine, published: PublishedEngine) -> None:
    process = start(HOLDER.replace('print("ready"', 'import os\nif os.fork():\n    print("ready"'))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    until(lambda: engine.clients.num_clients == 0)
    assert engine.manager.device.num_active == 0
    end(process)


def test_an_engine_that_dies_is_said(runtime: Path) -> None:
    process = EngineProcess.start(EngineOptions(num_blocks=32, geometry="none", workload="attached"), publish="test")
    try:
        process.wait_ready()
        client = kvtop.attach("local:test")
        s = client.sequence(range(20))
        assert len(s.table()) == 2
        os.kill(process.pid, signal.SIGKILL)
        process._process.wait(10)
        with pytest.raises(SourceError):
            s.append([1])
        client.close()
    finally:
        process.close()
    with pytest.raises(SourceError, match="is gone"):
        kvtop.attach("local:test")


def test_the_consoles_engine_refuses_a_name_in_use(published: PublishedEngine) -> None:
    process = EngineProcess.start(EngineOptions(num_blocks=32, geometry="none"), publish="test")
    try:
        with pytest.raises(UserError, match="--publish test: an engine of that name runs already"):
            process.wait_ready()
    finally:
        process.close()


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtop", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--workload", "attached"), "--workload attached: only together with --publish NAME"),
        (("run", "--publish", "a/b", "--steps", "1"), "--publish a/b: an engine's name is"),
        (("run", "--publish", "test", "--steps", "1"), "--publish test: an engine of that name runs already"),
        (("check", "--threads", "2", "--publish", "x"), "--publish: not together with --threads"),
    ],
)
def test_wrong_requests(published: PublishedEngine, arguments: tuple[str, ...], words: str) -> None:
    done = run_cli(*arguments, "--geometry", "none")
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]


def test_a_run_that_others_drive() -> None:
    command = ["run", "--workload", "attached", "--publish", "other", "--geometry", "none", "--blocks", "64", "--json"]
    run = subprocess.Popen([sys.executable, "-m", "kvtop", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: socket_path("other").exists(), 60)
        with kvtop.attach("local:other", name="driver") as client, client.sequence(range(100)) as s:
            s.append(range(28))
        run.terminate()
        out, err = run.communicate(timeout=30)
    finally:
        end(run)
    assert run.returncode == 0, err
    report = msgspec.json.decode(out)
    assert report["tokens"] == {"prompt": 100, "generated": 28}
    assert report["requests"] == {"submitted": 1, "finished": 1, "cancelled": 0, "refused": 0}
    assert report["blocks"]["cached"] == report["blocks"]["peak_active"] == 8
    assert not socket_path("other").exists()


# ---- nonsense


def test_malformed_messages_get_one_error_and_harm_nobody(engine: Engine, published: PublishedEngine) -> None:
    with kvtop.attach("local:test") as client, client.sequence(range(12)) as s:
        for message, words in (
            (b"\0\0\0\2{}", "could not be understood"),
            (b"\x7f\xff\xff\xff", "at most 1048576 are allowed"),
            (b"\0\0\0\1\xc0", "could not be understood"),
        ):
            wire = client_connection(connect(published.path))
            assert isinstance(wire.receive(10), Hello)
            wire._sock.sendall(message)
            answer = wire.receive(10)
            assert isinstance(answer, Failed)
            assert words in answer.text
            with pytest.raises(SourceError, match="closed"):
                wire.receive(10)
            wire.close()
        s.append([1])
    engine.check()


def test_calls_out_of_turn_or_out_of_bounds(engine: Engine, published: PublishedEngine) -> None:
    wire = client_connection(connect(published.path))
    assert isinstance(wire.receive(10), Hello)

    def ask(call: object) -> object:
        wire.send(ClientCall(1, call, 1.0))  # type: ignore[arg-type]
        return wire.receive(10)

    def refused(call: object) -> str:
        answer = ask(call)
        assert isinstance(answer, ClientRefused)
        return answer.text

    assert refused(StartSequence(b"\1\0\0\0")) == "say who you are first"
    assert isinstance(ask(Greet("raw")), ClientAnswer)
    assert "already" in refused(Greet("again"))
    assert refused(StartSequence(b"\1\0\0")) == "3 bytes of tokens: 4 a token"
    assert "token -1" in refused(StartSequence(b"\xff\xff\xff\xff"))
    assert refused(AppendTokens(2**40, b"")) == f"no sequence {2**40}"
    wire.send(Observe(2, Focus(), 1.0))
    answer = wire.receive(10)
    assert isinstance(answer, Failed)
    assert answer.text == "this engine answers attached programs only"
    wire.send(PlanCommand(3, Pause(), 1.0))
    assert isinstance(wire.receive(10), Failed)
    assert engine.clients.num_clients == 1
    wire.close()
    until(lambda: engine.clients.num_clients == 0)


def test_a_server_without_clients_refuses(engine: Engine) -> None:
    near, far = socket.socketpair()
    server = EngineServer(EngineRunner(engine))
    server.serve(far)
    wire = client_connection(near)
    assert isinstance(wire.receive(10), Hello)
    wire.send(ClientCall(1, Greet("a"), 1.0))
    answer = wire.receive(10)
    assert isinstance(answer, ClientRefused)
    assert answer.text == "this engine takes no attached programs"
    wire.close()
    server.close()


@pytest.mark.parametrize("target", ["", 7, None, object()])
def test_what_is_no_target(target: object) -> None:
    with pytest.raises(UserError, match="an engine, local:NAME, or the path of a socket"):
        kvtop.attach(target)  # type: ignore[arg-type]


def test_targets_that_are_not_there(runtime: Path) -> None:
    with pytest.raises(SourceError, match="no engine listens there"):
        kvtop.attach("local:nobody")
    with pytest.raises(SourceError, match="no engine listens there"):
        kvtop.attach(runtime / "nothing.sock")
    with pytest.raises(UserError, match="an engine's name is"):
        kvtop.attach("local:a/b")


# ---- the engine beside them


def one_request(blocks: int) -> list[Request]:
    return [Request(OpaqueContent(4 * blocks, 1), 4 * blocks - 4)]


def test_the_workload_waits_for_clients_and_says_so() -> None:
    e = Engine(EngineConfig(num_blocks=32, **BOOKS_ONLY), one_request(20))
    client = kvtop.attach(e)
    s = client.sequence(range(64))
    assert e.advance(5) == 5  # time passes
    assert e.is_waiting
    assert not e.done
    assert e.stuck_reason == (
        "sequence 1 cannot start: capacity: 19 blocks needed, 16 allocatable; attached programs hold 16 blocks"
    )
    assert e.snapshot(phase="", speed=None, steps_per_s=None).notes == (e.stuck_reason,)
    s.release()
    assert e.advance(100) == 5
    assert e.done
    assert e.stuck_reason is None
    client.close()
    e.close()


def test_time_without_work_is_skipped_while_clients_hold_sequences() -> None:
    later = Request(OpaqueContent(8, 1), 4, arrival_s=1000.0)
    e = Engine(EngineConfig(num_blocks=32, **BOOKS_ONLY), [later])
    client = kvtop.attach(e)
    s = client.sequence(range(64))
    assert e.advance(40_000) == 40_000
    assert not e.is_waiting
    assert e.advance(100) == 100  # it came, ran and ended; from there on, time alone passes
    assert e.counters.finished == 1
    assert e.is_waiting
    s.release()
    assert e.advance(100) == 0
    client.close()
    e.close()


def test_clients_never_push_the_workload_out_nor_it_them() -> None:
    e = Engine(EngineConfig(num_blocks=32, preempt="recompute", **BOOKS_ONLY), one_request(20))
    client = kvtop.attach(e, timeout_s=0.0)
    e.advance(1)
    with pytest.raises(OutOfBlocks):
        client.sequence(range(13 * 4))
    s = client.sequence(range(12 * 4))
    s.append(range(4))  # and now the workload's last block is missing
    while e.counters.preemptions_recompute == 0:
        assert e.advance(1) == 1
    assert s.num_tokens == 52
    assert e.advance(1) == 1
    assert e.is_waiting
    e.check()
    client.close()
    until(lambda: e.clients.num_clients == 0)
    while not e.done:
        assert e.advance(1) == 1
    assert e.counters.finished == 1
    e.close()


def test_a_runner_wakes_for_clients_and_waits_at_real_pace(engine: Engine) -> None:
    now_s = [0.0]
    runner = EngineRunner(engine, speed=None, clock=lambda: now_s[0])
    assert runner.turn() == 0.5  # done: nothing to do
    client = kvtop.attach(runner)
    s = client.sequence(range(8))
    assert runner.turn() == 0.025
    assert runner.turn() == 0.025
    assert engine.step == 2
    seen = runner.observe(Focus(), 1).snapshot
    assert (seen.phase, seen.num_running) == ("running", 1)
    s.release()
    runner.turn()
    assert runner.observe(Focus(), 1).snapshot.phase == "done"
    client.close()


def test_a_drive_waits_for_clients_at_real_pace(engine: Engine) -> None:
    client = kvtop.attach(engine)
    s = client.sequence(range(8))
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            s.release()

    bounds = Bounds()
    driven = drive(engine, bounds, speed=None, stop=lambda: None, after_turn=lambda _: None, sleep=sleep)
    assert driven.ending is Ending.DONE
    assert naps == [0.025] * 5
    client.close()


def test_a_drive_stays_open_for_clients(engine: Engine) -> None:
    naps: list[float] = []
    driven = drive(
        engine,
        Bounds(),
        speed=None,
        stop=lambda: Ending.TERMINATED if len(naps) == 3 else None,
        after_turn=lambda _: None,
        keep_open=True,
        sleep=naps.append,
    )
    assert driven.ending is Ending.TERMINATED


def test_waiting_for_clients_is_progress(engine: Engine) -> None:
    client = kvtop.attach(engine)
    client_sequence = client.sequence(range(8))
    watch = ProgressWatch(engine)
    for _ in range(30):
        engine.advance(100)
        watch.after_turn()
    client_sequence.release()
    client.close()


def test_an_observed_console_shows_them_while_it_runs() -> None:
    e = Engine(EngineConfig(num_blocks=64, **BOOKS_ONLY))
    runner = EngineRunner(e, speed=None)
    source = InProcessSource(runner, on_close=e.close)
    source.start()
    with kvtop.attach(runner, name="app") as client, client.sequence(range(30), label="one") as s:
        seen = source.read(Focus(seq_id=s.seq_id, block_id=int(s.table()[0])), 30)
        assert [row.label for row in seen.snapshot.sequences] == [f"client:{os.getpid()} app one"]
        assert seen.focus_table is not None
        assert seen.focus_table.tolist() == s.table().tolist()
        assert seen.focus_block is not None
        assert seen.focus_block.holders == ((s.seq_id, 0),)
    source.close()


@pytest.mark.parametrize(("timeout_s", "tries"), [(0.0, 1), (0.05, 6)])
def test_a_wait_is_bounded(engine: Engine, timeout_s: float, tries: int) -> None:
    now_s, asked = [0.0], []

    class Full:
        def do(self, call: object) -> None:
            asked.append(call)
            raise OutOfBlocks(3, 2)

        def close(self) -> None: ...

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    client = Client(Full(), 1.0, clock=lambda: now_s[0], sleep=sleep)  # type: ignore[arg-type]
    with pytest.raises(OutOfBlocks, match="3 device blocks needed, 2 allocatable"):
        client.sequence([1], timeout_s=timeout_s)
    assert len(asked) == tries
    client.close()
