"""kvtop: an operations console for paged KV caches. Importing it loads nothing but this file.

``kvtop.attach`` lets a program use an engine's blocks; see ``kvtop.client``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtop.client import attach

__version__ = "0.1.0"
__all__ = ["__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name != "attach":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtop.client import attach

    return attach
