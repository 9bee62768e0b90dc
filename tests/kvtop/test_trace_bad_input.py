"""Bad trace files and rows: one line that names file, line and field; skipping counts what it leaves out."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from kvtop.errors import EXIT_USAGE, UserError
from kvtop.workloads.trace import MAX_BAD_KEPT, open_trace

DATA = Path(__file__).parents[1] / "data" / "traces"
GOOD = {"timestamp": 10, "input_length": 1500, "output_length": 40, "hash_ids": [0, 1, 2]}
WHOLE = "a whole number from 1 to 10000000 is allowed"
WHOLE_0 = "a whole number from 0 to 10000000 is allowed"
MS = "a number from 0 to 10000000000000 is allowed [ms]"


def refusal(path: Path, *args, **options) -> str:
    """Return the message with the path taken out; one line, exit code 2."""
    with pytest.raises(UserError) as caught:
        open_trace(path, *args, **options)
    message = str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in message
    assert str(path) in message or "--trace-format" in message
    return message.replace(str(path), "FILE")


def mooncake(tmp_path: Path, *lines: object) -> Path:
    """Write a good row, the given ones, a good row."""
    path = tmp_path / "trace.jsonl"
    rows = [GOOD, *lines, {**GOOD, "timestamp": 30}]
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows))
    return path


BAD_ROWS = [
    ({**GOOD, "input_length": -5}, f"field 'input_length' is -5: {WHOLE}"),
    ({**GOOD, "input_length": 0}, f"field 'input_length' is 0: {WHOLE}"),
    ({**GOOD, "input_length": 10_000_001}, f"field 'input_length' is 10000001: {WHOLE}"),
    ({**GOOD, "input_length": 10**30}, f"field 'input_length' is 1{'0' * 30}: {WHOLE}"),
    ({**GOOD, "input_length": True}, f"field 'input_length' is true: {WHOLE}"),
    ({**GOOD, "input_length": 15.5}, f"field 'input_length' is 15.5: {WHOLE}"),
    ({**GOOD, "input_length": "1500"}, f"field 'input_length' is \"1500\": {WHOLE}"),
    ({**GOOD, "input_length": None}, f"field 'input_length' is null: {WHOLE}"),
    ({**GOOD, "input_length": float("nan")}, f"field 'input_length' is NaN: {WHOLE}"),
    ({**GOOD, "input_length": float("inf")}, f"field 'input_length' is Infinity: {WHOLE}"),
    ({**GOOD, "input_length": [1]}, f"field 'input_length' is [1]: {WHOLE}"),
    ({**GOOD, "output_length": -1}, f"field 'output_length' is -1: {WHOLE_0}"),
    ({**GOOD, "output_length": 10_000_001}, f"field 'output_length' is 10000001: {WHOLE_0}"),
    ({**GOOD, "output_length": 0.5}, f"field 'output_length' is 0.5: {WHOLE_0}"),
    ({**GOOD, "timestamp": -1}, f"field 'timestamp' is -1: {MS}"),
    ({**GOOD, "timestamp": float("nan")}, f"field 'timestamp' is NaN: {MS}"),
    ({**GOOD, "timestamp": float("inf")}, f"field 'timestamp' is Infinity: {MS}"),
    ({**GOOD, "timestamp": 1e300}, f"field 'timestamp' is 1e+300: {MS}"),
    ({**GOOD, "timestamp": False}, f"field 'timestamp' is false: {MS}"),
    ({**GOOD, "timestamp": "0"}, f"field 'timestamp' is \"0\": {MS}"),
    ({k: v for k, v in GOOD.items() if k != "output_length"}, "field 'output_length' is missing"),
    ({k: v for k, v in GOOD.items() if k != "timestamp"}, "field 'timestamp' is missing"),
    ({k: v for k, v in GOOD.items() if k != "hash_ids"}, "field 'hash_ids' is missing"),
    ({**GOOD, "hash_ids": "012"}, "field 'hash_ids' is \"012\": a list of block ids is needed"),
    ({**GOOD, "hash_ids": {"a": 1}}, "field 'hash_ids' is {\"a\": 1}: a list of block ids is needed"),
    (
        {**GOOD, "hash_ids": [0, -1, 2]},
        "field 'hash_ids[1]' is -1: a whole number from 0 to 9223372036854775807 is allowed",
    ),
    (
        {**GOOD, "hash_ids": [0, 1, 2**63]},
        "field 'hash_ids[2]' is 9223372036854775808: a whole number from 0 to 9223372036854775807 is allowed",
    ),
    (
        {**GOOD, "hash_ids": [0, "x", 2]},
        "field 'hash_ids[1]' is \"x\": a whole number from 0 to 9223372036854775807 is allowed",
    ),
    ({**GOOD, "hash_ids": [0, 1, 0]}, "field 'hash_ids[2]' is 0: the row has that id already, and no id may repeat"),
    (
        {**GOOD, "hash_ids": [0, 1]},
        "field 'hash_ids' has 2 ids, but a prompt of 1500 tokens makes 3 started blocks of 512 tokens "
        "(block size assumed, as it fits the most rows)",
    ),
    (b'{"timestamp": 1, "input_length": 5', "not valid JSON: Expecting ',' delimiter at column 35"),
    (b"[1, 2]", "[1, 2]: a JSON object, one a line, is needed"),
    (b"[" * 100_000, "not valid JSON: "),
    (b'{"timestamp": 1, "note": "caf\xe9"}', "byte 0xe9 at column 30 is not UTF-8 text"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message[:60] for _, message in BAD_ROWS])
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path, row, message):
    path = mooncake(tmp_path, row)
    assert refusal(path).startswith(f"FILE:2: {message}")
    trace = open_trace(path, skip_bad=True)
    assert (trace.num_rows, trace.num_bad, len(trace.requests)) == (3, 1, 2)
    assert trace.bad[0].startswith(f"{path}:2: {message}")
    assert trace.notes[-1] == f"1 bad row skipped; the first: {trace.bad[0]}"
    assert [request.label for request in trace.requests] == ["line 1", "line 3"]


def test_an_output_of_nothing_and_whole_floats_are_allowed(tmp_path):
    path = mooncake(tmp_path, {**GOOD, "output_length": 0, "input_length": 1500.0, "timestamp": 20.5})
    request = open_trace(path).requests[1]
    assert (request.num_prompt, request.num_output, request.arrival_s) == (1500, 0, 0.0105)


def test_the_length_limit_can_be_set(tmp_path):
    assert "from 1 to 1000 is allowed" in refusal(mooncake(tmp_path), max_tokens=1000)


def test_many_bad_rows_are_counted_and_the_first_kept(tmp_path):
    trace = open_trace(mooncake(tmp_path, *[{**GOOD, "input_length": -n} for n in range(20)]), skip_bad=True)
    assert (trace.num_bad, len(trace.bad)) == (20, MAX_BAD_KEPT)
    assert f"20 bad rows skipped; the first: {trace.bad[0]}" in trace.notes


def test_nothing_left_after_skipping_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": -1}\n' * 3)
    message = refusal(path, skip_bad=True)
    assert message == f"FILE: none of 3 rows can be used; the first: FILE:1: field 'input_length' is -1: {WHOLE}"


def test_lines_keep_their_numbers_under_any_line_ends(tmp_path):
    row = json.dumps(GOOD).encode()
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row + b"\n \n" + row + b"\rbroken\r\n")
    assert refusal(path).startswith("FILE:6: not valid JSON")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in": -5}, f"requests[1]: field 'in' is -5: {WHOLE}"),
        ({"out": "many"}, f"requests[1]: field 'out' is \"many\": {WHOLE_0}"),
        ({"t": -0.5}, "requests[1]: field 't' is -0.5: a number from 0 to 10000000000 is allowed [s]"),
        ({"hash_ids": [1, 1]}, "requests[1]: field 'hash_ids[1]' is 1: the row has that id already"),
        ({"hash_ids": [2**41, 1]}, "requests[1]: field 'hash_ids[0]' is 2199023255552: a whole number from 0 to"),
        (
            {"hash_ids": [1, 2, 3, 4]},
            "field 'hash_ids' has 4 ids, but a prompt of 130 tokens makes 2 full blocks of 64 tokens "
            "(block size stated in the file)",
        ),
    ],
)
def test_a_bad_turn_is_skipped_alone(tmp_path, change, message):
    turn = {"t": 1.0, "in": 130, "out": 5, "hash_ids": [1, 2]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"id": "x", "block_size": 64, "requests": [turn, {**turn, **change}, turn]}) + "\n")
    assert refusal(path).startswith(f"FILE:1: {message}")
    trace = open_trace(path, skip_bad=True)
    assert (trace.num_rows, trace.num_bad, len(trace.requests)) == (3, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "field 'block_size' is 0: a whole number from 1 to 1024 is allowed"),
        ({"block_size": 16}, "field 'block_size' is 16: the lines above it have 64"),
        ({"hash_id_scope": "global"}, "field 'hash_id_scope' is \"global\": only 'local' is known"),
        ({"requests": 3}, "field 'requests' is 3: a list is needed"),
        ({"requests": [3]}, "requests[0]: 3: an object is needed"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path, change, message):
    path = tmp_path / "t.jsonl"
    talk = {"id": "x", "block_size": 64, "requests": [{"t": 1.0, "in": 130, "out": 5, "hash_ids": [1, 2]}]}
    path.write_text(f"{json.dumps(talk)}\n{json.dumps({**talk, **change})}\n")
    assert refusal(path) == f"FILE:2: {message}"
    assert open_trace(path, skip_bad=True).num_bad == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("5,-3,1", f"field 'input_tokens' is -3: {WHOLE}"),
        ("5,0,1", f"field 'input_tokens' is 0: {WHOLE}"),
        ("5,abc,1", f"field 'input_tokens' is abc: {WHOLE}"),
        ("5,,1", f"field 'input_tokens' is \"\": {WHOLE}"),
        ("5,1.5,1", f"field 'input_tokens' is 1.5: {WHOLE}"),
        ("5,1_000,1", f"field 'input_tokens' is 1_000: {WHOLE}"),
        ("5,nan,1", f"field 'input_tokens' is nan: {WHOLE}"),
        ("5,1e9,1", f"field 'input_tokens' is 1e9: {WHOLE}"),
        ("5,99999999,1", f"field 'input_tokens' is 99999999: {WHOLE}"),
        ("5,7,99999999", f"field 'output_tokens' is 99999999: {WHOLE_0}"),
        ("nan,7,1", f"field 'arrival_ms' is \"nan\": {MS}"),
        ("-1,7,1", f"field 'arrival_ms' is \"-1\": {MS}"),
        ("soon,7,1", f"field 'arrival_ms' is \"soon\": {MS}"),
        ("5,7", "2 columns, but the header has 3"),
        ("5,7,1,", "4 columns, but the header has 3"),
        ('5,"7,1', "not valid CSV: unexpected end of data"),
    ],
)
def test_a_bad_csv_row_is_named_or_skipped(tmp_path, row, message):
    path = tmp_path / "t.csv"
    path.write_text(f"arrival_ms,input_tokens,output_tokens\n\n1,2,3\n{row}\n1,2,3\n")
    assert refusal(path) == f"FILE:4: {message}"
    trace = open_trace(path, skip_bad=True)
    assert (trace.num_rows, trace.num_bad) == (3, 1)


@pytest.mark.parametrize("cell", ["yesterday", "2024-13-01 00:00:00", "2024-02-30 00:00:00.5", "12345", ""])
def test_a_bad_date_is_named(tmp_path, cell):
    path = tmp_path / "t.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{cell},2,3\n")
    assert refusal(path).startswith(f"FILE:2: field 'TIMESTAMP' is \"{cell}\": a time such as 2023-11-16 18:17:03")


def test_dates_with_a_zone_are_put_on_one_clock(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 02:00:01.5+02:00,2,3\n2024-05-10T00:00:01Z,2,3\n2024-05-10 00:00:02,2,3\n"
    )
    trace = open_trace(path)
    assert [request.arrival_s for request in trace.requests] == [0, 0.5, 1]


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens\n")
    assert refusal(path) == "FILE:1: column 'GeneratedTokens' is missing; found: \"TIMESTAMP, ContextTokens\""


def test_a_column_that_is_there_twice_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n")
    assert refusal(path) == "FILE:1: column 'ContextTokens' stands there 2 times, not once"


def test_arrivals_too_far_apart_are_refused(tmp_path):
    path = mooncake(tmp_path, {**GOOD, "timestamp": 1_700_000_000_000})  # milliseconds since 1970 among others
    assert refusal(path) == (
        "FILE:2: arrives 1700000000 s after line 1: a trace may last 100000000 s from its first arrival to its last"
    )


def test_a_header_alone_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_ms,input_tokens,output_tokens\n")
    assert refusal(path) == "FILE: no rows"


def test_files_that_cannot_be_opened(tmp_path):
    assert refusal(tmp_path / "nothing.jsonl") == "FILE: no such file"
    assert refusal(tmp_path) == "FILE: a directory; a trace file is needed"
    assert "File name too long" in refusal(tmp_path / ("x" * 5000))
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "FILE: not a regular file; a trace file is needed"


@pytest.mark.parametrize(("data", "what"), [(b"", ""), (b"\n \r\n", " but for blank lines"), (gzip.compress(b""), "")])
def test_an_empty_file(tmp_path, data, what):
    path = tmp_path / "t"
    path.write_bytes(data)
    assert refusal(path) == f"FILE: the file is empty{what}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{}".encode("utf-16"), "UTF-16 text cannot be read: save it as UTF-8"),
        ("{}".encode("utf-16-le"), "this looks like UTF-16 text, which cannot be read: save it as UTF-8"),
        ("{}".encode("utf-16-be"), "this looks like UTF-16 text, which cannot be read: save it as UTF-8"),
        ("{}".encode("utf-32"), "UTF-32 text cannot be read: save it as UTF-8"),
        (gzip.compress("{}".encode("utf-16")), "UTF-16 text cannot be read: save it as UTF-8"),
        (b"\x28\xb5\x2f\xfd0000", "zstd data cannot be read: unpack it first; plain text and gzip are read"),
        (b"PAR1....", "Parquet data cannot be read: export it as CSV or JSON lines"),
    ],
)
def test_other_encodings_are_refused_by_name(tmp_path, data, message):
    path = tmp_path / "t"
    path.write_bytes(data)
    assert refusal(path) == f"FILE: {message}"


@pytest.mark.parametrize("text", ["hello\nworld\n", '{"a": 1}\n', "a,b,c\n1,2,3\n", '[{"timestamp": 1}]\n', "1,2,3\n"])
def test_an_unknown_format_lists_the_known_ones(tmp_path, text):
    path = tmp_path / "t"
    path.write_text("\n" + text)
    message = refusal(path)
    assert message.startswith(f"FILE:2: {json.dumps(text.splitlines()[0])} fits no known trace format; known: ")
    assert all(name in message for name in ("agentic", "mooncake", "azure", "vidur", "sharegpt"))


def test_an_unknown_format_name_lists_the_known_ones():
    message = refusal(DATA / "azure.csv", "parquet")
    assert message == "--trace-format parquet: one of auto, agentic, mooncake, azure, vidur, sharegpt"


def test_a_gzip_file_cut_short_is_refused_or_read_to_its_last_whole_line(tmp_path):
    rows = [json.dumps({**GOOD, "timestamp": n * 7919 % 1000, "output_length": n * n % 977}) for n in range(2000)]
    whole = gzip.compress("\n".join(rows).encode())
    path = tmp_path / "t.gz"
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(path).startswith("FILE: the gzip data is cut short after ")
    trace = open_trace(path, skip_bad=True)
    kept = len(trace.requests)
    assert 100 < kept < 2000
    assert [r.num_output for r in trace.file_order] == [n * n % 977 for n in range(kept)]
    assert trace.num_bad == 1
    assert trace.notes[0] == f"the gzip data is cut short: nothing from line {kept + 1} on could be read"


def test_a_damaged_gzip_file_is_refused(tmp_path):
    whole = bytearray((DATA / "mooncake.jsonl.gz").read_bytes())
    path = tmp_path / "t.gz"
    whole[-6] ^= 1  # the checksum
    path.write_bytes(whole)
    assert refusal(path).startswith("FILE: the gzip data is damaged after ")
    path.write_bytes(b"\x1f\x8bnonsense")
    assert refusal(path).startswith("FILE: the gzip data is damaged after 0 bytes")
    assert refusal(path, skip_bad=True) == "FILE: the gzip data is damaged; no whole line could be read"
    path.write_bytes(bytes(whole[:-8]))
    assert refusal(path).startswith("FILE: the gzip data is cut short after ")


def test_a_bad_first_row_does_not_hide_the_format(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": oops\n' + json.dumps(GOOD) + "\n")
    assert refusal(path).startswith("FILE:1: not valid JSON")
    assert open_trace(path, skip_bad=True).format == "mooncake"
