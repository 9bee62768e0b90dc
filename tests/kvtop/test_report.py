"""The report: the keys scripts depend on, where each number comes from, and how unknown is written."""

from __future__ import annotations

import json
import math

import pytest

from allocator.fault_kinds import FAULT_KINDS
from allocator.snapshot import Counters, Snapshot, Verified
from kvtop.report import build_report, to_json, to_text

#: The contract: keys never disappear and never change meaning.
KEYS = {
    "requests": {"submitted", "finished", "cancelled", "refused"},
    "steps": None,
    "tokens": {"prompt", "generated"},
    "prefix_cache": {
        "query_blocks",
        "hit_blocks",
        "hit_ratio",
        "query_tokens",
        "hit_tokens",
        "token_hit_ratio",
        "evictions",
    },
    "blocks": {"total", "free", "cached", "active", "reserved", "shared", "fenced", "pinned", "peak_active"},
    "fragmentation": {"external_ratio", "internal_ratio", "largest_free_run", "free_runs"},
    "swap": {"out_blocks", "in_blocks", "out_bytes", "in_bytes"},
    "compaction": {"runs", "moved_blocks", "moved_bytes"},
    "resize": {"grown_blocks", "shrunk_blocks"},
    "preemptions": {"swap", "recompute"},
    "copy_on_write_blocks": None,
    "allocation_failures": {"capacity", "contiguous"},
    "contiguous": {
        "admitted",
        "compactions",
        "mean_wait_s",
        "mean_needed_blocks",
        "mean_longest_run",
        "mean_allocatable_blocks",
    },
    "integrity": {"checks", "faults"},
    "injected": set(FAULT_KINDS),
    "reuse": None,
    "advice": None,
    "verified": None,
    "wall_s": None,
    "engine_s": None,
}


def make_snapshot(counters: Counters | None = None, **settings: object) -> Snapshot:
    values = {
        "step": 40,
        "time_s": 1.0,
        "phase": "running",
        "speed": None,
        "steps_per_s": None,
        "source": "embedded",
        "workload": "chat",
        "geometry": "tiny",
        "device": "cpu",
        "block_size": 16,
        "block_bytes": 512,
        "slab_size": 1024,
        "eviction": "lru",
        "preempt": "swap",
        "policy": "fcfs",
        "compact": "manual",
        "compact_threshold_ratio": 0.5,
        "watermark_ratio": 0.01,
        "num_running": 2,
        "num_waiting": 1,
        "num_swapped": 0,
        "counters": counters or Counters(),
        "sequences": (),
    }
    return Snapshot(**{**values, **settings})


def test_has_exactly_the_promised_keys(make_arrays):
    report = build_report(make_snapshot(), make_arrays("ffca"), 1.0, 0.5)
    assert {k: set(v) if isinstance(v, dict) else None for k, v in report.items()} == KEYS


def test_blocks_come_from_the_arrays_and_obey_the_conservation_law(make_arrays):
    arrays = make_arrays("fcarfaax", ref_counts={5: 3})
    blocks = build_report(make_snapshot(Counters(peak_active=6)), arrays, 1.0, 0.5)["blocks"]
    assert blocks == {
        "total": 7,  # the retired block is no part of the pool
        "free": 2,
        "cached": 1,
        "active": 3,
        "reserved": 1,
        "shared": 1,
        "fenced": 0,
        "pinned": 0,
        "peak_active": 6,
    }


