"""reduce: (View, Observation) → View. Pure; the only maker of views."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from allocator.block_map import BlockArrays
from allocator.events import Event
from allocator.ids import Tier
from allocator.metrics import plus, ratio, tier_numbers
from allocator.snapshot import Snapshot
from kvtop.model.history import LIMIT, History
from kvtop.model.mirror import MirrorReading
from kvtop.model.observation import Observation, RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, RemoteFacts, total, total_known, usage_of
from kvtop.model.view import MirrorView, TierView, View

MAX_EVENTS: Final = 500
#: Seconds between two points of the history.
HISTORY_EVERY_S: Final = 1.0
#: Points over which the windowed hit ratio is taken: one minute.
_WINDOW_POINTS: Final = 60


def reduce(view: View, observation: Observation | RemoteObservation, now_s: float) -> View:
    """Return the view after one more observation.

    Args:
        view: What was known.
        observation: What was read.
        now_s: Monotonic time of the reading.
    """
    if isinstance(observation, RemoteObservation):
        return replace(_reduce_remote(view, observation.facts, now_s), mirror=_mirror(observation.mirror, view.mirror))
    snapshot = observation.snapshot
    device = _tier(observation.device, snapshot, view.device)
    host = _tier(observation.host, snapshot, view.host)
    counters = snapshot.counters
    history = view.history
    if _is_due(view.history, now_s):
        history = history.append(_point(snapshot, device, host, now_s))
    return replace(
        view,
        generation=view.generation + 1,
        snapshot=snapshot,
        device=device,
        host=host,
        focus_table=observation.focus_table,
        focus_block=observation.focus_block,
        next_victims=observation.next_victims,
        lineage=observation.lineage,
        events=(*view.events, *snapshot.events, *_new_notes(view, snapshot))[-MAX_EVENTS:],
        history=history,
        hit_ratio=ratio(counters.hit_blocks, counters.query_blocks),
        hit_ratio_window=_window_ratio(history),
        error=None,
        read_at_s=now_s,
        remote=None,
        mirror=None,
    )


def _point(snapshot: Snapshot, device: TierView | None, host: TierView | None, at_s: float) -> dict[str, float | None]:
    """Return one point of the history: what there is now, and totals, from which rates are made."""
    numbers, counters, copies = device.numbers if device else None, snapshot.counters, snapshot.copies
    pool: dict[str, float | None] = {}
    if numbers is not None:
        pool = {
            "usage": numbers.usage_ratio,
            "cached": ratio(numbers.cached, numbers.total),
            "external": numbers.external_ratio,
            "internal": numbers.internal_ratio,
            "shared": numbers.shared,
            "pinned": numbers.pinned,
            "copying": numbers.fenced,
            "allocatable": numbers.allocatable,
            "longest_run": numbers.largest_free_run,
        }
    return {
        "at_s": at_s,
        **pool,
        "host_usage": host.numbers.usage_ratio if host else None,
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "swapped": snapshot.num_swapped,
        "steps_per_s": snapshot.steps_per_s,
        "hit_blocks": counters.hit_blocks,
        "query_blocks": counters.query_blocks,
        "evictions": counters.evictions,
        "preemptions": plus(counters.preemptions_swap, counters.preemptions_recompute),
        "submitted": counters.submitted,
        "finished": counters.finished,
        "prompt_tokens": counters.prompt_tokens,
        "generated_tokens": counters.generated_tokens,
        "allocated_blocks": counters.allocated_blocks,
        "copy_on_write_blocks": counters.copy_on_write_blocks,
        "failures_capacity": counters.failures_capacity,
        "failures_contiguous": counters.failures_contiguous,
        "swap_out_bytes": counters.swap_out_bytes,
        "swap_in_bytes": counters.swap_in_bytes,
        "moved_bytes": counters.compaction_moved_bytes,
        "copies_in_flight": copies.in_flight if copies else None,
        "copy_busy_s": copies.busy_s if copies else None,
        "lock_waits": sum(lock.contended for lock in snapshot.locks) if snapshot.locks is not None else None,
    }


def _reduce_remote(view: View, facts: RemoteFacts, now_s: float) -> View:
    rows = facts.rows
    hits, queries = total(row.hits for row in rows), total(row.queries for row in rows)
    before = view.remote
    if before is None or (before.kind, before.address) != (facts.kind, facts.address):
        view = replace(view, history=History())  # another server: its numbers do not go on from the last one's
        before = None
    history = view.history
    if facts.past and (before is None or before.past != facts.past):
        history = _with_past(history, facts, now_s)
    if _is_due(history, now_s):
        history = history.append(_remote_point(facts.kind, rows, now_s))
    told = [row.hit_ratio for row in rows]
    return replace(
        view,
        generation=view.generation + 1,
        remote=facts,
        snapshot=None,
        device=None,
        host=None,
        focus_table=None,
        focus_block=None,
        events=(),
        history=history,
        hit_ratio=told[0] if len(told) == 1 else None if hits is None else ratio(hits, queries or 0),
        hit_ratio_window=_window_ratio(history),
        error=None,
        read_at_s=now_s - facts.age_s,
    )


def _remote_point(kind: str, rows: tuple[EngineRow, ...], at_s: float) -> dict[str, float | None]:
    # Some of a fleet is always unknown; its totals, though, would jump with who is.
    gauge = total_known if kind == FLEET else total
    return {
        "at_s": at_s,
        "usage": usage_of(row for row in rows if row.usage_ratio is not None or kind != FLEET),
        "running": gauge(row.running for row in rows),
        "waiting": gauge(row.waiting for row in rows),
        "hit_blocks": total(row.hits for row in rows),
        "query_blocks": total(row.queries for row in rows),
        "evictions": total(row.evictions for row in rows),
        "preemptions": total(row.preemptions for row in rows),
        "generated_tokens": total(row.generated_tokens for row in rows),
    }


def _with_past(history: History, facts: RemoteFacts, now_s: float) -> History:
    """Return the history with what somebody else kept from before it in front."""
    read_s = now_s - facts.age_s
    times = history.get("at_s")
    whole = History()
    for past in facts.past:
        at_s = read_s - past.ago_s
        if not times or times[0] is None or at_s < times[0]:
            whole = whole.append(_remote_point(facts.kind, past.rows, at_s))
    for i in range(len(times)):
        whole = whole.append({name: series[i] for name, series in history.series.items()})
    return whole


def fail(view: View, reason: str) -> View:
    """Return the view after a failed reading: the last facts stay, marked with the reason."""
    return replace(view, error=reason)


def _tier(arrays: BlockArrays | None, snapshot: Snapshot, before: TierView | None) -> TierView | None:
    if arrays is None:
        return None
    if before is not None and before.arrays is arrays:  # frozen, so that its numbers still hold
        return before
    return TierView(arrays, tier_numbers(arrays, snapshot.block_size, snapshot.slab_size))


def _mirror(reading: MirrorReading | None, before: MirrorView | None) -> MirrorView | None:
    if reading is None:
        return None
    tiers: dict[Tier, TierView] = {}
    told: tuple[tuple[Tier, BlockArrays | None], ...] = (("device", reading.device), ("host", reading.host))
    for tier, arrays in told:
        known = before.tiers.get(tier) if before is not None else None
        if known is not None and known.arrays is arrays:
            tiers[tier] = known
        elif arrays is not None and arrays.num_blocks:
            tiers[tier] = TierView(arrays, tier_numbers(arrays, max(1, reading.block_size), arrays.num_blocks))
    return MirrorView(reading, tiers)


def _new_notes(view: View, snapshot: Snapshot) -> list[Event]:
    """Return the notes that the reading before did not have, as events, so that they stand in the list of those."""
    known = view.snapshot.notes if view.snapshot else ()
    latest = [*view.events[-1:], *snapshot.events[-1:]]
    number = latest[-1].number if latest else 0
    return [Event(number, snapshot.step, "note", note) for note in snapshot.notes if note not in known]


def _is_due(history: History, now_s: float) -> bool:
    times = history.get("at_s")
    return not times or times[-1] is None or now_s - times[-1] >= HISTORY_EVERY_S


def _window_ratio(history: History) -> float | None:
    window = min(_WINDOW_POINTS, LIMIT)
    hits, queries = history.get("hit_blocks")[-window:], history.get("query_blocks")[-window:]
    if len(hits) < 2 or None in (hits[0], hits[-1], queries[0], queries[-1]):
        return None
    return ratio(hits[-1] - hits[0], queries[-1] - queries[0])  # type: ignore[operator]
