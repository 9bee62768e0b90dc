"""Scripts of requests: forks and cancels at token counts, hanging up after a time, in every stage and deterministic."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from allocator.commands import SwapOut
from allocator.config import EngineConfig
from allocator.content import Request, TokenContent
from allocator.engine import Engine
from allocator.errors import ConfigError
from allocator.ids import Status
from allocator.scripts import CancelAfter, CancelAt, ForkAt, Script, patience_steps, token_acts


def scripted(prompt: int, output: int, script: Script, *, seed: int = 0, at: float = 0.0) -> Request:
    stream = np.random.default_rng(seed).integers(0, 1 << 30, prompt + output).astype(np.int32)
    return Request(TokenContent(stream), prompt, at, script=script)


def engine(requests: Iterable[Request], **settings: object) -> Engine:
    settings = {"num_blocks": 64, "num_swap_blocks": 32, "stamp": True, "device": "cpu", **settings}
    return Engine(EngineConfig(**settings), requests)


def run(e: Engine) -> Engine:
    """Step to the end, checking every law after each turn."""
    for _ in range(5000):
        if not e.advance(1):
            return e
        e.check()
    raise AssertionError(f"not over: step {e.step}, {e.stuck_reason}")


def tokens_of(e: Engine, seq_id: int) -> int:
    sequence = e.scheduler.find(seq_id)
    assert sequence is not None
    assert sequence.row is not None
    return int(e.manager.tables.num_tokens[sequence.row])


def told(e: Engine, kind: str) -> list[tuple[int, int | None]]:
    return [(v.step, v.seq_id) for v in e.events_from(0) if v.kind == kind]


def test_a_fork_happens_at_its_token_and_copies_the_shared_tail():
    e = engine([scripted(20, 30, (ForkAt(25, ((), ())),))])
    while len(e.scheduler.running) < 3:
        e.advance(1)
        e.check()
    assert [tokens_of(e, i) for i in range(3)] == [25, 25, 25]
    assert e.manager.device.count_shared(np.arange(64)) == 2
    run(e)
    # Three writers of one shared tail: the last of them keeps it.
    assert (e.counters.copy_on_write_blocks, e.counters.finished, e.counters.submitted) == (2, 3, 3)


def test_children_follow_scripts_of_their_own_and_a_parent_may_go_before_them():
    e = engine([scripted(20, 60, (ForkAt(24, ((CancelAt(30),), (ForkAt(40, ((),)),))), CancelAt(50)))])
    run(e)
    assert [seq_id for _, seq_id in told(e, "fork")] == [1, 2, 3]
    assert [seq_id for _, seq_id in told(e, "cancel")] == [1, 0]
    assert sorted(seq_id for _, seq_id in told(e, "finish")) == [2, 3]
    assert e.manager.device.num_active == 0


def test_an_act_inside_the_prompt_happens_at_its_end_and_at_one_token_in_the_order_written():
    e = engine([scripted(40, 20, (CancelAt(3), ForkAt(2, ((),))))])
    e.advance(1)
    e.check()
    assert [seq_id for _, seq_id in told(e, "fork")] == [1]
    assert [seq_id for _, seq_id in told(e, "cancel")] == [0]
    assert tokens_of(e, 1) == 40


def test_what_a_child_does_at_the_token_of_its_fork_happens_at_once():
    e = run(engine([scripted(20, 20, (ForkAt(30, ((CancelAt(30),), (CancelAt(5),), ())),))]))
    assert (e.counters.cancelled, e.counters.finished) == (2, 2)


def test_finishing_comes_before_hanging_up_at_the_same_token():
    e = run(engine([scripted(20, 10, (CancelAt(30),)), scripted(20, 10, (CancelAt(31),), seed=1)]))
    assert (e.counters.finished, e.counters.cancelled) == (2, 0)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_sequence_does_not_act_twice(mode):
    e = engine([scripted(20, 60, (ForkAt(25, ((),)),))], preempt=mode)
    while len(e.scheduler.running) < 2:
        e.advance(1)
    for sequence in list(e.scheduler.running):
        e.swaps.preempt(sequence, mode)
    e.check()
    run(e)
    assert (e.counters.submitted, e.counters.finished) == (2, 2)


def test_clients_hang_up_while_they_wait_run_or_lie_in_swap_space():
    filler = scripted(800, 200, (), seed=1)  # 63 of the 64 blocks in the end
    waits = scripted(300, 10, (CancelAfter(2.0),), seed=2, at=0.1)
    e = engine([filler, waits])
    while not e.counters.cancelled:
        e.advance(10**6)
        e.check()
    assert told(e, "cancel") == [(84, 1)]  # arrived at step 4, and 80 steps later

    for mode in ("run", "swap"):
        e = engine([scripted(20, 500, (CancelAfter(1.0),))])
        e.advance(10)
        if mode == "swap":
            assert e.apply(SwapOut(e.scheduler.running[0].seq_id)).ok
            assert e.unfinished()[0].status is Status.SWAPPED
        run(e)
        assert told(e, "cancel") == [(40, 0)]
        assert e.done
        assert e.manager.device.num_active == e.manager.host.num_active == 0


def test_time_goes_on_to_the_moment_a_client_that_cannot_start_hangs_up():
    e = engine([scripted(20, 20, (CancelAfter(100.0),))])
    e._take_arrivals()
    e.scheduler.waiting[0].held = True
    assert e.advance(10**6) == 4000
    assert e.done
    assert e.advance(1) == 0


def test_the_end_of_a_run_does_not_wait_for_the_deadlines_of_those_who_ended():
    e = engine([scripted(20, 20, (CancelAfter(1000.0),))])
    e.advance(10**6)
    assert (e.done, e.step, e.counters.finished) == (True, 21, 1)


def test_a_child_is_patient_from_its_fork_on():
    e = run(engine([scripted(20, 200, (ForkAt(60, ((CancelAfter(1.0),),)),))]))
    ((forked, child),) = told(e, "fork")
    assert told(e, "cancel") == [(forked + 40, child)]


def test_a_child_keeps_its_parents_class():
    request = scripted(20, 30, (ForkAt(25, ((),)),))
    request.priority = 3
    e = engine([request])
    while len(e.scheduler.running) < 2:
        e.advance(1)
    assert e.scheduler.running[1].priority == 3


def some_scripts(rng: np.random.Generator, depth: int = 0) -> Script:
    acts: list[ForkAt | CancelAt | CancelAfter] = []
    for _ in range(int(rng.integers(0, 3))):
        at = int(rng.integers(1, 120))
        kind = int(rng.integers(0, 3))
        if kind == 0 and depth < 2:
            acts.append(ForkAt(at, tuple(some_scripts(rng, depth + 1) for _ in range(int(rng.integers(1, 3))))))
        elif kind == 1:
            acts.append(CancelAt(at))
        else:
            acts.append(CancelAfter(float(rng.uniform(0, 4))))
    return tuple(acts)


def traffic(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.3, 60))
    return [
        scripted(int(rng.integers(1, 150)), int(rng.integers(0, 90)), some_scripts(rng), seed=i, at=float(at[i]))
        for i in range(60)
    ]


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_skipping_ahead_is_the_same_run_as_stepping(seed, preempt):
    settings = {"num_blocks": 32, "num_swap_blocks": 12, "preempt": preempt}
    slow, fast = run(engine(traffic(seed), **settings)), engine(traffic(seed), **settings)
    while fast.advance(10**9):
        pass
    assert slow.done
    assert fast.step == slow.step
    assert slow.counters.cancelled > 10
    assert slow.counters.submitted > 65
    before = msgspec.structs.asdict(slow.counters) | {"integrity_checks": 0}
    assert msgspec.structs.asdict(fast.counters) == before
    assert [(v.step, v.text) for v in fast.events_from(0)] == [(v.step, v.text) for v in slow.events_from(0)]
    assert slow.manager.device.num_active == slow.manager.host.num_active == 0


def test_acts_are_ordered_by_token_and_the_shortest_patience_counts():
    fork, early, late = ForkAt(5, ((),)), CancelAt(3), CancelAt(5)
    assert token_acts((fork, late, CancelAfter(3), early)) == (early, fork, late)
    assert patience_steps((CancelAfter(3), early, CancelAfter(0.05))) == 2
    assert patience_steps((CancelAfter(0),)) == 1
    assert patience_steps((early,)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: ForkAt(0, ((),)),
        lambda: ForkAt(3, ()),
        lambda: CancelAt(0),
        lambda: CancelAfter(-1.0),
        lambda: CancelAfter(float("nan")),
        lambda: Request(TokenContent(np.zeros(9, np.int32)), 3, contiguous=True, script=(ForkAt(4, ((),)),)),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make):
    with pytest.raises(ConfigError):
        make()
