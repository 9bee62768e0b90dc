"""Serial replay has one right answer: the engine against a plain model of the rules, and against known counts.

By its end a request occupies its tokens ÷ block size blocks, rounded up; only full prompt blocks have
ids and can be found again; a block without an id is free at once when released.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serial_traces import TRACES, Row, as_requests, traces

from allocator.config import EngineConfig
from allocator.engine import Engine
from kvtop.workloads.trace import open_trace


def plain_replay(rows: list[Row], num_blocks: int, size: int) -> dict[str, int]:
    """Hit blocks, hit tokens, evictions, refusals of requests served one after another."""
    cached: OrderedDict[int, None] = OrderedDict()
    counts = dict.fromkeys(("hit_blocks", "hit_tokens", "evictions", "refused"), 0)
    for prompt, output, ids in rows:
        total = -(-(prompt + output) // size)
        if total > num_blocks:
            counts["refused"] += 1
            continue
        found = 0
        while found < len(ids) and ids[found] in cached:
            del cached[ids[found]]
            found += 1
        hits = found - 1 if found and found * size == prompt else found
        counts["hit_blocks"] += hits
        counts["hit_tokens"] += hits * size
        # Once the prompt's blocks are there its ids are published. An id still cached behind a miss stays with
        # its old block, and is lost with it if the output then evicts that.
        free = num_blocks - found - len(cached)
        kept = ids[:found]
        for i in range(found, total):
            if free:
                free -= 1
            else:
                cached.popitem(last=False)
                counts["evictions"] += 1
            if i == -(-prompt // size) - 1:
                kept = [b for b in ids if b not in cached]
        for b in reversed(kept):
            cached[b] = None
    return counts


def engine_replay(requests, num_blocks: int, size: int, **settings) -> dict[str, int]:
    config = EngineConfig(
        num_blocks=num_blocks, block_size=size, num_swap_blocks=0, serial=True, **{"geometry": "none", **settings}
    )
    engine = Engine(config, requests)
    while engine.advance(1 << 40):
        if config.stamp:
            engine.check()
    assert engine.done
    counters = engine.counters
    assert counters.finished + counters.refused == counters.submitted
    return {name: getattr(counters, name) for name in ("hit_blocks", "hit_tokens", "evictions", "refused")}


@given(traces(st.sampled_from([1, 2, 5, 16])), st.integers(1, 20))
@settings(max_examples=300)
def test_any_trace_replays_exactly(trace, num_blocks):
    size, rows = trace
    assert engine_replay(as_requests(rows, size), num_blocks, size) == plain_replay(rows, num_blocks, size)


@given(traces(st.sampled_from([1, 3])), st.integers(1, 9))
def test_any_trace_replays_exactly_with_contents_checked(trace, num_blocks):
    size, rows = trace
    exact = plain_replay(rows, num_blocks, size)
    assert engine_replay(as_requests(rows, size), num_blocks, size, stamp=True, geometry="tiny", device="cpu") == exact


def test_by_hand():
    rows = [(16, 0, [0, 1, 2, 3])] * 3
    assert engine_replay(as_requests(rows, 4), 4, 4) == plain_replay(rows, 4, 4)
    assert engine_replay(as_requests(rows, 4), 4, 4)["hit_blocks"] == 6


@pytest.mark.parametrize(
    ("name", "size", "num_blocks"),
    [
        ("mooncake_conversation", 512, 1000),
        ("mooncake_synthetic", 512, 500),
        ("mooncake_synthetic", 512, 5000),
        ("weka_agentic_24", 64, 3000),
    ],
)
def test_public_traces_replay_exactly(name, size, num_blocks):
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/traces")
    requests = open_trace(path).file_order
    rows = [(r.num_prompt, r.num_output, r.content.block_ids.tolist()) for r in requests]
    counts = engine_replay(requests, num_blocks, size)
    assert counts == plain_replay(rows, num_blocks, size)
    if name == "mooncake_conversation":
        assert counts == {"hit_blocks": 12988, "hit_tokens": 6649856, "evictions": 262505, "refused": 0}
