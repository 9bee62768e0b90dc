"""Block keys: a hash of everything up to a block's end, and a salt. Pure functions.

xxh3 in 128 bits over raw int32 tokens, chained: ten million blocks a second, and stable across
processes. It is not cryptographic, which is why the prefix cache compares tokens on a hit. SHA-256, cut to
128 bits, is for keys that leave the process, where whoever receives them has no tokens to compare.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from allocator.config import KeyHash
from allocator.ids import BlockKey


def chain_keys(
    tokens: NDArray[np.int32], block_size: int, salt: bytes = b"", algorithm: KeyHash = "xxh3"
) -> list[BlockKey]:
    """Return the key of every full block of ``tokens``. [len(tokens) // block_size], 16 bytes each

    Args:
        tokens: The stream from its first token. [n] int32
        block_size: Tokens a block.
        salt: Isolates tenants: other salts give other keys.
        algorithm: ``xxh3``, or ``sha256`` where keys must not be forged.
    """
    data = np.ascontiguousarray(tokens, np.int32).tobytes()
    step = 4 * block_size
    pieces = struct.unpack_from(f"{step}s" * (len(data) // step), data)
    if algorithm == "xxh3":
        digest = xxhash.xxh3_128_digest
        parent = digest(salt)
        return [parent := digest(parent + piece) for piece in pieces]
    # One running hash: its digest after a block is a hash of the whole prefix.
    state = hashlib.sha256(hashlib.sha256(salt).digest())
    keys = []
    for piece in pieces:
        state.update(piece)
        keys.append(state.digest()[:16])
    return keys
