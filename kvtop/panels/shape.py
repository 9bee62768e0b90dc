"""The fragmentation panel: how torn the pool is, over time, and what would still fit in one piece."""

from __future__ import annotations

import numpy as np

from allocator.metrics import allocatable_mask, ratio, run_lengths
from allocator.snapshot import Snapshot
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.panels.content import Asked, Entry, Section, nothing


def fragmentation(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return the panel's content. Cost: a few vector passes over the device tier."""
    snapshot, device = view.snapshot, view.device
    if snapshot is None or device is None:
        return nothing(view)
    numbers, counters, history = device.numbers, snapshot.counters, view.history
    lengths = run_lengths(allocatable_mask(device.arrays), max(1, snapshot.slab_size))
    largest = numbers.largest_free_run
    tokens, failed = largest * snapshot.block_size, counters.failures_contiguous
    state = (
        Entry(
            "external",
            fmt.percent(numbers.external_ratio),
            "1 − longest run ÷ allocatable",
            share=numbers.external_ratio,
        ),
        Entry("over time", "", series=history.get("external"), top=1.0),
        Entry(
            "internal", fmt.percent(numbers.internal_ratio), "empty slots of held blocks", share=numbers.internal_ratio
        ),
        Entry("over time", "", series=history.get("internal")),
        Entry("allocatable", fmt.blocks(numbers.allocatable), f"in {_runs(numbers.free_runs)}"),
        Entry("longest run", fmt.blocks(largest), f"{fmt.count(tokens)} tokens in one piece"),
        Entry("failed for want of a run", fmt.count(failed), alarm=bool(failed)),
    )
    moves = (
        Entry("mode", snapshot.compact, f"auto at {fmt.percent(snapshot.compact_threshold_ratio)}"),
        Entry("by hand", fmt.count(counters.compactions_manual)),
        Entry("by the threshold", fmt.count(counters.compactions_threshold)),
        Entry("blocks moved", fmt.count(counters.compaction_moved_blocks), fmt.size(counters.compaction_moved_bytes)),
    )
    return (
        Section("State", state),
        Section("Runs of allocatable blocks", _histogram(lengths)),
        Section("What still fits in one piece", _fits(lengths, snapshot.block_size)),
        Section("Compaction", moves),
        Section("Latest compactions", _records(snapshot)),
    )


def _records(snapshot: Snapshot) -> tuple[Entry, ...]:
    """Return the latest compactions, the newest first."""
    entries = []
    for record in reversed(snapshot.compactions):
        moved = f"{fmt.blocks(record.moved_blocks)}, {record.trigger}, {record.goal}"
        ratios = f"{fmt.percent(record.ratio_before)} → {fmt.percent(record.ratio_after)}"
        ended = f", ended early: {record.ended_early}" if record.ended_early else ""
        entries.append(Entry(f"step {fmt.count(record.started_step)}", ratios, moved + ended))
    return tuple(entries) or (Entry("none", "yet"),)


def _histogram(lengths: np.ndarray) -> tuple[Entry, ...]:
    """Return how many runs there are by length, in powers of two, with the share of the blocks that lie in them."""
    if not len(lengths):
        return (Entry("none", "nothing is allocatable"),)
    buckets = np.floor(np.log2(lengths)).astype(np.int64)
    runs = np.bincount(buckets)
    blocks = np.bincount(buckets, weights=lengths)
    entries = []
    for i, (number, inside) in enumerate(zip(runs.tolist(), blocks.tolist(), strict=True)):
        low, high = 1 << i, (2 << i) - 1
        name = str(low) if low == high else f"{fmt.short(low)}-{fmt.short(high)}"
        share = ratio(inside, float(lengths.sum()))
        entries.append(Entry(name, _runs(number), fmt.percent(share), share))
    return tuple(entries)


def _runs(number: int) -> str:
    return f"{fmt.count(number)} {'run' if number == 1 else 'runs'}"


def _fits(lengths: np.ndarray, block_size: int) -> tuple[Entry, ...]:
    """Return how many requests of a size would fit at once, each in one piece, against how many blocks would allow."""
    allocatable = int(lengths.sum())
    entries = []
    size = 1
    while size <= max(1, 4 * int(lengths.max(initial=0))) and size <= max(1, allocatable):
        fit, room = int((lengths // size).sum()), allocatable // size
        words = f"of {fmt.count(room)} by number alone"
        name = f"{fmt.short(size)} {'block' if size == 1 else 'blocks'}"
        entries.append(Entry(name, f"{fmt.count(fit)}", words, ratio(fit, room), alarm=fit == 0))
        size *= 2
    return tuple(entries)
