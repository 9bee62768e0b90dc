"""Dialects: how each engine names its cache metrics in every release → rows. One table of names for each engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvtop.model.remote import EngineRow
from kvtop.sources.remote.exposition import Exposition, Labels

Key = tuple[str | None, str]
Values = Mapping[Key, float | None]


@dataclass(frozen=True, slots=True)
class Told:
    """What one page tells: rows, and what their reader should know."""

    rows: tuple[EngineRow, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of engine.

    Attributes:
        kind: Its name.
        marks: Names of which any one tells that a page is this engine's.
        beat: A gauge that every release writes, in one spelling: its newest sample's time is the page's.
        read: Page → what it tells.
    """

    kind: str
    marks: tuple[str, ...]
    beat: str
    read: Callable[[Exposition], Told]


def recognise(page: Exposition) -> Dialect | None:
    """Return the dialect of a page; ``None`` when no engine that kvtop knows writes such."""
    return next((d for d in DIALECTS if any(page.has(mark) for mark in d.marks)), None)


# vLLM ---------------------------------------------------------------------------------------------------------------


def _vllm_key(labels: Labels) -> Key:
    return labels.get("model_name"), labels.get("engine", "0")


def _vllm(page: Exposition) -> Told:
    def get(*names: str) -> Values:
        return page.by_engine(_vllm_key, *(f"vllm_{name}" for name in names))

    usage = get("kv_cache_usage_perc", "gpu_cache_usage_perc")
    queries = get("prefix_cache_queries", "gpu_prefix_cache_queries")
    has_tokens = page.has("vllm_prefix_cache_queries") or page.has("vllm_kv_cache_usage_perc")
    told = get("gpu_prefix_cache_hit_rate")
    running, waiting = get("num_requests_running"), get("num_requests_waiting")
    swapped, host = get("num_requests_swapped"), get("kv_offload_cpu_cache_usage_perc", "cpu_cache_usage_perc")
    hits, preemptions = get("prefix_cache_hits", "gpu_prefix_cache_hits"), get("num_preemptions")
    prompt, generated = get("prompt_tokens"), get("generation_tokens")
    sizes, notes = _vllm_sizes(page)
    rows = []
    for key in _keys(usage, running, waiting, queries):
        model, engine = key
        num_blocks, block_size = sizes.get(engine, (None, None))
        ratio = _ratio(usage.get(key))
        total, used = _held_blocks(ratio, num_blocks)
        rows.append(
            EngineRow(
                model=model,
                engine=engine,
                usage_ratio=ratio,
                total_blocks=total,
                used_blocks=used,
                block_size=block_size,
                host_usage_ratio=_ratio(host.get(key)),
                running=_whole(running.get(key)),
                waiting=_whole(waiting.get(key)),
                swapped=_whole(swapped.get(key)),
                queries=_count(queries.get(key)),
                hits=_count(hits.get(key)),
                hit_unit="tokens" if has_tokens else None,
                told_hit_ratio=_ratio(told.get(key)),
                preemptions=_count(preemptions.get(key)),
                prompt_tokens=_count(prompt.get(key)),
                generated_tokens=_count(generated.get(key)),
            )
        )
    if any(_out_of_range(value) for value in usage.values()):
        notes.append("usage outside 0 to 1 is shown as unknown")
    if queries and not has_tokens:
        notes.append("prefix lookups are blocks or tokens, by release; their ratio is true either way")
    return Told(tuple(rows), tuple(notes))


def _vllm_sizes(page: Exposition) -> tuple[dict[str, tuple[int | None, int | None]], list[str]]:
    """Return engine → (blocks of that engine, tokens a block). The page tells the sum over engines on each series."""
    infos = {labels.get("engine", "0"): labels for labels, _ in page.series("vllm_cache_config_info")}
    sizes: dict[str, tuple[int | None, int | None]] = {}
    notes: list[str] = []
    for engine, labels in infos.items():
        told, own = _label_int(labels, "num_gpu_blocks"), _label_int(labels, "num_gpu_blocks_override")
        block_size = _label_int(labels, "effective_attention_block_size") or _label_int(labels, "block_size")
        tokens = _label_int(labels, "kv_cache_size_tokens")
        by_tokens = tokens // block_size if tokens and block_size else None
        if len(infos) == 1 or told is None or told in (own, by_tokens):
            num_blocks = told
        elif told % len(infos) == 0:
            num_blocks = told // len(infos)
        else:
            num_blocks = None
            notes.append(f"{told} blocks over {len(infos)} engines do not divide evenly: sizes unknown")
        sizes[engine] = (num_blocks, block_size)
    return sizes, sorted(set(notes))


