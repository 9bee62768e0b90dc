"""A reader that falls behind: it says so, and what it knows in the end is exactly what the engine holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
from event_samples import CLEARED, Engine, Publisher, removed, stored
from fake_engine import until

from kvtop.sources.remote.subscriber import Subscriber

#: Blocks a batch, so that batches are large and the system's own buffers hold only a few hundred of them.
WIDE = 400
#: Messages that either side keeps.
QUEUE = 8
TIMEOUT_S = 30.0

#: Starts a subscriber of a publisher.
Following: TypeAlias = Callable[..., Subscriber]


class Storm:
    """A busy engine: stores, removals, and what is resident after them."""

    def __init__(self, publisher: Publisher, seed: int) -> None:
        self.publisher = publisher
        self.resident: Counter[int] = Counter()
        self._rng = random.Random(seed)
        self._order: list[int] = []

    def blow(self, batches: int) -> None:
        for _ in range(batches):
            new = [self._rng.getrandbits(63) for _ in range(WIDE)]
            self._order += new
            events = [stored(new)]
            self.resident.update(new)
            if len(self._order) > 20 * WIDE:
                gone, self._order = self._order[:WIDE], self._order[WIDE:]
                self.resident.subtract(gone)
                events.append(removed(*gone))
            self.publisher.publish(*events)

    def breathe(self) -> None:
        """Store one block."""
        h = self._rng.getrandbits(63)
        self.resident[h] += 1
        self.publisher.publish(stored([h]))


@pytest.fixture
def publisher():
    publisher = Publisher(with_topic=True, queue=QUEUE)
    yield publisher
    publisher.close()


@pytest.fixture
def following() -> Iterator[Following]:
    """Start subscribers of a publisher, and close them in the end, whatever comes of the test."""
    subscribers: list[Subscriber] = []

    def follow(publisher: Publisher, wall: Callable[[], float] = lambda: 0.0) -> Subscriber:
        subscriber = Subscriber([publisher.endpoint], replay_quiet_s=0.5, queue=QUEUE, wall=wall)
        subscribers.append(subscriber)
        subscriber.start()
        publisher.wait_for_subscriber()
        return subscriber

    yield follow
    for subscriber in subscribers:
        subscriber.close()


def residents(subscriber: Subscriber) -> Counter[int]:
    count: Counter[int] = Counter()
    for (_, _, _, h), copies in subscriber.copies().items():
        count[h] += copies
    return count


def catches_up(subscriber: Subscriber, storm: Storm) -> None:
    """Wait until all is applied, while the engine goes on slowly: only a later batch tells that others were dropped."""

    def is_there() -> bool:
        facts = subscriber.facts()
        if facts.batches + facts.missed >= len(storm.publisher.engine.sent):
            return True
        storm.breathe()
        return False

    until(is_there, TIMEOUT_S)


def test_dropped_batches_come_from_the_buffer_and_nothing_is_lost(publisher: Publisher, following: Following) -> None:
    storm, subscriber = Storm(publisher, 1), following(publisher)
    storm.blow(3)
    catches_up(subscriber, storm)
    with subscriber._lock:  # the reader stands still, and the sender drops what nobody takes
        taken = subscriber._facts.batches
        storm.blow(600)
        assert subscriber._facts.batches == taken
    storm.blow(1)
    catches_up(subscriber, storm)
    facts = subscriber.facts()
    assert residents(subscriber) == +storm.resident
    assert (facts.state, facts.gaps, facts.missed, facts.drift) == ("complete", 0, 0, 0)
    assert facts.replayed > 100


def test_what_no_buffer_has_any_more_is_told_until_the_cache_is_cleared(
    publisher: Publisher, following: Following
) -> None:
    publisher.engine.buffer = 20
    storm, subscriber = Storm(publisher, 2), following(publisher)
    storm.blow(3)
    catches_up(subscriber, storm)
    with subscriber._lock:
        storm.blow(600)
    storm.blow(1)
    catches_up(subscriber, storm)
    facts = subscriber.facts()
    assert facts.state == "gap: partial"
    assert facts.gaps >= 1
    assert facts.missed > 100
    assert facts.batches + facts.missed == len(publisher.engine.sent)
    publisher.publish(CLEARED)
    storm.resident.clear()
    storm.breathe()
    catches_up(subscriber, storm)
    assert (subscriber.facts().state, residents(subscriber)) == ("complete", +storm.resident)


def test_many_pauses_end_in_the_exact_state(publisher: Publisher, following: Following) -> None:
    storm, subscriber, rng = Storm(publisher, 3), following(publisher), random.Random(3)
    for _ in range(6):
        with subscriber._lock:
            storm.blow(rng.randint(1, 250))
        storm.blow(rng.randint(0, 5))
    storm.blow(1)
    catches_up(subscriber, storm)
    assert residents(subscriber) == +storm.resident
    assert subscriber.facts().state == "complete"


def test_a_reader_that_keeps_finding_more_than_it_takes_says_so(
    publisher: Publisher, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtop.sources.remote import subscriber as module

    monkeypatch.setattr(module, "_AT_ONCE", 1)
    monkeypatch.setattr(module, "_BEHIND_TURNS", 2)
    storm, subscriber = Storm(publisher, 4), following(publisher)
    seen: set[str] = set()
    take = subscriber._feeds[0][1].take

    def slowly(frames: list[bytes]) -> None:
        take(frames)
        seen.add(subscriber._state())

    subscriber._feeds[0][1].take = slowly  # type: ignore[method-assign]
    with subscriber._lock:
        storm.blow(QUEUE)
    storm.blow(1)
    catches_up(subscriber, storm)
    assert "falling behind: partial" in seen
    until(lambda: subscriber.facts().state == "complete", TIMEOUT_S)
    assert residents(subscriber) == +storm.resident


def test_how_far_behind_is_measured_against_the_best_and_not_between_clocks(
    publisher: Publisher, following: Following
) -> None:
    now_s = 5000.0  # the engine's clock begins at 0 and goes on by 1 a batch
    subscriber = following(publisher, wall=lambda: now_s)
    publisher.publish(stored([1]))
    until(lambda: subscriber._lag_s is not None, TIMEOUT_S)
    assert subscriber.facts().behind_s == 0.0
    now_s = 5031.0
    publisher.publish(stored([2]))
    until(lambda: subscriber.facts().batches == 2, TIMEOUT_S)
    until(lambda: subscriber.facts().behind_s == 30.0, TIMEOUT_S)


def test_an_engine_started_anew_in_the_middle_of_a_storm(publisher: Publisher, following: Following) -> None:
    storm, subscriber = Storm(publisher, 5), following(publisher)
    storm.blow(50)
    catches_up(subscriber, storm)
    with subscriber._lock:
        storm.blow(300)
        publisher.engine = Engine(time_s=10_000.0)
        storm.resident.clear()
        storm._order.clear()
        storm.blow(300)

    def is_right() -> bool:
        if residents(subscriber) == +storm.resident:
            return True
        storm.breathe()
        return False

    until(is_right, TIMEOUT_S)
    facts = subscriber.facts()
    assert facts.restarts >= 1  # what was still queued of the old one looks like yet another
    assert facts.state == "complete"
