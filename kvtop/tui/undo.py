"""Undo: what takes a change of a setting or of the pool's size back, and the last such changes. Pure; no engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, cast

from allocator.commands import Resize, SetAutoCompaction, SetLoad, SetPolicy, SetWatermark
from allocator.config import Policy
from kvtop.model.view import View
from kvtop.panels.command_text import describe
from kvtop.serving_commands import AnyCommand

#: Changes that can be taken back, one after another.
MAX_CHANGES: Final = 20


@dataclass(frozen=True, slots=True)
class Change:
    """One change that was made.

    Attributes:
        text: What was done, as it would be typed.
        inverse: The command that takes it back.
    """

    text: str
    inverse: AnyCommand


def inverse_of(command: AnyCommand, view: View) -> AnyCommand | None:
    """Return the command that brings back what ``command`` is about to change.

    Args:
        command: What is about to be done.
        view: The engine before that.

    Returns:
        ``None`` for a command whose effect cannot be taken back, or that changes nothing.
    """
    before = view.snapshot
    if before is None:
        return None
    undo: AnyCommand | None = None
    match command:
        case Resize() if view.device is not None:
            undo = Resize(view.device.numbers.total)
        case SetPolicy():
            undo = SetPolicy(cast("Policy", before.policy))
        case SetWatermark():
            undo = SetWatermark(before.watermark_ratio)
        case SetAutoCompaction():
            undo = SetAutoCompaction(before.compact, before.compact_threshold_ratio)  # type: ignore[arg-type]
        case SetLoad(rate, size):
            undo = SetLoad(None if rate is None else before.rate_scale, None if size is None else before.size_scale)
    return None if undo == command else undo


class Changes:
    """The last changes, the newest of which is taken back first."""

    def __init__(self) -> None:
        self._made: deque[Change] = deque(maxlen=MAX_CHANGES)

    @property
    def last(self) -> Change | None:
        """The newest change that can be taken back."""
        return self._made[-1] if self._made else None

    def note(self, command: AnyCommand, inverse: AnyCommand | None) -> None:
        """Keep a command that was done; one that takes the newest change back is the end of that."""
        if self._made and self._made[-1].inverse == command:
            self._made.pop()
        elif inverse is not None:
            self._made.append(Change(describe(command), inverse))

    def clear(self) -> None:
        """Forget all of them: another engine runs."""
        self._made.clear()
