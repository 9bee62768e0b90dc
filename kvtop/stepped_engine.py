"""SteppedEngine: what a runner needs of an engine. No behaviour."""

from __future__ import annotations

from typing import Protocol

from allocator.block_map import BlockArrays
from allocator.block_table import Listing
from allocator.commands import Command
from allocator.ids import IdArray, Tier
from allocator.plans import Outcome, Plan
from allocator.snapshot import Counters, Snapshot


class SteppedEngine(Protocol):
    """An engine between two steps, on its own thread; ``allocator.engine.Engine`` is one."""

    step: int

    @property
    def counters(self) -> Counters: ...

    @property
    def done(self) -> bool: ...

    @property
    def stuck_reason(self) -> str | None: ...

    @property
    def is_waiting(self) -> bool: ...

    @property
    def late_s(self) -> float | None: ...

    def rest(self) -> None: ...

    def advance(self, max_steps: int) -> int: ...

    def plan(self, command: Command) -> Plan: ...

    def apply(self, command: Command) -> Outcome: ...

    def snapshot(
        self,
        *,
        phase: str,
        speed: float | None,
        steps_per_s: float | None,
        next_event: int = 0,
        max_events: int | None = None,
    ) -> Snapshot: ...

    def pool_size(self, tier: Tier) -> int | None: ...

    def arrays(self, tier: Tier, into: BlockArrays | None = None) -> BlockArrays | None: ...

    def table(self, seq_id: int) -> IdArray | None: ...

    def holders(self, block_id: int, limit: int = 64) -> tuple[tuple[tuple[int, int], ...], int]: ...

    def next_victims(self, limit: int) -> tuple[int, ...]: ...

    def tables(self) -> Listing: ...
