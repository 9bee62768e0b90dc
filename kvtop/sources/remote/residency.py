"""Residency: which blocks an engine's events say are cached, how many copies, and the tree of prefixes they form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from allocator.block_map import BlockArrays
from allocator.config import STEP_S
from allocator.ids import Tier
from kvtop.model.mirror import MirrorBlock, MirrorPlace, MirrorReading
from kvtop.model.remote import PrefixLine
from kvtop.sources.remote.kv_events import Batch, Cleared, Removed, Stored
from kvtop.sources.remote.lookups import Lookups
from kvtop.sources.remote.placement import DEVICE, Medium, Region, arrays_of, places_of

#: Resident blocks kept at most: events are somebody's word, and memory is ours.
MAX_BLOCKS: Final = 4_000_000
#: Prefixes told, and resident blocks above which they are no longer worked out.
MAX_PREFIXES: Final = 32
MAX_TREE: Final = 200_000
#: Resident blocks above which those that follow one block are no longer counted.
MAX_COUNTED: Final = 50_000

#: Rank, medium, group.
Place = tuple[int, str, int]


@dataclass(slots=True)
class _Block:
    copies: int
    parent: int | None
    is_rooted: bool
    since_s: float
    stores: int
    places: list[int]
    is_followed: bool = False


class Residency:
    """The cached blocks of all ranks. Copies are counted: the same hash may be stored twice and removed once.

    Attributes:
        stored, removed, cleared: Block copies stored and removed, and clears.
        drift: Removals of blocks that were not known to be there.
        is_full: Whether blocks were left out on account of ``MAX_BLOCKS``.
        earliest_s, latest_s: Times of the first and the newest batch, by the engine's clock.
        version: Changes whenever something is stored, removed or forgotten.
        block_size: Tokens a block, as last told; 0 when not told.
        lookups: What the device's events imply of the requests, by rank.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.stored = self.removed = self.cleared = self.drift = 0
        self.is_full = False
        self.earliest_s: float | None = None
        self.latest_s: float | None = None
        self.version = self.block_size = 0
        self._max_blocks = max_blocks
        self._places: defaultdict[Place, dict[int, _Block]] = defaultdict(dict)
        self._regions: defaultdict[Medium, Region] = defaultdict(Region)
        self._owners = 0
        self.lookups: dict[int, Lookups] = {}
        self._chained: dict[int, int] = {}
        self._size = 0
        self._lives = 0
        self._life_s = 0.0

    def apply(self, batch: Batch, rank: int) -> None:
        """Take over one batch of a rank."""
        self.version += 1
        if self.earliest_s is None:
            self.earliest_s = batch.time_s
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
            self._regions.pop(place[:2], None)
        if rank in self.lookups:
            self.lookups[rank].forget()
        self.version += 1
        if not self._size:
            self.is_full = False

    def copies(self) -> dict[tuple[int, str, int, int], int]:
        """Return (rank, medium, group, hash) → copies of all resident blocks."""
        return {(*place, h): block.copies for place, blocks in self._places.items() for h, block in blocks.items()}

    def by_medium(self) -> tuple[tuple[str, int, int], ...]:
        """Return (medium, rank, resident copies), the device first."""
        count = {(medium, rank): region.resident for (rank, medium), region in self._regions.items() if region.resident}
        order = sorted(count, key=lambda key: (key[0] != DEVICE, key))
        return tuple((medium, rank, count[medium, rank]) for medium, rank in order)

    @property
    def distinct(self) -> int:
        """Distinct hashes over all places."""
        if len(self._places) == 1:
            return len(next(iter(self._places.values())))
        return len(set().union(*self._places.values())) if self._places else 0

    @property
    def top(self) -> int:
        """Most blocks of one rank that were on the device at once."""
        return max((region.top for (_, medium), region in self._regions.items() if medium == DEVICE), default=0)

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
        region = self._regions[rank, event.medium]
        # Of several groups that cache one chain, the first that tells it stands for all.
        if event.is_chain and event.medium == DEVICE and self._chained.setdefault(rank, event.group) == event.group:
            found = self.lookups.setdefault(rank, Lookups())
            for h in found.store(event, time_s, blocks.__contains__, lambda h: _chain(blocks, h)):
                for at in blocks[h].places:
                    region.last_s[at] = time_s
        before, is_first = event.parent, event.parent is None and event.is_chain
        owner, tokens = self._owner_behind(blocks, region, before, time_s), event.block_size if event.is_chain else 0
        if event.block_size:
            self.block_size = event.block_size
        for h in event.hashes:
            self.stored += 1
            block = blocks.get(h)
            if block is None:
                if self._size >= self._max_blocks:
                    self.is_full = True
                    before, is_first = h, False
                    continue
                self._size += 1
                block = blocks[h] = _Block(0, before if event.is_chain else None, is_first, time_s, 0, [])
            elif event.is_chain and block.parent is None and not block.is_rooted:
                block.parent, block.is_rooted = before, is_first
            block.copies += 1
            block.stores += 1
            block.places.append(region.place(h, event.group, owner, tokens, time_s))
            if h is not event.hashes[-1]:
                block.is_followed = True
            before, is_first = h, False

    def _owner_behind(self, blocks: dict[int, _Block], region: Region, parent: int | None, time_s: float) -> int:
        """Return the number of the branch that goes on behind ``parent``: its own for the first, else a new one."""
        block = blocks.get(parent) if parent is not None else None
        if block is not None:
            for at in block.places:
                region.last_s[at] = time_s
            if not block.is_followed:
                block.is_followed = True
                return region.owners[block.places[0]]
        self._owners += 1
        return self._owners

    def _remove(self, event: Removed, rank: int, time_s: float) -> None:
        blocks = self._places.get((rank, event.medium, event.group), {})
        region = self._regions.get((rank, event.medium))
        for h in event.hashes:
            self.removed += 1
            block = blocks.get(h)
            if block is None or region is None:
                self.drift += 1
                continue
            block.copies -= 1
            region.leave(block.places.pop())
            if not block.copies:
                del blocks[h]
                self._size -= 1
                self._lives += 1
                self._life_s += max(0.0, time_s - block.since_s)
        if not blocks:
            self._places.pop((rank, event.medium, event.group), None)

    # -- the mirror ----------------------------------------------------------------------------------

    def mirror(self, sizes: Mapping[int, int], state: str, before: MirrorReading | None = None) -> MirrorReading:
        """Return the resident blocks as a map.

        Args:
            sizes: Blocks of the device by rank, where the engine tells it.
            state: Whether that is all.
            before: The last reading: its arrays are used again if nothing has changed.
        """
        places = places_of(self._regions, sizes)
        if before is not None and before.version == self.version and before.places == places:
            return replace(before, state=state, block=None)
        base_s = self.earliest_s or 0.0
        device = arrays_of("device", places, self._regions, base_s)
        return MirrorReading(
            self.version,
            BlockArrays.empty(0) if device is None else device,
            arrays_of("host", places, self._regions, base_s),
            places,
            self.block_size,
            max(0, int(((self.latest_s or base_s) - base_s) / STEP_S)),
            state,
        )

    def block_at(self, tier: Tier, block_id: int, places: Sequence[MirrorPlace]) -> MirrorBlock | None:
        """Return what is known of the block that is drawn at ``block_id``; ``None`` if there is none."""
        place = next((p for p in places if p.tier == tier and p.first <= block_id < p.first + p.size), None)
        region = None if place is None else self._regions.get((place.rank, place.medium))
        at = block_id - place.first if place is not None else 0
        if place is None or region is None or not region.is_taken(at):
            return None
        h, group = region.hashes[at], region.groups[at]
        blocks = self._places[place.rank, place.medium, group]
        block, now_s = blocks[h], self.latest_s or 0.0
        here = (place.rank, place.medium)
        groups = sorted(key[2] for key, found in self._places.items() if key[:2] == here and h in found)
        return MirrorBlock(
            tier,
            block_id,
            h,
            block.parent,
            block.is_rooted,
            None if (chain := _chain(blocks, h)) is None else len(chain),
            region.tokens(at) or None,
            block.copies,
            tuple(groups),
            sum(1 for other in blocks.values() if other.parent == h) if len(blocks) <= MAX_COUNTED else None,
            block.stores,
            max(0.0, now_s - block.since_s),
            max(0.0, now_s - region.last_s[at]),
        )


def _chain(blocks: Mapping[int, _Block], h: int) -> list[int] | None:
    """Return the blocks from the first one to this one; ``None`` when its beginning is not there, or if it has none."""
    chain: list[int] = []
    block = blocks.get(h)
    while block is not None and len(chain) <= len(blocks):
        chain.append(h)
        if block.is_rooted:
            return chain[::-1]
        if block.parent is None:
            return None
        h, block = block.parent, blocks.get(block.parent)
    return None
