"""allocator: a paged KV block allocator, and the engine that exercises it. A library on its own.

Start reading at ``allocator.engine`` (the loop) or ``allocator.pool`` (the blocks). The names below are
imported when first used, so that whoever wants only the vocabulary or the settings waits for nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from allocator.config import EngineConfig
    from allocator.engine import Engine
    from allocator.manager import BlockManager
    from allocator.pool import BlockPool

__all__ = ["BlockManager", "BlockPool", "Engine", "EngineConfig"]

_HOMES: Final = {
    "BlockManager": "allocator.manager",
    "BlockPool": "allocator.pool",
    "Engine": "allocator.engine",
    "EngineConfig": "allocator.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
