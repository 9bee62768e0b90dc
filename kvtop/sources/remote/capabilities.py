"""What a console can show of an engine over the network, panel by panel, or why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvtop.model.remote import Capability, EngineRow
from kvtop.sources.remote.offers import RESET_RUNNING, SLEEP_0

NOT_OFFERED: Final = "not offered by this engine"
_EVENTS_FLAG: Final = {
    "vLLM": "needs --kv-events-config on the server, and its endpoint: --events tcp://HOST:5557",
    "SGLang": "needs --kv-events-config on the server, and its endpoint: --events tcp://HOST:5557",
    "TensorRT-LLM": "needs kv_events_config on the server, and its endpoint: --events tcp://HOST:PORT",
}
READ_ONLY: Final = "read only: start with --allow-operations"
_NO_OPERATIONS: Final = {
    "kvtop": "read only over metrics; kvtop attach local:NAME on its machine takes operations",
}
_PAUSE: Final = ("pause and continue", ("pause-generation", "continue-generation"))
#: Engine → its operations: what the table calls them, and the commands.
_OPERATIONS: Final[Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "vLLM": (
        ("reset the prefix cache", ("reset-prefix-cache",)),
        ("reset while requests run", (RESET_RUNNING,)),
        _PAUSE,
        ("sleep", ("sleep",)),
        ("sleep at level 0", (SLEEP_0,)),
        ("wake", ("wake",)),
    ),
    "SGLang": (
        ("flush the prefix cache", ("reset-prefix-cache",)),
        ("flush while requests run", (RESET_RUNNING,)),
        _PAUSE,
        ("release and resume memory", ("release-memory", "resume-memory")),
    ),
    "llama.cpp": (
        ("erase a slot", ("erase-slot",)),
        ("save and restore a slot", ("save-slot", "restore-slot")),
    ),
    "kvcached": (("change the memory limit", ("set-memory-limit",)),),
}
_PLUGIN: Final = "needs the plugin: kvtop beside {}, KVTOP_PUBLISH=1, kvtop attach local"
#: Panel → the numbers of which any one makes it available.
_PANELS: Final = (
    ("use of the cache", ("usage_ratio", "used_tokens")),
    ("size in blocks", ("total_blocks",)),
    ("cached and idle", ("cached_tokens",)),
    ("running and waiting", ("running",)),
    ("hit ratio", ("hits", "told_hit_ratio")),
    ("preemptions", ("preemptions",)),
    ("evictions", ("evictions",)),
    ("host tier", ("host_usage_ratio",)),
)
_WHY_NOT: Final = {
    ("vLLM", "cached and idle"): "not in its metrics; cache events tell it",
    ("vLLM", "evictions"): "not in its metrics; cache events tell it",
    ("vLLM", "host tier"): "needs offloading, --kv-offloading-size",
    ("vLLM", "size in blocks"): "not told until the engine has started, or by this release",
    ("SGLang", "host tier"): "needs --enable-hierarchical-cache",
    ("SGLang", "evictions"): "not told until the first one, or by this release",
    ("SGLang", "preemptions"): "not told until the first one, or by this release",
    ("llama.cpp", "use of the cache"): "gone from its metrics; needs /slots, which this server does not offer",
    ("llama.cpp", "size in blocks"): "this engine has slots, no blocks",
}


def capabilities_of(
    kind: str,
    rows: Sequence[EngineRow],
    *,
    events_reason: str | None,
    has_events: bool,
    offers: Mapping[str, str | None] | None = None,
    may_operate: bool = False,
) -> tuple[Capability, ...]:
    """Return the table: for each panel and operation, available or why not.

    Args:
        kind: What the engine is.
        rows: What its metrics tell.
        events_reason: Why there is no stream of events, when the server itself has told.
        has_events: Whether there is a stream of events.
        offers: Operation → why the server does not offer it; ``None`` when it does.
        may_operate: Whether whoever looks may also act.
    """
    table = []
    for panel, fields in _PANELS:
        is_known = any(getattr(row, field) is not None for row in rows for field in fields)
        table.append(Capability(panel, None if is_known else _WHY_NOT.get((kind, panel), NOT_OFFERED)))
    events = None if has_events else events_reason or _EVENTS_FLAG.get(kind, NOT_OFFERED)
    table.append(Capability("resident prefixes", events))
    plugin = _PLUGIN.format(kind) if kind in ("vLLM", "SGLang") else NOT_OFFERED
    local = "kvtop attach local:NAME on its machine shows it" if kind == "kvtop" else plugin
    table.append(Capability("physical block map", local))
    table.append(Capability("sequences and their blocks", local))
    table += operations_of(kind, offers or {}, may_operate)
    for operation in ("compact", "swap", "resize", "pin"):
        if kind != "kvtop":
            table.append(Capability(operation, NOT_OFFERED))
    return tuple(table)


def operations_of(kind: str, offers: Mapping[str, str | None], may_operate: bool) -> tuple[Capability, ...]:
    """Return the table's lines on operations: available, or what is missing for them."""
    if kind not in _OPERATIONS:
        return (Capability("operations", _NO_OPERATIONS.get(kind, NOT_OFFERED)),)
    otherwise = None if may_operate else READ_ONLY
    return tuple(
        Capability(name, offers.get(operations[0]) or otherwise, operations) for name, operations in _OPERATIONS[kind]
    )
