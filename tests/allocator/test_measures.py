"""Measures: what a real run leaves in the facts for advice."""

from __future__ import annotations

import dataclasses
import itertools

from allocator.commands import SwapIn, SwapOut
from allocator.config import EngineConfig
from allocator.content import OpaqueContent, Request
from allocator.engine import Engine
from allocator.errors import StorageError
from allocator.plans import CopyJob
from allocator.storage import NoStorage
from kvtop.workloads.chat import chat_requests


def facts_of(engine: Engine):
    return engine.snapshot(phase="running", speed=None, steps_per_s=None).facts


def opaque(prompt: int, output: int, nonce: int) -> Request:
    return Request(OpaqueContent(prompt + output, nonce), prompt)


def test_a_crowded_run_is_told_in_full():
    requests = itertools.islice(chat_requests(2, block_size=16, num_blocks=256), 80)
    requests = [dataclasses.replace(r, arrival_s=r.arrival_s / 8) for r in requests]
    engine = Engine(EngineConfig(num_blocks=128, geometry="none", num_swap_blocks=40), requests)
    while engine.advance(1000):
        pass
    facts, counters = facts_of(engine), engine.counters
    assert facts.num_finished == counters.finished == sum(facts.length_buckets)
    assert facts.finished_tokens == sum(r.content.num_tokens for r in requests)
    assert facts.blocks_at_double < facts.blocks_at_size < facts.blocks_at_half
    assert facts.num_starts >= counters.finished + counters.preemptions_swap
    assert facts.longest_wait_steps > 0
    assert facts.capacity_steps > 0
    assert facts.copied_blocks == counters.swap_out_blocks + counters.swap_in_blocks > 0
    assert 0 < facts.copy_runs <= facts.copied_blocks
    assert facts.swap_shortfalls == counters.preemptions_recompute > 0
    assert facts.peak_swap_blocks > 40


def test_who_still_waits_counts_and_whom_an_operator_holds_does_not():
    engine = Engine(
        EngineConfig(num_blocks=8, geometry="none", num_swap_blocks=8), [opaque(60, 60, 0), opaque(60, 60, 1)]
    )
    engine.advance(30)
    assert facts_of(engine).longest_wait_steps == 30
    facts = facts_of(engine)
    assert (facts.watermark_steps, facts.capacity_steps) == (
        5,
        25,
    )  # at first both just fit, but for the block to be kept
    assert engine.apply(SwapOut(0)).ok
    engine.advance(90)
    assert facts_of(engine).longest_wait_steps == 30


class Failing(NoStorage):
    """Storage whose copies fail."""

    def copy(self, job: CopyJob) -> int:
        raise StorageError("torn cable")


def test_a_swap_that_fails_leaves_the_sequence_where_it_was():
    config = EngineConfig(num_blocks=20, geometry="none", num_swap_blocks=20)
    engine = Engine(config, itertools.islice(chat_requests(2, block_size=16, num_blocks=64), 1), storage=Failing())
    engine.advance(3)
    while not engine.unfinished():
        engine.advance(3)
    assert not engine.apply(SwapOut(0)).ok
    assert not engine.apply(SwapIn(0)).ok
    reuse = engine.measures.reuse
    assert reuse is not None
    assert set(reuse._running) == {0}
    while engine.advance(100):
        pass
    assert engine.counters.finished == 1
    assert reuse._running == {}
