"""The published block map: what is written is read, whole, by readers that nothing waits for."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import filled_arrays, until
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from allocator import block_map
from allocator.block_map import BYTES_PER_BLOCK, FIELDS, BlockArrays, BlockMapError, BlockMapReader, BlockMapWriter


def random_arrays(num_blocks: int, seed: int) -> BlockArrays:
    rng = np.random.default_rng(seed)
    return BlockArrays(
        **{name: rng.integers(0, np.iinfo(dtype).max, num_blocks, dtype, endpoint=True) for name, dtype in FIELDS}
    )


def same(left: BlockArrays, right: BlockArrays) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name, _ in FIELDS)


def open_writer(fd: int, engine: str = "embedded") -> BlockMapWriter:
    return BlockMapWriter(fd, engine=engine, block_size=16, block_bytes=1024, slab_size=64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "map"


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def writer(fd: int) -> Iterator[BlockMapWriter]:
    writer = open_writer(fd)
    yield writer
    writer.close()


@pytest.fixture
def reader(writer: BlockMapWriter, path: Path) -> Iterator[BlockMapReader]:
    reader = BlockMapReader(path)
    yield reader
    reader.close()


def test_a_block_takes_at_most_forty_bytes() -> None:
    assert BYTES_PER_BLOCK == 22


def test_what_is_published_is_read(writer: BlockMapWriter, reader: BlockMapReader) -> None:
    device, host = random_arrays(100, 1), random_arrays(37, 2)
    writer.publish(12, device, host)
    seen = reader.read()
    assert (seen.version, seen.step) == (1, 12)
    assert same(seen.device, device)
    assert seen.host is not None
    assert same(seen.host, host)
    assert [getattr(seen.device, name).dtype for name, _ in FIELDS] == [dtype for _, dtype in FIELDS]


@given(sizes=st.lists(st.tuples(st.integers(0, 300), st.none() | st.integers(0, 200)), min_size=1, max_size=12))
def test_pools_may_grow_shrink_and_lose_a_tier(sizes: list[tuple[int, int | None]]) -> None:
    fd = os.memfd_create("test-map")
    writer = open_writer(fd)
    reader = BlockMapReader(fd)
    try:
        for step, (num_device, num_host) in enumerate(sizes):
            device = random_arrays(num_device, step)
            host = None if num_host is None else random_arrays(num_host, step + 1000)
            writer.publish(step, device, host)
            seen = reader.read()
            assert (seen.version, seen.step) == (step + 1, step)
            assert same(seen.device, device)
            assert (seen.host is None) == (host is None)
            if host is not None and seen.host is not None:
                assert same(seen.host, host)
    finally:
        reader.close()
        writer.close()
        os.close(fd)


def test_readings_are_read_only_copies(writer: BlockMapWriter, reader: BlockMapReader) -> None:
    writer.publish(1, filled_arrays(10, 1), None)
    first = reader.read()
    assert first.host is None
    with pytest.raises(ValueError, match="read-only"):
        first.device.state[0] = 3
    for step in (2, 3, 4):
        writer.publish(step, filled_arrays(10, step), None)
    assert set(first.device.state.tolist()) == {1}


def test_the_reader_cannot_write_to_the_map(writer: BlockMapWriter, reader: BlockMapReader) -> None:
    assert not reader._header.flags.writeable


def test_growing_keeps_the_file_within_bounds(writer: BlockMapWriter, fd: int) -> None:
    for num_blocks in range(1000, 3000):
        writer.publish(num_blocks, filled_arrays(num_blocks, 1), None)
    assert os.fstat(fd).st_size < 10 * 3000 * BYTES_PER_BLOCK


def test_header_facts(fd: int) -> None:
    writer = open_writer(fd, engine="größe")
    reader = BlockMapReader(fd)
    assert reader.info == block_map.MapInfo("größe", os.getpid(), 16, 1024, 64)
    assert reader.version == 0
    reader.close()
    writer.close()


def test_a_long_engine_name_is_cut(fd: int) -> None:
    writer = open_writer(fd, engine="x" * 300)
    reader = BlockMapReader(fd)
    assert reader.info.engine == "x" * 256
    reader.close()
    writer.close()


def test_heartbeat(writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.heartbeat()
    reader.check_writer(max_age_s=60)
    beat_ns = int(reader._header["heartbeat_ns"])
    monkeypatch.setattr(block_map.time, "monotonic_ns", lambda: beat_ns + 3_500_000_000)
    assert reader.heartbeat_age_s() == 3.5
    reader.check_writer()
    with pytest.raises(BlockMapError, match=r"no sign of life from its engine \(pid \d+\) for 3.5 s"):
        reader.check_writer(max_age_s=2)


def test_a_dead_writer_is_noticed(path: Path) -> None:
    code = (
        "import os, sys; from allocator.block_map import BlockMapWriter\n"
        f"fd = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)\n"
        "BlockMapWriter(fd, engine='e', block_size=1, block_bytes=0, slab_size=1); print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        reader = BlockMapReader(path)
        reader.check_writer()
        child.kill()
        child.wait(10)
        with pytest.raises(BlockMapError, match=rf"its engine \(pid {child.pid}\) is gone"):
            reader.check_writer()
        reader.close()


def test_another_process_with_the_same_pid_is_not_the_writer(
    writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = block_map.process_start_ticks(os.getpid())
    monkeypatch.setattr(block_map, "process_start_ticks", lambda pid: ticks + 1)
    with pytest.raises(BlockMapError, match="is gone"):
        reader.check_writer()


def test_the_publication_before_is_read_by_its_step(writer: BlockMapWriter, reader: BlockMapReader) -> None:
    first, second, third = (random_arrays(50, seed) for seed in (1, 2, 3))
    writer.publish(0, first, None)
    for step in (None, 0, 5):
        assert same(reader.read(step).device, first)
    writer.publish(20, second, None)
    assert same(reader.read(0).device, first)
    assert same(reader.read(20).device, second)
    writer.publish(30, third, None)
    assert (reader.read(20).step, reader.read(30).step) == (20, 30)
    assert reader.read(0).step == 30  # overwritten: the newest there is
    writer.begin(40, 50, None)  # into the buffer of step 20
    assert reader.read(20).step == 30
    writer.finish()


def test_nothing_published_yet(reader: BlockMapReader) -> None:
    with pytest.raises(BlockMapError, match="nothing published yet"):
        reader.read()


def test_foreign_files_are_refused(path: Path, writer: BlockMapWriter) -> None:
    good = path.read_bytes()
    other = path.with_name("other")
    cases = {
        "truncated, 0 bytes": b"",
        "truncated, 100 bytes": good[:100],
        "not a kvtop block map": b"GIF89a" + good[6:],
        "with the other byte order": good[:8] + good[8:12][::-1] + good[12:],
        "damaged header": good[:8] + b"\0\1\2\3" + good[12:],
        "layout version 99, this program reads 1": good[:12] + (99).to_bytes(4, sys.byteorder) + good[16:],
    }
    for message, content in cases.items():
        other.write_bytes(content)
        with pytest.raises(BlockMapError, match=message):
            BlockMapReader(other)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BlockMapError, match="nowhere: No such file"):
        BlockMapReader(tmp_path / "nowhere")


def test_a_truncated_map_is_noticed(writer: BlockMapWriter, path: Path) -> None:
    writer.publish(1, filled_arrays(1000, 1), None)
    data = path.read_bytes()
    short = path.with_name("short")
    short.write_bytes(data)
    reader = BlockMapReader(short)
    reader.read()
    os.truncate(short, 8192)
    with pytest.raises(BlockMapError, match="truncated, 8192 bytes where"):
        reader.read()
    reader.close()


def test_no_room_to_grow_leaves_the_last_publication(
    writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.publish(1, filled_arrays(10, 1), None)

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_map.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        writer.publish(2, filled_arrays(100_000, 2), None)
    assert reader.read().step == 1
    writer.publish(3, filled_arrays(10, 3), None)
    assert reader.read().step == 3


def before_the_next_copy(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have ``act`` happen once, when a reader has chosen its buffer and has not copied yet."""
    views = block_map._views

    def interrupted(map_: mmap.mmap, offset: int, num_blocks: int) -> list[tuple[str, NDArray[Any]]]:
        monkeypatch.setattr(block_map, "_views", views)
        act()
        return views(map_, offset, num_blocks)

    monkeypatch.setattr(block_map, "_views", interrupted)


