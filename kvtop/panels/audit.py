"""The audit panel: who asked this engine for what, what was planned, and what came of it."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Final

from allocator.work import CANCELLED
from kvtop.audit import AuditEntry
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.panels.command_text import describe
from kvtop.panels.content import Asked, Entry, Section

#: Commands that are listed.
_MAX_ROWS: Final = 500


def audit(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return the commands of every client of this engine, the newest first, and only those with the words wanted."""
    own = os.getpid()
    of_engine = [e for e in asked.audit if _is_of(e, view.source, own)]
    entries = [_entry(e, own) for e in of_engine]
    if all(e.pid != own for e in of_engine):  # a door that leaves no lines: what this console knows itself
        entries += [
            Entry(at, "this console", f"{command} → {_ended(ok, message)}", alarm=not ok)
            for at, command, ok, message in asked.commands
        ]
        entries.sort(key=lambda entry: entry.label)
    words = asked.wanted.lower().split()
    found = [e for e in entries if all(word in f"{e.label} {e.value} {e.note}".lower() for word in words)]
    title = "Commands to this engine, the newest first"
    if words:
        title += f"  /{asked.wanted}: {fmt.count(len(found))} of {fmt.count(len(entries))}"
    none = Entry("none", "", f"no command with {asked.wanted}" if words else "nobody has asked for anything yet")
    return (Section(title, tuple(reversed(found[-_MAX_ROWS:])) or (none,), wide=True, wrap=True),)


def _is_of(entry: AuditEntry, source: str, own: int) -> bool:
    """Return whether a line is of this engine; a private engine's name is everybody's, its console's process is not."""
    if entry.engine != source.removeprefix("local:"):
        return False
    return entry.engine != "embedded" or entry.pid == own


def _entry(entry: AuditEntry, own: int) -> Entry:
    words = describe(entry.command)
    if entry.plan is not None and entry.plan.refusal is None:
        words += f": {entry.plan.summary}"
    is_ok = entry.outcome is not None and entry.outcome.ok
    if entry.outcome is None:
        words += f" → not known: {entry.error or fmt.UNKNOWN}"
    else:
        words += f" → {_ended(entry.outcome.ok, entry.outcome.message)}"
    return Entry(_when(entry.time), _who(entry, own), words, alarm=not is_ok)


def _ended(ok: bool, message: str) -> str:
    if ok:
        return f"done: {message}"
    return message if message.startswith(CANCELLED) else f"refused: {message}"


def _when(time: str) -> str:
    """Return a time of the log as this machine's clock shows it, with month and day."""
    try:
        at = datetime.fromisoformat(time).astimezone()
    except ValueError:
        return time
    return f"{at:%m-%d %H:%M:%S}"


def _who(entry: AuditEntry, own: int) -> str:
    if entry.pid == own:
        return "this console"
    pid = fmt.UNKNOWN if entry.pid is None else str(entry.pid)
    user = f" uid {entry.uid}" if entry.uid not in (None, os.getuid()) else ""
    return f"{entry.program or 'pid'} {pid}{user}"
