"""Scheduler: each policy's order against a plain model, ageing's bound, victims, and a reason for everyone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.content import OpaqueContent
from allocator.ids import SeqId, Status
from allocator.scheduler import AGEING_TOKENS, Scheduler
from allocator.sequence import Sequence

POLICIES = ("fcfs", "priority", "sjf")


def sequence(seq_id: int, *, target: int = 10, arrived: int = 0, priority: int = 0, computed: int = 0) -> Sequence:
    content = OpaqueContent(target, seq_id)
    made = Sequence(SeqId(seq_id), content, "", 1, target, (), None, arrived, num_computed=computed, priority=priority)
    made.num_tokens = 1
    return made


def plain_order(policy: str, waiting: list[Sequence]) -> list[int]:
    """The queue by a rule said in one line each, sorted anew; ties by arrival, in which ``waiting`` is given."""
    rules = {
        "fcfs": lambda s: 0,
        "priority": lambda s: -s.priority,
        "sjf": lambda s: (s.num_target - s.num_computed) - AGEING_TOKENS * (10**6 - s.arrived_step),  # seen from later
    }
    return [s.seq_id for s in sorted(sorted(waiting, key=lambda s: s.seq_id), key=rules[policy])]


steps = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "start", "start any", "preempt", "decode", "finish", "cancel", "hold", "policy"]),
        st.integers(0, 50),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(policy=st.sampled_from(POLICIES), script=steps)
def test_order_against_a_plain_model(policy, script):
    scheduler, waiting, running, began = Scheduler(policy), [], [], set()
    row = now = count = 0
    for act, number, klass, wait in script:
        now += wait
        if act == "arrive":
            made = sequence(count, target=1 + number, arrived=now, priority=klass)
            count += 1
            scheduler.add_waiting(made)
            waiting.append(made)
        elif act in ("start", "start any") and waiting:
            free = [s for s in waiting if not s.held]
            chosen = scheduler.next_waiting() if act == "start" else waiting[number % len(waiting)]
            if act == "start":
                assert (chosen is None) == (not free)
                if chosen is None:
                    continue
                assert chosen.seq_id == plain_order(policy, free)[0]
            chosen.row, row = row, row + 1
            scheduler.start(chosen)
            chosen.held = False
            waiting.remove(chosen)
            running.append(chosen)
        elif act == "decode" and running:
            chosen = running[number % len(running)]
            if chosen.seq_id not in began:
                scheduler.begin_decoding(chosen)
                began.add(chosen.seq_id)
        elif act in ("preempt", "finish") and running:
            chosen = scheduler.next_victim() if act == "preempt" else running[number % len(running)]
            if act == "preempt":
                lowest = min(s.priority for s in running) if policy == "priority" else None
                assert chosen.seq_id == max(s.seq_id for s in running if lowest in (None, s.priority))
            scheduler.stop(chosen)
            began.discard(chosen.seq_id)
            running.remove(chosen)
            chosen.row = None
            if act == "preempt":
                chosen.status = Status.WAITING
                chosen.num_computed = min(chosen.num_target, chosen.num_computed + number)
                scheduler.add_waiting(chosen)
                waiting.append(chosen)
        elif act == "cancel" and waiting:
            chosen = waiting.pop(number % len(waiting))
            scheduler.stop(chosen)
        elif act == "hold" and waiting:
            waiting[number % len(waiting)].held = True
        elif act == "policy":
            policy = POLICIES[klass % 3]
            expected = plain_order(policy, [s for s in waiting if not s.held])
            foretold = scheduler.next_waiting(policy)
            assert [foretold.seq_id if foretold else None] == (expected[:1] or [None])
            scheduler.set_policy(policy)
        assert [s.seq_id for s in scheduler.waiting] == plain_order(policy, waiting)
        assert [s.seq_id for s in scheduler.running] == sorted(s.seq_id for s in running)
        decoding = sorted(s.seq_id for s in running if s.seq_id in began)
        assert [scheduler.by_row[r].seq_id for r in scheduler.rows()[0].tolist()] == decoding
        assert all(scheduler.find(s.seq_id) is s for s in waiting + running)
        assert scheduler.find(count) is None


@given(
    left=st.integers(1, 500),
    others=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 500)), max_size=30),
)
def test_nobody_is_passed_by_one_that_arrives_as_many_steps_later_as_it_has_tokens_left(left, others):
    scheduler = Scheduler("sjf")
    first = sequence(0, target=left, arrived=7)
    scheduler.add_waiting(first)
    for i, (later, target) in enumerate(others, 1):
        scheduler.add_waiting(sequence(i, target=target, arrived=7 + later))
    ahead = scheduler.waiting[: scheduler.waiting.index(first)]
    assert all((s.arrived_step - first.arrived_step) * AGEING_TOKENS < left for s in ahead)


def test_a_long_job_starts_although_short_ones_keep_coming():
    """One place, taken for 3 steps by each short job; a new one comes every step, for ever."""
    scheduler = Scheduler("sjf")
    long = sequence(0, target=200, arrived=0)
    scheduler.add_waiting(long)
    now = free_at = 0
    while long.row is None:
        now += 1
        scheduler.add_waiting(sequence(now, target=3, arrived=now))
        if now >= free_at:
            chosen = scheduler.next_waiting()
            chosen.row, free_at = now, now + 3
            scheduler.start(chosen)
        assert now < 1000, "it starves"
    # 197 arrive before it has aged enough to go before them; each of those holds the place for 3 steps.
    assert 3 * 190 < now < 3 * 205


def test_only_the_priority_policy_tells_classes_apart():
    scheduler = Scheduler("fcfs")
    for i, klass in enumerate((0, 2, 1, 0, 2)):
        made = sequence(i, priority=klass)
        made.row = i
        scheduler.add_waiting(made)
        scheduler.start(made)
    top = sequence(9, priority=2)
    assert scheduler.next_victim().seq_id == 4
    assert scheduler.below(top) == []
    scheduler.set_policy("priority")
    assert scheduler.next_victim().seq_id == 3
    assert scheduler.next_victim({3, 0}).seq_id == 2
    assert scheduler.next_victim(range(5)) is None
    assert [s.seq_id for s in scheduler.below(top)] == [3, 0, 2]
    assert scheduler.below(sequence(10, priority=0)) == []


def test_everyone_who_waits_has_a_reason():
    scheduler = Scheduler()
    for i in range(4):
        scheduler.add_waiting(sequence(i))
    assert [(s.seq_id, kind) for s, kind, _ in scheduler.reasons()] == [
        (0, "next"), (1, "behind"), (2, "behind"), (3, "behind")
    ]  # fmt: skip
    assert next(scheduler.reasons(paused=True))[1] == "paused"
    scheduler.find(0).held = True
    scheduler.find(1).reason_kind, scheduler.find(1).reason = "capacity", "capacity: 3 blocks needed, 2 allocatable"
    scheduler.find(2).reason_kind, scheduler.find(2).reason = "host-full", "host tier full: 3 needed, 2 free"
    said = [(kind, text) for _, kind, text in scheduler.reasons(paused=True)]
    assert said == [
        ("held", "held by the operator"),
        ("capacity", "capacity: 3 blocks needed, 2 allocatable"),
        ("host-full", "host tier full: 3 needed, 2 free; behind #1"),
        ("behind", "behind #1"),
    ]
    for i in range(1, 4):
        scheduler.stop(scheduler.find(i))
    assert [kind for _, kind, _ in scheduler.reasons()] == ["held"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_queue_stays_cheap_with_thousands_waiting(policy):
    """Comparisons, not seconds: queueing and starting look at a logarithm of the queue, not at all of it."""
    looks = 0

    class Counted(Sequence):
        @property
        def order(self):
            nonlocal looks
            looks += 1
            return self.place

        @order.setter
        def order(self, place):
            self.place = place

        __slots__ = ("place",)

    scheduler, count = Scheduler(policy), 4000
    for i in range(count):
        scheduler.add_waiting(
            Counted(SeqId(i), OpaqueContent(5, i), "", 1, 1 + i * 7919 % 500, (), None, i // 10, priority=i % 3)
        )
    for row in range(count):
        first = scheduler.next_waiting()
        first.row = row
        scheduler.start(first)
        scheduler.stop(first)
    assert looks < 2 * count * 15
