"""What each command would do, and does, to an engine between two steps. The engine's side of the door."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, assert_never

import numpy as np

from allocator.commands import (
    MAX_TEXT,
    Abort,
    Annotate,
    Cancel,
    Command,
    Compact,
    EvictCached,
    Fork,
    InjectFault,
    Pause,
    Pin,
    Preempt,
    Resize,
    Resume,
    SetAutoCompaction,
    SetLoad,
    SetPolicy,
    SetSpeed,
    SetWatermark,
    Step,
    SubmitLoad,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
    command_name,
)
from allocator.config import MAX_BLOCKS, MAX_LOAD_SCALE, MIN_LOAD_SCALE, check_ratio
from allocator.errors import (
    Cancelled,
    InvariantViolation,
    OutOfBlocks,
    Refused,
    RequestError,
    StorageError,
    UnknownSequence,
)
from allocator.facts import FREE, HOLDERS_MASK
from allocator.ids import IdArray, Status
from allocator.manager import require_host
from allocator.metrics import external_ratio, run_lengths
from allocator.plans import Effect, MovePlan, Outcome, Plan
from allocator.sequence import Sequence
from allocator.work import CANCELLED, Work, slice_blocks, slices_of

if TYPE_CHECKING:
    from allocator.engine import Engine

MAX_SUBMITTED = 10_000
#: Commands that can be done while copies are under way, and that leave every block as it is.
_TOUCHES_NO_BLOCK = (SubmitLoad, SetPolicy, SetWatermark, SetAutoCompaction, Annotate)
_RUNNERS = "pacing, and ending what is in progress, belong to the runner, not the engine"


def plan(engine: Engine, command: Command) -> Plan:
    """Return what ``command`` would do; a refusal is a plan with its reason."""
    try:
        return _plan_alone(engine, command)
    except RequestError as error:
        return Plan(summary=command_name(command), refusal=str(error))


def begin(engine: Engine, command: Command) -> Work:
    """Return ``command`` as work to be done slice by slice; nothing is done before the first ``advance``.

    A refusal is an outcome that says why, and then nothing changed. A copy that fails, or an operator's ``Abort``, ends
    a command between two of its slices: what was moved stays moved, and every law holds.
    """

    def carry_out(work: Work) -> Generator[None, None, Outcome]:
        outcome = yield from _carry_out(engine, command, work)
        engine.faults.tell_copies(engine)
        return outcome

    return Work(command_name(command), carry_out)


def _carry_out(engine: Engine, command: Command, work: Work) -> Generator[None, None, Outcome]:
    started, name = time.perf_counter(), command_name(command)
    try:
        intended = _plan_alone(engine, command)
        if len(engine.copies) and not isinstance(command, _TOUCHES_NO_BLOCK):
            # What can be done at all finds no copy under way, and leaves none.
            engine.settle()
            intended = _plan_alone(engine, command)
        if intended.refusal:
            raise Refused(intended.refusal)
        work.total_blocks = intended.moved_blocks
        message = yield from _in_slices(engine, command, work)
        engine.settle()
        if not isinstance(command, (*_TOUCHES_NO_BLOCK, SetLoad, VerifyContents)):
            engine.measures.disturb()
    except (RequestError, StorageError, InvariantViolation) as error:
        engine.emit("command", f"{name} {error}" if isinstance(error, Cancelled) else f"{name} refused: {error}")
        moved = 0 if isinstance(command, SwapOut | SwapIn) else work.done_blocks
        if moved:
            engine.measures.disturb()
        moved_bytes = moved * engine.manager.storage.block_bytes
        return Outcome(False, str(error), moved, moved_bytes, time.perf_counter() - started)
    engine.emit("command", message)
    return Outcome(True, message, intended.moved_blocks, intended.moved_bytes, time.perf_counter() - started)


def _in_slices(engine: Engine, command: Command, work: Work) -> Generator[None, None, str]:
    """Do a command; one that may take long yields between its slices. Return what was done in words."""
    manager = engine.manager
    size = slice_blocks(manager.storage.block_bytes)
    match command:
        case Compact(goal, run_blocks, max_moves):
            moves = yield from engine.compactor.run_now(
                lambda: manager.plan_compaction(goal, run_blocks, max_moves), command, work, size
            )
            left = f", {moves.left} moves left by the budget" if moves.left else ""
            return f"compacted, {goal}: {_count(moves.moved_blocks, 'block')} moved{left}"
        case Resize(num_blocks):
            # All but the last slice are moves like any others; the rest is planned anew with the shrink itself.
            for piece in slices_of(manager.plan_resize(num_blocks), size)[:-1]:
                manager.move(MovePlan((piece,)))
                work.done_blocks += len(piece.sources)
                work.settled_blocks = work.done_blocks
                yield
                work.check(f"the pool keeps its {manager.device.num_blocks:,} blocks")
            return engine.resize(num_blocks, moved_before=work.done_blocks)
        case SwapOut(seq_id):
            sequence = _find(engine, seq_id)
            if engine.swaps.begin_out(sequence):
                yield from engine.copies.watch(work)
                if engine.swaps.end_out(sequence):
                    return f"sequence {seq_id} swapped out"
                if work.is_cancelled:
                    raise Cancelled(f"{CANCELLED}: sequence {seq_id} stays on the device")
            raise Refused("the copy failed; see the events")
        case SwapIn(seq_id):
            sequence = _find(engine, seq_id)
            engine.settle()
            engine.swaps.begin_in(sequence)
            yield from engine.copies.watch(work)
            if engine.swaps.end_in(sequence):
                return f"sequence {seq_id} swapped in"
            if work.is_cancelled:
                raise Cancelled(f"{CANCELLED}: sequence {seq_id} stays on the host")
            raise Refused("the copy failed; see the events")
    return _apply(engine, command)


def _plan_alone(engine: Engine, command: Command) -> Plan:
    with engine.manager.lock:  # one view of the blocks, whatever attached programs do meanwhile
        return _plan(engine, command)


def _plan(engine: Engine, command: Command) -> Plan:
    manager = engine.manager
    device, host = manager.device, manager.host
    block_bytes = manager.storage.block_bytes
    match command:
        case Pause() | Resume() | Step() | SetSpeed() | Abort():
            return Plan(summary=command_name(command), refusal=_RUNNERS)
        case SubmitLoad(prompt_tokens, output_tokens, count):
            if engine.make_request is None:
                raise Refused("this engine has no synthetic workload")
            if prompt_tokens < 1 or output_tokens < 0 or not 1 <= count <= MAX_SUBMITTED:
                raise Refused(f"prompt from 1, output from 0, count from 1 to {MAX_SUBMITTED}")
            needed = manager.blocks_for(prompt_tokens + output_tokens)
            if needed > device.num_blocks:
                raise OutOfBlocks(needed, device.num_blocks)
            return Plan(summary=f"submit {_count(count, 'request')} of up to {needed} blocks each")
        case SetLoad(rate_scale, size_scale):
            if engine.load is None:
                raise Refused("this engine has no synthetic workload")
            if rate_scale is None and size_scale is None:
                raise Refused("a rate or a size, or both")
            rate = _load_scale("rate", rate_scale, engine.load.rate_scale)
            size = _load_scale("size", size_scale, engine.load.size_scale)
            return Plan(
                summary=f"load: {rate:g} times the rate, {size:g} times the size",
                effects=(
                    Effect("arrival rate ratio", engine.load.rate_scale, rate),
                    Effect("request size ratio", engine.load.size_scale, size),
                ),
            )
        case Cancel(seq_id):
            attached = engine.clients.by_id.get(seq_id)
            if attached is not None:
                blocks = int(manager.tables.num_blocks[attached.row])
                whose = f" of {attached.session.label}"
            else:
                blocks, whose = _num_blocks(engine, _find(engine, seq_id)), ""
            shared = _num_kept(engine, seq_id)
            kept = f", {shared} of them stay with others" if shared else ""
            return Plan(summary=f"cancel sequence {seq_id}{whose}: {blocks} blocks released{kept}", sequences=(seq_id,))
        case Fork(seq_id):
            table, sequence = _running_table(engine, seq_id), _find(engine, seq_id)
            if sequence.contiguous:
                raise Refused(f"sequence {seq_id} is contiguous: its blocks are one run of its own")
            is_full = engine.manager.tables.num_tokens[sequence.row] == len(table) * engine.config.block_size
            return Plan(
                summary=f"fork sequence {seq_id}: {len(table)} blocks shared"
                + ("" if is_full else ", the last copied when written"),
                sequences=(seq_id,),
                effects=(Effect("shared blocks", _num_shared(engine), _num_shared(engine) + _num_sole(engine, table)),),
            )
        case Preempt(seq_id, mode):
            table = _running_table(engine, seq_id)
            swap = mode == "swap"
            if swap:
                require_host(manager, len(table))
            return Plan(
                summary=f"preempt sequence {seq_id} by {mode}: {len(table)} blocks",
                moved_blocks=len(table) if swap else 0,
                moved_bytes=len(table) * block_bytes if swap else 0,
                sequences=(seq_id,),
                effects=(_allocatable_after(engine, _num_freed(engine, table)),),
            )
        case SwapOut(seq_id):
            table = _running_table(engine, seq_id)
            require_host(manager, len(table))
            return Plan(
                summary=f"swap out sequence {seq_id}: {len(table)} blocks to the host tier",
                moved_blocks=len(table),
                moved_bytes=len(table) * block_bytes,
                sequences=(seq_id,),
                effects=(
                    _allocatable_after(engine, _num_freed(engine, table)),
                    Effect("host blocks free", host.num_free, host.num_free - len(table)),
                ),
            )
        case SwapIn(seq_id):
            sequence = _find(engine, seq_id)
            if sequence.transfer is not None:
                raise Refused(f"sequence {seq_id} is being copied")
            if sequence.host_row is None:
                raise Refused(f"sequence {seq_id} is {sequence.status.name.lower()}, not swapped")
            blocks = int(manager.host_tables.num_blocks[sequence.host_row])
            copied, taken = manager.plan_swap_in(sequence.host_row, sequence.keys, tokens=sequence.tokens)
            if taken > device.num_allocatable:
                raise OutOfBlocks(taken, device.num_allocatable)
            return Plan(
                summary=f"swap in sequence {seq_id}: {copied} of its {blocks} blocks copied, the rest is there",
                moved_blocks=copied,
                moved_bytes=copied * block_bytes,
                sequences=(seq_id,),
                effects=(
                    _allocatable_after(engine, -taken),
                    Effect("host blocks free", host.num_free, host.num_free + blocks),
                ),
            )
        case Compact(goal, run_blocks, max_moves):
            if engine.compact == "off":
                raise Refused("compaction is off; set it to manual or auto first")
            if max_moves is not None and max_moves < 1:
                raise Refused("the budget is at least 1 block")
            if run_blocks is not None and run_blocks < 1:
                raise Refused("the run is at least 1 block")
            moves = manager.plan_compaction(goal, run_blocks, max_moves)
            return _move_plan(engine, f"compact, {goal}", moves, device.num_blocks)
        case Resize(num_blocks):
            if not 1 <= num_blocks <= MAX_BLOCKS:
                raise Refused(f"a pool has from 1 to {MAX_BLOCKS} blocks")
            if num_blocks == device.num_blocks:
                raise Refused(f"the pool has {num_blocks} blocks already")
            verb = "grow" if num_blocks > device.num_blocks else "shrink"
            moves = manager.plan_resize(num_blocks)
            return _move_plan(engine, f"{verb} from {device.num_blocks} to {num_blocks} blocks", moves, num_blocks)
        case EvictCached(num_blocks):
            if num_blocks is not None and num_blocks < 1:
                raise Refused("at least 1 block")
            evictable = len(device.eviction_order())
            n = evictable if num_blocks is None else min(num_blocks, evictable)
            return Plan(
                summary=f"evict all cached blocks ({n:,})"
                if num_blocks is None
                else f"evict {_count(n, 'cached block')}",
                evicted_blocks=n,
                effects=(
                    Effect("cached blocks", device.num_cached, device.num_cached - n),
                    Effect("free blocks", device.num_free, device.num_free + n),
                ),
            )
        case Pin(block_ids) | Unpin(block_ids):
            outside = [b for b in block_ids if not 0 <= b < device.num_blocks]
            if outside or not block_ids:
                raise Refused(f"blocks are numbered 0 to {device.num_blocks - 1}")
            return Plan(summary=f"{command_name(command)} {_count(len(block_ids), 'block')}")
        case SetPolicy(policy):
            first, then = engine.scheduler.next_waiting(), engine.scheduler.next_waiting(policy)
            goes = f", sequence {then.seq_id} goes next" if then is not None and then is not first else ""
            return Plan(summary=f"policy {policy}{goes}")
        case SetWatermark(ratio):
            check_ratio("watermark", ratio)
            return Plan(summary=f"watermark {ratio:g}", effects=(Effect("watermark", engine.watermark_ratio, ratio),))
        case SetAutoCompaction(mode, threshold_ratio):
            check_ratio("threshold", threshold_ratio)
            return Plan(summary=f"compaction {mode}, threshold {threshold_ratio:g}")
        case VerifyContents():
            what = "every law and every slot" if engine.compute is not None else "every law (contents need --stamp)"
            return Plan(summary=f"verify {what}")
        case InjectFault():
            return engine.faults.plan(engine, command)
        case Annotate(text):
            check_text(text)
            return Plan(summary=f"mark this step: {text}")
        case _:
            assert_never(command)


def _apply(engine: Engine, command: Command) -> str:
    manager = engine.manager
    match command:
        case Pause() | Resume() | Step() | SetSpeed() | Abort():
            raise Refused(_RUNNERS)
        case SubmitLoad(prompt_tokens, output_tokens, count):
            assert engine.make_request is not None
            for _ in range(count):
                request = engine.make_request(prompt_tokens, output_tokens, engine.counters.submitted)
                engine.submit(request)
            return f"{_count(count, 'request')} submitted"
        case SetLoad(rate_scale, size_scale):
            engine.arrivals.adjust(engine.time_s, rate_scale, size_scale)
            assert engine.load is not None
            return f"load set to {engine.load.rate_scale:g} times the rate, {engine.load.size_scale:g} times the size"
        case Cancel(seq_id):
            if seq_id in engine.clients.by_id:
                engine.clients.cancel(seq_id)
            else:
                engine.lifecycle.cancel(_find(engine, seq_id))
            return f"sequence {seq_id} cancelled"
        case Fork(seq_id):
            child = engine.lifecycle.fork(_find(engine, seq_id))
            return f"sequence {seq_id} forked as {child.seq_id}"
        case Preempt(seq_id, mode):
            return f"sequence {seq_id} preempted by {engine.swaps.preempt(_find(engine, seq_id), mode)}"
        case SwapOut() | SwapIn() | Compact() | Resize():
            raise AssertionError("done in slices")
        case EvictCached(num_blocks):
            with manager.lock:
                evicted = manager.device.evict(num_blocks)
            what = f"all cached blocks ({evicted:,})" if num_blocks is None else _count(evicted, "cached block")
            return f"{what} evicted"
        case Pin(block_ids):
            manager.pin(np.asarray(block_ids, np.int64))
            return f"{_count(len(block_ids), 'block')} pinned"
        case Unpin(block_ids):
            manager.unpin(np.asarray(block_ids, np.int64))
            return f"{_count(len(block_ids), 'block')} unpinned"
        case SetPolicy(policy):
            engine.scheduler.set_policy(policy)
            return f"policy set to {policy}"
        case SetWatermark(ratio):
            engine.watermark_ratio = ratio
            return f"watermark set to {ratio:g}"
        case SetAutoCompaction(mode, threshold_ratio):
            if mode != "auto":
                engine.compactor.stop_auto()
            engine.compact, engine.compact_threshold_ratio = mode, threshold_ratio
            return f"compaction set to {mode}, threshold {threshold_ratio:g}"
        case VerifyContents():
            engine.check()
            return "every law holds" + (" and every slot reads back" if engine.compute is not None else "")
        case InjectFault():
            return engine.faults.inject(engine, command)
        case Annotate(text):
            return f"marked: {text}"
        case _:
            assert_never(command)


def check_text(text: str) -> None:
    """Raise unless ``text`` can be an annotation.

    Raises:
        Refused: It is empty, too long, or holds what is no printable character.
    """
    if not text.strip() or len(text) > MAX_TEXT or not text.isprintable():
        raise Refused(f"a mark's text: 1 to {MAX_TEXT} printable characters")


def _load_scale(name: str, asked: float | None, now: float) -> float:
    """Return the factor after a ``SetLoad``.

    Raises:
        Refused: It is outside what is allowed.
    """
    if asked is None:
        return now
    if not MIN_LOAD_SCALE <= asked <= MAX_LOAD_SCALE:  # so is what is not a number
        raise Refused(f"{name} {asked:g}: a number from {MIN_LOAD_SCALE:g} to {MAX_LOAD_SCALE:g}")
    return asked


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _find(engine: Engine, seq_id: int) -> Sequence:
    sequence = engine.scheduler.find(seq_id)
    if sequence is None and seq_id in engine.clients.by_id:
        raise Refused(f"sequence {seq_id} is an attached program's: it can be cancelled, the rest is for its program")
    if sequence is None:
        raise UnknownSequence(seq_id)
    return sequence


def _running_table(engine: Engine, seq_id: int) -> IdArray:
    sequence = _find(engine, seq_id)
    if sequence.status is not Status.RUNNING or sequence.row is None:
        raise Refused(f"sequence {seq_id} is {sequence.status.name.lower()}, not running")
    return engine.manager.tables.table(sequence.row)


def _num_blocks(engine: Engine, sequence: Sequence) -> int:
    if sequence.row is not None:
        return int(engine.manager.tables.num_blocks[sequence.row])
    if sequence.host_row is not None:
        return int(engine.manager.host_tables.num_blocks[sequence.host_row])
    return 0


def _num_kept(engine: Engine, seq_id: int) -> int:
    """Return how many of a sequence's blocks on the device other sequences hold as well."""
    client = engine.clients.by_id.get(seq_id)
    row = _find(engine, seq_id).row if client is None else client.row
    return 0 if row is None else engine.manager.device.count_shared(engine.manager.tables.table(row))


