"""Every storage keeps the same contract: copies in any order, stamps, slabs, sizes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_storage import ListStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.errors import ConfigError, StorageError
from allocator.geometry import GEOMETRIES, Geometry
from allocator.plans import CopyJob
from allocator.storage import NoStorage, copy_runs
from allocator.torch_storage import TorchStorage

BLOCK_SIZE, SLAB = 3, 4


class StreamedStorage(TorchStorage):
    """TorchStorage on the path that a GPU takes, the stream aside."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=self._count)
        self.synchronized = 0

    def _count(self) -> None:
        self.synchronized += 1


def make_torch() -> TorchStorage:
    return TorchStorage(GEOMETRIES["tiny"], BLOCK_SIZE, "cpu", SLAB)


def make_streamed() -> TorchStorage:
    return StreamedStorage(GEOMETRIES["tiny"], BLOCK_SIZE, "cpu", SLAB)


def make_odd() -> TorchStorage:
    """Rows of 24 bytes, one part, three layers."""
    return TorchStorage(Geometry("odd", 3, 1, 3, 2, "fp32"), BLOCK_SIZE, "cpu", SLAB)


@pytest.fixture(params=[make_torch, make_streamed, make_odd, lambda: ListStorage(BLOCK_SIZE)], ids=str)
def storage(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    storage = request.param()
    yield storage
    storage.close()


def stamps_of(blocks: np.ndarray, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
    return slots, (slots + 1 + 1000 * salt).astype(np.uint64)


def fill(storage, tier: str, num_blocks: int, salt: int) -> None:
    storage.resize(tier, num_blocks)
    storage.write_stamps(tier, *stamps_of(np.arange(num_blocks), salt))


def holds(storage, tier: str, blocks, stamped_as, salt: int) -> bool:
    slots, _ = stamps_of(np.asarray(blocks, np.int64))
    _, stamps = stamps_of(np.asarray(stamped_as, np.int64), salt)
    return bool(storage.check_stamps(tier, slots, stamps).all())


def test_stamps_read_back_slot_by_slot(storage):
    fill(storage, "device", 10, 1)
    slots, stamps = stamps_of(np.arange(10), 1)
    assert storage.check_stamps("device", slots, stamps).all()
    order = np.random.default_rng(0).permutation(len(slots))
    wrong = stamps[order].copy()
    wrong[[2, 7]] += 1
    good = storage.check_stamps("device", slots[order], wrong)
    assert np.flatnonzero(~good).tolist() == [2, 7]
    assert storage.check_stamps("device", slots[:0], stamps[:0]).tolist() == []


@pytest.mark.parametrize("seed", range(12))
def test_copies_within_and_between_tiers(storage, seed):
    rng = np.random.default_rng(seed)
    fill(storage, "device", 13, 1)
    fill(storage, "host", 7, 2)
    ids = rng.permutation(13)
    n = int(rng.integers(0, 7))
    moved = storage.copy(CopyJob("device", ids[:n], "device", ids[n : 2 * n]))
    assert moved == n * storage.block_bytes
    assert holds(storage, "device", ids[n : 2 * n], ids[:n], 1)
    assert holds(storage, "device", ids[2 * n :], ids[2 * n :], 1)
    assert holds(storage, "device", ids[:n], ids[:n], 1)
    host = rng.permutation(7)
    storage.copy(CopyJob("device", ids[:n], "host", host[:n]))
    assert holds(storage, "host", host[:n], ids[:n], 1)
    assert holds(storage, "host", host[n:], host[n:], 2)
    storage.copy(CopyJob("host", host[n:], "device", ids[: 7 - n]))
    assert holds(storage, "device", ids[: 7 - n], host[n:], 2)


def test_growing_and_shrinking_keep_what_stays(storage):
    fill(storage, "device", 5, 1)
    storage.resize("device", 14)
    assert holds(storage, "device", range(5), range(5), 1)
    storage.write_stamps("device", *stamps_of(np.arange(5, 14), 1))
    storage.resize("device", 9)
    assert holds(storage, "device", range(9), range(9), 1)
    storage.resize("device", 0)
    storage.resize("device", 3)
    fill(storage, "device", 3, 4)
    assert holds(storage, "device", range(3), range(3), 4)


def test_whole_slabs_are_given_back_and_a_cut_one_is_kept():
    storage = make_torch()
    sizes = [storage.resize("device", n) or storage.num_slabs("device") for n in (0, 1, 4, 5, 12, 13, 9, 8, 7, 0)]
    assert sizes == [0, 1, 1, 2, 3, 4, 3, 2, 2, 0]
    assert storage.num_slabs("host") == 0
    storage.resize("host", 5)
    storage.close()
    assert storage.num_slabs("host") == 0


def test_a_mixed_up_layer_is_seen():
    storage = make_torch()
    fill(storage, "device", 2, 1)
    words = np.asarray(storage._words("device", 0))  # [block, row, offset, word], the storage's own memory
    words[1, [0, 1], 2, 0] = words[1, [1, 0], 2, 0]
    slots, stamps = stamps_of(np.arange(2), 1)
    assert np.flatnonzero(~storage.check_stamps("device", slots, stamps)).tolist() == [5]


def test_a_stream_is_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    storage = make_streamed()
    fill(storage, "device", 4, 1)
    storage.copy(CopyJob("device", np.array([0]), "device", np.array([1])))
    assert storage.synchronized == 1


def test_no_memory_is_a_storage_error_and_the_size_stays(monkeypatch):
    storage = make_torch()
    fill(storage, "device", 5, 1)
    real, calls = torch.frombuffer, []

    def frombuffer(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("out of memory\nand a long trace")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "frombuffer", frombuffer)
    with pytest.raises(StorageError, match=r"^no memory for 20 device blocks of 96 bytes: out of memory$"):
        storage.resize("device", 20)
    assert storage.num_slabs("device") == 2
    assert holds(storage, "device", range(5), range(5), 1)


def test_a_copy_outside_the_slabs_is_a_storage_error():
    storage = make_torch()
    storage.resize("device", 4)
    with pytest.raises(StorageError, match="copying 1 blocks failed"):
        storage.copy(CopyJob("device", np.array([0]), "device", np.array([9])))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match=f"--device {name}: this machine has 0 CUDA devices"):
        TorchStorage(GEOMETRIES["tiny"], 16, name, 4)


def test_auto_takes_what_there_is():
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert TorchStorage(GEOMETRIES["tiny"], 16, "auto", 4).device_name == expected


def test_no_storage_keeps_nothing():
    storage = NoStorage()
    storage.resize("device", 100)
    assert storage.copy(CopyJob("device", np.array([0]), "host", np.array([1]))) == 0
    assert (storage.block_bytes, storage.num_slabs("device"), storage.device_name) == (0, 0, "none")


@pytest.mark.parametrize("name", GEOMETRIES)
def test_block_bytes_follow_the_geometry(name):
    geometry = GEOMETRIES[name]
    assert geometry.block_bytes(16) == 16 * geometry.token_bytes == 16 * geometry.num_rows * geometry.row_bytes
    assert geometry.row_bytes % 8 == 0  # room for a stamp
    assert GEOMETRIES["tiny"].token_bytes <= 64


@given(st.data(), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=150)
def test_copy_runs_are_the_fewest_and_stay_within_slabs(data, source_slab, destination_slab):
    n = data.draw(st.integers(0, 20))
    near = st.permutations(range(max(n, 1)))  # dense, so that runs happen
    sources = data.draw(st.one_of(st.just(list(range(n))), near))[:n]
    destinations = [b + 30 for b in data.draw(st.one_of(st.just(sources), near))[:n]]
    runs = copy_runs(np.array(sources, np.int64), np.array(destinations, np.int64), source_slab, destination_slab)
    pairs = dict(zip(sources, destinations, strict=True))
    assert {s + i: d + i for s, d, length in runs for i in range(length)} == pairs
    assert sum(length for _, _, length in runs) == n
    assert [s for s, _, _ in runs] == sorted(s for s, _, _ in runs)
    for s, d, length in runs:
        assert s // source_slab == (s + length - 1) // source_slab
        assert d // destination_slab == (d + length - 1) // destination_slab
    heads = sum(
        pairs.get(s - 1) != d - 1 or s % source_slab == 0 or d % destination_slab == 0 for s, d in pairs.items()
    )
    assert len(runs) == heads


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
SHAPES = [GEOMETRIES["model"], Geometry("one part", 3, 1, 2, 4, "bf16")]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("geometry", SHAPES, ids=str)
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("table", [[2], [0, 1, 2, 3], [9, 1, 5, 4, 0], [6, 7, 2]], ids=str)
def test_pages_find_each_token_through_the_block_table(table, tier, geometry, device):
    storage = TorchStorage(geometry, BLOCK_SIZE, device, SLAB)
    storage.resize(tier, 10)
    pages = storage.pages(tier, np.array(table))
    shape = (geometry.num_parts, geometry.num_heads, geometry.head_dim)
    written = {}
    for position in range(len(table) * BLOCK_SIZE):
        for layer in range(geometry.num_layers):
            values = torch.randn(shape).to(storage.elements(tier, 0))
            written[layer, position] = values
            pages.write(layer, position, values)
    for layer in range(geometry.num_layers):
        for count in range(1, len(table) * BLOCK_SIZE + 1):
            found = storage.pages(tier, np.array(table)).read(layer, count)
            assert torch.equal(found, torch.stack([written[layer, p] for p in range(count)], 1))
    # The same numbers, found without pages.
    for (layer, position), values in written.items():
        slab, local = divmod(table[position // BLOCK_SIZE], SLAB)
        assert torch.equal(storage.elements(tier, slab)[local, layer, :, position % BLOCK_SIZE], values)
    storage.close()
