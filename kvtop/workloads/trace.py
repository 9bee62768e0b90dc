"""Trace files: rows of lengths, arrival times and block ids, checked and turned into requests.

Owns the formats that are known, how one is recognised, and every message about a bad file
or row. The good path decodes typed rows at full speed; only a row that fails it is looked
at field by field, to say what is wrong.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from allocator.config import MAX_BLOCK_SIZE
from allocator.content import Content, KeyedContent, OpaqueContent, Request
from kvtop.errors import UserError

#: Tokens one length field may hold.
MAX_TOKENS: Final = 10_000_000
#: Bytes of text read from one file, unpacked.
MAX_BYTES: Final = 2 << 30
#: Arrival times are refused beyond this. [s]
MAX_ARRIVAL_S: Final = 10_000_000_000
#: From the first arrival to the last, at most: about three years, so that the engine's steps fit 32 bits. [s]
MAX_SPAN_S: Final = 100_000_000
#: Messages about bad rows that are kept; all are counted.
MAX_BAD_KEPT: Final = 5

_MAX_ID: Final = 2**63 - 1
#: Ids local to a line are made global by an offset a line; this keeps the sum in 64 bits.
_MAX_LOCAL_ID: Final = 2**40 - 1
_LIKELY_BLOCK_SIZES: Final = (512, 64, 16)
#: Rows looked at when the block size is none of the likely ones.
_SAMPLED_ROWS: Final = 4096

IdRow = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one trace file.

    Attributes:
        path: Where it was read from.
        format: Its format, a key of ``TRACE_FORMATS``.
        requests: Sorted by arrival; ties in file order. The first arrives at 0.
        file_order: The same requests as the file has them.
        block_size: Tokens a block of the trace's own block ids; ``None`` when it has none.
        num_rows: Rows in the file, bad ones included (the turns, where a line is a conversation).
        num_bad: Rows left out.
        bad: The first few messages about bad rows.
        notes: What the reader decided or changed, for the operator.
        duration_s: From the first arrival to the last; ``None`` when the file has no times.
    """

    path: Path
    format: str
    requests: Sequence[Request]
    file_order: Sequence[Request]
    block_size: int | None
    num_rows: int
    num_bad: int
    bad: tuple[str, ...]
    notes: tuple[str, ...]
    duration_s: float | None


def open_trace(
    path: Path,
    format: str = "auto",
    *,
    block_size: int | None = None,
    skip_bad: bool = False,
    max_tokens: int = MAX_TOKENS,
) -> Trace:
    """Read a whole trace file, plain or gzip, and return its requests.

    Args:
        path: The file.
        format: ``auto`` or a key of ``TRACE_FORMATS``.
        block_size: The engine's tokens a block; must be the trace's own where that has block ids.
        skip_bad: Leave bad rows out and count them, instead of refusing the file.
        max_tokens: The greatest length allowed in a row.

    Raises:
        UserError: One line naming the file, the line and the field, and what is allowed.
    """
    if format != "auto" and format not in TRACE_FORMATS:
        raise UserError(f"--trace-format {format}: one of auto, {', '.join(TRACE_FORMATS)}")
    faults = _Faults(path, skip_bad)
    lines, notes = _read_lines(path, faults)
    found = _detect(lines)
    if found is None and format == "auto":
        first, text = next(_not_blank(lines))
        raise UserError(
            f"{path}:{first}: {_show(text.decode('utf-8', 'replace'))} fits no known trace format; "
            f"known: {_known_formats()}"
        )
    if format != "auto" and found not in (None, format):
        raise UserError(f"{path}: this is a trace of format {found}; --trace-format {format} does not fit it")
    name = found if format == "auto" and found is not None else format
    spec = TRACE_FORMATS[name]
    parsed = spec.read(lines, faults, max_tokens)
    rows, own_size = parsed.rows, None
    if spec.has_ids and rows:
        own_size, rows = _fit_block_size(rows, parsed.block_size, block_size, faults)
    if not rows:
        if not faults.count:
            raise UserError(f"{path}: no rows")
        raise UserError(f"{path}: none of {faults.count} rows can be used; the first: {faults.first[0]}")
    if own_size is not None and block_size is not None and block_size != own_size:
        raise UserError(
            f"--block-size {block_size}: {path} has block ids for {own_size} tokens; use {own_size} or leave it out"
        )
    return _build(path, name, rows, own_size, faults, notes)


# ---------------------------------------------------------------------------------------------
# Rows


