"""Engine: hand-made cases of the rules, every stage of a sequence's life, and laws over random runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from fake_storage import ListStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.commands import (
    Cancel,
    Command,
    Compact,
    EvictCached,
    Fork,
    Pause,
    Pin,
    Preempt,
    Resize,
    SetAutoCompaction,
    SetPolicy,
    SetWatermark,
    SubmitLoad,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
)
from allocator.config import EngineConfig
from allocator.content import KeyedContent, OpaqueContent, Request, TokenContent
from allocator.engine import Engine
from allocator.errors import InvariantViolation, OutOfBlocks
from allocator.ids import Status
from allocator.invariants import check_manager
from allocator.manager import BlockManager
from allocator.snapshot import Counters
from allocator.storage import NoStorage
from kvtop.workloads.chat import chat_requests, make_request

BOOKS_ONLY = {"geometry": "none", "stamp": False}
GOALS = ("pack-low", "longest-run", "by-sequence")
FIELDS = ("state", "flags", "ref_count", "fill", "owner", "last_used", "hash64")


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 30, count).astype(np.int32)


def request(prompt: int, output: int, seed: int = 0, at: float = 0.0, head: np.ndarray | None = None) -> Request:
    """A request with tokens of its own; ``head`` replaces the first of them."""
    stream = tokens(seed, prompt + output)
    if head is not None:
        stream[: min(prompt, len(head))] = head[:prompt]
    return Request(TokenContent(stream), prompt, at)


def engine(requests: Iterable[Request] = (), **settings: object) -> Engine:
    settings = {"num_blocks": 64, "num_swap_blocks": 32, "stamp": True, "device": "cpu", **settings}
    return Engine(EngineConfig(**settings), requests, make_request=make_request)


def written(e: Engine) -> list[int]:
    """Tokens written for each running sequence, by arrival."""
    return [int(e.manager.tables.num_tokens[s.row]) for s in e.scheduler.running]


def run(e: Engine, most: int = 20000) -> Engine:
    """Step to the end, checking every law after each turn."""
    for _ in range(most):
        if not e.advance(1):
            return e
        e.check()
    raise AssertionError(f"not over after {most} turns: step {e.step}, {e.stuck_reason}")


def state(e: Engine) -> tuple[object, ...]:
    """All that an observer can see, events and measured times aside."""
    snapshot = e.snapshot(phase="paused", speed=None, steps_per_s=None, next_event=1 << 60)
    untimed = tuple(msgspec.structs.replace(record, seconds=0.0) for record in snapshot.compactions)
    snapshot = msgspec.structs.replace(snapshot, compactions=untimed, timings=None, copies=None, locks=None)
    arrays = [
        None if tier is None else [getattr(tier, name).tolist() for name in FIELDS]
        for tier in (e.arrays("device"), e.arrays("host"))
    ]
    tables = {s.seq_id: e.table(s.seq_id).tolist() for s in e.unfinished() if s.row is not None}
    order = e.manager.device.eviction_order().tolist()
    return snapshot, arrays, tables, order, sorted(e.manager.device.free_ids().tolist())


def events(e: Engine) -> list[tuple[object, ...]]:
    return [(v.number, v.step, v.kind, v.text.split(" in ")[0], v.seq_id, v.blocks) for v in e.events_from(0)]


# -- prefix hits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("second_at", [0.0, 0.025, 10.0], ids=["same step", "while it runs", "after it ended"])
def test_two_identical_prompts_of_four_blocks(second_at):
    first = request(64, 3, 1)
    e = engine([first, request(64, 3, 2, second_at, head=first.content.stream[:64])])
    while e.counters.query_blocks < 8:
        assert e.advance(1)
        e.check()
    # Both, or the second alone, hold the same 4 blocks; nothing is output yet when they start together.
    active = int(np.count_nonzero(e.manager.device.facts.ref_counts()))
    assert (e.counters.hit_blocks, e.counters.hit_tokens, e.counters.evictions) == (3, 48, 0)
    second = e.scheduler.find(1)
    assert second is not None
    assert len(e.table(1)) == 4
    assert active == (5 if second_at == 0.025 else 4)  # the running one has begun its output block
    run(e)
    assert (e.counters.hit_blocks, e.counters.query_blocks, e.counters.evictions, e.counters.finished) == (3, 8, 0, 2)


def test_the_last_block_of_a_full_hit_is_taken_over_in_place_in_a_full_pool():
    first = request(64, 0, 1)
    e = run(engine([first, request(64, 0, 1, 1.0)], num_blocks=4, num_swap_blocks=0))
    assert (e.counters.hit_blocks, e.counters.evictions, e.counters.peak_active, e.counters.finished) == (3, 0, 4, 2)
    assert e.counters.allocated_blocks == 8  # four blocks, handed out twice: the second time they were revived
    assert e.manager.device.num_evicted == 0


@pytest.mark.parametrize(("extra", "hits"), [(-1, 3), (0, 3), (1, 4)])
@pytest.mark.parametrize("running", [True, False])
def test_hits_of_a_prompt_around_a_block_boundary(extra, hits, running):
    first = request(64 + 10, 40 if running else 0, 1)
    second = request(64 + extra, 0, 2, 0.5, head=first.content.stream[:64])
    e = run(engine([first, second]))
    assert e.counters.hit_blocks == hits
    assert e.counters.hit_tokens == 16 * hits
    assert e.counters.query_blocks == 4 + (64 + extra) // 16
    assert e.counters.query_tokens == 74 + 64 + extra


def test_a_run_of_hits_ends_at_the_first_miss():
    first = request(64, 0, 1)
    second = request(64, 0, 2, 0.5, head=first.content.stream[:64])
    second.content.stream[20] += 1
    assert run(engine([first, second])).counters.hit_blocks == 1


def test_output_is_found_again_by_the_next_turn():
    first = request(20, 30, 1)
    second = request(64, 5, 2, 5.0, head=first.content.stream)
    assert run(engine([first, second])).counters.hit_blocks == 3


def test_without_the_prefix_cache_nothing_is_asked_or_found():
    e = run(engine([request(64, 0, 1), request(64, 0, 1, 1.0)], prefix_cache=False))
    counters = e.counters
    assert (counters.hit_blocks, counters.query_blocks, counters.query_tokens) == (0, 0, 0)
    assert (counters.finished, counters.prompt_tokens) == (2, 128)
    assert e.manager.device.num_cached == 0


@pytest.mark.parametrize(
    "content", [OpaqueContent(64, 7), KeyedContent(64, np.arange(8), 8, 7)], ids=["lengths alone", "other block size"]
)
def test_content_without_keys_is_asked_for_and_not_found(content):
    e = run(engine([Request(content, 64), Request(content, 64, 1.0)]))
    assert (e.counters.query_blocks, e.counters.hit_blocks, e.manager.device.num_cached) == (8, 0, 0)


def test_keyed_content_is_found_up_to_its_last_full_prompt_block():
    def make(at: float) -> Request:
        return Request(KeyedContent(70, np.array([5, 6, 7]), 16, int(at)), 60, at)

    e = run(engine([make(0.0), make(1.0)]))
    assert (e.counters.query_blocks, e.counters.hit_blocks) == (6, 3)
    assert e.manager.device.num_cached == 3  # output and the partial block are free at once


def test_a_swap_in_counts_the_blocks_it_revives():
    manager = engine(num_blocks=4).manager
    keys = TokenContent(tokens(1, 32)).keys(16)
    row = manager.admit(keys, 32).row
    manager.publish_keys(row, keys, 0)
    host_row = manager.swap_out(row)
    manager.admit((), 32)
    assert manager.device.num_allocatable == 2  # its own two blocks, cached
    with pytest.raises(OutOfBlocks):
        manager.swap_in(host_row, keys, keep=1)
    assert manager.device.num_cached == 2
    _, copies = manager.swap_in(host_row, keys)
    assert (copies, manager.device.num_allocatable, manager.host.num_active) == (0, 0, 0)


def test_one_of_two_copies_owns_the_key():
    """Two identical prompts, the second admitted without a look at the cache, as when both were computed at once."""
    e = engine()
    manager = e.manager
    content = TokenContent(tokens(1, 32))
    keys = content.keys(16)
    a, b = manager.admit(keys, 32).row, manager.admit((), 32).row
    manager.publish_keys(b, keys, 0)
    manager.publish_keys(a, keys, 0)
    assert manager.device.cache.match(keys) == manager.tables.table(b).tolist()
    manager.free(a)
    assert (manager.device.num_cached, manager.device.num_free) == (0, 62)
    manager.free(b)
    assert manager.device.num_cached == 2


# -- release and eviction ----------------------------------------------------------------------------


def test_free_blocks_go_before_cached_ones_and_the_tail_of_the_oldest_first():
    first, second = request(32, 0, 1), request(32, 0, 2, 1.0)
    e = engine([first, second, request(32, 0, 3, 2.0)], num_blocks=5, num_swap_blocks=0)
    while e.step < 50:
        e.advance(1)
    cache, order = e.manager.device.cache, e.manager.device.eviction_order().tolist()
    keys = [*first.content.keys(16)[::-1], *second.content.keys(16)[::-1]]
    assert [cache.key_of(b) for b in order] == keys
    run(e)
    # The third request took the free block and evicted one: the tail of the first.
    assert e.counters.evictions == 1
    assert len(cache.match(first.content.keys(16))) == 1


def test_an_output_block_without_a_key_is_free_at_once():
    e = run(engine([Request(KeyedContent(40, np.array([1]), 16, 0), 20)]))
    assert (e.manager.device.num_cached, e.manager.device.num_free) == (1, 63)


@pytest.mark.parametrize(("policy", "lost"), [("lru", 1), ("fifo", 0), ("lfu", 1)])
def test_eviction_policies_differ(policy, lost):
    """Two prompts of a block; the older is hit once more; then one must go."""
    prompts = [request(16, 1, seed) for seed in (1, 2)]
    again = request(17, 1, 9, 2.0, head=prompts[0].content.stream[:16])
    prompts[1].arrival_s = 1.0
    e = run(engine([*prompts, again, request(40, 0, 5, 3.0)], num_blocks=4, num_swap_blocks=0, eviction=policy))
    known = [bool(e.manager.device.cache.match(p.content.keys(16))) for p in prompts]
    assert known == [i != lost for i in range(2)]


# -- refusal, room and preemption --------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_on_arrival_with_the_numbers():
    e = run(engine([request(100, 29, 1, 0.5)], num_blocks=8, num_swap_blocks=0))
    assert (e.counters.submitted, e.counters.refused, e.counters.finished, e.done) == (1, 1, 0, True)
    (event,) = [v for v in e.events_from(0) if v.kind == "refuse"]
    assert (event.step, event.seq_id, event.blocks) == (20, 0, 9)
    assert "needs 9 blocks" in event.text
    assert "has 8" in event.text
    assert run(engine([request(100, 28, 1)], num_blocks=8, num_swap_blocks=0)).counters.finished == 1


def test_preemption_swaps_while_the_host_has_room_then_recomputes():
    requests = [request(30, 60, seed) for seed in range(4)]
    e = engine(requests, num_blocks=8, num_swap_blocks=3, watermark_ratio=0.0)
    seen: list[str] = []
    while e.advance(1):
        e.check()
    seen = [v.text.rsplit(" ", 1)[1] for v in e.events_from(0) if v.kind == "preempt"]
    assert seen[0] == "swap"
    assert "recompute" in seen
    assert e.counters.preemptions_swap == seen.count("swap")
    assert e.counters.preemptions_recompute == seen.count("recompute")
    assert e.counters.finished == 4
    finished = [v.seq_id for v in e.events_from(0) if v.kind == "finish"]
    assert finished == [0, 1, 2, 3]  # the last arrived gives way, so that they end in order of arrival


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_last_arrived_is_preempted_and_returns_in_order_of_arrival(mode):
    requests = [request(16, 60, seed) for seed in range(4)]
    e = run(engine(requests, num_blocks=12, num_swap_blocks=24, preempt=mode, watermark_ratio=0.0))
    log = e.events_from(0)
    preempted = [v.seq_id for v in log if v.kind == "preempt"]
    back = [v.seq_id for v in log if (v.kind == "swap-in") or (v.kind == "admit" and v.seq_id in preempted)]
    assert preempted[0] == 3
    if mode == "swap":
        assert (e.counters.preemptions_recompute, e.counters.swap_in_blocks > 0) == (0, True)
    else:
        assert (e.counters.preemptions_swap, e.counters.swap_out_blocks) == (0, 0)
    assert e.counters.finished == 4
    assert back
    # What a sequence finds of its own blocks when it returns is no hit of the prefix cache's.
    assert (e.counters.hit_blocks, e.counters.query_blocks, e.counters.prompt_tokens) == (0, 4, 64)


def test_swap_bytes_are_whole_blocks():
    e = run(engine([request(30, 60, seed) for seed in range(4)], num_blocks=8, num_swap_blocks=8, watermark_ratio=0.0))
    block_bytes = e.manager.storage.block_bytes
    assert block_bytes == 16 * 32
    assert e.counters.swap_out_bytes == e.counters.swap_out_blocks * block_bytes > 0
    assert e.counters.swap_in_bytes == e.counters.swap_in_blocks * block_bytes > 0


def test_the_watermark_holds_back_all_but_the_first():
    e = engine([request(32, 20, 1), request(32, 20, 2)], num_blocks=6, num_swap_blocks=0, watermark_ratio=0.5)
    e.advance(1)
    (waiting,) = e.scheduler.waiting
    assert waiting.reason.startswith("watermark")
    assert run(e).counters.finished == 2
    # A request for the whole pool is admitted although no watermark is left.
    assert run(engine([request(96, 0, 1)], num_blocks=6, num_swap_blocks=0, watermark_ratio=1.0)).counters.finished == 1


# -- the life of a sequence, by command --------------------------------------------------------------


def busy(**settings: object) -> Engine:
    """Three running sequences, one waiting, one swapped out by preemption or by hand."""
    e = engine(
        [request(40, 200, 1), request(33, 200, 2), request(20, 200, 3), request(30, 200, 4), request(400, 100, 5, 0.1)],
        **{"num_blocks": 32, "num_swap_blocks": 16, "watermark_ratio": 0.0, **settings},
    )
    for _ in range(10):
        e.advance(1)
    assert e.apply(SwapOut(3)).ok
    e.check()
    assert [s.seq_id for s in e.scheduler.running] == [0, 1, 2]
    assert [(s.seq_id, s.status) for s in e.scheduler.waiting] == [(3, Status.SWAPPED), (4, Status.WAITING)]
    return e


@pytest.mark.parametrize("seq_id", [0, 2, 3, 4], ids=["running", "last running", "swapped", "waiting"])
def test_cancel_gives_everything_back_in_any_stage(seq_id):
    e = busy()
    outcome = e.apply(Cancel(seq_id))
    assert outcome.ok
    e.check()
    assert e.scheduler.find(seq_id) is None
    if seq_id == 3:
        assert e.manager.host.num_free == 16
    for other in {0, 1, 2, 3, 4} - {seq_id}:
        assert e.apply(Cancel(other)).ok
    e.check()
    assert (e.done, e.manager.device.num_active, e.manager.host.num_free, e.counters.cancelled) == (True, 0, 16, 5)


def test_an_operator_holds_what_it_swapped_out():
    e = busy()
    assert e.apply(Cancel(4)).ok
    while e.advance(1):
        e.check()
    assert [s.seq_id for s in e.unfinished()] == [3]
    assert not e.done
    assert e.stuck_reason == "every waiting sequence is held by the operator"
    assert e.apply(SwapIn(3)).ok
    run(e)
    assert e.done
    assert e.stuck_reason is None
    assert e.counters.finished == 4


def test_a_cancelled_last_sequence_leaves_no_stale_reason():
    e = engine([request(16, 20)])
    e.advance(1)
    assert e.apply(SwapOut(0)).ok
    assert e.advance(1) == 0
    assert e.stuck_reason
    assert e.apply(Cancel(0)).ok
    assert e.advance(1) == 0
    assert e.done
    assert e.stuck_reason is None


def test_plans_of_fork_cancel_and_submit_say_what_becomes_of_blocks() -> None:
    e = engine([request(18, 60)])
    size = e.config.block_size
    e.advance(3)
    assert written(e)[0] % size != 0
    assert e.plan(Fork(0)).summary.endswith(" blocks shared, the last copied when written")
    while written(e)[0] % size != 0:
        e.advance(1)
    held = len(e.table(0))
    assert e.plan(Fork(0)).summary == f"fork sequence 0: {held} blocks shared"
    assert e.plan(Cancel(0)).summary == f"cancel sequence 0: {held} blocks released"
    assert e.apply(Fork(0)).ok
    assert e.plan(Cancel(0)).summary == f"cancel sequence 0: {held} blocks released, {held} of them stay with others"
    assert e.plan(SubmitLoad(size, size, 1)).summary == "submit 1 request of up to 2 blocks each"
    assert e.plan(SubmitLoad(size, size, 3)).summary == "submit 3 requests of up to 2 blocks each"


def test_pinned_blocks_can_stop_a_run_that_says_why_and_goes_on_when_unpinned():
    e = engine([request(60, 20)], num_blocks=5, num_swap_blocks=0)
    assert e.apply(Pin((0,))).ok
    for _ in range(200):
        if not e.advance(1):
            break
        e.check()
    else:
        raise AssertionError("it goes round in circles")
    assert not e.done
    assert "sequence 0 cannot start: capacity: " in e.stuck_reason
    assert e.apply(Unpin((0,))).ok
    assert run(e).counters.finished == 1


@pytest.mark.parametrize("kind", ["tokens", "ids", "lengths"])
def test_fork_shares_all_and_copies_the_block_that_is_written(kind):
    content = {
        "tokens": TokenContent(tokens(1, 60)),
        "ids": KeyedContent(60, np.array([3, 4]), 16, 1),
        "lengths": OpaqueContent(60, 1),
    }[kind]
    e = engine([Request(content, 40)])
    e.advance(1)
    e.advance(2)
    assert e.apply(Fork(0)).ok
    e.check()
    assert e.table(0).tolist() == e.table(1).tolist()
    assert e.manager.device.num_active == 3
    e.advance(1)
    e.check()
    # The copy is under way: its writer sits this step out, and the block it leaves must not change meanwhile.
    assert (len(e.copies), e.counters.copy_on_write_blocks, written(e)) == (1, 0, [42, 42])
    e.advance(1)
    e.check()
    assert e.counters.copy_on_write_blocks == 1
    assert e.table(0)[:2].tolist() == e.table(1)[:2].tolist()
    assert e.table(0)[2] != e.table(1)[2]
    run(e)
    assert (e.counters.submitted, e.counters.finished, e.counters.copy_on_write_blocks) == (2, 2, 1)


def test_a_fork_at_a_block_boundary_copies_nothing():
    e = engine([request(32, 20)])
    e.advance(1)
    assert e.apply(Fork(0)).ok
    run(e)
    assert (e.counters.copy_on_write_blocks, e.counters.finished) == (0, 2)


def test_many_forks_of_one_tail_copy_all_but_one():
    e = engine([request(20, 20)])
    e.advance(1)
    for _ in range(5):
        assert e.apply(Fork(0)).ok
    e.advance(1)
    e.check()
    assert (len(e.copies), e.copies.count("copy-on-write")) == (1, 1)
    e.advance(1)
    e.check()
    assert e.counters.copy_on_write_blocks == 5
    run(e)


def test_copy_on_write_does_not_forget_rows_it_was_not_asked_about():
    e = engine()
    manager = e.manager
    a, other = manager.admit((), 2).row, manager.admit((), 3).row
    child = manager.fork(a)
    manager.extend(np.array([other]))
    manager.extend(np.array([a]))
    assert manager.tables.last(np.array([a]))[0] != manager.tables.last(np.array([child]))[0]


# -- size --------------------------------------------------------------------------------------------


def test_a_shrink_that_does_not_fit_is_refused_with_numbers_and_changes_nothing():
    e = busy()
    held = e.manager.device.num_active
    before = state(e)
    outcome = e.apply(Resize(held - 1))
    assert not outcome.ok
    assert outcome.message == f"{held} device blocks needed, {held - 1} allocatable"
    assert state(e) == before
    assert e.apply(Resize(held)).ok
    e.check()
    assert (e.manager.device.num_blocks, e.manager.device.num_active, e.manager.device.num_free) == (held, held, 0)


def test_shrinking_drains_and_gives_slabs_back_and_growing_returns():
    e = busy(slab_blocks=5)
    assert e.manager.storage.num_slabs("device") == 7
    assert e.apply(Resize(16)).ok
    e.check()
    assert e.manager.storage.num_slabs("device") == 4  # the slab that is cut keeps its memory
    assert max(e.table(s.seq_id).max() for s in e.scheduler.running) < 16
    for _ in range(6):
        e.advance(1)
        e.check()
        assert all(e.table(s.seq_id).max() < 16 for s in e.scheduler.running)
    assert e.apply(Resize(40)).ok
    e.check()
    assert (e.manager.storage.num_slabs("device"), e.manager.device.num_blocks) == (8, 40)
    assert e.apply(SwapIn(3)).ok
    run(e)
    counters = e.counters
    assert (counters.shrunk_blocks, counters.resizes_shrink) == (16, 1)
    assert (counters.grown_blocks, counters.resizes_grow) == (24, 1)
    assert counters.finished == 5


def test_a_pinned_block_above_the_new_end_is_named_in_the_refusal():
    e = busy()
    assert e.apply(Pin((31,))).ok
    before = state(e)
    outcome = e.apply(Resize(20))
    assert not outcome.ok
    assert "1 blocks above the new end 20 cannot move: pinned (unpin them)" in outcome.message
    assert state(e) == before


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_what_no_longer_fits_after_a_shrink_is_refused_late(mode):
    e = engine([request(20, 200, 1), request(20, 20, 2)], num_blocks=20, num_swap_blocks=20, preempt=mode)
    for _ in range(5):
        e.advance(1)
    assert e.apply(Resize(6)).ok
    run(e)
    assert (e.counters.refused, e.counters.finished, e.done) == (1, 1, True)
    (event,) = [v for v in e.events_from(0) if v.kind == "refuse"]
    assert event.text == "sequence 0: needs 14 blocks, the pool now has 6"
    assert e.manager.host.num_free == 20


# -- plans and outcomes ------------------------------------------------------------------------------

NUMBERS = {
    "shared blocks": lambda e: e.manager.device.count_shared(np.arange(e.manager.device.num_blocks)),
    "allocatable blocks": lambda e: e.manager.device.num_allocatable,
    "host blocks free": lambda e: e.manager.host.num_free,
    "cached blocks": lambda e: e.manager.device.num_cached,
    "free blocks": lambda e: e.manager.device.num_free,
    "pool blocks": lambda e: e.manager.device.num_blocks,
    "watermark": lambda e: e.watermark_ratio,
    "largest free run": lambda e: longest_and_all(e)[0],
    "slabs in memory": lambda e: e.manager.storage.num_slabs("device"),
    "external fragmentation": lambda e: fragmentation(*longest_and_all(e)),
}


def longest_and_all(e: Engine) -> tuple[int, int]:
    """The longest run of allocatable blocks within a slab, and their number; counted by hand."""
    arrays = e.arrays("device")
    longest = run = total = 0
    for b in range(len(arrays.state)):
        usable = arrays.state[b] in (0, 1) and arrays.flags[b] == 0
        run = (0 if b % e.config.slab_size == 0 else run) + 1 if usable else 0
        longest, total = max(longest, run), total + usable
    return longest, total


def fragmentation(longest: int, total: int) -> float:
    return 1 - longest / total if total else 0.0


def crowded(**settings: object) -> Engine:
    """Running, waiting and swapped sequences, cached and pinned blocks, shared ones, holes."""
    shared = tokens(50, 64)
    requests = [request(64 + 9 * i, 15 + 30 * i, i, 0.2 * i, head=shared) for i in range(6)]
    requests += [request(10, 300, 20, 0.3), request(70, 200, 21, 0.5, head=tokens(51, 70)), request(600, 60, 22, 1.2)]
    requests.sort(key=lambda r: r.arrival_s)
    sizes = {"num_blocks": 50, "num_swap_blocks": 30, "slab_blocks": 16, "watermark_ratio": 0.0}
    e = engine(requests, **{**sizes, **settings})
    while e.step < 60:
        e.advance(1)
    ids = [s.seq_id for s in e.scheduler.running]
    assert e.apply(SwapOut(ids[0])).ok
    assert e.apply(Pin((int(e.table(ids[1])[-1]), int(e.manager.device.free_ids()[0]), 45))).ok
    for _ in range(3):
        e.advance(1)
    e.check()
    assert e.manager.device.num_cached
    assert len(e.scheduler.running) >= 3
    return e


def commands(e: Engine) -> list[Command]:
    running = [s.seq_id for s in e.scheduler.running]
    others = [s.seq_id for s in e.scheduler.waiting]
    by_sequence: list[Command] = [
        make(seq_id)
        for seq_id in [*running, *others, 999]
        for make in (Cancel, Fork, Preempt, SwapOut, SwapIn, lambda i: Preempt(i, "recompute"))
    ]
    size = e.manager.device.num_blocks
    return [
        *by_sequence,
        *(Compact(goal, None, budget) for goal in GOALS for budget in (None, 1, 3)),
        Compact("longest-run", 5),
        Compact("longest-run", 1000),
        Compact("longest-run", 0),
        Compact("pack-low", None, 0),
        *(Resize(n) for n in (-1, 0, 1, 20, 30, 40, 46, 47, size, size + 1, size + 40, 1 << 40)),
        *(EvictCached(n) for n in (None, -1, 0, 1, 2, 1000)),
        Pin((0, 1)),
        Pin(()),
        Pin((size,)),
        Pin((-1,)),
        Unpin((45,)),
        Unpin((size,)),
        SetPolicy("sjf"),
        SetPolicy("priority"),
        SetWatermark(0.25),
        SetWatermark(2.0),
        SetWatermark(float("nan")),
        SetAutoCompaction("auto", 0.3),
        SetAutoCompaction("auto", -1.0),
        VerifyContents(),
        Pause(),
        SubmitLoad(20, 20, 2),
        SubmitLoad(0, 1),
        SubmitLoad(1, -1),
        SubmitLoad(1, 1, 0),
        SubmitLoad(10**9, 1),
    ]


NUM_COMMANDS = 99


def copied(counters: Counters) -> tuple[int, int]:
    """Blocks and bytes copied so far, resizes aside."""
    return (
        counters.swap_out_blocks + counters.swap_in_blocks + counters.compaction_moved_blocks,
        counters.swap_out_bytes + counters.swap_in_bytes + counters.compaction_moved_bytes,
    )


@pytest.mark.parametrize("number", range(NUM_COMMANDS))
def test_a_plan_keeps_its_promise_and_a_refusal_changes_nothing(number):
    e = crowded()
    command, *_ = commands(e)[number:]
    assert len(commands(e)) == NUM_COMMANDS
    before = state(e)
    counters = msgspec.structs.replace(e.counters)
    plan = e.plan(command)
    assert state(e) == before, "a plan changed something"
    for effect in plan.effects:
        assert effect.before == pytest.approx(NUMBERS[effect.name](e))
    outcome = e.apply(command)
    e.check()
    assert outcome.ok == (plan.refusal is None), outcome.message
    if not outcome.ok:
        assert outcome.message == plan.refusal
        assert outcome.message
        e.counters.integrity_checks -= 1  # the check above
        assert state(e) == before
        return
    for effect in plan.effects:
        assert effect.after == pytest.approx(NUMBERS[effect.name](e)), effect.name
    assert (outcome.moved_blocks, outcome.moved_bytes) == (plan.moved_blocks, plan.moved_bytes)
    if not isinstance(command, Resize):
        blocks, copied_bytes = (after - old for after, old in zip(copied(e.counters), copied(counters), strict=True))
        assert (blocks, copied_bytes) == (plan.moved_blocks, plan.moved_bytes)
    assert e.counters.evictions - counters.evictions == plan.evicted_blocks
    if isinstance(command, Compact) and command.max_moves:
        assert plan.moved_blocks <= command.max_moves
    if isinstance(command, Compact) and command.max_moves is None:
        assert not e.plan(command).moved_blocks
    for _ in range(5):
        e.advance(1)
        e.check()


def test_compaction_that_is_off_is_refused():
    e = crowded(compact="off")
    assert "compaction is off" in e.apply(Compact()).message
    assert e.apply(SetAutoCompaction("manual")).ok
    assert e.apply(Compact()).ok


def test_a_swap_without_a_host_tier_is_refused():
    e = engine([request(20, 20)], num_swap_blocks=0)
    e.advance(1)
    assert "no host tier" in e.apply(SwapOut(0)).message
    assert "no host tier" in e.apply(Preempt(0)).message
    assert e.arrays("host") is None


# -- time --------------------------------------------------------------------------------------------


def traffic(kind: str) -> list[Request]:
    if kind == "chat":
        return list(itertools.islice(chat_requests(5, block_size=16, num_blocks=128), 60))
    rng = np.random.default_rng(3)
    rows = []
    for i in range(40):
        prompt, output = int(rng.integers(1, 200)), int(rng.integers(0, 60))
        ids = np.cumsum(rng.integers(1, 3, prompt // 16)).astype(np.int64)
        rows.append(Request(KeyedContent(prompt + output, ids, 16, i), prompt, float(i * rng.random())))
    return sorted(rows, key=lambda r: r.arrival_s)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("compact", ["manual", "auto"])
@pytest.mark.parametrize("kind", ["chat", "trace"])
def test_skipping_ahead_is_the_same_run_as_stepping(kind, compact, serial):
    settings = {"num_blocks": 128 if kind == "chat" else 40, "serial": serial, "compact": compact, **BOOKS_ONLY}
    settings |= {"num_swap_blocks": 20, "compact_threshold_ratio": 0.02}
    slow, fast = engine(traffic(kind), **settings), engine(traffic(kind), **settings)
    turns = 0
    while slow.advance(1):
        turns += 1
    while fast.advance(10**9):
        pass
    assert slow.done
    assert turns == slow.step
    assert fast.step == slow.step
    assert msgspec.structs.asdict(fast.counters) == msgspec.structs.asdict(slow.counters)
    assert events(fast) == events(slow)
    assert state(fast) == state(slow)
    if compact == "auto" and not serial:
        assert slow.counters.compactions_threshold > 0
    # And with any other budget, at every boundary.
    middle = engine(traffic(kind), **settings)
    again = engine(traffic(kind), **settings)
    while middle.advance(37):
        again.advance(20)
        again.advance(17)
        assert state(middle) == state(again)


def test_the_same_seed_gives_the_same_run():
    def play() -> Engine:
        requests = chat_requests(11, block_size=16, num_blocks=64)
        return engine(requests, num_blocks=64, num_swap_blocks=32, **BOOKS_ONLY)

    one, two = play(), play()
    for e in (one, two):
        e.advance(700)
        e.apply(Fork(e.scheduler.running[0].seq_id))
        e.advance(300)
    assert state(one) == state(two)
    assert events(one) == events(two)


def test_time_passes_while_nothing_runs():
    e = engine([request(16, 0, 1, 100.0)])
    assert e.advance(1000) == 1000
    assert (e.step, e.time_s) == (1000, 25.0)
    assert e.advance(10**9) == 3001
    assert e.done
    assert e.advance(1) == 0


def test_serial_runs_each_request_alone_in_file_order():
    requests = [request(30, 10, seed, at=10.0 - seed) for seed in range(4)]
    e = engine(requests, serial=True)
    while e.advance(1):
        assert len(e.scheduler.running) <= 1
        assert not e.scheduler.waiting
        e.check()
    assert [v.seq_id for v in e.events_from(0) if v.kind == "finish"] == [0, 1, 2, 3]


# -- any run -----------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    num_blocks=st.sampled_from([1, 2, 8]),
    block_size=st.sampled_from([1, 7, 16, 512]),
    swap_blocks=st.sampled_from([0, 1, 4]),
    mode=st.sampled_from(["swap", "recompute"]),
    compact=st.sampled_from(["manual", "auto"]),
    slab=st.sampled_from([None, 1, 3]),
    policy=st.sampled_from(["lru", "fifo", "lfu"]),
    watermark=st.sampled_from([0.0, 0.01, 1.0]),
    data=st.data(),
)
def test_every_request_finishes_or_is_refused(
    num_blocks, block_size, swap_blocks, mode, compact, slab, policy, watermark, data
):
    capacity = num_blocks * block_size
    length = st.integers(1, min(capacity + 2, 40)) | st.integers(max(1, capacity - 2), capacity + 1)
    shape = st.tuples(length, length, st.integers(0, 2), st.sampled_from([0.0, 0.1]))
    requests, at = [], 0.0
    for total, prompt, seed, wait in data.draw(st.lists(shape, min_size=1, max_size=6)):
        at += wait
        stream = tokens(seed, max(total, prompt))  # few seeds, so that prompts share their beginnings
        requests.append(Request(TokenContent(stream), min(total, prompt), at))
    e = engine(
        requests,
        num_blocks=num_blocks,
        block_size=block_size,
        num_swap_blocks=swap_blocks,
        preempt=mode,
        compact=compact,
        compact_threshold_ratio=0.0,
        slab_blocks=slab,
        eviction=policy,
        watermark_ratio=watermark,
    )
    most = 50 + 4 * len(requests) * sum(r.content.num_tokens for r in requests) + round(at / 0.025)
    turns = 0
    while e.advance(1 if capacity < 200 else 10**6):
        e.check()
        turns += 1
        assert turns <= most, "no progress"
    assert e.done
    assert e.stuck_reason is None
    too_large = sum(-(-r.content.num_tokens // block_size) > num_blocks for r in requests)
    assert e.counters.refused == too_large
    assert e.counters.finished == len(requests) - too_large
    assert e.manager.device.num_active == 0
    assert e.manager.host.num_active == 0


def some_command(e: Engine, rng: np.random.Generator) -> Command:
    """Any command on anything, mostly sensible."""
    ids = [s.seq_id for s in e.unfinished()] or [0]
    seq_id, n = int(rng.choice(ids)), int(rng.integers(1, 6))
    blocks = tuple(int(b) for b in rng.integers(0, e.manager.device.num_blocks, n))
    choices: list[Command] = [
        Cancel(seq_id),
        Fork(seq_id),
        Fork(seq_id),
        Preempt(seq_id),
        Preempt(seq_id, "recompute"),
        SwapOut(seq_id),
        SwapIn(seq_id),
        SwapIn(seq_id),
        Compact(GOALS[n % 3], None, n),
        Compact(GOALS[n % 3]),
        Resize(int(rng.integers(16, 48))),
        EvictCached(n),
        Pin(blocks),
        Unpin(tuple(range(e.manager.device.num_blocks))),
        SubmitLoad(10 * n, 15, 1),
        SetAutoCompaction(("off", "manual", "auto")[n % 3], 0.1),
    ]
    return choices[int(rng.integers(len(choices)))]


@pytest.mark.parametrize("seed", range(12))
def test_any_commands_at_any_time_keep_every_law_and_every_promise(seed):
    rng = np.random.default_rng(seed)
    heads = [tokens(100 + i, 64) for i in range(3)]
    requests = [
        request(int(rng.integers(1, 150)), int(rng.integers(0, 80)), i, 0.1 * i, head=heads[i % 3]) for i in range(60)
    ]
    e = engine(
        requests,
        num_blocks=30,
        num_swap_blocks=15,
        slab_blocks=(None, 7)[seed % 2],
        preempt=("swap", "recompute")[seed // 2 % 2],
        eviction=("lru", "fifo", "lfu")[seed % 3],
        prefix_cache=seed != 5,
    )
    for _ in range(400):
        if not e.advance(int(rng.integers(1, 4))) and e.done:
            break
        e.check()
        if rng.random() < 0.3:
            e.apply(some_command(e, rng))  # with copies still under way
            e.check()
        e.settle()
        command = some_command(e, rng)
        plan = e.plan(command)
        before = state(e) if plan.refusal else None
        outcome = e.apply(command)
        assert outcome.ok == (plan.refusal is None), outcome.message
        if before is not None:
            assert state(e) == before
        for effect in plan.effects if outcome.ok else ():
            assert effect.after == pytest.approx(NUMBERS[effect.name](e)), (command, effect)
        assert outcome.moved_blocks == (plan.moved_blocks if outcome.ok else 0)
        e.check()
    # Whatever was done: unpinned, brought back and with room enough, all come to their end.
    assert e.apply(Unpin(tuple(range(e.manager.device.num_blocks)))).ok
    if e.manager.device.num_blocks < 64:
        assert e.apply(Resize(64)).ok
    for _ in range(20000):
        for s in list(e.scheduler.waiting):
            if s.held:
                e.apply(SwapIn(s.seq_id))
        if not e.advance(1):
            break
        e.check()
    assert e.done
    counters = e.counters
    assert counters.finished + counters.cancelled + counters.refused == counters.submitted
    assert (e.manager.device.num_active, e.manager.host.num_active) == (0, 0)


# -- storage that fails ------------------------------------------------------------------------------


class FailingEvery(ListStorage):
    """Every ``n``-th copy fails."""

    def __init__(self, block_size: int, n: int) -> None:
        super().__init__(block_size)
        self.n = n

    def copy(self, job):
        if len(job.sources):
            self.fail_after = 0 if self.copies % self.n == self.n - 1 else None
        return super().copy(job)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_copies_that_fail_stop_no_run_and_break_no_law(every, seed):
    rng = np.random.default_rng(seed)
    requests = [request(int(rng.integers(1, 60)), int(rng.integers(1, 60)), i, 0.1 * i) for i in range(25)]
    config = EngineConfig(
        num_blocks=12, num_swap_blocks=8, stamp=True, slab_blocks=5, compact="auto", compact_threshold_ratio=0.1
    )
    e = Engine(config, requests, storage=FailingEvery(16, every))
    for turn in range(20000):
        if not e.advance(1):
            break
        e.check()
        if turn % 23 == 5 and e.scheduler.running:
            e.apply(Fork(e.scheduler.running[0].seq_id))
        if turn % 31 == 7:
            e.apply(Compact(GOALS[turn % 3]))
        if turn % 47 == 9:
            e.apply(Resize(9 + turn % 7))
        e.check()
    assert e.done
    assert e.counters.finished + e.counters.refused == e.counters.submitted
    assert any(v.kind == "fault" for v in e.events_from(0))


def test_a_failed_command_leaves_the_tables_on_the_old_blocks():
    config = EngineConfig(num_blocks=30, num_swap_blocks=16, stamp=True)
    e = Engine(config, [request(40, 100, seed) for seed in range(3)], storage=FailingEvery(16, 1))
    for _ in range(4):
        e.advance(1)
    assert e.apply(Cancel(0)).ok
    tables = {s.seq_id: e.table(s.seq_id).tolist() for s in e.scheduler.running}
    for command in (SwapOut(1), Compact("pack-low"), Resize(8)):
        outcome = e.apply(command)
        assert not outcome.ok
        assert "fail" in outcome.message
        assert {s.seq_id: e.table(s.seq_id).tolist() for s in e.scheduler.running} == tables
        assert e.manager.device.num_blocks == 30
        e.check()


# -- laws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "spoil"),
    [
        (1, lambda e: setattr(e.manager.device, "num_cached", 99)),
        (2, lambda e: e.manager.device.share(e.table(0))),
        (3, lambda e: e.manager.device._free.put_few([int(e.table(0)[0])])),
        (4, lambda e: e.manager.device.cache._block_of.clear()),
        (5, lambda e: e.manager.storage.write_stamps("device", e.table(0)[:1] * 16, np.zeros(1, np.uint64))),
    ],
)
def test_a_broken_law_is_found_named_and_counted(law, spoil):
    e = engine([request(40, 100, 1)])
    e.advance(1)
    e.check()
    spoil(e)
    with pytest.raises(InvariantViolation) as error:
        e.check()
    assert error.value.law == law or (law == 3 and error.value.law == 1)
    assert e.counters.integrity_faults == 1
    assert e.events_from(0)[-1].kind == "fault"
    assert not e.apply(VerifyContents()).ok


def test_holders_of_a_block():
    first = request(64, 20, 1)
    e = engine([first, request(64, 20, 2, 0.0, head=first.content.stream[:64])])
    e.advance(1)
    block = int(e.table(0)[2])
    assert e.holders(block) == (((0, 2), (1, 2)), 2)
    assert e.holders(block, 1) == (((0, 2),), 2)
    assert e.holders(63) == ((), 0)
    assert e.table(7) is None


def test_the_published_arrays():
    first = request(40, 20, 1)
    e = engine([first, request(33, 1, 2, 0.0, head=first.content.stream[:32])])
    e.advance(1)
    arrays, table, other = e.arrays("device"), e.table(0), e.table(1)
    assert table[:2].tolist() == other[:2].tolist()
    rows = [e.scheduler.find(i).row for i in (0, 1)]
    assert arrays.state[table].tolist() == [2, 2, 2]
    assert arrays.ref_count[table].tolist() == [2, 2, 1]
    assert arrays.fill[table].tolist() == [16, 16, 8]
    assert arrays.owner[table].tolist() == [min(rows), min(rows), rows[0]]
    assert (arrays.fill[other[2]], arrays.owner[other[2]]) == (1, rows[1])
    assert np.all(arrays.hash64[table[:2]] != 0)
    assert arrays.hash64[table[2]] == 0
    run(e)
    arrays = e.arrays("device")
    assert sorted(arrays.state.tolist()) == [0] * 61 + [1] * 3
    assert arrays.fill[arrays.state == 1].tolist() == [16] * 3
    assert np.all(arrays.owner == -1)


def test_allocated_less_freed_is_what_is_held():
    e = engine([request(64, 0, 1), request(64, 3, 1, at=1.0), request(40, 5, 2, at=1.1)], num_blocks=64)
    while e.advance(1):
        counters = e.counters
        assert counters.allocated_blocks - counters.freed_blocks == e.manager.device.num_active


def test_a_step_beyond_what_the_map_can_hold_is_shown_as_the_last():
    e = engine([request(64, 3, 1)], num_blocks=64)
    e.step = 1 << 40
    e.advance(1)
    e.advance(100)
    assert e.done
    assert e.arrays("device").last_used.max() == (1 << 32) - 1


def test_a_resize_shows_which_slabs_keep_their_memory():
    e = Engine(EngineConfig(64, 16, slab_blocks=16, num_swap_blocks=0))
    effects = {effect.name: (effect.before, effect.after) for effect in e.plan(Resize(40)).effects}
    assert effects["slabs in memory"] == (4, 3)  # the third is cut, and stays
    assert e.apply(Resize(40)).ok
    assert e.manager.storage.num_slabs("device") == 3
    assert "slabs in memory" not in {effect.name for effect in e.plan(Compact()).effects}


def test_many_rows_are_freed_in_one_call_each_tail_first():
    manager = BlockManager(EngineConfig(8, 16, geometry="none", num_swap_blocks=0), NoStorage())
    tables = []
    for seed in (1, 2):
        content = TokenContent(tokens(seed, 32))
        row = manager.admit(content.keys(16), 32).row
        manager.publish_keys(row, content.keys(16), 0)
        tables.append((row, manager.tables.table(row).tolist()))
    manager.free_many(np.array([row for row, _ in tables]))
    assert manager.device.num_active == 0
    assert manager.device.eviction_order().tolist() == [*tables[0][1][::-1], *tables[1][1][::-1]]
    check_manager(manager)


def test_events_are_told_from_a_number_on_and_the_newest_of_them():
    e = Engine(EngineConfig(num_blocks=32, geometry="none"))
    for number in range(5000):
        e.emit("command", str(number))

    def told(*asked: int) -> list[str]:
        return [event.text for event in e.events_from(*asked)]

    assert told(0) == [str(n) for n in range(5000 - 4096, 5000)]
    assert told(4990) == [str(n) for n in range(4990, 5000)]
    assert told(4990, 3) == ["4997", "4998", "4999"]
    assert told(4998, 3) == ["4998", "4999"]
    assert told(5000) == told(6000, 3) == told(0, 0) == []
