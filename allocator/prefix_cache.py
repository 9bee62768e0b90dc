"""PrefixCache: owns the relation key ↔ block, one to one. Never counts references and never evicts by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allocator.ids import BlockKey


class PrefixCache:
    """Finds full blocks by the key of their content.

    Source: block-level chain hashing as in vLLM's automatic prefix caching.
    """

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the blocks of the longest unbroken run of known keys from the first. [0..len(keys)]"""
        blocks = []
        find = self._block_of.get
        for key in keys:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, key: BlockKey) -> int | None:
        """Return the block with this content, or ``None``."""
        return self._block_of.get(key)

    def key_of(self, block_id: int) -> BlockKey | None:
        """Return the key of a block, or ``None``."""
        return self._key_of.get(block_id)

    def insert(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> list[int]:
        """Tie each key to its block; return the positions where it was done. [n], [n] → [0..n]

        The first block with a content keeps the key, and a block keeps the first key it was given.
        """
        block_of, key_of = self._block_of, self._key_of
        done = []
        for position, (block, key) in enumerate(zip(block_ids, keys, strict=True)):
            if key not in block_of and block not in key_of:
                block_of[key] = block
                key_of[block] = key
                done.append(position)
        return done

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the keys of these blocks, both ways at once. Blocks without a key are passed over."""
        for block in block_ids:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def rename(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Follow blocks that moved; no destination has a key."""
        for source, destination in zip(sources, destinations, strict=True):
            key = self._key_of.pop(source, None)
            if key is not None:
                self._key_of[destination] = key
                self._block_of[key] = destination

    def items(self) -> Iterable[tuple[int, BlockKey]]:
        """Return (block, key) pairs, in order of insertion."""
        return self._key_of.items()

    def is_one_to_one(self) -> bool:
        """Return whether both directions agree."""
        return len(self._block_of) == len(self._key_of) and all(
            self._block_of.get(key) == block for block, key in self._key_of.items()
        )
