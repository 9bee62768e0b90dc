"""The report of a run: the keys that ``kvtop run --json`` prints, and the same facts for people. Pure functions."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from allocator.block_map import BlockArrays
from allocator.config import STEP_S
from allocator.fault_kinds import FAULT_KINDS
from allocator.metrics import ratio, tier_numbers
from allocator.snapshot import Snapshot, Verified
from kvtop.advisor import advise, hit_ratios, prediction_error
from kvtop.model.format import count, difference, percent, seconds, size

Report: TypeAlias = dict[str, Any]


#: Columns of the text report.
_WIDTH = 110


def build_report(
    snapshot: Snapshot, device: BlockArrays, wall_s: float, engine_s: float, *, num_host_blocks: int = 0
) -> Report:
    """Return the report of one engine as it stands. Keys never change meaning; a ratio of nothing is ``None``.

    Args:
        snapshot: The engine at a step boundary.
        device: Device blocks at the same boundary; every number under ``blocks`` and ``fragmentation`` is theirs.
        wall_s: Real seconds of the whole run, reading the input included. [s]
        engine_s: Real seconds inside the engine. [s]
        num_host_blocks: Host pool size.
    """
    counters = snapshot.counters
    numbers = tier_numbers(device, snapshot.block_size, snapshot.slab_size)
    return {
        "requests": {
            "submitted": counters.submitted,
            "finished": counters.finished,
            "cancelled": counters.cancelled,
            "refused": counters.refused,
        },
        "steps": snapshot.step,
        "tokens": {"prompt": counters.prompt_tokens, "generated": counters.generated_tokens},
        "prefix_cache": {
            "query_blocks": counters.query_blocks,
            "hit_blocks": counters.hit_blocks,
            "hit_ratio": ratio(counters.hit_blocks, counters.query_blocks),
            "query_tokens": counters.query_tokens,
            "hit_tokens": counters.hit_tokens,
            "token_hit_ratio": ratio(counters.hit_tokens, counters.query_tokens),
            "evictions": counters.evictions,
        },
        "blocks": {
            "total": numbers.total,
            "free": numbers.free,
            "cached": numbers.cached,
            "active": numbers.active,
            "reserved": numbers.reserved,
            "shared": numbers.shared,
            "fenced": numbers.fenced,
            "pinned": numbers.pinned,
            "peak_active": counters.peak_active,
        },
        "fragmentation": {
            "external_ratio": numbers.external_ratio,
            "internal_ratio": numbers.internal_ratio,
            "largest_free_run": numbers.largest_free_run,
            "free_runs": numbers.free_runs,
        },
        "swap": {
            "out_blocks": counters.swap_out_blocks,
            "in_blocks": counters.swap_in_blocks,
            "out_bytes": counters.swap_out_bytes,
            "in_bytes": counters.swap_in_bytes,
        },
        "compaction": {
            "runs": counters.compactions_manual + counters.compactions_threshold + counters.compactions_contiguous,
            "moved_blocks": counters.compaction_moved_blocks,
            "moved_bytes": counters.compaction_moved_bytes,
        },
        "resize": {"grown_blocks": counters.grown_blocks, "shrunk_blocks": counters.shrunk_blocks},
        "preemptions": {"swap": counters.preemptions_swap, "recompute": counters.preemptions_recompute},
        "copy_on_write_blocks": counters.copy_on_write_blocks,
        "allocation_failures": {"capacity": counters.failures_capacity, "contiguous": counters.failures_contiguous},
        "contiguous": {
            "admitted": counters.contiguous_admitted,
            "compactions": counters.compactions_contiguous,
            "mean_wait_s": ratio(counters.contiguous_waited_steps * STEP_S, counters.contiguous_admitted),
            "mean_needed_blocks": ratio(counters.contiguous_needed_blocks, counters.failures_contiguous),
            "mean_longest_run": ratio(counters.contiguous_longest_blocks, counters.failures_contiguous),
            "mean_allocatable_blocks": ratio(counters.contiguous_allocatable_blocks, counters.failures_contiguous),
        },
        "integrity": {"checks": counters.integrity_checks, "faults": counters.integrity_faults},
        "injected": dict(zip(FAULT_KINDS, counters.injected, strict=True)),
        "reuse": _reuse(snapshot, numbers.total),
        "advice": [msgspec.structs.asdict(advice) for advice in advise(snapshot, numbers.total, num_host_blocks)],
        "verified": _verified(snapshot.verified),
        "wall_s": round(wall_s, 6),
        "engine_s": round(engine_s, 6),
    }


def _reuse(snapshot: Snapshot, num_blocks: int) -> dict[str, Any] | None:
    reuse, counters = snapshot.reuse, snapshot.counters
    if reuse is None:
        return None
    ratios, counted = hit_ratios(reuse), ratio(counters.hit_blocks, counters.query_blocks)
    return {
        "exact": reuse.is_exact,
        "query_blocks": reuse.query_blocks,
        "floor": reuse.floor,
        "ceiling": reuse.ceiling,
        "error_ratio": prediction_error(ratios.get(num_blocks), counted),
        "predictions": [
            {"blocks": p.capacity, "hit_blocks": p.hit_blocks, "hit_ratio": ratios[p.capacity]}
            for p in reuse.predictions
        ],
    }


def _verified(verified: Verified | None) -> Report | None:
    if verified is None:
        return None
    largest = verified.max_difference
    return {
        "steps": verified.steps,
        "tokens": verified.tokens,
        "max_difference": largest if math.isfinite(largest) else None,
    }


def to_json(report: Report) -> str:
    """Return ``report`` as one line of strict JSON: an unknown value is ``null``, never ``NaN``."""
    return json.dumps(report, allow_nan=False)


def to_text(report: Report) -> str:
    """Return ``report`` as aligned lines for people; an unknown value is drawn as ``—``."""
    requests, tokens, cache = report["requests"], report["tokens"], report["prefix_cache"]
    blocks, fragmentation, swap = report["blocks"], report["fragmentation"], report["swap"]
    compaction, resize, preemptions = report["compaction"], report["resize"], report["preemptions"]
    failures, integrity = report["allocation_failures"], report["integrity"]
    struck = "   ".join(f"{count(n)} {kind}" for kind, n in report["injected"].items() if n)
    injected = [("injected", struck)] if struck else []
    lines = (
        ("requests", _counts(requests, "submitted", "finished", "cancelled", "refused")),
        ("tokens", _counts(tokens, "prompt", "generated")),
        (
            "prefix cache",
            f"{count(cache['hit_blocks'])} hits in {count(cache['query_blocks'])} blocks ({percent(cache['hit_ratio'])}"
            f"; by tokens {percent(cache['token_hit_ratio'])})   {count(cache['evictions'])} evictions",
        ),
        ("blocks", _counts(blocks, "total", "free", "cached", "active", "reserved")),
        (
            "  of these",
            f"{_counts(blocks, 'shared', 'fenced', 'pinned')}   at most {count(blocks['peak_active'])} ever active",
        ),
        (
            "fragmentation",
            f"external {percent(fragmentation['external_ratio'])}   internal {percent(fragmentation['internal_ratio'])}"
            f"   {count(fragmentation['free_runs'])} free runs, the longest {count(fragmentation['largest_free_run'])}",
        ),
        (
            "swap",
            f"out {count(swap['out_blocks'])} blocks ({size(swap['out_bytes'])})   "
            f"in {count(swap['in_blocks'])} blocks ({size(swap['in_bytes'])})",
        ),
        (
            "compaction",
            f"{count(compaction['runs'])} runs moved {count(compaction['moved_blocks'])} blocks "
            f"({size(compaction['moved_bytes'])})",
        ),
        ("resize", f"grown by {count(resize['grown_blocks'])}   shrunk by {count(resize['shrunk_blocks'])}"),
        (
            "preemptions",
            f"{count(preemptions['swap'])} by swap   {count(preemptions['recompute'])} by recompute",
        ),
        ("copy-on-write", f"{count(report['copy_on_write_blocks'])} blocks"),
        ("failures", _counts(failures, "capacity", "contiguous")),
        *_runs(report["contiguous"], failures["contiguous"]),
        ("integrity", _counts(integrity, "checks", "faults")),
        *injected,
        *([("verified", _verified_text(report["verified"]))] if report["verified"] else []),
        *_reuse_lines(report["reuse"]),
        (
            "time",
            f"{count(report['steps'])} steps in {seconds(report['wall_s'])}, "
            f"{seconds(report['engine_s'])} of it in the engine",
        ),
    )
    return "\n".join(f"{title:<15}{text}".rstrip() for title, text in (*lines, *_advice_lines(report["advice"])))


def _reuse_lines(reuse: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    if reuse is None or not reuse["query_blocks"]:
        return ()
    ratios = "   ".join(f"{count(p['blocks'])}: {percent(p['hit_ratio'])}" for p in reuse["predictions"])
    off = reuse["error_ratio"]
    kind = (
        "exact" if reuse["exact"] else "estimates" + ("" if off is None else f", off by {off * 100:+.1f} points here")
    )
    return (("hits by blocks", f"{ratios}   ({kind})"),)


def _advice_lines(advice: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the advice as a block of its own, one wrapped paragraph a topic."""
    lines = []
    for item in advice:
        lines.append(("", ""))
        mark = {"fine": "", "advice": "Advice: ", "warning": "Warning: "}[item["severity"]]
        wrapped = textwrap.wrap(mark + item["text"], _WIDTH - 15, break_on_hyphens=False)
        lines += [(item["topic"] if i == 0 else "", text) for i, text in enumerate(wrapped)]
    return lines


def _runs(contiguous: Report, failures: int) -> list[tuple[str, str]]:
    """Return what became of contiguous requests, and what the pool looked like when one found no run."""
    admitted = contiguous["admitted"]
    waited = f" after {seconds(contiguous['mean_wait_s'])} on average" if admitted else ""
    text = f"{count(admitted)} contiguous requests admitted{waited}"
    lines = [("  runs", f"{text}   {count(contiguous['compactions'])} compactions for them")]
    if failures:
        text = f"{count(contiguous['mean_needed_blocks'])} blocks wanted, the longest run "
        text += f"{count(contiguous['mean_longest_run'])} of {count(contiguous['mean_allocatable_blocks'])} allocatable"
        lines.append(("  at a failure", f"{text}, on average"))
    return lines


def _verified_text(verified: Mapping[str, Any]) -> str:
    largest = difference(verified["max_difference"])
    return f"{count(verified['steps'])} steps, {count(verified['tokens'])} tokens, max difference {largest}"


def _counts(values: Mapping[str, int], *names: str) -> str:
    return "   ".join(f"{count(values[name])} {name}" for name in names)
