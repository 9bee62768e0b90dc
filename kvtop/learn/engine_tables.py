"""Engines of lesson files: ``[engine.NAME]`` tables and their requests → ``EngineSpec``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from allocator.errors import ConfigError
from kvtop.engine_setup import EngineOptions, build_config
from kvtop.learn.lesson import EngineSpec, RequestSpec
from kvtop.learn.tables import Table

_ID: Final = re.compile(r"[a-z][a-z0-9-]*")
_LABEL: Final = re.compile(r"[\w. -]{1,24}")

#: Keys of an engine's table → the option's name.
_OPTIONS: Final[Mapping[str, str]] = {
    "blocks": "num_blocks",
    "block-size": "block_size",
    "geometry": "geometry",
    "swap-blocks": "num_swap_blocks",
    "slab-blocks": "slab_blocks",
    "policy": "policy",
    "prefill-tokens": "prefill_tokens",
    "preempt": "preempt",
    "eviction": "eviction",
    "prefix-cache": "prefix_cache",
    "watermark": "watermark_ratio",
    "compact": "compact",
    "compact-threshold": "compact_threshold_ratio",
    "compact-budget": "compact_budget",
    "copy-bandwidth": "copy_gb_per_s",
    "max-running": "max_running",
    "stamp": "stamp",
    "seed": "seed",
    "speed": "speed",
    "workload": "workload",
    "rate": "rate_scale",
    "size": "size_scale",
    "requests": "num_requests",
}
#: What a lesson's engine is unless its file says otherwise: books only, which needs no torch and so starts at once.
_USUAL: Final = {
    "geometry": "none",
    "executor": "inline",
    "device": "cpu",
    "num_swap_blocks": 0,
    "watermark_ratio": 0.0,
}
_ENGINE_KEYS: Final = (
    *("kind", "warm-steps", "steps", "shared-prompt", "record-steps", "record-every", "request", "same-requests-as"),
    *_OPTIONS,
)
_REQUEST_KEYS: Final = (
    "label", "prompt", "output", "at", "like", "common", "change", "ends", "contiguous", "priority",
)  # fmt: skip


def read_engines(top: Table) -> dict[str, EngineSpec]:
    """Return a lesson's engines by name, in order. Raises ``UserError`` where one is wrong."""
    tables = top.table("engine")
    if not tables.values:
        top.refuse("engine", "engine: missing; at least one [engine.NAME] table")
    engines: dict[str, EngineSpec] = {}
    for name in tables.values:
        if not _ID.fullmatch(name):
            tables.refuse(name, f"engine.{name}: a name of small letters, digits and -")
        engines[name] = _engine(tables.table(name), engines)
    return engines


def _engine(table: Table, before: Mapping[str, EngineSpec]) -> EngineSpec:
    table.only(_ENGINE_KEYS)
    values = {field: table.values[key] for key, field in _OPTIONS.items() if key in table.values}
    try:
        options = msgspec.convert({**_USUAL, **values}, EngineOptions)
        build_config(options)
    except msgspec.ValidationError as error:
        problem, _, field = str(error).replace("`", "").partition(" - at $.")
        key = next((k for k, f in _OPTIONS.items() if f == field), field)
        table.refuse(key, f"{key}: {problem[:1].lower()}{problem[1:]}")
    except ConfigError as error:
        option = str(error).split(" ", 1)[0].lstrip("-").rstrip(":")
        table.refuse(option, str(error))
    kind = table.one_of("kind", ("engine", "recording", "server"), "engine")
    if (key := "same-requests-as") in table.values:
        if table.values.get("request"):
            table.refuse(key, f"{key} and request: one of the two, not both")
        requests = before[table.one_of(key, tuple(before) or ("(no engine before it)",))].requests
    else:
        requests = _requests(table)
    return EngineSpec(
        options=options,
        requests=requests,
        has_workload="workload" in table.values,
        warm_steps=table.whole("warm-steps", 0, 1_000_000, 0),
        max_steps=table.whole("steps", 1, 1_000_000) if "steps" in table.values else None,
        shared_prompt=table.whole("shared-prompt", 0, 65536, 0),
        kind=kind,
        record_steps=table.whole("record-steps", 1, 100_000, 1000),
        record_every=table.whole("record-every", 1, 10_000, 10),
    )


def _requests(table: Table) -> tuple[RequestSpec, ...]:
    tables = table.tables("request")
    requests = tuple(_request(each) for each in tables)
    labels = [request.label for request in requests]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            tables[i].refuse("label", f"label: {label}: given twice")
    return requests


def _request(table: Table) -> RequestSpec:
    table.only(_REQUEST_KEYS)
    label = table.text("label")
    if not _LABEL.fullmatch(label):
        table.refuse("label", f"label: {label}: up to 24 letters, digits, spaces, . and -")
    prompt = table.whole("prompt", 1, 65536)
    output = table.whole("output", 0, 65536, 0)
    ends = table.whole("ends", 1, prompt + output) if "ends" in table.values else None
    like = table.text("like", "none")
    common = table.whole("common", 0, prompt, prompt if "like" in table.values else 0)
    return RequestSpec(
        label=label,
        prompt=prompt,
        output=output,
        at=table.whole("at", 0, 1_000_000, 0),
        like=like if "like" in table.values else "",
        common=common,
        change=table.whole("change", 0, max(0, common - 1)) if "change" in table.values else None,
        ends=ends,
        contiguous=table.flag("contiguous"),
        priority=table.whole("priority", 0, 100, 0),
    )
