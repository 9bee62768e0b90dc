"""The panels on one sequence, on one block, and on the numbers over time."""

from __future__ import annotations

import numpy as np

from allocator.metrics import run_starts
from kvtop.model import format as fmt
from kvtop.model.history import History, hit_ratios, rates
from kvtop.model.view import View, is_attached
from kvtop.panels.content import Asked, Entry, Section, nothing

#: Runs of a block table that are listed.
MAX_RUNS = 2000
#: Sequences of one kind that share blocks with it, at most.
MAX_KIN = 12


def details(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return one sequence: its row, and its block table from logical to physical, one line a run."""
    snapshot = view.snapshot
    if snapshot is None:
        return nothing(view)
    if asked.selected is None:
        return (Section("Sequence", (Entry("none selected", "Enter on a row, or on a held block, selects"),)),)
    row = next((s for s in snapshot.sequences if s.seq_id == asked.selected), None)
    if row is None:
        return (Section("Sequence", (Entry(f"sequence {asked.selected}", "not in the list"),)),)
    target = fmt.UNKNOWN if is_attached(row) else fmt.count(row.num_target)
    entries = (
        Entry("sequence", str(row.seq_id), row.label),
        Entry("status", row.status, row.reason, alarm=bool(row.reason)),
        Entry("tokens", fmt.count(row.num_tokens), f"of {target}, {fmt.count(row.num_prompt)} of them the prompt"),
        Entry("blocks", fmt.count(row.num_blocks), f"{fmt.count(row.shared_blocks)} shared"),
        Entry("hits at admission", fmt.blocks(row.hit_blocks)),
        Entry("arrived", f"step {fmt.count(row.arrived_step)}"),
        Entry("runs", fmt.count(row.runs) if row.runs else fmt.UNKNOWN, "consecutive ids in its table"),
    )
    return (
        Section("Sequence", entries),
        Section("Shares its first blocks", _kinship(view, row.seq_id)),
        Section("Block table: logical → physical", _table(view)),
    )


def _kinship(view: View, seq_id: int) -> tuple[Entry, ...]:
    """Return with whom a sequence shares its first blocks: the older one it hangs on, and those that hang on it."""
    if view.lineage is None:
        return (Entry("with", fmt.UNKNOWN, "not asked for yet, or not offered by this engine"),)
    mine = next((kin for kin in view.lineage if kin.seq_id == seq_id), None)
    entries = []
    if mine is not None:
        entries.append(Entry(f"with {mine.parent}", fmt.blocks(mine.blocks), "which is older"))
        brothers = [k for k in view.lineage if k.parent == mine.parent and k.seq_id != seq_id]
        for kin in brothers[:MAX_KIN]:
            entries.append(
                Entry(f"with {kin.seq_id}", fmt.blocks(min(kin.blocks, mine.blocks)), f"of {mine.parent} too")
            )
    children = [kin for kin in view.lineage if kin.parent == seq_id]
    entries += [Entry(f"with {kin.seq_id}", fmt.blocks(kin.blocks), "which is younger") for kin in children[:MAX_KIN]]
    more = max(0, len(children) - MAX_KIN)
    if more:
        entries.append(Entry("…", f"{fmt.count(more)} more"))
    return tuple(entries) or (Entry("with nobody", ""),)


def _table(view: View) -> tuple[Entry, ...]:
    table, snapshot, device = view.focus_table, view.snapshot, view.device
    if table is None or snapshot is None:
        return (Entry("table", fmt.UNKNOWN, "it holds no device blocks, or they were not asked for yet"),)
    starts = np.flatnonzero(run_starts(table, max(1, snapshot.slab_size)))
    stops = np.append(starts[1:], len(table))
    entries = []
    for start, stop in list(zip(starts.tolist(), stops.tolist(), strict=True))[:MAX_RUNS]:
        first, last = int(table[start]), int(table[stop - 1])
        note = fmt.blocks(stop - start)
        if device is not None and last < device.arrays.num_blocks:
            refs = device.arrays.ref_count[table[start:stop]]
            shared = int(np.count_nonzero(refs >= 2))
            note += f", {fmt.count(shared)} shared by up to {int(refs.max())}" if shared else ""
        entries.append(Entry(_span(start, stop - 1), f"→ {_span(first, last)}", note))
    if len(starts) > MAX_RUNS:
        entries.append(Entry("…", f"{fmt.count(len(starts) - MAX_RUNS)} more runs"))
    return tuple(entries)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def history(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return the main numbers over time, ``asked.back`` points back."""
    past = view.history
    times = past.get("at_s")
    end = max(0, len(times) - asked.back)
    entries = tuple(
        Entry(label, _last(values[:end], kind), series=tuple(values[:end]), top=1.0 if kind == "ratio" else None)
        for label, kind, values in numbers(past)
    )
    known = [t for t in times[:end] if t is not None]
    if asked.back and known and times[-1] is not None:
        words = f"up to {fmt.seconds(times[-1] - known[-1])} ago"
    else:
        words = "up to now"
    half = -(-len(entries) // 2)
    return (
        Section(f"One point a second, {words}", entries[:half]),
        Section("Kept for an hour", entries[half:]),
    )


def numbers(past: History) -> list[tuple[str, str, tuple[float | None, ...]]]:
    """Return every number that is kept over time: label, ``ratio``, ``count`` or ``rate``, and its values."""
    plain = [(label, "ratio", past.get(name)) for label, name in _RATIOS]
    hits = ("hit ratio", "ratio", (None, *hit_ratios(past)))
    counts = [(label, "count", past.get(name)) for label, name in _COUNTS]
    per_s = [(label, "rate", tuple(rates(past, name))) for label, name in _RATES]
    every = [*plain, hits, *counts, *per_s]
    # What this engine never tells would be a line of nothing each.
    told = [entry for entry in every if any(value is not None for value in entry[2])]
    return told if len(past.get("at_s")) > 1 else every


_RATIOS = (
    ("used", "usage"),
    ("cached", "cached"),
    ("external fragmentation", "external"),
    ("internal fragmentation", "internal"),
    ("host used", "host_usage"),
)
_COUNTS = (
    ("running", "running"),
    ("waiting", "waiting"),
    ("swapped out", "swapped"),
    ("shared blocks", "shared"),
    ("pinned blocks", "pinned"),
    ("blocks being copied", "copying"),
    ("allocatable blocks", "allocatable"),
    ("longest run", "longest_run"),
    ("copies in flight", "copies_in_flight"),
    ("steps a second", "steps_per_s"),
)
_RATES = (
    ("requests come", "submitted"),
    ("requests finished", "finished"),
    ("prompt tokens", "prompt_tokens"),
    ("tokens", "generated_tokens"),
    ("blocks given out", "allocated_blocks"),
    ("copied on write", "copy_on_write_blocks"),
    ("failed for want of room", "failures_capacity"),
    ("failed for want of a run", "failures_contiguous"),
    ("evictions", "evictions"),
    ("preemptions", "preemptions"),
    ("bytes swapped out", "swap_out_bytes"),
    ("bytes swapped in", "swap_in_bytes"),
    ("bytes moved within", "moved_bytes"),
    ("waits for locks", "lock_waits"),
)


def _last(values: tuple[float | None, ...], kind: str) -> str:
    value = values[-1] if values else None
    if kind == "ratio":
        return fmt.percent(value)
    return fmt.rate(value) if kind == "rate" else fmt.short(value)


def block(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return what happened to the block under the cursor while somebody looked, the newest first."""
    if view.snapshot is None or asked.block is None:
        return nothing(view)
    tier, block_id = asked.block
    entries = tuple(Entry(f"step {fmt.count(h.step)}", h.what, h.detail) for h in reversed(asked.happenings))
    title = f"What happened to {tier} block {fmt.count(block_id)} since it was looked at"
    return (Section(title, entries or (Entry("nothing", "", "there is no such block"),), wide=True),)
