"""Section and Entry: the parts of which panels are made. Knows no screen and no colours."""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.audit import AuditEntry
from kvtop.gpu import GpuReading
from kvtop.model.block_log import Block, Happening
from kvtop.model.view import View
from kvtop.monitoring.watch import AlertStatus


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a panel.

    Attributes:
        label: What it is.
        value: Its value in words; ``—`` when unknown.
        note: A remark behind it.
        share: A bar of this length, from 0 to 1; ``None`` is no bar.
        series: Values of a graph, oldest first; ``None`` is no graph.
        top: The value of a full graph; ``None`` is the largest shown.
        alarm: Whether it is worth a look.
    """

    label: str
    value: str
    note: str = ""
    share: float | None = None
    series: tuple[float | None, ...] | None = None
    top: float | None = None
    alarm: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Entries under one heading; ``wide`` asks for the whole width, ``wrap`` for long notes to go on below."""

    title: str
    entries: tuple[Entry, ...]
    wide: bool = False
    wrap: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What a panel shows besides the view.

    Attributes:
        selected: The selected sequence.
        back: Points of the history that are scrolled back.
        commands: What was asked for from this console, oldest first.
        alerts: The shipped alerts as they stand; empty before the first reading.
        audit: The latest lines of this user's audit log, oldest first.
        wanted: Words that a panel's lines must have, where it can be searched.
        gpus: The latest readings of this machine's GPUs, oldest first; empty before anybody asked for them.
        block: The block under the cursor; ``None`` before there is one.
        happenings: What happened to it while somebody looked, oldest first.
    """

    selected: int | None = None
    back: int = 0
    commands: tuple[tuple[str, str, bool, str], ...] = ()
    alerts: tuple[AlertStatus, ...] = ()
    audit: tuple[AuditEntry, ...] = ()
    wanted: str = ""
    gpus: tuple[GpuReading, ...] = ()
    block: Block | None = None
    happenings: tuple[Happening, ...] = ()


def nothing(view: View) -> tuple[Section, ...]:
    """Return the one section of a panel without facts, which says why."""
    reason = view.error or "the engine is still starting"
    return (Section("", (Entry("nothing known", reason),)),)
