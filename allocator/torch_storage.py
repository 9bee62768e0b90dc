"""TorchStorage: keys and values as torch tensors in slabs, on a CPU or a GPU. The allocator's one import of torch.

A block is one contiguous piece, laid out [row, token, element], where a row is one layer's keys or
values; so moving a block is one copy whatever the model.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from allocator.content import mix64
from allocator.errors import ConfigError, StorageError
from allocator.geometry import Geometry
from allocator.ids import Tier
from allocator.plans import CopyJob
from allocator.storage import copy_runs

_STAMP_BYTES = 8
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}


class Pages:
    """One sequence's keys and values as a model sees them: by layer and position, found through its block table.

    Holds while the table and the pool stay as they are, so make it anew in every step.

    Args:
        storage: Where they lie.
        tier: In which tier.
        block_ids: The sequence's block table. [n]
    """

    def __init__(self, storage: TorchStorage, tier: Tier, block_ids: NDArray[np.int64]) -> None:
        geometry = storage.geometry
        self._block_size, self._parts = storage.block_size, geometry.num_parts
        self._token_shape = (geometry.num_heads, geometry.head_dim)
        layers, n = geometry.num_layers, len(block_ids)
        slabs, local = np.divmod(block_ids, storage.slab_size)
        self._places = list(zip(slabs.tolist(), local.tolist(), strict=True))
        self._elements: dict[int, torch.Tensor] = {}
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        order = []
        # Where each layer's parts of each block are, in rows of one part of one block: [layer, part, block].
        wanted = np.arange(layers * self._parts).reshape(layers, self._parts, 1)
        for slab in np.flatnonzero(np.bincount(slabs)).tolist():
            elements = storage.elements(tier, slab)
            chosen = np.flatnonzero(slabs == slab)
            rows = (local[chosen] * (layers * self._parts) + wanted).reshape(layers, -1)
            self._elements[slab] = elements
            self._pieces.append((elements.view(-1, elements[0, 0, 0].numel()), _index(rows, elements.device)))
            order.append((np.arange(self._parts)[:, None] * n + chosen).ravel())
        # The pieces of several slabs come one after the other; this puts their rows in order.
        self._order = None if len(order) < 2 else _index(np.argsort(np.concatenate(order)), elements.device)

    def write(self, layer: int, position: int, values: torch.Tensor) -> None:
        """Write one token's keys and values of a layer. [parts, heads, head_dim]"""
        block, offset = divmod(position, self._block_size)
        slab, local = self._places[block]
        self._elements[slab][local, layer, :, offset] = values

    def read(self, layer: int, num_tokens: int) -> torch.Tensor:
        """Return the first tokens' keys and values of a layer, gathered block by block.

        Returns:
            A copy. [parts, num_tokens, heads, head_dim]
        """
        found = [rows.index_select(0, index[layer]) for rows, index in self._pieces]
        gathered = found[0] if self._order is None else torch.cat(found).index_select(0, self._order)
        return gathered.view(self._parts, -1, *self._token_shape)[:, :num_tokens]


