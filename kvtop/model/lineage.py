"""Lineage: which sequence shares its first blocks with which, worked out from all block tables. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import pairwise
from typing import Final

import numpy as np

from allocator.ids import IdArray
from allocator.snapshot import SequenceRow
from kvtop.model.observation import Kin

#: Characters of a branch that are drawn, at most.
_DEEPEST: Final = 6


def lineage(tables: Mapping[int, IdArray]) -> tuple[Kin, ...]:
    """Return, for every sequence that shares its first blocks with an older one, with which and how many.

    Of all older sequences it is the one that shares most, and the oldest of those: a fork hangs below the one it was
    forked from, requests with one system prompt below the first that had it. Sequences are as old as their ids are
    small. Cost: one sort of the tables, and a comparison of each two neighbours.

    Args:
        tables: Sequence id → its device block ids, in token order.
    """
    texts = {seq_id: table.astype(">u4").tobytes() for seq_id, table in tables.items() if len(table)}
    # Sorted, the longest common beginnings are those of neighbours.
    order = sorted(texts, key=texts.__getitem__)
    common = [_common(tables[a], tables[b]) for a, b in pairwise(order)]
    oldest = {seq_id: seq_id for seq_id in order}
    found: dict[int, tuple[int, int]] = {}
    for at in sorted((i for i, blocks in enumerate(common) if blocks), key=lambda i: -common[i]):
        one, other = _root(oldest, order[at]), _root(oldest, order[at + 1])
        older, younger = min(one, other), max(one, other)
        oldest[younger] = older
        found[younger] = (older, common[at])
    return tuple(_kin(seq_id, found) for seq_id in sorted(found))


def grow_tree(
    rows: Iterable[SequenceRow], kin: Mapping[int, Kin], wanted: Container[int], inverted: bool = False
) -> tuple[list[SequenceRow], dict[int, str]]:
    """Return rows in the order of a tree, each below the one with which it shares its first blocks, and its branch.

    Args:
        rows: All rows.
        kin: What a sequence shares with an older one.
        wanted: Sequences to be shown; what they hang on is shown too.
        inverted: The youngest first, among brothers too.
    """
    by_id = {row.seq_id: row for row in rows}
    shown: set[int] = set()
    for seq_id in by_id:
        at: int | None = seq_id if seq_id in wanted else None
        while at is not None and at not in shown:
            shown.add(at)
            at = _parent(at, kin, by_id)
    below: dict[int | None, list[int]] = {}
    for seq_id in sorted(shown, reverse=inverted):
        below.setdefault(_parent(seq_id, kin, by_id), []).append(seq_id)
    arranged: list[SequenceRow] = []
    branches: dict[int, str] = {}
    # A stack rather than recursion: forks of forks may go deep.
    left = [(seq_id, "", "") for seq_id in reversed(below.get(None, []))]
    while left:
        seq_id, stem, branch = left.pop()
        arranged.append(by_id[seq_id])
        branches[seq_id] = _cut(stem + branch)
        children = below.get(seq_id, [])
        stem += {"": "", "├": "│", "└": " "}[branch]
        left += [(c, stem, "└" if c == children[-1] else "├") for c in reversed(children)]
    return arranged, branches


def _parent(seq_id: int, kin: Mapping[int, Kin], known: Container[int]) -> int | None:
    found = kin.get(seq_id)
    return found.parent if found is not None and found.parent in known else None


def _cut(branch: str) -> str:
    return branch if len(branch) <= _DEEPEST else f"…{branch[-_DEEPEST + 1 :]}"


def _kin(seq_id: int, found: Mapping[int, tuple[int, int]]) -> Kin:
    parent, blocks = found[seq_id]
    # Where one shares as much with the next older, all three share it: they are brothers below the oldest.
    while parent in found and found[parent][1] >= blocks:
        parent = found[parent][0]
    return Kin(seq_id, parent, blocks)


def _root(oldest: dict[int, int], seq_id: int) -> int:
    while oldest[seq_id] != seq_id:
        oldest[seq_id] = oldest[oldest[seq_id]]
        seq_id = oldest[seq_id]
    return seq_id


def _common(one: IdArray, other: IdArray) -> int:
    """Return how many leading entries two tables have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(np.argmax(differs)) if differs.any() else length
