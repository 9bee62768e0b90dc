"""Exporter: the current views as Prometheus metrics, made when they are scraped. Keeps no counters of its own.

``METRICS`` is the one table of what is told; rules, dashboard and documentation use its names. A series whose value
is not known is left out: an absent series and a zero mean different things to whoever is paged. A scrape
reads frozen views, whose numbers were made when they were read, so it waits for no engine and costs the same whatever
the pool's size. A source that is gone takes its series with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from allocator.errors import NUM_LAWS
from allocator.fault_kinds import FAULT_KINDS
from allocator.metrics import REF_BUCKETS, TierNumbers
from allocator.snapshot import Counters, Snapshot
from allocator.timings import BOUNDS_S, TimeCounts, Timings
from kvtop.compat import VllmCollector
from kvtop.gpu import GpuMonitor
from kvtop.gpu_metrics import GpuCollector
from kvtop.metrics_address import MetricsAddress
from kvtop.metrics_server import MetricsServer
from kvtop.model.view import View
from kvtop.remote_metrics import RemoteCollector

#: A source whose last good reading is older than this is reported as down. [s]
STALE_AFTER_S: Final = 10.0

#: Label values, in the order of the metric's labels, and the value; ``None`` is not known.
Sample: TypeAlias = tuple[tuple[str, ...], float | TimeCounts | None]
Views: TypeAlias = Callable[[], View | Sequence[View]]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: As scraped, without the ``_total`` of a counter.
        kind: Its type.
        text: Its help text.
        labels: Its labels besides ``source``; each takes few values, known beforehand.
        read: Its samples in a view; the second argument is the time of the scrape. [s]
    """

    name: str
    kind: Literal["gauge", "counter", "histogram", "unknown"]
    text: str
    labels: tuple[str, ...]
    read: Callable[[View, float], Iterable[Sample]]


def _tiers(read: Callable[[TierNumbers], Iterable[Sample]]) -> Callable[[View, float], Iterator[Sample]]:
    def samples(view: View, now_s: float) -> Iterator[Sample]:
        for tier, tier_view in (("device", view.device), ("host", view.host)):
            if tier_view is not None:
                yield from (((tier, *labels), value) for labels, value in read(tier_view.numbers))

    return samples


def _tier_gauge(name: str, field: str, text: str) -> MetricSpec:
    return MetricSpec(f"kvtop_{name}", "gauge", text, ("tier",), _tiers(lambda n: [((), getattr(n, field))]))


def _snapshot(read: Callable[[Snapshot], Iterable[Sample]]) -> Callable[[View, float], Iterable[Sample]]:
    return lambda view, now_s: () if view.snapshot is None else read(view.snapshot)


def _total(name: str, text: str, read: Callable[[Counters], float | None]) -> MetricSpec:
    return MetricSpec(f"kvtop_{name}", "counter", text, (), _snapshot(lambda s: [((), read(s.counters))]))


def _totals(
    name: str, text: str, label: str, read: Callable[[Counters], Iterable[tuple[str, float | None]]]
) -> MetricSpec:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        return (((value,), total) for value, total in read(snapshot.counters))

    return MetricSpec(f"kvtop_{name}", "counter", text, (label,), _snapshot(samples))


def _times(name: str, text: str, label: str | None, read: Callable[[Timings], Iterable[Sample]]) -> MetricSpec:
    labels = () if label is None else (label,)
    read_timings = _snapshot(lambda s: () if s.timings is None else read(s.timings))
    return MetricSpec(f"kvtop_{name}", "histogram", text, labels, read_timings)


def _age_s(view: View, now_s: float) -> float | None:
    return None if view.read_at_s is None else max(0.0, now_s - view.read_at_s)


def is_up(view: View, now_s: float) -> bool:
    """Return whether the last reading of a view succeeded and is fresh."""
    age_s = _age_s(view, now_s)
    return view.error is None and age_s is not None and age_s < STALE_AFTER_S


