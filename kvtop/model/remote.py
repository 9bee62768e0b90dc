"""RemoteFacts: what is known of an engine over the network, and what it offers. Frozen; unknown is None."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

#: ``RemoteFacts.kind`` of a table of several servers.
FLEET: Final = "fleet"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine behind an address: one model on one data-parallel rank.

    Attributes:
        model: The model's name.
        engine: Rank among the engines of that model.
        usage_ratio: Share of the cache that requests hold, 0 to 1; cached and idle content is not held.
        total_blocks, used_blocks: Blocks that can hold content, and those that requests hold.
        block_size: Tokens a block.
        total_tokens, used_tokens, cached_tokens, free_tokens: The same in tokens, where the engine counts tokens.
        host_usage_ratio: Share of the host tier in use.
        running, waiting, swapped: Requests by status.
        queries, hits: Prefix lookups and hits since the engine started, in ``hit_unit``.
        hit_unit: ``tokens`` or ``blocks``; ``None`` when the release does not tell.
        told_hit_ratio: A hit ratio as the engine itself states it, over a window of its own.
        preemptions, evictions: Totals; evictions in ``eviction_unit``.
        eviction_unit: ``tokens`` or ``blocks``.
        prompt_tokens, generated_tokens: Totals.
        limit_bytes, used_bytes, spare_bytes: The same in bytes, where that is all there is; spare is taken, not used.
        is_up: Whether whoever tells the numbers says that they are current.
        target, kind, age_s: In a table of several servers: which one, what it is, and how old its numbers are.
        trouble: There: why nothing is known of it; ``None`` when something is.
    """

    model: str | None = None
    engine: str = "0"
    usage_ratio: float | None = None
    total_blocks: int | None = None
    used_blocks: int | None = None
    block_size: int | None = None
    total_tokens: int | None = None
    used_tokens: int | None = None
    cached_tokens: int | None = None
    free_tokens: int | None = None
    host_usage_ratio: float | None = None
    running: int | None = None
    waiting: int | None = None
    swapped: int | None = None
    queries: float | None = None
    hits: float | None = None
    hit_unit: str | None = None
    told_hit_ratio: float | None = None
    preemptions: float | None = None
    evictions: float | None = None
    eviction_unit: str | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    limit_bytes: int | None = None
    used_bytes: int | None = None
    spare_bytes: int | None = None
    is_up: bool = True
    target: str = ""
    kind: str = ""
    age_s: float | None = None
    trouble: str | None = None

    @property
    def hit_ratio(self) -> float | None:
        """Hits ÷ lookups since the engine started; else the ratio it states itself."""
        if self.queries and self.hits is not None:
            return self.hits / self.queries
        return self.told_hit_ratio if self.queries is None else None


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing a console can show or do.

    Attributes:
        name: What it is.
        reason: Why it is not available; ``None`` when it is.
        operations: What it lets through the door: names of commands, with a choice behind where that needs more.
    """

    name: str
    reason: str | None = None
    operations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot of a server that has slots instead of blocks.

    Attributes:
        slot_id: Its number.
        total_tokens, held_tokens: What it could hold, and what it holds.
        is_busy: Whether a request is being served in it.
    """

    slot_id: int
    total_tokens: int
    held_tokens: int
    is_busy: bool


@dataclass(frozen=True, slots=True)
class PrefixLine:
    """One resident prefix, as far as events tell it.

    Attributes:
        hash64: Hash of its last shared block.
        depth: Blocks from the first one to this one.
        blocks: Resident blocks below and including it.
        branches: Continuations of it that are resident.
        stores: How often this block was stored since the console joined.
        age_s: Seconds since it was first stored, by the engine's clock.
        rank, group, medium: Where it is.
    """

    hash64: int
    depth: int
    blocks: int
    branches: int
    stores: int
    age_s: float | None
    rank: int
    group: int
    medium: str


@dataclass(frozen=True, slots=True)
class EventFacts:
    """What the stream of cache events tells.

    Attributes:
        state: ``complete``, or why what is known is only part, such as ``joined late: partial``.
        resident: (medium, rank) → resident block copies.
        distinct: Distinct resident blocks over all ranks and mediums.
        prefixes: The largest resident prefixes, largest first.
        batches, stored, removed, cleared: Totals since the console joined.
        gaps, restarts: Holes in the sequence that replay could not fill, and engines found started anew.
        missed: Batches in those holes.
        replayed: Batches that came from the replay buffer.
        behind_s: How much later than at best batches are taken over: a reader that falls behind sees it grow. [s]
        unknown, broken: Events of unknown type, and messages that could not be read.
        drift: Removals of blocks that were not known to be there.
        mean_life_s: Mean time from store to removal of the blocks removed so far. [s]
    """

    state: str
    resident: tuple[tuple[str, int, int], ...] = ()
    distinct: int = 0
    prefixes: tuple[PrefixLine, ...] = ()
    batches: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    gaps: int = 0
    restarts: int = 0
    missed: int = 0
    replayed: int = 0
    behind_s: float = 0.0
    unknown: int = 0
    broken: int = 0
    drift: int = 0
    mean_life_s: float | None = None


@dataclass(frozen=True, slots=True)
class PastRows:
    """What an engine told at an earlier moment.

    Attributes:
        ago_s: Seconds before the reading that this comes with.
        rows: As in ``RemoteFacts``.
    """

    ago_s: float
    rows: tuple[EngineRow, ...]


@dataclass(frozen=True, slots=True)
class RemoteFacts:
    """One reading of an engine over the network.

    Attributes:
        kind: What it is, such as ``vLLM``.
        version: Its release, where it tells.
        address: Where it was read.
        rows: One for each engine behind the address; never empty.
        restarts: How often counters fell since the console joined: the engine was started anew.
        capabilities: For each panel and operation: available, or why not.
        notes: What a reader of the numbers should know.
        events: What cache events tell; ``None`` without a stream.
        age_s: Seconds since this was read.
        past: Earlier moments, oldest first, from whoever has kept them.
        states: What the engine says of itself, such as (``paused``, true); empty where it says nothing.
        slots: Its slots, where it has slots and tells of them.
    """

    kind: str
    version: str | None
    address: str
    rows: tuple[EngineRow, ...]
    restarts: int = 0
    capabilities: tuple[Capability, ...] = ()
    notes: tuple[str, ...] = ()
    events: EventFacts | None = None
    age_s: float = 0.0
    past: tuple[PastRows, ...] = ()
    states: tuple[tuple[str, bool], ...] = ()
    slots: tuple[SlotRow, ...] = ()

    def is_now(self, state: str) -> bool | None:
        """Return what the engine says of a state; ``None`` where it says nothing."""
        return dict(self.states).get(state)

    def refusal(self, operation: str) -> str | None:
        """Return why an operation is not available; ``None`` when it is."""
        for capability in self.capabilities:
            if operation in capability.operations:
                return capability.reason
        return "not offered by this engine"


def total_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of what is known; ``None`` if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum, or ``None`` if any part of it is not known or there is none."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    return sum(value for value in known if value is not None)


def usage_of(rows: Iterable[EngineRow]) -> float | None:
    """Return the held share over several engines: weighted by size where all sizes are known, else their mean."""
    shares = [(row.usage_ratio, row.total_blocks or row.total_tokens) for row in rows]
    if not shares or any(usage is None for usage, _ in shares):
        return None
    known = [(usage, size) for usage, size in shares if usage is not None]
    weights = [size for _, size in known]
    if all(weights):
        return sum(usage * (size or 0) for usage, size in known) / sum(size or 0 for size in weights)
    return sum(usage for usage, _ in known) / len(known)
