"""The prefix cache panel: how often it hits, what is shared, and what would go next."""

from __future__ import annotations

import numpy as np

from allocator.block_map import BlockArrays
from allocator.config import STEP_S
from allocator.metrics import REF_BUCKETS, ratio
from kvtop.model import format as fmt
from kvtop.model.history import hit_ratios, per_second
from kvtop.model.view import View
from kvtop.panels.content import Asked, Entry, Section, nothing

#: Shared prefixes and next victims that are listed.
MAX_LISTED = 12


def prefix(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return the panel's content."""
    snapshot, device = view.snapshot, view.device
    if snapshot is None or device is None:
        return nothing(view)
    counters, numbers, history = snapshot.counters, device.numbers, view.history
    hits = hit_ratios(history)
    saved = saved_blocks(device.arrays)
    entries = (
        Entry("hit ratio, last minute", fmt.percent(view.hit_ratio_window), share=view.hit_ratio_window),
        Entry("hit ratio, since start", fmt.percent(view.hit_ratio), share=view.hit_ratio),
        Entry("over time", "", series=tuple(hits), top=1.0),
        Entry("blocks asked for", fmt.count(counters.query_blocks), f"{fmt.count(counters.query_tokens)} tokens"),
        Entry("blocks given", fmt.count(counters.hit_blocks), f"{fmt.count(counters.hit_tokens)} tokens"),
        Entry("cached now", fmt.count(numbers.cached), "evictable", share=ratio(numbers.cached, numbers.total)),
        Entry(
            "evictions",
            fmt.count(counters.evictions),
            f"{fmt.rate(per_second(history, 'evictions'))}, {snapshot.eviction}",
        ),
        Entry("key collisions", fmt.count(counters.key_collisions), alarm=bool(counters.key_collisions)),
    )
    reuse = tuple(
        Entry(f"{name} {'holder' if name == '1' else 'holders'}", fmt.count(number), share=ratio(number, numbers.total))
        for (_, name), number in zip(REF_BUCKETS, numbers.ref_histogram, strict=True)
    )
    size = fmt.size(saved * snapshot.block_bytes) if snapshot.block_bytes else fmt.UNKNOWN
    return (
        Section("Hits", entries),
        Section("Reuse", (*reuse, Entry("saved by sharing", fmt.blocks(saved), size))),
        Section("Most shared prefixes", tuple(_shared(view, device.arrays)) or (Entry("none", "no block is shared"),)),
        Section("Next to be evicted", _victims(view, device.arrays, snapshot.step)),
    )


def saved_blocks(arrays: BlockArrays) -> int:
    """Return the blocks that sharing saves: holders beyond the first, over all blocks."""
    return int((arrays.ref_count[arrays.ref_count >= 2].astype(np.int64) - 1).sum())


def _shared(view: View, arrays: BlockArrays) -> list[Entry]:
    """Return the largest savings: stretches of blocks with the same holders' number and first holder."""
    refs = arrays.ref_count
    at = np.flatnonzero(refs >= 2)
    if not len(at):
        return []
    new = np.ones(len(at), bool)
    new[1:] = (np.diff(at) != 1) | (refs[at[1:]] != refs[at[:-1]]) | (arrays.owner[at[1:]] != arrays.owner[at[:-1]])
    starts = np.flatnonzero(new)
    lengths = np.diff(np.append(starts, len(at)))
    saved = lengths * (refs[at[starts]].astype(np.int64) - 1)
    most = np.argsort(-saved, kind="stable")[:MAX_LISTED]
    entries = []
    for i in most.tolist():
        first, last = int(at[starts[i]]), int(at[starts[i]] + lengths[i] - 1)
        name = str(first) if first == last else f"{first}-{last}"
        entries.append(Entry(f"blocks {name}", f"{int(refs[first])} holders", f"saves {fmt.blocks(int(saved[i]))}"))
    return entries


def _victims(view: View, arrays: BlockArrays, step: int) -> tuple[Entry, ...]:
    if view.next_victims is None:
        return (Entry("order", fmt.UNKNOWN, "not offered by this engine"),)
    if not len(view.next_victims):
        return (Entry("none", "no cached block could be evicted"),)
    entries = []
    for place, block in enumerate(view.next_victims[:MAX_LISTED], start=1):
        inside = block < arrays.num_blocks
        idle = fmt.seconds(max(0, step - int(arrays.last_used[block])) * STEP_S) if inside else fmt.UNKNOWN
        key = f"hash {int(arrays.hash64[block]):016x}"[:13] if inside else ""
        entries.append(Entry(f"{place}.", f"block {block}", f"idle {idle}  {key}"))
    return tuple(entries)