class TorchStorage:
    """Slabs of ``uint8`` tensors, [slab_blocks, block_bytes], for each tier.

    Growing adds slabs without copying; shrinking drops whole slabs above the end. Memory is not
    touched before it is written, so an unused slab costs address space only.

    Args:
        geometry: Bytes a token takes.
        block_size: Tokens a block.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:i``.
        slab_size: Blocks a slab.

    Raises:
        ConfigError: The device does not exist here, or stamps do not fit into a row of this geometry.
    """

    def __init__(self, geometry: Geometry, block_size: int, device: str, slab_size: int) -> None:
        if geometry.row_bytes % _STAMP_BYTES:
            raise ConfigError("--geometry", geometry.name, f"rows of a multiple of {_STAMP_BYTES} bytes")
        self.geometry = geometry
        self.block_size = block_size
        self.block_bytes = geometry.block_bytes(block_size)
        self.slab_size = slab_size
        self._device = _find_device(device)
        self.device_name = str(self._device)
        self._slabs: dict[Tier, list[torch.Tensor]] = {"device": [], "host": []}
        self._row_salts = mix64(np.arange(geometry.num_rows, dtype=np.uint64))
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def resize(self, tier: Tier, num_blocks: int) -> None:
        slabs = self._slabs[tier]
        needed = -(-num_blocks // self.slab_size)
        fresh: list[torch.Tensor] = []
        try:
            while len(slabs) + len(fresh) < needed:
                fresh.append(self._new_slab(tier))
        except (RuntimeError, OSError, OverflowError) as error:
            raise StorageError(
                f"no memory for {num_blocks} {tier} blocks of {self.block_bytes} bytes: {str(error).splitlines()[0]}"
            ) from error
        slabs += fresh
        del slabs[needed:]

    def num_slabs(self, tier: Tier) -> int:
        return len(self._slabs[tier])

    def copy(self, job: CopyJob) -> int:
        runs = copy_runs(job.sources, job.destinations, self.slab_size, self.slab_size)
        source_slabs, destination_slabs = self._slabs[job.source_tier], self._slabs[job.destination_tier]
        try:
            if self._stream is None:
                # numpy's row assignment is a plain memcpy; torch's dispatch costs twice as much for small blocks.
                from_arrays = [slab.numpy() for slab in source_slabs]
                to_arrays = [slab.numpy() for slab in destination_slabs]
                for source, destination, n in runs:
                    src_slab, src = divmod(source, self.slab_size)
                    dst_slab, dst = divmod(destination, self.slab_size)
                    if n == 1:
                        to_arrays[dst_slab][dst] = from_arrays[src_slab][src]
                    else:
                        to_arrays[dst_slab][dst : dst + n] = from_arrays[src_slab][src : src + n]
            else:
                self._copy_on_stream(runs, source_slabs, destination_slabs)
        except (RuntimeError, IndexError, ValueError) as error:
            raise StorageError(f"copying {len(job.sources)} blocks failed: {error}") from error
        return len(job.sources) * self.block_bytes

    def _copy_on_stream(
        self, runs: list[tuple[int, int, int]], sources: list[torch.Tensor], destinations: list[torch.Tensor]
    ) -> None:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, destination, n in runs:
                src_slab, src = divmod(source, self.slab_size)
                dst_slab, dst = divmod(destination, self.slab_size)
                destinations[dst_slab][dst : dst + n].copy_(sources[src_slab][src : src + n], non_blocking=True)
        self._stream.synchronize()

    def write_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> None:
        for slab, block, offset, chosen in self._locate(slots):
            words = self._words(tier, slab)
            expected = self._expected(stamps[chosen])
            if isinstance(words, torch.Tensor):
                words[block, :, offset, 0] = torch.from_numpy(expected).to(words.device)
            else:
                words[block, :, offset, 0] = expected

    def check_stamps(self, tier: Tier, slots: NDArray[np.int64], stamps: NDArray[np.uint64]) -> NDArray[np.bool_]:
        good = np.zeros(len(slots), bool)
        for slab, block, offset, chosen in self._locate(slots):
            found = self._words(tier, slab)[block, :, offset, 0]
            if isinstance(found, torch.Tensor):
                found = found.cpu().numpy()
            good[chosen] = (found == self._expected(stamps[chosen])).all(axis=1)
        return good

    def flip_bit(self, tier: Tier, slot: int, bit: int) -> None:
        block, offset = divmod(slot, self.block_size)
        slab, local = divmod(block, self.slab_size)
        row, at = divmod(bit, 8 * _STAMP_BYTES)
        mask = int(np.uint64(1 << at).view(np.int64))
        self._words(tier, slab)[local, row % self.geometry.num_rows, offset, 0] ^= mask

    def pages(self, tier: Tier, block_ids: NDArray[np.int64]) -> Pages:
        """Return the keys and values behind a block table of at least one block. [n]"""
        return Pages(self, tier, block_ids)

    def elements(self, tier: Tier, slab: int) -> torch.Tensor:
        """Return a slab as numbers, a view: [slab_blocks, layers, parts, block_size, heads, head_dim]."""
        g = self.geometry
        shape = (self.slab_size, g.num_layers, g.num_parts, self.block_size, g.num_heads, g.head_dim)
        return self._slabs[tier][slab].view(_DTYPES[g.dtype]).view(shape)

    def close(self) -> None:
        for slabs in self._slabs.values():
            slabs.clear()

    def _new_slab(self, tier: Tier) -> torch.Tensor:
        shape = (self.slab_size, self.block_bytes)
        if self._device.type == "cuda":
            if tier == "device":
                return torch.empty(shape, dtype=torch.uint8, device=self._device)
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        # A mapping of its own goes back to the system with the tensor; the C library keeps freed slabs for itself
        # once a pool has shrunk and grown.
        mapping = mmap.mmap(-1, self.slab_size * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=torch.uint8).view(shape)

    def _words(self, tier: Tier, slab: int) -> torch.Tensor | NDArray[np.int64]:
        """Return a slab as 64-bit words: [slab_blocks, rows, block_size, words a row].

        A CPU slab comes as an array over the same memory: torch's indexing costs many times numpy's here.
        """
        geometry = self.geometry
        shape = (self.slab_size, geometry.num_rows, self.block_size, geometry.row_bytes // _STAMP_BYTES)
        words = self._slabs[tier][slab].view(torch.int64).view(shape)
        return words if words.is_cuda else words.numpy()

    def _expected(self, stamps: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return each slot's word in every row, so that a mix-up of layers shows too. [n] → [n, rows]"""
        words: NDArray[np.int64] = (stamps[:, None] ^ self._row_salts[None, :]).view(np.int64)
        return words

    def _locate(
        self, slots: NDArray[np.int64]
    ) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Return (slab, block in it, offset in block, positions in ``slots``) for each slab touched."""
        blocks, offsets = np.divmod(slots, self.block_size)
        slabs, local = np.divmod(blocks, self.slab_size)
        found = []
        for slab in np.flatnonzero(np.bincount(slabs)).tolist():
            chosen = np.flatnonzero(slabs == slab)
            found.append((slab, local[chosen], offsets[chosen], chosen))
        return found


def _index(positions: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(positions).to(device)


def _find_device(name: str) -> torch.device:
    """Return the torch device that ``name`` asks for; ``auto`` takes the first GPU, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError("--device", name, f"this machine has {count} CUDA devices; use cpu or auto")
    return torch.device("cuda", index)
