"""Recordings hold what happened, are found by step, and never tell anything else, whatever became of their file."""

from __future__ import annotations

import contextlib
import errno
import io
import random

import msgspec
import pytest
from recorded_runs import SMALL, KeptBytes, opened, record, told, values

from allocator.commands import Annotate, EvictCached, Preempt, Resize
from allocator.snapshot import Snapshot
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import UserError
from kvtop.recording.frames import Note, RecordedCommand, RecordingHeader
from kvtop.recording.framing import FOOTER, FORMAT_VERSION, HEAD_BYTES, MAGIC, START_BYTES, Kind, Mark, RecordingError
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.writer import RecordedEngine, RecordingWriter, RecordOrder, default_every, record_engine


def all_told(data: bytes) -> dict[int, tuple[object, ...]]:
    story = [item for item in opened(data).story() if isinstance(item, Moment)]
    return {moment.number: told(moment) for moment in story}


def untimed(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without the real times, which go on between two looks at one step."""
    return msgspec.structs.replace(snapshot, timings=None, copies=None, locks=None)


def test_every_moment_is_what_the_engine_showed() -> None:
    file = KeptBytes()
    engine, _ = build_engine(SMALL)
    recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", SMALL, 1), key_every=5), every=1)
    seen = []
    next_event = 0
    for _ in range(60):
        snapshot = engine.snapshot(phase="running", speed=None, steps_per_s=None, next_event=next_event)
        next_event = snapshot.events[-1].number + 1 if snapshot.events else next_event
        tables = tuple(part.tolist() for part in engine.tables())
        seen.append((untimed(snapshot), values(engine.arrays("device")), values(engine.arrays("host")), tables))
        recorded.advance(1)
    recorded.close()
    recording = opened(file.content)
    assert recording.damage is None
    assert (recording.first_step, recording.last_step) == (0, 60)
    order = [*range(60), *random.Random(1).choices(range(60), k=30)]
    for step in order:
        moment = recording.moment(recording.at(step))
        tables = tuple(part.tolist() for part in moment.tables)
        assert (untimed(moment.snapshot), values(moment.device), values(moment.host), tables) == seen[step]


def test_moments_are_at_multiples_of_their_interval_and_at_the_end() -> None:
    recording = opened(record(50, every=20))
    steps = [m.snapshot.step for m in recording.story() if isinstance(m, Moment)]
    assert steps == [0, 20, 40, 50]
    assert [recording.step_of(recording.at(step)) for step in (-5, 0, 19, 20, 49, 50, 10**9)] == [
        0,
        0,
        0,
        20,
        40,
        50,
        50,
    ]


def test_a_recorded_run_is_the_same_run() -> None:
    plain, _ = build_engine(SMALL)
    while plain.step < 400:
        plain.advance(400 - plain.step)
    last = opened(record(400, every=7)).moment(opened(record(400, every=7)).last)
    assert last.snapshot.counters == plain.counters
    assert values(last.device) == values(plain.arrays("device"))
    plain.close()


def test_commands_are_kept_with_their_step_and_outcome() -> None:
    data = record(40, commands={10: EvictCached(None), 21: Preempt(10**6)})
    commands = [item for item in opened(data).story() if isinstance(item, RecordedCommand)]
    assert [(c.step, c.command, c.outcome.ok) for c in commands] == [
        (10, EvictCached(None), True),
        (21, Preempt(10**6), False),
    ]
    assert all(c.outcome.seconds == 0 for c in commands)


def test_a_resized_pool_is_read_back() -> None:
    recording = opened(record(60, commands={20: Resize(120), 40: Resize(100)}))
    sizes = {step: recording.moment(recording.at(step)).device.num_blocks for step in (16, 20, 39, 40, 60)}
    assert sizes == {16: 96, 20: 120, 39: 120, 40: 100, 60: 100}


def test_marks_lead_to_what_happened() -> None:
    tight = EngineOptions(num_blocks=96, num_swap_blocks=48, geometry="none", speed=None, seed=3)
    recording = opened(record(3000, options=tight, every=10, commands={1000: EvictCached(1)}))
    moments = [item for item in recording.story() if isinstance(item, Moment)]
    for mark, kind in ((Mark.EVICTION, "evict"), (Mark.PREEMPTION, "preempt"), (Mark.COMMAND, "command")):
        expected = [m.number for m in moments if any(e.kind == kind for e in m.snapshot.events)]
        assert expected, kind
        found, at = [], recording.first
        while (number := recording.marked(at, mark, 1)) is not None:
            found.append(number)
            at = number
        assert found == [n for n in expected if n > recording.first]
        back, at = [], recording.last
        while (number := recording.marked(at, mark, -1)) is not None:
            back.append(number)
            at = number
        assert back[::-1] == [n for n in expected if n < recording.last]
    assert recording.marked(recording.first, Mark.FAULT, 1) is None


def test_without_its_index_a_recording_reads_the_same() -> None:
    data = record(120, commands={50: EvictCached(None)})
    unfinished = data[: opened(data)._records.end]
    assert opened(unfinished).damage == "it was not closed"
    whole = all_told(data)
    assert {n: t for n, t in whole.items() if n in all_told(unfinished)} == all_told(unfinished)


@pytest.fixture(scope="module")
def small() -> bytes:
    """A recording with key frames, changes, a command and an index, as small as that gets."""
    options = EngineOptions(num_blocks=24, num_swap_blocks=4, geometry="none", speed=None, seed=3)
    return record(
        20, options=options, every=5, key_every=3, commands={10: EvictCached(None), 13: Annotate("after the eviction")}
    )


@pytest.fixture(scope="module")
def marked(small: bytes, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same with two marks that were set afterwards."""
    path = tmp_path_factory.mktemp("marked") / "run.kvrec"
    path.write_bytes(small)
    recording = Recording.open(path)
    recording.add_notes([Note(5, "here", 1e9)])
    recording.add_notes([Note(15, "and there", 2e9)])
    recording.close()
    return path.read_bytes()


def notes_of(data: bytes) -> list[Note]:
    """Return the marks that can be read of a damaged recording."""
    try:
        return list(opened(data).notes)
    except RecordingError:
        return []


def readable(data: bytes) -> dict[int, tuple[object, ...]]:
    """Return what can be read of a damaged recording, moment by moment."""
    try:
        recording = opened(data)
    except RecordingError:
        return {}
    found = {}
    number: int | None = recording.first
    while number is not None:
        with contextlib.suppress(RecordingError):
            found[number] = told(recording.moment(number))
        number = recording.beside(number, 1)
    return found


def is_whole(data: bytes) -> bool:
    """Return whether all of a recording can be told in order."""
    try:
        return [type(item) for item in opened(data).story()].count(RecordedCommand) == 2
    except RecordingError:
        return False


def test_cut_off_anywhere_it_tells_what_came_before(small: bytes) -> None:
    whole = all_told(small)
    ends = {n: h.end for n, h in ((n, opened(small)._records.locate(n)) for n in whole)}
    for size in range(len(small)):
        found = readable(small[:size])
        assert found == {n: t for n, t in whole.items() if ends[n] <= size}, size


def test_a_flipped_bit_anywhere_is_noticed(small: bytes) -> None:
    whole = all_told(small)
    rng = random.Random(5)
    lost = 0
    for at in range(len(small)):
        damaged = bytearray(small)
        damaged[at] ^= 1 << rng.randrange(8)
        found = readable(bytes(damaged))
        assert found.items() <= whole.items(), at
        lost += found != whole or not is_whole(bytes(damaged))
    # The index may be lost: the heads tell the same.
    assert lost >= opened(small)._records.end


def test_marks_are_appended_and_nothing_is_written_over(small: bytes, marked: bytes) -> None:
    assert marked.startswith(small)
    recording = opened(marked)
    assert recording.damage is None
    assert all_told(marked) == all_told(small)
    assert [(note.step, note.text) for note in recording.notes] == [
        (5, "here"),
        (13, "after the eviction"),
        (15, "and there"),
    ]
    assert [recording.marked(recording.at(step), Mark.NOTE, way) for step, way in ((0, 1), (5, 1), (20, -1))] == [
        recording.at(5),
        recording.at(13),
        recording.at(15),
    ]


def test_marks_cut_off_or_damaged_anywhere_are_left_out_and_told(small: bytes, marked: bytes) -> None:
    whole = list(opened(marked).notes)
    for size in range(len(small), len(marked)):
        found = opened(marked[:size])
        assert found.header == opened(small).header
        assert [note for note in whole if note in found.notes] == list(found.notes), size
        is_between = size in (
            len(small),
            len(small) + (len(marked) - len(small) - 5) // 2,
        )  # the second text is 5 longer
        assert (found.damage is None) == is_between, size
    rng, moments = random.Random(6), all_told(small)
    for at in range(len(small) - 100, len(marked)):
        damaged = bytearray(marked)
        damaged[at] ^= 1 << rng.randrange(8)
        assert all(note in whole for note in notes_of(bytes(damaged))), at
        assert readable(bytes(damaged)).items() <= moments.items(), at
        if at >= len(small):
            assert opened(bytes(damaged)).damage is not None, at


def test_bytes_that_are_lost_or_repeated_in_the_middle_are_noticed(small: bytes) -> None:
    whole = all_told(small)
    heads = [opened(small)._records.locate(n) for n in whole]
    for head in heads:
        assert readable(small[: head.offset] + small[head.end :]).items() <= whole.items()
        again = small[: head.end] + small[head.offset :]
        assert readable(again).items() <= whole.items()


def test_a_command_that_is_lost_is_noticed(small: bytes) -> None:
    recording = opened(small)
    number = next(n for n in range(1, recording.last) if recording._records.locate(n).kind is Kind.COMMAND)
    head = recording._records.locate(number)
    assert is_whole(small)
    without = opened(small[: head.offset] + small[head.end :])
    assert without.last_step == head.step
    assert without.damage is not None
    assert "left out" in without.damage


def test_an_end_that_never_reached_the_disk_is_left_out(small: bytes) -> None:
    recording = opened(small)
    last = recording._records.locate(recording.last)
    hollow = small[: last.offset + HEAD_BYTES] + bytes(last.length)
    read = opened(hollow)
    assert read.last < recording.last
    assert read.damage is not None
    assert "left out" in read.damage


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not a recording"),
        (b"no recording at all", "is not a recording"),
        (MAGIC + (FORMAT_VERSION + 1).to_bytes(4, "little"), f"has recording format {FORMAT_VERSION + 1}"),
        (MAGIC + FORMAT_VERSION.to_bytes(4, "little"), "before its first moment"),
    ],
)
def test_what_is_no_recording_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(RecordingError, match=text):
        opened(data)