def test_every_counter_lands_under_its_own_key(make_arrays):
    counters = Counters()
    for number, field in enumerate(Counters.__struct_fields__, start=101):
        setattr(counters, field, number)
    counters.injected = tuple(range(201, 201 + len(FAULT_KINDS)))
    c = counters
    report = build_report(make_snapshot(counters), make_arrays("f"), 1.0, 0.5)
    assert report["requests"] == {
        "submitted": c.submitted,
        "finished": c.finished,
        "cancelled": c.cancelled,
        "refused": c.refused,
    }
    assert report["tokens"] == {"prompt": c.prompt_tokens, "generated": c.generated_tokens}
    assert report["prefix_cache"] == {
        "query_blocks": c.query_blocks,
        "hit_blocks": c.hit_blocks,
        "hit_ratio": c.hit_blocks / c.query_blocks,
        "query_tokens": c.query_tokens,
        "hit_tokens": c.hit_tokens,
        "token_hit_ratio": c.hit_tokens / c.query_tokens,
        "evictions": c.evictions,
    }
    assert report["swap"] == {
        "out_blocks": c.swap_out_blocks,
        "in_blocks": c.swap_in_blocks,
        "out_bytes": c.swap_out_bytes,
        "in_bytes": c.swap_in_bytes,
    }
    assert report["compaction"] == {
        "runs": c.compactions_manual + c.compactions_threshold + c.compactions_contiguous,
        "moved_blocks": c.compaction_moved_blocks,
        "moved_bytes": c.compaction_moved_bytes,
    }
    assert report["resize"] == {"grown_blocks": c.grown_blocks, "shrunk_blocks": c.shrunk_blocks}
    assert report["preemptions"] == {"swap": c.preemptions_swap, "recompute": c.preemptions_recompute}
    assert report["copy_on_write_blocks"] == c.copy_on_write_blocks
    assert report["allocation_failures"] == {"capacity": c.failures_capacity, "contiguous": c.failures_contiguous}
    assert report["contiguous"] == {
        "admitted": c.contiguous_admitted,
        "compactions": c.compactions_contiguous,
        "mean_wait_s": c.contiguous_waited_steps * 0.025 / c.contiguous_admitted,
        "mean_needed_blocks": c.contiguous_needed_blocks / c.failures_contiguous,
        "mean_longest_run": c.contiguous_longest_blocks / c.failures_contiguous,
        "mean_allocatable_blocks": c.contiguous_allocatable_blocks / c.failures_contiguous,
    }
    assert report["integrity"] == {"checks": c.integrity_checks, "faults": c.integrity_faults}
    assert report["injected"] == dict(zip(FAULT_KINDS, c.injected, strict=True))


def test_text_says_what_the_lack_of_a_run_was_like(make_arrays):
    counters = Counters(failures_contiguous=2, contiguous_admitted=4, contiguous_waited_steps=400)
    counters.contiguous_needed_blocks, counters.contiguous_longest_blocks = 200, 60
    counters.contiguous_allocatable_blocks = 1000
    text = to_text(build_report(make_snapshot(counters), make_arrays("ff"), 1.0, 0.5))
    assert "4 contiguous requests admitted after 2.5 s on average" in text
    assert "100 blocks wanted, the longest run 30 of 500 allocatable, on average" in text
    plain = to_text(build_report(make_snapshot(), make_arrays("ff"), 1.0, 0.5))
    assert "0 contiguous requests admitted   0 compactions" in plain
    assert "at a failure" not in plain


def test_a_ratio_of_nothing_is_null_and_the_json_is_strict(make_arrays):
    text = to_json(build_report(make_snapshot(), make_arrays("ff"), 1.0, 0.5))
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["prefix_cache"]["hit_ratio"] is None
    assert report["prefix_cache"]["token_hit_ratio"] is None
    assert report["fragmentation"] == {
        "external_ratio": 0.0,
        "internal_ratio": None,
        "largest_free_run": 2,
        "free_runs": 1,
    }
    assert "\n" not in text


def test_json_refuses_what_is_no_number(make_arrays):
    report = build_report(make_snapshot(), make_arrays("ff"), math.nan, 0.5)
    with pytest.raises(ValueError, match="Out of range float"):
        to_json(report)


def test_text_draws_unknown_as_a_dash_and_names_the_numbers(make_arrays):
    text = to_text(build_report(make_snapshot(Counters(submitted=1234)), make_arrays("ff"), 1.0, 0.5))
    assert "1,234 submitted" in text
    assert "internal —" in text
    assert "None" not in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("difference", "written", "text"), [(0.0, 0.0, "0"), (0.25, 0.25, "0.25"), (math.inf, None, "—")]
)
def test_what_was_verified_is_reported(make_arrays, difference, written, text):
    snapshot = make_snapshot(verified=Verified(1200, 34000, difference))
    report = build_report(snapshot, make_arrays("f"), 1.0, 0.5)
    assert json.loads(to_json(report))["verified"] == {"steps": 1200, "tokens": 34000, "max_difference": written}
    assert f"\nverified       1,200 steps, 34,000 tokens, max difference {text}\n" in to_text(report)


def test_nothing_is_said_where_nothing_is_verified(make_arrays):
    report = build_report(make_snapshot(), make_arrays("f"), 1.0, 0.5)
    assert report["verified"] is None
    assert "verified" not in to_text(report)
