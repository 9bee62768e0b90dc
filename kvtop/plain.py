"""Plain: the console as lines of text, for pipes, logs and screen readers. No colours, no cursor movement."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from kvtop.attachment import Attachment
from kvtop.errors import EXIT_FAILED, EXIT_OK
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.panels.content import Asked, Section
from kvtop.panels.engine import overview

#: Sequences that are listed.
_MAX_ROWS: Final = 20
#: Seconds in which ``--once`` must have its one reading.
_ONCE_S: Final = 30.0


def lines(view: View) -> list[str]:
    """Return a view as lines: every number with its name, then the sequences in words."""
    found = [line for section in overview(view, Asked()) for line in _section(section)]
    if view.error is not None:
        found.insert(0, f"engine lost: {_printable(view.error)}")
    snapshot = view.snapshot
    if snapshot is not None:
        for row in snapshot.sequences[:_MAX_ROWS]:
            words = f"sequence {row.seq_id}: {row.status}, {fmt.count(row.num_tokens)} tokens"
            words += f" of {fmt.count(row.num_target)}" if row.num_target is not None else ""
            words += f", {fmt.count(row.num_blocks)} blocks, {fmt.count(row.shared_blocks)} shared"
            found.append(_printable(words + (f", {row.reason}" if row.reason else "")))
        more = len(snapshot.sequences) - _MAX_ROWS
        if more > 0:
            found.append(f"{more} more sequences")
        found += [f"event at step {e.step}: {e.kind}, {_printable(e.text)}" for e in view.events[-3:]]
    return found


def _section(section: Section) -> Iterator[str]:
    for entry in section.entries:
        value = "not known" if entry.value == fmt.UNKNOWN else entry.value
        note = f" ({entry.note})" if entry.note and fmt.UNKNOWN not in entry.note else ""
        yield _printable(f"{section.title.lower()}, {entry.label}: {value}{note}")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_views(
    attachment: Attachment,
    *,
    every_s: float,
    once: bool,
    out: TextIO | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the view again and again, an empty line between two, and return the exit code.

    Args:
        attachment: What is read.
        every_s: Seconds between two.
        once: Print one, ``every_s`` after the first reading so that the engine has something to tell, and end.
        out: Where to; standard output by default.
        sleep: Waits so many seconds.
    """
    stream = out if out is not None else sys.stdout
    if once:
        attachment.poll(_ONCE_S)
        sleep(every_s)
    while True:
        started_s = time.monotonic()
        view = attachment.poll()
        print(*lines(view), sep="\n", file=stream, flush=True)
        if once or view.error is not None:
            return EXIT_OK if view.error is None else EXIT_FAILED
        print(file=stream, flush=True)
        sleep(max(0.0, every_s - (time.monotonic() - started_s)))
