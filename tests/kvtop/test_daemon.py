"""Published runs: watched by several, driven, ended by signals, killed; what they leave behind and report."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import until
from published import OPTIONS, Lines, ThreadedDaemon, daemon_process, is_listening, own_directories

from allocator.block_map import BlockMapReader
from allocator.commands import InjectFault, Pause, Resize, Step, VerifyContents
from allocator.errors import InvariantViolation
from kvtop.cli import run
from kvtop.driving import Bounds, Ending
from kvtop.engine_setup import EngineOptions
from kvtop.errors import KvtopError, SourceError, UserError
from kvtop.local_socket import listeners, map_path, open_map, socket_path
from kvtop.model.observation import Focus
from kvtop.options_file import default_path
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.named import NamedEngine

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield Path(directory)


def report_of(process: subprocess.Popen[str]) -> dict[str, object]:
    out, _ = process.communicate(timeout=60)
    report: dict[str, object] = json.loads(out)
    return report


# ---- watching


def test_several_watch_one_engine_and_each_reading_is_of_one_step() -> None:
    daemon = ThreadedDaemon("t")
    errors: list[str] = []

    def watch() -> None:
        source = LocalSource(NamedEngine("t"), "local:t")
        try:
            for _ in range(20):
                seen = source.read(Focus(), TIMEOUT_S)
                assert seen.device is not None
                assert int(seen.device.last_used.max()) <= seen.snapshot.step
        except Exception as error:
            errors.append(repr(error))
        finally:
            source.close()

    watchers = [threading.Thread(target=watch) for _ in range(4)]
    for thread in watchers:
        thread.start()
    for thread in watchers:
        thread.join(60)
    assert errors == []
    assert daemon.close() is not None


def test_nothing_is_published_while_nobody_watches() -> None:
    daemon = ThreadedDaemon("t")
    fd = open_map(map_path(socket_path("t")))
    reader = BlockMapReader(fd)
    until(lambda: daemon.engine.step > 100)
    assert reader.version == 0
    source = LocalSource(NamedEngine("t"))
    source.read(Focus(), TIMEOUT_S)
    assert reader.version >= 1
    assert reader.info.engine == "t"
    source.close()
    version, step = reader.version, daemon.engine.step
    until(lambda: daemon.engine.step > step + 100)
    assert reader.version == version
    reader.close()
    os.close(fd)
    daemon.close()


def test_an_observer_that_leaves_does_not_stop_the_engine() -> None:
    daemon = ThreadedDaemon("t")
    for _ in range(3):
        link = NamedEngine("t")
        assert LocalOperations(link).apply(Step(3)).ok
        link.close()
    assert is_listening("t")
    daemon.close()


def test_the_end_of_the_engine_is_told_to_those_who_watch() -> None:
    with daemon_process("t", "--blocks", "64") as process:
        source = LocalSource(NamedEngine("t"))
        source.read(Focus(), TIMEOUT_S)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        with pytest.raises(SourceError, match=rf"the engine t \(pid {process.pid}\) has ended"):
            source.read(Focus(), TIMEOUT_S)
        source.close()


# ---- files


def test_socket_and_map_are_the_users_alone_and_gone_at_the_end() -> None:
    daemon = ThreadedDaemon("t")
    paths = (socket_path("t"), map_path(socket_path("t")))
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in paths] == [0o600, 0o600]
    daemon.close()
    assert not any(path.exists() for path in paths)
    assert listeners() == ()


def test_what_a_killed_daemon_left_is_cleared_away() -> None:
    with daemon_process("t", "--blocks", "64") as process:
        assert [found.pid for found in listeners()] == [process.pid]
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    left = map_path(socket_path("t"))
    assert left.exists()
    assert listeners() == ()
    with pytest.raises(SourceError, match="is gone"):
        NamedEngine("t")
    daemon = ThreadedDaemon("t")
    with pytest.raises(UserError, match="runs already"):
        ThreadedDaemon("t")
    source = LocalSource(NamedEngine("t"))
    assert source.read(Focus(), TIMEOUT_S).device is not None
    source.close()
    daemon.close()


@pytest.mark.parametrize("how", ["link", "directory", "open to others", "absent", "fifo"])
def test_a_map_that_is_not_what_it_should_be_is_not_opened(how: str, root: Path) -> None:
    path, other = root / "m.map", root / "other"
    other.touch(mode=0o600)
    match how:
        case "link":
            path.symlink_to(other)
        case "directory":
            path.mkdir()
        case "open to others":
            path.touch()
            path.chmod(0o644)
        case "fifo":
            os.mkfifo(path, 0o600)
    with pytest.raises(SourceError, match=r"m\.map"):
        open_map(path)


def test_a_map_that_is_a_link_is_replaced_and_not_followed(root: Path) -> None:
    victim = root / "victim"
    victim.write_text("precious")
    socket_path("t").parent.mkdir(mode=0o700)
    map_path(socket_path("t")).symlink_to(victim)
    daemon = ThreadedDaemon("t")
    assert victim.read_text() == "precious"
    daemon.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(root: Path) -> None:
    log = Lines()
    daemon = ThreadedDaemon("t", log=log)
    path = socket_path("t")
    knock = (
        "import os, socket, sys\nos.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try:\n    s.connect(sys.argv[1]); print(repr(s.recv(1)))\nexcept PermissionError:\n    print('no entry')\n"
    )

    def attempt() -> str:
        done = subprocess.run([sys.executable, "-c", knock, str(path)], capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    assert attempt() == "no entry"
    # Even if somebody opened the way to it, the engine asks the system who is there.
    for place in (root, path.parent.parent, path.parent):
        place.chmod(0o755)
    path.chmod(0o666)
    assert attempt() == "b''"
    until(lambda: any("user 65534" in line and "may not connect" in line for line in log.lines))
    daemon.close()


# ---- ends


def test_sigterm_ends_it_with_the_report_and_exit_code_0() -> None:
    with daemon_process("t", "--blocks", "64", "--json") as process:
        process.send_signal(signal.SIGTERM)
        report = report_of(process)
        assert process.returncode == 0
        assert report["steps"]
        assert not socket_path("t").exists()


def test_a_published_run_reports_what_an_unpublished_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for published in ((), ("--publish", "t")):
        assert run(["run", "--blocks", "64", "--geometry", "none", "--steps", "700", "--json", *published]) == 0
        report = json.loads(capsys.readouterr().out)
        reports.append({key: value for key, value in report.items() if not key.endswith("_s")})
    assert reports[0] == reports[1]
    assert reports[0]["steps"] == 700


def test_a_published_check_checks_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["check", "--blocks", "64", "--geometry", "none", "--publish", "t", "--steps", "60"]
    assert run([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["integrity"]["checks"] >= 60
    assert run([*args, "--inject", "leaked-reference:0.5"]) == 1
    assert "FAULT at step" in capsys.readouterr().err


def test_bounds_end_it() -> None:
    assert ThreadedDaemon("t", bounds=Bounds(steps=123)).join().ending is Ending.STEPS
    assert ThreadedDaemon("t", bounds=Bounds(duration_s=0.05)).join().ending is Ending.DURATION


def test_a_broken_law_stays_to_be_looked_at_and_is_the_exit_code() -> None:
    with daemon_process("t", "--blocks", "64") as process:
        link = NamedEngine("t")
        operations = LocalOperations(link)
        assert operations.apply(InjectFault("leaked-reference")).ok
        outcome = operations.apply(VerifyContents())
        assert not outcome.ok
        assert "law" in outcome.message
        assert process.poll() is None
        link.close()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "broken law" in err


def test_a_bounded_run_ends_at_a_broken_law() -> None:
    daemon = ThreadedDaemon("t", stays=False, after_step=lambda: broken(daemon_steps))
    driven = daemon.join()
    assert driven is not None
    assert (driven.ending, driven.fault is not None) == (Ending.FAULT, True)


daemon_steps: list[None] = []


def broken(steps: list[None]) -> None:
    steps.append(None)
    if len(steps) > 5:
        raise InvariantViolation(2, "made up")


def test_an_engine_that_fails_says_so_and_nothing_is_left() -> None:
    def fail() -> None:
        raise ZeroDivisionError("by zero")

    daemon = ThreadedDaemon("t", after_step=fail)
    assert daemon.join() is None
    assert isinstance(daemon.error, KvtopError)
    assert "ZeroDivisionError: by zero" in str(daemon.error)
    assert not socket_path("t").exists()


def test_whoever_asks_after_the_end_is_told_so() -> None:
    daemon = ThreadedDaemon("t")
    daemon.close()
    assert daemon.daemon is not None
    with pytest.raises(SourceError, match="the engine has stopped"):
        daemon.daemon._runner.apply(Pause())


# ---- configuration and messages


def test_sighup_reads_the_file_again() -> None:
    file = default_path()
    file.parent.mkdir(parents=True)
    file.write_text('speed = "max"\nblocks = 64\n')
    with daemon_process("t", "--log-format", "json") as process:
        assert process.stderr is not None
        source = LocalSource(NamedEngine("t"))
        assert source.read(Focus(), TIMEOUT_S).snapshot.speed is None
        said: list[dict[str, object]] = []

        def hang_up(text: str) -> list[str]:
            file.write_text(text)
            process.send_signal(signal.SIGHUP)
            while not said or "SIGHUP" not in str(said[-1]["text"]) or said[-1].get("seen"):
                said.append(json.loads(process.stderr.readline()))  # type: ignore[union-attr]
            said[-1]["seen"] = True
            return [str(line["text"]) for line in said]

        assert hang_up("speed = 2\nblocks = 64\n")[-1] == "SIGHUP: speed 2"
        assert source.read(Focus(), TIMEOUT_S).snapshot.speed == 2
        assert hang_up("speed = 2\nblocks = 99\n")[-1] == "SIGHUP: takes a restart: blocks"
        assert "nothing was changed" in hang_up("speed = 0\n")[-1]
        assert source.read(Focus(), TIMEOUT_S).snapshot.speed == 2
        assert {line["level"] for line in said} == {"info", "warning", "error"}
        source.close()


def test_a_console_that_publishes_can_be_driven_too() -> None:
    from kvtop.engine_process import EngineProcess

    process = EngineProcess.start(EngineOptions(num_blocks=64, geometry="none", speed=None), publish="t")
    own = LocalSource(process)
    try:
        process.wait_ready(TIMEOUT_S)
        link = NamedEngine("t")
        assert LocalOperations(link).apply(Resize(80)).ok
        for source in (own, LocalSource(link, "local:t")):
            seen = source.read(Focus(), TIMEOUT_S)
            assert seen.device is not None
            assert seen.device.num_blocks >= 80
        link.close()
    finally:
        own.close()
    assert not is_listening("t")


def test_half_open_connections_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtop.server.FIRST_WORD_S", 0.2)
    monkeypatch.setattr("kvtop.server._LOOK_S", 0.05)
    log = Lines()
    daemon = ThreadedDaemon("t", OPTIONS, log=log)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for sock in silent:
        sock.connect(str(socket_path("t")))
        sock.settimeout(TIMEOUT_S)
    for sock in silent:
        while sock.recv(1 << 16):
            pass  # the greeting; then the end
        sock.close()
    assert any("asked nothing in 0.2 s" in line for line in log.lines)
    daemon.close()
