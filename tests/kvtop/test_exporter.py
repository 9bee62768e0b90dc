"""The exporter: names and labels as promised, every value in its own series, absent where unknown."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from view_samples import make_snapshot, make_view

from allocator.config import EngineConfig
from allocator.content import OpaqueContent, Request
from allocator.engine import Engine
from allocator.errors import NUM_LAWS
from allocator.fault_kinds import FAULT_KINDS
from allocator.snapshot import Counters
from allocator.timings import BOUNDS_S
from kvtop.attachment import Attachment
from kvtop.exporter import METRICS, STALE_AFTER_S, ViewCollector
from kvtop.model.observation import Observation
from kvtop.model.reduce import fail
from kvtop.model.view import View
from kvtop.operations import ReadOnly
from kvtop.sources.scripted import ScriptedSource

#: Name (as scraped) → labels besides ``source``.
NAMES = {
    "kvtop_blocks": {"tier", "state"},
    "kvtop_shared_blocks": {"tier"},
    "kvtop_fenced_blocks": {"tier"},
    "kvtop_pinned_blocks": {"tier"},
    "kvtop_pool_blocks": {"tier"},
    "kvtop_block_size_tokens": set(),
    "kvtop_block_bytes": set(),
    "kvtop_cache_usage_ratio": {"tier"},
    "kvtop_fragmentation_ratio": {"tier", "kind"},
    "kvtop_largest_free_run_blocks": {"tier"},
    "kvtop_blocks_by_ref_count": {"bucket"},
    "kvtop_sequences": {"status"},
    "kvtop_requests_submitted_total": set(),
    "kvtop_requests_ended_total": {"outcome"},
    "kvtop_tokens_total": {"kind"},
    "kvtop_allocated_blocks_total": set(),
    "kvtop_freed_blocks_total": set(),
    "kvtop_allocation_failures_total": {"reason"},
    "kvtop_prefix_cache_query_blocks_total": set(),
    "kvtop_prefix_cache_hit_blocks_total": set(),
    "kvtop_prefix_cache_query_tokens_total": set(),
    "kvtop_prefix_cache_hit_tokens_total": set(),
    "kvtop_evictions_total": set(),
    "kvtop_reservation_refills_total": set(),
    "kvtop_optimistic_retries_total": set(),
    "kvtop_key_collisions_total": set(),
    "kvtop_recomputed_tokens_total": set(),
    "kvtop_copy_on_write_total": set(),
    "kvtop_swap_blocks_total": {"direction"},
    "kvtop_swap_bytes_total": {"direction"},
    "kvtop_compactions_total": {"trigger"},
    "kvtop_compaction_moved_blocks_total": set(),
    "kvtop_resizes_total": {"direction"},
    "kvtop_preemptions_total": {"mode"},
    "kvtop_injected_faults_total": {"kind"},
    "kvtop_integrity_faults_total": {"law"},
    "kvtop_source_up": set(),
    "kvtop_source_age_seconds": set(),
    **{f"kvtop_step_seconds_{part}": {"le"} if part == "bucket" else set() for part in ("bucket", "count", "sum")},
    **{
        f"kvtop_{name}_{part}": {label, "le"} if part == "bucket" else {label}
        for name, label in (("copy_seconds", "kind"), ("lock_wait_seconds", "layer"), ("lock_hold_seconds", "layer"))
        for part in ("bucket", "count", "sum")
    },
}


def scrape(view: View | tuple[View, ...], now_s: float = 100.0) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of the exposition text, keyed by name and labels."""
    registry = CollectorRegistry()
    registry.register(ViewCollector(lambda: view if isinstance(view, View) else list(view), clock=lambda: now_s))
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keyed = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(keyed) == len(samples), "two series have the same name and labels"
    return keyed


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"source": "embedded", **labels}.items())


def test_names_and_labels_are_exactly_the_promised_ones(make_arrays):
    samples = scrape(make_view(make_snapshot(), make_arrays("fca"), make_arrays("ff")))
    found: dict[str, set[str]] = {}
    for name, labels in samples:
        found.setdefault(name, set()).update(label for label, _ in labels)
    assert found == {name: {"source", *labels} for name, labels in NAMES.items()}


