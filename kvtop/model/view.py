"""View: all that a screen, the exporter or a report may look at. Frozen; made by ``reduce`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.events import Event
from allocator.ids import Tier
from allocator.metrics import TierNumbers
from allocator.snapshot import SequenceRow, Snapshot
from kvtop.model.history import History
from kvtop.model.mirror import MirrorReading
from kvtop.model.observation import BlockHolders, Kin
from kvtop.model.remote import RemoteFacts


@dataclass(frozen=True, slots=True, eq=False)
class TierView:
    """One tier: its arrays and the numbers derived from exactly these arrays."""

    arrays: BlockArrays
    numbers: TierNumbers


@dataclass(frozen=True, slots=True, eq=False)
class MirrorView:
    """A remote cache's resident blocks as kvtop lays them out.

    Attributes:
        reading: What is known.
        tiers: Its maps. Their numbers count what is resident; nothing tells what is held.
    """

    reading: MirrorReading
    tiers: Mapping[Tier, TierView]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The state of one attachment.

    Attributes:
        source: The target's name.
        generation: Counts up with every observation; equal generations show the same facts.
        snapshot: Last snapshot; ``None`` before the first, and for an engine that is not one of ours.
        remote: Last facts of an engine over the network; ``None`` for one of ours.
        device: Device tier; ``None`` when unknown.
        host: Host tier; ``None`` when there is none, or it is unknown.
        focus_table: Block table of the focused sequence, when asked for.
        focus_block: Holders of the focused block, when asked for.
        next_victims: Device blocks that would be evicted next, in order, when asked for.
        lineage: What sequences share with older ones, when asked for.
        events: The latest events, oldest first, at most ``reduce.MAX_EVENTS``.
        history: Series for sparklines.
        hit_ratio, hit_ratio_window: Hit blocks ÷ queried blocks, lifetime and over the last minute; ``None`` without
            queries.
        error: Why the last reading failed; ``None`` when it did not.
        read_at_s: Monotonic time of the last good reading; ``None`` before the first.
        mirror: For an engine over the network, the map that its cache events make; ``None`` without them.
    """

    source: str
    generation: int = 0
    snapshot: Snapshot | None = None
    device: TierView | None = None
    host: TierView | None = None
    focus_table: NDArray[np.int64] | None = None
    focus_block: BlockHolders | None = None
    next_victims: tuple[int, ...] | None = None
    lineage: tuple[Kin, ...] | None = None
    events: tuple[Event, ...] = ()
    history: History = field(default_factory=History)
    hit_ratio: float | None = None
    hit_ratio_window: float | None = None
    error: str | None = None
    read_at_s: float | None = None
    remote: RemoteFacts | None = None
    mirror: MirrorView | None = None

    @property
    def maps(self) -> Mapping[Tier, TierView]:
        """The maps there are to draw, the device first: the engine's own, or the mirror of one over the network."""
        if self.mirror is not None:
            return self.mirror.tiers
        own: tuple[tuple[Tier, TierView | None], ...] = (("device", self.device), ("host", self.host))
        return {tier: view for tier, view in own if view is not None}


def is_attached(row: SequenceRow) -> bool:
    """Return whether a sequence is an attached program's, which alone knows when it ends."""
    return row.num_target is None
