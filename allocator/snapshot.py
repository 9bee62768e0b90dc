"""Snapshot: what the world looks like at a step boundary, arrays aside. Frozen; travels as MessagePack."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from allocator.commands import CompactGoal
from allocator.errors import NUM_LAWS
from allocator.events import Event
from allocator.fault_kinds import FAULT_KINDS
from allocator.plans import WorkProgress
from allocator.reuse import ReuseSummary
from allocator.timings import Timings
from allocator.workload_facts import WorkloadFacts

CompactionTrigger: TypeAlias = Literal["threshold", "contiguous", "manual"]


class Counters(msgspec.Struct):
    """Totals since the engine started; they only go up. The engine writes its own copy and publishes another.

    ``failures_contiguous`` counts the times a sequence began to wait for a run; ``contiguous_needed_blocks``,
    ``contiguous_longest_blocks`` and ``contiguous_allocatable_blocks`` are sums over these times: the run wanted, the
    longest there was, all that could be had. ``contiguous_waited_steps`` is the time from arrival to admission, summed
    over ``contiguous_admitted``.
    """

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
    compactions_contiguous: int = 0
    compaction_moved_blocks: int = 0
    compaction_moved_bytes: int = 0
    grown_blocks: int = 0
    shrunk_blocks: int = 0
    resizes_grow: int = 0
    resizes_shrink: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    recomputed_tokens: int = 0
    copy_on_write_blocks: int = 0
    optimistic_retries: int = 0
    reservation_refills: int = 0
    key_collisions: int = 0
    failures_capacity: int = 0
    failures_contiguous: int = 0
    contiguous_admitted: int = 0
    contiguous_waited_steps: int = 0
    contiguous_needed_blocks: int = 0
    contiguous_longest_blocks: int = 0
    contiguous_allocatable_blocks: int = 0
    integrity_checks: int = 0
    integrity_faults: int = 0
    faults_by_law: tuple[int, ...] = (0,) * (NUM_LAWS + 1)
    peak_active: int = 0
    #: Faults that struck on purpose, by kind, in the order of ``FAULT_KINDS``.
    injected: tuple[int, ...] = (0,) * len(FAULT_KINDS)


class CompactionRecord(msgspec.Struct, frozen=True):
    """One compaction from its first slice to its last.

    Attributes:
        trigger: What started it: fragmentation above the threshold, a contiguous request's need, or an operator.
        goal: What it aimed at.
        run_blocks: The run it was to free; ``None`` where the goal names none.
        started_step: Step after which its first slice moved.
        ended_step: Step after which it was over.
        planned_blocks: Moves planned when it started.
        moved_blocks: Blocks moved, by all slices.
        moved_bytes: Bytes read for that.
        evicted_blocks: Cached blocks lost to make room.
        seconds: Time the moves took.
        ratio_before: External fragmentation ratio before it.
        ratio_after: The same after it.
        ended_early: Why it ended before its moves did; ``None`` when it did not.
    """

    trigger: CompactionTrigger
    goal: CompactGoal
    run_blocks: int | None
    started_step: int
    ended_step: int
    planned_blocks: int
    moved_blocks: int
    moved_bytes: int
    evicted_blocks: int
    seconds: float
    ratio_before: float
    ratio_after: float
    ended_early: str | None = None


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
        hit_blocks: Blocks the prefix cache gave at admission; ``None`` where the engine does not tell.
        runs: Contiguity of its table; 0 without device blocks.
        arrived_step: When it was submitted.
        reason_kind: Kind of the reason, of a closed set: ``WaitReason``; empty when it does not wait.
        priority: Its class.
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
    hit_blocks: int | None
    runs: int
    arrived_step: int
    reason_kind: str = ""
    priority: int = 0


class Verified(msgspec.Struct, frozen=True):
    """What was computed from the pool and, beside it, from a contiguous cache.

    Attributes:
        steps: Engine steps in which every computed token was compared.
        tokens: Tokens compared.
        max_difference: Largest absolute difference of any of their logits; infinite where one was not a number.
    """

    steps: int
    tokens: int
    max_difference: float


class CopyNumbers(msgspec.Struct, frozen=True):
    """Copies of blocks, of all kinds. Seconds are real ones.

    Attributes:
        mode: ``thread`` or ``inline``.
        in_flight: Copies submitted and not yet committed.
        capacity: Copies that may be in flight at once.
        pending_blocks: Device blocks that come free with those in flight.
        submitted: Copies so far.
        refused: Times there was no slot.
        busy_s: Time spent copying. [s]
        wait_s: Time the engine waited for copies. [s]
        late_s: How long a copy that was due has been waited for; ``None`` when none is late. [s]
        model_gb_per_s: Speed of copies in virtual time. [GB/s]
    """

    mode: str
    in_flight: int
    capacity: int
    pending_blocks: int
    submitted: int
    refused: int
    busy_s: float
    wait_s: float
    late_s: float | None
    model_gb_per_s: float


class LockNumbers(msgspec.Struct, frozen=True):
    """One layer of locks.

    Attributes:
        layer: Its name.
        acquisitions: Times it was taken.
        contended: Of these, times somebody had to wait.
        wait_s, longest_wait_s: Time spent waiting, in all and at most. [s]
    """

    layer: str
    acquisitions: int
    contended: int
    wait_s: float
    longest_wait_s: float


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
        rate_scale, size_scale: Factors on the load's rate and size; ``None`` where it cannot be changed.
        facts: What advice needs besides the counters.
        reuse: Hits predicted at other pool sizes; ``None`` where they are not followed. While the engine runs they may
            be a hundredth of the queries behind.
        verified: What was verified; ``None`` when nothing is.
        copies: Copies of blocks; ``None`` where they are not known.
        locks: Layers of locks, outermost first; ``None`` where they are not known.
        notes: Things a user should know that are not events, such as a host tier below half the pool.
        compactions: The latest compactions, oldest first, at most ``MAX_COMPACTIONS``.
        running_limit: Sequences that may run at once on account of thrash; ``None`` is no such limit.
        timings: Real time spent; ``None`` where the engine does not tell.
        work: The command in progress that takes its time; ``None`` when there is none.
        unknown_counters: Names of the counters that the engine does not tell; see ``told``.
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
    compactions: tuple[CompactionRecord, ...] = ()
    running_limit: int | None = None
    rate_scale: float | None = None
    size_scale: float | None = None
    timings: Timings | None = None
    facts: WorkloadFacts = WorkloadFacts()
    reuse: ReuseSummary | None = None
    verified: Verified | None = None
    copies: CopyNumbers | None = None
    locks: tuple[LockNumbers, ...] | None = None
    work: WorkProgress | None = None
    unknown_counters: tuple[str, ...] = ()


def told(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose unknown counters are ``None``, not 0, to whoever reads them.

    Our own engine tells them all and may add to them, so that their type does not say this: whoever shows the counters
    of an engine that may be another's expects ``None``.
    """
    if not snapshot.unknown_counters:
        return snapshot
    unknown = dict.fromkeys(snapshot.unknown_counters)
    return msgspec.structs.replace(snapshot, counters=msgspec.structs.replace(snapshot.counters, **unknown))


#: Rows of the sequences table carried at most; the counts are always of all.
MAX_SEQUENCES = 1000
#: Compactions carried at most.
MAX_COMPACTIONS = 8
