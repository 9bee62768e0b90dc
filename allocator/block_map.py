"""BlockArrays: the per-block facts of one tier as flat arrays, and the published map that carries them.

The map is a file, mapped shared: one header page, then two buffers. One writer fills the buffer that
was not finished last; readers copy out of the finished one. Neither ever waits for the other. The
counters ``started`` and ``finished`` say which publication is being written and which is complete;
publication ``n`` lies in buffer ``n % 2``, so a reader that copied publication ``n`` was overtaken
only if publication ``n + 2`` has started, and then reads again.

Each buffer's record names its place in the file. A pool that outgrows its buffers gets new ones at
the end of the file; the old place is never written again, so a reader that is still copying there is safe.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from allocator.errors import AllocatorError

#: name → dtype of each published array, in file order: 22 bytes a block. Widest first, so that all are aligned.
FIELDS: Final = (
    ("hash64", np.dtype(np.uint64)),
    ("owner", np.dtype(np.int32)),
    ("last_used", np.dtype(np.uint32)),
    ("ref_count", np.dtype(np.uint16)),
    ("fill", np.dtype(np.uint16)),
    ("state", np.dtype(np.uint8)),
    ("flags", np.dtype(np.uint8)),
)
BYTES_PER_BLOCK: Final = sum(dtype.itemsize for _, dtype in FIELDS)

MAGIC: Final = b"kvtopmap"
LAYOUT_VERSION: Final = 1
_BYTE_ORDER_MARK: Final = 0x01020304
_FOREIGN_MARK: Final = 0x04030201
#: In ``host_blocks``: there is no host tier.
_NO_TIER: Final = (1 << 64) - 1
_PAGE: Final = 4096
#: Times a reader starts again after being overtaken.
_TRIES: Final = 16

_BUFFER: Final = np.dtype(
    [
        ("offset", np.uint64),
        ("step", np.uint64),
        ("device_blocks", np.uint64),
        ("host_blocks", np.uint64),
    ]
)
_HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("byte_order", np.uint32),
        ("layout_version", np.uint32),
        ("pid", np.uint64),
        ("start_ticks", np.uint64),
        ("heartbeat_ns", np.uint64),
        ("block_size", np.uint64),
        ("block_bytes", np.uint64),
        ("slab_size", np.uint64),
        ("capacity_blocks", np.uint64),
        ("started", np.uint64),
        ("finished", np.uint64),
        ("buffers", _BUFFER, (2,)),
        ("engine", "S256"),
    ]
)


class BlockMapError(AllocatorError):
    """A block map cannot be read: not one, of another layout, damaged, or its writer is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockArrays:
    """What every block of one tier is, at one step boundary. Read-only to observers.

    Attributes:
        state: ``BlockState`` of each block. [n] uint8
        flags: ``BlockFlag`` bits. [n] uint8
        ref_count: Block-table entries naming it, saturating at 65535. [n] uint16
        fill: Tokens in the block. [n] uint16
        owner: Sequence row of a holder, ``NO_ROW`` when none. [n] int32
        last_used: Step in which its last holder gave it back; what has a holder is in use. [n] uint32
        hash64: First 64 bits of its key, 0 when it has none. [n] uint64
    """

    state: NDArray[np.uint8]
    flags: NDArray[np.uint8]
    ref_count: NDArray[np.uint16]
    fill: NDArray[np.uint16]
    owner: NDArray[np.int32]
    last_used: NDArray[np.uint32]
    hash64: NDArray[np.uint64]

    @staticmethod
    def empty(num_blocks: int) -> BlockArrays:
        """Return arrays for ``num_blocks`` blocks, yet to be written."""
        return BlockArrays(**{name: np.empty(num_blocks, dtype) for name, dtype in FIELDS})

    @property
    def num_blocks(self) -> int:
        """Blocks in the arrays, retired ones included."""
        return len(self.state)


class Baseline:
    """What its writer knows about the content of one tier's place in the map, to write only what differs.

    Attributes:
        content: Whatever the writer left there from last time; ``None`` when nothing is known.
    """

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: object | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MapPlace(BlockArrays):
    """A map's own memory for one tier's arrays.

    Attributes:
        baseline: Lives as long as the place stays where it is, and nothing else writes there.
    """

    baseline: Baseline


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """One finished publication, copied out of the map.

    Attributes:
        version: Counts up from 1 with every publication.
        step: Engine step at whose end it was made.
        device: Device tier. Arrays are read-only copies.
        host: Host tier; ``None`` when the engine has none.
    """

    version: int
    step: int
    device: BlockArrays
    host: BlockArrays | None


