"""Good trace files: every format, how it is recognised, order, block ids, line ends and packing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from allocator.content import KeyedContent, OpaqueContent, Request
from kvtop.errors import UserError
from kvtop.workloads.trace import TRACE_FORMATS, open_trace

DATA = Path(__file__).parents[1] / "data" / "traces"


def lengths(requests):
    return [(request.num_prompt, request.num_output) for request in requests]


def block_ids(request: Request) -> list[int]:
    assert isinstance(request.content, KeyedContent)
    return request.content.block_ids.tolist()


def write_rows(path: Path, rows: list[tuple[float, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_mooncake_rows_are_sorted_by_arrival_and_ties_keep_file_order():
    trace = open_trace(DATA / "mooncake.jsonl")
    assert (trace.format, trace.block_size, trace.num_rows, trace.num_bad) == ("mooncake", 512, 5, 0)
    assert lengths(trace.file_order) == [(1500, 40), (1024, 10), (1100, 0), (600, 300), (1537, 90)]
    assert lengths(trace.requests) == [(1500, 40), (1024, 10), (1100, 0), (1537, 90), (600, 300)]
    assert [request.arrival_s for request in trace.requests] == [0, 0.5, 0.5, 1.25, 2]
    assert trace.duration_s == 2
    assert trace.notes == (
        "arrival times in ms, 2.000 s from first to last",
        "arrival times out of order: 1 row sorted",
        "block ids for 512 tokens each",
    )
    assert [request.label for request in trace.requests] == ["line 1", "line 2", "line 3", "line 5", "line 4"]


def test_only_full_prompt_blocks_keep_their_ids():
    trace = open_trace(DATA / "mooncake.jsonl")
    assert [block_ids(request) for request in trace.file_order] == [[0, 1], [0, 1], [0, 1], [4], [0, 1, 2]]
    keys = [request.content.keys(512) for request in trace.file_order]
    assert keys[0] == keys[1] == keys[2] == keys[4][:2]
    assert keys[3][0] not in keys[4]


def test_requests_without_a_common_prefix_have_different_tokens():
    first, second, third, *_ = open_trace(DATA / "mooncake.jsonl").file_order
    assert np.array_equal(first.content.tokens(0, 1024), second.content.tokens(0, 1024))
    assert not np.array_equal(second.content.tokens(1024, 1034), third.content.tokens(1024, 1034))


@pytest.mark.parametrize("name", ["mooncake_crlf_bom.jsonl", "mooncake.jsonl.gz"])
def test_line_ends_marks_and_packing_make_no_difference(name):
    plain, other = open_trace(DATA / "mooncake.jsonl"), open_trace(DATA / name)
    assert lengths(other.requests) == lengths(plain.requests)
    assert [block_ids(r) for r in other.requests] == [block_ids(r) for r in plain.requests]
    assert other.notes == plain.notes


def test_blank_lines_count_in_line_numbers():
    trace = open_trace(DATA / "mooncake_crlf_bom.jsonl")
    assert [request.label for request in trace.file_order] == ["line 1", "line 3", "line 4", "line 5", "line 6"]


def test_packing_is_told_by_content_not_by_name(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + (DATA / "mooncake.jsonl").read_bytes()))
    assert open_trace(path).format == "mooncake"
    path.write_bytes(
        (DATA / "mooncake.jsonl.gz").read_bytes()
        + gzip.compress(b'{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [9]}\n')
        + bytes(16)
    )
    assert open_trace(path).num_rows == 6  # members in a row, and padding, are one file


def test_ids_of_full_blocks_only_and_sessions():
    trace = open_trace(DATA / "mooncake_sessions.jsonl")
    assert trace.block_size == 64
    assert [block_ids(request) for request in trace.requests] == [[0, 1], [2], [0, 1, 3, 4], []]
    assert [request.label for request in trace.requests] == ["session a/0", "session b/0", "session a/1", "session c/0"]


def test_agentic_conversations_are_merged_and_share_no_ids():
    trace = open_trace(DATA / "agentic.jsonl")
    assert (trace.format, trace.block_size, trace.num_rows, trace.duration_s) == ("agentic", 64, 4, 9)
    assert [request.label for request in trace.requests] == ["first/0", "second/0", "first/1", "second/1"]
    assert [request.label for request in trace.file_order] == ["first/0", "first/1", "second/0", "second/1"]
    first, again, second, second_again = (block_ids(request) for request in trace.file_order)
    assert again[:2] == first
    assert second_again[:1] == second
    assert not set(again) & set(second_again)
    assert trace.notes == ("arrival times in s, 9.000 s from first to last", "block ids for 64 tokens each")


def test_azure_times_keep_their_seventh_digit_and_start_at_zero():
    trace = open_trace(DATA / "azure.csv")
    assert (trace.format, trace.block_size) == ("azure", None)
    assert [request.arrival_s for request in trace.requests] == [0, 0.0520001, 1.5200399]
    assert lengths(trace.requests) == [(480, 10), (318, 0), (77, 8)]
    assert all(isinstance(request.content, OpaqueContent) for request in trace.requests)


def test_vidur_says_that_it_has_no_times():
    trace = open_trace(DATA / "vidur.csv")
    assert (trace.format, trace.duration_s) == ("vidur", None)
    assert trace.notes == ("no arrival times: all requests arrive at once",)
    assert lengths(trace.requests) == [(377, 54), (201, 156), (12, 1)]


def test_sharegpt_lengths_start_with_the_first_arrival():
    trace = open_trace(DATA / "sharegpt.csv")
    assert [request.arrival_s for request in trace.requests] == [0, 0.30075]
    assert lengths(trace.requests) == [(235, 53), (103, 76)]


def test_csv_columns_may_stand_in_any_order_quoted_and_beside_others(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('x,"output_tokens", arrival_ms ,input_tokens\n"a,b",5,1.5,"7"\n')
    assert lengths(open_trace(path).requests) == [(7, 5)]


def test_rows_without_ids_have_tokens_of_their_own():
    first, second, _ = open_trace(DATA / "vidur.csv").requests
    assert not np.array_equal(first.content.tokens(0, 100), second.content.tokens(0, 100))


@pytest.mark.parametrize("size", [512, 64, 16, 32, 48, 100, 1])
def test_the_block_size_is_found_from_the_rows(tmp_path, size):
    rng = np.random.Generator(np.random.PCG64(size))
    rows = []
    for index in range(40):
        prompt = int(rng.integers(1, 9000))
        rows.append((index, prompt, 1, list(range(-(-prompt // size)))))
    trace = open_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert trace.block_size == size
    assert [len(block_ids(r)) for r in trace.requests] == [prompt // size for _, prompt, _, _ in rows]


def test_a_block_size_asked_for_is_taken_where_the_rows_allow_several(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [(0, 10, 1, [7])])
    assert open_trace(path).block_size == 512
    assert open_trace(path, block_size=16).block_size == 16


def test_another_block_size_than_the_traces_own_is_refused():
    path = DATA / "mooncake.jsonl"
    assert open_trace(path, block_size=512).block_size == 512
    with pytest.raises(UserError) as caught:
        open_trace(path, block_size=16)
    assert str(caught.value) == (f"--block-size 16: {path} has block ids for 512 tokens; use 512 or leave it out")
    assert open_trace(DATA / "azure.csv", block_size=16).block_size is None


@pytest.mark.parametrize("name", ["mooncake.jsonl", "agentic.jsonl", "azure.csv", "vidur.csv", "sharegpt.csv"])
def test_a_format_may_be_named(name):
    path = DATA / name
    kind = path.stem
    assert open_trace(path, kind).format == open_trace(path).format == kind
    other = next(f for f in TRACE_FORMATS if f != kind)
    with pytest.raises(UserError, match=f"a trace of format {kind}; --trace-format {other} does not fit"):
        open_trace(path, other)


def test_an_epoch_clock_is_counted_from_its_first_time(tmp_path):
    start_ms = 1_700_000_000_000
    trace = open_trace(write_rows(tmp_path / "t.jsonl", [(start_ms + 250, 5, 1, [0]), (start_ms, 5, 1, [0])]))
    assert [request.arrival_s for request in trace.requests] == [0, 0.25]
