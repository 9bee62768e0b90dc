"""Advice: each line from its numbers, none without data, and the arithmetic in the text."""

from __future__ import annotations

import json

import pytest
from test_report import make_snapshot

from allocator.reuse import Prediction, ReuseSummary
from allocator.snapshot import Counters
from allocator.workload_facts import NUM_BUCKETS, FactsRecorder, WorkloadFacts, median_bound
from kvtop.advisor import Advice, advise, hit_ratios
from kvtop.report import build_report, to_json, to_text


def buckets(**counts: int) -> tuple[int, ...]:
    return tuple(counts.get(f"b{i}", 0) for i in range(NUM_BUCKETS))


def advice_on(topic: str, *, blocks: int = 1000, host: int = 500, **fields) -> Advice | None:
    found = advise(make_snapshot(**fields), blocks, host)
    assert len({a.topic for a in found}) == len(found)
    return next((a for a in found if a.topic == topic), None)


def test_no_data_no_advice():
    assert advise(make_snapshot(), 1000, 500) == ()
    assert advise(make_snapshot(), 1, 0) == ()


# Sequences of 100 tokens: 13 blocks of 8, 7 of 16, 4 of 32.
HUNDREDS = WorkloadFacts(
    num_finished=10, finished_tokens=1000, blocks_at_half=130, blocks_at_size=70, blocks_at_double=40,
    length_buckets=buckets(b7=10),
)  # fmt: skip


@pytest.mark.parametrize(
    ("block_bytes", "best", "severity"),
    [
        # Slots of 32 bytes: 8 costs 40·32 + 130·8 = 2320, 16 costs 120·32 + 70·8 = 4400, 32 costs 280·32 + 40·8 = 9280.
        (512, 8, "advice"),
        # Slots of 1 byte: 1080, 680, 600: a tenth of 680 is saved and no more than that counts.
        (16, 32, "advice"),
        # Slots of 2 bytes: 1120, 800, 880.
        (32, 16, "fine"),
    ],
)
def test_block_size_weighs_waste_against_tables(block_bytes, best, severity):
    advice = advice_on("block size", facts=HUNDREDS, block_bytes=block_bytes)
    assert advice is not None
    assert advice.severity == severity
    assert (f"--block-size {best} saves" in advice.text) == (severity == "advice")
    numbers = advice.numbers
    assert {s: numbers[f"empty_slots_at_{s}"] for s in (8, 16, 32)} == {8: 40, 16: 120, 32: 280}
    assert min((8, 16, 32), key=lambda s: numbers[f"bytes_at_{s}"]) == best
    assert "10 finished sequences of 100 tokens on average (half of them below 128) end with 10.7%" in advice.text
    assert "3.8% in blocks of 8 and 21.9% in blocks of 32" in advice.text


def test_block_size_without_storage_tells_the_waste_alone():
    advice = advice_on("block size", facts=HUNDREDS, block_bytes=0)
    assert advice is not None
    assert advice.severity == "fine"
    assert "take together" not in advice.text


@pytest.mark.parametrize(("block_size", "others"), [(1, {2}), (1024, {512})])
def test_block_sizes_at_the_ends_of_the_range(block_size, others):
    advice = advice_on("block size", facts=HUNDREDS, block_size=block_size)
    assert advice is not None
    sizes = {int(n.rpartition("_")[2]) for n in advice.numbers if n.startswith("blocks_at_")}
    assert sizes == others | {block_size}


@pytest.mark.parametrize(
    ("host", "peak", "shortfalls", "severity", "words"),
    [
        (500, 120, 0, "fine", "At most 120 blocks had to be there at once, 24.0% of the host tier"),
        (100, 0, 0, "warning", "10.0% of the device pool's 1,000, below 50%: --swap-blocks 500"),
        (0, 40, 40, "warning", "40 times there was no room"),
        (600, 900, 2, "warning", "--swap-blocks 900 (the greater of that need and 50%)"),
        (500, 0, 0, None, ""),
    ],
)
def test_swap_space(host, peak, shortfalls, severity, words):
    facts = WorkloadFacts(peak_running=9, peak_swap_blocks=peak, swap_shortfalls=shortfalls)
    advice = advice_on("swap space", host=host, facts=facts)
    assert (advice.severity if advice else None) == severity
    assert words in (advice.text if advice else "")


def test_swap_space_matters_only_where_somebody_can_be_swapped_out():
    assert advice_on("swap space", host=0, facts=WorkloadFacts(peak_running=9), preempt="recompute") is None
    assert advice_on("swap space", host=0, facts=WorkloadFacts(peak_running=1)) is None


def test_policy_tells_of_preemptions_and_starvation():
    waits = {"num_starts": 100, "wait_buckets": buckets(b1=60, b12=40)}
    calm = advice_on("policy", facts=WorkloadFacts(**waits, longest_wait_steps=30))
    assert calm is not None
    assert calm.severity == "fine"
    assert "0 preemptions" in calm.text
    busy = advice_on(
        "policy", facts=WorkloadFacts(**waits), counters=Counters(preemptions_swap=4, preemptions_recompute=2)
    )
    assert busy is not None
    assert busy.severity == "advice"
    assert "6 preemptions (4 by swap, 2 by recompute) in 100 starts, 6.0%" in busy.text
    starved = advice_on("policy", facts=WorkloadFacts(**waits, longest_wait_steps=4000), policy="sjf")
    assert starved is not None
    assert starved.severity == "warning"
    assert (
        "4,000 steps (1m 40s), half of all below 2 steps, 2,000 times less: somebody starves under sjf" in starved.text
    )


