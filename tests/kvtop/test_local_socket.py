"""Names of engines on this machine: who may listen, who may enter, and what becomes of a socket whose engine died."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtop.errors import KvtopError, SourceError, UserError
from kvtop.local_socket import NamedSocket, NobodyListens, connect, peer, socket_path


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


@pytest.fixture
def listen() -> Iterator[Callable[..., NamedSocket]]:
    opened: list[NamedSocket] = []

    def start(name: str = "a", serve: Callable[[socket.socket], None] = socket.socket.close) -> NamedSocket:
        opened.append(NamedSocket(name, serve))
        return opened[-1]

    yield start
    for named in opened:
        named.close()


def test_the_socket_is_its_users_alone(listen: Callable[..., NamedSocket]) -> None:
    path = listen("engine-1.b_c").path
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700


def test_connections_are_handed_on(listen: Callable[..., NamedSocket]) -> None:
    def serve(sock: socket.socket) -> None:
        assert peer(sock) == (os.getpid(), os.getuid())
        sock.sendall(b"hello")
        sock.close()

    sock = connect(listen("a", serve).path)
    assert sock.recv(9) == b"hello"
    sock.close()


def test_who_is_turned_away_hurts_nobody(listen: Callable[..., NamedSocket]) -> None:
    def serve(sock: socket.socket) -> None:
        sock.close()
        raise SourceError("full")

    path = listen("a", serve).path
    for _ in range(3):
        sock = connect(path)
        assert sock.recv(1) == b""
        sock.close()


def test_a_name_in_use_is_refused_with_its_process(listen: Callable[..., NamedSocket]) -> None:
    listen()
    with pytest.raises(UserError, match=rf"--publish a: .* runs already \(pid {os.getpid()}\)"):
        listen()


def test_the_file_is_gone_after_close_and_the_name_free(listen: Callable[..., NamedSocket]) -> None:
    first = listen()
    first.close()
    first.close()
    assert not first.path.exists()
    with pytest.raises(NobodyListens, match="no engine listens there"):
        connect(first.path)
    listen()


def test_a_dead_engines_socket_is_replaced(listen: Callable[..., NamedSocket]) -> None:
    program = "from kvtop.local_socket import NamedSocket; import os; NamedSocket('a', print); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 9
    path = socket_path("a")
    assert path.exists()
    with pytest.raises(NobodyListens, match="is gone"):
        connect(path)
    assert listen().path == path


def test_close_leaves_a_successors_socket_alone(listen: Callable[..., NamedSocket]) -> None:
    first = listen()
    first.path.unlink()
    second = listen()
    first.close()
    assert second.path.exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "a b", "x" * 41, "a\n", "ä"])
def test_what_is_no_name(name: str, listen: Callable[..., NamedSocket]) -> None:
    with pytest.raises(UserError, match=r"an engine's name is 1 to 40"):
        socket_path(name)
    with pytest.raises(UserError, match=r"^--publish "):
        listen(name)


def test_a_directory_that_others_may_enter_is_refused(listen: Callable[..., NamedSocket]) -> None:
    socket_path("a").parent.mkdir(mode=0o755)
    with pytest.raises(KvtopError, match="must be this user's alone"):
        listen()


def test_a_path_that_is_too_long(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / ("d" * 100)))
    with pytest.raises(KvtopError, match="--publish a"):
        NamedSocket("a", print)
    with pytest.raises(SourceError):
        connect(socket_path("a"))
