"""The scripted source: plays its list, notes the focus, fails when told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allocator.ids import BlockState
from allocator.snapshot import Counters, Snapshot
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.sources.scripted import ScriptedSource, block_arrays

_SNAPSHOT = Snapshot(
    step=1, time_s=0.0, phase="running", speed=None, steps_per_s=None, source="s", workload="w", geometry="tiny",
    device="cpu", block_size=16, block_bytes=0, slab_size=4, eviction="lru", preempt="swap", policy="fcfs",
    compact="off", compact_threshold_ratio=0.5, watermark_ratio=0.0, num_running=0, num_waiting=0, num_swapped=0,
    counters=Counters(), sequences=(),
)  # fmt: skip


def test_the_list_is_played_and_its_last_repeated():
    first = Observation(_SNAPSHOT, None, None)
    second = replace(first)
    source = ScriptedSource([first, second])
    assert [source.read(Focus(i), 1.0) for i in range(3)] == [first, second, second]
    assert [focus.seq_id for focus in source.asked] == [0, 1, 2]


def test_a_failure_lasts_until_taken_back():
    source = ScriptedSource([Observation(_SNAPSHOT, None, None)])
    source.failure = "gone"
    with pytest.raises(SourceError, match="gone"):
        source.read(Focus(), 1.0)
    source.failure = None
    assert source.read(Focus(), 1.0).snapshot is _SNAPSHOT


def test_an_empty_script_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        ScriptedSource([])


def test_arrays_have_their_types_and_defaults():
    arrays = block_arrays([BlockState.ACTIVE, BlockState.FREE], fill=[3, 0])
    assert arrays.ref_count.tolist() == [1, 0]
    assert arrays.owner.tolist() == [-1, -1]
    assert arrays.fill.tolist() == [3, 0]
    assert (arrays.state.dtype, arrays.hash64.dtype, arrays.owner.dtype) == (np.uint8, np.uint64, np.int32)
