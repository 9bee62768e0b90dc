"""Attached programs' threads, the engine's own workload and an operator use one pool at once, and every law holds."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from fake_engine import until

import kvtop
from allocator.commands import Cancel, Command, Compact, EvictCached, Pause, Resize, SwapIn, SwapOut, VerifyContents
from allocator.errors import OutOfBlocks, SequenceGone
from allocator.invariants import check_manager
from allocator.locks import checked_order
from kvtop.client import Client, ClientSequence
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.model.observation import Focus
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessSource

THREADS = 8
PROMPTS = [np.random.default_rng(seed).integers(0, 1 << 30, 60).astype(np.int32) for seed in range(4)]


@pytest.fixture(autouse=True)
def fast_switching() -> Iterator[None]:
    """Make threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def use(client: Client, rng: random.Random, operations: int) -> None:
    """Start, append, fork, read and release at random; ``OutOfBlocks`` and ``SequenceGone`` are part of it."""
    held: list[ClientSequence] = []
    for _ in range(operations):
        try:
            if not held or rng.random() < 0.3:
                prompt = PROMPTS[rng.randrange(4)][: rng.randint(1, 60)]
                held.append(client.sequence(prompt, timeout_s=0.02))
                continue
            sequence = held[rng.randrange(len(held))]
            kind = rng.random()
            if kind < 0.5:
                sequence.append([rng.randrange(1 << 30) for _ in range(rng.randint(1, 9))], timeout_s=0.02)
            elif kind < 0.65:
                held.append(sequence.fork())
            elif kind < 0.75:
                assert len(sequence.table()) == -(-sequence.num_tokens // 4)
            else:
                held.remove(sequence)
                if rng.random() < 0.8:
                    sequence.release()
                del sequence  # without a release: the last reference is the end
        except OutOfBlocks:
            if held:
                held.pop().release()
        except SequenceGone:
            held.remove(sequence)
    if rng.random() < 0.5:
        client.close()


def orders(rng: random.Random, runner: EngineRunner) -> Iterator[Command]:
    """Commands without end, at random; those on sequences name ones there are."""
    while True:
        rows = runner.observe(Focus(), 30).snapshot.sequences
        own = [row.seq_id for row in rows if not row.label.startswith("client:") and row.status == "running"]
        swapped = [row.seq_id for row in rows if row.status == "swapped"]
        attached = [row.seq_id for row in rows if row.label.startswith("client:")]
        choice: list[Command] = [
            Compact(rng.choice(("pack-low", "by-sequence")), None, None),
            Resize(rng.randint(120, 200)),
            EvictCached(rng.randint(1, 20)),
            VerifyContents(),
        ]
        choice += [SwapOut(rng.choice(own))] * 2 if own else []
        choice += [SwapIn(rng.choice(swapped))] * 2 if swapped else []
        choice += [Cancel(rng.choice(attached))] if attached else []
        yield rng.choice(choice)


@pytest.mark.parametrize("speed", [None, 4.0])
def test_eight_threads_the_workload_and_an_operator(speed: float | None) -> None:
    options = EngineOptions(
        num_blocks=160, block_size=4, stamp=True, device="cpu", compact="auto", compact_threshold_ratio=0.1, seed=7
    )
    engine, _ = build_engine(options)
    runner = EngineRunner(engine, speed=speed)
    source = InProcessSource(runner, on_close=engine.close)
    barrier = threading.Barrier(THREADS + 1, timeout=30)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            client = kvtop.attach(engine, name=f"worker {seed}")
            barrier.wait()
            use(client, random.Random(seed), 400)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    with checked_order():
        source.start()
        for thread in threads:
            thread.start()
        barrier.wait()
        rng, done = random.Random(99), 0
        for command in itertools.islice(orders(rng, runner), 100_000):
            outcome = runner.apply(command, 60)
            assert outcome.ok or not isinstance(command, VerifyContents), outcome.message
            done += outcome.ok
            if done > 10 and not any(thread.is_alive() for thread in threads):
                break
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert runner.failure is None
        assert done > 10
        assert runner.apply(VerifyContents(), 60).ok
        # Nothing is left of programs whose threads have ended, whether they released or not.
        until(lambda: engine.clients.num_sequences == engine.clients.num_clients == 0)
        assert runner.apply(Pause(), 60).ok
        assert runner.apply(VerifyContents(), 60).ok
        counters = runner.observe(Focus(), 30).snapshot.counters
        assert counters.integrity_faults == 0
        assert set(engine.manager.tables.rows().tolist()) == set(engine.scheduler.by_row)
        source.close()
    check_manager(engine.manager)
