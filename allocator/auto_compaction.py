"""AutoCompaction: when to move blocks together by itself, to what end, and when to stop. Pure; owned by Engine.

Two triggers. Threshold: external fragmentation above T starts a run that packs low; at ``STOP_SHARE`` × T or below it
has done enough. Contiguous: a request that waits for one run of blocks, or the largest that asked lately, is longer
than the longest run of allocatable blocks; the run frees such a run. It goes before a threshold run in progress, and
it alone may evict cached blocks. A run moves at most its budget a step, and plans each slice anew, since sequences
come and go between two. It ends when its end is reached or no move is left, and then a cool-down keeps the next run
of its kind away, so that fragmentation about the threshold does not copy for ever. Time is virtual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from allocator.commands import CompactGoal
from allocator.snapshot import CompactionRecord, CompactionTrigger

#: Share of the threshold at which a run has done enough.
STOP_SHARE: Final = 0.5
#: Steps between two looks while no run is on: once a virtual second.
LOOK_EVERY_STEPS: Final = 40
#: Steps between the end of a run and the start of the next for the same reason: 10 virtual seconds.
COOL_DOWN_STEPS: Final = 400
#: Steps for which a contiguous request counts as lately seen: 100 virtual seconds.
LATELY_STEPS: Final = 4000


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What a decision looks at.

    Attributes:
        ratio: External fragmentation ratio.
        largest_run: Longest run of allocatable blocks.
        allocatable: Allocatable blocks.
        contiguous_waiting: Blocks of the contiguous request that waits for a run; 0 when none does.
    """

    ratio: float
    largest_run: int
    allocatable: int
    contiguous_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """What to plan for one step.

    Attributes:
        goal: Goal of the compaction.
        run_blocks: For ``longest-run``: the run wanted.
        keep_cached: Whether no cached block may be evicted.
    """

    goal: CompactGoal
    run_blocks: int | None
    keep_cached: bool


@dataclass(slots=True)
class _Run:
    trigger: CompactionTrigger
    run_blocks: int | None
    started_step: int
    ratio_before: float
    planned_blocks: int | None = None
    moved_blocks: int = 0
    moved_bytes: int = 0
    evicted_blocks: int = 0
    seconds: float = 0.0


class AutoCompaction:
    """The policy and the run in progress.

    Attributes:
        next_look: Step at whose end ``decide`` is to be called next.
    """

    def __init__(self) -> None:
        self.next_look = LOOK_EVERY_STEPS
        self._run: _Run | None = None
        self._cool_until: dict[CompactionTrigger, int] = {}
        self._seen: tuple[int, int] | None = None

    @property
    def trigger(self) -> CompactionTrigger | None:
        """What started the run in progress; ``None`` when none is."""
        return self._run.trigger if self._run else None

    def saw_contiguous(self, step: int, num_blocks: int, *, failed: bool = False) -> None:
        """Note that a request asked for one run of ``num_blocks``; one that failed is looked at after this step."""
        if self._seen is None or num_blocks >= self._seen[1] or step >= self._seen[0] + LATELY_STEPS:
            self._seen = (step, num_blocks)
        if failed and self._is_cool(step, "contiguous"):
            self.next_look = min(self.next_look, step + 1)

    def decide(
        self, step: int, now: Fragmentation, threshold_ratio: float
    ) -> tuple[Slice | None, CompactionRecord | None]:
        """Return the slice to carry out at this step boundary, and the record of the run that ended here.

        Tell ``moved`` what became of the slice, and call ``end`` if it was the last.
        """
        ended = None
        if self._run is not None and self._is_done(self._run, now, threshold_ratio):
            ended = self._end(step, now)
        wanted = self._wanted(step, now)
        if self._run is not None and self._run.trigger == "threshold" and wanted:
            ended = self._end(step, now)
        if self._run is None:
            if wanted:
                self._run = _Run("contiguous", wanted, step, now.ratio)
            elif now.ratio > threshold_ratio and self._is_cool(step, "threshold"):
                self._run = _Run("threshold", None, step, now.ratio)
        if self._run is None:
            self.next_look = step + LOOK_EVERY_STEPS
            return None, ended
        self.next_look = step + 1
        if self._run.trigger == "contiguous":
            return Slice("longest-run", self._run.run_blocks, keep_cached=False), ended
        return Slice("pack-low", None, keep_cached=True), ended

    def moved(self, moved_blocks: int, left_blocks: int, evicted_blocks: int, moved_bytes: int, seconds: float) -> None:
        """Note what a slice moved, and how many blocks its plan left to later ones."""
        run = self._run
        assert run is not None
        if run.planned_blocks is None:
            run.planned_blocks = moved_blocks + left_blocks
        run.moved_blocks += moved_blocks
        run.moved_bytes += moved_bytes
        run.evicted_blocks += evicted_blocks
        run.seconds += seconds

    def end(self, step: int, now: Fragmentation, *, ended_early: str | None = None) -> CompactionRecord | None:
        """End the run in progress: no move is left, or it could not go on. Return its record if it moved anything."""
        record = self._end(step, now, ended_early)
        self.next_look = step + LOOK_EVERY_STEPS
        return record

    def _wanted(self, step: int, now: Fragmentation) -> int:
        """Return the run of blocks to be freed for contiguous requests; 0 when there is no need or no way."""
        if not self._is_cool(step, "contiguous"):
            return 0
        lately = self._seen[1] if self._seen is not None and step < self._seen[0] + LATELY_STEPS else 0
        for wanted in (now.contiguous_waiting, lately):
            if now.largest_run < wanted <= now.allocatable:
                return wanted
        return 0

    def _is_done(self, run: _Run, now: Fragmentation, threshold_ratio: float) -> bool:
        if run.run_blocks is not None:
            return now.largest_run >= run.run_blocks or now.allocatable < run.run_blocks
        return now.ratio <= STOP_SHARE * threshold_ratio

    def _is_cool(self, step: int, trigger: CompactionTrigger) -> bool:
        return step >= self._cool_until.get(trigger, 0)

    def _end(self, step: int, now: Fragmentation, ended_early: str | None = None) -> CompactionRecord | None:
        """Return the record of the run in progress and forget it; ``None`` when it moved nothing."""
        run, self._run = self._run, None
        assert run is not None
        reached = run.run_blocks is not None and now.largest_run >= run.run_blocks
        # A run that was freed may be taken by the next contiguous request at once: another must not have to wait. And
        # where no block was free to move to, nothing was copied that would have to pay.
        idle = run.trigger == "threshold" and not run.moved_blocks
        self._cool_until[run.trigger] = step if reached or idle else step + COOL_DOWN_STEPS
        if not run.moved_blocks:
            return None
        return CompactionRecord(
            trigger=run.trigger,
            goal="longest-run" if run.trigger == "contiguous" else "pack-low",
            run_blocks=run.run_blocks,
            started_step=run.started_step,
            ended_step=step,
            planned_blocks=run.planned_blocks or 0,
            moved_blocks=run.moved_blocks,
            moved_bytes=run.moved_bytes,
            evicted_blocks=run.evicted_blocks,
            seconds=run.seconds,
            ratio_before=run.ratio_before,
            ratio_after=now.ratio,
            ended_early=ended_early,
        )