METRICS: Final = (
    MetricSpec(
        "kvtop_source_up",
        "gauge",
        f"Whether the last reading succeeded and is younger than {STALE_AFTER_S:g} s.",
        (),
        lambda view, now_s: [((), float(is_up(view, now_s)))],
    ),
    MetricSpec(
        "kvtop_source_age_seconds",
        "gauge",
        "Seconds since the last good reading.",
        (),
        lambda view, now_s: [((), _age_s(view, now_s))],
    ),
    MetricSpec(
        "kvtop_blocks",
        "gauge",
        "Blocks by their exclusive state; the states of a tier sum to kvtop_pool_blocks.",
        ("tier", "state"),
        _tiers(lambda n: [((state,), getattr(n, state)) for state in ("free", "cached", "active", "reserved")]),
    ),
    _tier_gauge("shared_blocks", "shared", "Blocks with two or more holders; a subset of active."),
    _tier_gauge("fenced_blocks", "fenced", "Blocks that a copy is using; overlaps the states."),
    _tier_gauge("pinned_blocks", "pinned", "Blocks held by an operator; overlaps the states."),
    _tier_gauge("pool_blocks", "total", "Pool size."),
    _tier_gauge("cache_usage_ratio", "usage_ratio", "(active + reserved) / pool size, 0 to 1."),
    _tier_gauge("largest_free_run_blocks", "largest_free_run", "Longest run of consecutive allocatable blocks."),
    MetricSpec(
        "kvtop_fragmentation_ratio",
        "gauge",
        "external: 1 - longest free run / allocatable. internal: empty slots / slots of active blocks.",
        ("tier", "kind"),
        _tiers(lambda n: [(("external",), n.external_ratio), (("internal",), n.internal_ratio)]),
    ),
    MetricSpec(
        "kvtop_blocks_by_ref_count",
        "unknown",  # a gauge, but promtool takes one whose name ends in _count for a mistake
        "Device blocks by the number of their holders.",
        ("bucket",),
        lambda view, now_s: (
            ()
            if view.device is None
            else [
                ((name,), count)
                for (_, name), count in zip(REF_BUCKETS, view.device.numbers.ref_histogram, strict=True)
            ]
        ),
    ),
    MetricSpec("kvtop_block_size_tokens", "gauge", "Tokens a block.", (), _snapshot(lambda s: [((), s.block_size)])),
    # Without storage a block has no bytes: the number is unknown, not 0.
    MetricSpec("kvtop_block_bytes", "gauge", "Bytes a block.", (), _snapshot(lambda s: [((), s.block_bytes or None)])),
    MetricSpec(
        "kvtop_sequences",
        "gauge",
        "Unfinished sequences by status.",
        ("status",),
        _snapshot(
            lambda s: [(("running",), s.num_running), (("waiting",), s.num_waiting), (("swapped",), s.num_swapped)]
        ),
    ),
    _total("requests_submitted", "Requests that arrived.", lambda c: c.submitted),
    _totals(
        "requests_ended",
        "Requests that ended, by how.",
        "outcome",
        lambda c: [("finished", c.finished), ("cancelled", c.cancelled), ("refused", c.refused)],
    ),
    _totals(
        "tokens",
        "Tokens: prompt ones of admitted requests, found or computed, and generated ones.",
        "kind",
        lambda c: [("prompt", c.prompt_tokens), ("generated", c.generated_tokens)],
    ),
    _total("allocated_blocks", "Blocks handed out.", lambda c: c.allocated_blocks),
    _total("freed_blocks", "Blocks whose last holder let go.", lambda c: c.freed_blocks),
    _totals(
        "allocation_failures",
        "Requests for blocks that could not be met.",
        "reason",
        lambda c: [("capacity", c.failures_capacity), ("contiguous", c.failures_contiguous)],
    ),
    _total("prefix_cache_query_blocks", "Full prompt blocks looked up at admission.", lambda c: c.query_blocks),
    _total("prefix_cache_hit_blocks", "Full prompt blocks found again.", lambda c: c.hit_blocks),
    _total("prefix_cache_query_tokens", "Prompt tokens looked up at admission.", lambda c: c.query_tokens),
    _total("prefix_cache_hit_tokens", "Prompt tokens found again.", lambda c: c.hit_tokens),
    _total("evictions", "Cached blocks that lost their content.", lambda c: c.evictions),
    _total(
        "optimistic_retries",
        "Prefix lookups made again, because a key was dropped before the lock was had.",
        lambda c: c.optimistic_retries,
    ),
    _total(
        "reservation_refills", "Times a thread's reservation of blocks was filled.", lambda c: c.reservation_refills
    ),
    _total("key_collisions", "Keys found to name other content: a miss each.", lambda c: c.key_collisions),
    _total("copy_on_write", "Shared blocks copied for a writer.", lambda c: c.copy_on_write_blocks),
    _totals(
        "swap_blocks",
        "Blocks copied between the tiers.",
        "direction",
        lambda c: [("out", c.swap_out_blocks), ("in", c.swap_in_blocks)],
    ),
    _totals(
        "swap_bytes",
        "Bytes copied between the tiers.",
        "direction",
        lambda c: [("out", c.swap_out_bytes), ("in", c.swap_in_bytes)],
    ),
    _totals(
        "compactions",
        "Compactions by what started them.",
        "trigger",
        lambda c: [
            ("manual", c.compactions_manual),
            ("threshold", c.compactions_threshold),
            ("contiguous", c.compactions_contiguous),
        ],
    ),
    _total("compaction_moved_blocks", "Blocks moved by compactions.", lambda c: c.compaction_moved_blocks),
    _totals(
        "resizes",
        "Changes of the device pool's size.",
        "direction",
        lambda c: [("grow", c.resizes_grow), ("shrink", c.resizes_shrink)],
    ),
    _totals(
        "preemptions",
        "Running sequences that had to give up their blocks.",
        "mode",
        lambda c: [("swap", c.preemptions_swap), ("recompute", c.preemptions_recompute)],
    ),
    _total("recomputed_tokens", "Tokens computed again after a preemption.", lambda c: c.recomputed_tokens),
    _totals(
        "injected_faults",
        "Faults that struck on purpose.",
        "kind",
        lambda c: zip(FAULT_KINDS, c.injected or (), strict=bool(c.injected)),
    ),
    _totals(
        "integrity_faults",
        "Broken laws of the allocator's state: any is a bug.",
        "law",
        lambda c: [(str(law), c.faults_by_law[law]) for law in range(1, NUM_LAWS + 1) if c.faults_by_law],
    ),
    _times(
        "step_seconds",
        "Real time of engine steps; steps taken in one go share its time.",
        None,
        lambda t: [((), t.step)],
    ),
    _times(
        "copy_seconds",
        "Real time of copies of blocks, by what they are for.",
        "kind",
        lambda t: [((kind,), counts) for kind, counts in t.copies],
    ),
    _times(
        "lock_wait_seconds",
        "Real time of waits for a lock, by its layer; who did not have to wait is not counted.",
        "layer",
        lambda t: [((layer,), counts) for layer, counts in t.lock_waits],
    ),
    _times(
        "lock_hold_seconds",
        "Real time for which a lock was held, by its layer, of one in 64 times.",
        "layer",
        lambda t: [((layer,), counts) for layer, counts in t.lock_holds],
    ),
)


