"""Exporter: the current view as Prometheus metrics, made when it is scraped. Keeps no counters of its own.

A series whose value is not known is left out: an absent series and a zero mean different things
to whoever is paged. A scrape reads one frozen view and never waits for the engine.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from allocator.errors import NUM_LAWS
from allocator.fault_kinds import FAULT_KINDS
from allocator.metrics import REF_BUCKETS
from allocator.snapshot import Snapshot
from kvtop.errors import UserError
from kvtop.model.view import TierView, View

#: A source whose last good reading is older than this is reported as down. [s]
STALE_AFTER_S: Final = 10.0
#: A client that sends or takes nothing for longer loses its connection, and its thread ends. [s]
CLIENT_TIMEOUT_S: Final = 5.0

Labels = dict[str, str]
Sample = tuple[Labels, float | None]


class ViewCollector(Collector):
    """Turns the newest view into metric families.

    Args:
        view: Returns the newest view; called once a scrape, from the server's thread.
        clock: The monotonic clock the view's ``read_at_s`` was taken from. [s]
    """

    def __init__(self, view: Callable[[], View], clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        age_s = None if view.read_at_s is None else max(0.0, self._clock() - view.read_at_s)
        is_up = view.error is None and age_s is not None and age_s < STALE_AFTER_S
        yield from _gauge(view, "source_up", "Whether the last reading succeeded and is fresh.", [({}, float(is_up))])
        yield from _gauge(view, "source_age_seconds", "Seconds since the last good reading.", [({}, age_s)])
        yield from _block_metrics(view)
        if view.snapshot is not None:
            yield from _engine_metrics(view, view.snapshot)


def _block_metrics(view: View) -> Iterator[Metric]:
    pairs: tuple[tuple[str, TierView | None], ...] = (("device", view.device), ("host", view.host))
    tiers = [({"tier": tier}, tier_view.numbers) for tier, tier_view in pairs if tier_view is not None]
    yield from _gauge(
        view,
        "blocks",
        "Blocks by their exclusive state; the states of a tier sum to kvtop_pool_blocks.",
        [
            ({**tier, "state": state}, getattr(numbers, state))
            for tier, numbers in tiers
            for state in ("free", "cached", "active", "reserved")
        ],
    )
    for name, field, text in (
        ("shared_blocks", "shared", "Blocks with two or more holders; a subset of active."),
        ("fenced_blocks", "fenced", "Blocks that a copy is using; overlaps the states."),
        ("pinned_blocks", "pinned", "Blocks held by an operator; overlaps the states."),
        ("pool_blocks", "total", "Pool size."),
        ("cache_usage_ratio", "usage_ratio", "(active + reserved) / pool size, 0 to 1."),
        ("largest_free_run_blocks", "largest_free_run", "Longest run of consecutive allocatable blocks."),
    ):
        yield from _gauge(view, name, text, [(tier, getattr(numbers, field)) for tier, numbers in tiers])
    yield from _gauge(
        view,
        "fragmentation_ratio",
        "external: 1 - longest free run / allocatable. internal: empty slots / slots of active blocks.",
        [
            ({**tier, "kind": kind}, getattr(numbers, f"{kind}_ratio"))
            for tier, numbers in tiers
            for kind in ("external", "internal")
        ],
    )
    if view.device is not None:
        counts = view.device.numbers.ref_histogram
        yield from _gauge(
            view,
            "blocks_by_ref_count",
            "Device blocks by the number of their holders.",
            [({"bucket": name}, count) for (_, name), count in zip(REF_BUCKETS, counts, strict=True)],
        )


def _engine_metrics(view: View, snapshot: Snapshot) -> Iterator[Metric]:
    c = snapshot.counters
    yield from _gauge(view, "block_size_tokens", "Tokens a block.", [({}, snapshot.block_size)])
    # Without storage a block has no bytes: the number is unknown, not 0.
    yield from _gauge(view, "block_bytes", "Bytes a block.", [({}, snapshot.block_bytes or None)])
    yield from _gauge(
        view,
        "sequences",
        "Unfinished sequences by status.",
        [
            ({"status": "running"}, snapshot.num_running),
            ({"status": "waiting"}, snapshot.num_waiting),
            ({"status": "swapped"}, snapshot.num_swapped),
        ],
    )
    totals: tuple[tuple[str, str, list[Sample]], ...] = (
        ("allocated_blocks", "Blocks handed out.", [({}, c.allocated_blocks)]),
        ("freed_blocks", "Blocks whose last holder let go.", [({}, c.freed_blocks)]),
        (
            "allocation_failures",
            "Requests for blocks that could not be met.",
            [({"reason": "capacity"}, c.failures_capacity), ({"reason": "contiguous"}, c.failures_contiguous)],
        ),
        ("prefix_cache_query_blocks", "Full prompt blocks looked up at admission.", [({}, c.query_blocks)]),
        ("prefix_cache_hit_blocks", "Full prompt blocks found again.", [({}, c.hit_blocks)]),
        ("evictions", "Cached blocks that lost their content.", [({}, c.evictions)]),
        (
            "optimistic_retries",
            "Prefix lookups made again, because a key was dropped before the lock was had.",
            [({}, c.optimistic_retries)],
        ),
        ("key_collisions", "Keys found to name other content: a miss each.", [({}, c.key_collisions)]),
        ("copy_on_write", "Shared blocks copied for a writer.", [({}, c.copy_on_write_blocks)]),
        (
            "swap_blocks",
            "Blocks copied between the tiers.",
            [({"direction": "out"}, c.swap_out_blocks), ({"direction": "in"}, c.swap_in_blocks)],
        ),
        (
            "swap_bytes",
            "Bytes copied between the tiers.",
            [({"direction": "out"}, c.swap_out_bytes), ({"direction": "in"}, c.swap_in_bytes)],
        ),
        (
            "compactions",
            "Compactions by what started them.",
            [
                ({"trigger": "manual"}, c.compactions_manual),
                ({"trigger": "threshold"}, c.compactions_threshold),
                ({"trigger": "contiguous"}, c.compactions_contiguous),
            ],
        ),
        ("compaction_moved_blocks", "Blocks moved by compactions.", [({}, c.compaction_moved_blocks)]),
        (
            "resizes",
            "Changes of the device pool's size.",
            [({"direction": "grow"}, c.resizes_grow), ({"direction": "shrink"}, c.resizes_shrink)],
        ),
        (
            "preemptions",
            "Running sequences that had to give up their blocks.",
            [({"mode": "swap"}, c.preemptions_swap), ({"mode": "recompute"}, c.preemptions_recompute)],
        ),
        ("recomputed_tokens", "Tokens computed again after a preemption.", [({}, c.recomputed_tokens)]),
        (
            "injected_faults",
            "Faults that struck on purpose.",
            [({"kind": kind}, n) for kind, n in zip(FAULT_KINDS, c.injected, strict=True)],
        ),
        (
            "integrity_faults",
            "Broken laws of the allocator's state: any is a bug.",
            [({"law": str(law)}, c.faults_by_law[law]) for law in range(1, NUM_LAWS + 1)],
        ),
    )
    for name, text, samples in totals:
        yield from _counter(view, name, text, samples)


class GpuCollector(Collector):
    """Memory of this machine's NVIDIA GPUs, as NVML tells it; no series where there is none.

    Args:
        source: The ``source`` label.
        nvml: The NVML binding; ``None`` takes the installed one.
    """

    def __init__(self, source: str, nvml: Any = None) -> None:
        self._source = source
        self._nvml = nvml if nvml is not None else _load_nvml()

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("kvtop_gpu_memory_used_bytes", "Memory in use on a GPU.", labels=["source", "gpu"])
        total = GaugeMetricFamily("kvtop_gpu_memory_total_bytes", "Memory of a GPU.", labels=["source", "gpu"])
        if self._nvml is not None:
            for index, memory in _gpu_memory(self._nvml):
                used.add_metric([self._source, str(index)], memory.used)
                total.add_metric([self._source, str(index)], memory.total)
        if used.samples:
            yield from (used, total)


def _load_nvml() -> Any:
    """Return NVML, initialised, or ``None`` where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpu_memory(nvml: Any) -> list[tuple[int, Any]]:
    try:
        count = nvml.nvmlDeviceGetCount()
        return [(i, nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)]
    except nvml.NVMLError:
        return []  # a driver that fails now may answer the next scrape


