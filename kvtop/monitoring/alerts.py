"""The recording rules and the alerts: each once. Everything that speaks of an alert is made from here.

Expressions hold words in angle brackets, which ``rules`` fills in: ``<window>`` and ``<long>`` are durations,
``<threshold>`` is the alert's number, ``<job>`` the scrape job's name. Sums keep the labels of the scrape, so that two
engines of one name on different machines stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["warning", "critical"]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: Its name; the runbook's page is called after it.
        page: Name of its runbook page, without the ending.
        severity: ``critical`` wakes somebody up; ``warning`` waits for the morning.
        hold: How long the expression must hold before it fires.
        expr: When it fires.
        threshold: What ``<threshold>`` stands for; ``None`` where there is none.
        summary: One line for the page's title.
        description: What it means and the first thing to look at.
    """

    name: str
    page: str
    severity: Severity
    hold: str
    expr: str
    threshold: float | None
    summary: str
    description: str


_WHERE: Final = "{{ $labels.source }} on {{ $labels.instance }}"

RECORDINGS: Final = (
    Recording(
        "kvtop:cache_usage:avg",
        "avg_over_time(kvtop_cache_usage_ratio[<window>])",
    ),
    Recording(
        "kvtop:cache_usage:swing",
        "max_over_time(kvtop_cache_usage_ratio[<window>]) - min_over_time(kvtop_cache_usage_ratio[<window>])",
    ),
    Recording(
        "kvtop:fragmentation:avg",
        "avg_over_time(kvtop_fragmentation_ratio[<window>])",
    ),
    Recording(
        "kvtop:prefix_cache_hit:ratio",
        "rate(kvtop_prefix_cache_hit_blocks_total[<window>])\n"
        "  / (rate(kvtop_prefix_cache_query_blocks_total[<window>]) > 0)",
    ),
    Recording(
        "kvtop:prefix_cache_hit:ratio_long",
        "rate(kvtop_prefix_cache_hit_blocks_total[<long>])\n"
        "  / (rate(kvtop_prefix_cache_query_blocks_total[<long>]) > 0)",
    ),
    Recording(
        "kvtop:preemptions:per_finished_request",
        "sum without (mode) (increase(kvtop_preemptions_total[<window>]))\n"
        "  / clamp_min(sum without (outcome) "
        '(increase(kvtop_requests_ended_total{outcome="finished"}[<window>])), 1)',
    ),
    Recording(
        "kvtop:tokens:increase",
        "sum without (kind) (increase(kvtop_tokens_total[<window>]))",
    ),
    Recording(
        "kvtop:sequences:sum",
        "sum without (status) (kvtop_sequences)",
    ),
)

