"""allocator: a paged KV block allocator, and the engine that exercises it. A library on its own.

Start reading at ``allocator.engine`` (the loop) or ``allocator.pool`` (the blocks). The names below are
imported when first used, so that whoever wants only the vocabulary or the settings waits for nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from allocator.block_map import BlockArrays, BlockMapReader, BlockMapWriter
    from allocator.config import EngineConfig
    from allocator.content import Request, TokenContent
    from allocator.engine import Engine
    from allocator.errors import (
        AllocatorError,
        Cancelled,
        ConfigError,
        CopyCancelled,
        InvariantViolation,
        NoContiguousRun,
        NotHeld,
        OutOfBlocks,
        Refused,
        RequestError,
        SequenceGone,
        StorageError,
        UnknownSequence,
    )
    from allocator.geometry import GEOMETRIES, Geometry
    from allocator.hashing import chain_keys
    from allocator.manager import Admission, BlockManager
    from allocator.metrics import TierNumbers, tier_numbers
    from allocator.plans import CopyJob, MovePlan, Moves
    from allocator.pool import BlockPool
    from allocator.prefix_cache import PrefixCache
    from allocator.reservation import SharedPool
    from allocator.storage import NoStorage, Storage
    from allocator.torch_storage import TorchStorage

__all__ = [
    "GEOMETRIES",
    "Admission",
    "AllocatorError",
    "BlockArrays",
    "BlockManager",
    "BlockMapReader",
    "BlockMapWriter",
    "BlockPool",
    "Cancelled",
    "ConfigError",
    "CopyCancelled",
    "CopyJob",
    "Engine",
    "EngineConfig",
    "Geometry",
    "InvariantViolation",
    "MovePlan",
    "Moves",
    "NoContiguousRun",
    "NoStorage",
    "NotHeld",
    "OutOfBlocks",
    "PrefixCache",
    "Refused",
    "Request",
    "RequestError",
    "SequenceGone",
    "SharedPool",
    "Storage",
    "StorageError",
    "TierNumbers",
    "TokenContent",
    "TorchStorage",
    "UnknownSequence",
    "chain_keys",
    "tier_numbers",
]

#: Module → the public names that live there.
_HOMES: Final = {
    "block_map": ("BlockArrays", "BlockMapReader", "BlockMapWriter"),
    "config": ("EngineConfig",),
    "content": ("Request", "TokenContent"),
    "engine": ("Engine",),
    "errors": (
        "AllocatorError",
        "Cancelled",
        "ConfigError",
        "CopyCancelled",
        "InvariantViolation",
        "NoContiguousRun",
        "NotHeld",
        "OutOfBlocks",
        "Refused",
        "RequestError",
        "SequenceGone",
        "StorageError",
        "UnknownSequence",
    ),
    "geometry": ("GEOMETRIES", "Geometry"),
    "hashing": ("chain_keys",),
    "manager": ("Admission", "BlockManager"),
    "metrics": ("TierNumbers", "tier_numbers"),
    "plans": ("CopyJob", "MovePlan", "Moves"),
    "pool": ("BlockPool",),
    "prefix_cache": ("PrefixCache",),
    "reservation": ("SharedPool",),
    "storage": ("NoStorage", "Storage"),
    "torch_storage": ("TorchStorage",),
}
_HOME_OF: Final = {name: f"allocator.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