def _gauge(view: View, name: str, text: str, samples: Iterable[Sample]) -> Iterator[Metric]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        family = GaugeMetricFamily(f"kvtop_{name}", text, labels=["source", *known[0][0]])
        for labels, value in known:
            family.add_metric([view.source, *labels.values()], value)
        yield family


def _counter(view: View, name: str, text: str, samples: Iterable[Sample]) -> Iterator[Metric]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        family = CounterMetricFamily(f"kvtop_{name}", text, labels=["source", *known[0][0]])
        for labels, value in known:
            family.add_metric([view.source, *labels.values()], value)
        yield family


class Exporter:
    """A running ``/metrics`` server; made by ``start_exporter``."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.host = host
        self.port = int(server.server_port)

    @property
    def url(self) -> str:
        """Where the metrics are served."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def start_exporter(view: Callable[[], View], *, host: str, port: int) -> Exporter:
    """Serve ``/metrics`` from its own daemon thread until ``close``.

    Args:
        view: Returns the newest view; called once a scrape.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one, told by ``Exporter.port``.

    Raises:
        UserError: The address cannot be listened on.
    """
    registry = CollectorRegistry()
    registry.register(ViewCollector(view))
    registry.register(GpuCollector(view().source))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "in use already; choose another port, or 0 for any free one"
        else:
            reason = f"cannot listen there: {(error.strerror or str(error)).lower()}"
        raise UserError(f"--metrics-port {port} (host {host}): {reason}") from error
    # The library waits for its clients for ever, and writes a traceback for each that breaks off.
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (handler,), {"timeout": CLIENT_TIMEOUT_S})
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    return Exporter(server, thread, host)
