"""Admission in the engine: chunked prompts, classes, reasons, thrash; and laws over random runs of every policy."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from fake_storage import ListStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.arrivals import Arrivals
from allocator.commands import Cancel, Fork, Pin, Preempt, SetPolicy, SwapIn, SwapOut, Unpin
from allocator.config import EngineConfig
from allocator.content import Request, TokenContent
from allocator.engine import Engine
from allocator.ids import Status
from allocator.snapshot import Snapshot
from allocator.thrash import ThrashGuard
from kvtop.workloads.chat import make_request

POLICIES = ("fcfs", "priority", "sjf")
SIZE = 16


def request(prompt: int, output: int, seed: int, at: float = 0.0, *, priority: int = 0, head: int = 0) -> Request:
    """A request with tokens of its own, the first ``head`` of them everybody's."""
    stream = np.random.default_rng(seed).integers(0, 1 << 30, prompt + output).astype(np.int32)
    stream[: min(head, prompt)] = np.arange(min(head, prompt))
    return Request(TokenContent(stream), prompt, at, priority=priority)


def engine(requests=(), **changes) -> Engine:
    changes = {"num_blocks": 64, "num_swap_blocks": 32, "stamp": True, "watermark_ratio": 0.0, **changes}
    config = EngineConfig(**changes)
    return Engine(config, requests, make_request=make_request, storage=ListStorage(config.block_size))


def run(e: Engine, most: int = 20000) -> Engine:
    for _ in range(most):
        if not e.advance(1):
            assert e.done, e.stuck_reason
            return e
        e.check()
    raise AssertionError(f"not over after {most} turns: step {e.step}")


def look(e: Engine, phase: str = "running") -> Snapshot:
    return e.snapshot(phase=phase, speed=None, steps_per_s=None)


def ended(e: Engine) -> list[int]:
    return [v.seq_id for v in e.events_from(0) if v.kind == "finish"]


# -- chunked prefill ---------------------------------------------------------------------------------


