"""What events imply of requests, and what other caches would have made of them: against a cache that was really run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from event_samples import CLEARED, LruEngine, chats, payload, removed, stored

from kvtop.attached_advice import UNSEEN, advise_attached
from kvtop.model.what_if import Traffic, WhatIf
from kvtop.sources.remote import what_if as estimating
from kvtop.sources.remote.estimator import EVERY_S, Estimator
from kvtop.sources.remote.feed import Feed
from kvtop.sources.remote.kv_events import decode
from kvtop.sources.remote.lookups import MAX_OPEN, QUIET_S, Lookup, Lookups
from kvtop.sources.remote.residency import Residency
from kvtop.sources.remote.what_if import what_if

CAPTURES = Path(__file__).parents[3] / "shared" / "reference" / "real-captures"
TRUTHS = sorted(CAPTURES.glob("*.truth.jsonl"))


class Told(Residency):
    """A residency that is told events one batch a second."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0

    def take(self, *events: object, after_s: float = 1.0) -> None:
        self.time_s += after_s
        self.apply(decode(payload(*events, time_s=self.time_s)), 0)

    def seen(self) -> list[tuple[list[int], int, int, int]]:
        return [(x.keys, x.hits, x.again, x.repeated) for x in self.lookups[0].newest()]


# Lookups ------------------------------------------------------------------------------------------------------------


def test_a_store_behind_a_resident_block_is_a_request_that_found_it() -> None:
    told = Told()
    told.take(stored([1, 2, 3]))
    told.take(stored([4, 5], 2))
    assert told.seen() == [([1, 2, 3], 0, 0, 0), ([1, 2, 4, 5], 2, 0, 0)]


def test_a_chain_that_goes_on_where_it_ended_is_the_same_request() -> None:
    told = Told()
    told.take(stored([1, 2]))
    told.take(stored([3], 2))
    told.take(stored([4], 3))
    assert told.seen() == [([1, 2, 3, 4], 0, 0, 0)]
    # Once it has been quiet for long, it is over: who goes on from there is somebody else.
    told.take(stored([5], 4), after_s=QUIET_S + 1)
    assert told.seen() == [([1, 2, 3, 4], 0, 0, 0), ([1, 2, 3, 4, 5], 4, 0, 0)]


def test_blocks_that_come_again_after_they_were_gone_are_misses_that_could_be_saved() -> None:
    told = Told()
    told.take(stored([1, 2, 3]))
    told.take(removed(3), removed(2))
    told.take(stored([2, 3], 1))
    assert told.seen()[1] == ([1, 2, 3], 1, 2, 0)


def test_blocks_stored_while_they_are_there_are_no_misses() -> None:
    told = Told()
    told.take(stored([1, 2, 3]))
    told.take(stored([3], 2))  # the last block of a prompt that is asked again
    (_, again) = told.lookups[0].newest()
    assert (again.keys, again.hits, again.again, again.repeated, again.hittable) == ([1, 2, 3], 2, 0, 1, 2)


def test_what_has_no_known_beginning_is_left_out_and_counted() -> None:
    told = Told()
    told.take(stored([5, 6], 4))
    told.take(stored([1, 2, 3]), removed(1))
    told.take(stored([9], 2))
    assert told.lookups[0].unknown == 2
    assert len(told.seen()) == 1


def test_nothing_is_found_across_a_clear() -> None:
    told = Told()
    told.take(stored([1, 2]))
    told.take(CLEARED)
    told.take(stored([1, 2]))
    assert told.seen() == [([1, 2], 0, 0, 0)] * 2
    assert [lookup.epoch for lookup in told.lookups[0].newest()] == [0, 1]


def test_one_group_of_the_device_stands_for_all() -> None:
    told = Told()
    told.take(stored([1, 2], group_idx=3), stored([1, 2], group_idx=4), stored([1, 2], medium="CPU"))
    told.take(stored([7, 8]) | {"token_ids": [1] * 80}, stored([], group_idx=3))
    assert told.seen() == [([1, 2], 0, 0, 0)]


def test_lookups_are_bounded() -> None:
    found = Lookups(max_kept=30)
    told = Told()
    told.lookups[0] = found
    for n in range(40):
        told.take(stored([100 * n, 100 * n + 1]), after_s=QUIET_S + 1)
    assert sum(len(lookup.keys) for lookup in found.done) <= 30
    for n in range(MAX_OPEN + 9):
        told.take(stored([10_000 + n]), after_s=0.0)
    assert len(found._open) == MAX_OPEN


# Estimates ----------------------------------------------------------------------------------------------------------


