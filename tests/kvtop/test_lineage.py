"""Who shares its first blocks with whom, against the plainest way to find out; and the tree that is made of it."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.commands import Fork, Step
from allocator.snapshot import SequenceRow
from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.model.lineage import grow_tree, lineage
from kvtop.model.observation import Kin
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessOperations, InProcessSource


def by_hand(tables: dict[int, np.ndarray]) -> tuple[Kin, ...]:
    """Compare everybody with everybody older."""
    found = []
    for seq_id in sorted(tables):
        best = (0, 0)
        for other in sorted(o for o in tables if o < seq_id):
            common = 0
            for a, b in zip(tables[seq_id].tolist(), tables[other].tolist(), strict=False):
                if a != b:
                    break
                common += 1
            if common > best[1]:
                best = (other, common)
        if best[1]:
            found.append(Kin(seq_id, *best))
    return tuple(found)


@pytest.mark.parametrize("seed", range(60))
def test_the_same_as_by_hand(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tables: dict[int, np.ndarray] = {}
    for seq_id in draw.permutation(int(draw.integers(0, 24))).tolist():
        kept = np.empty(0, np.int64)
        if tables and draw.random() < 0.8:
            other = tables[int(draw.choice(sorted(tables)))]
            kept = other[: draw.integers(0, len(other) + 1)]
        tables[seq_id] = np.concatenate((kept, draw.integers(0, 300, draw.integers(0, 4))))
    assert lineage(tables) == by_hand(tables)


def test_block_ids_of_a_large_pool_are_compared_whole() -> None:
    low, high = 1, 1 + (1 << 24)
    assert lineage({1: np.array([low, 5]), 2: np.array([high, 5]), 3: np.array([high, 6])}) == (Kin(3, 2, 1),)


def rows(*ids: int) -> list[SequenceRow]:
    return [SequenceRow(i, i, "chat", "running", "", 1, 1, 2, 1, 0, 0, 1, 0) for i in ids]


KIN = {kin.seq_id: kin for kin in (Kin(2, 1, 4), Kin(3, 1, 2), Kin(4, 2, 5), Kin(6, 5, 1), Kin(8, 99, 1))}


def drawn(*, wanted: set[int] | None = None, inverted: bool = False) -> list[str]:
    everyone = rows(7, 1, 3, 2, 4, 6, 5, 8)
    arranged, branches = grow_tree(everyone, KIN, wanted or {r.seq_id for r in everyone}, inverted)
    return [f"{branches[row.seq_id]}{row.seq_id}" for row in arranged]


def test_a_tree_nests_the_younger_below_the_older() -> None:
    # 8 hangs on one that is not in the list.
    assert drawn() == ["1", "├2", "│└4", "└3", "5", "└6", "7", "8"]
    assert drawn(inverted=True) == ["8", "7", "5", "└6", "1", "├3", "└2", " └4"]


def test_what_a_row_hangs_on_is_shown_with_it() -> None:
    assert drawn(wanted={4, 6}) == ["1", "└2", " └4", "5", "└6"]


def test_a_deep_tree_is_drawn_without_running_out_of_room() -> None:
    many = 3000
    kin = {i: Kin(i, i - 1, 1) for i in range(1, many)}
    arranged, branches = grow_tree(rows(*range(many)), kin, range(many))
    assert [row.seq_id for row in arranged] == list(range(many))
    assert max(map(len, branches.values())) == 6
    assert branches[many - 1] == "…    └"


def test_an_engine_tells_its_forks() -> None:
    engine, _ = build_engine(EngineOptions(num_blocks=512, geometry="none", seed=5))
    runner = EngineRunner(engine, speed=1.0, paused=True)
    attachment = Attachment(InProcessSource(runner), InProcessOperations(runner))
    try:
        attachment.operations.apply(Step(200))
        view = attachment.poll()
        assert view.lineage is None
        assert view.snapshot is not None
        running = next(r for r in view.snapshot.sequences if r.status == "running" and r.num_blocks > 2)
        assert attachment.operations.apply(Fork(running.seq_id)).ok
        attachment.look_at(seq_id=None, block_id=None, lineage=True)
        view = attachment.poll()
        assert view.lineage is not None
        child = max(r.seq_id for r in view.snapshot.sequences if r.status == "running")
        kin = next(k for k in view.lineage if k.seq_id == child)
        assert kin.blocks >= running.num_blocks - 1
        assert kin.parent <= running.seq_id
    finally:
        engine.close()
