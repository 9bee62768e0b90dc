"""The dashboard's panels: what each shows, once. ``dashboard`` lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

_S: Final = 'source=~"$source"'


@dataclass(frozen=True, slots=True)
class Query:
    """One query and how its series are called in the legend."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: Its title.
        text: What it shows, for who hovers over it.
        unit: Grafana's name of the unit.
        queries: What it asks.
        kind: ``timeseries``, or ``stat`` for one large number.
        stacked: Whether the series add up.
        is_ratio: Whether the axis goes from 0 to 1.
        red_from: Value from which it is drawn in red.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    is_ratio: bool = False
    red_from: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, labels: str = _S) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def _quantile(q: float, metric: str, by: str) -> str:
    return f"histogram_quantile({q:g}, sum by ({by}) ({_rate(f'{metric}_bucket')}))"


def _stat(title: str, text: str, unit: str, expr: str, red_from: float | None = None) -> Panel:
    return Panel(title, text, unit, (Query(expr, "{{source}}"),), kind="stat", red_from=red_from)


ROWS: Final = (
    Row(
        "Now",
        (
            _stat("Sources that cannot be read", "0 is good.", "none", f"sum(1 - kvtop_source_up{{{_S}}})", 1),
            _stat(
                "Cache in use",
                "(active + reserved) / pool size.",
                "percentunit",
                f'max(kvtop_cache_usage_ratio{{{_S},tier="device"}})',
                0.9,
            ),
            _stat(
                "External fragmentation",
                "1 - longest free run / allocatable.",
                "percentunit",
                f'max(kvtop_fragmentation_ratio{{{_S},tier="device",kind="external"}})',
                0.5,
            ),
            _stat("Sequences", "Running, waiting and swapped.", "none", f"sum(kvtop_sequences{{{_S}}})"),
            _stat("Integrity faults", "Any is a bug.", "none", f"sum(kvtop_integrity_faults_total{{{_S}}})", 1),
            _stat(
                "Age of the reading",
                "Seconds since the oldest good one.",
                "s",
                f"max(kvtop_source_age_seconds{{{_S}}})",
                10,
            ),
        ),
    ),
    Row(
        "Blocks",
        (
            Panel(
                "Device blocks",
                "By exclusive state; together the pool.",
                "none",
                (Query(f'kvtop_blocks{{{_S},tier="device"}}', "{{source}} {{state}}"),),
                stacked=True,
            ),
            Panel(
                "Host blocks",
                "By exclusive state; together the swap space.",
                "none",
                (Query(f'kvtop_blocks{{{_S},tier="host"}}', "{{source}} {{state}}"),),
                stacked=True,
            ),
            Panel(
                "In use",
                "(active + reserved) / pool size.",
                "percentunit",
                (Query(f"kvtop_cache_usage_ratio{{{_S}}}", "{{source}} {{tier}}"),),
                is_ratio=True,
            ),
            Panel(
                "Fragmentation",
                "external: 1 - longest free run / allocatable. internal: empty slots / slots of active blocks.",
                "percentunit",
                (Query(f'kvtop_fragmentation_ratio{{{_S},tier="device"}}', "{{source}} {{kind}}"),),
                is_ratio=True,
            ),
            Panel(
                "Longest free run",
                "Consecutive allocatable blocks.",
                "none",
                (Query(f'kvtop_largest_free_run_blocks{{{_S},tier="device"}}', "{{source}}"),),
            ),
            Panel(
                "Blocks by holders",
                "Device blocks by reference count.",
                "none",
                (Query(f"kvtop_blocks_by_ref_count{{{_S}}}", "{{source}} {{bucket}}"),),
                stacked=True,
            ),
            Panel(
                "Shared, fenced, pinned",
                "Overlap the states.",
                "none",
                (
                    Query(f'kvtop_shared_blocks{{{_S},tier="device"}}', "{{source}} shared"),
                    Query(f'kvtop_fenced_blocks{{{_S},tier="device"}}', "{{source}} fenced"),
                    Query(f'kvtop_pinned_blocks{{{_S},tier="device"}}', "{{source}} pinned"),
                ),
            ),
            Panel(
                "Handed out and given back",
                "Blocks a second.",
                "none",
                (
                    Query(_rate("kvtop_allocated_blocks_total"), "{{source}} handed out"),
                    Query(_rate("kvtop_freed_blocks_total"), "{{source}} given back"),
                ),
            ),
        ),
    ),
    Row(
        "Sequences",
        (
            Panel(
                "Sequences",
                "Unfinished ones by status.",
                "none",
                (Query(f"kvtop_sequences{{{_S}}}", "{{source}} {{status}}"),),
                stacked=True,
            ),
            Panel(
                "Requests",
                "That arrived and that ended, a second.",
                "reqps",
                (
                    Query(_rate("kvtop_requests_submitted_total"), "{{source}} arrived"),
                    Query(_rate("kvtop_requests_ended_total"), "{{source}} {{outcome}}"),
                ),
            ),
            Panel(
                "Tokens",
                "Prompt and generated tokens a second, and those computed again after a preemption.",
                "none",
                (
                    Query(_rate("kvtop_tokens_total"), "{{source}} {{kind}}"),
                    Query(_rate("kvtop_recomputed_tokens_total"), "{{source}} computed again"),
                ),
            ),
            Panel(
                "Preemptions and failures",
                "A second.",
                "none",
                (
                    Query(_rate("kvtop_preemptions_total"), "{{source}} preempted by {{mode}}"),
                    Query(_rate("kvtop_allocation_failures_total"), "{{source}} no room: {{reason}}"),
                ),
            ),
        ),
    ),
    Row(
        "Prefix cache",
        (
            Panel(
                "Hit ratio",
                "Of blocks and of tokens looked up.",
                "percentunit",
                (
                    Query(
                        f"{_rate('kvtop_prefix_cache_hit_blocks_total')}"
                        f" / ({_rate('kvtop_prefix_cache_query_blocks_total')} > 0)",
                        "{{source}} blocks",
                    ),
                    Query(
                        f"{_rate('kvtop_prefix_cache_hit_tokens_total')}"
                        f" / ({_rate('kvtop_prefix_cache_query_tokens_total')} > 0)",
                        "{{source}} tokens",
                    ),
                ),
                is_ratio=True,
            ),
            Panel(
                "Evictions, copy-on-write, collisions",
                "Blocks a second.",
                "none",
                (
                    Query(_rate("kvtop_evictions_total"), "{{source}} evicted"),
                    Query(_rate("kvtop_copy_on_write_total"), "{{source}} copied on write"),
                    Query(_rate("kvtop_key_collisions_total"), "{{source}} collisions"),
                ),
            ),
        ),
    ),
    Row(
        "Copies",
        (
            Panel(
                "Swap",
                "Bytes a second between the tiers.",
                "Bps",
                (Query(_rate("kvtop_swap_bytes_total"), "{{source}} {{direction}}"),),
            ),
            Panel(
                "Compaction and resizing",
                "Blocks moved, and runs, a second.",
                "none",
                (
                    Query(_rate("kvtop_compaction_moved_blocks_total"), "{{source}} moved"),
                    Query(_rate("kvtop_compactions_total"), "{{source}} runs: {{trigger}}"),
                    Query(_rate("kvtop_resizes_total"), "{{source}} resizes: {{direction}}"),
                ),
            ),
            Panel(
                "Time of a copy",
                "95th percentile by kind.",
                "s",
                (Query(_quantile(0.95, "kvtop_copy_seconds", "le, source, kind"), "{{source}} {{kind}}"),),
            ),
        ),
    ),
    Row(
        "Engine",
        (
            Panel(
                "Steps",
                "Steps a second, skipped ones included.",
                "none",
                (Query(_rate("kvtop_step_seconds_count"), "{{source}}"),),
            ),
            Panel(
                "Time of a step",
                "Median and 99th percentile.",
                "s",
                (
                    Query(_quantile(0.5, "kvtop_step_seconds", "le, source"), "{{source}} median"),
                    Query(_quantile(0.99, "kvtop_step_seconds", "le, source"), "{{source}} 99 %"),
                ),
            ),
            Panel(
                "Waits for locks",
                "Share of the time spent waiting, by layer.",
                "percentunit",
                (Query(_rate("kvtop_lock_wait_seconds_sum"), "{{source}} {{layer}}"),),
            ),
            Panel(
                "Time a lock is held",
                "99th percentile of a sample, by layer.",
                "s",
                (Query(_quantile(0.99, "kvtop_lock_hold_seconds", "le, source, layer"), "{{source}} {{layer}}"),),
            ),
            Panel(
                "Retries and refills",
                "A second.",
                "none",
                (
                    Query(_rate("kvtop_optimistic_retries_total"), "{{source}} optimistic retries"),
                    Query(_rate("kvtop_reservation_refills_total"), "{{source}} reservation refills"),
                ),
            ),
        ),
    ),
    Row(
        "GPUs",
        (
            Panel(
                "GPU memory",
                "By whose processes hold it, and in all.",
                "bytes",
                (
                    Query(f"kvtop_gpu_process_memory_bytes{{{_S}}}", "GPU {{gpu}} {{process}}"),
                    Query(f"kvtop_gpu_memory_used_bytes{{{_S}}}", "GPU {{gpu}} in use"),
                    Query(f"kvtop_gpu_memory_total_bytes{{{_S}}}", "GPU {{gpu}} in all"),
                ),
            ),
            Panel(
                "GPU utilization",
                "Share of the time in which something ran.",
                "percentunit",
                (Query(f"kvtop_gpu_utilization_ratio{{{_S}}}", "GPU {{gpu}}"),),
                is_ratio=True,
            ),
            Panel(
                "GPU power",
                "Drawn now.",
                "watt",
                (Query(f"kvtop_gpu_power_watts{{{_S}}}", "GPU {{gpu}}"),),
            ),
            Panel(
                "GPU temperature",
                "Of the chip.",
                "celsius",
                (Query(f"kvtop_gpu_temperature_celsius{{{_S}}}", "GPU {{gpu}}"),),
            ),
            Panel(
                "PCIe",
                "Bytes a second.",
                "Bps",
                (Query(f"kvtop_gpu_pcie_bytes_per_second{{{_S}}}", "GPU {{gpu}} {{direction}}"),),
            ),
            Panel(
                "Driver and GPU states",
                "What NVML answers.",
                "none",
                (
                    Query(f"kvtop_gpu_driver_state{{{_S}}} == 1", "driver {{state}}"),
                    Query(f"kvtop_gpu_state{{{_S}}} == 1", "GPU {{gpu}} {{state}}"),
                ),
            ),
        ),
    ),
)
