"""Cache events → residency: every schema and hash form, gaps, restarts, replays, lies; and recorded logs."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from event_samples import CLEARED, Engine, Publisher, message, pack, payload, removed, stored
from fake_engine import until
from hypothesis import given
from hypothesis import strategies as st

from kvtop.errors import UserError
from kvtop.sources.remote.feed import END, BadFraming, Feed, unframe
from kvtop.sources.remote.kv_events import BadBatch, Batch, Cleared, Removed, Stored, decode, hash_of
from kvtop.sources.remote.probe import EventEndpoint
from kvtop.sources.remote.residency import Residency
from kvtop.sources.remote.subscriber import Subscriber

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
CAPTURES = REFERENCE / "real-captures"
SAMPLES = REFERENCE / "kv_event_samples.jsonl"
LOGS = sorted(CAPTURES.glob("*.events.jsonl"))
needs_reference = pytest.mark.skipif(not SAMPLES.exists(), reason="no recorded events in ../shared/reference")


def residents(residency: Residency) -> Counter[int]:
    count: Counter[int] = Counter()
    for (_, _, _, h), copies in residency.copies().items():
        count[h] += copies
    return count


# Decoding -----------------------------------------------------------------------------------------------------------


@needs_reference
def test_every_sample_is_read_or_refused_as_it_says() -> None:
    read = 0
    for line in SAMPLES.read_text().splitlines():
        sample = json.loads(line)
        if sample["channel"] not in ("pub", "replay-reply", "replay-end"):
            continue
        frames = [bytes.fromhex(frame) for frame in sample["frames_hex"]]
        expect = sample.get("expect")
        if expect == "bad-framing":
            with pytest.raises(BadFraming):
                unframe(frames)
            continue
        number, body = unframe(frames)
        if sample["channel"] == "replay-end":
            assert number == END
            continue
        if expect == "decode-error":
            with pytest.raises(BadBatch):
                decode(body)
            continue
        batch = decode(body)
        assert batch.broken == 0, sample["description"]
        told = sample["decoded"].get("payload")
        unknown = 1 if "Unknown event type" in sample["description"] else 0
        assert batch.unknown == unknown, sample["description"]
        if told is not None:
            assert len(batch.events) + unknown == len(told[1])
        read += 1
    assert read > 35


def test_array_and_map_of_one_event_are_equal() -> None:
    whole = ["BlockStored", [7], 3, [1, 2, 3, 4], 4, None, "cpu", None, None, 2, "full_attention", None]
    as_map = stored([7], 3, medium="cpu", group_idx=2, some_new_field=[1])
    assert decode(payload(whole)).events == decode(payload(as_map)).events == (Stored((7,), 3, True, 4, "CPU", 2, 4),)
    assert decode(payload(["BlockRemoved", [7], "GPU", 1])).events == (Removed((7,), "GPU", 1),)
    assert decode(payload(["BlockRemoved", [7]])).events == (Removed((7,), "GPU", 0),)
    assert decode(payload(["AllBlocksCleared"], CLEARED)).events == (Cleared(), Cleared())


@pytest.mark.parametrize("value", [-1, (1 << 64) - 1, b"\xff" * 8, b"\x00" * 24 + b"\xff" * 8])
def test_one_hash_in_every_form(value: object) -> None:
    assert hash_of(value) == (1 << 64) - 1


@pytest.mark.parametrize("value", [True, None, "7", b"short", 1.0, [1]])
def test_what_is_no_hash(value: object) -> None:
    with pytest.raises(BadBatch):
        hash_of(value)


def test_unknown_and_broken_events_do_not_cost_the_others() -> None:
    batch = decode(
        pack(
            [
                1,
                [
                    {"type": "BlockMoved"},
                    ["Nonsense", 1],
                    stored([1]),
                    {"type": "BlockStored"},
                    stored(["x"]),
                    stored([1], size=4) | {"block_size": -1},
                    removed(2, group_idx="a"),
                    [],
                    7,
                    removed(3, medium=5),
                ],
                "rank?",
                "more",
            ]
        )
    )
    assert (len(batch.events), batch.unknown, batch.broken, batch.rank) == (1, 2, 7, None)


def test_blocks_without_tokens_or_with_a_window_tell_no_chain() -> None:
    def is_chain(event: dict[str, Any]) -> bool:
        (read,) = decode(payload(event)).events
        assert isinstance(read, Stored)
        return read.is_chain

    assert is_chain(stored([1, 2]))
    assert is_chain(stored([1, 2]) | {"token_ids": [1] * 7})  # a shorter last page
    assert not is_chain(stored([1, 2]) | {"token_ids": [1] * 80})  # only the tail of a window
    assert not is_chain(stored([1, 2]) | {"token_ids": [], "block_size": 0})
    assert not is_chain(stored([]) | {"token_ids": [1] * 8})


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_no_batch(body: bytes) -> None:
    try:
        batch = decode(body)
    except BadBatch:
        return
    assert isinstance(batch, Batch)


@given(
    st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.binary(max_size=9), st.lists, max_leaves=9)
)
def test_any_events_are_read_without_a_crash(events: object) -> None:
    feed = Feed(Residency())
    feed.take([b"", bytes(8), pack([1.0, [events, {"type": "BlockStored", "block_hashes": events}], 0])])
    assert feed.broken >= 1


# Residency ----------------------------------------------------------------------------------------------------------


def test_copies_are_counted_and_removals_of_nothing_are_drift() -> None:
    residency = Residency()
    residency.apply(decode(payload(stored([1, 2]), stored([2], 1))), 0)
    assert residents(residency) == {1: 1, 2: 2}
    residency.apply(decode(payload(removed(2, 2, 2, 9), time_s=11.0)), 0)
    assert (residents(residency), residency.drift, residency.mean_life_s) == ({1: 1}, 2, 10.0)
    assert (residency.stored, residency.removed) == (3, 4)


def test_mediums_groups_and_ranks_are_apart() -> None:
    residency = Residency()
    residency.apply(decode(payload(stored([1]), stored([1], medium="CPU_PINNED"), stored([1], group_idx=1))), 0)
    residency.apply(decode(payload(stored([1]), stored([5]))), 1)
    assert residency.by_medium() == (("GPU", 0, 2), ("GPU", 1, 2), ("CPU_PINNED", 0, 1))
    assert residency.distinct == 2
    residency.apply(decode(payload(removed(1))), 0)
    residency.apply(decode(payload(CLEARED)), 1)
    assert residency.copies() == {(0, "CPU_PINNED", 0, 1): 1, (0, "GPU", 1, 1): 1}


def test_the_tree_of_prefixes() -> None:
    residency = Residency()
    residency.apply(decode(payload(stored([1, 2, 3]), stored([10], 2, size=4), time_s=5.0)), 0)
    residency.apply(decode(payload(stored([20, 21]), stored([3], 2), time_s=8.0)), 0)
    first, second = residency.prefixes()
    assert (first.hash64, first.depth, first.blocks, first.branches, first.age_s) == (2, 2, 4, 2, 3.0)
    assert (second.hash64, second.depth, second.blocks, second.branches, second.age_s) == (21, 2, 2, 0, 0.0)
    residency.apply(decode(payload(removed(1))), 0)
    # What is left of the first has lost its beginning: cached, and no prefix that a request could find.
    assert [line.hash64 for line in residency.prefixes()] == [21]
    assert residency.distinct == 5


def test_chains_that_lie_end() -> None:
    residency = Residency()
    residency.apply(decode(payload(stored([1], 2), stored([2], 1), stored([3], 3), stored([4, 4, 4]))), 0)
    assert [line.hash64 for line in residency.prefixes()] == [4]


def test_blocks_are_bounded() -> None:
    residency = Residency(max_blocks=3)
    residency.apply(decode(payload(stored([1, 2, 3, 4, 5]))), 0)
    assert (residency.distinct, residency.is_full) == (3, True)
    residency.apply(decode(payload(CLEARED)), 0)
    assert (residency.distinct, residency.is_full) == (0, False)


# Order --------------------------------------------------------------------------------------------------------------


def test_joining_at_the_start_is_complete() -> None:
    engine, residency = Engine(), Residency()
    feed = Feed(residency, replay=engine.replay)
    feed.join()
    feed.take(engine.publish(stored([1])))
    assert (feed.trouble, feed.batches, feed.gaps) == (None, 1, 0)


def test_joining_late_takes_the_past_from_the_buffer() -> None:
    engine, residency = Engine(), Residency()
    for h in range(5):
        engine.publish(stored([h]))
    feed = Feed(residency, replay=engine.replay)
    feed.join()
    assert (set(residents(residency)), feed.trouble, feed.replayed) == ({0, 1, 2, 3, 4}, None, 5)
    # What was in flight while the replay was served comes again, and is not taken again.
    feed.take([b"kv", (4).to_bytes(8, "big"), engine.sent[4][1]])
    assert (feed.restarts, residents(residency)[4]) == (0, 1)


def test_joining_too_late_says_so_until_the_cache_is_cleared() -> None:
    engine, residency = Engine(buffer=2), Residency()
    for h in range(5):
        engine.publish(stored([h]))
    feed = Feed(residency, replay=engine.replay)
    feed.join()
    assert (set(residents(residency)), feed.trouble, feed.gaps) == ({3, 4}, "joined late", 0)
    feed.take(engine.publish(CLEARED))
    assert (set(residents(residency)), feed.trouble) == (set(), None)


def test_a_gap_is_filled_by_replay_or_told() -> None:
    engine, residency = Engine(buffer=3), Residency()
    feed = Feed(residency, replay=engine.replay)
    feed.take(engine.publish(stored([0])))
    engine.publish(stored([1]))
    feed.take(engine.publish(stored([2])))
    assert (set(residents(residency)), feed.gaps, feed.replayed, feed.trouble) == ({0, 1, 2}, 0, 1, None)
    for h in range(3, 9):
        engine.publish(stored([h]))
    feed.take(engine.publish(stored([9])))
    assert (set(residents(residency)), feed.gaps, feed.trouble) == ({0, 1, 2, 7, 8, 9}, 1, "gap")
    asked = len(engine.asked)
    feed.take(engine.publish(stored([10])))
    assert len(engine.asked) == asked  # one hole is asked for once


@pytest.mark.parametrize("missed", [0, 1, 2, 3, 4, 5, 7])
def test_an_engine_started_anew_is_noticed(missed: int) -> None:
    first, second, residency = Engine(), Engine(time_s=100.0), Residency()
    feed = Feed(residency, replay=first.replay)
    for h in range(4):
        feed.take(first.publish(stored([h])))
    feed._replay = second.replay
    for h in range(10, 10 + missed):
        second.publish(stored([h]))
    feed.take(second.publish(stored([99])))
    if missed == 4:  # its number is the very next one: only somebody else can know
        assert feed.restarts == 0
        feed.begin_again()
    assert (set(residents(residency)), feed.restarts, feed.trouble) == ({*range(10, 10 + missed), 99}, 1, None)


def test_an_unreadable_batch_is_told_and_the_reader_goes_on() -> None:
    engine, residency = Engine(), Residency()
    feed = Feed(residency)
    feed.take(engine.publish(stored([0])))
    engine.publish(stored([1]))
    feed.take([b"kv", (1).to_bytes(8, "big"), b"\xc1"])
    feed.take([b"kv", b"short", b""])
    feed.take([b"one"])
    feed.take(engine.publish(stored([2])))
    assert (set(residents(residency)), feed.broken, feed.gaps) == ({0, 2}, 3, 0)
    assert feed.trouble == "unreadable batch"


def test_a_replay_that_lies_ends() -> None:
    residency = Residency()
    numbers = [0, 1, 0, 1, 0, 5, 2, 0] * 20

    def replay(start: int) -> Iterator[tuple[int, bytes]]:
        return iter([(n, payload(stored([i]))) for i, n in enumerate(numbers)])

    feed = Feed(residency, replay=replay)
    feed.join()
    feed.take(message(40, stored([1])))
    assert feed.restarts >= 1
    assert feed.trouble is not None


def test_random_loss_with_a_whole_buffer_loses_nothing() -> None:
    rng = random.Random(5)
    engine, residency, want = Engine(), Residency(), Counter[int]()
    feed = Feed(residency, replay=engine.replay)
    for _ in range(300):
        h = rng.randrange(20)
        if want[h] and rng.random() < 0.5:
            frames = engine.publish(removed(h))
            want[h] -= 1
        else:
            frames = engine.publish(stored([h]))
            want[h] += 1
        if rng.random() < 0.7:
            feed.take(frames)
    feed.take(engine.publish(CLEARED if rng.random() < 0 else stored([77])))
    want[77] += 1
    assert residents(residency) == +want
    assert (feed.gaps, feed.restarts, feed.trouble, residency.drift) == (0, 0, None, 0)


# Recorded logs ------------------------------------------------------------------------------------------------------


def implied(events: list[Any], count: Counter[tuple[str, int, int]]) -> None:
    """The plainest reading of one batch's events, as a check: a count by medium, group and hash."""

    def plain(value: Any) -> int:
        return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % (1 << 64)

    for event in events:
        if isinstance(event, dict):
            tag, hashes = event["type"], event.get("block_hashes", [])
            medium, group = event.get("medium"), event.get("group_idx")
        else:
            tag, hashes = event[0], event[1] if len(event) > 1 else []
            places = {"BlockStored": (6, 9), "BlockRemoved": (2, 3)}.get(tag, (99, 99))
            medium, group = (event[p] if len(event) > p else None for p in places)
        if tag == "AllBlocksCleared":
            count.clear()
        for h in hashes:
            key = (medium or "GPU", group or 0, plain(h))
            count[key] += 1 if tag == "BlockStored" else -1
            if count[key] <= 0:
                del count[key]


