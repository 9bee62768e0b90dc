"""Shades: block arrays → what each cell shows in the colour modes beside reference counts. Pure and vectorised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.config import STEP_S
from allocator.ids import BlockFlag, BlockState
from allocator.metrics import allocatable_mask, find_runs
from allocator.snapshot import Snapshot
from kvtop.model.mirror import MirrorReading
from kvtop.tui import cells
from kvtop.tui.themes import NUM_LEVELS, NUM_OWNER_COLOURS

Mode = Literal["references", "state", "owner", "age", "fill", "contiguity"]
MODES: Final[tuple[Mode, ...]] = ("references", "state", "owner", "age", "fill", "contiguity")

#: ``SHADE + n`` is shade ``n`` of the mode that is drawn.
SHADE: Final = cells.NUM_CODES
#: In contiguity mode the shades from here on are those of blocks that could be handed out.
OTHER: Final = NUM_LEVELS
#: A block with two or more holders in state mode.
SHARED: Final = cells.ACTIVE + 4
#: Steps since the last use at which each age level but the first, which is in use, ends: four times the one before.
AGE_STEPS: Final = tuple(4**i for i in range(1, NUM_LEVELS - 1))
#: Run lengths at which a contiguity level ends: twice the one before.
RUN_BLOCKS: Final = tuple(2**i for i in range(NUM_LEVELS - 1))


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What colours need besides the arrays.

    Attributes:
        step: Step of the arrays.
        block_size: Tokens a block.
        slab_size: Blocks a slab.
        slots: Owner colour by sequence row + 1; the first is for no row. [rows + 1]
    """

    step: int
    block_size: int
    slab_size: int
    slots: NDArray[np.uint8]


def facts_of(snapshot: Snapshot) -> Facts:
    """Return what a snapshot says; a row that its table does not list is coloured by its number."""
    rows = {row.row: row.seq_id for row in snapshot.sequences if row.row is not None}
    slots = [0, *(owner_slot(rows.get(row, row)) for row in range(max(rows, default=-1) + 1))]
    return Facts(snapshot.step, snapshot.block_size, snapshot.slab_size, np.array(slots, np.uint8))


def facts_of_mirror(mirror: MirrorReading) -> Facts:
    """Return what a mirror says; its owners are coloured by their number."""
    return Facts(mirror.step, max(1, mirror.block_size), 1, np.zeros(1, np.uint8))


def owner_slot(seq_id: int) -> int:
    """Return a sequence's colour, the same for its whole life; neighbours in number are far apart in hue."""
    hues = NUM_OWNER_COLOURS // 2
    return seq_id * 11 % hues + seq_id // hues % 2 * hues


def age_text(level: int) -> str:
    """Return up to which age a level goes."""
    if level == 0:
        return "in use"
    if level == NUM_LEVELS - 1:
        return "older"
    seconds = AGE_STEPS[level - 1] * STEP_S
    return f"{seconds:g} s" if seconds < 60 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True, slots=True, eq=False)
class Shades:
    """One tier in one mode.

    Attributes:
        shade: Shade of each block that has one. [n] uint8
        shown: Whether a block has one; the others show their state. [n] bool
    """

    shade: NDArray[np.uint8]
    shown: NDArray[np.bool_]


NONE: Final = Shades(np.empty(0, np.uint8), np.empty(0, bool))


def shades(mode: Mode, arrays: BlockArrays, facts: Facts) -> Shades:
    """Return the shade of every block. ``references`` and ``state`` have none. Cost: a few vector passes."""
    held = (arrays.state == BlockState.ACTIVE) & ((arrays.flags & (BlockFlag.PINNED | BlockFlag.FENCED)) == 0)
    kept = held | ((arrays.state == BlockState.CACHED) & (arrays.flags == 0))
    match mode:
        case "owner":
            rows = arrays.owner.astype(np.int64) + 1
            known = (rows > 0) & (rows < len(facts.slots))
            shade = np.where(known, facts.slots[np.where(known, rows, 0)], rows % NUM_OWNER_COLOURS)
            return Shades(shade.astype(np.uint8), kept & (rows > 0))
        case "age":
            steps = np.maximum(0, facts.step - arrays.last_used.astype(np.int64))
            levels = 1 + np.searchsorted(AGE_STEPS, steps, side="left")
            return Shades(np.where(held, 0, levels).astype(np.uint8), kept)
        case "fill":
            levels = arrays.fill.astype(np.int64) * (NUM_LEVELS - 1) // max(1, facts.block_size)
            return Shades(np.minimum(levels, NUM_LEVELS - 1).astype(np.uint8), kept)
        case "contiguity":
            return _contiguity(arrays, facts)
        case _:
            return NONE


