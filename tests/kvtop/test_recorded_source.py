"""The player: what is due by the clock, winding, jumps, and a door that only plays."""

from __future__ import annotations

import pytest
from recorded_runs import SMALL, KeptBytes, opened, record

from allocator.commands import EvictCached, Pause, Resume, SetSpeed, Step
from kvtop.attachment import Attachment
from kvtop.engine_setup import build_engine
from kvtop.errors import SourceError
from kvtop.model.observation import Focus
from kvtop.recording.frames import RecordingHeader
from kvtop.recording.framing import Mark
from kvtop.recording.writer import RecordedEngine, RecordingWriter
from kvtop.sources.recorded import RecordedOperations, RecordedSource


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(clock: Clock) -> RecordedSource:
    return RecordedSource(opened(record(400, every=10, commands={200: EvictCached(1)})), clock=clock)


def step(source: RecordedSource) -> int:
    return source.read(Focus(), 1.0).snapshot.step


def test_it_plays_at_its_speed(source: RecordedSource, clock: Clock) -> None:
    assert step(source) == 0
    clock.now_s += 1.0
    assert step(source) == 40
    source.set_speed(4.0)
    clock.now_s += 1.0
    assert step(source) == 200
    source.pause()
    clock.now_s += 100.0
    assert step(source) == 200
    assert source.read(Focus(), 1.0).snapshot.phase == "paused"
    assert source.resume()
    clock.now_s += 0.5
    seen = source.read(Focus(), 1.0).snapshot
    assert (seen.step, seen.phase, seen.speed) == (280, "running", 4.0)
    clock.now_s += 100.0
    seen = source.read(Focus(), 1.0).snapshot
    assert (seen.step, seen.phase) == (400, "done")
    assert not source.resume()


def test_winding_stops_at_both_ends(source: RecordedSource) -> None:
    assert source.go_to(105) == 100
    assert source.scrub(-3) == 70
    assert source.scrub(-1000) == 0
    assert source.scrub_time(0.1) == 10
    assert source.scrub_time(2.5) == 110
    assert source.scrub_time(-0.01) == 100
    assert source.scrub_time(10**6) == 400
    assert source.is_paused


def test_jumps(source: RecordedSource) -> None:
    assert source.jump(Mark.COMMAND) == 200
    assert source.jump(Mark.COMMAND) is None
    assert step(source) == 200
    source.go_to(400)
    assert source.jump(Mark.COMMAND, -1) == 200


def test_events_are_told_once_and_belong_to_their_moment(source: RecordedSource) -> None:
    source.go_to(300)
    source.pause()
    events = source.read(Focus(), 1.0).snapshot.events
    assert events
    assert [e.number for e in events] == list(range(events[0].number, events[-1].number + 1))
    assert all(e.step <= 300 for e in events)
    assert source.read(Focus(next_event=events[-1].number + 1), 1.0).snapshot.events == ()
    assert source.read(Focus(max_events=2), 1.0).snapshot.events == events[-2:]
    assert source.read(Focus(max_events=0), 1.0).snapshot.events == ()


def test_a_view_that_is_wound_back_knows_nothing_of_later(source: RecordedSource, clock: Clock) -> None:
    attachment = Attachment(source, RecordedOperations(source), clock)
    source.go_to(390)
    attachment.poll()
    clock.now_s += 1.0
    attachment.poll()
    source.go_to(150)
    view = attachment.poll()
    assert view.snapshot is not None
    assert view.snapshot.step == 150
    assert view.events
    assert all(event.step <= 150 for event in view.events)
    assert len(view.history.get("at_s")) == 1


def test_the_door_plays_and_takes_no_commands(source: RecordedSource) -> None:
    door = RecordedOperations(source)
    assert door.plan(Pause()).refusal is None
    assert door.apply(Pause()).ok
    assert door.apply(Step(2)).message == "step 20"
    assert door.apply(SetSpeed(None)).ok
    assert door.apply(Resume()).ok
    for _ in range(50):
        source.read(Focus(), 1.0)
    assert step(source) == 400
    assert door.plan(EvictCached(1)).refusal == "a recording takes no commands"
    outcome = door.apply(EvictCached(1))
    assert (outcome.ok, outcome.message) == (False, "evict-cached: a recording takes no commands")


def test_a_closed_recording_says_so(source: RecordedSource) -> None:
    source.close()
    for ask in (source.pause, source.resume, lambda: source.scrub(1), lambda: source.read(Focus(), 1.0)):
        with pytest.raises(SourceError, match="closed"):
            ask()


def test_it_answers_the_focus_as_the_engine_did() -> None:
    file = KeptBytes()
    engine, _ = build_engine(SMALL)
    header = RecordingHeader("test", SMALL, 10, has_victims=True)
    recorded = RecordedEngine(engine, RecordingWriter(file, header), every=10)
    recorded.advance(200)
    seen = engine.snapshot(phase="", speed=None, steps_per_s=None)
    tables = {row.seq_id: engine.table(row.seq_id) for row in seen.sequences}
    holders = [engine.holders(block) for block in range(96)]
    victims = engine.next_victims(64)
    recorded.close()
    source = RecordedSource(opened(file.content), paused=True)
    source.go_to(200)
    for seq_id, table in tables.items():
        told = source.read(Focus(seq_id=seq_id), 1.0).focus_table
        assert (table is None) == (told is None)
        assert table is None or (told is not None and told.tolist() == table.tolist())
    for block, (pairs, total) in enumerate(holders):
        found = source.read(Focus(block_id=block), 1.0).focus_block
        assert found is not None
        assert (sorted(found.holders), found.total) == (sorted(pairs), total)
    assert source.read(Focus(num_victims=64), 1.0).next_victims == victims
    assert source.read(Focus(num_victims=3), 1.0).next_victims == victims[:3]
    assert source.read(Focus(), 1.0).next_victims is None
    assert source.read(Focus(seq_id=10**6, block_id=10**6), 1.0).focus_table is None
