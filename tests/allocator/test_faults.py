"""Faults on purpose: each strikes when and where it should, is told, survived or caught; same seed, same faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from fake_storage import ListStorage

from allocator.commands import InjectFault, SwapIn, SwapOut, VerifyContents
from allocator.config import EngineConfig
from allocator.content import Request, TokenContent
from allocator.engine import Engine
from allocator.errors import ConfigError, InvariantViolation, StorageError
from allocator.fault_kinds import FAULT_KINDS, FAULTS, FaultKind, parse_rate
from allocator.faulty_storage import FaultyStorage
from allocator.geometry import GEOMETRIES
from allocator.plans import CopyJob
from allocator.storage import NoStorage
from allocator.torch_storage import TorchStorage

SIZE = 4
SURVIVED = [kind for kind in FAULT_KINDS if FAULTS[kind].caught_by is None]
CAUGHT = [kind for kind in FAULT_KINDS if FAULTS[kind].caught_by is not None]


class Waits:
    """Waits that take no time: notes the seconds and answers as told."""

    def __init__(self, released: bool = False) -> None:
        self.seconds: list[float] = []
        self.released = released
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, event: threading.Event, seconds: float) -> bool:
        self.seconds.append(seconds)
        self.meanwhile()
        return self.released or event.is_set()


def lists(num_blocks: int = 8) -> ListStorage:
    inner = ListStorage(SIZE)
    inner.resize("device", num_blocks)
    inner.slots["device"] = list(range(num_blocks * SIZE))
    return inner


def job(sources: list[int], destinations: list[int]) -> CopyJob:
    return CopyJob("device", np.array(sources), "device", np.array(destinations))


def requests(count: int = 12, output: int = 30) -> list[Request]:
    """Requests that overlap, so that a small pool must preempt."""
    rng = np.random.default_rng(7)
    return [Request(TokenContent(rng.integers(0, 1 << 30, 20 + output)), 20, i * 0.1, f"r{i}") for i in range(count)]


def engine(count: int = 12, waits: Waits | None = None, **settings: object) -> Engine:
    """An engine over lists, whose waits take no time."""
    settings = {"num_blocks": 40, "num_swap_blocks": 24, "block_size": SIZE, "stamp": True, **settings}
    e = Engine(EngineConfig(**settings), requests(count), storage=ListStorage(SIZE))
    e.manager.storage._wait = waits or Waits()
    return e


def run(e: Engine, most: int = 20000) -> Engine:
    """Step to the end, checking every law after each turn."""
    for _ in range(most):
        if not e.advance(1):
            assert e.done, e.stuck_reason
            return e
        e.check()
    raise AssertionError(f"not over after {most} turns: step {e.step}, {e.stuck_reason}")


def texts(e: Engine) -> list[tuple[int, str]]:
    return [(event.step, event.text) for event in e.events_from(0) if event.kind == "fault"]


# -- the set -----------------------------------------------------------------------------------------


def test_every_kind_says_what_it_does():
    assert tuple(FAULTS) == FAULT_KINDS == get_args(FaultKind)
    assert {kind: fault.caught_by for kind, fault in FAULTS.items() if fault.caught_by} == {
        "flipped-bit": 5,
        "leaked-reference": 2,
    }


@pytest.mark.parametrize(
    ("text", "rate"),
    [("failing-copy", 0.01), ("slow-copy:0.5", 0.5), ("flipped-bit:1", 1.0), ("lost-client:1e-9", 1e-9)],
)
def test_a_kind_and_its_rate(text, rate):
    assert parse_rate(text) == (text.partition(":")[0], rate)


@pytest.mark.parametrize(
    "text",
    ["", "copy", "Failing-Copy", "failing-copy:", "failing-copy:0", "failing-copy:1.1", "failing-copy:nan", ":1"],
)
def test_no_kind_or_no_rate(text):
    with pytest.raises(ValueError):  # noqa: PT011  float's own words differ
        parse_rate(text)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"inject": (("nonsense", 0.1),)}, "--inject nonsense: one of failing-copy, "),
        ({"inject": (("slow-copy", 0.0),)}, "--inject slow-copy:0.0: a rate above 0 and at most 1"),
        ({"inject": (("slow-copy", 0.1), ("slow-copy", 0.2))}, "--inject slow-copy: given twice"),
        ({"inject": (("host-tier-full", 0.1),), "num_swap_blocks": 0}, "there is no host tier"),
        ({"inject": (("flipped-bit", 0.1),), "geometry": "none"}, "keeps no contents"),
        ({"inject": (("flipped-bit", 0.1),)}, "nothing could catch it without --stamp"),
    ],
)
def test_what_could_prove_nothing_is_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**settings)


# -- copies ------------------------------------------------------------------------------------------


def test_a_failing_copy_copies_some_blocks_and_raises():
    copied = set()
    for seed in range(40):
        inner = lists()
        storage = FaultyStorage(inner, seed=seed)
        storage.arm("failing-copy", 1, 0.0)
        with pytest.raises(StorageError, match="injected: copy of 4 blocks, device to device, failed after") as error:
            storage.copy(job([0, 1, 2, 3], [4, 5, 6, 7]))
        done = [n for n in range(4) if inner.slots["device"][(4 + n) * SIZE] == n * SIZE]
        assert f"after {len(done)} of them" in str(error.value)
        copied.add(len(done))
        assert inner.slots["device"][: 4 * SIZE] == list(range(4 * SIZE)), "a source changed"
        assert storage.copy(job([0, 1, 2, 3], [4, 5, 6, 7])) == 40, "only the next one fails"
        assert [strike.kind for strike in storage.take_strikes()] == ["failing-copy"]
        assert storage.take_strikes() == []
    assert copied == {0, 1, 2, 3}


def test_a_slow_copy_takes_longer_and_copies():
    waits = Waits()
    storage = FaultyStorage(lists(), wait=waits)
    storage.arm("slow-copy", 2, 0.25)
    for _ in range(3):
        assert storage.copy(job([0], [5])) == 10
    assert waits.seconds == [0.25, 0.25]
    assert storage.armed("slow-copy") == 0


def test_a_stuck_copy_is_given_up_after_its_bound_and_says_so_meanwhile():
    waits, seen = Waits(), []
    inner = lists()
    storage = FaultyStorage(inner, wait=waits)
    waits.meanwhile = lambda: seen.append(storage.stuck_reason)
    storage.arm("stuck-executor", 1, 3.0)
    with pytest.raises(StorageError, match=r"did not come back in 3 s and is given up"):
        storage.copy(job([0], [5]))
    assert waits.seconds == [3.0]
    assert seen == ["executor stuck: copy of 1 block, device to device, stuck for 3 s at most (injected)"]
    assert storage.stuck_reason is None
    assert inner.copies == 0


@pytest.mark.parametrize("how", ["release", "take back", "close"])
def test_a_stuck_copy_comes_back_when_it_is_released(how):
    inner = lists()
    storage = FaultyStorage(inner)
    begun, results = threading.Event(), []
    storage.arm("stuck-executor", 1, 60.0)
    real = storage._wait

    def wait(event: threading.Event, seconds: float) -> bool:
        begun.set()
        return real(event, seconds)

    storage._wait = wait
    thread = threading.Thread(
        target=lambda: results.append(storage.copy(job([0], []) if how == "close" else job([0], [5])))
    )
    if how == "close":
        inner.close = lambda: None
        inner.close = lambda: None  # its slots are looked at afterwards
    thread = threading.Thread(target=lambda: results.append(storage.copy(job([0], [5]))))
    thread.start()
    assert begun.wait(10)
    assert storage.stuck_reason is not None
    {"release": storage.release, "take back": lambda: storage.arm("stuck-executor", 0, 0.0), "close": storage.close}[
        how
    ]()
    thread.join(10)
    assert results == [10]
    assert storage.stuck_reason is None


def test_copies_from_many_threads_are_struck_as_often_as_armed():
    storage = FaultyStorage(NoStorage())
    storage.arm("failing-copy", 50, 0.0)
    failed: list[int] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        for _ in range(100):
            try:
                storage.copy(job([0, 1], [2, 3]))
            except StorageError:
                failed.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(failed) == 50
    assert len(storage.take_strikes()) == 50


def test_rates_are_kept_and_depend_on_the_seed_alone():
    def struck(seed: int, rates: dict[FaultKind, float]) -> list[int]:
        storage = FaultyStorage(NoStorage(), rates=rates, seed=seed, wait=Waits())
        found = []
        for number in range(2000):
            try:
                storage.copy(job([0], [1]))
            except StorageError:
                found.append(number)
        return found

    alone = struck(1, {"failing-copy": 0.1})
    assert 150 < len(alone) < 250
    assert alone == struck(1, {"failing-copy": 0.1})
    assert alone == struck(1, {"failing-copy": 0.1, "slow-copy": 0.5}), "another kind changes nothing"
    assert alone != struck(2, {"failing-copy": 0.1})
    assert struck(1, {"failing-copy": 1.0}) == list(range(2000))
    assert struck(1, {"flipped-bit": 1.0}) == [], "not a fault of copies"


def test_an_empty_copy_is_struck_by_nothing():
    storage = FaultyStorage(lists(), rates={"failing-copy": 1.0})
    assert storage.copy(job([], [])) == 0


@pytest.mark.parametrize("geometry", ["tiny", "deepseek-v3"])
@pytest.mark.parametrize("bit", [0, 63, 64, 12345, (1 << 16) - 1])
def test_one_flipped_bit_spoils_one_slot_and_twice_is_as_before(geometry, bit):
    storage = TorchStorage(GEOMETRIES[geometry], SIZE, "cpu", 3)
    for tier in ("device", "host"):
        storage.resize(tier, 5)
        slots, stamps = np.arange(20), np.arange(20, dtype=np.uint64) + 77
        storage.write_stamps(tier, slots, stamps)
        storage.flip_bit(tier, 17, bit)
        assert np.flatnonzero(~storage.check_stamps(tier, slots, stamps)).tolist() == [17]
        storage.flip_bit(tier, 17, bit)
        assert storage.check_stamps(tier, slots, stamps).all()
    NoStorage().flip_bit("device", 0, bit)


# -- an engine, at random ----------------------------------------------------------------------------


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("compact", ["manual", "auto"])
@pytest.mark.parametrize("rate", [0.05, 1.0])
@pytest.mark.parametrize("kind", SURVIVED)
def test_a_fault_that_strikes_at_random_is_survived(kind, rate, compact, preempt):
    e = run(engine(inject=((kind, rate),), preempt=preempt, compact=compact, compact_threshold_ratio=0.2))
    c = e.counters
    assert c.finished + c.cancelled == c.submitted == 12
    assert c.integrity_faults == 0
    if kind != "lost-client":
        assert c.cancelled == 0
    if rate == 1.0 and (preempt == "swap" or kind in ("lost-client", "host-tier-full")):
        assert e.faults.struck[kind] > 0


@pytest.mark.parametrize("kind", CAUGHT)
@pytest.mark.parametrize("seed", range(5))
def test_a_fault_that_breaks_a_law_is_caught_at_once(kind, seed):
    e = engine(inject=((kind, 0.05),), seed=seed)
    with pytest.raises(InvariantViolation) as caught:
        run(e)
    assert caught.value.law == FAULTS[kind].caught_by
    assert e.faults.struck[kind] == 1, "the first one already"
    assert e.counters.injected[FAULT_KINDS.index(kind)] == 1


def test_the_same_seed_meets_the_same_faults_however_many_steps_a_turn_takes():
    def faults(turn: int, seed: int = 3) -> list[tuple[int, str]]:
        e = engine(inject=tuple((kind, 0.05) for kind in SURVIVED), seed=seed)
        while e.advance(turn):
            pass
        assert e.done
        return texts(e)

    assert len(faults(1)) > 10
    assert faults(1) == faults(7) == faults(10**6)
    assert faults(1) != faults(1, seed=4)


def test_a_rate_is_the_probability_of_each_step():
    e = engine(0, inject=(("host-tier-full", 0.02),))
    due, steps = 0, []
    for _ in range(4000):
        due = e.faults._next_strike("host-tier-full", due)
        steps.append(due)
    assert 40 < due / 4000 < 60
    assert min(np.diff(steps)) == 1, "two steps in a row can be struck"


# -- an engine, by an operator -----------------------------------------------------------------------


def midway(**settings: object) -> Engine:
    e = engine(**settings)
    while len(e.scheduler.running) < 3:
        assert e.advance(1)
    return e


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_an_operator_sees_the_plan_then_the_fault_is_told(kind):
    e = midway()
    before = texts(e)
    plan = e.plan(InjectFault(kind))
    assert plan.refusal is None
    assert plan.summary.startswith(FAULTS[kind].effect)
    assert ("must find law" in plan.summary) == (kind in CAUGHT)
    assert texts(e) == before
    outcome = e.apply(InjectFault(kind))
    assert outcome.ok
    assert outcome.message.startswith(kind)
    if FAULTS[kind].strikes_copies:
        assert any(kind in note for note in e.snapshot(phase="", speed=None, steps_per_s=None).notes)
        e.apply(SwapOut(e.scheduler.running[0].seq_id))
    assert e.faults.struck[kind] == 1
    assert any(text.startswith(f"injected {kind}: ") for _, text in texts(e))
    verified = e.apply(VerifyContents())
    assert verified.ok == (kind in SURVIVED)
    if kind in CAUGHT:
        assert f"law {FAULTS[kind].caught_by}" in verified.message
    else:
        for sequence in e.unfinished():
            if sequence.held:
                assert e.apply(SwapIn(sequence.seq_id)).ok
        run(e)


def test_a_failed_swap_changes_nothing_and_the_next_one_is_done():
    e = midway(prefix_cache=False)
    seq_id = e.scheduler.running[0].seq_id
    e.apply(InjectFault("failing-copy"))
    table = e.table(seq_id).tolist()
    assert not e.apply(SwapOut(seq_id)).ok
    assert e.table(seq_id).tolist() == table
    e.check()
    assert e.apply(SwapOut(seq_id)).ok
    e.apply(InjectFault("failing-copy"))
    assert not e.apply(SwapIn(seq_id)).ok
    e.check()
    assert e.apply(SwapIn(seq_id)).ok
    run(e)


def test_a_full_host_tier_refuses_until_its_step_and_then_takes_blocks_again():
    e = midway()
    seq_id = e.scheduler.running[0].seq_id
    assert e.apply(SwapOut(seq_id)).ok
    assert e.apply(InjectFault("host-tier-full", 5)).ok
    assert e.snapshot(phase="", speed=None, steps_per_s=None).notes == (
        f"host tier full until step {e.step + 5} (injected)",
    )
    assert e.apply(SwapIn(seq_id)).ok, "what lies there comes back"
    e.check()
    assert "host tier" in e.plan(SwapOut(seq_id)).refusal
    for _ in range(5):
        assert e.manager.host.num_allocatable == 0
        assert e.advance(1) == 1
        e.check()
    assert e.manager.host.num_allocatable == e.manager.host.num_blocks
    assert e.apply(InjectFault("host-tier-full", 5)).ok
    assert e.apply(InjectFault("host-tier-full", 0)).ok
    assert e.manager.host.num_allocatable == e.manager.host.num_blocks
    run(e)


def test_an_attached_client_is_lost_first():
    e = midway()
    lost = iter(["client 1 with 2 sequences", None])
    e.faults.lose_client = lambda: next(lost)
    assert e.apply(InjectFault("lost-client")).message == "lost-client: client 1 with 2 sequences"
    assert e.counters.cancelled == 0
    assert "the client of sequence" in e.apply(InjectFault("lost-client")).message
    assert e.counters.cancelled == 1
    e.check()


def test_several_at_once():
    e = midway()
    unfinished = len(e.unfinished())
    assert "see the events" in e.apply(InjectFault("lost-client", 2)).message
    assert len(e.unfinished()) == unfinished - 2
    assert e.apply(InjectFault("lost-client", 1000)).ok
    assert e.unfinished() == []
    assert e.apply(InjectFault("failing-copy", 3)).ok
    assert e.manager.storage.armed("failing-copy") == 3
    assert e.apply(InjectFault("failing-copy", 0)).message == "failing-copy: taken back"
    assert e.manager.storage.armed("failing-copy") == 0
    run(e)


@pytest.mark.parametrize(
    ("command", "settings", "reason"),
    [
        (InjectFault("failing-copy", -1), {}, "from 0 to 1000000 at once"),
        (InjectFault("failing-copy", 1_000_001), {}, "from 0 to 1000000 at once"),
        (InjectFault("lost-client", 1, 1.0), {}, "lost-client: takes no seconds"),
        (InjectFault("slow-copy", 1, 0.0), {}, "slow-copy: above 0 and at most 60 s"),
        (InjectFault("slow-copy", 1, float("nan")), {}, "slow-copy: above 0 and at most 60 s"),
        (InjectFault("leaked-reference", 0), {}, "leaked-reference: what has struck cannot be taken back"),
        (InjectFault("host-tier-full"), {"num_swap_blocks": 0}, "host-tier-full: there is no host tier"),
        (InjectFault("flipped-bit"), {"stamp": False}, "flipped-bit: nothing could catch it without --stamp"),
        (
            InjectFault("flipped-bit"),
            {"stamp": False, "geometry": "none"},
            "flipped-bit: --geometry none keeps no contents",
        ),
        (InjectFault("flipped-bit"), {"count": 0}, "flipped-bit: no block is held"),
        (InjectFault("leaked-reference"), {"count": 0}, "leaked-reference: no block is held"),
        (InjectFault("lost-client"), {"count": 0}, "lost-client: there is no client, and no sequence"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused_with_the_reason(command, settings, reason):
    e = engine(**settings) if settings.get("count") == 0 else midway(**settings)
    assert e.plan(command).refusal.startswith(reason)
    outcome = e.apply(command)
    assert not outcome.ok
    assert outcome.message.startswith(reason)
    assert sum(e.faults.struck.values()) == 0
