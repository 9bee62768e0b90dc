"""Publication: an engine's arrays as they were last published, and the answers to those who look. Owns when is next.

An observation makes the publication it needs, so an engine that nobody watches publishes nothing. Those who ask
meanwhile are answered together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from allocator.block_map import FIELDS, BlockArrays
from allocator.snapshot import Snapshot
from kvtop.model.lineage import lineage
from kvtop.model.observation import MAX_VICTIMS, BlockHolders, Focus, Observation
from kvtop.runner_request import RunnerRequest, describe
from kvtop.stepped_engine import SteppedEngine

#: Seconds between two publications, at least; more where one takes long, up to a bound that keeps the screen moving. At
#: full speed they take no more than this share of the engine's time, divided by those who look: each of them copies
#: what is published, and the machine's memory is the engine's too. At a pace the engine has time left.
PUBLISH_EVERY_S: Final = 0.05
PUBLISH_SHARE: Final = 0.01
PACED_PUBLISH_SHARE: Final = 0.1
MAX_PUBLISH_EVERY_S: Final = 1.0

#: Which events an observer wants: from which number on, and how many of the newest are enough.
_Events: TypeAlias = tuple[int, int | None]


class MapWriter(Protocol):
    """Where publications go; ``allocator.block_map.BlockMapWriter`` is one."""

    def begin(self, step: int, num_device: int, num_host: int | None) -> tuple[BlockArrays, BlockArrays | None]: ...

    def finish(self) -> None: ...


class Publication:
    """What those who look at one engine are shown. Used by the engine's thread alone.

    Args:
        engine: The engine.
        snapshot: Takes a snapshot with the events from a number on, the newest so many of them where that is given.
        block_map: Where the arrays are written; without one they travel in the observation.
        clock: Real seconds, monotonic.

    Attributes:
        observers: Requests that wait for an observation.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        snapshot: Callable[[int, int | None], Snapshot],
        block_map: MapWriter | None,
        clock: Callable[[], float],
    ) -> None:
        self.observers: list[RunnerRequest] = []
        self._engine, self._snapshot = engine, snapshot
        self._block_map, self._clock = block_map, clock
        self._arrays: tuple[BlockArrays | None, BlockArrays | None] = (None, None)
        self._is_current = False
        self._published_s = -math.inf
        self._every_s = PUBLISH_EVERY_S

    def outdate(self) -> None:
        """Note that the engine has changed, or may have."""
        self._is_current = False

    def wait_s(self) -> float:
        """Return the seconds until an observer can be answered with arrays of this very step; 0 or less is now."""
        if self._is_current:
            return 0.0
        return self._published_s + self._every_s - self._clock()

    def answer(self, *, at_full_speed: bool) -> None:
        """Answer the observers, all from one publication.

        Args:
            at_full_speed: Whether the engine has no time to spare.
        """
        observers, self.observers = self.observers, []
        began_s, is_new = self._clock(), not self._is_current
        try:
            if is_new:
                self._publish()
        except Exception as error:
            for request in observers:
                request.finish(None, f"the engine cannot be read: {describe(error)}")
            return
        snapshots: dict[_Events, Snapshot] = {}  # consoles in step share one
        for request in observers:
            assert isinstance(request.payload, Focus)
            try:
                request.finish(self._observation(request.payload, snapshots))
            except Exception as error:
                request.finish(None, f"the engine cannot be read: {describe(error)}")
        if is_new:
            cost_s = self._clock() - began_s
            share = PUBLISH_SHARE / len(observers) if at_full_speed else PACED_PUBLISH_SHARE
            self._every_s = min(max(PUBLISH_EVERY_S, cost_s / share), MAX_PUBLISH_EVERY_S)

    def _publish(self) -> None:
        engine = self._engine
        if self._block_map is None:
            self._arrays = (engine.arrays("device"), engine.arrays("host"))
            for arrays in self._arrays:
                if arrays is not None:
                    _freeze(arrays)
        else:
            # Straight into the map's own memory: fresh arrays for a large pool cost more than writing them.
            num_host = engine.pool_size("host")
            device, host = self._block_map.begin(engine.step, engine.pool_size("device") or 0, num_host)
            engine.arrays("device", device)
            if host is not None:
                engine.arrays("host", host)
            self._block_map.finish()
        self._is_current = True
        self._published_s = self._clock()

    def _observation(self, focus: Focus, snapshots: dict[_Events, Snapshot]) -> Observation:
        device, host = self._arrays
        engine = self._engine
        events = focus.next_event, focus.max_events
        snapshot = snapshots.get(events)
        if snapshot is None:
            snapshot = snapshots[events] = self._snapshot(*events)
        table = engine.table(focus.seq_id) if focus.seq_id is not None else None
        block = None
        if focus.block_id is not None and 0 <= focus.block_id < (engine.pool_size("device") or 0):
            holders, total = engine.holders(focus.block_id)
            block = BlockHolders(focus.block_id, holders, total)
        victims = engine.next_victims(min(focus.num_victims, MAX_VICTIMS)) if focus.num_victims > 0 else None
        kin = None
        if focus.lineage:
            ids = {row.row: row.seq_id for row in snapshot.sequences if row.row is not None}
            kin = lineage({ids[row]: table for row, table in engine.tables().each() if row in ids})
        return Observation(snapshot, device, host, table, block, victims, kin)


def _freeze(arrays: BlockArrays) -> None:
    for name, _ in FIELDS:
        getattr(arrays, name).setflags(write=False)