def _contiguity(arrays: BlockArrays, facts: Facts) -> Shades:
    """Shade blocks by the length of the run they lie in: of one sequence's blocks, or of allocatable ones."""
    n = arrays.num_blocks
    shade = np.zeros(n, np.uint8)
    free = allocatable_mask(arrays)
    held = arrays.state == BlockState.ACTIVE
    starts, lengths = find_runs(free, max(1, facts.slab_size))
    shade[free] = np.repeat((OTHER + np.searchsorted(RUN_BLOCKS, lengths, side="left")).astype(np.uint8), lengths)
    new = np.ones(n, bool)
    if n:
        new[1:] = (arrays.owner[1:] != arrays.owner[:-1]) | (held[1:] != held[:-1])
        new[:: max(1, facts.slab_size)] = True
        starts = np.flatnonzero(new)
        lengths = np.diff(np.append(starts, n))
        all_levels = np.repeat(np.searchsorted(RUN_BLOCKS, lengths, side="left").astype(np.uint8), lengths)
        shade[held] = all_levels[held]
    return Shades(shade, (free | held) & ((arrays.flags & (BlockFlag.PINNED | BlockFlag.FENCED)) == 0))


def block_codes(mode: Mode, arrays: BlockArrays, made: Shades, start: int, stop: int) -> cells.Codes:
    """Return the code of each block from ``start`` to ``stop``. [stop - start] uint16"""
    codes = cells.block_codes(arrays, start, stop)
    if mode == "references":
        return codes
    if mode == "state":
        codes[(codes > cells.ACTIVE) & (codes < cells.MIXED)] = SHARED
        return codes
    shown = made.shown[start:stop]
    codes[shown] = SHADE + made.shade[start:stop][shown]
    return codes


def group_codes(mode: Mode, arrays: BlockArrays, made: Shades, per_cell: int) -> cells.Codes:
    """Return the code of each ``per_cell`` consecutive blocks. [⌈n / per_cell⌉] uint16

    An alarm (pinned, being copied) in any of them wins. Else ``state`` takes what most of them are, ``owner`` the owner
    of the first that has one, and the others the mean level of those that have one.
    """
    codes = cells.group_codes(arrays, per_cell)
    if mode == "references":
        return codes
    calm = (codes != cells.PINNED) & (codes != cells.FENCED) & (codes != cells.RETIRED)
    if mode == "state":
        refs = arrays.ref_count
        masks = [
            arrays.state == BlockState.FREE,
            arrays.state == BlockState.CACHED,
            ((arrays.state == BlockState.ACTIVE) & (refs < 2)) | (arrays.state == BlockState.RESERVED),
            (arrays.state == BlockState.ACTIVE) & (refs >= 2),
        ]
        most = np.argmax(np.stack([cells.sums(mask, per_cell) for mask in masks]), axis=0)
        return np.where(calm, np.array([cells.FREE, cells.CACHED, cells.ACTIVE, SHARED], np.uint16)[most], codes)
    if mode == "owner":
        first = _first_of_each(made.shown, per_cell)
        return np.where(calm & (first >= 0), SHADE + made.shade[np.maximum(first, 0)], codes).astype(np.uint16)
    other = made.shade >= OTHER
    parts = []
    for mask, base in ((made.shown & ~other, 0), (made.shown & other, OTHER)):
        count = cells.sums(mask, per_cell)
        total = cells.sums(np.where(mask, made.shade - np.uint8(base), np.uint8(0)), per_cell)
        parts.append((count, base + (total * 2 + count) // np.maximum(1, 2 * count)))
    (held, low), (free, high) = parts
    shade = np.where(held >= free, low, high)
    return np.where(calm & (held + free > 0), SHADE + shade, codes).astype(np.uint16)


def _first_of_each(mask: NDArray[np.bool_], per_cell: int) -> NDArray[np.int64]:
    """Return the index of the first true entry of each ``per_cell``; −1 where there is none. [⌈n / per_cell⌉]"""
    groups = -(-len(mask) // per_cell)
    padded = np.zeros(groups * per_cell, bool)
    padded[: len(mask)] = mask
    table = padded.reshape(groups, per_cell)
    at = table.argmax(axis=1)
    return np.where(table[np.arange(groups), at], np.arange(groups) * per_cell + at, -1)