def _held_blocks(ratio: float | None, num_blocks: int | None) -> tuple[int | None, int | None]:
    """Return (blocks that can hold content, blocks held).

    Newer releases leave one block that is never used out of the denominator, older ones do not; held blocks are whole,
    so the denominator that makes them whole is the right one.
    """
    if num_blocks is None or num_blocks < 2:
        return num_blocks, None
    if ratio is None:
        return num_blocks - 1, None
    total = min((num_blocks - 1, num_blocks), key=lambda n: round(abs(ratio * n - round(ratio * n)), 6))
    return total, round(ratio * total)


# SGLang -------------------------------------------------------------------------------------------------------------


def _sglang(page: Exposition) -> Told:
    models = {labels["model_name"] for labels, _ in page.series("sglang_token_usage") if "model_name" in labels}
    only_model = next(iter(models)) if len(models) == 1 else None

    def key_of(labels: Labels) -> Key | None:
        if any(labels.get(rank, "0") != "0" for rank in ("tp_rank", "pp_rank")):
            return None
        return labels.get("model_name", only_model), labels.get("dp_rank", "0")

    def get(*names: str, where: Mapping[str, str] | None = None) -> Values:
        return page.by_engine(key_of, *(f"sglang_{name}" for name in names), where=where)

    usage, running = get("token_usage"), get("num_running_reqs")
    waiting, told = get("num_queue_reqs"), get("cache_hit_rate")
    used, cached = get("kv_used_tokens", "num_used_tokens"), get("kv_evictable_tokens")
    free, total = get("kv_available_tokens"), get("max_total_num_tokens")
    page_size, pages = get("page_size"), get("num_pages")
    host_used, host_total = get("hicache_host_used_tokens"), get("hicache_host_total_tokens")
    retracted, evicted = get("num_retracted_requests", "num_retracted_reqs"), get("evicted_tokens")
    has_retracted = page.has("sglang_num_retracted_requests")
    prompt, generated, reused = get("prompt_tokens"), get("generation_tokens"), get("cached_tokens")
    live_hits = get("realtime_tokens", where={"mode": "prefill_cache"})
    live_misses = get("realtime_tokens", where={"mode": "prefill_compute"})
    keys = _keys(usage, running, waiting)
    rows = []
    for key in keys:
        size = _whole(page_size.get(key))
        if live_misses:
            hits = live_hits.get(key, 0.0)
            queries = _sum(hits, live_misses.get(key))
        elif len(keys) == 1:
            hits, queries = _single(reused), _single(prompt)
        else:
            hits = queries = None
        rows.append(
            EngineRow(
                model=key[0],
                engine=key[1],
                usage_ratio=_ratio(usage.get(key)),
                total_blocks=_whole(pages.get(key)),
                used_blocks=None if size is None or used.get(key) is None else math.ceil((used[key] or 0) / size),
                block_size=size,
                total_tokens=_whole(total.get(key)),
                used_tokens=_whole(used.get(key)),
                cached_tokens=_whole(cached.get(key)),
                free_tokens=_whole(free.get(key)),
                host_usage_ratio=_share(host_used.get(key), host_total.get(key)),
                running=_whole(running.get(key)),
                waiting=_whole(waiting.get(key)),
                queries=_count(queries),
                hits=_count(hits),
                hit_unit="tokens",
                told_hit_ratio=_ratio(told.get(key)),
                preemptions=_count(retracted.get(key)) if has_retracted else None,
                evictions=_count(evicted.get(key)),
                eviction_unit="tokens",
                prompt_tokens=_count(_single(prompt)) if len(keys) == 1 else None,
                generated_tokens=_count(_single(generated)) if len(keys) == 1 else None,
            )
        )
    return Told(tuple(rows), () if total or pages else ("this release does not tell the cache's size",))


# llama.cpp, TensorRT-LLM, TGI, kvtop ----------------------------------------------------------------------------------


def _no_labels(labels: Labels) -> Key:
    return None, "0"


def _llama_cpp(page: Exposition) -> Told:
    def get(name: str) -> float | None:
        return _single(page.by_engine(_no_labels, f"llamacpp_{name}"))

    usage, computed, cached = get("kv_cache_usage_ratio"), get("prompt_tokens"), get("prompt_tokens_cached")
    row = EngineRow(
        usage_ratio=_ratio(usage),
        used_tokens=_whole(get("kv_cache_tokens")),
        running=_whole(get("requests_processing")),
        waiting=_whole(get("requests_deferred")),
        queries=_count(_sum(computed, cached)),
        hits=_count(cached),
        hit_unit="tokens",
        prompt_tokens=_count(computed),
        generated_tokens=_count(get("tokens_predicted")),
    )
    return Told((row,), ("no blocks: one contiguous sequence a slot",))


