"""Plain: the console as lines of text, for pipes, logs and screen readers. No colours, no cursor movement."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TextIO

from kvtop.attachment import Attachment
from kvtop.errors import EXIT_FAILED, EXIT_OK
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.panels.beside import Beside
from kvtop.panels.catalog import CONTENTS
from kvtop.panels.content import Asked, Section
from kvtop.panels.engine import overview

#: Sequences that are listed.
_MAX_ROWS: Final = 20
#: Seconds in which ``--once`` must have its one reading.
_ONCE_S: Final = 30.0


def lines(view: View, panels: Sequence[str] = (), asked: Asked | None = None) -> list[str]:
    """Return a view as lines: every number with its name, then the sequences in words.

    Args:
        view: The view.
        panels: Panels to tell instead, by name.
        asked: What they show besides the view.
    """
    asked = asked or Asked()
    if panels:
        return [line for panel in panels for section in CONTENTS[panel](view, asked) for line in _section(section)]
    found = [line for section in overview(view, asked) for line in _section(section)]
    found += [f"alert {s.alert.name}: firing, {s.runbook}" for s in asked.alerts if s.state == "firing"]
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
        said = f"{value}{note}" if value else entry.note
        if said:
            yield _printable(f"{section.title.lower()}, {entry.label}: {said}")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_views(
    attachment: Attachment,
    *,
    every_s: float,
    once: bool,
    panels: Sequence[str] = (),
    out: TextIO | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the view again and again, an empty line between two, and return the exit code.

    Args:
        attachment: What is read.
        every_s: Seconds between two.
        once: Print one, ``every_s`` after the first reading so that the engine has something to tell, and end.
        panels: Panels to print instead of the overview.
        out: Where to; standard output by default.
        sleep: Waits so many seconds.
    """
    stream = out if out is not None else sys.stdout
    beside = Beside()
    try:
        for panel in panels:
            beside.open(panel)
        if once:
            beside.follow(attachment.poll(_ONCE_S), attachment.clock())
            sleep(every_s)
        while True:
            started_s = time.monotonic()
            view = attachment.poll()
            beside.follow(view, attachment.clock())
            asked = Asked(alerts=beside.alerts, audit=beside.audit, gpus=beside.gpus)
            print(*lines(view, panels, asked), sep="\n", file=stream, flush=True)
            if once or view.error is not None:
                return EXIT_OK if view.error is None else EXIT_FAILED
            print(file=stream, flush=True)
            sleep(max(0.0, every_s - (time.monotonic() - started_s)))
    finally:
        beside.close()
