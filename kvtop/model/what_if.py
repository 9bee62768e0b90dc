"""WhatIf: what another capacity, block size or policy would have done to an engine's traffic. Estimates. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """The lookups that cache events imply. A lookup that stored nothing new leaves no event, and is not among them.

    Attributes:
        lookups: Requests that stored at least one block.
        blocks: Blocks that they looked up or made.
        hits: Of those, blocks that were resident: what they stored follows them.
        again: Blocks stored although they had been stored before, and were gone: misses that a larger cache would save.
        repeated: Blocks stored while they were still resident: computed twice at once, or by the engine's own rule.
        unknown: Lookups left out, since the beginning of their chain is not known.
    """

    lookups: int = 0
    blocks: int = 0
    hits: int = 0
    again: int = 0
    repeated: int = 0
    unknown: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.lookups + other.lookups,
            self.blocks + other.blocks,
            self.hits + other.hits,
            self.again + other.again,
            self.repeated + other.repeated,
            self.unknown + other.unknown,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one other cache would have made of the same lookups.

    Attributes:
        name: What is other: a capacity, a block size, a policy.
        capacity: Blocks of the cache, in its own block size.
        hit_ratio: Hit tokens ÷ looked-up tokens; ``None`` where it cannot be known.
        is_own: Whether it is the cache as it is.
    """

    name: str
    capacity: int
    hit_ratio: float | None
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimates from the newest lookups.

    Attributes:
        traffic: What events imply of the lookups used, over all ranks.
        span_s: From the first of them to the last, by the engine's clock.
        block_size: Tokens a block; 0 when not told.
        capacity: Blocks of one rank's cache.
        is_told: Whether the engine tells its size; otherwise it is the most that was resident.
        held: Blocks that running requests hold, taken as held throughout; 0 when not told.
        capacities, block_sizes, policies: The estimates, by what is other.
        replayed: Lookups that the policies were tried on: the newest of those above.
        told_queries, told_hits: Looked-up and hit tokens that the engine itself has counted since kvtop joined.
    """

    traffic: Traffic
    span_s: float
    block_size: int
    capacity: int
    is_told: bool
    held: int
    capacities: tuple[Outcome, ...]
    block_sizes: tuple[Outcome, ...]
    policies: tuple[Outcome, ...]
    replayed: int
    told_queries: float | None = None
    told_hits: float | None = None
