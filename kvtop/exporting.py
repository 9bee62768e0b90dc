"""``kvtop attach TARGET --headless``: watches an engine beside it and serves its metrics, until asked to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvtop.attachment import Attachment
from kvtop.driving import Ending, Signals
from kvtop.errors import EXIT_INTERRUPTED, EXIT_OK
from kvtop.exporter import start_exporter
from kvtop.log import Log, LogFormat
from kvtop.metrics_address import MetricsAddress
from kvtop.targets import AttachOptions, open_targets

EVERY_S: Final = 1.0
#: Seconds a reading may take before what is served is marked as lost.
_READING_S: Final = 5.0
#: Seconds between two looks at whether a signal came.
_NAP_S: Final = 0.2


def run_exporting(
    targets: Sequence[str],
    options: AttachOptions,
    *,
    address: MetricsAddress,
    log_format: LogFormat = "text",
    stop: Callable[[], Ending | None] | None = None,
) -> int:
    """Serve the metrics of a running engine until a signal asks for the end; returns the exit code.

    An engine that is not there, or goes away, is waited for: meanwhile ``kvtop_source_up`` is 0.

    Args:
        targets: The engine, or several servers; see ``kvtop.targets``.
        options: How to attach.
        address: Where and how to serve.
        log_format: Form of the messages on stderr.
        stop: Says whether to end, instead of signals.

    Raises:
        UserError: The target or the address to serve on is wrong.
        SourceError: An engine on this machine is not there.
    """
    return serve_metrics(open_targets(targets, options), address=address, log_format=log_format, stop=stop)


def serve_metrics(
    attachment: Attachment,
    *,
    address: MetricsAddress,
    log_format: LogFormat = "text",
    stop: Callable[[], Ending | None] | None = None,
) -> int:
    """Read an engine and serve its metrics until a signal asks for the end; returns the exit code.

    Args:
        attachment: The engine; closed at the end.
        address: Where and how to serve.
        log_format: Form of the messages on stderr.
        stop: Says whether to end, instead of signals.

    Raises:
        UserError: The address cannot be served on.
    """
    log = Log(log_format)
    try:
        with Signals() as signals:
            exporter = start_exporter(lambda: attachment.view, address, complain=log.complain)
            try:
                log.info(f"watching {attachment.source.name}; metrics on {exporter.url}")
                ending = _watch(attachment, log, stop or (lambda: signals.ending))
            finally:
                exporter.close()
    finally:
        attachment.close()
    return EXIT_INTERRUPTED if ending is Ending.INTERRUPTED else EXIT_OK


def _watch(attachment: Attachment, log: Log, stop: Callable[[], Ending | None]) -> Ending:
    pause = threading.Event()
    told: str | None = "nothing yet"
    while True:
        attachment.poll(_READING_S)
        reason = attachment.reason
        if reason != told:
            if reason is not None:
                log.warning(reason)
            else:
                log.info("the engine answers")
            told = reason
        left_s = EVERY_S
        while left_s > 0:
            ending = stop()
            if ending is not None:
                return ending
            pause.wait(_NAP_S)
            left_s -= _NAP_S
