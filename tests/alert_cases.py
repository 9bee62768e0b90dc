"""When each alert fires, and when it must not: one load for each, written as ``promtool test rules`` reads it.

Samples come once a minute; ``0x9`` is a zero and nine more, ``0+5x9`` grows by five each minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

WHERE: Final = 'source="embedded",instance="gpu7:9464",job="kvtop"'
LABELS: Final = {"source": "embedded", "instance": "gpu7:9464", "job": "kvtop"}


@dataclass(frozen=True, slots=True)
class AlertCase:
    """A load in which one alert fires and resolves, and loads that come close and leave it silent.

    Attributes:
        alert: Its name.
        series: Series and their values, in which it fires.
        pending_at, fires_at, resolved_at: Minutes at which it does not fire yet, fires, and has resolved.
        labels: Labels of the alert that fires, besides ``LABELS`` and the severity.
        severity, summary: What the page says.
        silent: Loads in which it never fires, by what they are like; looked at every two minutes.
        silent_until: Minutes these loads last.
        base_labels: Labels every alert has; one on the scrape itself has fewer.
    """

    alert: str
    severity: str
    summary: str
    series: dict[str, str]
    pending_at: int
    fires_at: int
    resolved_at: int
    silent: dict[str, dict[str, str]]
    labels: dict[str, str] = field(default_factory=dict)
    silent_until: int = 60
    base_labels: dict[str, str] = field(default_factory=lambda: dict(LABELS))


def gauge(name: str, labels: str = "") -> str:
    return f"{name}{{{WHERE}{',' if labels else ''}{labels}}}"


DEVICE: Final = gauge("kvtop_cache_usage_ratio", 'tier="device"')
HOST: Final = gauge("kvtop_cache_usage_ratio", 'tier="host"')
EXTERNAL: Final = gauge("kvtop_fragmentation_ratio", 'tier="device",kind="external"')
INTERNAL: Final = gauge("kvtop_fragmentation_ratio", 'tier="device",kind="internal"')
CONTIGUOUS: Final = gauge("kvtop_allocation_failures_total", 'reason="contiguous"')
CAPACITY: Final = gauge("kvtop_allocation_failures_total", 'reason="capacity"')
SWAPPED_OUT: Final = gauge("kvtop_preemptions_total", 'mode="swap"')
RECOMPUTED: Final = gauge("kvtop_preemptions_total", 'mode="recompute"')
FINISHED: Final = gauge("kvtop_requests_ended_total", 'outcome="finished"')
HITS: Final = gauge("kvtop_prefix_cache_hit_blocks_total")
QUERIES: Final = gauge("kvtop_prefix_cache_query_blocks_total")
RUNNING: Final = gauge("kvtop_sequences", 'status="running"')
WAITING: Final = gauge("kvtop_sequences", 'status="waiting"')
GENERATED: Final = gauge("kvtop_tokens_total", 'kind="generated"')
PROMPT: Final = gauge("kvtop_tokens_total", 'kind="prompt"')
UP: Final = gauge("kvtop_source_up")
ACTIVE: Final = gauge("kvtop_blocks", 'tier="device",state="active"')
CACHED: Final = gauge("kvtop_blocks", 'tier="device",state="cached"')
SCRAPED: Final = 'up{instance="gpu7:9464",job="kvtop"}'

CASES: Final = (
    AlertCase(
        alert="KvtopCacheNearlyFull",
        severity="warning",
        summary="KV cache of embedded on gpu7:9464 is 95% in use",
        series={DEVICE: "0.5x9 0.95x29 0.5x30", HOST: "0.5x70"},
        pending_at=16,
        fires_at=30,
        resolved_at=50,
        labels={"tier": "device"},
        silent={
            "just below": {DEVICE: "0.9x70"},
            "a short peak": {DEVICE: "0.5x9 1x2 0.5x60"},
            "only the host tier": {DEVICE: "0.5x70", HOST: "1x70"},
        },
    ),
    AlertCase(
        alert="KvtopFreeBlocksSwinging",
        severity="warning",
        summary="Free blocks of embedded on gpu7:9464 swing by 80% of the pool",
        series={DEVICE: "0.1x9 " + "0.1 0.9 " * 15 + "0.5x40"},
        pending_at=15,
        fires_at=30,
        resolved_at=60,
        labels={"tier": "device"},
        silent={
            "one rise, however large": {DEVICE: "0x20 1x50"},
            "one rise and one fall": {DEVICE: "0x20 1x2 0x50"},
            "small swings": {DEVICE: "0.3 0.8 " * 35},
        },
    ),
    AlertCase(
        alert="KvtopFragmentationHigh",
        severity="warning",
        summary="Free blocks of embedded on gpu7:9464 are scattered: external fragmentation 80%",
        series={EXTERNAL: "0.1x9 0.8x29 0x40", DEVICE: "0.8x80"},
        pending_at=18,
        fires_at=35,
        resolved_at=50,
        labels={"tier": "device", "kind": "external"},
        silent={
            "just below": {EXTERNAL: "0.5x80", DEVICE: "0.8x80"},
            "hardly a free block": {EXTERNAL: "0.9x80", DEVICE: "0.995x80"},
            "compacted in time": {EXTERNAL: "0x9 0.9x6 0x60", DEVICE: "0.8x80"},
            "the other kind": {INTERNAL: "0.9x80", EXTERNAL: "0x80", DEVICE: "0.8x80"},
        },
    ),
    AlertCase(
        alert="KvtopContiguousRequestsFailing",
        severity="warning",
        summary="Contiguous requests of embedded on gpu7:9464 find no run of blocks",
        series={CONTIGUOUS: "0x9 0+2x20 40x40"},
        pending_at=12,
        fires_at=25,
        resolved_at=45,
        labels={"reason": "contiguous"},
        silent={
            "failures of another kind": {CAPACITY: "0+5x70", CONTIGUOUS: "0x70"},
            "one failure": {CONTIGUOUS: "0x20 1x50"},
        },
    ),
    AlertCase(
        alert="KvtopPreemptionStorm",
        severity="critical",
        summary="embedded on gpu7:9464: 3.0 preemptions for each finished request",
        series={SWAPPED_OUT: "0x9 0+20x30 600x40", RECOMPUTED: "0x9 0+10x30 300x40", FINISHED: "0+10x80"},
        pending_at=12,
        fires_at=30,
        resolved_at=55,
        silent={
            "one each": {SWAPPED_OUT: "0+10x80", RECOMPUTED: "0x80", FINISHED: "0+10x80"},
            "a moment of it": {SWAPPED_OUT: "0x20 60x60", RECOMPUTED: "0x80", FINISHED: "0+10x80"},
        },
    ),
    AlertCase(
        alert="KvtopSwapSpaceShort",
        severity="warning",
        summary="Swap space of embedded on gpu7:9464 is 97% in use",
        series={HOST: "0.5x9 0.97x29 0.5x30", DEVICE: "0.5x70"},
        pending_at=16,
        fires_at=30,
        resolved_at=50,
        labels={"tier": "host"},
        silent={"just below": {HOST: "0.9x70"}, "only the device tier": {HOST: "0x70", DEVICE: "1x70"}},
    ),
    AlertCase(
        alert="KvtopHitRatioCollapsed",
        severity="warning",
        summary="Prefix cache hit ratio of embedded on gpu7:9464 fell to 10%",
        series={QUERIES: "0+100x160", HITS: "0+80x60 4810+10x30 5190+80x60"},
        pending_at=65,
        fires_at=85,
        resolved_at=110,
        silent_until=120,
        silent={
            "was never worth much": {QUERIES: "0+100x120", HITS: "0+8x60 481+1x60"},
            "always low": {QUERIES: "0+100x120", HITS: "0+8x120"},
            "half of what it was": {QUERIES: "0+100x120", HITS: "0+80x60 4841+41x60"},
            "nobody asks": {QUERIES: "0+100x60 6000x60", HITS: "0+80x60 4800x60"},
        },
    ),
    AlertCase(
        alert="KvtopNoProgress",
        severity="critical",
        summary="embedded on gpu7:9464 has 7 sequences and computes no token",
        series={
            RUNNING: "4x70",
            WAITING: "3x70",
            GENERATED: "0+50x9 500x30 500+50x30",
            PROMPT: "0+50x9 500x60",
            UP: "1x70",
        },
        pending_at=17,
        fires_at=30,
        resolved_at=50,
        silent={
            "nothing to do": {RUNNING: "0x70", WAITING: "0x70", GENERATED: "500x70", PROMPT: "0x70", UP: "1x70"},
            "only prompts": {RUNNING: "4x70", WAITING: "0x70", GENERATED: "5x70", PROMPT: "0+9x70", UP: "1x70"},
            "cannot be read": {RUNNING: "4x70", WAITING: "3x70", GENERATED: "5x70", PROMPT: "5x70", UP: "0x70"},
        },
    ),
    AlertCase(
        alert="KvtopIntegrityFault",
        severity="critical",
        summary="embedded on gpu7:9464 broke law 2 of the block pool",
        series={gauge("kvtop_integrity_faults_total", 'law="2"'): "0x9 1x20 0x30"},
        pending_at=9,
        fires_at=10,
        resolved_at=31,
        labels={"law": "2"},
        silent={"no fault": {gauge("kvtop_integrity_faults_total", 'law="2"'): "0x60"}},
    ),
    AlertCase(
        alert="KvtopReferencesLeaking",
        severity="critical",
        summary="embedded on gpu7:9464 holds 12 blocks and has no sequence",
        series={ACTIVE: "30x9 12x30 0x30", CACHED: "50x70", RUNNING: "2x9 0x60", WAITING: "0x70"},
        pending_at=18,
        fires_at=30,
        resolved_at=45,
        silent={
            "cached blocks are held by nobody": {ACTIVE: "0x70", CACHED: "50x70", RUNNING: "0x70", WAITING: "0x70"},
            "sequences that wait": {ACTIVE: "12x70", RUNNING: "0x70", WAITING: "1x70"},
            "let go in time": {ACTIVE: "12x29 0x40", RUNNING: "1x24 0x45", WAITING: "0x70"},
        },
    ),
    AlertCase(
        alert="KvtopSourceDown",
        severity="critical",
        summary="embedded on gpu7:9464 cannot be read",
        series={UP: "1x9 0x20 1x30"},
        pending_at=10,
        fires_at=20,
        resolved_at=31,
        silent={"up": {UP: "1x60"}, "a single failed reading": {UP: "1x20 0 1x40"}},
    ),
    AlertCase(
        alert="KvtopExporterAbsent",
        severity="critical",
        summary="kvtop on gpu7:9464 is not scraped",
        series={SCRAPED: "1x9 0x20 1x30"},
        pending_at=11,
        fires_at=20,
        resolved_at=31,
        silent={"up": {SCRAPED: "1x60"}, "one failed scrape": {SCRAPED: "1x20 0 1x40"}},
        base_labels={"instance": "gpu7:9464", "job": "kvtop"},
    ),
)
