"""The plain replay against cases worked by hand and known counts, and the benchmark's bookkeeping."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from kvtop.bench.replay import bench_replay, plain_replay

DATA = Path(__file__).parents[1] / "data" / "traces"
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def replay(tmp_path: Path, num_blocks: int, *rows: tuple[int, int, list[int]]) -> tuple[int, int, int, int]:
    """Replay (prompt, output, ids) rows in blocks of 4 tokens."""
    path = tmp_path / "t.jsonl"
    names = ("input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    counts = plain_replay(path, num_blocks, 4)
    return counts["hit_blocks"], counts["hit_tokens"], counts["evictions"], counts["refused"]


def test_a_prompt_cached_to_its_end_has_one_hit_less_and_no_eviction(tmp_path):
    row = (16, 0, [0, 1, 2, 3])
    assert replay(tmp_path, 4, row, row, row) == (6, 24, 0, 0)


def test_free_blocks_go_first_then_the_oldest_cached_one(tmp_path):
    first, second = (8, 0, [0, 1]), (8, 0, [2, 3])
    assert replay(tmp_path, 5, first, second, (4, 0, [4]), first) == (1, 4, 0, 0)
    # One short: the tail of the first prompt is the oldest, its head is still found.
    assert replay(tmp_path, 4, first, second, (4, 0, [4]), (9, 0, [0, 1, 9])) == (1, 4, 3, 0)


def test_a_hit_makes_a_block_young_again(tmp_path):
    a, b, c = (5, 0, [0, 10]), (5, 0, [1, 11]), (4, 0, [2])
    # c takes the free block, the next row evicts b's, and the last a finds its own and evicts c's.
    assert replay(tmp_path, 3, a, b, a, c, (4, 0, [3]), a) == (2, 8, 2, 0)


def test_output_blocks_are_free_at_once_and_too_large_rows_are_refused(tmp_path):
    assert replay(tmp_path, 4, (4, 12, [0]), (4, 12, [1]), (4, 13, [0]), (5, 0, [0, 2])) == (0, 0, 1, 1)


def test_an_unbroken_run_is_needed(tmp_path):
    assert replay(tmp_path, 8, (8, 0, [0, 1]), (9, 0, [5, 1, 6])) == (0, 0, 0, 0)


def test_a_small_trace_plain_and_packed():
    counts = plain_replay(DATA / "mooncake.jsonl", 100, 512)
    assert counts == plain_replay(DATA / "mooncake.jsonl.gz", 100, 512)
    # The second row is cached to its end: 1 of 2 counts; the third finds 2, the fifth 2.
    assert counts == {"hit_blocks": 5, "hit_tokens": 2560, "evictions": 0, "refused": 0}


@pytest.mark.parametrize(
    ("num_blocks", "hit_blocks", "hit_tokens", "evictions"),
    [(1000, 12988, 6649856, 262505), (10000, 61999, 31743488, 204494), (50000, 102722, 52593664, 123771)],
)
def test_known_counts_of_the_conversation_trace(num_blocks, hit_blocks, hit_tokens, evictions):
    path = TRACES / "mooncake_conversation.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/traces")
    counts = plain_replay(path, num_blocks, 512)
    assert counts == {"hit_blocks": hit_blocks, "hit_tokens": hit_tokens, "evictions": evictions, "refused": 0}


def test_the_benchmark_takes_turns_and_ratios_inside_a_round():
    ticks = count()
    calls: list[tuple[int, int]] = []

    def run_engine(path: Path, num_blocks: int) -> dict[str, object]:
        calls.append((num_blocks, next(ticks)))
        next(ticks)  # three ticks between the readings, against one
        return {**plain_replay(path, num_blocks, 512), "steps": 7}

    results = bench_replay(DATA / "mooncake.jsonl", [4, 100], 3, run_engine, clock=lambda: float(next(ticks)))
    # A round has six ticks: the engine's first is the fourth when it goes second, else the second.
    assert calls == [(4, 3), (4, 7), (4, 15), (100, 21), (100, 25), (100, 33)]
    assert [(r.num_blocks, r.plain_s, r.engine_s, r.ratio, r.agrees) for r in results] == [
        (4, 1, 3, 3, True),
        (100, 1, 3, 3, True),
    ]


def test_the_benchmark_shows_a_disagreement():
    wrong = {"hit_blocks": 0, "hit_tokens": 0, "evictions": 0, "refused": 0}
    (result,) = bench_replay(DATA / "mooncake.jsonl", [100], 1, lambda path, num_blocks: wrong)
    assert not result.agrees
    assert result.plain["hit_blocks"] == 5
