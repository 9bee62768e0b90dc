"""PrefixCache: owns the relation key ↔ block, one to one. Never counts references and never evicts by itself.

Where tokens are known, equal keys are not taken for equal content. Every insertion gets a number, its
identity, and remembers its parent's; a hit must have the same tokens, and its parent must be the very
insertion that was matched before it. So a collision of keys, even in the middle of a chain whose parent has
been evicted, is a miss and never serves foreign content.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.ids import BlockKey, IdArray

#: Bytes of a key.
KEY_BYTES: Final = 16
#: Identity of the empty prefix: the parent of every first block.
ROOT: Final = 0
_NO_KEY: Final = np.zeros((), f"V{KEY_BYTES}")
_ROOT_BYTES: Final = np.int64(ROOT).tobytes()


class Inserted(NamedTuple):
    """What an insertion did.

    Attributes:
        positions: Positions that got their key; ``None`` stands for all of them.
        displaced: Blocks that lost their key, since other content now has it.
        identity: Identity of the content up to the last position, for the next insertion of the same chain.
    """

    positions: list[int] | None
    displaced: list[int]
    identity: int


class PrefixCache:
    """Finds full blocks by the key of their content.

    Args:
        num_blocks: Pool size.

    Attributes:
        num_collisions: Times a known key was found to name other content, or content whose parent is gone.
        version: Counts up whenever a key is dropped or moves, so that a match made before can be told to be stale.

    Source: block-level chain hashing as in vLLM's automatic prefix caching; the check of lineage is ours.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_collisions = 0
        self.version = 0
        self._block_of: dict[BlockKey, int] = {}
        self._keys = np.zeros(num_blocks, f"V{KEY_BYTES}")
        self._identity = np.zeros(num_blocks, np.int64)
        self._parent = np.zeros(num_blocks, np.int64)
        self._tokens: NDArray[np.void] | None = None
        self._next_identity = ROOT + 1

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[BlockKey], tokens: NDArray[np.int32] | None = None) -> list[int]:
        """Return the blocks of the longest unbroken run of known content from the first. [0..len(keys)]

        Args:
            keys: Keys of leading full blocks. [n]
            tokens: The tokens they cover, or more, to be compared with what the blocks hold; ``None`` where keys
                are exact by themselves, such as a trace's own ids.
        """
        # The iterator ends at the first key that is not known, without a loop in Python.
        blocks = list(iter(map(self._block_of.get, keys).__next__, None))
        if tokens is None or not blocks:
            return blocks
        ids = np.array(blocks, np.int64)
        lineage = self._parent.take(ids).tobytes() == _ROOT_BYTES + self._identity.take(ids[:-1]).tobytes()
        if not lineage or not self._holds(ids, tokens):
            self.num_collisions += 1
            return self._match_slowly(ids, tokens)
        return blocks

    def block_of(self, key: BlockKey) -> int | None:
        """Return the block with this key, or ``None``."""
        return self._block_of.get(key)

    def key_of(self, block_id: int) -> BlockKey | None:
        """Return the key of a block, or ``None``."""
        key = self._keys[block_id].tobytes()
        return key if self._block_of.get(key) == block_id else None

    def identity_of(self, block_id: int) -> int:
        """Return the identity of the content that gave a block its key."""
        return int(self._identity[block_id])

    def hash64(self) -> NDArray[np.uint64]:
        """Return the first 64 bits of each block's key, 0 where it has none. A view. [num_blocks]"""
        return self._keys.view(np.uint64)[::2]

    def insert(
        self,
        block_ids: IdArray,
        keys: Sequence[BlockKey],
        tokens: NDArray[np.int32] | None = None,
        parent: int = ROOT,
    ) -> Inserted:
        """Tie each key to its block; the blocks are consecutive in one sequence and have no key yet. [n], [n]

        The first block with a content keeps the key. A block with the same key but other content loses it.

        Args:
            tokens: The tokens of these blocks; ``None`` where keys are exact by themselves. [n * block_size]
            parent: Identity of the content before them.
        """
        ids = block_ids.tolist()
        first = self._next_identity
        if tokens is not None:
            # Written before the keys are known: a match without the lock must not find a key beside old facts.
            self._next_identity = first + len(ids)
            identities = np.arange(first, first + len(ids))
            self._identity[block_ids] = identities
            self._parent[block_ids] = identities - 1
            self._parent[ids[0]] = parent
            self._store(block_ids, tokens)
        owners = list(map(self._block_of.setdefault, keys, ids))
        words = np.frombuffer(b"".join(keys), self._keys.dtype)
        if owners == ids:
            self._keys[block_ids] = words
            return Inserted(None, [], ROOT if tokens is None else first + len(ids) - 1)
        if tokens is None:
            positions = [i for i, (owner, block) in enumerate(zip(owners, ids, strict=True)) if owner == block]
            self._keys[block_ids[positions]] = words[positions]
            return Inserted(positions, [], ROOT)
        return self._insert_one_by_one(block_ids, keys, tokens, parent)

    def forget(self, block_ids: IdArray) -> None:
        """Drop the keys of these blocks, which all have one, both ways at once. [n]"""
        self.version += 1
        data = self._keys[block_ids].tobytes()
        deque(map(self._block_of.pop, struct.unpack(f"{KEY_BYTES}s" * len(block_ids), data)), 0)
        self._keys[block_ids] = _NO_KEY

    def rename(self, sources: IdArray, destinations: IdArray) -> None:
        """Follow blocks that moved; no destination has a key. [n], [n]"""
        self.version += 1
        for array in self._arrays():
            array[destinations] = array[sources]
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            key = self._keys[source].tobytes()
            if self._block_of.get(key) == source:
                self._block_of[key] = destination
        self._keys[sources] = _NO_KEY

    def resize(self, num_blocks: int) -> None:
        """Follow the pool's size; blocks above a new end have no key."""
        self.version += 1
        common = min(num_blocks, len(self._keys))
        for name in ("_keys", "_identity", "_parent", "_tokens"):
            old = getattr(self, name)
            if old is not None:
                new = np.zeros(num_blocks, old.dtype)
                new[:common] = old[:common]
                setattr(self, name, new)

    def items(self) -> Iterable[tuple[int, BlockKey]]:
        """Return (block, key) pairs, in order of insertion."""
        return ((block, key) for key, block in self._block_of.items())

    def is_one_to_one(self) -> bool:
        """Return whether both directions agree."""
        blocks = np.fromiter(self._block_of.values(), np.int64, len(self._block_of))
        known = self._keys[blocks].tobytes() == b"".join(self._block_of)
        return known and len(np.unique(blocks)) == len(blocks) == int(np.count_nonzero(self.hash64()))

    # -- inside --------------------------------------------------------------------------------------

    def _arrays(self) -> list[NDArray[np.generic]]:
        arrays: list[NDArray[np.generic]] = [self._keys, self._identity, self._parent]
        return arrays if self._tokens is None else [*arrays, self._tokens]

    def _store(self, block_ids: IdArray, tokens: NDArray[np.int32]) -> None:
        data = tokens.view(f"V{tokens.nbytes // len(block_ids)}")
        if self._tokens is None:
            self._tokens = np.zeros(len(self._keys), data.dtype)
        self._tokens[block_ids] = data

    def _holds(self, block_ids: IdArray, tokens: NDArray[np.int32]) -> bool:
        """Return whether these blocks hold the leading tokens of ``tokens``."""
        if self._tokens is None:
            return False
        held = self._tokens.take(block_ids).tobytes()
        return held == tokens[: len(held) // tokens.itemsize].tobytes()

    def _match_slowly(self, block_ids: IdArray, tokens: NDArray[np.int32]) -> list[int]:
        good: list[int] = []
        parent = ROOT
        size = 0 if self._tokens is None else self._tokens.itemsize // tokens.itemsize
        for position, block in enumerate(block_ids.tolist()):
            own = tokens[position * size : (position + 1) * size]
            if size == 0 or self._parent[block] != parent or not self._holds(block_ids[position : position + 1], own):
                break
            good.append(block)
            parent = int(self._identity[block])
        return good

    def _insert_one_by_one(
        self, block_ids: IdArray, keys: Sequence[BlockKey], tokens: NDArray[np.int32], parent: int
    ) -> Inserted:
        """Insert a chain of which some keys are taken: by the same content, which stays, or by another, which goes."""
        self.version += 1
        positions: list[int] = []
        displaced: list[int] = []
        size = len(tokens) // len(keys)
        for position, (block, key) in enumerate(zip(block_ids.tolist(), keys, strict=True)):
            at, own = block_ids[position : position + 1], tokens[position * size : (position + 1) * size]
            owner = self._block_of[key]
            if owner != block:
                if self._parent[owner] == parent and self._holds(np.array([owner]), own):
                    parent = int(self._identity[owner])
                    continue
                self.num_collisions += 1
                displaced.append(owner)
                self._keys[owner] = _NO_KEY
                self._block_of[key] = block
            self._keys[block] = np.frombuffer(key, self._keys.dtype)[0]
            self._parent[block] = parent
            parent = self._identity[block] = self._next_identity
            self._next_identity += 1
            self._store(at, own)
            positions.append(position)
        # A block of this very chain may have lost its key to a later one whose key is the same.
        lost = set(displaced)
        positions = [i for i in positions if int(block_ids[i]) not in lost]
        return Inserted(positions, displaced, int(parent))
