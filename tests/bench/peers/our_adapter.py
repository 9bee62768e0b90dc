"""The allocator behind the three small interfaces of the side-by-side benchmark: POOLS, DECODES, PREFIXES.

Each table maps a subject's name to a constructor that takes the pool size. ``alloc`` and ``free`` are the
allocator's own bound methods wherever they can be, so that no wrapper's time is charged to it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np

from allocator.config import EngineConfig
from allocator.hashing import chain_keys
from allocator.manager import BlockManager
from allocator.pool import BlockPool
from allocator.storage import NoStorage

#: Tokens a block in every workload.
BLOCK_SIZE = 16
#: Where the thread-safe pool is looked for; without it the plain pool stands behind one lock.
LAYERED = ("allocator.reservation", "SharedPool")


class BarePool:
    """``BlockPool`` as it is, without a lock: what one thread costs. The driver locks it when there are more."""

    thread_safe = False

    def __init__(self, num_blocks: int) -> None:
        pool = BlockPool(num_blocks)
        self.alloc = pool.allocate
        self.free = pool.release

    def prep(self, n: int) -> int:
        """Return what ``alloc`` is called with to get ``n`` blocks."""
        return n


class LockedPool(BarePool):
    """``BlockPool`` with one lock round every call."""

    thread_safe = True

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        allocate, release, lock = self.alloc, self.free, Lock()

        def alloc(n: int) -> Any:
            with lock:
                return allocate(n)

        def free(block_ids: Any) -> int:
            with lock:
                return release(block_ids)

        self.alloc, self.free = alloc, free


class ThreadSafePool(BarePool):
    """The allocator's own thread-safe pool."""

    thread_safe = True

    def __init__(self, num_blocks: int) -> None:
        module, name = LAYERED
        pool = getattr(import_module(module), name)(BlockPool(num_blocks))
        self.alloc = pool.allocate
        self.free = pool.release


class ManagerDecode:
    """``BlockManager``: one call a step makes room for the next token of every sequence and counts it as written."""

    def __init__(self, num_blocks: int, slots: int = 256) -> None:
        self.manager = make_manager(num_blocks, prefix_cache=False)
        self.rows = np.zeros(slots, np.int64)

    def make(self, tokens: Sequence[int]) -> int:
        """Return what ``start`` needs of a request."""
        return len(tokens)

    def start(self, slot: int, num_tokens: int) -> None:
        """Give a new sequence the blocks of its prompt."""
        self.rows[slot] = self.manager.admit((), num_tokens).row

    def step(self) -> None:
        """Append one token to every sequence."""
        self.manager.append(self.rows)

    def finish(self, slot: int) -> None:
        """Free a sequence."""
        self.manager.free(int(self.rows[slot]))

    def used_blocks(self) -> int:
        """Return the blocks held."""
        return self.manager.device.num_active


class Request:
    """A prompt as a buffer of tokens, and what admitting it gave."""

    __slots__ = ("keys", "row", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int32)
        self.keys: Sequence[bytes] = ()
        self.row = -1


class ManagerPrefix:
    """``BlockManager`` with its prefix cache; ``algorithm`` as in ``chain_keys``."""

    def __init__(self, num_blocks: int, **algorithm: str) -> None:
        self.manager = make_manager(num_blocks, prefix_cache=True)
        self.algorithm = algorithm

    def raw(self, tokens: Sequence[int]) -> Request:
        """Return a request."""
        return Request(tokens)

    def hash(self, request: Request) -> None:
        """Make the keys of its full blocks."""
        request.keys = chain_keys(request.tokens, BLOCK_SIZE, **self.algorithm)  # type: ignore[arg-type]

    def admit(self, request: Request) -> int:
        """Look up, share, evict, allocate and publish; return the blocks that need no computing."""
        manager, keys, tokens = self.manager, request.keys, request.tokens
        admission = manager.admit(keys, len(tokens), tokens=tokens)
        request.row = admission.row
        first = admission.matched_blocks
        fresh = tokens[first * BLOCK_SIZE : len(keys) * BLOCK_SIZE]
        manager.publish_keys(admission.row, keys[first:], first, tokens=fresh)
        return admission.hit_blocks

    def release(self, request: Request) -> None:
        """Free its blocks, cached ones to be found again."""
        self.manager.free(request.row)


def make_manager(num_blocks: int, *, prefix_cache: bool) -> BlockManager:
    """Return a manager of a pool without storage or host tier."""
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        geometry="none",
        num_swap_blocks=0,
        prefix_cache=prefix_cache,
        watermark_ratio=0.0,
    )
    return BlockManager(config, NoStorage())


def bytes_per_block(num_blocks: int = 100_000) -> dict[str, float]:
    """Return what each flat array and each field of one copy of the block map takes. [bytes a block]"""
    manager = make_manager(num_blocks, prefix_cache=True)
    pool = manager.device
    owners = {"pool": vars(pool.facts), "free list": vars(pool._free)}
    sizes = {
        f"{owner} {name.lstrip('_')}": float(value.nbytes)
        for owner, values in owners.items()
        for name, value in values.items()
        if isinstance(value, np.ndarray) and not isinstance(value.base, np.ndarray)
    }
    arrays = manager.arrays("device")
    assert arrays is not None
    sizes |= {f"map {field.name}": float(getattr(arrays, field.name).nbytes) for field in fields(arrays)}
    return {name: size / num_blocks for name, size in sizes.items()}


def _has_layered_pool() -> bool:
    return find_spec(LAYERED[0]) is not None and hasattr(import_module(LAYERED[0]), LAYERED[1])


Subject = Callable[[int], Any]

POOLS: dict[str, Subject] = {
    "ours": ThreadSafePool if _has_layered_pool() else LockedPool,
    "ours-locked": LockedPool,
    "ours-bare": BarePool,
}
DECODES: dict[str, Subject] = {"ours": ManagerDecode}
PREFIXES: dict[str, Subject] = {"ours": ManagerPrefix}
if "algorithm" in inspect.signature(chain_keys).parameters:
    PREFIXES["ours-sha256"] = lambda num_blocks: ManagerPrefix(num_blocks, algorithm="sha256")

if __name__ == "__main__":
    print(json.dumps(bytes_per_block()))
