"""Commands: the closed set of what may be asked of a running engine. Frozen; no behaviour."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from allocator.fault_kinds import FaultKind

#: Characters of an annotation, at most.
MAX_TEXT: Final = 200

CompactGoal = Literal["pack-low", "longest-run", "by-sequence"]


class _Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands: frozen, comparable, and tagged by class name on the wire."""


class Pause(_Command, frozen=True, tag=True):
    """Stop stepping; commands still work."""


class Resume(_Command, frozen=True, tag=True):
    """Go on after a pause."""


class Step(_Command, frozen=True, tag=True):
    """Take ``steps`` steps, then stay paused."""

    steps: int = 1


class SetSpeed(_Command, frozen=True, tag=True):
    """Pace virtual time at ``speed`` times real time; ``None`` is as fast as possible."""

    speed: float | None


class SubmitLoad(_Command, frozen=True, tag=True):
    """Submit ``count`` synthetic requests of the given lengths at once."""

    prompt_tokens: int
    output_tokens: int
    count: int = 1


class SetLoad(_Command, frozen=True, tag=True):
    """Change the load from now on: how many times as fast requests arrive, and as long they are, as at scale 1.

    Attributes:
        rate_scale: Factor on the rate of arrivals; ``None`` leaves it.
        size_scale: Factor on the lengths of requests not yet made; ``None`` leaves it.
    """

    rate_scale: float | None = None
    size_scale: float | None = None


class Cancel(_Command, frozen=True, tag=True):
    """End a sequence now, in whatever stage it is."""

    seq_id: int


class Fork(_Command, frozen=True, tag=True):
    """Continue a running sequence twice: the copy shares every block."""

    seq_id: int


class Preempt(_Command, frozen=True, tag=True):
    """Take a running sequence off the device; the scheduler brings it back in turn."""

    seq_id: int
    mode: Literal["swap", "recompute"] = "swap"


class SwapOut(_Command, frozen=True, tag=True):
    """Copy a running sequence's blocks to the host tier and hold it there until ``SwapIn``."""

    seq_id: int


class SwapIn(_Command, frozen=True, tag=True):
    """Copy a swapped sequence's blocks back to the device and let it run."""

    seq_id: int


class Compact(_Command, frozen=True, tag=True):
    """Move blocks towards ``goal``.

    Attributes:
        goal: ``pack-low``, ``longest-run`` or ``by-sequence``.
        run_blocks: For ``longest-run``: the run wanted; ``None`` asks for the longest possible.
        max_moves: Budget in blocks; ``None`` is no limit.
    """

    goal: CompactGoal = "pack-low"
    run_blocks: int | None = None
    max_moves: int | None = None


class Resize(_Command, frozen=True, tag=True):
    """Grow or shrink the device pool to ``num_blocks``."""

    num_blocks: int


class EvictCached(_Command, frozen=True, tag=True):
    """Evict ``num_blocks`` cached blocks, next victim first; without a number, all cached blocks."""

    num_blocks: int | None = None


class Pin(_Command, frozen=True, tag=True):
    """Keep device blocks where and as they are: never moved, never evicted, not handed out."""

    block_ids: tuple[int, ...]


class Unpin(_Command, frozen=True, tag=True):
    """Undo ``Pin``."""

    block_ids: tuple[int, ...]


class SetPolicy(_Command, frozen=True, tag=True):
    """Order the queue by another policy from here on."""

    policy: Literal["fcfs", "priority", "sjf"]


class SetWatermark(_Command, frozen=True, tag=True):
    """Keep this share of the pool allocatable when admitting."""

    ratio: float


class SetAutoCompaction(_Command, frozen=True, tag=True):
    """Choose when compaction runs, and at which external fragmentation ratio."""

    mode: Literal["off", "manual", "auto"]
    threshold_ratio: float = 0.5


class VerifyContents(_Command, frozen=True, tag=True):
    """Check every law now, and in stamp mode read every slot back."""


class Abort(_Command, frozen=True, tag=True):
    """End the command in progress before its next slice: what it has moved stays moved, and every law holds."""


class InjectFault(_Command, frozen=True, tag=True):
    """Let something go wrong on purpose.

    Attributes:
        kind: What goes wrong; see ``allocator.fault_kinds``.
        count: How many copies, steps, clients, bits or references it strikes; ``None`` takes the kind's own number,
            0 takes back what is still to come.
        seconds: For ``slow-copy`` and ``stuck-executor``: real seconds a copy; ``None`` takes the kind's own. [s]
    """

    kind: FaultKind
    count: int | None = None
    seconds: float | None = None


class Annotate(_Command, frozen=True, tag=True):
    """Write a line of text among the events; a recording keeps it as a mark at this step."""

    text: str


Command: TypeAlias = (
    Pause
    | Resume
    | Step
    | SetSpeed
    | SubmitLoad
    | SetLoad
    | Cancel
    | Fork
    | Preempt
    | SwapOut
    | SwapIn
    | Compact
    | Resize
    | EvictCached
    | Pin
    | Unpin
    | SetPolicy
    | SetWatermark
    | SetAutoCompaction
    | VerifyContents
    | InjectFault
    | Annotate
    | Abort
)


def command_name(command: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name of a command, or of a kind of them, as scripts and logs write it: ``SwapOut`` is ``swap-out``."""
    kind = command if isinstance(command, type) else type(command)
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("-")
