"""Block keys: a hash of everything up to a block's end, and a salt. Pure functions.

xxh3 in 128 bits over raw int32 tokens, chained: ten million blocks a second, and stable across
processes. It is not cryptographic, which is why the prefix cache compares tokens on a hit. SHA-256, cut to
128 bits, is for keys that leave the process, where whoever receives them has no tokens to compare.
"""

from __future__ import annotations

import copy
import hashlib
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from allocator.config import KeyHash
from allocator.ids import BlockKey


class KeyChain:
    """Makes the keys of one stream's full blocks in order, as its tokens become known.

    Args:
        block_size: Tokens a block.
        salt: Isolates tenants: other salts give other keys.
        algorithm: ``xxh3``, or ``sha256`` where keys must not be forged.
    """

    def __init__(self, block_size: int, salt: bytes = b"", algorithm: KeyHash = "xxh3") -> None:
        self._step = 4 * block_size
        self._parent = xxhash.xxh3_128_digest(salt)
        # One running hash: its digest after a block is a hash of the whole prefix.
        self._state = hashlib.sha256(hashlib.sha256(salt).digest()) if algorithm == "sha256" else None

    def extend(self, tokens: NDArray[np.int32]) -> list[BlockKey]:
        """Return the keys of the next full blocks, 16 bytes each; tokens after the last of them are left out. [n]"""
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        step, state = self._step, self._state
        pieces = struct.unpack_from(f"{step}s" * (len(data) // step), data)
        if state is None:
            digest, parent = xxhash.xxh3_128_digest, self._parent
            keys = [parent := digest(parent + piece) for piece in pieces]
            self._parent = parent
            return keys
        keys = []
        for piece in pieces:
            state.update(piece)
            keys.append(state.digest()[:16])
        return keys

    def copy(self) -> KeyChain:
        """Return a chain that goes on from here by itself."""
        other = copy.copy(self)
        other._state = None if self._state is None else self._state.copy()
        return other


def chain_keys(
    tokens: NDArray[np.int32], block_size: int, salt: bytes = b"", algorithm: KeyHash = "xxh3"
) -> list[BlockKey]:
    """Return the key of every full block of ``tokens``. [len(tokens) // block_size], 16 bytes each

    Args:
        tokens: The stream from its first token. [n] int32
        block_size: Tokens a block.
        salt: Isolates tenants: other salts give other keys.
        algorithm: As in ``KeyChain``.
    """
    return KeyChain(block_size, salt, algorithm).extend(tokens)