@dataclass(frozen=True, slots=True)
class MapInfo:
    """The facts in a map's header that do not change.

    Attributes:
        engine: Name of the engine.
        pid: Process that writes the map.
        block_size: Tokens a block.
        block_bytes: Bytes of storage a block; 0 for bookkeeping only.
        slab_size: Blocks a slab.
    """

    engine: str
    pid: int
    block_size: int
    block_bytes: int
    slab_size: int


class BlockMapWriter:
    """The one writer of a block map. All calls come from the thread that owns the engine.

    Args:
        fd: An empty file opened for reading and writing; it stays open and stays the caller's.
        engine: Name of the engine, at most 256 bytes of UTF-8.
        block_size, block_bytes, slab_size: See ``MapInfo``.

    Raises:
        OSError: The file cannot be grown or mapped.
    """

    def __init__(self, fd: int, *, engine: str, block_size: int, block_bytes: int, slab_size: int) -> None:
        self._fd = fd
        self._offsets = (_PAGE, _PAGE)
        self._capacity_bytes = 0
        #: For each buffer: its place and sizes, and what its two tiers were last written with.
        self._baselines: list[tuple[tuple[int, int, int | None], tuple[Baseline, Baseline]] | None] = [None, None]
        self._extend_file(0, _PAGE)
        self._map = mmap.mmap(fd, _PAGE)
        self._header = _header_of(self._map)
        header = self._header
        header["byte_order"] = _BYTE_ORDER_MARK
        header["layout_version"] = LAYOUT_VERSION
        header["pid"] = os.getpid()
        header["start_ticks"] = process_start_ticks(os.getpid()) or 0
        header["block_size"] = block_size
        header["block_bytes"] = block_bytes
        header["slab_size"] = slab_size
        header["engine"] = engine.encode()[:256]
        self.heartbeat()
        _fence()
        header["magic"] = MAGIC  # last: a reader that sees it sees the rest

    def heartbeat(self) -> None:
        """Say that the writer lives. Cost: about a microsecond."""
        self._header["heartbeat_ns"] = time.monotonic_ns()

    def publish(self, step: int, device: BlockArrays, host: BlockArrays | None) -> None:
        """Copy both tiers' arrays into the map as one new publication.

        Raises:
            OSError: The pool grew and there is no room to grow the map; the last publication stays readable.
        """
        places = self.begin(step, device.num_blocks, None if host is None else host.num_blocks)
        for place, arrays in zip(places, (device, host), strict=True):
            if place is not None and arrays is not None:
                place.baseline.content = None
                for name, _ in FIELDS:
                    np.copyto(getattr(place, name), getattr(arrays, name), casting="safe")
        self.finish()

    def begin(self, step: int, num_device: int, num_host: int | None) -> tuple[MapPlace, MapPlace | None]:
        """Start a publication and return the map's own memory for its arrays, to be written before ``finish``.

        It holds what the publication before the last left there, if ``baseline`` says so.

        Until ``finish`` readers see the publication before. The arrays must not be kept after it.

        Args:
            step: Engine step of the publication.
            num_device, num_host: Blocks in each tier; ``None`` is no host tier.

        Raises:
            OSError: As ``publish`` does.
        """
        if _buffer_bytes(num_device, num_host or 0) > self._capacity_bytes:
            self._grow(num_device, num_host or 0)
        header = self._header
        version = int(header["finished"]) + 1
        header["started"] = version
        _fence()
        offset = self._offsets[version % 2]
        record = header["buffers"][version % 2]
        record["offset"] = offset
        record["step"] = step
        record["device_blocks"] = num_device
        record["host_blocks"] = _NO_TIER if num_host is None else num_host
        layout = (offset, num_device, num_host)
        known = self._baselines[version % 2]
        if known is None or known[0] != layout:
            known = self._baselines[version % 2] = (layout, (Baseline(), Baseline()))
        of_device, of_host = known[1]
        device = MapPlace(baseline=of_device, **dict(_views(self._map, offset, num_device)))
        if num_host is None:
            return device, None
        offset += _tier_bytes(num_device)
        return device, MapPlace(baseline=of_host, **dict(_views(self._map, offset, num_host)))

    def finish(self) -> None:
        """Make what was written since ``begin`` the newest publication."""
        _fence()
        self._header["finished"] = self._header["started"]
        self.heartbeat()

    def close(self) -> None:
        """Unmap the file. Safe to call twice."""
        del self._header
        self._header = np.zeros((), _HEADER)
        self._map.close()

    def _grow(self, num_device: int, num_host: int) -> None:
        # Half as much again as needed: many small grows leave little dead space behind.
        needed = _buffer_bytes(num_device, num_host)
        capacity = _aligned(needed if self._capacity_bytes == 0 else needed + needed // 2, _PAGE)
        end = os.fstat(self._fd).st_size
        self._extend_file(end, 2 * capacity)
        new_map = mmap.mmap(self._fd, end + 2 * capacity)
        old_map, self._map = self._map, new_map
        self._header = _header_of(new_map)
        old_map.close()
        self._offsets = (end, end + capacity)
        self._capacity_bytes = capacity
        self._header["capacity_blocks"] = capacity // BYTES_PER_BLOCK

    def _extend_file(self, start: int, length: int) -> None:
        # Reserved, not only made longer: a full file system is an error here instead of a fatal signal later.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, start, length)
        else:
            os.ftruncate(self._fd, start + length)


class BlockMapReader:
    """Reads publications out of a block map, mapped read-only.

    Args:
        file: A descriptor, which stays the caller's, or a path.

    Raises:
        BlockMapError: The file is not a block map that this program can read.
    """

    def __init__(self, file: int | str | os.PathLike[str]) -> None:
        if isinstance(file, int):
            self._fd, self._owns_fd, self._name = file, False, "block map"
        else:
            self._name = f"block map {os.fspath(file)}"
            try:
                self._fd, self._owns_fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC), True
            except OSError as error:
                raise BlockMapError(f"{self._name}: {error.strerror}") from None
        try:
            self._map = self._map_file(_PAGE)
            self._header = _header_of(self._map)
            self._check_header()
        except BaseException:
            self.close()
            raise
        header = self._header
        self.info = MapInfo(
            engine=header["engine"].item().decode(errors="ignore"),
            pid=int(header["pid"]),
            block_size=int(header["block_size"]),
            block_bytes=int(header["block_bytes"]),
            slab_size=int(header["slab_size"]),
        )

    @property
    def version(self) -> int:
        """Number of the newest finished publication; 0 before the first."""
        return int(self._header["finished"])

    def read(self, step: int | None = None) -> Publication:
        """Return a copy of the newest finished publication.

        Args:
            step: Prefer the publication before it if that one is of this step, and is still there: another observer's
                may have followed the one that was made for the caller.

        Raises:
            BlockMapError: Nothing was published yet, the map is damaged, or every try was overtaken.
        """
        for _ in range(_TRIES):
            version = int(self._header["finished"])
            if step is not None and version > 1 and self._step_of(version) != step == self._step_of(version - 1):
                before = self._try_read(version - 1)
                if before is not None and before.step == step:
                    return before
            publication = self._try_read(version)
            if publication is not None:
                return publication
        raise BlockMapError(f"{self._name}: overtaken {_TRIES} times; the engine publishes faster than it can be read")

    def heartbeat_age_s(self) -> float:
        """Return the seconds since the writer's last sign of life; never negative."""
        return max(0.0, (time.monotonic_ns() - int(self._header["heartbeat_ns"])) / 1e9)

    def check_writer(self, max_age_s: float | None = None) -> None:
        """Make sure that the writer lives.

        Raises:
            BlockMapError: Its process is gone, or it gave no sign of life for ``max_age_s``.
        """
        pid, start_ticks = self.info.pid, int(self._header["start_ticks"])
        ticks = process_start_ticks(pid)
        if ticks is None or (start_ticks and ticks and ticks != start_ticks):
            raise BlockMapError(f"{self._name}: its engine (pid {pid}) is gone")
        age = self.heartbeat_age_s()
        if max_age_s is not None and age > max_age_s:
            raise BlockMapError(f"{self._name}: no sign of life from its engine (pid {pid}) for {age:.1f} s")

    def close(self) -> None:
        """Unmap the file. Safe to call twice."""
        self._header = np.zeros((), _HEADER)
        if hasattr(self, "_map"):
            self._map.close()
        if self._owns_fd:
            os.close(self._fd)
            self._owns_fd = False

    def _step_of(self, version: int) -> int:
        """Return the step in the record of a publication, which may be overwritten at any time."""
        return int(self._header["buffers"][version % 2]["step"])

    def _try_read(self, version: int) -> Publication | None:
        """Copy a publication out, the newest or the one before; ``None`` when the writer came round while copying."""
        if version < 1:
            raise BlockMapError(f"{self._name}: nothing published yet")
        _fence()
        record = self._header["buffers"][version % 2]
        offset, step = int(record["offset"]), int(record["step"])
        num_device, num_host = int(record["device_blocks"]), int(record["host_blocks"])
        del record  # it refers to the mapping, which may be about to change
        if self._is_overtaken(version):
            return None
        has_host = num_host != _NO_TIER
        end = offset + _buffer_bytes(num_device, num_host if has_host else 0)
        self._reach(end)
        device = self._copy(offset, num_device)
        host = self._copy(offset + _tier_bytes(num_device), num_host) if has_host else None
        if self._is_overtaken(version):
            return None
        return Publication(version, step, device, host)

    def _is_overtaken(self, version: int) -> bool:
        _fence()
        return int(self._header["started"]) >= version + 2

    def _copy(self, offset: int, num_blocks: int) -> BlockArrays:
        copies = {}
        for name, view in _views(self._map, offset, num_blocks):
            copies[name] = view.copy()
            copies[name].setflags(write=False)
        return BlockArrays(**copies)

    def _reach(self, end: int) -> None:
        """Make sure that the mapping and the file go up to ``end``."""
        if end > len(self._map):
            new_map = self._map_file(end)
            old_map, self._map = self._map, new_map
            self._header = _header_of(new_map)
            old_map.close()
        elif os.fstat(self._fd).st_size < end:
            raise self._truncated(os.fstat(self._fd).st_size, end)

    def _map_file(self, needed: int) -> mmap.mmap:
        size = os.fstat(self._fd).st_size
        if size < needed:
            raise self._truncated(size, needed)
        return mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def _truncated(self, size: int, needed: int) -> BlockMapError:
        return BlockMapError(f"{self._name}: truncated, {size} bytes where {needed} are needed")

    def _check_header(self) -> None:
        header = self._header
        if header["magic"].item() != MAGIC:
            raise BlockMapError(f"{self._name}: not a kvtop block map")
        if int(header["byte_order"]) == _FOREIGN_MARK:
            raise BlockMapError(f"{self._name}: written on a machine with the other byte order")
        if int(header["byte_order"]) != _BYTE_ORDER_MARK:
            raise BlockMapError(f"{self._name}: damaged header")
        version = int(header["layout_version"])
        if version != LAYOUT_VERSION:
            raise BlockMapError(f"{self._name}: layout version {version}, this program reads {LAYOUT_VERSION}")