def test_a_wrong_index_is_not_trusted(small: bytes) -> None:
    for offset in (0, START_BYTES, len(small), 2**64 - 1):
        assert readable(small[: -FOOTER.size] + FOOTER.pack(offset, b"kvtopend")) == all_told(small)


class FullDisk(io.BytesIO):
    """A file with room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: object) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data)[: self.room])  # type: ignore[call-overload]
        self.room -= taken
        return taken


def test_a_full_disk_ends_the_recording_and_not_the_run() -> None:
    engine, _ = build_engine(SMALL)
    file = FullDisk(20_000)
    recorded = RecordedEngine(engine, RecordingWriter(file, RecordingHeader("test", SMALL, 1)), every=1)
    while recorded.step < 300:
        recorded.advance(10)
    assert recorded.failure is not None
    assert "No space left" in recorded.failure
    snapshot = recorded.snapshot(phase="running", speed=None, steps_per_s=None)
    assert recorded.failure in snapshot.notes
    recorded.close()


def test_an_existing_file_is_not_written_over(tmp_path: object) -> None:
    path = f"{tmp_path}/run.kvrec"
    engine, _ = build_engine(SMALL)
    record_engine(engine, SMALL, RecordOrder(path)).close()
    again, _ = build_engine(SMALL)
    with pytest.raises(UserError, match="exists already"):
        record_engine(again, SMALL, RecordOrder(path))
    again.close()
    recording = Recording.open(path)
    assert recording.header.options == SMALL
    recording.close()


def test_the_interval_grows_with_the_pool() -> None:
    assert default_every(SMALL, every_step=True) == 1
    assert default_every(SMALL, every_step=False) == 40
    assert default_every(EngineOptions(num_blocks=2**20, num_swap_blocks=0), every_step=True) == 64
