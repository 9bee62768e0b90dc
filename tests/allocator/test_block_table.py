"""BlockTables against plain lists, through growth, repacking and reuse of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from allocator.block_table import BlockTables


class TablesAgainstLists(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables()
        self.lists: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}
        self.told: dict[int, int] = {}

    @rule(sizes=st.lists(st.sampled_from([0, 1, 3, 4, 5, 9, 40]), min_size=1, max_size=8), first=st.integers(0, 99))
    def new_rows(self, sizes, first):
        for size in sizes:
            ids = list(range(first, first + size))
            row = self.tables.new_row(np.array(ids, np.int64), 2 * size)
            assert row not in self.lists
            self.lists[row], self.written[row], self.told[row] = ids, 2 * size, 0

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def drop_rows(self, data):
        for row in data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True, min_size=1)):
            self.tables.drop_row(row)
            del self.lists[row], self.written[row]

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), first=st.integers(0, 99), times=st.integers(1, 12))
    def append(self, data, first, times):
        rows = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True, min_size=1))
        for i in range(times):
            ids = [(first + i + j) % 100 for j in range(len(rows))]
            self.tables.append(np.array(rows), np.array(ids))
            for row, block in zip(rows, ids, strict=True):
                self.lists[row].append(block)

    @precondition(lambda self: any(self.lists.values()))
    @rule(data=st.data(), block=st.integers(0, 99))
    def set_last(self, data, block):
        filled = [row for row, ids in self.lists.items() if ids]
        rows = data.draw(st.lists(st.sampled_from(filled), unique=True, min_size=1))
        assert self.tables.last(np.array(rows)).tolist() == [self.lists[r][-1] for r in rows]
        self.tables.set_last(np.array(rows), np.full(len(rows), block))
        for row in rows:
            self.lists[row][-1] = block
            self.told[row] = min(self.told[row], len(self.lists[row]) - 1)

    @rule(shift=st.integers(0, 99))
    def rename(self, shift):
        self.tables.rename((np.arange(140) + shift) % 100)
        self.lists = {row: [(b + shift) % 100 for b in ids] for row, ids in self.lists.items()}
        self.told = dict.fromkeys(self.told, 0)

    @rule()
    def untold(self):
        rows, ids = self.tables.untold()
        expected = [(r, b) for r in sorted(self.lists) for b in self.lists[r][self.told[r] :]]
        assert list(zip(rows.tolist(), ids.tolist(), strict=True)) == expected
        self.told = {row: len(ids) for row, ids in self.lists.items()}

    @invariant()
    def same(self):
        rows = sorted(self.lists)
        assert self.tables.rows().tolist() == rows
        assert [self.tables.table(r).tolist() for r in rows] == [self.lists[r] for r in rows]
        assert self.tables.num_tokens[rows].tolist() == [self.written[r] for r in rows]
        row, position, block = (a.tolist() for a in self.tables.entries())
        expected = [(r, i, b) for r in rows for i, b in enumerate(self.lists[r])]
        assert list(zip(row, position, block, strict=True)) == expected


TestTablesAgainstLists = TablesAgainstLists.TestCase


def test_memory_stays_in_proportion_when_rows_come_and_go():
    tables = BlockTables()
    for i in range(3000):
        row = tables.new_row(np.arange(i % 50), 0)
        tables.append(np.full(1, row), np.array([7]))
        tables.drop_row(row)
    assert len(tables._arena) <= 512
    assert len(tables.num_blocks) == 16


def test_many_rows_at_once():
    tables = BlockTables()
    rows = [tables.new_row(np.array([i]), 1) for i in range(100)]
    assert sorted(rows) == list(range(100))
    assert [int(tables.table(r)[0]) for r in rows] == list(range(100))


def test_what_is_listed_and_told_follows_every_change_of_a_table():
    tables = BlockTables()
    row = tables.new_row(np.array([1, 2]), 0)

    def told() -> list[int]:
        return tables.untold()[1].tolist()

    def listed() -> list[int]:
        return tables.entries()[2].tolist()

    assert (told(), listed()) == ([1, 2], [1, 2])
    tables.extend(row, np.array([3, 4]))
    assert (listed(), told()) == ([1, 2, 3, 4], [3, 4])
    assert tables.cut(row, 1).tolist() == [4, 3, 2]
    assert (listed(), told()) == ([1], [])
    tables.extend(row, np.array([5]))
    tables.cut(row, 0)
    tables.extend(row, np.array([6]))
    assert (listed(), told()) == ([6], [6])