def all_views(views: Views) -> list[View]:
    """Return the current views, the first of each source's name."""
    now = views()
    unique: dict[str, View] = {}
    for view in [now] if isinstance(now, View) else now:
        unique.setdefault(view.source, view)
    return list(unique.values())


class ViewCollector(Collector):
    """Turns the newest views into metric families.

    Args:
        views: Returns the newest view, or one of each source; called once a scrape, from the server's thread.
        clock: The monotonic clock the views' ``read_at_s`` was taken from. [s]
    """

    def __init__(self, views: Views, clock: Callable[[], float] = time.monotonic) -> None:
        self._views = views
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        views, now_s = all_views(self._views), self._clock()
        for spec in METRICS:
            samples = [
                ((view.source, *labels), value)
                for view in views
                for labels, value in spec.read(view, now_s)
                if value is not None
            ]
            if samples:
                yield _family(spec, samples)


def _family(spec: MetricSpec, samples: list[tuple[tuple[str, ...], float | TimeCounts]]) -> Metric:
    labels = ("source", *spec.labels)
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.text, labels=labels)
        for values, counts in samples:
            assert isinstance(counts, TimeCounts)
            bounds = (*map(repr, BOUNDS_S), "+Inf")
            buckets = list(zip(bounds, accumulate(counts.counts), strict=True))
            histogram.add_metric(values, buckets, counts.sum_s)
        return histogram
    make = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "unknown": UnknownMetricFamily}[spec.kind]
    family = make(spec.name, spec.text, labels=labels)
    for values, value in samples:
        assert not isinstance(value, TimeCounts)
        family.add_metric(values, value)
    return family


class Exporter:
    """A running metrics server with what it reads; made by ``start_exporter``."""

    def __init__(self, server: MetricsServer, gpus: GpuMonitor) -> None:
        self._server = server
        self._gpus = gpus
        self.host, self.port = server.host, server.port

    @property
    def url(self) -> str:
        """Where the metrics are served."""
        return self._server.url

    def close(self) -> None:
        """Stop serving and free the port. Safe to call twice."""
        self._server.close()
        self._gpus.close()


def start_exporter(
    views: Views,
    address: MetricsAddress,
    *,
    nvml: object = None,
    complain: Callable[[str], None] = lambda text: None,
) -> Exporter:
    """Serve metrics from threads of its own until ``close``.

    Args:
        views: Returns the newest view, or one of each source; called once a scrape.
        address: Where, how, and under which names besides.
        nvml: The NVML binding; ``None`` takes the installed one.
        complain: Told when a file of keys or passwords has changed and is not usable.

    Raises:
        UserError: The address cannot be listened on, or a file of keys or passwords is not usable.
    """
    gpus = GpuMonitor(nvml)
    registry = CollectorRegistry()
    registry.register(ViewCollector(views))
    registry.register(RemoteCollector(lambda: all_views(views)))
    sources = [view.source for view in all_views(views)]
    registry.register(GpuCollector(gpus, sources[0] if sources else "embedded"))
    if address.compat == "vllm":
        registry.register(VllmCollector(lambda: all_views(views)))

    def not_ready() -> str | None:
        now_s = time.monotonic()
        current = all_views(views)
        if any(is_up(view, now_s) for view in current):
            return None
        return "; ".join(f"{view.source}: {view.error or 'no fresh reading'}" for view in current) or "no source"

    server = MetricsServer(registry, address, not_ready, complain)
    gpus.start()
    return Exporter(server, gpus)
