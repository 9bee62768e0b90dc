"""BlockLog: what happened to the few blocks that somebody looks at, worked out from one reading to the next."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from allocator.block_map import BlockArrays
from allocator.events import Event
from allocator.ids import NO_ROW, BlockFlag, BlockState, Tier
from kvtop.model import format as fmt
from kvtop.model.view import View

#: Blocks that are followed at once, those looked at last; and what is kept of each.
MAX_BLOCKS: Final = 16
MAX_ENTRIES: Final = 64
#: Events that say why a sequence let go of its blocks.
_WHY: Final = {"finish": "finished", "cancel": "cancelled", "swap-out": "swapped out", "preempt": "preempted"}
_NAMED: Final = 4

Block = tuple[Tier, int]


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to a block.

    Attributes:
        step: Engine step of the reading that showed it first; it may have happened since the reading before.
        what: In one word.
        detail: To whom, why, or how many; empty where there is nothing to add.
    """

    step: int
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one reading tells of one block."""

    state: BlockState
    refs: int
    key: int
    flags: BlockFlag
    holders: tuple[int, ...]

    @property
    def knows_all(self) -> bool:
        """Whether every holder is known, not only the first."""
        return len(self.holders) >= self.refs


class BlockLog:
    """Follows the blocks that were looked at last.

    A reading costs a few array look-ups for each of them, whatever the size of the pool, and nothing where none is
    followed. Only what two readings show is known: a block that was freed and given away again in between is told as
    given to another.
    """

    def __init__(self) -> None:
        self._facts: OrderedDict[Block, _Facts | None] = OrderedDict()
        self._log: dict[Block, deque[Happening]] = {}
        self._generation = -1
        self._step = -1
        self._next_event = 0

    def look_at(self, block: Block) -> None:
        """Follow a block from the next reading on, and forget the one that was looked at longest ago."""
        if block in self._facts:
            self._facts.move_to_end(block)
            return
        self._facts[block] = None
        self._log[block] = deque(maxlen=MAX_ENTRIES)
        if len(self._facts) > MAX_BLOCKS:
            gone, _ = self._facts.popitem(last=False)
            del self._log[gone]

    def of(self, block: Block) -> tuple[Happening, ...]:
        """Return what is known of a block, oldest first; the first entry is how it was found."""
        return tuple(self._log.get(block, ()))

    def note(self, view: View) -> None:
        """Take the next view; one that was seen before is nothing new."""
        snapshot = view.snapshot
        if snapshot is None or view.generation == self._generation:
            return
        self._generation = view.generation
        if snapshot.step < self._step:
            self._start_again()  # a recording was wound back: what was later has not happened yet
        self._step = snapshot.step
        news = [event for event in view.events if event.number >= self._next_event]
        for block, before in self._facts.items():
            now = _facts(view, block)
            if now is None or now == before:
                continue
            log = self._log[block]
            if before is None:
                log.append(Happening(snapshot.step, "found", _found(now)))
            else:
                log.extend(Happening(snapshot.step, *told) for told in _told(before, now, news, view, block))
            self._facts[block] = now
        if view.events:
            self._next_event = view.events[-1].number + 1

    def _start_again(self) -> None:
        self._next_event = 0
        for block in self._facts:
            self._facts[block] = None
            self._log[block].clear()


def _facts(view: View, block: Block) -> _Facts | None:
    tier, at = block
    shown = view.device if tier == "device" else view.host
    if shown is None or not 0 <= at < shown.arrays.num_blocks:
        return None
    arrays = shown.arrays
    return _Facts(
        BlockState(int(arrays.state[at])),
        int(arrays.ref_count[at]),
        int(arrays.hash64[at]),
        BlockFlag(int(arrays.flags[at])),
        _holders(view, arrays, block),
    )


def _holders(view: View, arrays: BlockArrays, block: Block) -> tuple[int, ...]:
    """Return who holds a block: all that are known where it was asked for, else the first."""
    focus = view.focus_block
    if block[0] == "device" and focus is not None and focus.block_id == block[1]:
        return tuple(dict.fromkeys(seq_id for seq_id, _ in focus.holders))
    row = int(arrays.owner[block[1]])
    if row == NO_ROW or block[0] == "host" or view.snapshot is None:
        return ()
    return tuple(s.seq_id for s in view.snapshot.sequences if s.row == row)


def _found(now: _Facts) -> str:
    if now.state is BlockState.ACTIVE:
        return f"held {_by(now.holders)}" if now.holders else "held"
    return now.state.name.lower()


def _by(holders: tuple[int, ...], word: str = "by") -> str:
    if not holders:
        return ""
    more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
    return f"{word} sequence {', '.join(map(str, holders[:_NAMED]))}{more}"


def _told(before: _Facts, now: _Facts, news: list[Event], view: View, block: Block) -> list[tuple[str, str]]:
    """Return what lies between two readings of one block, as (word, detail)."""
    was_held, is_held = before.state is BlockState.ACTIVE, now.state is BlockState.ACTIVE
    is_another = bool(before.key) and now.key != before.key
    if was_held and is_held and before.knows_all and now.knows_all:
        # Whoever gives a block back between two readings leaves no holder in common.
        is_another = is_another or not {*before.holders} & {*now.holders}
    told = []
    if was_held and (is_another or not is_held):
        if moved := _moved(before, news, view, block):
            told.append(("moved", moved))
        else:
            kept = ", stays cached" if now.state is BlockState.CACHED and not is_another else ""
            told.append(("let go", f"{_by(before.holders)}{_why(before.holders, news)}{kept}".strip(" ,")))
    elif before.state is BlockState.CACHED and (is_another or now.state is BlockState.FREE):
        told.append(("evicted", _hash(before.key)))
    if is_held and (is_another or not was_held):
        again = "from the cache, " if before.state is BlockState.CACHED and not is_another else ""
        told.append(("given", f"{again}{_by(now.holders, 'to')}".strip(" ,")))
    elif is_held:
        told += _sharing(before, now)
        if now.key and not before.key:
            told.append(("full", _hash(now.key)))
    if now.state is not before.state and now.state in (BlockState.RESERVED, BlockState.RETIRED):
        told.append((now.state.name.lower(), ""))
    return told + _flags(before.flags, now.flags)


def _hash(key: int) -> str:
    return f"hash {key:016x}"[:13]


def _sharing(before: _Facts, now: _Facts) -> list[tuple[str, str]]:
    if now.refs == before.refs:
        return []
    number = f"{fmt.count(now.refs)} {'holder' if now.refs == 1 else 'holders'}, {fmt.count(before.refs)} before"
    if before.knows_all and now.knows_all:
        came = tuple(s for s in now.holders if s not in before.holders)
        went = tuple(s for s in before.holders if s not in now.holders)
        number += f"; {_by(came, 'new:')}" if came else ""
        number += f"; {_by(went, 'gone:')}" if went else ""
    return [("shared" if now.refs > before.refs else "unshared", number)]


def _why(holders: tuple[int, ...], news: list[Event]) -> str:
    for event in news:
        if event.seq_id in holders and event.kind in _WHY:
            return f", {_WHY[event.kind]}"
    return ""


def _moved(before: _Facts, news: list[Event], view: View, block: Block) -> str:
    """Return where a block's content went, if blocks were moved and it is found by its hash; else nothing."""
    if not before.key or not any(event.kind in ("compact", "resize") for event in news):
        return ""
    shown = view.device if block[0] == "device" else view.host
    if shown is None:
        return ""
    at = np.flatnonzero(shown.arrays.hash64 == np.uint64(before.key))
    return f"to block {int(at[0])}" if len(at) and int(at[0]) != block[1] else ""


def _flags(before: BlockFlag, now: BlockFlag) -> list[tuple[str, str]]:
    told = []
    for flag, on, off in (
        (BlockFlag.PINNED, "pinned", "unpinned"),
        (BlockFlag.FENCED, "copying", "copied"),
    ):
        if (now ^ before) & flag:
            told.append((on if now & flag else off, ""))
    return told
