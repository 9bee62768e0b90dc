"""What an engine tells of itself at a step boundary: its ``Snapshot``, made out of everything that it owns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from allocator.clients import AttachedSequence
from allocator.ids import Status
from allocator.locks import CountedLock, SequenceLocks
from allocator.sequence import Sequence
from allocator.snapshot import MAX_SEQUENCES, LockNumbers, SequenceRow, Snapshot
from allocator.timings import Timings

if TYPE_CHECKING:
    from allocator.engine import Engine

_STATUS_NAMES: Final = {status: status.name.lower() for status in Status}


def take(
    engine: Engine,
    *,
    phase: str,
    speed: float | None,
    steps_per_s: float | None,
    next_event: int = 0,
    max_events: int | None = None,
) -> Snapshot:
    """Return an engine's state at this step boundary.

    Args:
        engine: Between two steps, on its own thread.
        phase, speed, steps_per_s: The caller's to know.
        next_event: The first event wanted.
        max_events: How many of the newest are enough; ``None`` is all that are kept.
    """
    manager, config, scheduler = engine.manager, engine.config, engine.scheduler
    sequences, num_attached = _sequence_rows(engine, paused=phase == "paused")
    swapped = sum(1 for s in scheduler.waiting if s.status is Status.SWAPPED)
    return Snapshot(
        step=engine.step,
        time_s=engine.time_s,
        phase=phase,
        speed=speed,
        steps_per_s=steps_per_s,
        source=engine.source,
        workload=engine.workload,
        geometry=config.geometry,
        device=manager.storage.device_name,
        block_size=config.block_size,
        block_bytes=manager.storage.block_bytes,
        slab_size=config.slab_size,
        eviction=config.eviction,
        preempt=config.preempt,
        policy=scheduler.policy,
        compact=engine.compact,
        compact_threshold_ratio=engine.compact_threshold_ratio,
        watermark_ratio=engine.watermark_ratio,
        num_running=len(scheduler.running) + num_attached,
        num_waiting=len(scheduler.waiting) - swapped,
        num_swapped=swapped,
        counters=msgspec.structs.replace(engine.counters),
        sequences=sequences,
        events=engine.events_from(next_event, max_events),
        notes=_notes(engine),
        compactions=tuple(engine.compactor.records),
        running_limit=engine.thrash.limit,
        rate_scale=None if engine.load is None else engine.load.rate_scale,
        size_scale=None if engine.load is None else engine.load.size_scale,
        timings=_timings(engine),
        facts=engine.measures.facts.facts(_longest_wait(engine)),
        reuse=engine.measures.predictions(is_final=phase != "running"),
        verified=None if engine.compute is None else engine.compute.verified,
        copies=engine.copies.numbers(),
        locks=tuple(_lock_numbers(lock) for lock in (manager.sequences, manager.lock)),
    )


def _notes(engine: Engine) -> tuple[str, ...]:
    limit = engine.thrash.limit
    thrashing = None if limit is None else f"thrashing: at most {limit} of {engine.config.max_running} may run"
    return (*(note for note in (engine.stuck_reason, thrashing) if note), *engine.faults.notes())


def _timings(engine: Engine) -> Timings:
    manager = engine.manager
    with manager.lock:
        return Timings(
            engine.step_times.read(),
            tuple((kind, times.read()) for kind, times in manager.transfers.times.items()),
            tuple((lock.layer, lock.waits.read()) for lock in (manager.sequences, manager.lock)),
            ((manager.lock.layer, manager.lock.holds.read()),),
        )


def _longest_wait(engine: Engine) -> int:
    """Return the steps that the longest waiting sequence has waited, those that an operator holds left out."""
    return max((engine.step - s.waiting_since for s in engine.scheduler.waiting if not s.held), default=0)


def _sequence_rows(engine: Engine, *, paused: bool) -> tuple[tuple[SequenceRow, ...], int]:
    """Return the rows of all unfinished sequences, and how many attached programs hold."""
    with engine.manager.lock:
        attached: list[Sequence | AttachedSequence] = [*engine.clients.sequences()]
        running, waiting = engine.scheduler.running[:MAX_SEQUENCES], engine.scheduler.waiting[:MAX_SEQUENCES]
        everyone = [*running, *attached, *waiting]
        return _rows_of(engine, everyone[:MAX_SEQUENCES], paused=paused), len(attached)


def _rows_of(
    engine: Engine, sequences: Iterable[Sequence | AttachedSequence], *, paused: bool
) -> tuple[SequenceRow, ...]:
    manager = engine.manager
    reasons: dict[int, tuple[str, str]] = {
        sequence.seq_id: (kind, text)
        for sequence, kind, text in itertools.islice(engine.scheduler.reasons(paused=paused), MAX_SEQUENCES)
    }
    # As lists of Python's numbers: taken out of an array one by one, they would cost most of a snapshot.
    shared, runs = (numbers.tolist() for numbers in manager.row_numbers())
    tokens, blocks = manager.tables.num_tokens.tolist(), manager.tables.num_blocks.tolist()
    host_tokens, host_blocks = manager.host_tables.num_tokens.tolist(), manager.host_tables.num_blocks.tolist()
    rows = []
    for sequence in sequences:
        kind, text = reasons.get(sequence.seq_id, ("", sequence.reason))
        row, host_row = sequence.row, sequence.host_row
        if row is None and sequence.transfer is not None:
            row = sequence.transfer.row  # on its way in: its new blocks are there already
        num_tokens = num_blocks = 0
        if row is not None:
            num_tokens, num_blocks = tokens[row], blocks[row]
        elif host_row is not None:
            num_tokens, num_blocks = host_tokens[host_row], host_blocks[host_row]
        rows.append(
            SequenceRow(
                seq_id=sequence.seq_id,
                row=row,
                label=sequence.label,
                status=_STATUS_NAMES[sequence.status],
                reason=text,
                num_prompt=sequence.num_prompt,
                num_tokens=num_tokens,
                num_target=sequence.num_target,
                num_blocks=num_blocks,
                shared_blocks=0 if row is None else shared[row],
                hit_blocks=sequence.hit_blocks,
                runs=0 if row is None else runs[row],
                arrived_step=sequence.arrived_step,
                reason_kind=kind,
                priority=sequence.priority,
            )
        )
    return tuple(rows)


def _lock_numbers(lock: CountedLock | SequenceLocks) -> LockNumbers:
    return LockNumbers(lock.layer, lock.acquisitions, lock.contended, lock.wait_s, lock.longest_wait_s)
