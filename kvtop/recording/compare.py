"""In what two moments of two runs differ, and where two recordings begin to. Pure, but for reading recordings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from allocator.block_map import FIELDS, BlockArrays
from allocator.snapshot import Snapshot
from kvtop.recording.reader import Moment, Recording

#: What belongs to the pace of a run, or to who looked on, and not to the run.
_NOT_OF_THE_RUN: Final = {
    "phase": "",
    "speed": None,
    "steps_per_s": None,
    "notes": (),
    "device": "",
    "events": (),
    "timings": None,
    "copies": None,
    "locks": None,
    # Reuse is worked out a little at a time: how much is told depends on where turns end, not only on the run.
    "reuse": None,
}
_MAX_TOLD: Final = 8


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
    """Return where two recordings differ first, at the steps that both have.

    Raises:
        RecordingError: One is damaged before that.
    """
    same_until = None
    lefts, rights = _by_step(left), _by_step(right)
    a, b = next(lefts, None), next(rights, None)
    while a is not None and b is not None:
        if a.snapshot.step < b.snapshot.step:
            a = next(lefts, None)
        elif a.snapshot.step > b.snapshot.step:
            b = next(rights, None)
        else:
            what = differences(a.snapshot, a.device, a.host, b.snapshot, b.device, b.host)
            if what:
                return Difference(a.snapshot.step, same_until, what)
            same_until = a.snapshot.step
            a, b = next(lefts, None), next(rights, None)
    return Difference(None, same_until)


def differences(
    left: Snapshot,
    left_device: BlockArrays | None,
    left_host: BlockArrays | None,
    right: Snapshot,
    right_device: BlockArrays | None,
    right_host: BlockArrays | None,
) -> tuple[str, ...]:
    """Return in what two moments differ, a line each, at most eight; empty when they are the same."""
    found = [*_of_structs("", _of_the_run(left), _of_the_run(right))]
    for tier, ours, theirs in (("device", left_device, right_device), ("host", left_host, right_host)):
        found += _of_arrays(tier, ours, theirs)
    return tuple(found[:_MAX_TOLD])


def _by_step(recording: Recording) -> Iterator[Moment]:
    """Yield the last moment of every recorded step."""
    before = None
    for item in recording.story():
        if not isinstance(item, Moment):
            continue
        if before is not None and before.snapshot.step != item.snapshot.step:
            yield before
        before = item
    if before is not None:
        yield before


def _of_the_run(snapshot: Snapshot) -> Snapshot:
    compactions = tuple(msgspec.structs.replace(record, seconds=0.0) for record in snapshot.compactions)
    counters = msgspec.structs.replace(snapshot.counters, integrity_checks=0)
    return msgspec.structs.replace(snapshot, **_NOT_OF_THE_RUN, compactions=compactions, counters=counters)


def _of_structs(path: str, left: msgspec.Struct, right: msgspec.Struct) -> Iterator[str]:
    for name in left.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            yield from _of_values(f"{path}{name}", a, b)


def _of_values(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, msgspec.Struct) and type(a) is type(b):
        yield from _of_structs(f"{path}.", a, b)
    elif isinstance(a, tuple) and isinstance(b, tuple) and a and isinstance(a[0], msgspec.Struct):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} of them"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                yield from _of_values(f"{path}[{index}]", x, y)
                return
    else:
        yield f"{path}: {a!r} and {b!r}"


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
            yield f"{tier} {name}: {len(at)} blocks differ, first block {first}: {ours[first]} and {theirs[first]}"
