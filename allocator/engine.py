"""Engine: the loop. Each turn takes arrivals, schedules, executes, commits and counts steps.

A step is one decode iteration of virtual time. Steps in which nothing can happen, because no block
fills, nobody finishes and nobody arrives, are taken in one go and still counted. One thread owns an engine; commands
come in between turns, through ``plan`` and ``apply``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from allocator import control, engine_snapshot, invariants
from allocator.admission import Chunk, Round
from allocator.arrivals import Arrivals
from allocator.block_map import BlockArrays
from allocator.block_table import Listing
from allocator.clients import AttachedSequence, ClientRegistry
from allocator.commands import Command
from allocator.compactor import Compactor
from allocator.compute import Compute, Stamps
from allocator.config import STEP_S, EngineConfig
from allocator.content import AdjustableLoad, Request
from allocator.errors import InvariantViolation, Refused
from allocator.events import Event, EventKind, EventLog
from allocator.executor import Executor
from allocator.faults import FaultInjector
from allocator.faulty_storage import FaultyStorage
from allocator.geometry import find_geometry
from allocator.ids import IdArray, SeqId, Tier
from allocator.lifecycle import Lifecycle
from allocator.manager import BlockManager
from allocator.measures import Measures
from allocator.pipeline import Pipeline
from allocator.plans import Outcome, Plan
from allocator.room import Room
from allocator.scheduler import Scheduler
from allocator.sequence import Sequence
from allocator.skipping import idle_steps, quiet_steps, steps_to_change
from allocator.snapshot import Counters, Snapshot
from allocator.storage import NoStorage, Storage
from allocator.swaps import Swaps
from allocator.thrash import ThrashGuard
from allocator.timings import Stopwatch
from allocator.work import Work, slice_blocks
from allocator.workload_facts import Blocked

_NOTHING: Final = Counters()


class Engine:
    """The embedded engine.

    Args:
        config: Settings.
        requests: In order of arrival (in file order when serial); read as virtual time reaches them; may be endless.
        load: The same requests, where their rate and size can be changed while running; in place of ``requests``.
        source: Name shown to observers.
        workload: Name of what drives it.
        make_request: Makes a synthetic request from (prompt tokens, output tokens, nonce), for ``SubmitLoad``.
        storage: Where keys and values lie; by default torch tensors, or none for geometry ``none``.
        make_compute: Makes what fills the slots of a storage; by default stamps where the configuration asks for
            them, else nothing.

    Raises:
        ConfigError: A setting cannot be met here.
        StorageError: No memory for the pools.
    """

    def __init__(
        self,
        config: EngineConfig,
        requests: Iterable[Request] = (),
        *,
        source: str = "embedded",
        workload: str = "none",
        make_request: Callable[[int, int, int], Request] | None = None,
        storage: Storage | None = None,
        load: AdjustableLoad | None = None,
        make_compute: Callable[[BlockManager, Storage], Compute] | None = None,
    ) -> None:
        self.config = config
        self.arrivals = Arrivals(requests, load)
        self.source, self.workload = source, workload
        self.make_request = make_request
        storage = storage or _make_storage(config)
        faulty = FaultyStorage(storage, rates=dict(config.inject), seed=config.seed)
        self.manager = BlockManager(config, faulty)
        self.faults = FaultInjector(config, faulty)
        if make_compute is None and config.stamp:
            make_compute = Stamps
        self.compute = None if make_compute is None else make_compute(self.manager, storage)
        self.scheduler = Scheduler(config.policy)
        self.thrash = ThrashGuard(config.max_running)
        self.compactor = Compactor(self)
        executor = Executor(
            lambda job: self.manager.storage.copy(job),
            config.executor,
            part_blocks=slice_blocks(self.manager.storage.block_bytes),
        )
        self.copies = Pipeline(self.manager, executor, config.copy_gb_per_s * 1e9)
        self.step = 0
        self.stuck_reason: str | None = None
        self.watermark_ratio = config.watermark_ratio
        self.compact = config.compact
        self.compact_threshold_ratio = config.compact_threshold_ratio
        self.measures = Measures(config, self.manager)
        self._counters = counters = Counters()
        self.lifecycle = Lifecycle(self, counters)
        self.swaps = Swaps(self, counters)
        self.room = Room(self, counters)
        self.step_times = Stopwatch()
        self._events = EventLog()
        self._evictions_told = 0
        self.clients = ClientRegistry(self.manager, self.lifecycle.new_seq_id, self._client_keep)

    # -- time ----------------------------------------------------------------------------------------

    @property
    def time_s(self) -> float:
        """Virtual seconds since the start."""
        return self.step * STEP_S

    @property
    def done(self) -> bool:
        """Whether no request is left, none is unfinished, and no attached program holds a sequence."""
        if not self.arrivals.are_over or self.scheduler.running or self.scheduler.waiting:
            return False
        return self.clients.num_sequences == 0

    @property
    def load(self) -> AdjustableLoad | None:
        """What requests come from, where their rate and size can be changed."""
        return self.arrivals.load

    @property
    def late_s(self) -> float | None:
        """Real seconds for which nothing could go on since a copy has not come back; ``None`` otherwise. [s]"""
        return self.copies.late_s

    @property
    def is_waiting(self) -> bool:
        """Whether only attached programs can bring anything on: a step is no work, only time."""
        if self.scheduler.running or self.clients.num_sequences == 0:
            return False
        return self.stuck_reason is not None or (self.arrivals.are_over and not self.scheduler.waiting)

    @property
    def counters(self) -> Counters:
        """Totals up to this step."""
        counters, manager = self._counters, self.manager
        self._hear_clients()
        counters.evictions = manager.device.num_evicted
        counters.allocated_blocks = manager.device.num_allocated
        counters.freed_blocks = manager.device.num_freed
        counters.copy_on_write_blocks = manager.copy_on_write_blocks
        counters.optimistic_retries = manager.optimistic_retries
        counters.reservation_refills = manager.device.num_refills
        counters.key_collisions = manager.device.cache.num_collisions
        counters.injected = tuple(self.faults.struck.values())
        return counters

    def advance(self, max_steps: int) -> int:
        """Take at least one step and up to ``max_steps``; return how many.

        Returns:
            0 only when the run is done, or when nothing can get on; ``stuck_reason`` then says why.
        """
        taken = 0
        while taken < max_steps:
            started_s = time.perf_counter()
            steps = self._turn(min(max_steps - taken, self.faults.steps_until(self.step)))
            if steps:
                self.step_times.add((time.perf_counter() - started_s) / steps, steps)
            self.faults.after_turn(self)
            if steps == 0:
                break
            taken += steps
        return taken

    def _turn(self, budget: int) -> int:
        scheduler, manager = self.scheduler, self.manager
        self.stuck_reason = self.copies.commit_due(self.step)
        if self.stuck_reason:
            return 0
        self._take_arrivals()
        self.lifecycle.hang_up()
        manager.device.step = self.step
        if self.thrash.limit is not None and (text := self.thrash.pass_time(self.step)) is not None:
            self.emit("note", text)
        decoding, stops, short = self.room.make()
        chunks: list[Chunk] = []
        if scheduler.waiting or scheduler.prefilling:
            self.swaps.given_way.clear()
            # Who was just preempted need not come back in the same step.
            chunks = Round(self, self._counters, may_start=not short).give_out()
            if self.swaps.given_way:
                short = True
                stay = ~np.isin(decoding, self.swaps.given_way)
                decoding, stops = decoding[stay], stops[stay]
        self._tell_evictions()
        if not len(decoding) and not chunks:
            if not scheduler.running and not short:
                return self._idle(budget)
            steps = steps_to_change(self, budget) if len(self.copies) and not short else 1
            self.step += steps
            return steps
        self.stuck_reason = None
        self._counters.peak_active = max(self._counters.peak_active, manager.device.num_active)

        # After a preemption the queue has not been tried with the room that is left.
        steps = 1 if short or scheduler.prefilling else quiet_steps(self, decoding, stops, budget)
        self.measures.facts.turn(len(scheduler.running), None if short else self._blocked(), steps)
        if len(decoding):
            if self.compute is not None:
                self.compute.decode([scheduler.by_row[row] for row in decoding.tolist()], steps)
            manager.write(decoding, steps)
            self._counters.generated_tokens += steps * len(decoding)
        for chunk in chunks:
            self._compute(chunk)
        # What happens at the end of skipped steps happens in the last of them.
        self.step += steps - 1
        manager.device.step = self.step
        self._commit(decoding, stops)
        self.step += 1
        if self.compact == "auto" and self.step >= self.compactor.auto.next_look:
            self.compactor.look()
            self._tell_evictions()
        if self.compute is not None:
            with self._counting_faults():
                self.compute.settle(steps)
        return steps

    def _blocked(self) -> Blocked | None:
        """Return what the first in the queue, which has just been tried, waits for; ``None`` when not for blocks."""
        first = self.scheduler.next_waiting()
        kind = None if first is None else first.reason_kind
        return kind if kind == "watermark" or kind == "capacity" else None

    def _idle(self, budget: int) -> int:
        """Let time pass while nothing runs; return 0 when neither a copy nor a client can change that."""
        if len(self.copies):
            steps = steps_to_change(self, budget)
            self.step += steps
            return steps
        if self.scheduler.waiting:
            first = self.scheduler.next_waiting()
            self.stuck_reason = (
                f"sequence {first.seq_id} cannot start: {first.reason}"
                if first
                else "every waiting sequence is held by the operator"
            )
        if self.is_waiting:
            if self.stuck_reason is not None:
                self.stuck_reason += f"; attached programs hold {self.clients.num_blocks} blocks"
            self.step += 1
            return 1
        steps = idle_steps(self, budget)
        self.step += steps
        return steps

    # -- arrivals ------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        scheduler, arrivals = self.scheduler, self.arrivals
        if self.config.serial:
            while not scheduler.running and not scheduler.waiting and (request := arrivals.pop()) is not None:
                self.submit(request)
            return
        while (request := arrivals.pop_due(self.step)) is not None:
            self.submit(request)

    def submit(self, request: Request) -> SeqId | None:
        """Queue a request; return its sequence id, or ``None`` when it can never fit and is refused."""
        return self.lifecycle.submit(request)

    def _client_keep(self) -> int:
        """Return the blocks an attached program's new sequence must leave; none while it is alone."""
        if not self.scheduler.running and not self.clients.num_sequences:
            return 0
        return math.ceil(self.watermark_ratio * self.manager.device.num_blocks)

    def _hear_clients(self) -> None:
        """Record what attached programs have done since the last time."""
        if self.clients.news or self.clients.counts != _NOTHING:
            self.measures.disturb()
            for news in self.clients.drain(self._counters):
                self.emit(*news)

    # -- copies --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Commit every copy under way, due or not.

        Raises:
            Refused: One has not ended within the bound.
        """
        if (reason := self.copies.settle()) is not None:
            raise Refused(reason)

    def rest(self) -> None:
        """Commit copies under way while time stands still, if an attached program may be waiting for one of them."""
        if len(self.copies) and self.clients.num_sequences:
            self.copies.settle()

    def settle_for(self, sequence: Sequence) -> None:
        """Commit the copies under way if one of them uses this sequence's block table."""
        row = sequence.row
        if sequence.transfer is not None or (row is not None and self.manager.sequences.any_taken((row,))):
            self.settle()

    # -- execution and commit ------------------------------------------------------------------------

    def _compute(self, chunk: Chunk) -> None:
        """Compute the tokens of a chunk."""
        sequence, start, stop = chunk
        if sequence.resumed:
            self._counters.recomputed_tokens += max(0, min(stop, sequence.num_computed) - start)
        if self.compute is not None:
            self.compute.prefill(sequence, start, stop)
        if stop == sequence.num_target:
            self.lifecycle.finish(sequence)
        elif stop >= sequence.num_tokens:
            self.lifecycle.act(sequence)

    def _commit(self, rows: IdArray, stops: IdArray) -> None:
        """Publish the keys of blocks that filled, end the sequences that are complete, do what clients do now."""
        if not len(rows):
            return
        manager, size = self.manager, self.config.block_size
        tokens = manager.tables.num_tokens[rows]
        news = np.flatnonzero((tokens % size == 0) | (tokens >= stops))
        if not len(news):
            return
        by_row = self.scheduler.by_row
        for i in news.tolist():
            sequence, written = by_row[int(rows[i])], int(tokens[i])
            block = written // size
            if written % size == 0 and block <= len(sequence.keys):
                self.publish(sequence, block - 1, block)
            if written == sequence.num_target:
                self.lifecycle.finish(sequence)
            elif sequence.acts:
                self.lifecycle.act(sequence)

    def publish(self, sequence: Sequence, first: int, stop: int) -> None:
        """Let full blocks ``first`` to ``stop`` of a sequence be found by their content, as far as they have keys."""
        assert sequence.row is not None
        size, keys = self.config.block_size, sequence.keys[first:stop]
        tokens = None if sequence.tokens is None else sequence.tokens[first * size : (first + len(keys)) * size]
        self.manager.publish_keys(sequence.row, keys, first, tokens=tokens)

    # -- size -------------------------------------------------------------------------------------------

    def resize(self, num_blocks: int, *, moved_before: int = 0) -> str:
        """Grow or shrink the device pool; return what was done in words.

        Args:
            num_blocks: Its new size.
            moved_before: Blocks that were moved out of the way already.

        Raises:
            OutOfBlocks, Refused, StorageError: As in ``BlockManager.resize``; the pool keeps its size.
        """
        self.settle()
        before = self.manager.device.num_blocks
        plan = self.manager.resize(num_blocks)
        counters, change = self._counters, num_blocks - before
        if change > 0:
            counters.resizes_grow += 1
            counters.grown_blocks += change
        else:
            counters.resizes_shrink += 1
            counters.shrunk_blocks -= change
        verb = "grown" if change > 0 else "shrunk"
        text = f"pool {verb} from {before} to {num_blocks} blocks, {moved_before + plan.moved_blocks} moved"
        self.emit("resize", text, None, abs(change))
        return text

    # -- commands, checks, observers -----------------------------------------------------------------

    def plan(self, command: Command) -> Plan:
        """Return what a command would do at this step boundary; changes nothing."""
        return control.plan(self, command)

    def apply(self, command: Command) -> Outcome:
        """Do a command at this step boundary; a refusal is an outcome with its reason."""
        return self.begin(command).finish()

    def begin(self, command: Command) -> Work:
        """Return a command as work to be done slice by slice, with no step in between; ``apply`` does all of it."""
        return control.begin(self, command)

    def check(self) -> None:
        """Check every law, and all contents where something was computed.

        Raises:
            InvariantViolation: The first law found broken; it is counted too.
        """
        self._counters.integrity_checks += 1
        with self._counting_faults():
            invariants.check_manager(self.manager)
            if self.compute is not None:
                with self.manager.lock:
                    self.compute.check([*self.unfinished(), *self.clients.sequences()])

    @contextlib.contextmanager
    def _counting_faults(self) -> Iterator[None]:
        """Count and tell the law that is found broken in here, and let it be raised."""
        try:
            yield
        except InvariantViolation as violation:
            self._counters.integrity_faults += 1
            by_law = list(self._counters.faults_by_law)
            by_law[violation.law] += 1
            self._counters.faults_by_law = tuple(by_law)
            self.emit("fault", str(violation))
            raise

    def unfinished(self) -> list[Sequence]:
        """Return running sequences by arrival, then waiting ones in queue order."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def emit(self, kind: EventKind, text: str, seq_id: int | None = None, blocks: int = 0) -> None:
        """Record an event of this step."""
        self._events.add(self.step, kind, text, seq_id, blocks)

    def _tell_evictions(self) -> None:
        evicted = self.manager.device.num_evicted - self._evictions_told
        if evicted:
            self._evictions_told += evicted
            self.emit("evict", f"{evicted} cached block{'' if evicted == 1 else 's'} evicted", None, evicted)

    def events_from(self, number: int, newest: int | None = None) -> tuple[Event, ...]:
        """Return kept events from ``number`` on, oldest first; where ``newest`` is given, no more than so many."""
        return self._events.since(number, newest)

    def snapshot(
        self,
        *,
        phase: str,
        speed: float | None,
        steps_per_s: float | None,
        next_event: int = 0,
        max_events: int | None = None,
    ) -> Snapshot:
        """Return the state at this step boundary; see ``engine_snapshot.take``."""
        return engine_snapshot.take(
            self,
            phase=phase,
            speed=speed,
            steps_per_s=steps_per_s,
            next_event=next_event,
            max_events=max_events,
        )

    def pool_size(self, tier: Tier) -> int | None:
        """Return a tier's pool size; ``None`` when there is no such tier."""
        pool = self.manager.device if tier == "device" else self.manager.host
        return pool.num_blocks or None

    def arrays(self, tier: Tier, into: BlockArrays | None = None) -> BlockArrays | None:
        """Copy one tier's block arrays out, by default to new ones; ``None`` when there is no such tier."""
        return self.manager.arrays(tier, into)

    def table(self, seq_id: int) -> IdArray | None:
        """Return a sequence's device block table; ``None`` when it has none. [n]"""
        with self.manager.lock:
            sequence = self.scheduler.find(seq_id) or self.clients.by_id.get(seq_id)
            if sequence is None or sequence.row is None:
                return None
            return self.manager.tables.table(sequence.row).copy()

    def tables(self) -> Listing:
        """Return every device block table as it is at this moment. [rows], [entries]"""
        with self.manager.lock:
            return self.manager.tables.listing()

    def holders(self, block_id: int, limit: int = 64) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return up to ``limit`` (sequence id, position) pairs that name a device block, and how many there are."""
        with self.manager.lock:
            rows, position, ids = self.manager.tables.entries()
            at = np.flatnonzero(ids == block_id)
            by_row: dict[int, Sequence | AttachedSequence] = {
                **self.clients.by_row,
                **self.scheduler.by_row,
                **self.swaps.by_row,
            }
            pairs = [(int(by_row[int(rows[i])].seq_id), int(position[i])) for i in at[:limit].tolist()]
            return tuple(pairs), len(at)

    def next_victims(self, limit: int) -> tuple[int, ...]:
        """Return the cached device blocks that would be evicted next, the first ``limit`` of them."""
        with self.manager.lock:
            return tuple(self.manager.device.eviction_order(limit).tolist())

    def close(self) -> None:
        """End attached programs' sequences, let stuck copies go, end the thread that copies, give all storage back."""
        self.clients.close()
        self.faults.release()
        self.copies.close()
        self.manager.storage.close()


def _make_storage(config: EngineConfig) -> Storage:
    geometry = find_geometry(config.geometry)
    if geometry is None:
        return NoStorage()
    from allocator.torch_storage import TorchStorage  # torch takes seconds to load: only when tensors are wanted

    return TorchStorage(geometry, config.block_size, config.device, config.slab_size)
