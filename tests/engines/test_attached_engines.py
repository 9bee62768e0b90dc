"""Consoles attached to real servers: each shows what its engine offers, and says why the rest is missing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine_servers import SGLANG_PAGE, VLLM_BLOCK_SIZE, VLLM_BLOCKS, EngineServer, free_port, vllm_server
from fake_engine import until

from allocator.ids import BlockState
from kvtop.attachment import Attachment
from kvtop.model.remote import RemoteFacts
from kvtop.model.view import View
from kvtop.targets import AttachOptions, open_target

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

TIMEOUT_S = 30.0
Attach = Callable[..., Attachment]


@pytest.fixture
def attach() -> Iterator[Attach]:
    opened: list[Attachment] = []

    def attach(target: str, **options: object) -> Attachment:
        opened.append(open_target(target, options=AttachOptions(**options)))  # type: ignore[arg-type]
        return opened[-1]

    yield attach
    for attachment in opened:
        attachment.close()


def poll(attachment: Attachment) -> View:
    view = attachment.poll(TIMEOUT_S)
    assert view.error is None, view.error
    return view


def facts_of(attachment: Attachment) -> RemoteFacts:
    remote = poll(attachment).remote
    assert remote is not None
    return remote


def used_of(attachment: Attachment) -> int:
    device = poll(attachment).device
    assert device is not None
    return device.numbers.active


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(length)]


@contextmanager
def busy(server: EngineServer, number: int, *, shared: int, tokens: int = 600) -> Iterator[None]:
    """Have so many requests computed that share a beginning of ``shared`` tokens, until the block ends."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def ask(seed: int) -> None:
        try:
            while not stop.is_set():
                server.complete(prompt(1, shared) + prompt(100 + seed, 40), tokens=tokens)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert not failures


# ---- vLLM


def test_vllm_by_its_metrics_alone(vllm: EngineServer, attach: Attach) -> None:
    facts = facts_of(attach(vllm.url))
    assert facts.kind == "vLLM"
    (row,) = facts.rows
    assert (row.total_blocks, row.block_size) == (VLLM_BLOCKS - 1, VLLM_BLOCK_SIZE)
    table = {capability.name: capability.reason for capability in facts.capabilities}
    assert table["use of the cache"] is None
    assert "KVTOP_PUBLISH" in (table["physical block map"] or "")


def test_vllm_by_its_events(vllm: EngineServer, attach: Attach) -> None:
    attachment = attach(vllm.url, events=(vllm.events,), replays=(vllm.replay,), topic="kv-events")

    def cached() -> int:
        events = facts_of(attachment).events
        return 0 if events is None else events.distinct

    vllm.call("/reset_prefix_cache", {})
    vllm.complete(prompt(7, 4 * VLLM_BLOCK_SIZE + 5))
    until(lambda: cached() == 4, TIMEOUT_S)
    local = attach("local:vllm")
    device = poll(local).device
    assert device is not None
    assert device.numbers.cached == 4


def test_used_blocks_are_those_of_the_servers_own_metric(vllm: EngineServer, attach: Attach) -> None:
    attachment = attach("local:vllm")

    def metric() -> int:
        return round(vllm.metric("vllm:kv_cache_usage_perc") * (VLLM_BLOCKS - 1))

    until(lambda: poll(attachment).snapshot.num_running == 0, TIMEOUT_S)  # type: ignore[union-attr]
    until(lambda: used_of(attachment) == metric() == 0, TIMEOUT_S)
    agreed = []
    with busy(vllm, 8, shared=10 * VLLM_BLOCK_SIZE):

        def agrees() -> bool:
            before, told, after = used_of(attachment), metric(), used_of(attachment)
            if before == after == told and told > 0:
                agreed.append(told)
            return len(agreed) >= 10 and len(set(agreed)) >= 3

        until(agrees, 120)
    until(lambda: used_of(attachment) == metric() == 0, TIMEOUT_S)


def test_a_shared_beginning_is_one_set_of_blocks_with_many_holders(vllm: EngineServer, attach: Attach) -> None:
    attachment = attach("local:vllm")
    with busy(vllm, 6, shared=8 * VLLM_BLOCK_SIZE):

        def is_shared() -> bool:
            view = poll(attachment)
            assert view.device is not None
            return int(np.count_nonzero(view.device.arrays.ref_count == 6)) >= 8

        until(is_shared, 60)
        view = poll(attachment)
        assert view.snapshot is not None
        rows = [row for row in view.snapshot.sequences if row.status == "running"]
        attachment.look_at(seq_id=rows[0].seq_id, block_id=None)
        view = poll(attachment)
        if view.focus_table is not None:  # the request may have ended meanwhile
            assert view.device is not None
            assert len(view.focus_table) >= 8
            assert (view.device.arrays.ref_count[view.focus_table] >= 1).all()
    counters = poll(attachment).snapshot.counters  # type: ignore[union-attr]
    assert counters.query_tokens == vllm.metric("vllm:prefix_cache_queries_total")
    assert counters.hit_tokens == vllm.metric("vllm:prefix_cache_hits_total")