@needs_reference
@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name.removesuffix(".events.jsonl"))
def test_a_recorded_log_ends_with_the_blocks_it_implies(log: Path) -> None:
    residency = Residency()
    feeds: dict[int, Feed] = {}
    want: dict[int, Counter[tuple[str, int, int]]] = {}
    first: dict[int, int] = {}
    num = 0
    for line in log.read_text().splitlines():
        record = json.loads(line)
        frames = [bytes.fromhex(frame) for frame in record["frames_hex"]]
        body = msgspec.msgpack.decode(frames[2])
        rank = (body[2] if len(body) > 2 else 0) or 0
        feeds.setdefault(rank, Feed(residency, rank)).take(frames)
        first.setdefault(rank, int.from_bytes(frames[1], "big"))
        implied(body[1], want.setdefault(rank, Counter()))
        num += 1
    assert num > 3
    for rank, feed in feeds.items():
        got = {(m, g, h): n for (r, m, g, h), n in residency.copies().items() if r == rank}
        assert got == dict(want[rank])
        assert (feed.broken, feed.unknown, feed.gaps, feed.restarts) == (0, 0, 0, 0)
        if first[rank] == 0:
            assert feed.trouble is None
    assert residency.drift == 0 or any(first.values())


@needs_reference
@pytest.mark.parametrize("truth", sorted(CAPTURES.glob("*.truth.jsonl")), ids=lambda path: path.name.split(".truth")[0])
def test_at_each_moment_the_events_tell_what_the_pool_itself_holds(truth: Path) -> None:
    log = truth.with_name(truth.name.replace(".truth.", ".events."))
    records = [json.loads(line)["frames_hex"] for line in log.read_text().splitlines()]
    residency = Residency()
    feed, done, moments = Feed(residency), 0, 0
    for line in truth.read_text().splitlines():
        moment = json.loads(line)
        if moment["next_seq"] > len(records):
            break
        while done < moment["next_seq"]:
            feed.take([bytes.fromhex(frame) for frame in records[done]])
            done += 1
        want = {}
        for key, copies in moment["cached_copies"].items():
            group, _, h = key.partition(":")
            try:
                want[int(group), int(h) % (1 << 64)] = copies
            except ValueError:
                want[int(group), int(h[-16:], 16)] = copies
        got: Counter[tuple[int, int]] = Counter()
        for (_, _, group_id, h64), copies in residency.copies().items():
            got[group_id, h64] += copies
        assert got == want
        moments += 1
    assert moments > 3