ALERTS: Final = (
    Alert(
        name="KvtopCacheNearlyFull",
        page="cache-nearly-full",
        severity="warning",
        hold="5m",
        expr='kvtop:cache_usage:avg{tier="device"} > <threshold>',
        threshold=0.9,
        summary=f"KV cache of {_WHERE} is {{{{ $value | humanizePercentage }}}} in use",
        description="Blocks that sequences hold, cached ones not counted. The next growth preempts somebody.",
    ),
    Alert(
        name="KvtopFreeBlocksSwinging",
        page="free-blocks-swinging",
        severity="warning",
        # Longer than the window, so that a single rise or fall, however large, does not fire.
        hold="10m",
        expr='kvtop:cache_usage:swing{tier="device"} > <threshold>',
        threshold=0.5,
        summary=f"Free blocks of {_WHERE} swing by {{{{ $value | humanizePercentage }}}} of the pool",
        description="The pool fills and empties again and again: bursts of load, or sequences pushing each other out.",
    ),
    Alert(
        name="KvtopFragmentationHigh",
        page="fragmentation-high",
        severity="warning",
        hold="10m",
        expr='kvtop:fragmentation:avg{tier="device",kind="external"} > <threshold>\n'
        '  and ignoring (kind) kvtop:cache_usage:avg{tier="device"} < 0.99',
        threshold=0.5,
        summary=f"Free blocks of {_WHERE} are scattered: external fragmentation {{{{ $value | humanizePercentage }}}}",
        description="The longest free run is short beside what is free. Paged sequences do not mind; contiguous "
        "requests, shrinking and giving memory back do.",
    ),
    Alert(
        name="KvtopContiguousRequestsFailing",
        page="contiguous-requests-failing",
        severity="warning",
        hold="5m",
        expr='increase(kvtop_allocation_failures_total{reason="contiguous"}[<window>]) > <threshold>',
        threshold=0,
        summary=f"Contiguous requests of {_WHERE} find no run of blocks",
        description="Enough blocks are free, but not side by side. Compaction makes a run.",
    ),
    Alert(
        name="KvtopPreemptionStorm",
        page="preemption-storm",
        severity="critical",
        hold="5m",
        expr="kvtop:preemptions:per_finished_request > <threshold>",
        threshold=1,
        summary=f'{_WHERE}: {{{{ $value | printf "%.1f" }}}} preemptions for each finished request',
        description="Sequences push each other out faster than they finish: work is done twice, and latency grows "
        "without bound.",
    ),
    Alert(
        name="KvtopSwapSpaceShort",
        page="swap-space-short",
        severity="warning",
        hold="5m",
        expr='kvtop:cache_usage:avg{tier="host"} > <threshold>',
        threshold=0.9,
        summary=f"Swap space of {_WHERE} is {{{{ $value | humanizePercentage }}}} in use",
        description="When the host tier is full, preempted sequences are computed anew instead of swapped.",
    ),
    Alert(
        name="KvtopHitRatioCollapsed",
        page="hit-ratio-collapsed",
        severity="warning",
        hold="10m",
        expr="kvtop:prefix_cache_hit:ratio < <threshold> * kvtop:prefix_cache_hit:ratio_long\n"
        "  and kvtop:prefix_cache_hit:ratio_long > 0.1",
        threshold=0.5,
        summary=f"Prefix cache hit ratio of {_WHERE} fell to {{{{ $value | humanizePercentage }}}}",
        description="Less than half of what it was over the longer window: prompts changed, or what they share is "
        "evicted before it is used again.",
    ),
    Alert(
        name="KvtopNoProgress",
        page="no-progress",
        severity="critical",
        hold="5m",
        expr="kvtop:sequences:sum > 0\n  and kvtop:tokens:increase == 0\n  and kvtop_source_up == 1",
        threshold=None,
        summary=f"{_WHERE} has {{{{ $value }}}} sequences and computes no token",
        description="The engine answers, holds work, and gets nowhere: it is paused, stuck, or waits for programs "
        "that do nothing.",
    ),
    Alert(
        name="KvtopIntegrityFault",
        page="integrity-fault",
        severity="critical",
        hold="0s",
        expr="kvtop_integrity_faults_total > 0",
        threshold=None,
        summary=f"{_WHERE} broke law {{{{ $labels.law }}}} of the block pool",
        description="Sequences may read each other's keys and values. Do not trust its answers; restart it.",
    ),
    Alert(
        name="KvtopReferencesLeaking",
        page="references-leaking",
        severity="critical",
        hold="10m",
        expr='sum without (tier, state) (kvtop_blocks{state="active"}) > 0\n  and kvtop:sequences:sum == 0',
        threshold=None,
        summary=f"{_WHERE} holds {{{{ $value }}}} blocks and has no sequence",
        description="References were not given back. The blocks are lost until the engine restarts, and more will be.",
    ),
    Alert(
        name="KvtopSourceDown",
        page="source-down",
        severity="critical",
        hold="1m",
        expr="kvtop_source_up == 0",
        threshold=None,
        summary=f"{_WHERE} cannot be read",
        description="kvtop is scraped, but the engine it watches does not answer. Its numbers are the last known.",
    ),
    Alert(
        name="KvtopExporterAbsent",
        page="exporter-absent",
        severity="critical",
        hold="2m",
        expr='up{job="<job>"} == 0 or absent(up{job="<job>"})',
        threshold=None,
        summary="kvtop{{ with $labels.instance }} on {{ . }}{{ end }} is not scraped",
        description="Nothing is known about its engines, and none of the other alerts can fire.",
    ),
)