def _num_shared(engine: Engine) -> int:
    pool = engine.manager.device
    return pool.count_shared(np.arange(pool.num_blocks))


def _num_sole(engine: Engine, table: IdArray) -> int:
    return len(table) - engine.manager.device.count_shared(table)


def _num_freed(engine: Engine, table: IdArray) -> int:
    """Return how many blocks of a table become allocatable when it is released: unshared and unpinned ones."""
    return _num_sole(engine, table[engine.manager.device.facts.flags[table] == 0])


def _allocatable_after(engine: Engine, change: int) -> Effect:
    now = engine.manager.device.num_allocatable
    return Effect("allocatable blocks", now, now + change)


def _move_plan(engine: Engine, summary: str, moves: MovePlan, num_blocks: int) -> Plan:
    """Return the plan of a compaction or resize, with the state it would leave computed from the moves themselves."""
    manager = engine.manager
    pool = manager.device
    state = np.full(num_blocks, FREE, np.uint8)
    flags = np.zeros(num_blocks, np.uint8)
    work, work_flags = pool.facts.state.copy(), pool.facts.flags
    touched: set[int] = set()
    rows, _, ids = manager.tables.entries()
    for stage in moves.stages:
        work[stage.evicted] = FREE
        work[stage.destinations] = work[stage.sources]
        work[stage.sources] = FREE
        remap = np.arange(pool.num_blocks)
        remap[stage.sources] = stage.destinations
        touched.update(rows[remap[ids] != ids].tolist())
        ids = remap[ids]
    common = min(num_blocks, pool.num_blocks)
    state[:common], flags[:common] = work[:common], work_flags[:common]
    own = [int(s.seq_id) for s in engine.scheduler.running if s.row in touched]
    attached = [s.seq_id for s in engine.clients.sequences() if s.row in touched]
    sequences = tuple(sorted(own + attached))
    return Plan(
        summary=f"{summary}: {_count(moves.moved_blocks, 'block')} moved"
        + (f", {moves.left} more left by the budget" if moves.left else ""),
        moved_blocks=moves.moved_blocks,
        moved_bytes=moves.moved_blocks * manager.storage.block_bytes,
        evicted_blocks=moves.evicted_blocks,
        sequences=sequences,
        effects=(
            Effect("pool blocks", pool.num_blocks, num_blocks),
            *_slab_effects(engine, num_blocks),
            *_fragmentation_effects(pool.facts.state, pool.facts.flags, state, flags, pool.slab_size),
        ),
    )


def _slab_effects(engine: Engine, num_blocks: int) -> tuple[Effect, ...]:
    """Return how a new pool size changes the slabs in memory: a slab that the end cuts keeps all of its memory."""
    manager = engine.manager
    slabs = manager.storage.num_slabs("device")
    if num_blocks == manager.device.num_blocks or slabs == 0:
        return ()
    return (Effect("slabs in memory", slabs, -(-num_blocks // manager.device.slab_size)),)


def _fragmentation_effects(
    state: np.ndarray, flags: np.ndarray, new_state: np.ndarray, new_flags: np.ndarray, slab_size: int
) -> tuple[Effect, Effect]:
    before = run_lengths(((state & HOLDERS_MASK) == 0) & (flags == 0), slab_size)
    after = run_lengths(((new_state & HOLDERS_MASK) == 0) & (new_flags == 0), slab_size)
    return (
        Effect("largest free run", int(before.max(initial=0)), int(after.max(initial=0))),
        Effect(
            "external fragmentation",
            external_ratio(int(before.max(initial=0)), int(before.sum())),
            external_ratio(int(after.max(initial=0)), int(after.sum())),
        ),
    )
