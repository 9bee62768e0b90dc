"""Block tables in recordings: changes lead from one to the next, whatever changed, and nothing else is believed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtop.recording.framing import RecordingError
from kvtop.recording.tables import (
    Tables,
    holders_of,
    make_tables,
    no_tables,
    pack_tables,
    table_of,
    unpack_tables,
)


def tables(rows: dict[int, list[int]]) -> Tables:
    order = sorted(rows)
    counts = np.array([len(rows[row]) for row in order], np.int64)
    ids = np.array([block for row in order for block in rows[row]], np.int64)
    return make_tables(np.array(order, np.int64), counts, ids)


def told(some: Tables) -> dict[int, list[int]]:
    found = {}
    for row in some.rows.tolist():
        table = table_of(some, row)
        assert table is not None
        found[row] = table.tolist()
    return found


def test_every_change_is_told() -> None:
    rng = random.Random(4)
    rows: dict[int, list[int]] = {}
    before = no_tables()
    for _ in range(300):
        for _ in range(rng.randrange(4)):
            row = rng.randrange(12)
            match rng.randrange(5):
                case 0:
                    rows.pop(row, None)
                case 1:
                    rows[row] = [rng.randrange(100) for _ in range(rng.randrange(1, 9))]
                case 2 if row in rows:
                    rows[row] = rows[row][: rng.randrange(1, len(rows[row]) + 1)]
                case 3 if row in rows:
                    rows[row] = [*rows[row]]
                    rows[row][rng.randrange(len(rows[row]))] = rng.randrange(100)
                case _:
                    rows[row] = [*rows.get(row, []), rng.randrange(100)]
        now = tables(rows)
        packed = b"front" + pack_tables(now, before) + b"rest"
        again, end = unpack_tables(packed, 5, before)
        assert packed[end:] == b"rest"
        assert told(again) == told(now) == rows
        whole, _ = unpack_tables(pack_tables(now, no_tables()), 0, no_tables())
        assert told(whole) == rows
        before = again


def test_a_step_that_appends_little_takes_little() -> None:
    before = tables({row: list(range(row * 50, row * 50 + 50)) for row in range(60)})
    now = tables({row: [*told(before)[row], *([9000] if row in (3, 40) else [])] for row in range(60)})
    assert len(pack_tables(now, before)) == 8 + 2 * 16
    assert len(pack_tables(before, before)) == 8


def test_tables_that_do_not_follow_are_refused() -> None:
    change = pack_tables(tables({1: [5, 6, 7, 8]}), tables({1: [5, 6, 7]}))
    with pytest.raises(RecordingError, match="does not follow"):
        unpack_tables(change, 0, tables({1: [5]}))
    for size in range(len(change)):
        with pytest.raises(RecordingError):
            unpack_tables(change[:size], 0, tables({1: [5, 6, 7]}))


def test_holders_of_a_block() -> None:
    some = tables({2: [7, 8], 5: [9, 7], 9: [7]})
    assert holders_of(some, 7) == (((2, 0), (5, 1), (9, 0)), 3)
    assert holders_of(some, 1) == ((), 0)
    assert table_of(some, 3) is None
    many = tables({row: [7] for row in range(100)})
    pairs, total = holders_of(many, 7)
    assert (len(pairs), total) == (64, 100)
