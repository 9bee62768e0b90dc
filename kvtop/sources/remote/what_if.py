"""Estimates of what other caches would have made of the lookups that events imply. Pure; seconds at most.

Capacities and block sizes come from reuse distances, as if the requests had come one after the other while what the
engine says is held stays held. Policies are tried on kvtop's own allocator: a program attached to it starts each lookup
as a sequence, two tokens standing for a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, get_args

import numpy as np

from allocator.config import Eviction
from allocator.reuse import SHARES, ReuseDistances
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.model.what_if import Outcome, Traffic, WhatIf
from kvtop.sources.remote.lookups import Lookup

#: Blocks that each policy is tried on at most: the newest lookups with these.
MAX_REPLAYED: Final = 100_000
#: A larger pool than this is not tried on the allocator.
MAX_POOL: Final = 1_000_000
#: Blocks of a larger size hold this many of the engine's.
FACTORS: Final = (1, 2, 4)
_MASK: Final = (1 << 31) - 1


def what_if(
    lookups: Mapping[int, Sequence[Lookup]], capacity: int, held: int, *, block_size: int, is_told: bool
) -> WhatIf:
    """Return the estimates.

    Args:
        lookups: By rank, oldest first. Each rank has a cache of its own.
        capacity: Blocks of each.
        held: Blocks of each that running requests hold.
        block_size: Tokens a block; 0 when not told.
        is_told: Whether the engine told ``capacity``.
    """
    known = {rank: found for rank, found in lookups.items() if found}
    traffic = Traffic()
    for found in known.values():
        for lookup in found:
            traffic += lookup.traffic
    times = [lookup.last_s for found in known.values() for lookup in (found[0], found[-1])]
    replayed = {rank: _newest(found) for rank, found in known.items()}
    return WhatIf(
        traffic,
        max(times, default=0.0) - min(times, default=0.0),
        block_size,
        capacity,
        is_told,
        held,
        _capacities(known, capacity, held),
        _block_sizes(known, capacity, held, block_size),
        tuple(_policy(replayed, capacity - held, policy) for policy in get_args(Eviction)),
        sum(map(len, replayed.values())),
    )


def _distances(lookups: Sequence[Lookup], capacity: int, held: int, factor: int) -> ReuseDistances:
    """Return the reuse distances of one rank's lookups in blocks of ``factor`` of the engine's."""
    found = ReuseDistances(max(1, capacity // factor), is_exact=False)
    others = held // factor
    for number, lookup in enumerate(lookups):
        # A large block's key is that of its last part, which names all before it.
        epoch = lookup.epoch.to_bytes(4, "big")
        keys = [epoch + h.to_bytes(8, "big") for h in lookup.keys[factor - 1 :: factor]]
        num = len(keys)
        if not num:
            continue
        hittable = num if lookup.hittable is None else lookup.hittable // factor
        found.query(num, num + others)
        found.start(number, keys, num, hittable=hittable, taken=num, held=num + others)
        found.release(number, num, shared=0, taken=num, held=num + others)
    return found


def _ratio(found: Sequence[ReuseDistances], capacity: int, looked: int, factor: int) -> float | None:
    hits = [distances.hits(capacity) for distances in found]
    if not looked or any(h is None for h in hits):
        return None
    return sum(h or 0 for h in hits) * factor / looked


def _looked(lookups: Mapping[int, Sequence[Lookup]]) -> int:
    return sum(len(lookup.keys) for found in lookups.values() for lookup in found)


def _capacities(lookups: Mapping[int, Sequence[Lookup]], capacity: int, held: int) -> tuple[Outcome, ...]:
    found = [_distances(one, capacity, held, 1) for one in lookups.values()]
    sizes = [max(1, round(share * capacity)) for share in SHARES]
    looked = _looked(lookups)
    return tuple(Outcome(f"{size:,} blocks", size, _ratio(found, size, looked, 1), size == capacity) for size in sizes)


def _block_sizes(
    lookups: Mapping[int, Sequence[Lookup]], capacity: int, held: int, block_size: int
) -> tuple[Outcome, ...]:
    looked, outcomes = _looked(lookups), []
    for factor in FACTORS:
        found = [_distances(one, capacity, held, factor) for one in lookups.values()]
        size = max(1, capacity // factor)
        name = f"{block_size * factor} tokens" if block_size else f"{factor} of its blocks"
        outcomes.append(Outcome(name, size, _ratio(found, size, looked, factor), factor == 1))
    return tuple(outcomes)


def _newest(lookups: Sequence[Lookup]) -> list[Lookup]:
    """Return the newest lookups that together have at most ``MAX_REPLAYED`` blocks, oldest first."""
    taken: list[Lookup] = []
    blocks = 0
    for lookup in reversed(lookups):
        blocks += len(lookup.keys)
        if blocks > MAX_REPLAYED:
            break
        taken.append(lookup)
    return taken[::-1]


def _policy(lookups: Mapping[int, Sequence[Lookup]], capacity: int, policy: Eviction) -> Outcome:
    hits = [_replay(one, capacity, policy) for one in lookups.values()]
    looked = _looked(lookups)
    is_known = bool(looked) and all(h is not None for h in hits)
    ratio = sum(h or 0 for h in hits) / looked if is_known else None
    return Outcome(policy.upper(), capacity, ratio)


def _replay(lookups: Sequence[Lookup], capacity: int, policy: Eviction) -> int | None:
    """Return the hit blocks of an allocator of ``capacity`` blocks; ``None`` when it cannot hold every lookup."""
    needed = max((len(lookup.keys) + 1 for lookup in lookups), default=1)
    if not needed <= capacity <= MAX_POOL:
        return None
    options = EngineOptions(
        num_blocks=capacity, block_size=2, geometry="none", workload="attached", eviction=policy, swap_ratio=0.0,
        watermark_ratio=0.0, reuse_distances=False,
    )  # fmt: skip
    engine, _ = build_engine(options)
    try:
        session = engine.clients.open("what if", 0)
        hits = 0
        for lookup in lookups:
            state = session.start(_tokens(lookup.keys), salt=lookup.epoch.to_bytes(4, "big"))
            limit = len(lookup.keys) if lookup.hittable is None else lookup.hittable
            hits += min(state.hit_tokens // 2, limit)
            session.release(state.seq_id)
        return hits
    finally:
        engine.close()


def _tokens(keys: Sequence[int]) -> np.ndarray:
    """Return two tokens for each block, and one more, so that the last block can be hit like the others."""
    halves = np.empty(2 * len(keys) + 1, np.int32)
    halves[0:-1:2] = [h >> 33 & _MASK for h in keys]
    halves[1:-1:2] = [h & _MASK for h in keys]
    halves[-1] = 0
    return halves