# Sockets ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def followed(publisher: Publisher) -> Iterator[Subscriber]:
    """A subscriber of the publisher, not started; both are closed, whatever comes of the test."""
    subscriber = Subscriber([publisher.endpoint], replay_quiet_s=0.3)
    try:
        yield subscriber
    finally:
        subscriber.close()
        subscriber.close()
        publisher.close()


@pytest.mark.parametrize("with_topic", [True, False])
@pytest.mark.parametrize("end_marker", [True, False])
def test_a_stream_over_sockets(with_topic: bool, end_marker: bool) -> None:
    publisher = Publisher(with_topic=with_topic, end_marker=end_marker)
    publisher.publish(stored([1, 2]))  # nobody listens yet
    with followed(publisher) as subscriber:
        assert subscriber.facts().state == "no events yet"
        subscriber.start()
        publisher.wait_for_subscriber()
        publisher.publish(stored([3], 2), {"type": "New"})
        until(lambda: subscriber.facts().batches == 2)
        facts = subscriber.facts()
        assert (facts.state, facts.resident, facts.distinct, facts.unknown) == ("complete", (("GPU", 0, 3),), 3, 1)
        assert facts.replayed >= 1
        assert len(subscriber.copies()) == 3
        # The prefixes are worked out only where that takes a small share of the time, so they may come later.
        until(lambda: [line.depth for line in subscriber.facts().prefixes] == [3])
        # Somebody else learned that the engine was started anew: its numbering goes on as if nothing had happened.
        publisher.engine.sent = []
        publisher.publish(stored([9]))
        until(lambda: subscriber.facts().restarts > 0)
        assert (subscriber.facts().restarts, subscriber.facts().distinct) == (1, 1)


def test_a_server_that_says_it_was_started_anew_is_joined_again() -> None:
    publisher = Publisher(with_topic=True)
    publisher.publish(stored([1]))
    with followed(publisher) as subscriber:
        subscriber.start()
        subscriber.server_restarted()
        until(lambda: subscriber.facts().restarts > 0)
        facts = subscriber.facts()
        assert (facts.restarts, facts.distinct, facts.state) == (1, 1, "complete")


def test_one_that_was_never_started_leaves_nothing_open() -> None:
    with followed(Publisher(with_topic=True)) as subscriber:
        context = subscriber._context
        assert not context.closed
    assert context.closed


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(UserError, match="--events"):
        Subscriber([EventEndpoint(0, "carrier-pigeon://x")])
