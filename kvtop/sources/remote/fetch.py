"""Fetcher: asks one HTTP server, within a time and a size, and says in plain words what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtop.errors import UserError

if TYPE_CHECKING:
    import httpx

#: Bytes read of one answer at most.
MAX_BODY: Final = 16 * 1024 * 1024
#: Seconds one answer may take from the first byte of the request to the last of the body.
ANSWER_S: Final = 5.0

_ACCEPT: Final = "text/plain; version=0.0.4, */*;q=0.1"


class FetchError(Exception):
    """No usable answer; the text says why."""


class NotSent(FetchError):
    """The server was not reached: whatever was to be asked, it knows nothing of it."""


class Remote(msgspec.Struct, frozen=True):
    """How to reach a server.

    Attributes:
        url: ``http(s)://HOST:PORT``, with a path only if the user gave one.
        token_file: File whose first line is sent as a bearer token; read anew when the server refuses the old one.
        ca_file: Certificates to trust instead of the system's.
        insecure: Trust any certificate.
    """

    url: str
    token_file: str | None = None
    ca_file: str | None = None
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """One answer.

    Attributes:
        status: HTTP status.
        content_type: As the server says; may be empty.
        text: The body.
        location: Where it redirects to; empty when it does not.
    """

    status: int
    content_type: str
    text: str
    location: str = ""

    def json(self) -> Any:
        """Return the body as JSON; ``None`` when it is none."""
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.DecodeError, RecursionError):
            return None


class Fetcher:
    """Asks one server; used by one thread at a time. Follows no redirect, takes no cookie and no proxy.

    Args:
        remote: The server.
        answer_s: Seconds an answer may take.
        max_body: Bytes an answer may have.

    Raises:
        UserError: The token file or the certificates cannot be read.
    """

    def __init__(self, remote: Remote, *, answer_s: float = ANSWER_S, max_body: int = MAX_BODY) -> None:
        self._remote = remote
        self._answer_s = answer_s
        self._max_body = max_body
        self._token = read_token(remote.token_file)
        self._verify = _trust(remote)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    def get(self, path: str, *, answer_s: float | None = None) -> Page:
        """Return the answer to ``GET path``, whatever its status.

        Args:
            path: The path, with its query.
            answer_s: Seconds the answer may take; ``None`` takes the fetcher's own.

        Raises:
            FetchError: There is no answer, it takes too long, is too large or is compressed.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(self._get(path, answer_s or self._answer_s))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, answer_s: float | None = None) -> Page:
        """Return the answer to ``POST path``, whatever its status. Sent once, and never again.

        Args:
            path: The path, with its query.
            body: Sent as JSON; ``None`` sends nothing.
            answer_s: Seconds the answer may take; ``None`` takes the fetcher's own.

        Raises:
            NotSent: The server was not reached.
            FetchError: It may have been, but there is no whole answer: whether it did anything is not known.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        content = None if body is None else msgspec.json.encode(body)
        return self._loop.run_until_complete(self._post(path, content, answer_s or self._answer_s))

    def close(self) -> None:
        """Let go of the connection. Safe to call twice."""
        if self._loop is None or self._loop.is_closed():
            return
        if self._client is not None:
            self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    def renew_token(self) -> bool:
        """Read the token file again; true when the token has changed."""
        try:
            fresh = read_token(self._remote.token_file)
        except UserError:
            return False
        changed, self._token = fresh != self._token, fresh
        return changed

    async def _get(self, path: str, answer_s: float) -> Page:
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=self._answer_s, follow_redirects=False, trust_env=False, verify=self._verify
            )
        try:
            return await self._ask(self._client, "GET", path, None, answer_s)
        finally:
            self._client.cookies.clear()

    async def _post(self, path: str, content: bytes | None, answer_s: float) -> Page:
        import httpx

        # On a connection of its own: the server may be about to close one that has been idle, and then nobody knows.
        timeout = httpx.Timeout(answer_s, connect=min(answer_s, self._answer_s))
        async with httpx.AsyncClient(
            timeout=timeout, follow_redirects=False, trust_env=False, verify=self._verify
        ) as client:
            return await self._ask(client, "POST", path, content, answer_s)

    async def _ask(
        self, client: httpx.AsyncClient, method: str, path: str, content: bytes | None, answer_s: float
    ) -> Page:
        import httpx

        headers = {"Accept": _ACCEPT, "Accept-Encoding": "identity", "User-Agent": "kvtop"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            # The client's own timeouts are for each read: a server that sends a byte now and then would pass them.
            async with asyncio.timeout(answer_s):
                url = self._remote.url + path
                async with client.stream(method, url, headers=headers, content=content) as answer:
                    return await self._read(answer)
        except httpx.ConnectTimeout:
            raise NotSent(f"no connection within {self._answer_s:g} s") from None
        except (TimeoutError, httpx.TimeoutException):
            raise FetchError(f"no whole answer within {answer_s:g} s") from None
        except httpx.ConnectError as error:
            raise NotSent(_connect_reason(error)) from None
        except httpx.RemoteProtocolError:
            raise FetchError("something listens there that does not speak HTTP, or broke off") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            raise FetchError(str(error) or type(error).__name__) from None

    async def _read(self, answer: httpx.Response) -> Page:
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise FetchError("the answer is compressed although that was not asked for")
        body = bytearray()
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > self._max_body:
                raise FetchError(f"the answer goes on past {self._max_body // 1024:,} KiB: no metrics page")
        return Page(
            answer.status_code,
            answer.headers.get("content-type", ""),
            body.decode("utf-8", "replace"),
            answer.headers.get("location", ""),
        )


def read_token(token_file: str | None) -> str | None:
    """Return the token in a file's first line; ``None`` without a file.

    Raises:
        UserError: The file cannot be read, is empty, or holds something that no header may carry.
    """
    if token_file is None:
        return None
    try:
        lines = Path(token_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {token_file}: cannot be read: {error}") from None
    token = lines[0].strip() if lines else ""
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f"--token-file {token_file}: its first line has to be a token of printable ASCII characters")
    return token


def _trust(remote: Remote) -> Any:
    if not remote.url.startswith("https://"):
        return True
    import ssl

    if remote.insecure:
        return False
    if remote.ca_file is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=remote.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"--ca-file {remote.ca_file}: cannot be used: {error}") from None


def _connect_reason(error: Exception) -> str:
    text = str(error)
    known: Mapping[str, str] = {
        "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted; --ca-file FILE or --insecure",
        "WRONG_VERSION_NUMBER": "no TLS there; try http://",
        "Name or service": "no such host",
        "nodename nor servname": "no such host",
        "All connection attempts failed": "nothing listens there",
        "Connection refused": "nothing listens there",
    }
    return next((words for mark, words in known.items() if mark in text), text or "cannot connect")
