"""Plans and outcomes: intended work with its cost, and what became of it. Frozen; no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from allocator.ids import IdArray, Tier


class Effect(msgspec.Struct, frozen=True):
    """One number before an operation and as expected after it; ``None`` is not known."""

    name: str
    before: float | None
    after: float | None


class Plan(msgspec.Struct, frozen=True):
    """What a command would do if nothing else happened first. Information, not a promise.

    Attributes:
        summary: One line: the command and its main effect.
        moved_blocks: Blocks that would be copied.
        moved_bytes: Bytes those copies read.
        evicted_blocks: Cached blocks that would lose their content.
        sequences: Ids of the sequences touched.
        effects: Numbers before and after.
        refusal: Why it would be refused; ``None`` when it can be done.
    """

    summary: str
    moved_blocks: int = 0
    moved_bytes: int = 0
    evicted_blocks: int = 0
    sequences: tuple[int, ...] = ()
    effects: tuple[Effect, ...] = ()
    refusal: str | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What a command did.

    Attributes:
        ok: Whether it was done; if not, nothing changed but what ``moved_blocks`` counts.
        message: One line for the event line and the audit log.
        moved_blocks: Blocks copied.
        moved_bytes: Bytes those copies read.
        seconds: Time the work took.
        is_seen: Whether its effect was seen, rather than only promised by whoever did it.
    """

    ok: bool
    message: str
    moved_blocks: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    is_seen: bool = True


class WorkProgress(msgspec.Struct, frozen=True):
    """How far a command is that takes its time.

    Attributes:
        name: The command.
        done_blocks: Blocks copied so far.
        total_blocks: Blocks to be copied in all.
    """

    name: str
    done_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class Moves:
    """One stage of block moves within the device tier, to be copied and then committed as one.

    Destinations are distinct and none is also a source, so the copies may run in any order.

    Attributes:
        sources: Blocks whose content moves. [n]
        destinations: Blocks they move to; free once ``evicted`` are. [n]
        evicted: Cached blocks that lose their content to make room. [m]
    """

    sources: IdArray
    destinations: IdArray
    evicted: IdArray


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Stages of moves, one after another: a later stage may use blocks that an earlier one freed.

    Attributes:
        stages: Non-empty stages.
        left: Moves that a budget left out.
    """

    stages: tuple[Moves, ...] = ()
    left: int = 0

    @property
    def moved_blocks(self) -> int:
        """Blocks copied over all stages."""
        return sum(len(stage.sources) for stage in self.stages)

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks lost over all stages."""
        return sum(len(stage.evicted) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks to copy between or within tiers: ``sources[i]`` to ``destinations[i]``. [n]"""

    source_tier: Tier
    sources: IdArray
    destination_tier: Tier
    destinations: IdArray
