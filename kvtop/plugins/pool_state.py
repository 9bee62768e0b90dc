"""PoolState: what a foreign engine's block pool is at one moment, and the arrays and rows that it becomes.

Knows no engine: each plugin makes states out of its own engine's structures. What an engine does not tell is ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.ids import NO_ROW, BlockState, IdArray
from allocator.metrics import run_starts
from allocator.snapshot import SequenceRow

#: Characters of a request's id that are shown.
_LABEL: Final = 48
#: Blocks handled in one go: between two of them other threads get their turn.
SLICE_BLOCKS: Final = 16_384


class Unsupported(Exception):
    """The engine is not one that the plugin knows; the text says why."""


class PoolFacts(NamedTuple):
    """What does not change.

    Attributes:
        engine: Engine and release.
        model: What it serves.
        device: Where its blocks lie.
        layout: What its blocks are made of.
        block_size: Tokens a block.
        block_bytes: Bytes a block, on one worker; 0 where that is not known.
        eviction, preempt, policy: Its ways, in a word each.
        missing: What the console cannot show of it, with the reason.
        notes: What whoever looks at it should know.
    """

    engine: str
    model: str
    device: str
    layout: str
    block_size: int
    block_bytes: int
    eviction: str
    preempt: str
    policy: str
    missing: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RequestState:
    """One unfinished request.

    Attributes:
        request_id: Its id.
        is_running: Whether it is being computed.
        reason: Why it is not, in a word or two; empty when that is not known.
        priority: Its class.
        num_prompt: Prompt tokens.
        num_target: Tokens that it may have at most; ``None`` where nobody knows.
        num_tokens: Tokens whose keys and values are written.
        hit_tokens: Prompt tokens that the prefix cache had.
        tables: Its block ids in token order, for each group of layers that has blocks of its own. [groups][blocks]
    """

    request_id: str
    is_running: bool
    reason: str
    priority: int
    num_prompt: int
    num_target: int | None
    num_tokens: int
    hit_tokens: int | None
    tables: Sequence[IdArray]

    def table(self) -> IdArray:
        """Return all of its block ids, group after group. [blocks]"""
        return self.tables[0] if len(self.tables) == 1 else np.concatenate([*self.tables, np.empty(0, np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class PoolState:
    """The pool at one moment.

    Attributes:
        ref_count: Holders of each block. [n]
        hash64: 64 bits of each block's key, 0 when it has none or the engine does not tell. [n]
        has_content: Blocks whose content can be found again, whether somebody holds them or not. [n] bool
        reserved: Blocks that are never handed out.
        requests: Unfinished requests, running first; perhaps not all of those that wait.
        group_sizes: Tokens a block, for each group of layers. [groups]
        num_running, num_waiting: How many there are in all.
        victims: Cached blocks that would be evicted next, in order; ``None`` where the engine does not tell.
        steps: Steps the engine has taken.
        totals: Totals by the name of their counter, as far as the engine tells them.
    """

    ref_count: NDArray[np.int64]
    hash64: NDArray[np.uint64]
    has_content: NDArray[np.bool_]
    reserved: Sequence[int]
    requests: Sequence[RequestState]
    group_sizes: Sequence[int]
    num_running: int
    num_waiting: int
    victims: tuple[int, ...] | None
    steps: int
    totals: Mapping[str, int] = field(default_factory=dict)


_R = TypeVar("_R")


class ForeignPool(Protocol[_R]):
    """One engine's pool, as a plugin reads it.

    ``collect`` is called between two steps of the engine, in its own thread or while it rests, and takes only what
    may have changed at the next one. ``digest`` makes a state out of that, in a thread of the publication.
    """

    @property
    def facts(self) -> PoolFacts: ...

    def collect(self) -> _R: ...

    def digest(self, taken: _R, pause: Callable[[], None]) -> PoolState: ...

    def is_idle(self) -> bool: ...

    def want_victims(self, number: int) -> None: ...


class Rows:
    """Gives requests their numbers and rows, which they keep while they live; a row is given again after that."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int]] = {}
        self._free: list[int] = []
        self._last_id = 0

    def update(self, request_ids: Iterable[str], step: int) -> Mapping[str, tuple[int, int, int]]:
        """Return the number, the row and the step of the first sight of each request."""
        before, self._known = self._known, {}
        new = []
        for request_id in request_ids:
            known = before.pop(request_id, None)
            if known is None:
                new.append(request_id)
            else:
                self._known[request_id] = known
        self._free.extend(row for _, row, _ in before.values())
        self._free.sort(reverse=True)
        for request_id in new:
            row = self._free.pop() if self._free else len(self._known)
            self._last_id += 1
            self._known[request_id] = (self._last_id, row, step)
        return self._known


