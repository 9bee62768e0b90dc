"""What happened to a block, told from one reading to the next."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from view_samples import make_snapshot

from allocator.block_map import BlockArrays
from allocator.commands import Compact, EvictCached, Pin, Step
from allocator.events import Event
from allocator.ids import NO_ROW, BlockFlag, BlockState
from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.model.block_log import MAX_BLOCKS, MAX_ENTRIES, BlockLog
from kvtop.model.observation import BlockHolders, Observation
from kvtop.model.reduce import reduce
from kvtop.model.view import View
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessOperations, InProcessSource

FREE, CACHED, ACTIVE, RESERVED = BlockState.FREE, BlockState.CACHED, BlockState.ACTIVE, BlockState.RESERVED
BLOCK = ("device", 3)
A, B = 0xAAAA_BBBB_CCCC_DDDD, 0x1111_2222_3333_4444


class Pool:
    """A pool of eight blocks of which only one changes, read once a step."""

    def __init__(self) -> None:
        self.view = View(source="pool")
        self.log = BlockLog()
        self.log.look_at(BLOCK)
        self.step = 0

    def read(
        self,
        state: BlockState,
        *holders: int,
        refs: int | None = None,
        key: int = 0,
        flags: BlockFlag = BlockFlag.NONE,
        events: tuple[tuple[str, int | None], ...] = (),
        elsewhere: int | None = None,
    ) -> list[tuple[str, str]]:
        """Show the log one more reading, and return what it added."""
        self.step += 1
        known = len(self.log.of(BLOCK))
        arrays = _arrays(8)
        arrays.state[3], arrays.hash64[3], arrays.flags[3] = state, key, flags
        arrays.ref_count[3] = len(holders) if refs is None else refs
        if elsewhere is not None:
            arrays.hash64[elsewhere] = A
        number = self.view.events[-1].number + 1 if self.view.events else 0
        told = tuple(Event(number + i, self.step, kind, "", seq) for i, (kind, seq) in enumerate(events))  # type: ignore[arg-type]
        snapshot = msgspec.structs.replace(make_snapshot(), step=self.step, events=told)
        focus = BlockHolders(3, tuple((seq, 0) for seq in holders), len(holders))
        self.view = reduce(self.view, Observation(snapshot, arrays, None, focus_block=focus), float(self.step))
        self.log.note(self.view)
        return [(h.what, h.detail) for h in self.log.of(BLOCK)[known:]]


def _arrays(num_blocks: int) -> BlockArrays:
    return BlockArrays(
        state=np.zeros(num_blocks, np.uint8),
        flags=np.zeros(num_blocks, np.uint8),
        ref_count=np.zeros(num_blocks, np.uint16),
        fill=np.zeros(num_blocks, np.uint16),
        owner=np.full(num_blocks, NO_ROW, np.int32),
        last_used=np.zeros(num_blocks, np.uint32),
        hash64=np.zeros(num_blocks, np.uint64),
    )


def test_the_life_of_a_block() -> None:
    pool = Pool()
    assert pool.read(FREE) == [("found", "free")]
    assert pool.read(FREE) == []
    assert pool.read(RESERVED) == [("reserved", "")]
    assert pool.read(ACTIVE, 7) == [("given", "to sequence 7")]
    assert pool.read(ACTIVE, 7, key=A) == [("full", "hash aaaabbbb")]
    assert pool.read(ACTIVE, 7, 9, key=A) == [("shared", "2 holders, 1 before; new: sequence 9")]
    assert pool.read(ACTIVE, 9, key=A) == [("unshared", "1 holder, 2 before; gone: sequence 7")]
    assert pool.read(CACHED, key=A, events=(("finish", 9),)) == [("let go", "by sequence 9, finished, stays cached")]
    assert pool.read(ACTIVE, 12, key=A) == [("given", "from the cache, to sequence 12")]
    assert pool.read(FREE, events=(("swap-out", 12),)) == [("let go", "by sequence 12, swapped out")]


def test_what_happened_between_two_readings_is_told_as_both() -> None:
    pool = Pool()
    pool.read(CACHED, key=A)
    assert pool.read(ACTIVE, 4) == [("evicted", "hash aaaabbbb"), ("given", "to sequence 4")]
    assert pool.read(ACTIVE, 5, events=(("cancel", 4),)) == [
        ("let go", "by sequence 4, cancelled"),
        ("given", "to sequence 5"),
    ]
    assert pool.read(CACHED, key=B) == [("let go", "by sequence 5, stays cached")]
    assert pool.read(CACHED, key=A) == [("evicted", "hash 11112222")]
    assert pool.read(FREE) == [("evicted", "hash aaaabbbb")]


def test_a_content_that_moved_is_found_again() -> None:
    pool = Pool()
    pool.read(ACTIVE, 4, key=A)
    assert pool.read(FREE, events=(("compact", None),), elsewhere=6) == [("moved", "to block 6")]
    pool.read(ACTIVE, 4, key=A)
    assert pool.read(FREE, events=(("compact", None),)) == [("let go", "by sequence 4")]
    pool.read(ACTIVE, 4, key=A)
    assert pool.read(FREE, elsewhere=6) == [("let go", "by sequence 4")], "nothing was moved: another copy"


def test_flags() -> None:
    pool = Pool()
    pool.read(FREE)
    both = BlockFlag.PINNED | BlockFlag.FENCED
    assert pool.read(FREE, flags=both) == [("pinned", ""), ("copying", "")]
    assert pool.read(FREE, flags=BlockFlag.PINNED) == [("copied", "")]
    assert pool.read(FREE) == [("unpinned", "")]


def test_of_holders_that_are_not_all_known_only_the_number_is_told() -> None:
    pool = Pool()
    pool.read(ACTIVE, 4, refs=3)
    assert pool.read(ACTIVE, 4, 5, 6, 7) == [("shared", "4 holders, 3 before")]
    assert pool.read(ACTIVE, *range(40, 50)) == [
        ("let go", "by sequence 4, 5, 6, 7"),
        ("given", "to sequence 40, 41, 42, 43 and 6 more"),
    ]


def test_what_is_kept_is_bounded() -> None:
    pool = Pool()
    for _ in range(MAX_ENTRIES):
        pool.read(ACTIVE, 1)
        pool.read(FREE)
    assert len(pool.log.of(BLOCK)) == MAX_ENTRIES
    for other in range(MAX_BLOCKS - 1):
        pool.log.look_at(("host", other))
    assert pool.log.of(BLOCK)
    pool.log.look_at(BLOCK)
    pool.log.look_at(("host", 100))
    assert pool.log.of(BLOCK), "looked at just now"
    assert pool.log.of(("host", 0)) == ()


def test_a_recording_that_is_wound_back_begins_anew() -> None:
    pool = Pool()
    pool.read(ACTIVE, 4)
    pool.read(FREE)
    pool.step = -5
    assert pool.read(FREE) == []
    assert [(h.step, h.what) for h in pool.log.of(BLOCK)] == [(-4, "found")]


def test_a_block_that_there_is_not_has_no_history() -> None:
    pool = Pool()
    pool.log.look_at(("device", 10**9))
    pool.log.look_at(("host", 0))
    pool.log.note(View(source="none yet"))
    pool.read(FREE)
    assert pool.log.of(("device", 10**9)) == pool.log.of(("host", 0)) == ()


@pytest.mark.parametrize("seed", [1, 2])
def test_on_a_real_engine_every_change_is_told(seed: int) -> None:
    engine, _ = build_engine(EngineOptions(num_blocks=64, geometry="none", seed=seed))
    runner = EngineRunner(engine, speed=1.0, paused=True)
    attachment = Attachment(InProcessSource(runner), InProcessOperations(runner))
    log = BlockLog()
    try:
        attachment.look_at(seq_id=None, block_id=5)
        log.look_at(("device", 5))
        states = []
        for number in range(150):
            attachment.operations.apply(Step(7))
            if number % 40 == 20:
                attachment.operations.apply((Compact("pack-low"), EvictCached(None), Pin((5,)))[number // 40 % 3])
            view = attachment.poll()
            log.note(view)
            assert view.device is not None
            states.append((int(view.device.arrays.state[5]), int(view.device.arrays.ref_count[5])))
        happenings = log.of(("device", 5))
        changes = sum(1 for a, b in itertools.pairwise(states) if a != b)
        assert changes >= 5
        assert len(happenings) >= min(changes, MAX_ENTRIES)
        assert {"given", "let go"} <= {h.what for h in happenings}
    finally:
        engine.close()