def test_values_of_both_tiers(make_arrays):
    samples = scrape(make_view(make_snapshot(), make_arrays("ffca", ref_counts={3: 2}), make_arrays("fa")))
    assert samples[key("kvtop_blocks", tier="device", state="free")] == 2
    assert samples[key("kvtop_blocks", tier="device", state="cached")] == 1
    assert samples[key("kvtop_blocks", tier="device", state="active")] == 1
    assert samples[key("kvtop_blocks", tier="host", state="active")] == 1
    assert samples[key("kvtop_pool_blocks", tier="device")] == 4
    assert samples[key("kvtop_shared_blocks", tier="device")] == 1
    assert samples[key("kvtop_cache_usage_ratio", tier="host")] == 0.5
    assert samples[key("kvtop_largest_free_run_blocks", tier="device")] == 3
    assert samples[key("kvtop_blocks_by_ref_count", bucket="2")] == 1
    assert samples[key("kvtop_sequences", status="waiting")] == 3
    assert samples[key("kvtop_evictions_total")] == 5
    assert samples[key("kvtop_preemptions_total", mode="recompute")] == 2
    assert samples[key("kvtop_preemptions_total", mode="swap")] == 0
    assert samples[key("kvtop_source_up")] == 1


def test_every_counter_lands_in_its_own_series(make_arrays):
    counters = Counters()
    for number, field in enumerate(Counters.__struct_fields__, start=101):
        setattr(counters, field, number)
    counters.faults_by_law = (0, *range(1, NUM_LAWS + 1))
    counters.injected = tuple(range(201, 201 + len(FAULT_KINDS)))
    c = counters
    samples = scrape(make_view(make_snapshot(counters=counters), make_arrays("f")))
    totals = {name: value for name, value in samples.items() if name[0].endswith("_total")}
    assert totals == {
        key("kvtop_requests_submitted_total"): c.submitted,
        key("kvtop_requests_ended_total", outcome="finished"): c.finished,
        key("kvtop_requests_ended_total", outcome="cancelled"): c.cancelled,
        key("kvtop_requests_ended_total", outcome="refused"): c.refused,
        key("kvtop_tokens_total", kind="prompt"): c.prompt_tokens,
        key("kvtop_tokens_total", kind="generated"): c.generated_tokens,
        key("kvtop_prefix_cache_query_tokens_total"): c.query_tokens,
        key("kvtop_prefix_cache_hit_tokens_total"): c.hit_tokens,
        key("kvtop_reservation_refills_total"): c.reservation_refills,
        key("kvtop_allocated_blocks_total"): c.allocated_blocks,
        key("kvtop_freed_blocks_total"): c.freed_blocks,
        key("kvtop_allocation_failures_total", reason="capacity"): c.failures_capacity,
        key("kvtop_allocation_failures_total", reason="contiguous"): c.failures_contiguous,
        key("kvtop_prefix_cache_query_blocks_total"): c.query_blocks,
        key("kvtop_prefix_cache_hit_blocks_total"): c.hit_blocks,
        key("kvtop_evictions_total"): c.evictions,
        key("kvtop_optimistic_retries_total"): c.optimistic_retries,
        key("kvtop_key_collisions_total"): c.key_collisions,
        key("kvtop_copy_on_write_total"): c.copy_on_write_blocks,
        key("kvtop_swap_blocks_total", direction="out"): c.swap_out_blocks,
        key("kvtop_swap_blocks_total", direction="in"): c.swap_in_blocks,
        key("kvtop_swap_bytes_total", direction="out"): c.swap_out_bytes,
        key("kvtop_swap_bytes_total", direction="in"): c.swap_in_bytes,
        key("kvtop_compactions_total", trigger="manual"): c.compactions_manual,
        key("kvtop_compactions_total", trigger="threshold"): c.compactions_threshold,
        key("kvtop_compactions_total", trigger="contiguous"): c.compactions_contiguous,
        key("kvtop_recomputed_tokens_total"): c.recomputed_tokens,
        key("kvtop_compaction_moved_blocks_total"): c.compaction_moved_blocks,
        key("kvtop_resizes_total", direction="grow"): c.resizes_grow,
        key("kvtop_resizes_total", direction="shrink"): c.resizes_shrink,
        key("kvtop_preemptions_total", mode="swap"): c.preemptions_swap,
        key("kvtop_preemptions_total", mode="recompute"): c.preemptions_recompute,
        **{key("kvtop_injected_faults_total", kind=kind): n for n, kind in enumerate(FAULT_KINDS, 201)},
        **{key("kvtop_integrity_faults_total", law=str(law)): law for law in range(1, NUM_LAWS + 1)},
    }


def test_unknown_is_absent_not_zero(make_arrays):
    samples = scrape(make_view(make_snapshot(block_bytes=0), make_arrays("ff")))
    assert key("kvtop_block_bytes") not in samples  # bookkeeping only
    assert key("kvtop_pool_blocks", tier="host") not in samples  # no host tier
    assert key("kvtop_fragmentation_ratio", tier="device", kind="internal") not in samples  # no active block
    assert samples[key("kvtop_fragmentation_ratio", tier="device", kind="external")] == 0