def estimates_of(requests: list[list[int]], capacity: int) -> tuple[LruEngine, WhatIf]:
    engine, told = LruEngine(capacity), Told()
    for chain in requests:
        told.take(*engine.serve(chain), after_s=QUIET_S + 1)
    lookups = {rank: found.newest() for rank, found in told.lookups.items()}
    return engine, what_if(lookups, capacity, 0, block_size=16, is_told=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_estimates_are_what_a_cache_of_that_size_really_does(seed: int) -> None:
    requests = chats(400, seed)
    engine, made = estimates_of(requests, 256)
    looked = sum(map(len, requests))
    assert made.traffic.hits == engine.hits
    assert (made.traffic.lookups, made.traffic.blocks, made.traffic.unknown) == (400, looked, 0)
    for outcome in made.capacities:
        real = LruEngine(outcome.capacity)
        for chain in requests:
            real.serve(chain)
        assert outcome.hit_ratio == pytest.approx(real.hits / looked), outcome
    by_name = {outcome.name: outcome.hit_ratio for outcome in made.policies}
    assert by_name["LRU"] == pytest.approx(engine.hits / looked, abs=0.002)
    assert len(set(by_name.values())) == 3
    # With hardly any loss, what was there and what had been there are hits.
    assert made.capacities[-1].hit_ratio == pytest.approx((made.traffic.hits + made.traffic.again) / looked, abs=0.002)


@pytest.mark.parametrize("factor", [2, 4])
def test_larger_blocks_hit_in_whole_ones(factor: int) -> None:
    requests = chats(300, 5)
    _, made = estimates_of(requests, 4096)
    whole = sum(_common(chain, requests[:n]) // factor * factor for n, chain in enumerate(requests))
    (outcome,) = [o for o in made.block_sizes if o.capacity == 4096 // factor]
    assert outcome.hit_ratio == pytest.approx(whole / sum(map(len, requests)))
    assert outcome.name == f"{16 * factor} tokens"


def _common(chain: list[int], before: list[list[int]]) -> int:
    """Return the longest beginning that an earlier chain has too."""

    def length(other: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(chain, other, strict=False)) if a != b), min(len(chain), len(other))
        )

    return max(map(length, before), default=0)


def test_what_cannot_be_known_is_unknown() -> None:
    lookups = {0: [Lookup([1, 2, 3], 0, 1.0)]}
    made = what_if(lookups, 8, 6, block_size=0, is_told=False)
    assert [o.hit_ratio for o in made.capacities][:2] == [None, None]
    assert {o.hit_ratio for o in made.policies} == {None}  # 2 blocks cannot hold the request
    assert made.block_sizes[1].name == "2 of its blocks"
    empty = what_if({}, 8, 0, block_size=16, is_told=True)
    assert (empty.traffic, empty.capacities[0].hit_ratio) == (Traffic(), None)
    assert advise_attached(empty) == ()


def test_no_cache_of_any_size_keeps_what_a_clear_has_taken() -> None:
    told = Told()
    for _ in range(3):
        told.take(stored([1, 2, 3, 4]))
        told.take(CLEARED)
    made = what_if({0: told.lookups[0].newest()}, 64, 0, block_size=16, is_told=True)
    outcomes = (*made.capacities, *made.block_sizes, *made.policies)
    assert {outcome.hit_ratio for outcome in outcomes} == {0.0}


def test_the_newest_lookups_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "MAX_REPLAYED", 10)
    lookups = {0: [Lookup([n, n + 1, n + 2, n + 3], 0, float(n)) for n in range(0, 60, 10)]}
    assert what_if(lookups, 64, 0, block_size=16, is_told=True).replayed == 2


@pytest.mark.skipif(not TRUTHS, reason="no recorded events in ../shared/reference")
@pytest.mark.parametrize("truth", TRUTHS, ids=lambda path: path.name.split(".truth")[0])
def test_on_real_engines_the_implied_hits_are_a_close_lower_bound(truth: Path) -> None:
    log = truth.with_name(truth.name.replace(".truth.", ".events."))
    records = [json.loads(line)["frames_hex"] for line in log.read_text().splitlines()]
    moments = [json.loads(line) for line in truth.read_text().splitlines()]
    moment = [m for m in moments if m["next_seq"] <= len(records)][-1]
    residency = Residency()
    feed = Feed(residency)
    for frames in records[: moment["next_seq"]]:
        feed.take([bytes.fromhex(frame) for frame in frames])
    implied = sum(lookup.hits for lookup in residency.lookups[0].newest()) * residency.block_size
    # In a model with a window, most groups' events tell no chain.
    least = 0.5 if "swa" in truth.name else 0.8
    assert least * moment["hit_tokens"] <= implied <= moment["hit_tokens"]


# Words --------------------------------------------------------------------------------------------------------------


def test_advice_says_what_events_cannot_tell() -> None:
    _, made = estimates_of(chats(200, 2), 256)
    told = {advice.topic: advice for advice in advise_attached(made)}
    assert list(told) == ["traffic", "cache size", "block size", "policy"]
    assert UNSEEN in told["traffic"].text
    assert "The engine counts" not in told["traffic"].text
    assert "with 256 blocks (as it is)" in told["cache size"].text
    assert "off by +0.0 points" in told["cache size"].text
    assert told["cache size"].severity == "advice"
    assert "token ids are not kept" in told["block size"].text
    assert "kvtop's own allocator" in told["policy"].text


# The thread ---------------------------------------------------------------------------------------------------------


def test_estimates_are_made_one_at_a_time_and_only_when_asked_for() -> None:
    now, made = 0.0, []
    may_go_on = threading.Event()

    def work() -> WhatIf | None:
        assert may_go_on.wait(10)
        made.append(now)
        return what_if({}, len(made), 0, block_size=0, is_told=True)

    estimator = Estimator(work, clock=lambda: now)
    assert estimator.newest() is None
    assert estimator.newest() is None
    may_go_on.set()
    assert estimator._thread is not None
    estimator._thread.join(10)
    first = estimator.newest()
    assert first is not None
    assert (first.capacity, made) == (1, [0.0])
    now = EVERY_S
    may_go_on.clear()
    assert estimator.newest() is first
    may_go_on.set()
    estimator._thread.join(10)
    assert made == [0.0, EVERY_S]
    estimator.close()
    now = 10 * EVERY_S
    assert estimator.newest() is not first
    assert len(made) == 2