class Shown(NamedTuple):
    """A state as the console sees it."""

    arrays: BlockArrays
    rows: tuple[SequenceRow, ...]
    tables: Mapping[int, IdArray]


class Showing:
    """Turns states into what the console sees of them; remembers when blocks were given back, and who is who.

    Args:
        block_size: Tokens a block of the published map.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows = Rows()
        self._active = np.empty(0, np.bool_)
        self._hash64 = np.empty(0, np.uint64)
        self._last_used = np.empty(0, np.uint32)

    def show(self, state: PoolState, step: int) -> Shown:
        """Return what the console sees of ``state`` at ``step``, which must not go back."""
        known = self._rows.update((request.request_id for request in state.requests), step)
        arrays = self._arrays(state, step)
        rows, tables = [], {}
        for request in state.requests:
            number, row, first_step = known[request.request_id]
            table = request.table()
            held = table[arrays.state[table] != BlockState.RESERVED]
            if len(held):
                tables[number] = held
            arrays.owner[held[arrays.owner[held] == NO_ROW]] = row
            for blocks, fill in _partial(request, state.group_sizes, self._block_size):
                arrays.fill[blocks] = fill
            rows.append(self._row(request, number, row, first_step, held, state.ref_count))
        return Shown(arrays, tuple(rows), tables)

    def _arrays(self, state: PoolState, step: int) -> BlockArrays:
        n = len(state.ref_count)
        reserved = np.asarray(state.reserved, np.int64)
        active, has_content = state.ref_count > 0, state.has_content.copy()
        active[reserved] = has_content[reserved] = False
        cached = ~active & has_content
        states = active * np.uint8(BlockState.ACTIVE) + cached * np.uint8(BlockState.CACHED)
        states[reserved] = BlockState.RESERVED
        refs = np.minimum(state.ref_count, 65535).astype(np.uint16)
        refs[reserved] = 0
        if len(self._active) == n:
            # Given back since the last look, or, unseen in between, taken and given back with another content.
            left = (self._active & ~active) | (cached & (self._hash64 != state.hash64))
            self._last_used[left] = step
        else:
            self._last_used = np.zeros(n, np.uint32)
        self._active, self._hash64 = active, state.hash64
        return BlockArrays(
            state=states.astype(np.uint8),
            flags=np.zeros(n, np.uint8),
            ref_count=refs,
            fill=np.where(active | cached, self._block_size, 0).astype(np.uint16),
            owner=np.full(n, NO_ROW, np.int32),
            last_used=self._last_used.copy(),
            hash64=state.hash64,
        )

    def _row(
        self, request: RequestState, number: int, row: int, step: int, held: IdArray, ref_count: NDArray[np.int64]
    ) -> SequenceRow:
        return SequenceRow(
            seq_id=number,
            row=row if len(held) else None,
            label=request.request_id[:_LABEL],
            status="running" if request.is_running else "waiting",
            reason=request.reason,
            num_prompt=request.num_prompt,
            num_tokens=request.num_tokens,
            num_target=request.num_target,
            num_blocks=len(held),
            shared_blocks=int(np.count_nonzero(ref_count[held] > 1)),
            hit_blocks=None if request.hit_tokens is None else request.hit_tokens // self._block_size,
            runs=int(np.count_nonzero(run_starts(held, max(1, len(ref_count))))) if len(held) else 0,
            arrived_step=step,
            priority=request.priority,
        )


def _partial(request: RequestState, sizes: Sequence[int], block_size: int) -> Iterator[tuple[IdArray, int]]:
    """Yield the blocks of a request that are not full, with their fill in slots of the published map's blocks."""
    for table, size in zip(request.tables, sizes, strict=True):
        full, rest = divmod(request.num_tokens, size)
        if full < len(table):
            yield table[full : full + 1], rest * block_size // size
            yield table[full + 1 :], 0


def slices(n: int, pause: Callable[[], None]) -> Iterator[slice]:
    """Yield ``range(n)`` in slices; between two of them, ``pause`` is called."""
    for start in range(0, n, SLICE_BLOCKS):
        if start:
            pause()
        yield slice(start, min(n, start + SLICE_BLOCKS))
