"""SharedPool under every schedule of short programs; and proof that the explorer finds races planted for it."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from explorer import (
    Client,
    LawBrokenError,
    Program,
    Scenario,
    Step,
    _Broken,
    check_order,
    explore_exhaustively,
    explore_randomly,
    pack,
    replay,
    unpack,
)

from allocator import pool, reservation
from allocator.pool import BlockPool
from allocator.reservation import SharedPool


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few blocks enough for refills, spills and steals."""
    monkeypatch.setattr(reservation, "SLAB", 2)


def calls(*texts: str) -> Program:
    """Return a program that makes these calls, such as ``"allocate 2"``."""

    def program(client: Client) -> None:
        for text in texts:
            name, *numbers = text.split()
            getattr(client, name, None) or getattr(client.pool, name)
            call = getattr(client, name, None) or getattr(client.pool, name)
            call(*map(int, numbers))

    return program


def build(num_blocks: int, module: ModuleType = reservation) -> SharedPool:
    shared: SharedPool = module.SharedPool(BlockPool(num_blocks))
    return shared


#: Name → (pool size, programs). Slabs are 2 blocks: a refill takes 2, and more than 4 spill.
PROGRAMS = {
    "both refill and give back": (
        6,
        calls("allocate 1", "release", "allocate 1", "release"),
        calls("allocate 1", "release", "allocate 1", "release"),
    ),
    "both need what the other reserves": (
        4,
        calls("allocate 1", "release", "allocate 3", "release"),
        calls("allocate 1", "release", "allocate 3", "release"),
    ),
    "one takes all, one a few": (5, calls("allocate 5", "release"), calls("allocate 1", "release", "allocate 2")),
    "both spill": (
        12,
        calls("allocate 5", "release", "allocate 2"),
        calls("allocate 5", "release", "allocate 2"),
    ),
    "a large batch meets small ones": (
        20,
        calls("allocate 9", "release", "allocate 10", "release"),
        calls("allocate 1", "allocate 7", "release", "release"),
    ),
    "a pin meets releases": (
        4,
        calls("allocate 1", "release", "allocate 1", "release"),
        calls("pin 0 1", "allocate 1", "unpin 0 1"),
    ),
    "pins come and go": (4, calls("allocate 2", "release"), calls("pin 0", "unpin 0", "pin 1")),
    "all are called back": (
        6,
        calls("allocate 1", "release", "allocate 2", "release"),
        calls("reclaim_all", "reclaim_all"),
    ),
    "idle ones are called back": (
        6,
        calls("allocate 1", "release", "allocate 2", "release"),
        calls("reclaim_idle", "allocate 1", "reclaim_idle", "reclaim_idle"),
    ),
    "a thread gives back": (
        6,
        calls("allocate 1", "release", "give_back", "allocate 2"),
        calls("allocate 6", "release"),
    ),
    "a thread ends": (
        6,
        calls("allocate 2", "allocate 1", "release", "end_thread"),
        calls("allocate 1", "allocate 3", "reclaim_idle", "release"),
    ),
}


def scenario(name: str, **options: bool) -> Scenario:
    num_blocks, *programs = PROGRAMS[name]
    return Scenario(name, lambda: build(num_blocks), tuple(programs), **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule_with_one_preemption(name: str) -> None:
    assert explore_exhaustively(scenario(name), preemptions=1) > 20
