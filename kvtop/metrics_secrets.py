"""MetricsSecrets: the certificate and the passwords of a metrics server, read again when their files change."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from kvtop.errors import UserError
from kvtop.metrics_address import MetricsAddress

_MAX_AUTH_BYTES: Final = 65536

#: What tells that a file is another than it was: its identity, size and time of change; ``None`` where it is no file.
_Marks: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class MetricsSecrets:
    """Keeps what the files last said that was usable, so that a half-written certificate stops no scrape.

    Args:
        address: Names the files.
        complain: Told once of each change that cannot be used.

    Attributes:
        tls: For new connections; ``None`` serves plain HTTP.

    Raises:
        UserError: A file is not usable.
    """

    def __init__(self, address: MetricsAddress, complain: Callable[[str], None] = lambda text: None) -> None:
        self._address = address
        self._complain = complain
        # Before they are read: a change in between is then seen at the next look.
        self._marks = self._look()
        self.tls = _tls_context(address)
        self._passwords = _read_passwords(address.auth_file)

    def refresh(self) -> None:
        """Read the files again if one has changed. Cost otherwise: a look at each file's entry."""
        marks = self._look()
        if marks == self._marks:
            return
        self._marks = marks
        try:
            tls, passwords = _tls_context(self._address), _read_passwords(self._address.auth_file)
        except UserError as error:
            self._complain(f"{error}; what was read before still holds")
        else:
            self.tls, self._passwords = tls, passwords

    def allow(self, header: str) -> bool:
        """Return whether a request with this ``Authorization`` header may be answered."""
        passwords = self._passwords
        return passwords is None or _is_among(header, passwords)

    def _look(self) -> _Marks:
        address = self._address
        return tuple(_mark(path) for path in (address.tls_cert, address.tls_key, address.auth_file) if path is not None)


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    # Out of a pipe it can be read only once.
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _is_among(header: str, passwords: frozenset[bytes]) -> bool:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return False
    try:
        given = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return False
    # Every one is compared, so that the time taken tells nothing.
    return sum(hmac.compare_digest(given, allowed) for allowed in passwords) > 0


def _read_passwords(path: str | None) -> frozenset[bytes] | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                raise UserError(f"--metrics-auth {path}: everybody can read or write it; chmod 600 it first")
            text = file.read(_MAX_AUTH_BYTES + 1)
    except OSError as error:
        raise UserError(f"--metrics-auth {path}: {(error.strerror or str(error)).lower()}") from error
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith(b"#")]
    if len(text) > _MAX_AUTH_BYTES or not found or any(not all(line.partition(b":")[::2]) for line in found):
        raise UserError(f"--metrics-auth {path}: needs lines of USER:PASSWORD, at least one")
    return frozenset(found)


def _tls_context(address: MetricsAddress) -> ssl.SSLContext | None:
    if address.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    where = f"--metrics-tls-cert {address.tls_cert}, --metrics-tls-key {address.tls_key}"
    try:
        # An encrypted key must not make anybody wait for a passphrase to be typed.
        context.load_cert_chain(address.tls_cert, address.tls_key, password=lambda: "")
    except ssl.SSLError as error:
        raise UserError(
            f"{where}: not a certificate and its key without a passphrase, in PEM ({error.reason or error})"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {(getattr(error, 'strerror', None) or str(error)).lower()}") from error
    return context
