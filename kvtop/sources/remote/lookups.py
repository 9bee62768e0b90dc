"""Lookups: what cache events imply of the requests behind them. Bounded; owned by whoever applies the events.

Events tell what was stored and removed. A request's hits are not among them, but what it stores names the block
before, and so the chain that it must have found. Later blocks of the same request, from a prompt in chunks or from its
output, continue the chain that it was the last to lengthen. So a lookup begins with a store that follows no open
chain's end, and is over when its chain has not grown for a while.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtop.model.what_if import Traffic
from kvtop.sources.remote.kv_events import Stored

#: Seconds without a block after which a request is taken to be over, and requests that are open at once at most.
QUIET_S: Final = 10.0
MAX_OPEN: Final = 2048
#: Blocks in the lookups kept, and blocks remembered as once stored.
MAX_KEPT: Final = 500_000
MAX_SEEN: Final = 500_000
#: A longer chain is not one: events may lie.
MAX_CHAIN: Final = 100_000


@dataclass(slots=True)
class Lookup:
    """One request, as far as it left events.

    Attributes:
        keys: Hashes of its blocks from the first one on.
        hits: How many of the leading ones were resident.
        again, repeated: Of the stored ones: stored before and gone; stored while resident.
        hittable: Leading blocks that a larger cache could have had: those from the first repeated one on were computed
            although they were there.
        last_s: When its newest block was stored. [s]
        epoch: How often the cache had been cleared before: nothing is hit across a clear.
    """

    keys: list[int]
    hits: int
    last_s: float
    again: int = 0
    repeated: int = 0
    hittable: int | None = None
    epoch: int = 0

    @property
    def traffic(self) -> Traffic:
        """Its share of the traffic."""
        return Traffic(1, len(self.keys), self.hits, self.again, self.repeated)


class Lookups:
    """Rebuilds one rank's lookups from its stores.

    Attributes:
        done: Those that are over, oldest first, at most ``MAX_KEPT`` blocks of them.
        unknown: Lookups left out, since the beginning of their chain was not resident when they came.
    """

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.done: deque[Lookup] = deque()
        self.unknown = 0
        self._max_kept = max_kept
        self._kept = self._epoch = 0
        self._open: OrderedDict[int, Lookup] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()

    def store(
        self, event: Stored, time_s: float, is_resident: Callable[[int], bool], chain: Callable[[int], list[int] | None]
    ) -> Sequence[int]:
        """Take a store of a chain, before it is applied; return the resident blocks that a request has found by it.

        Args:
            event: The store; one whose blocks do not follow each other is not for here.
            time_s: When it was published.
            is_resident: Whether a block is cached.
            chain: Block → the hashes from its chain's beginning up to it; ``None`` when the beginning is not resident.
        """
        self._end_quiet(time_s)
        before: list[int] | None = []
        lookup = self._open.pop(event.parent, None) if event.parent is not None else None
        if lookup is None:
            before = [] if event.parent is None else chain(event.parent)
            if before is None or len(before) > MAX_CHAIN:
                self.unknown += 1
                self._note_seen(event)
                return ()
            lookup = Lookup(list(before), len(before), time_s, epoch=self._epoch)
        for h in event.hashes:
            if is_resident(h):
                lookup.repeated += 1
                if lookup.hittable is None:
                    lookup.hittable = len(lookup.keys)
            elif h in self._seen:
                lookup.again += 1
            lookup.keys.append(h)
        self._note_seen(event)
        lookup.last_s = time_s
        if (same := self._open.pop(event.hashes[-1], None)) is not None:
            self._end(same)
        self._open[event.hashes[-1]] = lookup
        self._end_quiet(time_s)
        return before or ()

    def forget(self) -> None:
        """End what is open: the cache was cleared, or the engine started anew."""
        while self._open:
            self._end(self._open.popitem(last=False)[1])
        self._seen.clear()
        self._epoch += 1

    def _end_quiet(self, now_s: float) -> None:
        while self._open:
            tail = next(iter(self._open))
            if len(self._open) <= MAX_OPEN and now_s - self._open[tail].last_s <= QUIET_S:
                return
            self._end(self._open.pop(tail))

    def _end(self, lookup: Lookup) -> None:
        self.done.append(lookup)
        self._kept += len(lookup.keys)
        while self._kept > self._max_kept and len(self.done) > 1:
            self._kept -= len(self.done.popleft().keys)

    def _note_seen(self, event: Stored) -> None:
        for h in event.hashes:
            self._seen[h] = None
            self._seen.move_to_end(h)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def newest(self) -> tuple[Lookup, ...]:
        """Return the lookups that are over, and the open ones as they stand, oldest first."""
        return (*self.done, *(replace(lookup, keys=list(lookup.keys)) for lookup in self._open.values()))
