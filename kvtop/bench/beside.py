"""What it is worth that copies run beside the work: sequence locks, and the executor's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from allocator import BlockManager
from allocator.commands import SubmitLoad
from allocator.config import EngineConfig, ExecutorMode
from allocator.geometry import find_geometry
from kvtop.bench.comparison import Comparison, Side, by_turns
from kvtop.bench.figures import quiet_heap
from kvtop.bench.threads import run_threads
from kvtop.engine_setup import EngineOptions, build_engine

_GEOMETRY = "llama-3-8b"
#: Steps before the timing begins: until the pool is full and every page has been touched.
WARM_UP_STEPS = 400
#: Rows and columns of the product that stands for the model's share of a step.
_PRODUCT = 384
#: Bound on the end of a thread that copies. [s]
_JOIN_BOUND_S = 30.0


def compare_sequence_locks(
    rounds: int, *, copied_blocks: int, counts: tuple[int, ...], duration_s: float
) -> Iterator[Comparison]:
    """Yield admissions and releases of others while one sequence is swapped out and in again and again.

    Args:
        rounds: Rounds of both sides.
        copied_blocks: Blocks of the sequence that is swapped, of real size.
        counts: Numbers of threads that admit.
        duration_s: Time of each cell. [s]
    """
    for num_threads in counts:

        def run(side: Side, sequence_locks: bool, num_threads: int = num_threads) -> None:
            manager = _real_manager(copied_blocks, sequence_locks)
            copied: list[int] = []
            stop = threading.Event()
            # Once before, so that no page is touched for the first time while others are timed.
            _swap_once(manager, manager.admit((), copied_blocks * manager.block_size).row, free=True)
            swapper = threading.Thread(target=_swap, args=(manager, copied_blocks, stop, copied), daemon=True)
            swapper.start()

            def work(_index: int) -> tuple[Callable[[], None], Callable[[], None]]:
                def once() -> None:
                    manager.free(manager.admit((), 64).row)

                return once, lambda: None

            with quiet_heap():
                turnout = run_threads(num_threads, duration_s, work)
            stop.set()
            swapper.join(_JOIN_BOUND_S)
            side.add(turnout.per_s, manager.lock, swaps=len(copied), row_waits=manager.sequences.contended)
            manager.storage.close()

        load = f"swaps of {copied_blocks} blocks beside {num_threads} thread{'' if num_threads == 1 else 's'}"
        yield by_turns("sequence", load, "admissions/s", rounds, run)


def compare_executor(rounds: int, *, num_steps: int, num_blocks: int) -> Comparison:
    """Return steps of an engine that swaps all the time, with copies in a thread and in the engine's own.

    A matrix product after each step stands for the model, which computes while copies run. The run is the same on
    both sides, so the ratio is what copying beside the steps saves.
    """
    weights = np.random.default_rng(0).random((_PRODUCT, _PRODUCT), np.float32)

    def run(side: Side, in_thread: bool) -> None:
        mode: ExecutorMode = "thread" if in_thread else "inline"
        options = EngineOptions(num_blocks=num_blocks, geometry=_GEOMETRY, swap_ratio=1.0, speed=None, executor=mode)
        engine, _ = build_engine(options)
        try:
            # More output than the pool holds, so that somebody is preempted at every moment.
            tokens = num_blocks * engine.config.block_size // 8
            engine.apply(SubmitLoad(tokens // 8, tokens, num_steps * 8 // tokens + 12))
            engine.advance(WARM_UP_STEPS)
            with quiet_heap():
                began = time.perf_counter()
                while engine.step < num_steps + WARM_UP_STEPS and engine.advance(1):
                    np.matmul(weights, weights)
                took = time.perf_counter() - began
            executor = engine.copies.executor
            side.add(
                (engine.step - WARM_UP_STEPS) / took,
                engine.manager.lock,
                copies=executor.num_submitted,
                copying_ms=executor.busy_s * 1e3,
                waited_ms=executor.wait_s * 1e3,
            )
        finally:
            engine.close()

    return by_turns("executor", f"{num_blocks} blocks, short of room", "steps/s", rounds, run)


def _real_manager(copied_blocks: int, sequence_locks: bool) -> BlockManager:
    from allocator.torch_storage import TorchStorage  # torch takes seconds to load: only for this measurement

    geometry = find_geometry(_GEOMETRY)
    assert geometry is not None
    num_blocks = 2 * copied_blocks + 64
    config = EngineConfig(
        num_blocks=num_blocks,
        num_swap_blocks=copied_blocks,
        geometry=_GEOMETRY,
        device="cpu",
        prefix_cache=False,
        sequence_locks=sequence_locks,
    )
    return BlockManager(config, TorchStorage(geometry, config.block_size, "cpu", num_blocks))


def _swap(manager: BlockManager, blocks: int, stop: threading.Event, copied: list[int]) -> None:
    row = manager.admit((), blocks * manager.block_size).row
    while not stop.is_set():
        row = _swap_once(manager, row)
        copied.append(2 * blocks)


def _swap_once(manager: BlockManager, row: int, *, free: bool = False) -> int:
    row, _ = manager.swap_in(manager.swap_out(row), ())
    if free:
        manager.free(row)
    return row
