"""The panels on the engine itself: overview, tiers and copies, locks and threads."""

from __future__ import annotations

from allocator.metrics import plus, ratio
from kvtop.model import format as fmt
from kvtop.model.history import per_second
from kvtop.model.view import TierView, View
from kvtop.panels.content import Asked, Entry, Section, nothing
from kvtop.panels.remote import remote_overview


def overview(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return the main numbers in words: what the header and the map say."""
    snapshot = view.snapshot
    if view.remote is not None:
        return remote_overview(view.remote)
    if snapshot is None:
        return nothing(view)
    counters = snapshot.counters
    engine = (
        Entry("engine", view.source, fmt.storage(snapshot.device, snapshot.geometry)),
        Entry("phase", snapshot.phase, alarm=":" in snapshot.phase),
        Entry("step", fmt.count(snapshot.step), f"{fmt.seconds(snapshot.time_s)} of virtual time"),
        Entry("speed", fmt.speed(snapshot.speed), f"{fmt.short(snapshot.steps_per_s)} steps/s"),
        Entry("load", snapshot.workload),
        Entry("running", fmt.count(snapshot.num_running)),
        Entry("waiting", fmt.count(snapshot.num_waiting)),
        Entry("swapped out", fmt.count(snapshot.num_swapped)),
        Entry("preemptions", fmt.count(plus(counters.preemptions_swap, counters.preemptions_recompute))),
        Entry("failed for want of room", fmt.count(counters.failures_capacity)),
        Entry("broken laws", fmt.count(counters.integrity_faults), alarm=bool(counters.integrity_faults)),
    )
    cache = (
        Entry("hit ratio, last minute", fmt.percent(view.hit_ratio_window)),
        Entry("hit ratio, since start", fmt.percent(view.hit_ratio)),
        Entry("evictions", fmt.count(counters.evictions), fmt.rate(per_second(view.history, "evictions"))),
    )
    tiers = tuple(
        Section(name, _tier(tier, snapshot.block_bytes))
        for name, tier in (("Device", view.device), ("Host", view.host))
        if tier is not None
    )
    return (Section("Engine", engine), *tiers, Section("Prefix cache", cache))


def _tier(tier: TierView | None, block_bytes: int) -> tuple[Entry, ...]:
    if tier is None:
        return (Entry("none", "there is no such tier"),)
    n = tier.numbers
    size = fmt.size(n.total * block_bytes) if block_bytes else fmt.UNKNOWN
    return (
        Entry("blocks", fmt.count(n.total), size),
        Entry("used", fmt.percent(n.usage_ratio), f"{fmt.count(n.active + n.reserved)} held", share=n.usage_ratio),
        Entry("cached", fmt.count(n.cached), "evictable", share=ratio(n.cached, n.total)),
        Entry("free", fmt.count(n.free), share=ratio(n.free, n.total)),
        Entry("shared", fmt.count(n.shared)),
        Entry("pinned", fmt.count(n.pinned)),
        Entry("copying", fmt.count(n.fenced)),
        Entry("external fragmentation", fmt.percent(n.external_ratio)),
        Entry("internal fragmentation", fmt.percent(n.internal_ratio)),
    )


def tiers(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return both tiers and the copies between and within them."""
    snapshot = view.snapshot
    if snapshot is None or view.device is None:
        return nothing(view)
    counters, history, copies = snapshot.counters, view.history, snapshot.copies
    out, back = per_second(history, "swap_out_bytes"), per_second(history, "swap_in_bytes")
    moved = per_second(history, "moved_bytes")
    totals = (
        Entry("out to the host", fmt.count(counters.swap_out_blocks), _bytes(counters.swap_out_bytes, out)),
        Entry("in to the device", fmt.count(counters.swap_in_blocks), _bytes(counters.swap_in_bytes, back)),
        Entry(
            "moved within", fmt.count(counters.compaction_moved_blocks), _bytes(counters.compaction_moved_bytes, moved)
        ),
        Entry("copied on write", fmt.count(counters.copy_on_write_blocks)),
    )
    if copies is None:
        queue: tuple[Entry, ...] = (Entry("queue", fmt.UNKNOWN, "not offered by this engine"),)
    else:
        busy = per_second(history, "copy_busy_s")
        queue = (
            Entry(
                "in flight",
                f"{copies.in_flight} of {copies.capacity}",
                f"{fmt.count(copies.pending_blocks)} blocks come free with them",
                share=ratio(copies.in_flight, copies.capacity),
            ),
            Entry("done", fmt.count(copies.submitted - copies.in_flight)),
            Entry("no slot free", fmt.count(copies.refused), alarm=copies.refused > 0),
            Entry("late", fmt.seconds(copies.late_s), alarm=bool(copies.late_s)),
            Entry("time copying", fmt.seconds(copies.busy_s), "real", share=None if busy is None else min(1.0, busy)),
            Entry("waited for copies", fmt.seconds(copies.wait_s), "real"),
            Entry("bandwidth while copying", _rate(copied_bytes(view), copies.busy_s), "real, all copies"),
            Entry("bandwidth assumed", f"{copies.model_gb_per_s:g} GB/s", "in virtual time"),
        )
    host = Section("Host", _tier(view.host, snapshot.block_bytes))
    return (
        Section("Device", _tier(view.device, snapshot.block_bytes)),
        host,
        Section("Copied so far", totals),
        Section("Copies", queue),
    )


def copied_bytes(view: View) -> int | None:
    """Return the bytes that swaps and moves have copied; ``None`` where they are not known."""
    assert view.snapshot is not None
    counters = view.snapshot.counters
    return plus(counters.swap_out_bytes, counters.swap_in_bytes, counters.compaction_moved_bytes)


def _bytes(total: int, per_s: float | None) -> str:
    return f"{fmt.size(total)}, {fmt.size(per_s)}/s" if per_s is not None else fmt.size(total)


def _rate(num_bytes: int | None, seconds: float) -> str:
    return f"{fmt.size(num_bytes / seconds)}/s" if seconds and num_bytes else fmt.UNKNOWN


def locks(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return what is known of locks and threads; ``—`` where the engine does not tell."""
    snapshot = view.snapshot
    if snapshot is None:
        return nothing(view)
    counters = snapshot.counters
    rows: list[Entry] = []
    for lock in snapshot.locks or ():
        share = ratio(lock.contended, lock.acquisitions)
        waits = f"{fmt.seconds(lock.wait_s)} in all, longest {fmt.seconds(lock.longest_wait_s)}"
        note = f"{fmt.count(lock.contended)} waited, {waits}"
        rows.append(Entry(f"{lock.layer} lock", f"{fmt.count(lock.acquisitions)} taken", note, share))
    copies = snapshot.copies
    return (
        Section("Locks", tuple(rows) or (Entry("locks", fmt.UNKNOWN, "not offered by this engine"),), wide=True),
        Section(
            "Lookups and threads",
            (
                Entry(
                    "reserved by threads", fmt.count(view.device.numbers.reserved if view.device else None), "blocks"
                ),
                Entry("optimistic lookups tried again", fmt.count(counters.optimistic_retries)),
                Entry("executor", copies.mode if copies else fmt.UNKNOWN),
                Entry("executor's queue", fmt.count(copies.in_flight) if copies else fmt.UNKNOWN),
                Entry("engine waited for copies", fmt.seconds(copies.wait_s) if copies else fmt.UNKNOWN),
            ),
        ),
    )
