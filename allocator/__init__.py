"""allocator: a paged KV block allocator, and the engine that exercises it. A library on its own.

Start reading at ``allocator.engine`` (the loop) or ``allocator.pool`` (the blocks).
"""

from allocator.config import EngineConfig
from allocator.engine import Engine
from allocator.manager import BlockManager
from allocator.pool import BlockPool

__all__ = ["BlockManager", "BlockPool", "Engine", "EngineConfig"]