def _trt_key(labels: Labels) -> Key:
    return labels.get("model_name"), labels.get("engine", "0")


def _trt_llm(page: Exposition) -> Told:
    def get(name: str) -> Values:
        return page.by_engine(_trt_key, f"trtllm_{name}")

    usage, host, told = get("kv_cache_utilization"), get("kv_cache_host_utilization"), get("kv_cache_hit_rate")
    total, used, size = get("kv_cache_max_blocks"), get("kv_cache_used_blocks"), get("kv_cache_tokens_per_block")
    running, waiting = get("num_requests_running"), get("num_requests_waiting")
    hits, misses = get("kv_cache_reused_blocks"), get("kv_cache_missed_blocks")
    rows = tuple(
        EngineRow(
            model=key[0],
            engine=key[1],
            usage_ratio=_ratio(usage.get(key)),
            total_blocks=_whole(total.get(key)),
            used_blocks=_whole(used.get(key)),
            block_size=_whole(size.get(key)),
            host_usage_ratio=_ratio(host.get(key)),
            running=_whole(running.get(key)),
            waiting=_whole(waiting.get(key)),
            queries=_count(_sum(hits.get(key), misses.get(key))),
            hits=_count(hits.get(key)),
            hit_unit="blocks",
            told_hit_ratio=_ratio(told.get(key)),
        )
        for key in _keys(usage, total, running)
    )
    return Told(rows)


def _triton(page: Exposition) -> Told:
    def key_of(labels: Labels) -> Key:
        return labels.get("model"), labels.get("version", "0")

    def block(kind: str) -> Values:
        return page.by_engine(key_of, "nv_trt_llm_kv_cache_block_metrics", where={"kv_cache_block_type": kind})

    def request(kind: str) -> Values:
        return page.by_engine(key_of, "nv_trt_llm_request_metrics", where={"request_type": kind})

    total, used, size = block("max"), block("used"), block("tokens_per")
    active, waiting = request("active"), request("waiting")
    rows = tuple(
        EngineRow(
            model=key[0],
            engine=key[1],
            usage_ratio=_share(used.get(key), total.get(key)),
            total_blocks=_whole(total.get(key)),
            used_blocks=_whole(used.get(key)),
            block_size=_whole(size.get(key)),
            running=_whole(active.get(key)),
            waiting=_whole(waiting.get(key)),
        )
        for key in _keys(total, used, active)
    )
    return Told(rows)


def _tgi(page: Exposition) -> Told:
    def get(name: str) -> float | None:
        return _single(page.by_engine(_no_labels, f"tgi_{name}"))

    held, limit = get("batch_current_max_tokens"), get("batch_max_total_tokens")
    row = EngineRow(
        usage_ratio=_share(held, limit),
        used_tokens=_whole(held),
        total_tokens=_whole(limit),
        running=_whole(get("batch_current_size")),
        waiting=_whole(get("queue_size")),
    )
    return Told((row,), ("no block gauge: use is the running batch's token budget",))


_UNITS: Final = ("blocks", "tokens")


def _kvtop(page: Exposition) -> Told:
    def key_of(labels: Labels) -> Key:
        return labels.get("source"), "0"

    def get(*names: str, **where: str) -> Values:
        return page.by_engine(key_of, *(f"kvtop_{name}" for name in names), where=where)

    up, usage, host = (
        get("source_up"),
        get("cache_usage_ratio", tier="device"),
        get("cache_usage_ratio", tier="host"),
    )
    total, held = get("pool_blocks", tier="device"), get("blocks", tier="device", state="active")
    reserved, size = get("blocks", tier="device", state="reserved"), get("block_size_tokens")
    # An exporter that watches an engine of another kind says some things in that engine's units.
    lookups = {unit: (get(f"prefix_cache_query_{unit}"), get(f"prefix_cache_hit_{unit}")) for unit in _UNITS}
    unit = next((unit for unit in _UNITS if lookups[unit][0]), "tokens")
    queries, hits = lookups[unit]
    evictions, preemptions = get("evictions"), get("preemptions", "engine_preemptions")
    by_status = {status: get("sequences", status=status) for status in ("running", "waiting", "swapped")}
    rows = tuple(
        EngineRow(
            model=key[0],
            engine=key[1],
            usage_ratio=_ratio(usage.get(key)),
            total_blocks=_whole(total.get(key)),
            used_blocks=_whole(_sum(held.get(key), reserved.get(key))),
            block_size=_whole(size.get(key)),
            host_usage_ratio=_ratio(host.get(key)),
            running=_whole(by_status["running"].get(key)),
            waiting=_whole(by_status["waiting"].get(key)),
            swapped=_whole(by_status["swapped"].get(key)),
            queries=_count(queries.get(key)),
            hits=_count(hits.get(key)),
            hit_unit=unit,
            preemptions=_count(preemptions.get(key)),
            evictions=_count(evictions.get(key)),
            eviction_unit="blocks",
            is_up=value == 1.0,
        )
        for key, value in up.items()
    )
    down = [row.model or "" for row in rows if not row.is_up]
    return Told(rows, (f"the exporter has lost its engine: {', '.join(down)}",) if down else ())


