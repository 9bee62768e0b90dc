"""In what two moments of two runs differ, and where two recordings begin to. Pure, but for reading recordings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from allocator.block_map import FIELDS, BlockArrays
from allocator.events import Event
from allocator.ids import BlockState
from allocator.snapshot import SequenceRow, Snapshot
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.tables import Tables, table_of

#: What belongs to the pace of a run, or to who looked on, and not to the run; and what is compared in a way of its own.
_LEFT_OUT: Final = {
    "phase": "",
    "speed": None,
    "steps_per_s": None,
    "notes": (),
    "device": "",
    "events": (),
    "sequences": (),
    "timings": None,
    "copies": None,
    "locks": None,
    # Reuse is worked out a little at a time: how much is told depends on where turns end, not only on the run.
    "reuse": None,
}
_MAX_TOLD: Final = 8
#: What the block arrays are called.
_ARRAYS: Final = {
    "hash64": "content",
    "owner": "first holder's row",
    "last_used": "last use",
    "ref_count": "holders",
    "fill": "tokens",
    "state": "state",
    "flags": "flags",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs differ first.

    Attributes:
        step: The step, or ``None`` when they do not.
        same_until: The last step that both have and at which all was the same; ``None`` when there is none.
        what: In what they differ, a line each.
    """

    step: int | None
    same_until: int | None
    what: tuple[str, ...] = ()


def first_difference(left: Recording, right: Recording) -> Difference:
    """Return where two recordings differ first, at the steps that both have; events count from the first of them on.

    Raises:
        RecordingError: One is damaged before that.
    """
    same_until = None
    lefts, rights = _by_step(left), _by_step(right)
    a, b = next(lefts, None), next(rights, None)
    ours: list[Event] = []
    theirs: list[Event] = []
    while a is not None and b is not None:
        if a[0].snapshot.step < b[0].snapshot.step:
            ours += a[1]
            a = next(lefts, None)
        elif a[0].snapshot.step > b[0].snapshot.step:
            theirs += b[1]
            b = next(rights, None)
        else:
            what = [*differences(a[0], b[0])]
            if same_until is not None or left.header.cut == right.header.cut:
                what += _of_events([*ours, *a[1]], [*theirs, *b[1]])
            if what:
                return Difference(a[0].snapshot.step, same_until, tuple(what[:_MAX_TOLD]))
            same_until = a[0].snapshot.step
            ours, theirs = [], []
            a, b = next(lefts, None), next(rights, None)
    return Difference(None, same_until)


def differences(left: Moment, right: Moment) -> tuple[str, ...]:
    """Return in what two moments differ, events aside, a line each, at most eight; empty when they are the same."""
    found = [
        *_of_structs("", _of_the_run(left.snapshot), _of_the_run(right.snapshot)),
        *_of_sequences(left.snapshot.sequences, right.snapshot.sequences),
    ]
    for tier, ours, theirs in (("device", left.device, right.device), ("host", left.host, right.host)):
        found += _of_arrays(tier, ours, theirs)
    names = {row.row: f"sequence {row.seq_id}" for row in left.snapshot.sequences if row.row is not None}
    found += _of_tables(left.tables, right.tables, names)
    if left.victims is not None and right.victims is not None and left.victims != right.victims:
        found.append(f"next to be evicted: {_blocks(left.victims)} and {_blocks(right.victims)}")
    return tuple(found[:_MAX_TOLD])


def event_differences(left: Sequence[Event], right: Sequence[Event]) -> tuple[str, ...]:
    """Return in what two stretches of events differ: the first that does; empty when they are the same."""
    return tuple(_of_events(left, right))


def _by_step(recording: Recording) -> Iterator[tuple[Moment, list[Event]]]:
    """Yield the last moment of every recorded step, with the events since the one before."""
    before: Moment | None = None
    events: list[Event] = []
    for item in recording.story():
        if not isinstance(item, Moment):
            continue
        if before is not None and before.snapshot.step != item.snapshot.step:
            yield before, events
            events = []
        before = item
        events += item.snapshot.events
    if before is not None:
        yield before, events


def _of_the_run(snapshot: Snapshot) -> Snapshot:
    compactions = tuple(msgspec.structs.replace(record, seconds=0.0) for record in snapshot.compactions)
    counters = msgspec.structs.replace(snapshot.counters, integrity_checks=0)
    return msgspec.structs.replace(snapshot, **_LEFT_OUT, compactions=compactions, counters=counters)


