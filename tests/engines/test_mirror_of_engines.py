"""What cache events make of a real engine: a mirror of as many blocks as its pool has, and the hits that it counts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_servers import VLLM_BLOCK_SIZE, VLLM_BLOCKS, EngineServer, free_port
from fake_engine import until
from real_servers import prometheus

from allocator.ids import BlockState
from kvtop.attachment import Attachment
from kvtop.model.what_if import WhatIf
from kvtop.sources.remote.source import RemoteSource
from kvtop.targets import AttachOptions, open_target

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TIMEOUT_S = 60.0


def tokens(seed: int, number: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(number)]


@pytest.fixture
def by_events(vllm: EngineServer) -> Iterator[Attachment]:
    options = AttachOptions(events=(vllm.events or "",), replays=(vllm.replay or "",), topic="kv-events")
    attachment = open_target(vllm.url, options=options)
    yield attachment
    attachment.close()


def resident(attachment: Attachment) -> int:
    view = attachment.poll(TIMEOUT_S)
    return view.mirror.tiers["device"].numbers.cached if view.mirror and view.mirror.tiers else 0


def test_a_mirror_has_the_blocks_of_the_pool_itself(vllm: EngineServer, by_events: Attachment) -> None:
    local = open_target("local:vllm", options=AttachOptions())
    vllm.call("/reset_prefix_cache", {})
    for seed in range(6):
        vllm.complete(tokens(1, 5 * VLLM_BLOCK_SIZE) + tokens(100 + seed, 3 * VLLM_BLOCK_SIZE), tokens=40)

    def agree() -> bool:
        device = local.poll(TIMEOUT_S).device
        return device is not None and resident(by_events) == np.count_nonzero(device.arrays.hash64) > 0

    until(agree, TIMEOUT_S)
    view = by_events.poll(TIMEOUT_S)
    assert view.mirror is not None
    (place,) = view.mirror.reading.places
    assert (place.medium, place.size, place.is_sized) == ("GPU", VLLM_BLOCKS - 1, True)
    arrays = view.mirror.reading.device
    branches = set(arrays.owner[arrays.state == BlockState.CACHED].tolist())
    assert len(branches) == 6  # the first goes on in the colour of the trunk
    by_events.look_at(seq_id=None, block_id=2)
    block = by_events.poll(TIMEOUT_S).mirror.reading.block  # type: ignore[union-attr]
    assert block is not None
    assert (block.depth, block.tokens) == (3, VLLM_BLOCK_SIZE)
    local.close()


def test_the_hits_that_events_imply_are_those_that_it_counts(vllm: EngineServer, by_events: Attachment) -> None:
    source = by_events.source
    assert isinstance(source, RemoteSource)
    vllm.call("/reset_prefix_cache", {})
    vllm.complete(tokens(50, VLLM_BLOCK_SIZE + 3))  # only a step tells of the reset
    hits, queries = (vllm.metric(f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries"))
    for seed in range(8):
        vllm.complete(tokens(2, 4 * VLLM_BLOCK_SIZE) + tokens(200 + seed, 2 * VLLM_BLOCK_SIZE + 5))
    hits = vllm.metric("vllm:prefix_cache_hits_total") - hits
    queries = vllm.metric("vllm:prefix_cache_queries_total") - queries
    assert hits == 7 * 4 * VLLM_BLOCK_SIZE

    def estimates() -> WhatIf | None:
        by_events.poll(TIMEOUT_S)
        made = source.what_if()
        return made if made is not None and made.traffic.lookups >= 9 else None

    until(lambda: estimates() is not None, TIMEOUT_S)
    made = estimates()
    assert made is not None
    newest = source._subscriber.lookups().by_rank[0][-8:]  # type: ignore[union-attr]
    assert sum(lookup.hits for lookup in newest) * VLLM_BLOCK_SIZE == hits
    assert (made.capacity, made.is_told, made.block_size) == (VLLM_BLOCKS - 1, True, VLLM_BLOCK_SIZE)
    assert all(outcome.hit_ratio is not None for outcome in (*made.capacities[2:], *made.policies))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="not installed: prometheus (Debian)")
def test_a_prometheus_that_scrapes_it_tells_the_same(vllm: EngineServer, tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yml"
    target = vllm.url.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: llm, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with prometheus(tmp_path, config, free_port()) as url:
        attachment = open_target(f"prometheus+{url}", options=AttachOptions())

        def rows() -> list[str]:
            view = attachment.poll(TIMEOUT_S)
            return [row.target for row in view.remote.rows] if view.remote and view.error is None else []

        until(lambda: rows() == [target], TIMEOUT_S)
        (row,) = attachment.view.remote.rows  # type: ignore[union-attr]
        assert (row.kind, row.total_blocks, row.block_size) == ("vLLM", VLLM_BLOCKS - 1, VLLM_BLOCK_SIZE)
        assert row.queries == vllm.metric("vllm:prefix_cache_queries_total")
        attachment.close()
