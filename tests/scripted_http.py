"""ScriptedHttp: a server on this machine that answers each path with given bytes, or as badly as a function does."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping

#: Given the connection and an event that says that the test is over.
Misbehave = Callable[[socket.socket, threading.Event], None]


def answer(body: str | bytes, *, status: str = "200 OK", headers: str = "Content-Type: text/plain\r\n") -> bytes:
    """Return a whole HTTP answer, after which the connection ends."""
    data = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


def _body(connection: socket.socket, begun: bytes) -> bytes:
    """Read what is missing of a request's body, where its headers tell its length."""
    head, _, body = begun.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    rest = b""
    while found is not None and len(body) + len(rest) < int(found[1]):
        chunk = connection.recv(65536)
        if not chunk:
            break
        rest += chunk
    return rest


class ScriptedHttp:
    """Listens on a free port of 127.0.0.1 until ``close``.

    Attributes:
        answers: Path → what is sent for it; a path that is not there gets 404. May be changed at any time.
        requests: All requests with headers and body, oldest first.
    """

    def __init__(self, answers: Mapping[str, bytes | Misbehave], tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.answers = dict(answers)
        self.requests: list[str] = []
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(5)
        for thread in self._threads:
            thread.join(5)

    def paths(self) -> list[str]:
        """Return the paths that were asked for, oldest first."""
        return [request.split(" ")[1] for request in self.requests]

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:
                connection.close()
                return
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                chunk = connection.recv(65536)
                if not chunk:
                    return
                request += chunk
            request += _body(connection, request)
            text = request.decode("latin-1")
            self.requests.append(text)
            reply = self.answers.get(text.split(" ")[1], answer("nothing here", status="404 Not Found"))
            if callable(reply):
                reply(connection, self._over)
            else:
                connection.sendall(reply)
