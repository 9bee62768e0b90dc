"""The side-by-side benchmark without peers: our adapter keeps its books, and the table judges as it says."""

from __future__ import annotations

import random
from pathlib import Path

import bench_peers
import pytest
from our_adapter import DECODES, POOLS, PREFIXES
from targets import CASES, TARGETS, Figure, Records, Target, field, judge


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("n", [1, 4, 16, 100])
def test_pool_gives_distinct_blocks_and_takes_them_back(name: str, n: int) -> None:
    pool = POOLS[name](1000)
    for _ in range(3):
        handles = [pool.alloc(pool.prep(n)) for _ in range(1000 // n)]
        assert len({int(block) for handle in handles for block in handle}) == n * (1000 // n)
        random.Random(1).shuffle(handles)
        for handle in handles:
            pool.free(handle)


@pytest.mark.parametrize("name", DECODES)
def test_decode_takes_one_block_every_block_size_tokens(name: str) -> None:
    engine = DECODES[name](200, slots=4)
    for slot in range(4):
        engine.start(slot, engine.make([7] * (16 + slot)))
    for _ in range(32):
        engine.step()
    assert engine.used_blocks() == 3 + 4 * 3
    engine.finish(2)
    assert engine.used_blocks() == 11


@pytest.mark.parametrize("name", PREFIXES)
def test_prefix_is_found_again_but_for_the_last_token(name: str) -> None:
    cache = PREFIXES[name](100)
    tokens = list(range(64))
    hits = []
    for _ in range(2):
        request = cache.raw(tokens)
        cache.hash(request)
        hits.append(cache.admit(request))
        cache.release(request)
    assert hits == [0, 3]


def test_best_peer_present_counts() -> None:
    read = field("ns")
    target = Target("W", "cost", Figure("case", ("ours",), read), Figure("case", ("slow", "quick", "gone"), read), 2.0)
    records: Records = {
        "case": {
            "ours": {0: {"ns": 10}, 1: {"ns": 20}},
            "slow": {0: {"ns": 90}, 1: {"ns": 180}},
            "quick": {0: {"ns": 15}, 1: {"ns": 34}, 2: {"ns": 1}},
        }
    }
    verdict = judge(target, records)
    assert verdict is not None
    assert verdict.reference == "quick"
    assert (verdict.low, verdict.high) == (1.5, 1.7)
    assert not verdict.met


def test_nothing_to_compare_is_no_verdict() -> None:
    assert all(judge(target, {}) is None for target in TARGETS)


def test_every_target_reads_a_case_that_runs_its_subjects() -> None:
    subjects = {case.label: case.subjects for case in CASES}
    for target in TARGETS:
        for figure in (target.ours, target.theirs):
            assert set(figure.subjects) <= set(subjects[figure.case])


def test_absent_drivers_are_named(tmp_path: Path) -> None:
    with pytest.raises(bench_peers.BenchError, match=r"no benchmark drivers in .*bench\.py"):
        bench_peers.check_drivers(tmp_path)


def test_peer_without_package_or_variable_says_what_to_set() -> None:
    nano = next(peer for peer in bench_peers.ALL_PEERS if peer.name == "nano-vllm")
    assert "KVPEER_NANO" in bench_peers.place_peer(nano, {}, install=True)
