"""Snapshot: what the world looks like at a step boundary, arrays aside. Frozen; travels as MessagePack."""

from __future__ import annotations

import msgspec

from allocator.errors import NUM_LAWS
from allocator.events import Event
from allocator.fault_kinds import FAULT_KINDS


class Counters(msgspec.Struct):
    """Totals since the engine started; they only go up. The engine writes its own copy and publishes another."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    allocated_blocks: int = 0
    freed_blocks: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    compactions_manual: int = 0
    compactions_threshold: int = 0
    compaction_moved_blocks: int = 0
    compaction_moved_bytes: int = 0
    grown_blocks: int = 0
    shrunk_blocks: int = 0
    resizes_grow: int = 0
    resizes_shrink: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    copy_on_write_blocks: int = 0
    optimistic_retries: int = 0
    key_collisions: int = 0
    failures_capacity: int = 0
    failures_contiguous: int = 0
    integrity_checks: int = 0
    integrity_faults: int = 0
    faults_by_law: tuple[int, ...] = (0,) * (NUM_LAWS + 1)
    peak_active: int = 0
    #: Faults that struck on purpose, by kind, in the order of ``FAULT_KINDS``.
    injected: tuple[int, ...] = (0,) * len(FAULT_KINDS)


class SequenceRow(msgspec.Struct, frozen=True):
    """One sequence as tables show it.

    Attributes:
        seq_id: Its id, unique in a run.
        row: Its row in the ``owner`` array; ``None`` while it holds no device blocks.
        label: Where it comes from.
        status: Lower-case status name.
        reason: Why it waits; empty when it does not.
        num_prompt: Prompt tokens.
        num_tokens: Tokens whose keys and values are written.
        num_target: Tokens at which it finishes; ``None`` for an attached program's, which nobody knows the end of.
        num_blocks: Blocks in its table, in either tier.
        shared_blocks: Of these, blocks with other holders too.
        hit_blocks: Blocks the prefix cache gave at admission.
        runs: Contiguity of its table; 0 without device blocks.
        arrived_step: When it was submitted.
    """

    seq_id: int
    row: int | None
    label: str
    status: str
    reason: str
    num_prompt: int
    num_tokens: int
    num_target: int | None
    num_blocks: int
    shared_blocks: int
    hit_blocks: int
    runs: int
    arrived_step: int


class Snapshot(msgspec.Struct, frozen=True):
    """The engine at a step boundary; block arrays travel beside it, through the block map.

    Attributes:
        step: Steps taken, skipped ones included.
        time_s: Virtual seconds.
        phase: ``running``, ``paused``, ``done``, ``idle`` (nothing to do until the next arrival), ``stuck: …`` or
            ``failed: …`` with the reason.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.
        steps_per_s: Steps a real second, over the last second or so; ``None`` before the first.
        source: Name of the engine.
        workload: What drives it.
        geometry, device, block_size, block_bytes: Its storage. ``block_bytes`` is 0 for bookkeeping only.
        slab_size: Blocks a slab.
        eviction, preempt, policy, compact, compact_threshold_ratio, watermark_ratio: Settings in force.
        num_running, num_waiting, num_swapped: Sequences by status.
        counters: Totals.
        sequences: Unfinished sequences, running first then in queue order, at most ``MAX_SEQUENCES``.
        events: The events the reader asked for, oldest first.
        notes: Things a user should know that are not events, such as a host tier below half the pool.
    """

    step: int
    time_s: float
    phase: str
    speed: float | None
    steps_per_s: float | None
    source: str
    workload: str
    geometry: str
    device: str
    block_size: int
    block_bytes: int
    slab_size: int
    eviction: str
    preempt: str
    policy: str
    compact: str
    compact_threshold_ratio: float
    watermark_ratio: float
    num_running: int
    num_waiting: int
    num_swapped: int
    counters: Counters
    sequences: tuple[SequenceRow, ...]
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()


#: Rows of the sequences table carried at most; the counts are always of all.
MAX_SEQUENCES = 1000
