"""The oracle: the most hits that any eviction order could have had, from requests that are all known beforehand.

Belady's rule: evict what is used again last. It holds for a cache whose entries cost the same and are all loaded when
asked for, which is what prefixes of one block each are.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (1966).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtop.learn.lesson import EngineSpec


def accesses_of(spec: EngineSpec) -> tuple[list[str], int]:
    """Return the prefixes that an engine's requests ask for, in order, and how many of them its pool can keep.

    Only for requests that run one after another, have one full block in common with others, and the same blocks of
    their own besides: what the pool can keep is then what these leave.

    Raises:
        ValueError: They are not like that.
    """
    block_size = spec.options.block_size or 16
    own = set()
    accesses = []
    for request in sorted(spec.requests, key=lambda r: r.at):
        if request.common // block_size != 1 or request.prompt <= block_size:
            raise ValueError(f"{request.label}: not one full block in common, and more prompt after it")
        own.add(-(-(request.prompt + request.output) // block_size) - 1)
        accesses.append(request.like)
    if len(own) != 1:
        raise ValueError("requests of different sizes")
    return accesses, spec.options.num_blocks - own.pop()


def best_hits(accesses: Sequence[str], capacity: int) -> int:
    """Return the hits of a cache of ``capacity`` entries that evicts what is used again last."""
    cached: set[str] = set()
    hits = 0
    for at, key in enumerate(accesses):
        if key in cached:
            hits += 1
            continue
        if len(cached) == capacity:
            coming = accesses[at + 1 :]
            cached.remove(max(cached, key=lambda k: (coming.index(k) if k in coming else len(accesses), k)))
        cached.add(key)
    return hits
