"""A small engine that does as it is told: for tests of what runs, serves and reads an engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from allocator.block_map import FIELDS, BlockArrays
from allocator.block_table import Listing
from allocator.commands import Command, Resize, SubmitLoad, command_name
from allocator.errors import InvariantViolation
from allocator.events import Event
from allocator.ids import BlockState, IdArray, Tier
from allocator.plans import Outcome, Plan
from allocator.snapshot import Counters, Snapshot


def filled_arrays(num_blocks: int, value: int) -> BlockArrays:
    """Return arrays in which every field of every block holds ``value``, modulo what fits."""
    return BlockArrays(**{name: np.full(num_blocks, value % 128, dtype) for name, dtype in FIELDS})


class ManualClock:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeEngine:
    """Counts steps; fills its arrays with the step; fails on demand.

    Attributes:
        skips: Whether ``advance`` takes all the steps it may at once, as in a stretch where nothing can happen.
        steps_left: Steps until it is done; ``None`` is never.
        fail_with: Raised by the next ``advance``.
        apply_with: Called by ``apply``, such as to fail or to take its time.
        calls: What was called, in order.
    """

    def __init__(self, num_blocks: int = 8, num_host: int = 4) -> None:
        self.num_blocks, self.num_host = num_blocks, num_host
        self.step = 0
        self.counters = Counters()
        self.stuck_reason: str | None = None
        self.is_waiting = False
        self.late_s: float | None = None
        self.skips = False
        self.steps_left: int | None = None
        self.fail_with: Exception | None = None
        self.apply_with: Callable[[Command], None] | None = None
        self.num_running = 1
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.step_cost: Callable[[], None] = lambda: None

    @property
    def done(self) -> bool:
        return self.steps_left == 0

    def rest(self) -> None:
        pass

    def advance(self, max_steps: int) -> int:
        assert max_steps >= 1
        self.calls.append("advance")
        self.step_cost()
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        if self.done or self.stuck_reason is not None:
            return 0
        taken = max_steps if self.skips else 1
        if self.steps_left is not None:
            taken = min(taken, self.steps_left)
            self.steps_left -= taken
        self.step += taken
        return taken

    def plan(self, command: Command) -> Plan:
        self.calls.append(f"plan {command_name(command)}")
        if isinstance(command, Resize) and command.num_blocks < 1:
            return Plan(summary="resize", refusal="at least 1 block")
        return Plan(summary=f"would {command_name(command)}", moved_blocks=3)

    def apply(self, command: Command) -> Outcome:
        self.calls.append(f"apply {command_name(command)}")
        if self.apply_with is not None:
            self.apply_with(command)
        if isinstance(command, Resize):
            if command.num_blocks < 1:
                return Outcome(ok=False, message="at least 1 block")
            self.num_blocks = command.num_blocks
        if isinstance(command, SubmitLoad):
            self.stuck_reason = None
        number = len(self.events)
        self.events.append(Event(number=number, step=self.step, kind="command", text=command_name(command)))
        return Outcome(ok=True, message=f"did {command_name(command)}", moved_blocks=3)

    def tables(self) -> Listing:
        """Return a table for each even row: the same first two blocks, and one of its own."""
        ids = [np.array([0, 1, 2 + row]) for row in (0, 2)]
        counts = np.array([3, 3])
        return Listing(np.array([0, 2]), counts, np.cumsum(counts) - counts, np.concatenate(ids))

    def next_victims(self, limit: int) -> tuple[int, ...]:
        return tuple(range(self.num_blocks))[:limit]

    def snapshot(
        self,
        *,
        phase: str,
        speed: float | None,
        steps_per_s: float | None,
        next_event: int = 0,
        max_events: int | None = None,
    ) -> Snapshot:
        return Snapshot(
            step=self.step,
            time_s=self.step * 0.025,
            phase=phase,
            speed=speed,
            steps_per_s=steps_per_s,
            source="fake",
            workload="none",
            geometry="none",
            device="cpu",
            block_size=16,
            block_bytes=0,
            slab_size=4,
            eviction="lru",
            preempt="swap",
            policy="fcfs",
            compact="manual",
            compact_threshold_ratio=0.5,
            watermark_ratio=0.01,
            num_running=self.num_running,
            num_waiting=0,
            num_swapped=0,
            counters=self.counters,
            sequences=(),
            events=tuple(
                self.events[next_event if max_events is None else max(next_event, len(self.events) - max_events) :]
            ),
        )

    def pool_size(self, tier: Tier) -> int | None:
        return self.num_blocks if tier == "device" else self.num_host or None

    def arrays(self, tier: Tier, into: BlockArrays | None = None) -> BlockArrays | None:
        size = self.pool_size(tier)
        if size is None:
            return None
        arrays = filled_arrays(size, self.step)
        if tier == "device":
            self.calls.append("arrays")
            arrays.state[:] = BlockState.ACTIVE
        if into is None:
            return arrays
        for name, _ in FIELDS:
            getattr(into, name)[:] = getattr(arrays, name)
        return into

    def table(self, seq_id: int) -> IdArray | None:
        return np.arange(3, dtype=np.int64) if seq_id == 1 else None

    def holders(self, block_id: int, limit: int = 64) -> tuple[tuple[tuple[int, int], ...], int]:
        return ((1, block_id),), 1

    def close(self) -> None:
        self.calls.append("close")


def broken_law() -> InvariantViolation:
    return InvariantViolation(2, "block 3 has ref_count 1, tables name it twice")


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that another thread or process does; fail when it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {condition}"
        time.sleep(0.005)
