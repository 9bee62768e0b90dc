"""The mirror: resident blocks laid out by kvtop. Every copy has one place, keeps it, and gives it back."""

from __future__ import annotations

from collections import Counter

import numpy as np
from event_samples import CLEARED, payload, removed, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.config import STEP_S
from allocator.ids import NO_ROW, BlockState
from kvtop.model.mirror import MirrorReading
from kvtop.model.observation import RemoteObservation
from kvtop.model.reduce import reduce
from kvtop.model.remote import EngineRow, RemoteFacts
from kvtop.model.view import View
from kvtop.sources.remote.kv_events import decode
from kvtop.sources.remote.residency import Residency


def told(*batches: bytes, rank: int = 0) -> Residency:
    residency = Residency()
    for batch in batches:
        residency.apply(decode(batch), rank)
    return residency


def mirror_of(residency: Residency, **sizes: int) -> MirrorReading:
    return residency.mirror({int(rank[1:]): size for rank, size in sizes.items()}, "complete")


def shown(reading: MirrorReading) -> Counter[int]:
    arrays = reading.device
    return Counter(arrays.hash64[arrays.state == BlockState.CACHED].tolist())


def test_each_copy_has_a_place_and_the_rest_is_nothing() -> None:
    residency = told(payload(stored([1, 2, 3]), stored([3], 2)))
    reading = mirror_of(residency, r0=10)
    assert reading.device.num_blocks == 10
    assert reading.device.hash64.tolist() == [1, 2, 3, 3, 0, 0, 0, 0, 0, 0]
    assert reading.device.fill.tolist()[:5] == [4, 4, 4, 4, 0]
    assert reading.device.ref_count.tolist() == [0] * 10
    assert reading.device.owner.tolist()[4] == NO_ROW
    (place,) = reading.places
    assert (place.medium, place.rank, place.resident, place.size, place.is_sized) == ("GPU", 0, 4, 10, True)


def test_a_place_is_kept_until_its_copy_goes_and_is_then_taken_again() -> None:
    residency = told(payload(stored([1, 2, 3]), removed(2)))
    assert mirror_of(residency, r0=4).device.hash64.tolist() == [1, 0, 3, 0]
    residency.apply(decode(payload(stored([9]), stored([8]))), 0)
    reading = mirror_of(residency, r0=4)
    assert reading.device.hash64.tolist() == [1, 9, 3, 8]
    assert len(set(reading.device.owner.tolist())) == 3  # 1 and 3 lie on one branch


def test_a_branch_goes_on_in_its_colour_and_a_fork_has_one_of_its_own() -> None:
    residency = told(payload(stored([1, 2])), payload(stored([3], 2)), payload(stored([4], 2), stored([5, 6], 1)))
    residency.apply(decode(payload(stored([7], 4), stored([8]))), 0)
    owners = mirror_of(residency, r0=8).device.owner.tolist()
    trunk, fork, early, other = owners[0], owners[3], owners[4], owners[7]
    assert owners == [trunk, trunk, trunk, fork, early, early, fork, other]
    assert len({trunk, fork, early, other}) == 4


def test_a_request_uses_all_the_blocks_that_it_finds() -> None:
    residency = told(payload(stored([1, 2, 3]), time_s=100.0), payload(stored([4], 2), time_s=101.0))
    step = round(1 / STEP_S)
    assert mirror_of(residency, r0=5).device.last_used.tolist() == [step, step, 0, step, 0]


def test_a_pool_whose_size_is_not_told_ends_where_its_blocks_do() -> None:
    residency = told(payload(stored(list(range(1, 71)))))
    (place,) = mirror_of(residency).places
    assert (place.size, place.is_sized) == (128, False)
    (place,) = mirror_of(residency, r0=50).places  # told smaller than what there is
    assert place.size == 70


def test_ranks_lie_one_after_the_other_and_other_mediums_in_the_host_tier() -> None:
    residency = told(payload(stored([1]), stored([2], medium="CPU"), stored([3], medium="DISK")))
    residency.apply(decode(payload(stored([4]))), 1)
    reading = mirror_of(residency, r0=4, r1=4)
    assert [(p.tier, p.first, p.medium, p.rank) for p in reading.places] == [
        ("device", 0, "GPU", 0),
        ("device", 4, "GPU", 1),
        ("host", 0, "CPU", 0),
        ("host", 64, "DISK", 0),
    ]
    assert reading.device.hash64.tolist() == [1, 0, 0, 0, 4, 0, 0, 0]
    assert reading.host is not None
    assert np.flatnonzero(reading.host.hash64).tolist() == [0, 64]
    residency.apply(decode(payload(CLEARED)), 0)
    assert [p.rank for p in mirror_of(residency, r0=4, r1=4).places] == [1]


