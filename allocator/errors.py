"""Every exception the allocator raises.

AllocatorError
├── RequestError           asked for the impossible; nothing changed; carries the numbers
│   ├── ConfigError        an option is outside what is allowed: names it, its value, and the limits
│   ├── OutOfBlocks        not enough allocatable blocks
│   ├── NoContiguousRun    enough blocks, but no run of them long enough
│   ├── NotHeld            a release or copy of something the caller does not hold
│   ├── UnknownSequence    no such sequence
│   ├── SequenceGone       an attached program's sequence that has ended, with the reason
│   └── Refused            the operation does not apply now, with the reason
├── StorageError           memory could not be had, or a copy failed; tables are as they were
└── InvariantViolation     a law of DESIGN.md section 4 is broken: our bug
"""

from __future__ import annotations

from typing import Final

#: Laws of DESIGN.md section 4, numbered from 1.
NUM_LAWS: Final = 7
#: How an empty value is written in a message.
EMPTY: Final = "''"


class AllocatorError(Exception):
    """Root of all allocator errors."""


class RequestError(AllocatorError):
    """The request cannot be met; the allocator is exactly as it was."""


class ConfigError(RequestError):
    """An option has a value outside what is allowed."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} {EMPTY if value == '' else value}: {allowed}")
        self.option, self.value, self.allowed = option, value, allowed


class OutOfBlocks(RequestError):
    """More blocks were asked for than are allocatable."""

    def __init__(self, needed: int, allocatable: int, tier: str = "device") -> None:
        super().__init__(f"{needed} {tier} blocks needed, {allocatable} allocatable")
        self.needed, self.allocatable, self.tier = needed, allocatable, tier


class NoContiguousRun(RequestError):
    """Enough blocks are allocatable, but no run of consecutive ids is long enough."""

    def __init__(self, needed: int, longest: int, allocatable: int) -> None:
        super().__init__(f"a run of {needed} blocks needed, the longest has {longest} (of {allocatable} allocatable)")
        self.needed, self.longest, self.allocatable = needed, longest, allocatable


class NotHeld(RequestError):
    """A block has fewer references than were to be dropped (a double free), or is in the wrong state."""


class UnknownSequence(RequestError):
    """No sequence with that id holds blocks here."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(f"no sequence {seq_id}")
        self.seq_id = seq_id


class SequenceGone(RequestError):
    """The sequence has ended and its blocks were released: by its program, by an operator, or with the engine."""

    def __init__(self, seq_id: int, reason: str) -> None:
        super().__init__(f"sequence {seq_id} is gone: {reason}")
        self.seq_id, self.reason = seq_id, reason


class Refused(RequestError):
    """The operation does not apply now; the text is the reason."""


class Cancelled(Refused):
    """An operator ended it before it was done; the text says what is done and what stays."""


class StorageError(AllocatorError):
    """Memory could not be had, or a copy failed; block tables still name the old blocks."""


class CopyCancelled(StorageError):
    """An operator ended a copy before it was done."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class InvariantViolation(AllocatorError):
    """A law of the allocator's state is broken. ``law`` is the number in DESIGN.md section 4."""

    def __init__(self, law: int, detail: str) -> None:
        super().__init__(f"law {law}: {detail}")
        self.law, self.detail = law, detail