def process_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; ``None`` when there is no such process.

    0 where the system does not tell. Together with the pid it names a process for ever, though pids are reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        return None if _is_proc_mounted() or not _pid_exists(pid) else 0
    except OSError:
        return 0 if _pid_exists(pid) else None
    fields = stat.rpartition(")")[2].split()  # the command name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _is_proc_mounted() -> bool:
    return os.path.exists("/proc/self/stat")


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _header_of(map_: mmap.mmap) -> NDArray[Any]:
    return np.ndarray((), _HEADER, buffer=map_)


def _views(map_: mmap.mmap, offset: int, num_blocks: int) -> list[tuple[str, NDArray[Any]]]:
    views = []
    for name, dtype in FIELDS:
        views.append((name, np.ndarray(num_blocks, dtype, buffer=map_, offset=offset)))
        offset += num_blocks * dtype.itemsize
    return views


def _tier_bytes(num_blocks: int) -> int:
    return _aligned(num_blocks * BYTES_PER_BLOCK, 64)


def _buffer_bytes(num_device: int, num_host: int) -> int:
    return _tier_bytes(num_device) + _tier_bytes(num_host)


def _aligned(value: int, to: int) -> int:
    return -(-value // to) * to


_fence_lock = threading.Lock()


def _fence() -> None:
    """Keep the memory accesses before from mixing with those after, on processors that reorder them.

    One pair of lock operations lets accesses move into it from both sides; between two pairs none can cross.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass
