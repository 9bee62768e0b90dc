"""Compat: the facts of a view under vLLM's own metric names, for dashboards that were made for vLLM.

Names, types and labels are those of vLLM 0.33; the ``gpu_`` and ``cpu_`` ones and the swapped requests are of
versions before 0.11. Only what an engine here really has is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from allocator.metrics import plus
from allocator.snapshot import Counters, Snapshot
from kvtop.model.view import TierView, View

CompatName = Literal["vllm"]
COMPAT_NAMES: Final[tuple[CompatName, ...]] = ("vllm",)

#: Label values and the value; ``None`` is not known.
Sample: TypeAlias = tuple[tuple[str, ...], float | None]


@dataclass(frozen=True, slots=True)
class _Name:
    name: str
    kind: Literal["gauge", "counter"]
    text: str
    read: Callable[[View], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, read: Callable[[Snapshot], float]) -> _Name:
    return _Name(f"vllm:{name}", "gauge", text, lambda v: () if v.snapshot is None else [((), read(v.snapshot))])


def _counter(name: str, text: str, read: Callable[[Counters], float | None]) -> _Name:
    return _Name(
        f"vllm:{name}", "counter", text, lambda v: () if v.snapshot is None else [((), read(v.snapshot.counters))]
    )


def _usage(name: str, text: str, tier: Callable[[View], TierView | None]) -> _Name:
    def read(view: View) -> Iterator[Sample]:
        seen = tier(view)
        if seen is not None:
            yield (), seen.numbers.usage_ratio

    return _Name(f"vllm:{name}", "gauge", text, read)


def _ends(view: View) -> list[Sample]:
    if view.snapshot is None:
        return []
    counters = view.snapshot.counters
    return [(("length",), counters.finished), (("abort",), counters.cancelled)]


_NAMES: Final = (
    _gauge("num_requests_running", "Sequences that run.", lambda s: s.num_running),
    _gauge("num_requests_waiting", "Sequences that wait.", lambda s: s.num_waiting),
    _gauge("num_requests_swapped", "Sequences that are swapped out.", lambda s: s.num_swapped),
    _usage("kv_cache_usage_perc", "Share of the device blocks in use; 1 is all of them.", lambda v: v.device),
    _usage("gpu_cache_usage_perc", "The same by its name before vLLM 0.11.", lambda v: v.device),
    _usage("cpu_cache_usage_perc", "Share of the host blocks in use; 1 is all of them.", lambda v: v.host),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda c: c.query_tokens),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda c: c.hit_tokens),
    _counter(
        "num_preemptions",
        "Sequences that had to give up their blocks.",
        lambda c: plus(c.preemptions_swap, c.preemptions_recompute),
    ),
    _counter("prompt_tokens", "Prompt tokens of admitted requests.", lambda c: c.prompt_tokens),
    _counter("generation_tokens", "Tokens generated.", lambda c: c.generated_tokens),
    _Name("vllm:request_success", "counter", "Requests that ended, by how.", _ends, ("finished_reason",)),
)
#: ``cache_config_info`` has no model's name, as in vLLM.
_CONFIG: Final = ("engine", "block_size", "num_gpu_blocks", "num_cpu_blocks")


class VllmCollector(Collector):
    """Turns views into vLLM's metric families. The source is the model's name; several are numbered as engines.

    Args:
        views: Returns the newest view of each source.
    """

    def __init__(self, views: Callable[[], Sequence[View]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        views = self._views()
        for spec in _NAMES:
            make = GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily
            family = make(spec.name, spec.text, labels=("engine", "model_name", *spec.labels))
            for engine, view in enumerate(views):
                for labels, value in spec.read(view):
                    if value is not None:
                        family.add_metric((str(engine), view.source, *labels), value)
            if family.samples:
                yield family
        config = GaugeMetricFamily("vllm:cache_config_info", "Cache settings; the value is always 1.", labels=_CONFIG)
        for engine, view in enumerate(views):
            if view.snapshot is not None:
                sizes = [str(tier.numbers.total) if tier else "None" for tier in (view.device, view.host)]
                config.add_metric((str(engine), str(view.snapshot.block_size), *sizes), 1)
        if config.samples:
            yield config
