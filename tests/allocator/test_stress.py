"""Threads that share one manager lose nothing; and the stress run would show it if they did."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from allocator.config import EngineConfig
from allocator.geometry import GEOMETRIES
from allocator.manager import BlockManager
from allocator.storage import NoStorage
from allocator.stress import StressReport, run_stress
from allocator.torch_storage import TorchStorage

KINDS = {"admit", "append", "verify", "fork", "swap-out", "swap-in", "free"}


@pytest.fixture(autouse=True)
def fast_switching() -> Iterator[None]:
    """Make threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make_manager(eviction: str = "lru", num_blocks: int = 96) -> BlockManager:
    config = EngineConfig(num_blocks, 4, num_swap_blocks=num_blocks // 2, slab_blocks=32, eviction=eviction)  # type: ignore[arg-type]
    return BlockManager(config, TorchStorage(GEOMETRIES["tiny"], 4, "cpu", config.slab_size))


@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu"])
def test_eight_threads_and_an_operator(eviction: str) -> None:
    report = run_stress(make_manager(eviction), threads=8, operations=4000, seed=5)
    assert report.fault is None
    assert set(report.operations) == KINDS
    assert report.operator["compact"] > 0
    assert report.checks > 5


@pytest.mark.slow
def test_a_million_operations() -> None:
    report = run_stress(make_manager(num_blocks=256), threads=8, operations=1_000_000, seed=1)
    assert report.fault is None
    assert report.operations.total() > 900_000


class _OpenDoor:
    """A lock that lets everybody in."""

    def try_acquire(self, blocking: bool = True) -> bool:
        return True

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def __enter__(self) -> _OpenDoor:
        return self

    def __exit__(self, *_: object) -> None: ...


def broken_report(manager: BlockManager) -> StressReport | None:
    """Run until a law breaks or a thread dies of what it finds; ``None`` when nothing did."""
    try:
        report = run_stress(manager, threads=4, operations=4000, seed=2)
    except Exception:
        return StressReport()
    return report if report.fault is not None else None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_the_allocator_lock_a_law_breaks() -> None:
    for _ in range(20):
        config = EngineConfig(96, 4, geometry="none", num_swap_blocks=48)
        manager = BlockManager(config, NoStorage())
        manager.lock = _OpenDoor()  # type: ignore[assignment]
        if broken_report(manager) is not None:
            return
    pytest.fail("twenty runs without a lock, and no law was broken: the stress run proves nothing")
