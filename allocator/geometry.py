"""Model geometries: how many bytes of keys and values a token takes. Pure data.

The presets follow the published model configurations (layers, key-value heads, head
dimension). ``tiny`` is ours, small enough that a pool fits a laptop; so is ``model``, the small transformer of the
workload of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from allocator.errors import ConfigError

DTYPE_BYTES: Final = {"fp16": 2, "bf16": 2, "fp8": 1, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one token's keys and values.

    Attributes:
        name: Preset name.
        num_layers: Transformer layers that keep a cache.
        num_parts: Tensors a layer keeps: 2 for keys and values, 1 for a joint latent (MLA).
        num_heads: Key-value heads.
        head_dim: Elements a head keeps for a token.
        dtype: Element type, one of ``DTYPE_BYTES``.
    """

    name: str
    num_layers: int
    num_parts: int
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer and part."""
        return self.num_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def num_rows(self) -> int:
        """Layer-and-part pairs: how many separate rows one token has."""
        return self.num_layers * self.num_parts

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and parts."""
        return self.row_bytes * self.num_rows

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens, laid out [row, token, row_bytes]."""
        return self.token_bytes * block_size


_PRESETS: Final = (
    Geometry("tiny", 2, 2, 1, 4, "fp16"),
    Geometry("llama-3-8b", 32, 2, 8, 128, "bf16"),
    Geometry("llama-3-70b", 80, 2, 8, 128, "bf16"),
    Geometry("qwen-2.5-7b", 28, 2, 4, 128, "bf16"),
    Geometry("mistral-7b", 32, 2, 8, 128, "bf16"),
    Geometry("deepseek-v3", 61, 1, 1, 576, "bf16"),
    Geometry("model", 2, 2, 2, 16, "fp32"),
)
GEOMETRIES: Final = {g.name: g for g in _PRESETS}
#: ``none`` keeps books only: no tensors, no copies, no stamps.
GEOMETRY_NAMES: Final = ("none", *GEOMETRIES)


def find_geometry(name: str) -> Geometry | None:
    """Return the preset called ``name``, or ``None`` for ``none`` (bookkeeping only).

    Raises:
        ConfigError: No such preset.
    """
    if name == "none":
        return None
    try:
        return GEOMETRIES[name]
    except KeyError:
        raise ConfigError("--geometry", name, f"one of {', '.join(GEOMETRY_NAMES)}") from None
