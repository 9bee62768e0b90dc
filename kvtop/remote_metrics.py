"""RemoteCollector: engines over the network as Prometheus metrics: together under our own names, and one by one.

What an engine does not tell has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtop.model.remote import EventFacts, RemoteFacts, total, usage_of
from kvtop.model.view import View

#: Labels besides ``source``, and the value; ``None`` is not known.
Sample: TypeAlias = tuple[dict[str, str], float | None]
#: Kind, name without ``kvtop_``, text, samples.
Told: TypeAlias = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, Sequence[Sample]]

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


class RemoteCollector(Collector):
    """Turns the newest views of engines over the network into metric families; other views are left to others.

    Args:
        views: Returns the newest views; called once a scrape, from the server's thread.
    """

    def __init__(self, views: Callable[[], Iterable[View]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for view in self._views():
            if view.remote is None:
                continue
            for make, name, text, samples in (*engine_metrics(view.remote), *_events(view.remote.events)):
                for labels, value in samples:
                    if value is None:
                        continue
                    if name not in families:
                        families[name] = make(f"kvtop_{name}", text, labels=["source", *labels])
                    families[name].add_metric([view.source, *labels.values()], value)
        yield from families.values()


def engine_metrics(facts: RemoteFacts) -> Iterator[Told]:
    """Return what is told of the engines of one reading: together, and one by one."""
    rows, device = facts.rows, {"tier": "device"}
    info = {"engine_kind": facts.kind, "version": facts.version or ""}
    yield GAUGE, "engine_info", "What the engine is; always 1.", [(info, 1.0)]
    yield GAUGE, "cache_usage_ratio", "Share of the cache that is held, 0 to 1.", [(device, usage_of(rows))]
    yield GAUGE, "pool_blocks", "Pool size.", [(device, total(row.total_blocks for row in rows))]
    sizes = {row.block_size for row in rows}
    yield GAUGE, "block_size_tokens", "Tokens a block.", [({}, next(iter(sizes)) if len(sizes) == 1 else None)]
    by_status = [({"status": s}, total(getattr(row, s) for row in rows)) for s in ("running", "waiting", "swapped")]
    yield GAUGE, "sequences", "Unfinished sequences by status.", by_status
    for unit in ("blocks", "tokens"):
        ours = rows if {row.hit_unit for row in rows} == {unit} else ()
        queries, hits = total(row.queries for row in ours), total(row.hits for row in ours)
        yield COUNTER, f"prefix_cache_query_{unit}", f"Prompt {unit} looked up.", [({}, queries)]
        yield COUNTER, f"prefix_cache_hit_{unit}", f"Prompt {unit} found again.", [({}, hits)]
    # By what mode they were preempted, engines do not say.
    preemptions = total(row.preemptions for row in rows)
    yield COUNTER, "engine_preemptions", "Running requests that gave up their cache.", [({}, preemptions)]
    yield COUNTER, "engine_restarts", "Times the engine's counters fell.", [({}, facts.restarts)]
    labels = [{"target": row.target, "model": row.model or "", "engine": row.engine} for row in rows]
    for name, field, text in (
        ("engine_up", "is_up", "Whether the last reading of one engine succeeded."),
        ("engine_cache_usage_ratio", "usage_ratio", "Share of one engine's cache that is held, 0 to 1."),
        ("engine_pool_blocks", "total_blocks", "Blocks of one engine."),
        ("engine_running", "running", "Running requests of one engine."),
        ("engine_waiting", "waiting", "Waiting requests of one engine."),
        ("engine_host_usage_ratio", "host_usage_ratio", "Share of one engine's host tier in use, 0 to 1."),
    ):
        yield GAUGE, name, text, list(zip(labels, (getattr(row, field) for row in rows), strict=True))


def _events(events: EventFacts | None) -> Iterator[Told]:
    if events is None:
        return
    complete = float(events.state == "complete")
    yield GAUGE, "events_complete", "Whether cache events tell all that is resident.", [({}, complete)]
    resident: list[Sample] = [({"medium": m, "rank": str(rank)}, float(n)) for m, rank, n in events.resident]
    yield GAUGE, "resident_blocks", "Block copies that cache events say are cached.", resident
    kinds = ("stored", "removed", "cleared", "unknown", "broken")
    counted: list[Sample] = [({"kind": kind}, float(getattr(events, kind))) for kind in kinds]
    yield COUNTER, "cache_events", "Blocks, clears and messages by kind.", counted
    yield COUNTER, "event_gaps", "Holes that no replay could fill.", [({}, float(events.gaps))]