def test_what_is_known_of_one_block() -> None:
    residency = told(
        payload(stored([1, 2, 3]), time_s=10.0),
        payload(stored([4], 2), stored([2], 1), stored([2], group_idx=1), time_s=15.0),
        payload(time_s=20.0),
    )
    reading = mirror_of(residency, r0=8)
    block = residency.block_at("device", 1, reading.places)
    assert block is not None
    assert (block.hash64, block.parent64, block.is_first, block.depth, block.tokens) == (2, 1, False, 2, 4)
    assert (block.copies, block.groups, block.branches, block.stores) == (2, (0, 1), 2, 2)
    assert (block.age_s, block.quiet_s) == (10.0, 5.0)
    first = residency.block_at("device", 0, reading.places)
    assert first is not None
    assert (first.parent64, first.is_first, first.depth) == (None, True, 1)
    assert [residency.block_at("device", at, reading.places) for at in (6, 7, 8, -1)] == [None] * 4
    assert residency.block_at("host", 0, reading.places) is None
    residency.apply(decode(payload(removed(1))), 0)
    orphan = residency.block_at("device", 1, mirror_of(residency, r0=8).places)
    assert orphan is not None
    assert orphan.depth is None  # its beginning is gone


def test_a_chain_that_bites_its_tail_has_no_depth() -> None:
    residency = told(payload(stored([1], 2), stored([2], 1)))
    block = residency.block_at("device", 0, mirror_of(residency, r0=4).places)
    assert block is not None
    assert block.depth is None


def test_ages_are_steps_since_the_first_batch() -> None:
    residency = told(payload(stored([1]), time_s=100.0), payload(stored([2], 1), stored([3]), time_s=101.0))
    reading = mirror_of(residency, r0=4)
    assert reading.step == round(1 / STEP_S)
    assert reading.device.last_used.tolist() == [reading.step, reading.step, reading.step, 0]  # 1 was followed


def test_arrays_are_made_anew_only_for_what_has_changed() -> None:
    residency = told(payload(stored([1])))
    first = mirror_of(residency, r0=4)
    again = residency.mirror({0: 4}, "gap: partial", first)
    assert again.device is first.device
    assert again.state == "gap: partial"
    assert residency.mirror({0: 5}, "complete", first).device is not first.device
    residency.apply(decode(payload(removed(1))), 0)
    assert residency.mirror({0: 4}, "complete", first).device is not first.device


def test_a_view_keeps_the_tiers_of_an_unchanged_mirror_and_drops_those_of_a_lost_one() -> None:
    residency = told(payload(stored([1])))
    facts = RemoteFacts("vLLM", None, "http://h:1", (EngineRow(),))
    reading = mirror_of(residency, r0=4)
    view = reduce(View("x"), RemoteObservation(facts, reading), 1.0)
    assert view.mirror is not None
    assert view.maps["device"].numbers.cached == 1
    assert (view.device, view.snapshot) == (None, None)  # nothing of it is exported as a pool of ours
    later = reduce(view, RemoteObservation(facts, residency.mirror({0: 4}, "complete", reading)), 2.0)
    assert later.maps["device"] is view.maps["device"]
    assert reduce(later, RemoteObservation(facts), 3.0).maps == {}


HASHES = st.integers(1, 9)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), HASHES, st.sampled_from(["GPU", "CPU"]), st.integers(0, 1)),
        st.tuples(st.just("remove"), HASHES, st.sampled_from(["GPU", "CPU"]), st.integers(0, 1)),
        st.tuples(st.just("clear"), HASHES, st.just("GPU"), st.just(0)),
    ),
    max_size=40,
)


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_the_map_holds_exactly_the_copies_that_are_resident(events: list[tuple[str, int, str, int]]) -> None:
    residency = Residency()
    for what, h, medium, group in events:
        event = {
            "store": stored([h], medium=medium, group_idx=group),
            "remove": removed(h, medium=medium, group_idx=group),
            "clear": CLEARED,
        }[what]
        residency.apply(decode(payload(event)), 0)
    reading = mirror_of(residency)
    for tier, arrays in (("GPU", reading.device), ("CPU", reading.host)):
        want: Counter[int] = Counter()
        for (_, medium, _, h), copies in residency.copies().items():
            want[h] += copies if medium == tier else 0
        got = Counter() if arrays is None else Counter(arrays.hash64[arrays.state == BlockState.CACHED].tolist())
        assert got == +want
    assert sum(p.resident for p in reading.places) == sum(residency.copies().values())
