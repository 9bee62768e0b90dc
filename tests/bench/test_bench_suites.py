"""Every benchmark runs at a small size, and its books are right: what it divides by what, and what its loads are."""

from __future__ import annotations

import json

import numpy as np
import pytest
from published import own_directories

from allocator import OutOfBlocks
from allocator.ids import BlockState
from allocator.metrics import tier_numbers
from kvtop.bench.console import ConsoleSizes
from kvtop.bench.console_child import change, made_arrays
from kvtop.bench.events import EventSizes, traffic
from kvtop.bench.figures import Figure, as_text, number, ratio_figure, spread
from kvtop.bench.locks import Comparison, LockSizes, Side
from kvtop.bench.observer import ObserverSizes
from kvtop.bench.open_console import OpenSizes
from kvtop.bench.pools import make_manager, measure_memory
from kvtop.bench.recording import RecordSizes
from kvtop.bench.sequences import decode_load, decode_step_us, prefix_load, run_prefix
from kvtop.bench.suites import (
    GROUPS,
    Sizes,
    run_bench_allocator,
    run_bench_console,
    run_bench_events,
    run_bench_locks,
    run_bench_observer,
    run_bench_record,
)
from kvtop.bench.threads import run_threads
from kvtop.cli import run
from kvtop.cli.benches import BENCH_GROUPS

SMALL = Sizes(
    num_blocks=2000,
    batches=(1, 16),
    repeats=1,
    num_slots=4,
    warm_up_steps=2,
    num_steps=20,
    cache_blocks=9000,
    num_requests=8,
    warm_up_requests=2,
    pool_sizes=(1000, 2000),
    thread_batches=(1, 16),
    thread_counts=(1, 2),
    duration_s=0.01,
    copied_pool_bytes=1 << 20,
    watched_blocks=1000,
)
SMALL_LOCKS = LockSizes(
    pool_blocks=2000,
    batches=(1,),
    counts=(1, 2),
    duration_s=0.02,
    cache_blocks=9000,
    num_prompts=8,
    num_rows=8,
    num_steps=20,
    copied_blocks=1,
    engine_steps=5,
    engine_blocks=8,
)


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_of_the_allocator_benchmark_runs(group, capsys):
    assert run_bench_allocator([group], rounds=2, as_json=True, sizes=SMALL) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["figures"]
    for figure in result["figures"]:
        assert figure["group"] == group
        assert figure["low"] <= figure["median"] <= figure["high"]


def test_the_table_of_the_allocator_benchmark_is_aligned(capsys):
    assert run_bench_allocator(["pairs"], rounds=1, as_json=False, sizes=SMALL) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    assert {row.index(" µs") for row in rows} == {heading.index(" unit")}


def test_the_locks_benchmark_runs(capsys):
    assert run_bench_locks(rounds=1, as_json=True, sizes=SMALL_LOCKS) == 0
    comparisons = json.loads(capsys.readouterr().out)["comparisons"]
    assert [c["layer"] for c in comparisons] == [
        *["reservation"] * 2,
        *["optimistic lookup"] * 2,
        "batching",
        *["sequence"] * 2,
        "executor",
    ]
    assert {"refills", "steals", "contended_waits", "longest_wait_ms"} <= comparisons[0]["with"].keys()
    assert comparisons[1]["with"]["refills"]["low"] >= 1
    assert comparisons[1]["without"]["refills"]["high"] == 0
    assert "retries" in comparisons[2]["with"]


def test_the_locks_table_has_a_row_a_comparison(capsys):
    assert run_bench_locks(rounds=1, as_json=False, sizes=SMALL_LOCKS) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 8


def test_the_console_benchmark_runs(capsys, monkeypatch, tmp_path_factory):
    own_directories(monkeypatch, tmp_path_factory.mktemp("b"))
    sizes = ConsoleSizes(block_counts=(512,), screens=((80, 24),), seconds=0.3)
    opened = OpenSizes(block_counts=(512,), window_s=0.2, warm_up_s=0.0)
    assert run_bench_console(rounds=1, as_json=True, sizes=sizes, open_sizes=opened) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    drawn = [f for f in found if f["group"].startswith("512 80x24")]
    assert {f["what"] for f in drawn} == {"frames a second", "first frame", "processor", "bytes a frame"}
    told = {f["what"]: f for f in found if f not in drawn}
    assert told["steps with the console open ÷ without"]["median"] > 0
    assert told["first frame ÷ engine ready, torch loaded"]["median"] < 1
    assert all(f["median"] > 0 for f in found if f["group"].endswith("busy"))


def test_made_pools_stay_lawful_as_they_change():
    rng = np.random.default_rng(1)
    arrays = made_arrays(3000, rng)
    for _ in range(5):
        change(arrays, rng)
        numbers = tier_numbers(arrays, 16, 1 << 30)
        assert numbers.total == 3000
        assert ((arrays.ref_count > 0) == (arrays.state == BlockState.ACTIVE)).all()


