"""Residency: which blocks an engine's events say are cached, how many copies, and the tree of prefixes they form."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

from kvtop.model.remote import PrefixLine
from kvtop.sources.remote.kv_events import Batch, Cleared, Removed, Stored

#: Resident blocks kept at most: events are somebody's word, and memory is ours.
MAX_BLOCKS: Final = 4_000_000
#: Prefixes told, and resident blocks above which they are no longer worked out.
MAX_PREFIXES: Final = 32
MAX_TREE: Final = 200_000

#: Rank, medium, group.
Place = tuple[int, str, int]


@dataclass(slots=True)
class _Block:
    copies: int
    parent: int | None
    is_rooted: bool
    since_s: float
    stores: int


class Residency:
    """The cached blocks of all ranks. Copies are counted: the same hash may be stored twice and removed once.

    Attributes:
        stored, removed, cleared: Block copies stored and removed, and clears.
        drift: Removals of blocks that were not known to be there.
        is_full: Whether blocks were left out on account of ``MAX_BLOCKS``.
        latest_s: Time of the newest batch, by the engine's clock.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.stored = self.removed = self.cleared = self.drift = 0
        self.is_full = False
        self.latest_s: float | None = None
        self._max_blocks = max_blocks
        self._places: defaultdict[Place, dict[int, _Block]] = defaultdict(dict)
        self._size = 0
        self._lives = 0
        self._life_s = 0.0

    def apply(self, batch: Batch, rank: int) -> None:
        """Take over one batch of a rank."""
        self.latest_s = batch.time_s if self.latest_s is None else max(self.latest_s, batch.time_s)
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event, rank, batch.time_s)
            elif isinstance(event, Removed):
                self._remove(event, rank, batch.time_s)
            elif isinstance(event, Cleared):
                self.cleared += 1
                self.forget(rank)

    def forget(self, rank: int) -> None:
        """Drop all blocks of a rank, in all its mediums."""
        for place in [place for place in self._places if place[0] == rank]:
            self._size -= len(self._places.pop(place))
        if not self._size:
            self.is_full = False

    def copies(self) -> dict[tuple[int, str, int, int], int]:
        """Return (rank, medium, group, hash) → copies of all resident blocks."""
        return {(*place, h): block.copies for place, blocks in self._places.items() for h, block in blocks.items()}

    def by_medium(self) -> tuple[tuple[str, int, int], ...]:
        """Return (medium, rank, resident copies), the device first."""
        count: Counter[tuple[str, int]] = Counter()
        for (rank, medium, _), blocks in self._places.items():
            count[medium, rank] += sum(block.copies for block in blocks.values())
        order = sorted(count, key=lambda key: (key[0] != "GPU", key))
        return tuple((medium, rank, count[medium, rank]) for medium, rank in order)

    @property
    def distinct(self) -> int:
        """Distinct hashes over all places."""
        if len(self._places) == 1:
            return len(next(iter(self._places.values())))
        return len(set().union(*self._places.values())) if self._places else 0

    @property
    def mean_life_s(self) -> float | None:
        """Mean seconds from a block's store to its removal, of those removed so far."""
        return self._life_s / self._lives if self._lives else None

    def prefixes(self, limit: int = MAX_PREFIXES) -> tuple[PrefixLine, ...]:
        """Return the largest resident prefixes: from a first block to where it first branches or ends.

        Blocks whose beginning is not resident belong to no prefix. Hybrid models cache one chain in several groups:
        the lowest group of each rank and medium stands for all.
        """
        lowest: dict[tuple[int, str], int] = {}
        for rank, medium, group in self._places:
            lowest[rank, medium] = min(group, lowest.get((rank, medium), group))
        lines: list[PrefixLine] = []
        for (rank, medium), group in lowest.items():
            blocks = self._places[rank, medium, group]
            if len(blocks) <= MAX_TREE:
                lines += self._lines(blocks, (rank, medium, group))
        return tuple(sorted(lines, key=lambda line: (-line.blocks, line.hash64))[:limit])

    def _lines(self, blocks: dict[int, _Block], place: Place) -> list[PrefixLine]:
        children: defaultdict[int, list[int]] = defaultdict(list)
        roots = []
        for h, block in blocks.items():
            if block.is_rooted:
                roots.append(h)
            elif block.parent is not None:
                children[block.parent].append(h)
        lines = []
        for root in roots:
            # Events may lie: a chain that bites its tail has no root, so the walk from a root ends.
            below, stack = 0, [root]
            while stack:
                h = stack.pop()
                below += 1
                stack += children.get(h, ())
            end, depth = root, 1
            while len(children.get(end, ())) == 1:
                end, depth = children[end][0], depth + 1
            block = blocks[end]
            age_s = None if self.latest_s is None else max(0.0, self.latest_s - blocks[root].since_s)
            rank, medium, group = place
            branches = len(children.get(end, ()))
            lines.append(PrefixLine(end, depth, below, branches, block.stores, age_s, rank, group, medium))
        return lines

    def _store(self, event: Stored, rank: int, time_s: float) -> None:
        if not event.hashes:
            return
        blocks = self._places[rank, event.medium, event.group]
        before, is_first = event.parent, event.parent is None and event.is_chain
        for h in event.hashes:
            self.stored += 1
            block = blocks.get(h)
            if block is not None:
                block.copies += 1
                block.stores += 1
                if event.is_chain and block.parent is None and not block.is_rooted:
                    block.parent, block.is_rooted = before, is_first
            elif self._size < self._max_blocks:
                self._size += 1
                blocks[h] = _Block(1, before if event.is_chain else None, is_first, time_s, 1)
            else:
                self.is_full = True
            before, is_first = h, False

    def _remove(self, event: Removed, rank: int, time_s: float) -> None:
        blocks = self._places.get((rank, event.medium, event.group), {})
        for h in event.hashes:
            self.removed += 1
            block = blocks.get(h)
            if block is None:
                self.drift += 1
                continue
            block.copies -= 1
            if not block.copies:
                del blocks[h]
                self._size -= 1
                self._lives += 1
                self._life_s += max(0.0, time_s - block.since_s)
        if not blocks:
            self._places.pop((rank, event.medium, event.group), None)