def stop_halfway(writer: BlockMapWriter, step: int, num_blocks: int) -> None:
    """Begin a publication that ends before its last field, as when the writer dies."""
    arrays = replace(filled_arrays(num_blocks, step), flags=np.zeros(num_blocks, np.float64))
    with pytest.raises(TypeError):
        writer.publish(step, arrays, None)


def test_an_overtaken_reader_reads_again(
    writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.publish(1, filled_arrays(50, 1), None)

    def overtake() -> None:
        for step in (2, 3, 4):
            writer.publish(step, filled_arrays(50, step), None)

    before_the_next_copy(monkeypatch, overtake)
    seen = reader.read()
    assert (seen.version, seen.step) == (4, 4)
    assert same(seen.device, filled_arrays(50, 4))


def test_a_publication_that_has_only_begun_overtakes_too(
    writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.publish(1, filled_arrays(50, 1), None)

    def overtake() -> None:
        writer.publish(2, filled_arrays(50, 2), None)
        stop_halfway(writer, 3, 50)

    before_the_next_copy(monkeypatch, overtake)
    seen = reader.read()
    assert (seen.version, seen.step) == (2, 2)
    assert same(seen.device, filled_arrays(50, 2))


@pytest.mark.parametrize("newest", [1, 2])
def test_growing_disturbs_no_reader(
    writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    for step in range(1, newest + 1):
        writer.publish(step, filled_arrays(50, step), None)
    before_the_next_copy(monkeypatch, lambda: writer.publish(9, filled_arrays(5000, 9), None))
    seen = reader.read()
    assert (seen.version, seen.step) == (newest, newest)
    assert same(seen.device, filled_arrays(50, newest))
    seen = reader.read()
    assert (seen.version, seen.step) == (newest + 1, 9)
    assert same(seen.device, filled_arrays(5000, 9))


def test_a_reader_that_is_always_overtaken_says_so(
    writer: BlockMapWriter, reader: BlockMapReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.publish(1, filled_arrays(5, 1), None)
    monkeypatch.setattr(BlockMapReader, "_is_overtaken", lambda self, version: True)
    with pytest.raises(BlockMapError, match="overtaken 16 times"):
        reader.read()


def test_a_writer_that_died_while_writing_leaves_the_last_publication(
    writer: BlockMapWriter, reader: BlockMapReader
) -> None:
    writer.publish(1, filled_arrays(5, 1), None)
    stop_halfway(writer, 2, 5)
    assert same(reader.read().device, filled_arrays(5, 1))


def assert_whole(seen: block_map.Publication) -> None:
    value = seen.step % 128
    for arrays in (seen.device, seen.host):
        assert arrays is not None
        for name, _ in FIELDS:
            found = np.unique(getattr(arrays, name))
            assert found.tolist() == [value], f"{name} of step {seen.step} holds {found}"


def test_readers_in_threads_never_see_a_mix(writer: BlockMapWriter, path: Path) -> None:
    """The writer never rests, the pool grows on the way, and every reading is of one publication."""
    writer.publish(0, filled_arrays(3000, 0), filled_arrays(700, 0))
    stop = threading.Event()
    faults: list[BaseException] = []
    versions: list[int] = []

    def read_on() -> None:
        reader = BlockMapReader(path)
        try:
            while not stop.is_set():
                seen = reader.read()
                assert_whole(seen)
                versions.append(seen.version)
        except BaseException as error:
            faults.append(error)
        finally:
            reader.close()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=read_on) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for step in range(1, 2000):
            writer.publish(step, filled_arrays(3000 + step, step), filled_arrays(700, step))
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join(10)
    assert not faults
    assert len(set(versions)) > 5


def test_a_reader_in_another_process_never_sees_a_mix(writer: BlockMapWriter, path: Path) -> None:
    writer.publish(0, filled_arrays(20_000, 0), filled_arrays(700, 0))
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from allocator.block_map import BlockMapReader\n"
        "from test_block_map import assert_whole\n"
        "reader = BlockMapReader(sys.argv[1]); versions = set()\n"
        "while reader.read().step < 10**6:\n"
        "    seen = reader.read(); assert_whole(seen); versions.add(seen.version)\n"
        "    if len(versions) == 300: break\n"
        "print('whole', len(versions))\n"
    )
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", code, str(path), str(here), str(here.parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        step = 0

        def write_on() -> bool:
            nonlocal step
            for _ in range(20):
                step += 1
                writer.publish(step, filled_arrays(20_000 + step % 500, step), filled_arrays(700, step))
            return child.poll() is not None

        try:
            until(write_on, 60)
        finally:
            child.kill()
        assert child.stdout is not None
        output = child.stdout.read()
    assert output == "whole 300\n", output
