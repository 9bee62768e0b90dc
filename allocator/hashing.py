"""Block keys: a hash of the parent's key, the block's tokens and a salt. Pure functions.

xxh3 in 128 bits over raw int32 tokens, chained: ten million blocks a second, and stable
across processes. It is not cryptographic: equal keys are taken for equal content.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from allocator.ids import BlockKey


def chain_keys(tokens: NDArray[np.int32], block_size: int, salt: bytes = b"") -> list[BlockKey]:
    """Return the key of every full block of ``tokens``. [len(tokens) // block_size]

    Args:
        tokens: The stream from its first token. [n] int32
        block_size: Tokens a block.
        salt: Isolates tenants: other salts give other keys.
    """
    data = np.ascontiguousarray(tokens, np.int32).data.cast("B")
    step = 4 * block_size
    digest = xxhash.xxh3_128_digest
    parent = digest(salt)
    keys = []
    for start in range(0, len(data) - step + 1, step):
        parent = digest(parent + data[start : start + step])
        keys.append(parent)
    return keys