def test_a_long_prompt_takes_several_steps_while_others_decode():
    e = engine([request(20, 40, 1), request(100, 5, 2, 0.1)], prefill_tokens=32)
    written, decoded = [], []
    while not written or written[-1] < 100:
        e.advance(1)
        e.check()
        if (second := e.scheduler.find(1)) is not None:
            tables = e.manager.tables
            written.append(int(tables.num_tokens[second.row]))
            decoded.append(int(tables.num_tokens[e.scheduler.find(0).row]))
            assert int(tables.num_blocks[second.row]) == -(-written[-1] // SIZE)  # blocks as chunks need them
    assert written == [32, 64, 96, 100]
    assert np.diff(decoded).tolist() == [1, 1, 1]
    run(e)
    assert (e.counters.prompt_tokens, e.counters.generated_tokens, e.counters.recomputed_tokens) == (120, 45, 0)


@pytest.mark.parametrize("budget", [1, 7, 16, 40, 0])
def test_a_step_computes_no_more_prompt_tokens_than_its_budget(budget):
    requests = [request(30 + 9 * i, 3, i, 0.025 * i) for i in range(6)]
    e = engine(requests, prefill_tokens=budget, prefix_cache=False)
    before = 0
    while e.advance(1):
        e.check()
        on_device = sum(int(e.manager.tables.num_tokens[s.row]) for s in e.scheduler.running)
        now = (
            on_device + sum(r.content.num_tokens for r in (requests[i] for i in ended(e))) - e.counters.generated_tokens
        )
        assert budget == 0 or now - before <= budget
        before = now
    assert ended(e) == [*range(6)] or budget in (40, 0)
    assert e.counters.finished == 6


def test_no_block_is_hit_before_it_is_computed():
    """The second asks for the first's prompt while that is half computed; stamps read every slot back."""
    first = request(128, 5, 1, head=128)
    e = engine([first, request(128, 5, 2, 0.05, head=128)], prefill_tokens=32)
    for _ in range(2):
        e.advance(1)
    cache, keys = e.manager.device.cache, first.content.keys(SIZE)
    assert len(cache.match(keys, first.content.stream)) == 4  # two chunks of two blocks
    run(e)
    # The first had computed 3 chunks when the second was tried, after its own; of the last two blocks each had its own.
    assert 0 < e.counters.hit_blocks < 8


def test_matched_blocks_cost_no_budget():
    later = [request(144, 2, 2, 1.0, head=128), request(32, 2, 3, 1.0)]
    e = engine([request(128, 1, 1, head=128), *later], prefill_tokens=48)
    while e.step <= 40:
        e.advance(1)
    tables = e.manager.tables
    assert [int(tables.num_tokens[e.scheduler.find(i).row]) for i in (1, 2)] == [144, 32]
    run(e)
    assert e.counters.hit_blocks == 8


def test_equal_prompts_of_one_step_share_although_they_come_in_chunks():
    e = engine([request(64, 3, 1, head=64), request(64, 3, 2, head=64)], prefill_tokens=64)
    e.advance(1)
    e.check()
    assert e.table(0).tolist() != []
    e.advance(1)
    e.check()
    assert e.table(1)[:4].tolist() == e.table(0)[:4].tolist()
    run(e)


def test_a_serial_run_computes_each_prompt_in_one_step():
    e = engine([request(100, 2, 1)], serial=True, prefill_tokens=8)
    e.advance(1)
    assert int(e.manager.tables.num_tokens[e.scheduler.find(0).row]) == 100


def test_a_prompt_is_admitted_only_with_room_for_what_begun_prompts_lack():
    """The second is shorter and goes first, but would take blocks that the first was promised."""
    e = engine([request(96, 16, 1), request(64, 16, 2, 0.025)], num_blocks=9, prefill_tokens=16, policy="sjf")
    e.advance(1)
    assert e.scheduler.find(0).reason_kind is None
    e.advance(1)
    assert [s.seq_id for s in e.scheduler.waiting] == [1]
    assert e.scheduler.find(1).reason == "capacity: 9 blocks needed, 8 allocatable"
    assert int(e.manager.tables.num_tokens[e.scheduler.find(0).row]) == 32  # goes on meanwhile
    run(e)
    assert (e.counters.preemptions_swap, e.counters.preemptions_recompute) == (0, 0)


def test_a_spent_budget_is_a_reason_to_wait():
    e = engine([request(40, 5, 1), request(40, 5, 2)], prefill_tokens=16)
    e.advance(1)
    assert e.scheduler.find(1).reason_kind == "budget"
    assert e.scheduler.find(1).reason == "budget: 16 prompt tokens a step are given out"
    run(e)


def test_tokens_granted_in_a_step_are_not_taken_back_in_it():
    """The first finds no block for its next tokens; the victim would be the second, which just got some."""
    e = engine([request(64, 4, 1), request(40, 4, 2, 0.025)], num_blocks=8, prefill_tokens=32, policy="sjf")
    e.advance(2)
    tables = e.manager.tables
    assert [int(tables.num_tokens[e.scheduler.find(i).row]) for i in (0, 1)] == [32, 32]
    pinned = tuple(int(b) for b in e.manager.device.free_ids()[:-1])
    assert e.apply(Pin(pinned)).ok
    e.advance(1)
    e.check()
    assert [int(tables.num_tokens[e.scheduler.find(i).row]) for i in (0, 1)] == [32, 40]
    e.advance(1)  # and then it is the victim
    assert e.scheduler.find(1).status is not Status.RUNNING
    assert e.apply(Unpin(pinned)).ok
    run(e)
    assert e.counters.finished == 2


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("act", [Fork, Preempt, SwapOut, Cancel])
def test_any_command_in_the_middle_of_a_prompt(mode, act):
    e = engine([request(100, 40, 1)], prefill_tokens=24, preempt=mode)
    for _ in range(3):
        e.advance(1)
    assert int(e.manager.tables.num_tokens[e.scheduler.find(0).row]) == 72
    command = Preempt(0, mode) if act is Preempt else act(0)
    assert e.apply(command).ok
    e.check()
    if act is SwapOut:
        e.advance(1)
        assert e.apply(SwapIn(0)).ok
    run(e)
    counters = e.counters
    assert counters.finished == {Fork: 2, Cancel: 0}.get(act, 1)
    recomputed = act is Preempt and mode == "recompute"
    assert (counters.recomputed_tokens > 0) == recomputed
    if act is Fork:
        assert counters.copy_on_write_blocks == 1  # 72 tokens: the fifth block is shared and half full


def test_a_begun_prompt_that_finds_no_room_waits_for_those_before_it_and_preempts_those_after():
    # The operator pins what the prompt was promised.
    e = engine([request(16, 60, 1), request(64, 4, 2)], num_blocks=8, prefill_tokens=32, num_swap_blocks=0)
    e.advance(1)
    free = tuple(int(b) for b in e.manager.device.free_ids())
    assert e.apply(Pin(free)).ok
    for _ in range(5):
        e.advance(1)
        e.check()
    assert e.scheduler.find(0).status is Status.RUNNING
    assert e.counters.preemptions_recompute <= 1
    assert e.apply(Unpin(free)).ok
    run(e)
    assert e.counters.finished == 2


# -- classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_higher_class_preempts_a_lower_one_only_when_it_finds_no_room_otherwise(mode):
    low = [request(40, 60, i) for i in range(3)]
    high = request(40, 20, 9, 0.5, priority=1)
    roomy = run(engine([*low, high], policy="priority", preempt=mode))
    assert (roomy.counters.preemptions_swap, roomy.counters.preemptions_recompute) == (0, 0)
    e = engine([*low, high], num_blocks=14, policy="priority", preempt=mode)
    while e.scheduler.find(3) is None:
        e.advance(1)
    tight = run(e)
    preempted = [v.seq_id for v in e.events_from(0) if v.kind == "preempt"]
    assert preempted[0] == 2  # the last arrived of the lowest class
    assert 3 not in preempted
    assert ended(tight)[0] == 3
    assert tight.counters.finished == 4


def test_a_lower_class_is_not_preempted_in_vain():
    """The high class lacks more blocks than all lower ones hold: another of its own class has the rest."""
    requests = [request(160, 100, 1, priority=1), request(16, 60, 2), request(100, 40, 3, 0.2, priority=1)]
    e = engine(requests, num_blocks=17, num_swap_blocks=0, policy="priority")
    for _ in range(20):
        e.advance(1)
        e.check()
    assert [v.seq_id for v in e.events_from(0) if v.kind == "preempt"] == []
    assert e.scheduler.find(2).reason.startswith("capacity: ")
    run(e)


def test_classes_count_for_nothing_under_fcfs():
    requests = [request(40, 60, 0), request(40, 60, 1), request(40, 20, 9, 0.5, priority=5)]
    e = run(engine(requests, num_blocks=12, num_swap_blocks=0))
    assert {v.seq_id for v in e.events_from(0) if v.kind == "preempt"} <= {1, 2}
    assert ended(e)[0] == 0


def test_the_limit_gives_way_to_a_higher_class():
    requests = [request(16, 50, 0), request(16, 50, 1), request(16, 10, 2, 0.2, priority=1)]
    e = engine(requests, max_running=2, policy="priority")
    while e.step < 12:
        e.advance(1)
    assert [s.seq_id for s in e.scheduler.running] == [0, 2]
    assert e.scheduler.find(1).reason == "limit: 2 sequences run, the limit"
    run(e)


def test_the_watermark_protects_no_lower_class():
    requests = [request(16, 50, 0), request(16, 10, 2, 0.2, priority=1), request(16, 10, 3, 0.2)]
    e = engine(requests, num_blocks=8, watermark_ratio=1.0, policy="priority")
    while e.step < 10:
        e.advance(1)
    assert [s.seq_id for s in e.scheduler.running] == [0, 1]
    assert e.scheduler.find(2).reason_kind == "watermark"
    run(e)


def test_the_policy_changes_while_running_and_the_snapshot_says_so():
    requests = [request(16, 300, 0), request(200, 20, 1), request(20, 20, 2, priority=1), request(30, 5, 3)]
    e = engine(requests, max_running=1)
    e.advance(1)
    assert (look(e).policy, [s.seq_id for s in e.scheduler.waiting]) == ("fcfs", [1, 2, 3])
    plan = e.plan(SetPolicy("sjf"))
    assert plan.summary == "policy sjf, sequence 3 goes next"
    assert e.apply(SetPolicy("sjf")).ok
    assert (look(e).policy, [s.seq_id for s in e.scheduler.waiting]) == ("sjf", [3, 2, 1])
    assert e.apply(SetPolicy("priority")).message == "policy set to priority"
    assert [s.seq_id for s in e.scheduler.waiting] == [2, 1, 3]
    run(e)
    assert ended(e)[0] == 2  # the only higher class took the only place


# -- reasons -----------------------------------------------------------------------------------------


def reasons(e: Engine, phase: str = "running") -> dict[int, tuple[str, str]]:
    return {r.seq_id: (r.reason_kind, r.reason) for r in look(e, phase).sequences if r.reason}


def test_reasons_of_everyone_who_waits():
    requests = [request(40, 60, 0), request(40, 60, 1), request(120, 9, 2), request(20, 9, 3)]
    e = engine(requests, num_blocks=10, num_swap_blocks=3)
    e.advance(2)
    assert reasons(e) == {
        2: ("capacity", "capacity: 8 blocks needed, 4 allocatable"),
        3: ("behind", "behind #2"),
    }
    assert e.apply(SwapOut(1)).ok
    assert reasons(e)[1] == ("held", "held by the operator")
    assert e.apply(Preempt(0, "recompute")).ok
    # First by arrival again, but not tried since.
    assert reasons(e)[0] == ("next", "first in the queue, to be tried in the next step")
    assert reasons(e, "paused")[0] == ("paused", "paused: nobody is admitted")
    assert reasons(e)[2] == ("behind", "behind #0")
    running = [r for r in look(e).sequences if r.status == "running"]
    assert all(not r.reason and not r.reason_kind for r in running)
    assert e.apply(SwapIn(1)).ok
    run(e)


def test_who_found_no_room_in_the_host_tier_says_so():
    e = engine([request(30, 90, i) for i in range(3)], num_blocks=10, num_swap_blocks=1)
    while not e.counters.preemptions_recompute:
        e.advance(1)
    e.apply(Preempt(1, "swap"))
    kinds = reasons(e)
    assert kinds[2][0] in ("host-full", "behind", "capacity")
    e.check()
    preempted = e.scheduler.find(2)
    assert preempted.status is Status.WAITING
    run(e)


# -- thrash ------------------------------------------------------------------------------------------


class Blind(ThrashGuard):
    """Sees no thrash."""

    def preempted(self, step, lost_tokens, generated_tokens, num_running):
        return None


def crowd(policy: str, mode: str) -> Engine:
    """Forty sequences that each need most of a pool of one-token blocks: whoever starts pushes another out."""
    requests = [request(2, 50, i, priority=i % 2) for i in range(40)]
    return engine(
        requests, num_blocks=64, block_size=1, num_swap_blocks=256, policy=policy, preempt=mode, prefix_cache=False
    )


def lost_tokens(e: Engine) -> list[int]:
    """Run to the end; return the tokens that each preemption gave up."""
    lost: list[int] = []
    preempt = e.room.preempt

    def watched(victim) -> None:
        lost.append(int(e.manager.tables.num_tokens[victim.row]))
        preempt(victim)

    e.room.preempt = watched
    run(e)
    return lost


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_thrash_is_bounded(policy, mode):
    guarded, blind = crowd(policy, mode), crowd(policy, mode)
    blind.thrash = Blind(256)
    lost, lost_blindly = lost_tokens(guarded), lost_tokens(blind)
    generated = guarded.counters.generated_tokens
    assert generated == blind.counters.generated_tokens == 40 * 50
    assert sum(lost_blindly) > generated, "no thrash to be bounded"
    # Between two limits, fewer tokens are given up than are generated, but for the preemptions that found it out.
    assert sum(lost) <= generated
    assert 3 * len(lost) < len(lost_blindly)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_engine_that_thrashes_serialises_says_so_and_recovers(policy, mode):
    e = crowd(policy, mode)
    limits, shown = [], set()
    while e.advance(1):
        e.check()
        snapshot = look(e)
        assert snapshot.running_limit == e.thrash.limit
        limits.append(e.thrash.limit)
        shown.update(snapshot.notes)
    assert e.counters.finished == 40
    assert any(limits), "it never thrashed"
    said = [v.text for v in e.events_from(0) if v.kind == "note"]
    assert said[0].startswith("thrashing: 4 preemptions in ")
    assert any(note.startswith("thrashing: at most ") for note in shown)
    # At rest for long enough, there is no limit any more.
    e.arrivals = Arrivals([request(2, 2, 99, e.time_s + 300)])
    while e.advance(1000):
        pass
    assert e.counters.finished == 41
    assert (e.thrash.limit, look(e).running_limit, look(e).notes) == (None, None, ())
    assert [v.text for v in e.events_from(0) if v.kind == "note"][-1] == "no more thrashing: no limit"


@pytest.mark.parametrize("policy", POLICIES)
def test_skipping_ahead_skips_no_change_of_the_limit(policy):
    """Large blocks, so that hundreds of steps are quiet, and the limit is eased in the middle of them."""

    def make() -> Engine:
        requests = [request(2, 3 * 512, i, priority=i % 2) for i in range(20)]
        return engine(requests, num_blocks=16, block_size=256, num_swap_blocks=64, policy=policy, stamp=False)

    slow, fast = make(), make()
    while slow.advance(1):
        pass
    while fast.advance(10**6):
        pass
    assert sum(v.text.endswith("may run, after thrashing") for v in slow.events_from(0)) > 1
    assert outcome(fast) == outcome(slow)


@pytest.mark.parametrize("blocks", range(1, 9))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("size", [1, 4])
def test_pools_so_small_that_thrash_is_certain_make_progress(blocks, policy, mode, size):
    requests = [
        request(1 + i * 3 % max(1, blocks * size - 2), min(9, blocks * size) // 2, i, 0.02 * i, priority=i % 3)
        for i in range(12)
    ]
    requests = [r for r in requests if -(-r.content.num_tokens // size) <= blocks]
    e = run(engine(requests, num_blocks=blocks, block_size=size, num_swap_blocks=2, policy=policy, preempt=mode))
    assert e.counters.finished == len(requests)


# -- any run -----------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    num_blocks = draw(st.integers(1, 8))
    size = draw(st.sampled_from([1, 3, 16]))
    capacity = num_blocks * size
    shape = st.tuples(
        st.integers(1, min(40, capacity)),
        st.integers(0, 30),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.1]),
        st.integers(0, 2),
    )
    requests, at = [], 0.0
    for prompt, output, seed, wait, klass in draw(st.lists(shape, min_size=1, max_size=7)):
        at += wait
        output = min(output, capacity - prompt)
        requests.append(request(prompt, output, seed, at, priority=klass))
    settings = {
        "num_blocks": num_blocks,
        "block_size": size,
        "num_swap_blocks": draw(st.sampled_from([0, 2, 8])),
        "policy": draw(st.sampled_from(POLICIES)),
        "preempt": draw(st.sampled_from(["swap", "recompute"])),
        "prefill_tokens": draw(st.sampled_from([0, 1, 5, 16])),
        "watermark_ratio": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "max_running": draw(st.sampled_from([1, 2, 256])),
        "compact": draw(st.sampled_from(["manual", "auto"])),
        "compact_threshold_ratio": 0.1,
        "compact_budget": draw(st.sampled_from([1, 2, 256])),
        "slab_blocks": draw(st.sampled_from([None, 3])),
        "prefix_cache": draw(st.booleans()),
    }
    return requests, settings


def outcome(e: Engine) -> tuple[object, ...]:
    log = [(v.step, v.kind, v.text.split(" in ")[0], v.seq_id) for v in e.events_from(0)]
    return e.step, msgspec.structs.asdict(e.counters), log


@settings(max_examples=120)
@given(made=runs())
def test_all_finish_under_every_policy_and_skipping_ahead_is_the_same_run(made):
    requests, changes = made
    e = engine(requests, **changes)
    total = sum(r.content.num_tokens for r in requests)
    most = 100 + round(requests[-1].arrival_s / 0.025) + 20 * len(requests) * total
    turns = 0
    while e.advance(1):
        e.check()
        turns += 1
        assert turns <= most, "no progress"
        waiting = [r for r in look(e).sequences if r.status in ("waiting", "swapped")]
        assert all(r.reason and r.reason_kind for r in waiting)
    assert e.done
    assert e.counters.finished == len(requests)
    assert (e.manager.device.num_active, e.manager.host.num_active) == (0, 0)
    fast = engine(requests, **changes)
    while fast.advance(10**6):
        pass
    fast.counters.integrity_checks = e.counters.integrity_checks
    assert outcome(fast) == outcome(e)


@pytest.mark.parametrize("policy", POLICIES)
def test_commands_at_any_time_under_every_policy(policy):
    rng = np.random.default_rng(POLICIES.index(policy))
    requests = [
        request(int(rng.integers(1, 90)), int(rng.integers(0, 60)), i, 0.1 * i, priority=i % 3, head=48)
        for i in range(50)
    ]
    e = engine(requests, num_blocks=14, num_swap_blocks=8, policy=policy, prefill_tokens=20)
    for turn in itertools.count():
        if not e.advance(int(rng.integers(1, 4))) and e.done:
            break
        e.check()
        for s in list(e.scheduler.waiting):
            if s.held:
                e.apply(SwapIn(s.seq_id))
        ids = [s.seq_id for s in e.unfinished()] or [0]
        seq_id = int(rng.choice(ids))
        acts = (Fork(seq_id), Preempt(seq_id), SwapOut(seq_id), Cancel(seq_id), SetPolicy(POLICIES[turn % 3]))
        if turn < 300 and turn % 4 == 0:
            e.apply(acts[int(rng.integers(len(acts)))])
            e.check()
        assert turn < 5000
    counters = e.counters
    assert counters.finished + counters.cancelled + counters.refused == counters.submitted
