"""What a service manager is told, over a socket that stands in for systemd's; and the unit file that is shipped."""

from __future__ import annotations

import configparser
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import ManualClock
from published import daemon_process, own_directories

from kvtop.cli import cli
from kvtop.sd_notify import ServiceManager

UNIT = Path(__file__).resolve().parents[2] / "packaging" / "kvtop.service"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield Path(directory)


@pytest.fixture
def manager(root: Path) -> Iterator[tuple[socket.socket, str]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = str(root / "notify")
    sock.bind(address)
    sock.settimeout(30)
    yield sock, address
    sock.close()


def told(sock: socket.socket) -> list[str]:
    return sock.recv(4096).decode().splitlines()


def test_states_are_told(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    service = ServiceManager({"NOTIFY_SOCKET": address})
    assert service.is_there
    service.ready("published as t")
    assert told(sock) == ["READY=1", "STATUS=published as t"]
    service.reloading()
    lines = told(sock)
    assert lines[0] == "RELOADING=1"
    assert re.fullmatch(r"MONOTONIC_USEC=\d+", lines[1])
    service.stopping()
    assert told(sock) == ["STOPPING=1"]
    service.close()
    service.close()


def test_signs_of_life_come_three_times_as_often_as_needed(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    clock = ManualClock()
    service = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"}, clock)
    sock.setblocking(False)
    for later_s, is_told in ((0.0, True), (0.5, False), (0.4, False), (0.2, True), (0.9, False), (5.0, True)):
        clock.now_s += later_s
        service.alive()
        if is_told:
            assert told(sock) == ["WATCHDOG=1"]
        else:
            with pytest.raises(BlockingIOError):
                told(sock)
    service.close()


def test_an_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0kvtop-test-{os.getpid()}")
        sock.settimeout(30)
        service = ServiceManager({"NOTIFY_SOCKET": f"@kvtop-test-{os.getpid()}"})
        service.stopping()
        assert told(sock) == ["STOPPING=1"]
        service.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": ""},
        {"NOTIFY_SOCKET": "relative"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "0"},
    ],
)
def test_without_a_manager_nothing_happens(environment: dict[str, str]) -> None:
    service = ServiceManager(environment)
    service.ready("")
    service.alive()
    service.close()
    assert environment == {}, "no child may speak in this process's name"


def test_a_watchdog_for_another_process_is_not_ours(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    service = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})
    sock.setblocking(False)
    service.alive()
    with pytest.raises(BlockingIOError):
        told(sock)
    service.close()


def test_a_daemon_tells_its_whole_life(manager: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch) -> None:
    sock, address = manager
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    with daemon_process("t", "--blocks", "64", "--speed", "1") as process:
        assert told(sock) == ["READY=1", "STATUS=published as t"]
        for _ in range(3):
            assert told(sock) == ["WATCHDOG=1"]
        process.send_signal(signal.SIGHUP)
        while (lines := told(sock)) == ["WATCHDOG=1"]:
            pass
        assert lines[0] == "RELOADING=1"
        while (lines := told(sock)) == ["WATCHDOG=1"]:
            pass
        assert lines[0] == "READY=1"
        process.send_signal(signal.SIGTERM)
        while (lines := told(sock)) == ["WATCHDOG=1"]:
            pass
        assert lines == ["STOPPING=1"]
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_the_unit_fits_the_program() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) > 0
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    program, *args = service["ExecStart"].split()
    assert program.endswith("/kvtop")
    # The command line is one that the program takes.
    command = cli.commands[args[0]]
    context = command.make_context(args[0], args[1:])
    assert (context.params["publish"], context.params["log_format"]) == ("main", "json")
    for hardening in ("NoNewPrivileges", "ProtectSystem", "ProtectHome", "RestrictAddressFamilies", "SystemCallFilter"):
        assert service[hardening]
