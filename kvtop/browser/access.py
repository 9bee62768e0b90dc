"""Access: which requests a browser's console answers. Pure; decides by two headers alone.

A page of another site can make a visitor's browser send requests here. It cannot choose ``Origin``, which says where
the page came from, and it cannot make ``Host`` an address: with a name of its own that is made to point here (DNS
rebinding), ``Host`` is that name. So addresses are answered, names only when they are known, and a connection that
carries keys only from a page that was served here.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from kvtop.errors import UserError


class Access:
    """Knows the names under which a server may be asked.

    Args:
        names: Names that lead to it, besides ``localhost`` and addresses.
        public_url: Where a proxy in front of it is reached, such as ``https://kv.example``.

    Raises:
        UserError: ``public_url`` is no ``http(s)://HOST[:PORT]``.
    """

    def __init__(self, names: tuple[str, ...] = (), public_url: str | None = None) -> None:
        self.public_origin = None if public_url is None else _origin(public_url)
        self._names = {"localhost", *(name.lower() for name in names)}
        if self.public_origin is not None:
            self._names.add(str(urlsplit(self.public_origin).hostname))

    def refusal(self, host: str | None, origin: str | None, *, needs_origin: bool) -> str | None:
        """Return why a request is not answered; ``None`` when it is.

        Args:
            host, origin: The request's headers.
            needs_origin: Whether it must come from a page.
        """
        name = _hostname(host or "")
        if name is None or not (name in self._names or _is_address(name)):
            return "this name is not known here; use the address, or --host and --public-url"
        if origin is None:
            return "only pages that were served here may connect" if needs_origin else None
        if origin == self.public_origin or origin.lower().partition("://")[2] == (host or "").lower():
            return None
        return "only pages that were served here may connect"

    def websocket_url(self, host: str) -> str:
        """Return where the page that was asked for from ``host`` connects to."""
        scheme, _, place = (self.public_origin or f"http://{host}").partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{place}/ws"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _origin(url: str) -> str:
    problem = UserError(f"--public-url {url}: http(s)://HOST or http(s)://HOST:PORT, without a path")
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and parts.path in ("", "/") and not (parts.query or parts.fragment)
        if not is_plain or _hostname(parts.netloc) is None or parts.port == 0:
            raise problem
    except ValueError:
        raise problem from None
    return f"{parts.scheme}://{parts.netloc.lower()}"


def _hostname(host: str) -> str | None:
    """Return the host of ``HOST[:PORT]`` without brackets, in small letters; ``None`` where it is no such thing."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError:
        return None
    is_plain = parts.netloc == host and "@" not in host and not parts.path
    return parts.hostname if is_plain and parts.hostname else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