def test_before_the_first_reading_only_the_source_is_told():
    assert scrape(View(source="embedded")) == {key("kvtop_source_up"): 0}


def test_a_failed_or_old_reading_is_down_and_keeps_its_facts(make_arrays):
    view = make_view(make_snapshot(), make_arrays("ff"))
    failed = scrape(fail(view, "gone"), now_s=103.0)
    assert failed[key("kvtop_source_up")] == 0
    assert failed[key("kvtop_source_age_seconds")] == 3
    assert failed[key("kvtop_pool_blocks", tier="device")] == 2
    assert scrape(view, now_s=100 + STALE_AFTER_S)[key("kvtop_source_up")] == 0


def test_times_are_cumulative_buckets_with_their_sum(make_arrays):
    samples = scrape(make_view(make_snapshot(), make_arrays("f")))
    steps = [samples[key("kvtop_step_seconds_bucket", le=repr(bound))] for bound in BOUNDS_S]
    assert steps == [0, *[1] * (len(BOUNDS_S) - 1)]
    assert samples[key("kvtop_step_seconds_bucket", le="+Inf")] == samples[key("kvtop_step_seconds_count")] == 2
    assert samples[key("kvtop_step_seconds_sum")] == BOUNDS_S[1] + 20.0
    assert samples[key("kvtop_copy_seconds_count", kind="swap-out")] == 1
    assert samples[key("kvtop_lock_wait_seconds_count", layer="allocator")] == 0


def test_an_engine_that_tells_no_times_has_no_such_series(make_arrays):
    samples = scrape(make_view(make_snapshot(timings=None), make_arrays("f")))
    assert not [name for name, _ in samples if "_seconds_" in name]


def other(view: View, source: str) -> View:
    return replace(view, source=source)


def test_several_sources_share_one_family_and_leave_with_all_their_series(make_arrays):
    view = make_view(make_snapshot(), make_arrays("ff"))
    down = View(source="b")
    both = scrape((view, other(down, "b")))
    assert both[key("kvtop_source_up")] == 1
    assert both[("kvtop_source_up", frozenset({("source", "b")}))] == 0
    alone = scrape((view,))
    assert alone == {name: value for name, value in both.items() if ("source", "b") not in name[1]}
    assert scrape(()) == {}


def test_of_two_sources_with_one_name_the_first_is_told(make_arrays):
    view = make_view(make_snapshot(), make_arrays("ff"))
    assert scrape((view, make_view(make_snapshot(), make_arrays("f")))) == scrape(view)


def test_a_scrape_looks_at_no_block(make_arrays, monkeypatch):
    view = make_view(make_snapshot(), make_arrays("ffca"), make_arrays("f"))
    without = replace(view, device=replace(view.device, arrays=None), host=replace(view.host, arrays=None))
    assert scrape(without) == scrape(view)


def test_a_source_that_is_stuck_keeps_no_scrape_waiting(make_arrays):
    asked, go_on = threading.Event(), threading.Event()

    class Stuck(ScriptedSource):
        def read(self, focus, timeout_s):
            if self.asked:
                asked.set()
                assert go_on.wait(10)
            return super().read(focus, timeout_s)

    now_s = [100.0]
    source = Stuck([Observation(make_snapshot(), make_arrays("ff"), None)], name="embedded")
    attachment = Attachment(source, ReadOnly("a test"), clock=lambda: now_s[0])
    attachment.poll()
    poller = threading.Thread(target=attachment.poll)
    poller.start()
    try:
        assert asked.wait(10)
        now_s[0] += STALE_AFTER_S
        samples = scrape(attachment.view, now_s=now_s[0])
        assert samples[key("kvtop_source_up")] == 0
        assert samples[key("kvtop_source_age_seconds")] == STALE_AFTER_S
        assert samples[key("kvtop_pool_blocks", tier="device")] == 2
    finally:
        go_on.set()
        poller.join(10)


def test_the_table_is_well_formed():
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for spec in METRICS:
        assert spec.name.startswith("kvtop_")
        assert not spec.name.endswith("_total")
        assert spec.text.endswith(".")


@pytest.mark.parametrize("phase", ["running", "paused"])
def test_the_engine_tells_its_times(phase):
    engine = Engine(EngineConfig(num_blocks=8, geometry="none"))
    assert engine.snapshot(phase=phase, speed=None, steps_per_s=None).timings.step.counts == (0,) * (len(BOUNDS_S) + 1)
    content = OpaqueContent(40, nonce=1)
    engine.submit(Request(content, 8, 0.0, "one"))
    taken = engine.advance(20)
    assert sum(engine.snapshot(phase=phase, speed=None, steps_per_s=None).timings.step.counts) == taken == 20
