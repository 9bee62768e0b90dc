"""Events: what happened during a step, numbered. Frozen; no behaviour."""

from __future__ import annotations

from typing import Literal

import msgspec

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