def test_watermark_is_to_be_raised_under_preemption_and_lowered_without():
    facts = WorkloadFacts(num_starts=100, peak_running=50, watermark_steps=10)
    up = advice_on("watermark", facts=facts, step=1000, counters=Counters(preemptions_swap=9))
    assert up is not None
    assert up.severity == "advice"
    assert "--watermark 0.05 keeps one for each" in up.text
    down = advice_on("watermark", facts=WorkloadFacts(watermark_steps=200, peak_running=5), step=1000)
    assert down is not None
    assert "200 of 1,000 steps (20.0%), with 0 preemptions: a lower --watermark" in down.text
    fine = advice_on("watermark", facts=facts, step=1000)
    assert fine is not None
    assert fine.severity == "fine"


def test_compaction_tells_what_fragmentation_cost():
    failed = advice_on("compaction", counters=Counters(failures_contiguous=3))
    assert failed is not None
    assert failed.severity == "warning"
    assert "3 contiguous requests failed although enough blocks were free: --compact auto" in failed.text
    assert (
        "--compact-threshold" in advice_on("compaction", counters=Counters(failures_contiguous=3), compact="auto").text
    )
    short = advice_on("compaction", facts=WorkloadFacts(copied_blocks=30, copy_runs=20))
    assert short is not None
    assert short.severity == "advice"
    assert "30 blocks in 20 runs, 1.5 blocks a copy" in short.text
    long = advice_on("compaction", facts=WorkloadFacts(copied_blocks=300, copy_runs=20))
    assert long is not None
    assert long.severity == "fine"


def reuse_of(half: int | None, same: int | None, double: int | None, **settings) -> ReuseSummary:
    predictions = (Prediction(500, half), Prediction(1000, same), Prediction(2000, double))
    return ReuseSummary(
        **{"is_exact": True, "query_blocks": 1000, "floor": 10, "ceiling": None, **settings}, predictions=predictions
    )


@pytest.mark.parametrize(
    ("reuse", "severity", "words"),
    [
        (
            reuse_of(100, 400, 500),
            "advice",
            "50.0% with 2,000 (+10.0 points) (exact): doubling saves computing 100 blocks",
        ),
        (reuse_of(395, 400, 405), "advice", "39.5% with 500 (-0.5 points) and 40.5% with 2,000"),
        (reuse_of(300, 400, 405), "fine", "40.0% of 1,000 queried blocks hit with 1,000 blocks; 30.0% with 500"),
        (reuse_of(300, 410, 405, is_exact=False), "fine", "(estimates, off by +1.0 points here)"),
        (reuse_of(None, 400, 405, floor=600), "fine", "unknown with 500 (a larger request would change it)"),
        (reuse_of(300, 400, None, ceiling=1500), "fine", "unknown with 2,000 (what was refused would change it)"),
    ],
)
def test_cache_size(reuse, severity, words):
    advice = advice_on("cache size", reuse=reuse, counters=Counters(query_blocks=1000, hit_blocks=400))
    assert advice is not None
    assert advice.severity == severity
    assert words in advice.text


def test_a_pool_is_not_called_too_large_before_enough_was_asked_for():
    fields = {"reuse": reuse_of(395, 400, 405), "counters": Counters(query_blocks=1000, hit_blocks=400)}
    assert "nearly as much" in advice_on("cache size", **fields).text
    assert advice_on("cache size", blocks=1001, **fields).severity == "fine"


def test_the_report_carries_advice_and_predictions(make_arrays):
    snapshot = make_snapshot(
        Counters(query_blocks=8, hit_blocks=2),
        facts=HUNDREDS,
        reuse=ReuseSummary(False, 8, 1, None, (Prediction(2, None), Prediction(4, 3), Prediction(8, 4))),
    )
    report = build_report(snapshot, make_arrays("ffff"), 1.0, 0.5, num_host_blocks=2)
    loaded = json.loads(to_json(report))
    assert loaded["reuse"]["error_ratio"] == 0.125
    assert loaded["reuse"]["predictions"][0] == {"blocks": 2, "hit_blocks": None, "hit_ratio": None}
    assert {a["topic"] for a in loaded["advice"]} == {"block size", "cache size"}
    assert set(loaded["advice"][0]) == {"topic", "severity", "text", "numbers"}
    text = to_text(report)
    assert "2: —   4: 37.5%   8: 50.0%   (estimates, off by +12.5 points here)" in text
    assert "Advice: 10 finished sequences" in text
    assert max(map(len, text.splitlines())) <= 110
    assert hit_ratios(snapshot.reuse) == {2: None, 4: 0.375, 8: 0.5}


def test_facts_count_what_happened():
    recorder = FactsRecorder(16)
    assert recorder.facts() == WorkloadFacts()
    for tokens in (100, 1, 16):
        recorder.finish(tokens)
    recorder.start(0)
    recorder.start(5)
    recorder.turn(3, None, 10)
    recorder.turn(2, "watermark", 7)
    recorder.swap_out(40, True)
    recorder.swap_out(30, False)
    recorder.copy(10, 4)
    facts = recorder.facts(longest_wait_steps=4)
    assert (facts.num_finished, facts.finished_tokens) == (3, 117)
    assert (facts.blocks_at_half, facts.blocks_at_size, facts.blocks_at_double) == (13 + 1 + 2, 7 + 1 + 1, 4 + 1 + 1)
    assert (facts.num_starts, facts.longest_wait_steps, facts.peak_running) == (2, 5, 3)
    assert (facts.watermark_steps, facts.capacity_steps) == (7, 0)
    assert (facts.peak_swap_blocks, facts.swap_shortfalls) == (40, 1)
    assert (facts.copied_blocks, facts.copy_runs) == (10, 4)
    assert recorder.facts(longest_wait_steps=9).longest_wait_steps == 9
    assert hash(facts)
    assert median_bound(facts.length_buckets) == 32
    assert median_bound(buckets()) is None
