"""LocalMember: an engine on this machine as one of several: a row of their table, or opened in full. Lost and found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from allocator.block_map import BlockArrays
from allocator.metrics import TierNumbers, tier_numbers
from allocator.snapshot import told
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.model.remote import EngineRow, total
from kvtop.sources.base import Source

#: What an engine of ours is called among others.
KIND: Final = "kvtop"
ONE_OF_SEVERAL: Final = "read only: one of several; attach to it alone, with --allow-operations, to act on it"
#: Seconds between two readings for the table, and between two tries to reach an engine that is lost.
EVERY_S: Final = 1.0
AGAIN_S: Final = 2.0
#: Seconds an answer may take at least: it comes from another process.
_ANSWER_S: Final = 0.3


class LocalMember:
    """Reads one engine of ours, which may come and go.

    Args:
        name: The target, ``local:NAME``.
        connect: Makes a source of it. Raises ``SourceError`` when it is not there.
        clock: Monotonic seconds.
    """

    def __init__(self, name: str, connect: Callable[[], Source], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._connect = connect
        self._clock = clock
        self._source: Source | None = None
        self._failure: SourceError | None = None
        self._row: EngineRow | None = None
        self._next_s = float("-inf")
        self._numbers: tuple[BlockArrays, TierNumbers] | None = None

    @property
    def missing(self) -> Mapping[str, str]:
        """What is not offered, with the reason."""
        known = self._source.missing if self._source is not None else {}
        return {**known, "operations": ONE_OF_SEVERAL}

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        """Return the newest observation.

        Raises:
            SourceError: The engine is not there, or did not answer. It is tried again after ``AGAIN_S``.
        """
        if self._failure is not None and self._clock() < self._next_s:
            raise self._failure
        try:
            if self._source is None:
                self._source = self._connect()
            seen = self._source.read(focus, max(timeout_s, _ANSWER_S))
        except SourceError as error:
            self._let_go()
            self._failure, self._next_s = error, self._clock() + AGAIN_S
            raise
        self._failure = None
        if not isinstance(seen, Observation):
            raise SourceError(f"{self.name} is no engine of ours")
        return seen

    def row(self, timeout_s: float) -> EngineRow:
        """Return its row of a table, read at most every ``EVERY_S``.

        Raises:
            SourceError: As ``read``.
        """
        now_s = self._clock()
        if self._row is None or self._failure is not None or now_s >= self._next_s:
            self._row = self._as_row(self.read(Focus(), timeout_s))
            self._next_s = now_s + EVERY_S
        return self._row

    def close(self) -> None:
        """Let go of the engine. Safe to call twice."""
        self._let_go()

    def _let_go(self) -> None:
        source, self._source, self._row = self._source, None, None
        if source is not None:
            source.close()

    def _as_row(self, seen: Observation) -> EngineRow:
        snapshot = told(seen.snapshot)
        counters = snapshot.counters
        numbers = None
        if seen.device is not None:
            if self._numbers is None or self._numbers[0] is not seen.device:
                self._numbers = seen.device, tier_numbers(seen.device, snapshot.block_size, snapshot.slab_size)
            numbers = self._numbers[1]
        return EngineRow(
            usage_ratio=numbers.usage_ratio if numbers else None,
            total_blocks=numbers.total if numbers else None,
            used_blocks=numbers.active + numbers.reserved if numbers else None,
            block_size=snapshot.block_size,
            running=snapshot.num_running,
            waiting=snapshot.num_waiting,
            swapped=snapshot.num_swapped,
            queries=counters.query_blocks,
            hits=counters.hit_blocks,
            hit_unit="blocks",
            preemptions=total((counters.preemptions_swap, counters.preemptions_recompute)),
            evictions=counters.evictions,
            eviction_unit="blocks",
            generated_tokens=counters.generated_tokens,
            target=self.name,
            kind=KIND,
            age_s=0.0,
        )
