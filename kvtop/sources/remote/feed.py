"""Feed: one rank's numbered batches in order: joins, fills gaps by replay, and notices that an engine was started anew.

No sockets: whoever has them hands messages in and is called back for a replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

from kvtop.sources.remote.kv_events import BadBatch, decode
from kvtop.sources.remote.residency import Residency

#: Sequence number of the marker at the end of a replay.
END: Final = b"\xff" * 8
#: Applied batches remembered, to tell a batch that comes twice from an engine that counts anew.
_REMEMBERED: Final = 4096

#: Ranks are below this.
MAX_RANKS: Final = 1024

#: Why what is known may be only part.
Trouble = Literal["joined late", "gap", "unreadable batch"]


class BadFraming(ValueError):
    """A message whose frames are not those of an event stream."""


def unframe(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return (sequence number, payload) of a message: topic, number, payload; replies have one or two frames before.

    Raises:
        BadFraming: It is no such message.
    """
    if len(frames) not in (3, 4) or len(frames[-2]) != 8:
        raise BadFraming(f"{len(frames)} frames of {', '.join(str(len(f)) for f in frames[:8])} bytes")
    return frames[-2], frames[-1]


class Feed:
    """Applies one rank's batches to a ``Residency``.

    Args:
        residency: Where they go.
        rank: The rank, for batches that do not tell theirs.
        replay: Number → the buffered messages from that number on, as (number, payload), oldest first.

    Attributes:
        trouble: Why what is known is only part; ``None`` when it is all.
        batches, replayed: Batches applied, and those of them that came by replay.
        missed: Batches in those holes.
        gaps, restarts: Holes that could not be filled, and engines found started anew.
        unknown, broken: Events of unknown type, and messages or events that could not be read.
    """

    def __init__(
        self,
        residency: Residency,
        rank: int = 0,
        replay: Callable[[int], Iterable[tuple[int, bytes]]] = lambda start: (),
    ) -> None:
        self.trouble: Trouble | None = None
        self.batches = self.replayed = self.missed = self.gaps = self.restarts = self.unknown = self.broken = 0
        self._residency = residency
        self._rank = rank
        self._ranks = {rank}
        self._replay = replay
        self._next = 0
        self._seen: OrderedDict[int, int] = OrderedDict()

    def join(self) -> None:
        """Take over what the replay buffer has: the start of a feed, and of one that is to begin again."""
        self._catch_up(None)

    def begin_again(self) -> None:
        """Forget everything and join anew: somebody else knows that the engine was started anew."""
        self._begin_again()
        self._catch_up(None, may_begin_again=False)

    def take(self, frames: Sequence[bytes]) -> None:
        """Take one live message."""
        try:
            number, payload = unframe(frames)
        except BadFraming:
            self.broken += 1
            return
        self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            if self._is_known(number, payload):
                return
            self._begin_again()
        if number > self._next:
            self._catch_up(number)
            if number < self._next:  # the replay has brought it already
                return
        if number > self._next:
            self._note_hole(number)
        self._apply(number, payload)

    def _catch_up(self, until: int | None, may_begin_again: bool = True) -> None:
        """Replay from the last batch that was applied: it tells whether the engine is still the same."""
        start = max(0, self._next - 1)
        for number, payload in self._replay(start):
            if number < self._next:
                if self._is_known(number, payload) or not may_begin_again:
                    continue
                self._begin_again()
                self._catch_up(until, may_begin_again=False)
                return
            if until is not None and number >= until:
                continue
            if number > self._next:
                self._note_hole(number)
            self._apply(number, payload)
            self.replayed += 1

    def _is_known(self, number: int, payload: bytes) -> bool:
        """Return whether a batch was applied already. One from before what is remembered cannot come again."""
        return self._seen.get(number) == hash(payload)

    def _begin_again(self) -> None:
        self.restarts += 1
        for rank in self._ranks:
            self._residency.forget(rank)
        self._seen.clear()
        self._next = 0
        self.trouble = None

    def _note_hole(self, number: int) -> None:
        if self._next == 0:
            self.trouble = self.trouble or "joined late"
        else:
            self.gaps += 1
            self.missed += number - self._next
            self.trouble = "gap"

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._seen[number] = hash(payload)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        try:
            batch = decode(payload)
        except BadBatch:
            self.broken += 1
            self.trouble = "unreadable batch"
            return
        self.batches += 1
        self.unknown += batch.unknown
        self.broken += batch.broken
        if batch.broken:
            self.trouble = "unreadable batch"
        cleared = self._residency.cleared
        rank = batch.rank if batch.rank is not None and batch.rank < MAX_RANKS else self._rank
        self._ranks.add(rank)
        self._residency.apply(batch, rank)
        if self._residency.cleared > cleared and not batch.broken:
            self.trouble = None  # from an empty cache on, everything is known