DIALECTS: Final = (
    Dialect("kvtop", ("kvtop_source_up",), "kvtop_source_up", _kvtop),
    Dialect(
        "vLLM",
        ("vllm_kv_cache_usage_perc", "vllm_gpu_cache_usage_perc", "vllm_num_requests_running"),
        "vllm_num_requests_running",
        _vllm,
    ),
    Dialect("SGLang", ("sglang_token_usage", "sglang_num_running_reqs"), "sglang_num_running_reqs", _sglang),
    Dialect(
        "llama.cpp",
        ("llamacpp_requests_processing", "llamacpp_tokens_predicted"),
        "llamacpp_requests_processing",
        _llama_cpp,
    ),
    Dialect(
        "TensorRT-LLM",
        ("trtllm_kv_cache_utilization", "trtllm_num_requests_running"),
        "trtllm_num_requests_running",
        _trt_llm,
    ),
    Dialect(
        "TensorRT-LLM on Triton",
        ("nv_trt_llm_kv_cache_block_metrics",),
        "nv_trt_llm_kv_cache_block_metrics",
        _triton,
    ),
    Dialect("TGI", ("tgi_queue_size", "tgi_batch_current_size"), "tgi_queue_size", _tgi),
)


# Counters -----------------------------------------------------------------------------------------------------------

_COUNTERS: Final = (
    "queries",
    "hits",
    "preemptions",
    "evictions",
    "prompt_tokens",
    "generated_tokens",
)


class CounterMemory:
    """Keeps totals rising over restarts of an engine.

    Attributes:
        restarts: How often an engine's totals fell.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._last: dict[tuple[Key, str], float] = {}
        self._before: dict[tuple[Key, str], float] = {}

    def correct(self, rows: Iterable[EngineRow]) -> tuple[EngineRow, ...]:
        """Return the rows with what was counted before a restart added."""
        return tuple(self._correct(row) for row in rows)

    def _correct(self, row: EngineRow) -> EngineRow:
        key = (row.model, row.engine)
        told = {name: value for name in _COUNTERS if (value := getattr(row, name)) is not None}
        if any(value < self._last.get((key, name), 0.0) for name, value in told.items()):
            self.restarts += 1
            for name in _COUNTERS:
                # Of all its totals: one that has overtaken its old value already was started anew as well.
                before = self._before.get((key, name), 0.0)
                self._before[key, name] = before + self._last.pop((key, name), 0.0)
        for name, value in told.items():
            self._last[key, name] = value
        return replace(row, **{name: value + self._before.get((key, name), 0.0) for name, value in told.items()})


# Numbers ------------------------------------------------------------------------------------------------------------


def _keys(*values: Values) -> list[Key]:
    found = {key for value in values for key in value}
    return sorted(found, key=lambda key: (key[0] or "", len(key[1]), key[1]))


def _out_of_range(value: float | None) -> bool:
    return value is not None and not 0.0 <= value <= 1.0 + 1e-9


def _ratio(value: float | None) -> float | None:
    """Return a share of 0 to 1; anything else, such as the −1 of a cache that is off, is unknown."""
    return None if value is None or _out_of_range(value) else min(value, 1.0)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else _ratio(part / whole)


def _count(value: float | None) -> float | None:
    return None if value is None or value < 0 else value


def _whole(value: float | None) -> int | None:
    return None if value is None or value < 0 else round(value)


def _sum(*values: float | None) -> float | None:
    return None if any(value is None for value in values) else sum(value or 0.0 for value in values)


def _single(values: Values) -> float | None:
    return next(iter(values.values())) if len(values) == 1 else None


def _label_int(labels: Labels, name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