def test_the_observer_benchmark_runs(capsys):
    sizes = ObserverSizes(num_blocks=1000, rate_hz=20, window_s=0.1, warm_up_s=0.05)
    assert run_bench_observer(rounds=1, as_json=True, sizes=sizes) == 0
    by_name = {figure["what"]: figure["median"] for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert by_name["steps alone"] > 0
    assert by_name["observations"] > 0


def test_a_bad_group_is_named(capsys):
    assert run(["bench", "allocator", "--only", "pairs,nope"]) == 2
    assert capsys.readouterr().err == (
        "kvtop: --only pairs,nope: some of pairs, decode, prefix, scaling, threads, copies, statistics, "
        "with commas between them\n"
    )


def test_the_command_line_knows_every_group():
    assert tuple(GROUPS) == BENCH_GROUPS


def test_a_ratio_is_taken_inside_each_round():
    figure = ratio_figure("g", "a ÷ b", [10, 300, 4], [5, 100, 4], at_least=2)
    assert figure.values == (2, 3, 1)
    assert figure.median == 2
    assert figure.kept


@pytest.mark.parametrize(
    ("bounds", "kept"), [({"at_least": 2.0}, False), ({"at_most": 1.3}, False), ({"at_most": 1.5}, True), ({}, None)]
)
def test_a_bound_is_kept_by_the_median(bounds, kept):
    figure = Figure("g", "w", "x", (1.0, 1.4, 9.0), **bounds)
    assert figure.kept is kept
    word = {True: "yes", False: "NO", None: "x"}[kept]
    assert as_text([figure]).split()[-1] == word


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.98765, "0.988"), (1.2345, "1.23"), (12.345, "12.3"), (123.4, "123"), (1e6, "1,000,000")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_layer_is_worth_the_ratio_of_its_rounds():
    comparison = Comparison("l", "w", "/s", Side(rates=[10, 8]), Side(rates=[5, 2]))
    assert comparison.ratios == [2, 4]


def test_a_round_in_which_nothing_got_done_has_no_ratio():
    comparison = Comparison("l", "w", "/s", Side(rates=[10, 8]), Side(rates=[0, 2]))
    assert comparison.ratios == [4]
    nothing = ratio_figure("g", "w", [1.0], [0.0], at_least=1)
    assert (nothing.values, nothing.median, nothing.kept) == ((), None, None)
    assert as_text([nothing]).split()[-3:] == ["—", "—", "x"]
    assert spread(nothing.values) == {"median": None, "low": None, "high": None}


def test_the_decode_load_has_a_sequence_in_every_slot_at_all_times():
    load = decode_load(8, 300)
    busy: set[int] = set()
    for step in range(300):
        busy -= set(load.ends.get(step, ()))
        busy |= {slot for slot, _ in load.starts.get(step, ())}
        assert busy == set(range(8))
    prompts = [prompt for starts in load.starts.values() for _, prompt in starts]
    assert min(prompts) >= 64
    assert max(prompts) <= 1024


def test_the_decode_load_fits_or_says_so():
    with pytest.raises(OutOfBlocks):
        decode_step_us(decode_load(8, 10), num_blocks=50, num_slots=8, warm_up=0, num_steps=10)


def test_the_prefix_load_hits_what_it_shares():
    prompts = prefix_load(40)
    found = run_prefix(prompts + prompts, "xxh3", num_blocks=20_000, warm_up=40)
    assert found.hit_ratio > 0.95
    assert found.total_us == pytest.approx(found.hash_us + found.admit_us + found.release_us)


def test_the_bytes_a_block_are_of_all_arrays():
    per_block, per_entry = (figure.median for figure in measure_memory(10_000))
    manager = make_manager(10_000)
    facts = manager.device.facts
    own = facts.guarded.nbytes + facts.refs.nbytes + facts.flags.nbytes + facts.mark.nbytes + facts.last_used.nbytes
    assert per_block > own / 10_000
    assert per_entry >= 16 + facts.stamp.itemsize


def test_a_failing_thread_is_not_lost():
    def work(_index):
        def fail():
            raise OutOfBlocks(1, 0)

        return fail, lambda: None

    with pytest.raises(OutOfBlocks):
        run_threads(2, 0.01, work)


def test_the_recording_benchmark_runs(capsys):
    sizes = RecordSizes(steps=120, num_blocks=256)
    assert run_bench_record(rounds=1, as_json=True, sizes=sizes) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [f["what"] for f in figures] == [
        "steps alone",
        "every 40 steps, time ÷ alone",
        "every 40 steps, size",
        "every 40 steps, size ÷ raw block map",
        "every step, time ÷ alone",
        "every step, size",
        "every step, size ÷ raw block map",
    ]
    assert 0 < figures[-1]["median"] < 1


def test_the_events_benchmark_takes_in_all_that_is_sent(capsys):
    sizes = EventSizes(batches=60, stores=4, num_blocks=256)
    payloads, blocks = traffic(sizes)
    assert (len(payloads), traffic(sizes)) == (60, (payloads, blocks))
    assert run_bench_events(rounds=1, as_json=True, sizes=sizes) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [f["unit"] for f in figures] == ["blocks/s", "blocks/s", "x", "cores"]
    assert figures[2]["median"] == pytest.approx(figures[0]["median"] / figures[1]["median"])