def _of_structs(whose: str, left: msgspec.Struct, right: msgspec.Struct) -> Iterator[str]:
    for name in left.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            yield from _of_values(f"{whose}{name.replace('_', ' ')}", a, b)


def _of_values(what: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, msgspec.Struct) and type(a) is type(b):
        yield from _of_structs(f"{what}, ", a, b)
    elif isinstance(a, tuple) and isinstance(b, tuple) and a and isinstance(a[0], msgspec.Struct):
        if len(a) != len(b):
            yield f"{what}: {len(a)} and {len(b)} of them"
        for index, (x, y) in enumerate(zip(a, b, strict=False), start=1):
            if x != y:
                yield from _of_values(f"{what}, number {index}", x, y)
                return
    else:
        yield f"{what}: {a!r} and {b!r}"


def _of_sequences(left: Sequence[SequenceRow], right: Sequence[SequenceRow]) -> Iterator[str]:
    ours, theirs = ({row.seq_id: row for row in rows} for rows in (left, right))
    for there, rows, other in (("first", ours, theirs), ("second", theirs, ours)):
        alone = sorted(rows.keys() - other.keys())
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            yield f"sequence {alone[0]}{more}: only in the {there}"
    for seq_id in sorted(ours.keys() & theirs.keys()):
        if ours[seq_id] != theirs[seq_id]:
            yield from _of_structs(f"sequence {seq_id}, ", ours[seq_id], theirs[seq_id])
            return
    if ours == theirs and list(ours) != list(theirs):
        yield "the same sequences, in another order"


def _of_arrays(tier: str, left: BlockArrays | None, right: BlockArrays | None) -> Iterator[str]:
    if left is None or right is None:
        if left is not right:
            yield f"{tier} blocks: only one of the runs has any"
        return
    if left.num_blocks != right.num_blocks:
        yield f"{tier} blocks: {left.num_blocks} and {right.num_blocks} of them"
        return
    for name, _ in FIELDS:
        ours, theirs = getattr(left, name), getattr(right, name)
        at = np.flatnonzero(ours != theirs)
        if len(at):
            first = int(at[0])
            a, b = (_value(name, int(values[first])) for values in (ours, theirs))
            number = f"{len(at)} blocks differ" if len(at) > 1 else "one block differs"
            yield f"{tier} pool, {_ARRAYS[name]}: {number}, the first is block {first}: {a} and {b}"


def _value(name: str, value: int) -> str:
    return BlockState(value).name.lower() if name == "state" else f"{value:016x}" if name == "hash64" else str(value)


def _of_tables(left: Tables, right: Tables, names: dict[int, str]) -> Iterator[str]:
    for row in sorted({*left.rows.tolist(), *right.rows.tolist()}):
        ours, theirs = table_of(left, row), table_of(right, row)
        if ours is None or theirs is None or not np.array_equal(ours, theirs):
            a, b = (() if table is None else tuple(table.tolist()) for table in (ours, theirs))
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            x, y = (table[at] if at < len(table) else "none" for table in (a, b))
            yield f"block table of {names.get(row, f'row {row}')}: {len(a)} and {len(b)} blocks, at {at}: {x} and {y}"
            return


def _of_events(left: Sequence[Event], right: Sequence[Event]) -> Iterator[str]:
    """Yield the first event that differs. One that a source had no room for is in neither run's disfavour."""
    if [*left] == [*right]:
        return
    ours, theirs = ({event.number: event for event in events} for events in (left, right))
    begin = max((min(events) for events in (ours, theirs) if events), default=0)
    begin = max(begin, _after_gap(left), _after_gap(right))
    for number in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(number), theirs.get(number)
        if a != b and (number >= begin or not (ours and theirs)):
            told = " and ".join("nothing" if e is None else f"{e.kind} at step {e.step}: {e.text}" for e in (a, b))
            yield f"event {number}: {told}"
            return


def _after_gap(events: Sequence[Event]) -> int:
    """Return the number of the event after the last gap."""
    return max((b.number for a, b in itertools.pairwise(events) if b.number != a.number + 1), default=0)


def _blocks(ids: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, ids[:4]))}{'…' if len(ids) > 4 else ''}" if ids else "none"