class _Row(msgspec.Struct, gc=False):
    """One request as the file has it. ``arrival`` is in units of its format."""

    line: int
    arrival: float
    prompt: int
    output: int
    ids: IdRow | None
    label: str


@dataclass(slots=True)
class _Parsed:
    """All rows of a file; the block size only when the file states it."""

    rows: list[_Row]
    block_size: int | None = None


class _BadRow(ValueError):
    """What is wrong with one row, without its place."""


class _Faults:
    """Bad rows of one file: the first ends the reading, unless they are to be skipped and counted."""

    def __init__(self, path: Path, skip: bool) -> None:
        self.path, self.skip = path, skip
        self.count = 0
        self.first: list[str] = []

    def add(self, line: int, message: str) -> None:
        text = f"{self.path}:{line}: {message}"
        if not self.skip:
            raise UserError(text)
        self.count += 1
        if len(self.first) < MAX_BAD_KEPT:
            self.first.append(text)


def _build(path: Path, name: str, rows: list[_Row], block_size: int | None, faults: _Faults, notes: list[str]) -> Trace:
    spec = TRACE_FORMATS[name]
    first = min(row.arrival for row in rows)
    per_s = spec.ticks_per_s
    requests = []
    for nonce, row in enumerate(rows):
        total = row.prompt + row.output
        content: Content
        if row.ids is None or block_size is None:
            content = OpaqueContent(total, nonce)
        else:
            content = KeyedContent(total, row.ids[: row.prompt // block_size], block_size, nonce)
        requests.append(Request(content, row.prompt, (row.arrival - first) / per_s, row.label))
    order = sorted(requests, key=lambda request: request.arrival_s)
    duration_s: float | None = None
    if spec.has_times:
        duration_s = order[-1].arrival_s
        if duration_s > MAX_SPAN_S:
            late, early = max(rows, key=_arrival).line, min(rows, key=_arrival).line
            raise UserError(
                f"{path}:{late}: arrives {duration_s:.0f} s after line {early}: "
                f"a trace may last {MAX_SPAN_S} s from its first arrival to its last"
            )
        notes.append(f"arrival times in {spec.unit}, {duration_s:.3f} s from first to last")
        if late := _count_late(rows, spec.line_is_conversation):
            notes.append(f"arrival times out of order: {late} {'row' if late == 1 else 'rows'} sorted")
    else:
        notes.append("no arrival times: all requests arrive at once")
    if block_size is not None:
        notes.append(f"block ids for {block_size} tokens each")
    if faults.count:
        notes.append(
            f"{faults.count} bad {'row' if faults.count == 1 else 'rows'} skipped; the first: {faults.first[0]}"
        )
    return Trace(
        path, name, tuple(order), tuple(requests), block_size, len(rows) + faults.count, faults.count,
        tuple(faults.first), tuple(notes), duration_s,
    )  # fmt: skip


def _arrival(row: _Row) -> float:
    return row.arrival


def _count_late(rows: Sequence[_Row], by_line: bool) -> int:
    """Return how many rows arrive before a row above them, in the file or (``by_line``) in their own line."""
    late, line, latest = 0, 0, rows[0].arrival
    for row in rows:
        if by_line and row.line != line:
            line, latest = row.line, row.arrival
        late += row.arrival < latest
        latest = max(latest, row.arrival)
    return late


# ---------------------------------------------------------------------------------------------
# Block size of block ids


def _fit_block_size(
    rows: list[_Row], stated: int | None, wanted: int | None, faults: _Faults
) -> tuple[int, list[_Row]]:
    """Return the block size that the id counts speak for, and the rows that agree with it.

    A file has an id for each started block or for each full one, the same way in all rows.
    """
    prompts = np.array([row.prompt for row in rows], np.int64)
    counts = np.array([0 if row.ids is None else len(row.ids) for row in rows], np.int64)
    size = stated if stated is not None else _likely_block_size(prompts, counts, wanted)
    started, full = -(-prompts // size), prompts // size
    fits_started, fits_full = counts == started, counts == full
    partial = np.count_nonzero(fits_started) >= np.count_nonzero(fits_full)
    fits, expected = (fits_started, started) if partial else (fits_full, full)
    if fits.all():
        return size, rows
    why = "stated in the file" if stated is not None else "assumed, as it fits the most rows"
    for index in np.flatnonzero(~fits):
        row = rows[index]
        faults.add(
            row.line,
            f"field 'hash_ids' has {counts[index]} ids, but a prompt of {row.prompt} tokens makes "
            f"{expected[index]} {'started' if partial else 'full'} blocks of {size} tokens (block size {why})",
        )
    return size, [row for row, good in zip(rows, fits, strict=True) if good]


def _likely_block_size(prompts: NDArray[np.int64], counts: NDArray[np.int64], wanted: int | None) -> int:
    def score(size: int) -> int:
        return int(max(np.count_nonzero(counts == -(-prompts // size)), np.count_nonzero(counts == prompts // size)))

    likely = [size for size in (wanted, *_LIKELY_BLOCK_SIZES) if size is not None and 1 <= size <= MAX_BLOCK_SIZE]
    best = max(likely, key=score)  # the first of equals
    if score(best) == len(prompts):
        return best
    prompts, counts = prompts[:_SAMPLED_ROWS], counts[:_SAMPLED_ROWS]
    powers = [1 << i for i in reversed(range(MAX_BLOCK_SIZE.bit_length()))]
    return max((best, *powers, *range(1, MAX_BLOCK_SIZE + 1)), key=score)


# ---------------------------------------------------------------------------------------------
# JSON lines


_Length = Annotated[int, Meta(ge=1)]
_Output = Annotated[int, Meta(ge=0)]


class _MooncakeRow(msgspec.Struct, gc=False):
    timestamp: Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S * 1000)]
    input_length: _Length
    output_length: _Output
    hash_ids: list[Annotated[int, Meta(ge=0, le=_MAX_ID)]]
    session_id: int | str | None = None
    turn: int | None = None


class _Turn(msgspec.Struct, gc=False, rename={"prompt": "in", "output": "out"}):
    t: Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S)]
    prompt: _Length
    output: _Output
    hash_ids: list[Annotated[int, Meta(ge=0, le=_MAX_LOCAL_ID)]]


class _Conversation(msgspec.Struct, gc=False):
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    requests: list[_Turn]
    id: str | int = ""
    hash_id_scope: str = "local"


#: What a decoder may raise on bytes that are not what it wants.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def _read_mooncake(lines: Sequence[bytes], faults: _Faults, max_tokens: int) -> _Parsed:
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = decode(line)
            ids = row.hash_ids
            good = row.input_length <= max_tokens and row.output_length <= max_tokens and len(set(ids)) == len(ids)
        except _DECODE_ERRORS:
            if not line.strip():
                continue
            good = False
        if not good:
            try:
                row = _examine_mooncake(line, max_tokens)
            except _BadRow as error:
                faults.add(number, str(error))
                continue
        label = f"line {number}" if row.session_id is None else f"session {row.session_id}/{row.turn}"
        ids_array = np.array(row.hash_ids, np.int64)
        rows.append(_Row(number, row.timestamp, row.input_length, row.output_length, ids_array, label))
    return _Parsed(rows)


def _examine_mooncake(line: bytes, max_tokens: int) -> _MooncakeRow:
    record = _json_object(line)
    session, turn = record.get("session_id"), record.get("turn")
    return _MooncakeRow(
        _check_time(record, "timestamp", 1000),
        _check_whole(record, "input_length", 1, max_tokens),
        _check_whole(record, "output_length", 0, max_tokens),
        _check_ids(record, _MAX_ID),
        session if isinstance(session, int | str) and not isinstance(session, bool) else None,
        turn if isinstance(turn, int) and not isinstance(turn, bool) else None,
    )


def _read_agentic(lines: Sequence[bytes], faults: _Faults, max_tokens: int) -> _Parsed:
    decode = msgspec.json.Decoder(_Conversation).decode
    rows: list[_Row] = []
    block_size: int | None = None
    offset = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            try:
                talk = decode(line)
                good = talk.hash_id_scope == "local" and all(_is_plain_turn(turn, max_tokens) for turn in talk.requests)
            except _DECODE_ERRORS:
                good = False
            if not good:
                talk = _examine_conversation(line, number, faults, max_tokens)
            if block_size not in (None, talk.block_size):
                raise _BadRow(f"field 'block_size' is {talk.block_size}: the lines above it have {block_size}")
        except _BadRow as error:
            faults.add(number, str(error))
            continue
        block_size = talk.block_size
        name = talk.id if talk.id != "" else f"line {number}"
        highest = -1
        for index, turn in enumerate(talk.requests):
            ids = np.array(turn.hash_ids, np.int64)
            if len(ids):
                highest = max(highest, int(ids.max()))
            rows.append(_Row(number, turn.t, turn.prompt, turn.output, ids + offset, f"{name}/{index}"))
        offset += highest + 1
    return _Parsed(rows, block_size)


def _is_plain_turn(turn: _Turn, max_tokens: int) -> bool:
    ids = turn.hash_ids
    return turn.prompt <= max_tokens and turn.output <= max_tokens and len(set(ids)) == len(ids)


def _examine_conversation(line: bytes, number: int, faults: _Faults, max_tokens: int) -> _Conversation:
    """Return the conversation with its good turns; bad ones go to ``faults`` one by one."""
    record = _json_object(line)
    scope = record.get("hash_id_scope", "local")
    if scope != "local":
        raise _BadRow(f"field 'hash_id_scope' is {_show(scope)}: only 'local' is known")
    block_size = _check_whole(record, "block_size", 1, MAX_BLOCK_SIZE)
    items = _field(record, "requests")
    if not isinstance(items, list):
        raise _BadRow(f"field 'requests' is {_show(items)}: a list is needed")
    turns = []
    for index, item in enumerate(items):
        try:
            if not isinstance(item, dict):
                raise _BadRow(f"{_show(item)}: an object is needed")
            turns.append(
                _Turn(
                    _check_time(item, "t", 1),
                    _check_whole(item, "in", 1, max_tokens),
                    _check_whole(item, "out", 0, max_tokens),
                    _check_ids(item, _MAX_LOCAL_ID),
                )
            )
        except _BadRow as error:
            faults.add(number, f"requests[{index}]: {error}")
    name = record.get("id")
    return _Conversation(block_size, turns, name if isinstance(name, str | int) else "")


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _BadRow(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRow(f"not valid JSON: {str(error)[:60]}") from None
    if not isinstance(record, dict):
        raise _BadRow(f"{_show(record)}: a JSON object, one a line, is needed")
    return record


def _field(record: dict[str, Any], name: str) -> Any:
    try:
        return record[name]
    except KeyError:
        raise _BadRow(f"field '{name}' is missing") from None


def _check_whole(record: dict[str, Any], name: str, low: int, high: int) -> int:
    return _whole(name, _field(record, name), low, high)


def _whole(name: str, value: object, low: int, high: int) -> int:
    """Return ``value`` if it is whole and within limits; 5.0 is, as JSON does not tell it from 5."""
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and value == int(value):
        return int(value)
    raise _BadRow(f"field '{name}' is {_show(value)}: a whole number from {low} to {high} is allowed")


def _check_time(record: dict[str, Any], name: str, ticks_per_s: int) -> float:
    value, high = _field(record, name), MAX_ARRIVAL_S * ticks_per_s
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        unit = "s" if ticks_per_s == 1 else "ms"
        raise _BadRow(f"field '{name}' is {_show(value)}: a number from 0 to {high} is allowed [{unit}]")
    return float(value)


def _check_ids(record: dict[str, Any], high: int) -> list[int]:
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list):
        raise _BadRow(f"field 'hash_ids' is {_show(ids)}: a list of block ids is needed")
    ids = [_whole(f"hash_ids[{index}]", value, 0, high) for index, value in enumerate(ids)]
    seen: set[int] = set()
    for index, value in enumerate(ids):
        if value in seen:
            raise _BadRow(f"field 'hash_ids[{index}]' is {value}: the row has that id already, and no id may repeat")
        seen.add(value)
    return ids


# ---------------------------------------------------------------------------------------------
# CSV


def _csv_reader(
    prompt: str, output: str, arrival: str | None, to_ticks: Callable[[str, str], float]
) -> Callable[[Sequence[bytes], _Faults, int], _Parsed]:
    """Return a reader for a format with these columns; ``to_ticks`` turns (column, cell) into a time."""
    columns = [name for name in (prompt, output, arrival) if name is not None]

    def read(lines: Sequence[bytes], faults: _Faults, max_tokens: int) -> _Parsed:
        numbered = _not_blank(lines)
        top, text = next(numbered)
        try:
            header = [name.strip() for name in _split_csv(text)]
        except _BadRow as error:
            raise UserError(f"{faults.path}:{top}: {error}") from None
        for name in columns:
            if name not in header:
                raise UserError(f"{faults.path}:{top}: column '{name}' is missing; found: {_show(', '.join(header))}")
            if header.count(name) > 1:
                raise UserError(
                    f"{faults.path}:{top}: column '{name}' stands there {header.count(name)} times, not once"
                )
        at_prompt, at_output = header.index(prompt), header.index(output)
        at_arrival = None if arrival is None else header.index(arrival)
        rows = []
        for number, line in numbered:
            try:
                cells = _split_csv(line)
                if len(cells) != len(header):
                    raise _BadRow(f"{len(cells)} columns, but the header has {len(header)}")
                num_prompt = _check_cell(prompt, cells[at_prompt], 1, max_tokens)
                num_output = _check_cell(output, cells[at_output], 0, max_tokens)
                ticks = 0 if at_arrival is None or arrival is None else to_ticks(arrival, cells[at_arrival].strip())
            except _BadRow as error:
                faults.add(number, str(error))
                continue
            rows.append(_Row(number, ticks, num_prompt, num_output, None, f"line {number}"))
        return _Parsed(rows)

    return read


def _split_csv(line: bytes) -> list[str]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadRow(f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8 text") from None
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise _BadRow(f"not valid CSV: {error}") from None


def _check_cell(name: str, cell: str, low: int, high: int) -> int:
    text = cell.strip()
    if text.isascii() and text.isdecimal() and len(text) < 20:
        value = int(text)
        if low <= value <= high:
            return value
    elif re.fullmatch(r"\d{1,19}\.0+", text, re.ASCII) and low <= int(float(text)) <= high:
        return int(float(text))
    shown = text if re.fullmatch(r"[-+.\w]{1,60}", text, re.ASCII) else _show(text)
    raise _BadRow(f"field '{name}' is {shown}: a whole number from {low} to {high} is allowed")


_CLOCK: Final = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def _clock_ns(name: str, cell: str) -> int:
    """Return a date and time as whole nanoseconds, so that the seventh digit survives. Without a zone: UTC."""
    match = _CLOCK.fullmatch(cell)
    try:
        if match is None:
            raise ValueError
        moment = datetime.datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise _BadRow(f"field '{name}' is {_show(cell)}: a time such as 2023-11-16 18:17:03.97996 is needed") from None
    since = moment - _EPOCH
    return (since.days * 86400 + since.seconds) * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))


def _number_ms(name: str, cell: str) -> float:
    high = MAX_ARRIVAL_S * 1000
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value <= high:
        raise _BadRow(f"field '{name}' is {_show(cell)}: a number from 0 to {high} is allowed [ms]")
    return value


def _no_time(name: str, cell: str) -> float:
    return 0.0


# ---------------------------------------------------------------------------------------------
# The formats


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How one format is read.

    Attributes:
        help: One line for the operator.
        read: Lines to rows.
        marks: A JSON key or CSV column that only this format has; the first found decides.
        has_ids: Whether rows carry block ids.
        has_times: Whether rows carry arrival times.
        unit: The unit of those times, in words.
        ticks_per_s: The same as a number.
        line_is_conversation: Lines overlap in time, so only the order inside a line matters.
    """

    help: str
    read: Callable[[Sequence[bytes], _Faults, int], _Parsed]
    marks: tuple[str, ...]
    has_ids: bool = False
    has_times: bool = True
    unit: str = "ms"
    ticks_per_s: int = 1000
    line_is_conversation: bool = False


#: Every format that is known, by the name that ``--trace-format`` takes.
TRACE_FORMATS: Final = {
    "agentic": TraceFormat(
        "JSON lines, a conversation each: block_size, requests [t, in, out, hash_ids]",
        _read_agentic, ("requests",), has_ids=True, unit="s", ticks_per_s=1, line_is_conversation=True,
    ),
    "mooncake": TraceFormat(
        "JSON lines: timestamp, input_length, output_length, hash_ids",
        _read_mooncake, ("input_length", "hash_ids", "output_length", "timestamp"), has_ids=True,
    ),
    "azure": TraceFormat(
        "CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
        _csv_reader("ContextTokens", "GeneratedTokens", "TIMESTAMP", _clock_ns),
        ("ContextTokens", "GeneratedTokens"), unit="dates", ticks_per_s=1_000_000_000,
    ),
    "vidur": TraceFormat(
        "CSV: num_prefill_tokens, num_decode_tokens",
        _csv_reader("num_prefill_tokens", "num_decode_tokens", None, _no_time),
        ("num_prefill_tokens", "num_decode_tokens"), has_times=False,
    ),
    "sharegpt": TraceFormat(
        "CSV: arrival_ms, input_tokens, output_tokens",
        _csv_reader("input_tokens", "output_tokens", "arrival_ms", _number_ms),
        ("input_tokens", "output_tokens", "arrival_ms"),
    ),
}  # fmt: skip


def _known_formats() -> str:
    return "; ".join(f"{name} ({spec.help})" for name, spec in TRACE_FORMATS.items())


def _detect(lines: Sequence[bytes]) -> str | None:
    """Return the format that the first lines speak for; JSON keys are looked for as text, so bad rows may lead."""
    for index, (_, line) in enumerate(_not_blank(lines)):
        if index == 20:
            break
        if line.lstrip().startswith(b"{"):
            for name, spec in TRACE_FORMATS.items():
                if spec.has_ids and any(f'"{mark}"'.encode() in line for mark in spec.marks):
                    return name
        elif index == 0:
            header = {cell.strip(b' "\t') for cell in line.split(b",")}
            for name, spec in TRACE_FORMATS.items():
                if not spec.has_ids and any(mark.encode() in header for mark in spec.marks):
                    return name
    return None


# ---------------------------------------------------------------------------------------------
# Bytes to lines

_GZIP: Final = b"\x1f\x8b"
_REFUSED_STARTS: Final = (
    (b"\xff\xfe\x00\x00", "UTF-32 text", "save it as UTF-8"),
    (b"\x00\x00\xfe\xff", "UTF-32 text", "save it as UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "unpack it first; plain text and gzip are read"),
    (b"BZh", "bzip2 data", "unpack it first; plain text and gzip are read"),
    (b"\xfd7zXZ", "xz data", "unpack it first; plain text and gzip are read"),
    (b"PK\x03\x04", "a zip archive", "unpack it first; plain text and gzip are read"),
    (b"PAR1", "Parquet data", "export it as CSV or JSON lines"),
)


def _read_lines(path: Path, faults: _Faults) -> tuple[list[bytes], list[str]]:
    """Return the file's lines without their ends, blank ones kept for their numbers, and notes."""
    data = _read_bytes(path)
    notes: list[str] = []
    if data.startswith(_GZIP):
        data, broken = _gunzip(path, data)
        if broken is not None:
            if not faults.skip:
                raise UserError(f"{path}: {broken} after {len(data)} bytes of text")
            # The last line may be cut inside a number and still look right.
            data = data[: data.rfind(b"\n") + 1]
            cut_line = len(data.splitlines()) + 1
            if cut_line == 1:
                raise UserError(f"{path}: {broken}; no whole line could be read")
            notes.append(f"{broken}: nothing from line {cut_line} on could be read")
            faults.add(cut_line, broken)
    for start, what, advice in _REFUSED_STARTS:
        if data.startswith(start):
            raise UserError(f"{path}: {what} cannot be read: {advice}")
    if b"\x00" in data[:2] and len(data) > 1:
        raise UserError(f"{path}: this looks like UTF-16 text, which cannot be read: save it as UTF-8")
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()
    if next(_not_blank(lines), None) is None:
        raise UserError(f"{path}: the file is empty" + (" but for blank lines" if data else ""))
    return lines, notes


def _read_bytes(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{path}: a directory; a trace file is needed")
        if not stat.S_ISREG(mode):  # a pipe could keep the reader waiting for ever
            raise UserError(f"{path}: not a regular file; a trace file is needed")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES >> 30} GiB; smaller traces are allowed")
    return data


def _gunzip(path: Path, data: bytes) -> tuple[bytes, str | None]:
    """Return the text of all gzip members, and what is wrong where they end early."""
    parts: list[bytes] = []
    size, at, broken = 0, 0, None
    member = zlib.decompressobj(31)
    try:
        while at < len(data):
            chunk = data[at : at + 65536]
            part = member.decompress(chunk, MAX_BYTES + 1 - size)
            size += len(part)
            if size > MAX_BYTES:
                raise UserError(f"{path}: more than {MAX_BYTES >> 30} GiB of text; smaller traces are allowed")
            parts.append(part)
            at += len(chunk) - len(member.unused_data)
            if member.eof:
                at += len(data) - at - len(data[at:].lstrip(b"\0"))  # padding after a member is allowed
                if at < len(data):
                    member = zlib.decompressobj(31)
        if not member.eof:
            broken = "the gzip data is cut short"
    except zlib.error:
        broken = "the gzip data is damaged"
    return b"".join(parts), broken


def _not_blank(lines: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) of every line that is not blank."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _show(value: object) -> str:
    """Return a value as a message may hold it: one line, short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
