"""Events: what happened during a step, numbered and frozen. EventLog: the latest of an engine; owns the numbering."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final, Literal

import msgspec

#: Events kept: older ones are dropped.
_KEPT: Final = 4096

EventKind = Literal[
    "admit",
    "finish",
    "refuse",
    "cancel",
    "preempt",
    "swap-out",
    "swap-in",
    "fork",
    "copy-on-write",
    "evict",
    "compact",
    "resize",
    "pin",
    "command",
    "fault",
    "note",
]


class Event(msgspec.Struct, frozen=True):
    """One thing that happened.

    Attributes:
        number: Counts up by one from 0 in one engine; a gap means that events were dropped.
        step: Engine step in which it happened.
        kind: What happened.
        text: One line for people.
        seq_id: The sequence concerned, if one.
        blocks: Blocks concerned.
    """

    number: int
    step: int
    kind: EventKind
    text: str
    seq_id: int | None = None
    blocks: int = 0


class EventLog:
    """The events of one engine, the latest kept."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        self._num_events = 0

    def add(self, step: int, kind: EventKind, text: str, seq_id: int | None = None, blocks: int = 0) -> None:
        """Record an event of a step."""
        self._kept.append(Event(self._num_events, step, kind, text, seq_id, blocks))
        self._num_events += 1

    def since(self, number: int, newest: int | None = None) -> tuple[Event, ...]:
        """Return kept events from ``number`` on, oldest first; where ``newest`` is given, no more than so many."""
        wanted = min(self._num_events - number, len(self._kept))
        if newest is not None:
            wanted = min(wanted, newest)
        latest = list(itertools.islice(reversed(self._kept), max(0, wanted)))
        latest.reverse()
        return tuple(latest)
