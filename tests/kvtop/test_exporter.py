"""The exporter: names and labels as promised, absent where unknown, and a server that starts, refuses and stops."""

from __future__ import annotations

import socket
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from allocator.errors import NUM_LAWS
from allocator.fault_kinds import FAULT_KINDS
from allocator.snapshot import Counters, Snapshot
from kvtop import exporter as exporter_module
from kvtop.errors import UserError
from kvtop.exporter import STALE_AFTER_S, GpuCollector, ViewCollector, start_exporter
from kvtop.model.observation import Observation
from kvtop.model.reduce import fail, reduce
from kvtop.model.view import View

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
    "kvtop_allocated_blocks_total": set(),
    "kvtop_freed_blocks_total": set(),
    "kvtop_allocation_failures_total": {"reason"},
    "kvtop_prefix_cache_query_blocks_total": set(),
    "kvtop_prefix_cache_hit_blocks_total": set(),
    "kvtop_evictions_total": set(),
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
}


def make_snapshot(**settings: object) -> Snapshot:
    values = {
        "step": 7,
        "time_s": 0.2,
        "phase": "running",
        "speed": 1.0,
        "steps_per_s": 40.0,
        "source": "embedded",
        "workload": "chat",
        "geometry": "tiny",
        "device": "cpu",
        "block_size": 16,
        "block_bytes": 512,
        "slab_size": 1024,
        "eviction": "lru",
        "preempt": "swap",
        "policy": "fcfs",
        "compact": "manual",
        "compact_threshold_ratio": 0.5,
        "watermark_ratio": 0.01,
        "num_running": 2,
        "num_waiting": 3,
        "num_swapped": 1,
        "counters": Counters(evictions=5, preemptions_recompute=2, query_blocks=9),
        "sequences": (),
    }
    return Snapshot(**{**values, **settings})


def make_view(snapshot: Snapshot, device: object, host: object = None, now_s: float = 100.0) -> View:
    return reduce(View(source="embedded"), Observation(snapshot, device, host), now_s)


def scrape(view: View, now_s: float = 100.0) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of the exposition text, keyed by name and labels."""
    registry = CollectorRegistry()
    registry.register(ViewCollector(lambda: view, clock=lambda: now_s))
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


def test_serves_on_a_free_port_and_stops(make_arrays):
    exporter = start_exporter(lambda: make_view(make_snapshot(), make_arrays("ff")), host="127.0.0.1", port=0)
    try:
        assert exporter.port > 0
        with urllib.request.urlopen(exporter.url, timeout=5) as answer:
            assert "kvtop_pool_blocks" in answer.read().decode()
    finally:
        exporter.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", exporter.port), timeout=5)


def test_a_client_that_stops_halfway_is_let_go_without_a_word(monkeypatch, capfd):
    monkeypatch.setattr(exporter_module, "CLIENT_TIMEOUT_S", 0.05)
    exporter = start_exporter(lambda: View(source="embedded"), host="127.0.0.1", port=0)
    try:
        with socket.create_connection(("127.0.0.1", exporter.port), timeout=5) as client:
            client.sendall(b"GET /metr")
            assert client.recv(100) == b""
        with urllib.request.urlopen(exporter.url, timeout=5) as answer:
            assert "kvtop_source_up" in answer.read().decode()
    finally:
        exporter.close()
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--metrics-port {port} \(host 127.0.0.1\): in use already") as caught:
            start_exporter(lambda: View(source="embedded"), host="127.0.0.1", port=port)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


class FakeNvml:
    """Two GPUs, or a driver that fails."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def nvmlDeviceGetCount(self) -> int:
        if self._fails:
            raise self.NVMLError
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=1000 + handle, total=8000)


def gpu_samples(nvml: FakeNvml) -> dict[tuple[str, str], float]:
    families = GpuCollector("embedded", nvml).collect()
    return {(s.name, s.labels["gpu"]): s.value for family in families for s in family.samples}


def test_gpu_memory_as_the_driver_tells_it():
    assert gpu_samples(FakeNvml()) == {
        ("kvtop_gpu_memory_used_bytes", "0"): 1000,
        ("kvtop_gpu_memory_used_bytes", "1"): 1001,
        ("kvtop_gpu_memory_total_bytes", "0"): 8000,
        ("kvtop_gpu_memory_total_bytes", "1"): 8000,
    }


def test_a_failing_driver_gives_no_gpu_series():
    assert gpu_samples(FakeNvml(fails=True)) == {}
