"""A console on a made engine, for ``kvtop bench console``: run as a program in a terminal of its own.

The engine is a block map alone, written by a second process ten times a second, and snapshots made on the spot: the
console reads, derives and draws as it always does, and nothing else costs it any time.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from allocator.block_map import BlockArrays, BlockMapWriter
from allocator.ids import NO_ROW, BlockState
from allocator.snapshot import Counters, SequenceRow, Snapshot
from kvtop.attachment import Attachment
from kvtop.model.observation import Focus
from kvtop.operations import ReadOnly
from kvtop.sources.local import LocalSource
from kvtop.tui.app import KvtopApp
from kvtop.wire import Observed

_BLOCK_SIZE, _NUM_SEQUENCES = 16, 200
_SLAB = 1 << 30
#: Seconds from the first frame to the beginning of the measurement, at most.
_WARM_UP_S = 2.0
#: Stretches of blocks that change in each publication, and their lengths.
_CHANGES, _LENGTHS = 20, (4, 40)


class _Report(msgspec.Struct, frozen=True):
    """What the child says at the end: frames drawn, CPU and real seconds they took."""

    frames: int
    cpu_s: float
    wall_s: float


@dataclass(slots=True)
class _Link:
    """An engine link without an engine."""

    map_fd: int
    num_sequences: int
    is_busy: bool
    observing: Any = None
    commanding: Any = None
    step: int = 1000
    _last: Observed | None = None

    def __post_init__(self) -> None:
        self.observing = self.commanding = self

    def loss(self) -> str | None:
        return None

    def close(self) -> None:
        pass

    def observe(self, focus: Focus, timeout_s: float) -> Observed:
        self.step += 4 * self.is_busy
        if self._last is not None and not self.is_busy:
            return self._last
        rows = tuple(
            SequenceRow(i, i, "made", "running", "", 100, 300 + self.step % 64, 900, 20, 4, 3, 5, i)
            for i in range(self.num_sequences)
        )
        self._last = Observed(self.step, _snapshot(self.step, rows, self.is_busy), None, None)
        return self._last


def _snapshot(step: int, rows: tuple[SequenceRow, ...], is_busy: bool) -> Snapshot:
    counters = Counters(query_blocks=step * 20, hit_blocks=step * 9, evictions=step * 3, generated_tokens=step * 40)
    return Snapshot(
        step=step, time_s=step * 0.025, phase="running" if is_busy else "paused", speed=1.0, steps_per_s=40.0,
        source="made", workload="made", geometry="none", device="none", block_size=_BLOCK_SIZE, block_bytes=0,
        slab_size=_SLAB, eviction="lru", preempt="swap", policy="fcfs", compact="manual",
        compact_threshold_ratio=0.5, watermark_ratio=0.01, num_running=len(rows), num_waiting=0, num_swapped=0,
        counters=counters, sequences=rows,
    )  # fmt: skip


def made_arrays(num_blocks: int, rng: np.random.Generator) -> BlockArrays:
    """Return a pool in runs, as an allocator leaves it."""
    lengths = rng.integers(*_LENGTHS, size=num_blocks // _LENGTHS[0] + 1)
    runs = np.repeat(np.arange(len(lengths)), lengths)[:num_blocks]
    kinds = rng.choice([BlockState.FREE, BlockState.CACHED, BlockState.ACTIVE], size=len(lengths), p=[0.2, 0.3, 0.5])
    state = kinds[runs].astype(np.uint8)
    is_active = state == BlockState.ACTIVE
    refs = rng.choice([1, 1, 1, 2, 4, 9], size=len(lengths))[runs]
    return BlockArrays(
        state=state,
        flags=np.zeros(num_blocks, np.uint8),
        ref_count=np.where(is_active, refs, 0).astype(np.uint16),
        fill=np.where(state == BlockState.FREE, 0, _BLOCK_SIZE).astype(np.uint16),
        owner=np.where(is_active, runs % _NUM_SEQUENCES, NO_ROW).astype(np.int32),
        last_used=rng.integers(0, 1000, size=num_blocks).astype(np.uint32),
        hash64=np.where(state == BlockState.FREE, 0, np.arange(num_blocks) + 1).astype(np.uint64),
    )


def change(arrays: BlockArrays, rng: np.random.Generator) -> None:
    """Let some stretches of blocks be taken, released or evicted."""
    for _ in range(_CHANGES):
        length = int(rng.integers(*_LENGTHS))
        start = int(rng.integers(0, max(1, arrays.num_blocks - length)))
        part = slice(start, start + length)
        state = int(rng.choice([BlockState.FREE, BlockState.CACHED, BlockState.ACTIVE]))
        arrays.state[part] = state
        arrays.ref_count[part] = int(state == BlockState.ACTIVE)
        arrays.owner[part] = int(rng.integers(0, _NUM_SEQUENCES)) if state == BlockState.ACTIVE else NO_ROW


def _feed(writer: BlockMapWriter, device: BlockArrays, host: BlockArrays, rng: np.random.Generator) -> None:
    """Publish changed arrays ten times a second until the console is gone."""
    parent, step = os.getppid(), 1000
    while os.getppid() == parent:
        change(device, rng)
        step += 4
        writer.publish(step, device, host)
        time.sleep(0.1)
    os._exit(0)


class _MeasuredConsole(KvtopApp):
    """Counts its frames from two seconds after the first one on, and leaves when the time is over."""

    def __init__(self, attachment: Attachment, seconds: float, report_fd: int) -> None:
        super().__init__(lambda: attachment)
        self._seconds, self._report_fd = seconds, report_fd
        self._frames = 0
        self._began: tuple[float, float] | None = None

    def on_view_changed(self) -> None:
        super().on_view_changed()
        if self._began is None:
            self._began = (0.0, 0.0)
            os.write(self._report_fd, b"drawn\n")
            self.set_timer(min(_WARM_UP_S, self._seconds), self._begin)
        self._frames += 1

    def _begin(self) -> None:
        self._frames, self._began = 0, (time.process_time(), time.perf_counter())
        os.write(self._report_fd, b"begin\n")
        self.set_timer(self._seconds, self._end)

    def _end(self) -> None:
        assert self._began is not None
        cpu_s, wall_s = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
        os.write(self._report_fd, msgspec.json.encode(_Report(self._frames, cpu_s, wall_s)) + b"\n")
        self.exit()


def main() -> None:
    """Run one measurement: blocks, ``busy`` or ``idle``, seconds, and the descriptor to report on."""
    num_blocks, is_busy, seconds, report_fd = (
        int(sys.argv[1]),
        sys.argv[2] == "busy",
        float(sys.argv[3]),
        int(sys.argv[4]),
    )
    rng = np.random.default_rng(0)
    device, host = made_arrays(num_blocks, rng), made_arrays(max(1, num_blocks // 2), rng)
    map_fd = os.memfd_create("kvtop-bench")
    writer = BlockMapWriter(map_fd, engine="made", block_size=_BLOCK_SIZE, block_bytes=0, slab_size=_SLAB)
    writer.publish(1000, device, host)
    if is_busy and os.fork() == 0:
        _feed(writer, device, host, rng)
    source = LocalSource(_Link(map_fd, _NUM_SEQUENCES, is_busy), name="made")
    _MeasuredConsole(Attachment(source, ReadOnly("made for a measurement")), seconds, report_fd).run()


if __name__ == "__main__":
    main()
