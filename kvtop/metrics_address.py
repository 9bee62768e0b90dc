"""MetricsAddress: where and how metrics are served, as the command line has it. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where to serve metrics.

    Attributes:
        host: Address to listen on; IPv6 with or without brackets.
        port: Port; 0 takes a free one.
        tls_cert, tls_key: Files of the certificate chain and its key, both or neither; ``None`` serves plain HTTP.
        auth_file: File of ``USER:PASSWORD`` lines, one of which every request must bring; ``None`` asks for none.
        compat: Also tell the facts under another engine's names.
    """

    host: str
    port: int
    tls_cert: str | None = None
    tls_key: str | None = None
    auth_file: str | None = None
    compat: Literal["vllm"] | None = None
