"""Executor and pipeline: order, bounds, failures, and the same run whatever the machine does."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
from fake_storage import ListStorage

import allocator.executor
import allocator.pipeline
from allocator.commands import Cancel, Compact, Fork, Preempt, Resize, SwapOut
from allocator.config import EngineConfig
from allocator.content import OpaqueContent, Request, TokenContent
from allocator.engine import Engine
from allocator.errors import ConfigError, StorageError
from allocator.executor import Executor
from allocator.ids import Status
from allocator.plans import CopyJob

BOUND_S = 20.0


def job(n: int) -> CopyJob:
    return CopyJob("device", np.arange(n), "host", np.arange(n))


class Gate:
    """A copy function that waits to be let go, and notes the order of its jobs."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.sizes: list[int] = []

    def copy(self, job: CopyJob) -> int:
        assert self.go.wait(BOUND_S)
        self.sizes.append(len(job.sources))
        if len(job.sources) == 13:
            raise StorageError("thirteen")
        if len(job.sources) == 14:
            raise ZeroDivisionError("fourteen")
        return 10 * len(job.sources)


def test_jobs_are_copied_in_order_and_nobody_waits_for_a_slot():
    gate = Gate()
    executor = Executor(gate.copy, capacity=3)
    tickets = [executor.submit(job(n)) for n in (5, 2, 9)]
    assert executor.submit(job(1)) is None
    assert (executor.num_queued, executor.num_refused, executor.has_room) == (3, 1, False)
    assert not executor.wait(tickets[0], 0.0)
    gate.go.set()
    for ticket in tickets:
        assert executor.wait(ticket, BOUND_S)
    assert gate.sizes == [5, 2, 9]
    assert [t.moved_bytes for t in tickets] == [50, 20, 90]
    # A slot is free once its job has been collected, not when the copy has ended.
    assert executor.submit(job(1)) is None
    executor.collect(tickets[0])
    assert executor.submit(job(1)) is not None
    executor.close()
    assert gate.sizes[-1] == 1


def test_a_failure_reaches_the_ticket_and_the_thread_goes_on():
    gate = Gate()
    gate.go.set()
    executor = Executor(gate.copy)
    tickets = [executor.submit(job(n)) for n in (13, 14, 1)]
    assert all(executor.wait(t, BOUND_S) for t in tickets)
    assert str(tickets[0].error) == "thirteen"
    assert "ZeroDivisionError" in str(tickets[1].error)
    assert tickets[2].error is None
    executor.close()


def test_closing_is_bounded(monkeypatch):
    monkeypatch.setattr(allocator.executor, "CLOSE_BOUND_S", 0.01)
    gate = Gate()
    executor = Executor(gate.copy)
    executor.submit(job(1))
    executor.close()  # though the copy has not ended
    gate.go.set()


@pytest.mark.parametrize(
    ("option", "value"), [("copy_gb_per_s", 0.0), ("copy_gb_per_s", float("nan")), ("executor", "x")]
)
def test_bad_settings_are_named(option, value):
    with pytest.raises(ConfigError, match=r"--copy-bandwidth|--executor"):
        EngineConfig(**{option: value})


# -- in the engine -----------------------------------------------------------------------------------

#: Speeds at which every copy takes one step, some steps, and many, so that the queue fills up.
SPEEDS = (16.0, 2e-5, 2e-6)


def tight(seed: int, storage: object = None, **settings: object) -> Engine:
    """An engine that has to preempt, swap, compact and copy on write all the time."""
    config = {"num_blocks": 40, "num_swap_blocks": 30, "block_size": 16, "stamp": True, "device": "cpu"}
    config |= {"compact": "auto", "compact_threshold_ratio": 0.02}
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 1 << 30, 64).astype(np.int32) for _ in range(3)]
    requests = []
    for i in range(40):
        prompt, output = int(rng.integers(1, 150)), int(rng.integers(10, 120))
        stream = rng.integers(0, 1 << 30, prompt + output).astype(np.int32)
        stream[: min(prompt, 64)] = heads[i % 3][:prompt]
        requests.append(Request(TokenContent(stream), prompt, 0.05 * i))
    return Engine(EngineConfig(**(config | settings)), requests, storage=storage)


def everything(e: Engine) -> tuple[object, ...]:
    tables = {s.seq_id: e.table(s.seq_id).tolist() for s in e.unfinished() if s.row is not None}
    events = [msgspec.structs.asdict(x) for x in e.events_from(0)]
    return e.step, msgspec.structs.asdict(e.counters), tables, events, len(e.copies), e.copies.next_due


def command_for(e: Engine, rng: np.random.Generator):
    running = e.scheduler.running
    if not running:
        return Compact()
    seq_id = running[int(rng.integers(len(running)))].seq_id
    size = int(rng.integers(30, 50))
    return (Fork(seq_id), Preempt(seq_id), Compact("longest-run"), Resize(size), Cancel(seq_id))[int(rng.integers(5))]


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_thread_and_the_caller_make_the_same_run(speed, preempt):
    engines = [tight(3, executor=mode, copy_gb_per_s=speed, preempt=preempt) for mode in ("thread", "inline")]
    rngs = [np.random.default_rng(1) for _ in engines]
    for turn in range(400):
        states = []
        for e, rng in zip(engines, rngs, strict=True):
            e.advance(3)
            if turn % 7 == 0:
                e.apply(command_for(e, rng))
            if turn % 5 == 0:
                e.check()
            states.append(everything(e))
        assert states[0] == states[1]
    counters = engines[0].counters
    assert counters.copy_on_write_blocks > 0
    assert counters.compactions_threshold > 0
    assert counters.swap_in_blocks > 0 or preempt == "recompute"
    for e in engines:
        e.close()


