"""Compactor: carries compactions out, an operator's and automatic ones, as copies under way; and records each.

``AutoCompaction`` decides; this looks, plans each slice, starts its copies, and tells it what became of them. Part of
the engine, which calls it between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, assert_never

from allocator.auto_compaction import LOOK_EVERY_STEPS, AutoCompaction, Fragmentation
from allocator.commands import Compact
from allocator.errors import CopyCancelled, Refused, RequestError, StorageError
from allocator.metrics import external_ratio, run_lengths
from allocator.plans import MovePlan
from allocator.snapshot import MAX_COMPACTIONS, CompactionRecord, CompactionTrigger
from allocator.work import Work, slices_of

if TYPE_CHECKING:
    from allocator.engine import Engine


class Moves:
    """A plan's stages under way, one after another.

    Attributes:
        stages: Those left.
        moved_blocks: Blocks moved so far.
        moved_bytes: Bytes read for that.
        seconds: Time the copies took.
        error: Why it ended before its last stage; ``None`` when it did not.
        work: The command that they are; ``None`` where no operator asked for them.
    """

    __slots__ = ("ended", "error", "moved_blocks", "moved_bytes", "seconds", "stages", "work")

    def __init__(self, plan: MovePlan, ended: Callable[[Moves], None], work: Work | None) -> None:
        self.work = work
        self.stages = deque(plan.stages)
        self.ended = ended
        self.moved_blocks = self.moved_bytes = 0
        self.seconds = 0.0
        self.error: StorageError | Refused | None = None


class Compactor:
    """The compactions of one engine.

    Args:
        engine: The engine.

    Attributes:
        auto: The policy.
        records: The latest compactions, oldest first.
        contiguous_wanted: Blocks that the contiguous request at the head of the queue last asked for.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.auto = AutoCompaction()
        self.records: deque[CompactionRecord] = deque(maxlen=MAX_COMPACTIONS)
        self.contiguous_wanted = 0
        self._moves: Moves | None = None

    def look(self) -> None:
        """Let the policy look, and start the slice that it asks for, unless one is under way."""
        engine, auto = self._engine, self.auto
        if self._moves is not None:
            auto.next_look = engine.step + 1
            return
        wanted, ended = auto.decide(engine.step, self.fragmentation(), engine.compact_threshold_ratio)
        self._record(ended)
        if wanted is None:
            return
        budget = engine.config.compact_budget
        with engine.manager.lock:  # attached programs may take what a plan counts on between plan and move
            try:
                plan = engine.manager.plan_compaction(
                    wanted.goal, wanted.run_blocks, budget, keep_cached=wanted.keep_cached
                )
            except RequestError:
                plan = MovePlan()
            if plan.stages:
                self._start(plan, lambda moves: self._end_slice(plan, moves))
            else:
                self._end_auto()

    def stop_auto(self) -> None:
        """End the automatic compaction in progress, if there is one."""
        if self.auto.trigger is not None:
            self._engine.settle()
        if self.auto.trigger is not None:
            self._end_auto()

    def run_now(
        self, make_plan: Callable[[], MovePlan], command: Compact, work: Work, slice_size: int
    ) -> Generator[None, None, MovePlan]:
        """Carry out an operator's compaction, slice by slice; return its plan.

        Args:
            make_plan: Makes the plan; no attached program can take its blocks before the first slice has begun.
            command: What was asked for.
            work: Told how far it is; tells whether it is to end.
            slice_size: Blocks a slice.

        Raises:
            Cancelled: It was ended early; what was moved stays moved.
            StorageError: A copy failed; block tables name the blocks from before that stage.
            Refused: Blocks changed since the plan was made, or a copy has not ended within the bound.
        """
        engine = self._engine
        engine.settle()
        before = self.fragmentation().ratio
        with engine.manager.lock:
            plan = make_plan()
            if not plan.stages:
                return plan
            sliced = MovePlan(slices_of(plan, slice_size), plan.left)
            moves = self._start(sliced, self._recorder("manual", command, plan, before), work)
        while self._moves is moves:
            yield from engine.copies.watch(work)
            if (reason := engine.copies.commit_next()) is not None:
                raise Refused(reason)
            work.done_blocks = work.settled_blocks = moves.moved_blocks
            if self._moves is moves:
                yield
                self._next_stage(moves)
        if moves.error is not None:
            raise moves.error
        return plan

    def make_run(self, run_blocks: int) -> bool:
        """In auto mode, free a run for the first in the queue if one slice can; return whether there is one.

        A run freed at the end of a step may be broken again when running sequences grow, before the queue is looked
        at: the last slice is made where the run is taken.
        """
        engine = self._engine
        if engine.compact != "auto":
            return False
        try:
            engine.settle()  # what is being copied cannot be moved, and may have made the run
            before = self.fragmentation()
            if before.largest_run >= run_blocks:
                return True
            with engine.manager.lock:
                plan = engine.manager.plan_compaction("longest-run", run_blocks, engine.config.compact_budget)
                if plan.left or not plan.stages:
                    return False
                wanted = Compact(goal="longest-run", run_blocks=run_blocks)
                self._start(plan, self._recorder("contiguous", wanted, plan, before.ratio))
            engine.settle()
        except RequestError:
            return False
        return self.fragmentation().largest_run >= run_blocks

    def fragmentation(self) -> Fragmentation:
        """Return what the policy looks at."""
        manager = self._engine.manager
        with manager.lock:
            shape = manager.shape()
            lengths = run_lengths(shape.free | shape.cached, shape.slab_size)
        longest, allocatable = int(lengths.max(initial=0)), int(lengths.sum())
        first = self._engine.scheduler.next_waiting()
        waits = first is not None and first.reason_kind == "contiguous"
        ratio = external_ratio(longest, allocatable)
        return Fragmentation(ratio, longest, allocatable, self.contiguous_wanted if waits else 0)

    def _recorder(
        self, trigger: CompactionTrigger, command: Compact, plan: MovePlan, before: float
    ) -> Callable[[Moves], None]:
        """Return what records the end of a compaction that begins at this step and is carried out in one go."""
        step = self._engine.step

        def ended(moves: Moves) -> None:
            self._record(
                CompactionRecord(
                    trigger=trigger,
                    goal=command.goal,
                    run_blocks=command.run_blocks,
                    started_step=step,
                    ended_step=self._engine.step,
                    planned_blocks=plan.moved_blocks + plan.left,
                    moved_blocks=moves.moved_blocks,
                    moved_bytes=moves.moved_bytes,
                    evicted_blocks=plan.evicted_blocks,
                    seconds=moves.seconds,
                    ratio_before=before,
                    ratio_after=self.fragmentation().ratio,
                    ended_early=str(moves.error) if moves.error else None,
                )
            )

        return ended

    def _start(self, plan: MovePlan, ended: Callable[[Moves], None], work: Work | None = None) -> Moves:
        self._moves = moves = Moves(plan, ended, work)
        self._next_stage(moves)
        return moves

    def _next_stage(self, moves: Moves) -> None:
        engine = self._engine
        if not moves.stages:
            self._end(moves)
            return
        if moves.work is not None and moves.work.is_cancelled:
            self._cancel(moves, moves.work)
            return
        stage = moves.stages[0]

        def done() -> None:
            moves.stages.popleft()
            moves.moved_blocks += len(stage.sources)
            moves.moved_bytes += len(stage.sources) * engine.manager.storage.block_bytes
            moves.seconds += engine.copies.last_seconds
            if moves.work is None or not moves.stages:
                self._next_stage(moves)

        def failed(error: StorageError) -> None:
            if isinstance(error, CopyCancelled) and moves.work is not None:
                self._cancel(moves, moves.work)
                return
            engine.emit("fault", f"compaction failed: {error}")
            self._end(moves, error)

        try:
            begin = engine.manager.transfers.begin_moves
            if engine.copies.start(lambda: begin(stage), engine.step, done, failed) is None:
                self._end(moves, Refused(f"{engine.copies.executor.capacity} copies are under way, the limit"))
        except Refused as error:
            self._end(moves, error)

    def _cancel(self, moves: Moves, work: Work) -> None:
        work.done_blocks = moves.moved_blocks
        self._end(moves, work.ended("what was moved stays moved"))

    def _end(self, moves: Moves, error: StorageError | Refused | None = None) -> None:
        self._moves, moves.error = None, error
        counters = self._engine.counters
        counters.compaction_moved_blocks += moves.moved_blocks
        counters.compaction_moved_bytes += moves.moved_bytes
        moves.ended(moves)

    def _end_slice(self, plan: MovePlan, moves: Moves) -> None:
        left = plan.moved_blocks + plan.left - moves.moved_blocks
        self.auto.moved(moves.moved_blocks, left, plan.evicted_blocks, moves.moved_bytes, moves.seconds)
        if isinstance(moves.error, Refused):
            # No slot for the copy, or blocks have changed between two stages: planned anew at the next look.
            self.auto.next_look = self._engine.step + LOOK_EVERY_STEPS
        elif moves.error is not None or not plan.left:
            self._end_auto(moves.error)

    def _end_auto(self, error: StorageError | None = None) -> None:
        early = str(error) if error else None
        self._record(self.auto.end(self._engine.step, self.fragmentation(), ended_early=early))

    def _record(self, record: CompactionRecord | None) -> None:
        if record is None:
            return
        self.records.append(record)
        counters = self._engine.counters
        match record.trigger:
            case "threshold":
                counters.compactions_threshold += 1
            case "contiguous":
                counters.compactions_contiguous += 1
            case "manual":
                counters.compactions_manual += 1
            case _:
                assert_never(record.trigger)
        text = (
            f"compaction ({record.trigger}, {record.goal}): {record.moved_blocks} blocks moved, "
            f"fragmentation {record.ratio_before:.0%} to {record.ratio_after:.0%}"
        )
        early = f", ended early: {record.ended_early}" if record.ended_early else ""
        self._engine.emit("compact", text + early, None, record.moved_blocks)