def test_a_reset_over_http_empties_the_cache(vllm: EngineServer, attach: Attach) -> None:
    attachment = attach("local:vllm")
    vllm.complete(prompt(8, 100))
    assert poll(attachment).device.numbers.cached > 0  # type: ignore[union-attr]
    assert vllm.call("/reset_prefix_cache", {}) == {"success": True}

    def is_empty() -> bool:
        device = poll(attachment).device
        return device is not None and bool((device.arrays.state[1:] == BlockState.FREE).all())

    until(is_empty, TIMEOUT_S)


def test_a_server_that_was_killed_and_started_again_is_shown(servers_dir: Path, tmp_path: Path, attach: Attach) -> None:
    port = free_port()
    with vllm_server(tmp_path, publish="again", port=port) as first:
        local, remote = attach("local:again"), attach(first.url)
        first.complete(prompt(9, 100))
        assert poll(local).device.numbers.cached > 0  # type: ignore[union-attr]
        facts_of(remote)
        first.kill()
        until(lambda: "ended" in (local.poll(TIMEOUT_S).error or ""), TIMEOUT_S)
        until(lambda: remote.poll(TIMEOUT_S).error is not None, TIMEOUT_S)
        assert local.view.device is not None  # what was known last is still shown
    with vllm_server(tmp_path, publish="again", port=port) as second:
        view = poll(local)
        assert view.device is not None
        assert (view.device.numbers.cached, view.device.numbers.active) == (0, 0)
        assert [event.text for event in view.events if "anew" in event.text]
        until(lambda: remote.poll(TIMEOUT_S).error is None, TIMEOUT_S)
        second.complete(prompt(9, 100))
        until(lambda: facts_of(remote).restarts >= 1, TIMEOUT_S)
        assert poll(local).device.numbers.cached == 3  # type: ignore[union-attr]


def test_a_server_that_does_not_publish_has_no_trace_of_the_plugin(tmp_path: Path) -> None:
    with vllm_server(tmp_path) as server:
        server.complete(prompt(9, 100))
        assert "kvtop" not in server.log.read_text(errors="replace").replace(str(tmp_path), "")


# ---- others


def test_sglang_by_its_metrics(sglang: EngineServer, attach: Attach) -> None:
    attachment = attach(sglang.url)
    sglang.complete(prompt(5, 100))
    facts = facts_of(attachment)
    assert facts.kind == "SGLang"
    until(lambda: (facts_of(attachment).rows[0].cached_tokens or 0) > 0, TIMEOUT_S)
    table = {capability.name: capability.reason for capability in facts_of(attachment).capabilities}
    assert table["cached and idle"] is None
    assert table["compact"] == "not offered by this engine"


def test_sglangs_pages_are_those_of_its_own_metrics(sglang: EngineServer, attach: Attach) -> None:
    attachment = attach("local:sglang")

    def told(kind: str) -> int:
        return round(sglang.metric(f"sglang:kv_{kind}_tokens")) // SGLANG_PAGE

    def agrees() -> bool:
        device = poll(attachment).device
        assert device is not None
        numbers = device.numbers
        return (numbers.active, numbers.cached, numbers.free) == (told("used"), told("evictable"), told("available"))

    sglang.complete(prompt(6, 100))
    until(agrees, TIMEOUT_S)
    with busy(sglang, 4, shared=10 * SGLANG_PAGE, tokens=100):
        until(lambda: poll(attachment).device.numbers.shared >= 10 and agrees(), 120)  # type: ignore[union-attr]
        rows = poll(attachment).snapshot.sequences  # type: ignore[union-attr]
        assert {row.status for row in rows} <= {"running", "waiting"}
    until(lambda: poll(attachment).snapshot.num_running == 0, TIMEOUT_S)  # type: ignore[union-attr]
    assert "flushed" in str(sglang.call("/flush_cache", {}))
    until(lambda: poll(attachment).device.numbers.cached == 0, TIMEOUT_S)  # type: ignore[union-attr]


def test_llama_cpp_by_its_slots(llama: EngineServer, attach: Attach) -> None:
    attachment = attach(llama.url)
    llama.complete("The quick brown fox jumps over the lazy dog. " * 4)
    until(lambda: (facts_of(attachment).rows[0].used_tokens or 0) > 0, TIMEOUT_S)
    facts = facts_of(attachment)
    assert facts.kind == "llama.cpp"
    table = {capability.name: capability.reason for capability in facts.capabilities}
    assert table["size in blocks"] == "this engine has slots, no blocks"
    assert table["physical block map"] == "not offered by this engine"