@pytest.mark.parametrize("speed", SPEEDS[1:])
def test_skipping_ahead_with_slow_copies_is_the_same_run_as_stepping(speed):
    slow, fast = (tight(5, copy_gb_per_s=speed, compact="manual") for _ in range(2))
    most = 0
    while slow.advance(1):
        most = max(most, len(slow.copies))
    while fast.advance(10**9):
        pass
    assert everything(slow) == everything(fast)
    assert slow.done
    assert most > 1
    for e in (slow, fast):
        e.close()


class Recording(ListStorage):
    """Notes copies; every ``fail_every``-th fails after ruining its destinations."""

    def __init__(self, fail_every: int = 0) -> None:
        super().__init__(16, block_bytes=512)
        self.jobs: list[CopyJob] = []
        self.fail_every = fail_every

    def copy(self, job):
        self.jobs.append(job)
        if self.fail_every:
            self.fail_after = 0 if len(self.jobs) % self.fail_every == 0 else None
        return super().copy(job)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("fail_every", [1, 2, 5])
def test_copies_that_fail_while_steps_go_on_lose_nothing(fail_every, speed):
    e = tight(7, Recording(fail_every), copy_gb_per_s=speed, slab_blocks=9)
    while e.advance(1):
        e.check()
    assert e.done
    assert e.counters.finished + e.counters.refused == e.counters.submitted
    assert any(event.kind == "fault" for event in e.events_from(0))
    assert (e.manager.transfers.num_open, e.manager.device.num_active, e.manager.host.num_active) == (0, 0, 0)
    assert e.manager.device.facts.num_flagged == 0
    e.close()


def test_copies_are_carried_out_and_committed_in_the_order_of_submission():
    storage = Recording()
    e = tight(7, storage, copy_gb_per_s=SPEEDS[2])
    submitted: list[CopyJob] = []
    committed: list[CopyJob] = []
    submit, commit = e.copies.executor.submit, e.manager.transfers.commit

    def noting_submit(job):
        submitted.append(job)
        return submit(job)

    def noting_commit(transfer, seconds=None):
        if len(transfer.job.sources):
            committed.append(transfer.job)
        commit(transfer, seconds)

    e.copies.executor.submit, e.manager.transfers.commit = noting_submit, noting_commit
    e.copies.executor.capacity, e.copies.executor._slots = 2, threading.Semaphore(2)
    due = full = 0
    while e.advance(1):
        full += not e.copies.has_room
        assert len(e.copies) <= e.copies.executor.capacity
        assert e.copies.next_due is None or e.copies.next_due >= due
        due = e.copies.next_due or due
    assert full > 0
    assert [id(j) for j in submitted] == [id(j) for j in committed]
    assert [id(j) for j in submitted] == [id(j) for j in storage.jobs]
    e.close()


class Stuck(ListStorage):
    """Copies wait to be let go."""

    def __init__(self) -> None:
        super().__init__(16, block_bytes=512)
        self.go = threading.Event()

    def copy(self, job):
        assert self.go.wait(BOUND_S)
        return super().copy(job)


def test_a_stuck_executor_is_named_and_the_run_goes_on_when_it_ends(monkeypatch):
    monkeypatch.setattr(allocator.pipeline, "WAIT_BOUND_S", 0.02)
    monkeypatch.setattr(allocator.pipeline, "TURN_WAIT_S", 0.01)
    storage = Stuck()
    e = tight(3, storage, compact="manual")
    while e.advance(1):
        pass
    assert not e.done
    assert "has not come back" in e.stuck_reason
    assert e.late_s > 0
    assert e.advance(1) == 0
    assert e.snapshot(phase="paused", speed=None, steps_per_s=None).notes == (e.stuck_reason,)
    # A command says why it cannot be done, and changes nothing.
    before = everything(e)[:3]
    outcome = e.apply(SwapOut(e.scheduler.running[0].seq_id))
    assert not outcome.ok
    assert "has not come back" in outcome.message
    assert everything(e)[:3] == before
    e.check()
    storage.go.set()
    monkeypatch.setattr(allocator.pipeline, "TURN_WAIT_S", BOUND_S)
    while e.advance(1):
        e.check()
    assert e.done
    assert e.late_s is None
    e.close()


def test_a_sequence_on_its_way_is_shown_and_holds_its_place():
    requests = [Request(OpaqueContent(33 + 16 * i, i), 16, 0.0, f"r{i}") for i in range(4)]
    config = EngineConfig(num_blocks=8, num_swap_blocks=8, stamp=True, device="cpu", copy_gb_per_s=2e-6)
    e = Engine(config, requests)
    seen: set[str] = set()
    while e.advance(1):
        e.check()
        snapshot = e.snapshot(phase="running", speed=None, steps_per_s=None)
        for row, sequence in zip(snapshot.sequences, e.unfinished(), strict=True):
            if sequence.transfer is not None:
                seen.add(sequence.transfer.kind)
                assert (row.status, sequence.status) == ("swapped", Status.SWAPPED)
                assert row.reason
        block = e.arrays("device").owner
        for row in set(block[block >= 0].tolist()):
            at = int(np.flatnonzero(block == row)[0])
            assert e.holders(at)[1] >= 1
            assert row in {r.row for r in snapshot.sequences}
    assert seen == {"swap-out", "swap-in"}
    assert e.done
    e.close()
