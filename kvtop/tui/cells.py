"""Cells: block arrays → what each cell of the map shows. Pure and vectorised; knows no widget and no colour depth.

A *code* names what a cell shows: one block's state, or the mixture of several blocks. Codes are small
numbers, so that a frame is compared with the last one as one array. Bits beside the code say how the
cell stands to the selection, and whether it has just changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.ids import BlockFlag, BlockState

Codes = NDArray[np.uint16]

EMPTY, FREE, CACHED, RESERVED, RETIRED, FENCED, PINNED = range(7)
#: ``ACTIVE + min(ref_count, 10) - 1``: ten codes.
ACTIVE: Final = 7
MIXED: Final = 17
#: Set on cells that hold a block of the selected sequence.
SELECTED: Final = 128
#: Set on all other cells while a sequence is selected.
DIMMED: Final = 256
#: Set on cells that hold a block which has just moved or changed.
FLASH: Final = 512
#: Bits that a cell takes up in an array of pairs.
BITS: Final = 10

#: Parts into which a mixture is rounded.
QUARTERS: Final = 4
#: Reference counts drawn in one colour: 1, 2, 3–4, 5–8, 9 and more.
LEVEL_STARTS: Final = (1, 2, 3, 5, 9)
LEVEL_NAMES: Final = ("1", "2", "3-4", "5-8", "9+")


@dataclass(frozen=True, slots=True)
class Mixture:
    """What several blocks in one cell are on average.

    Attributes:
        cached, active: Quarters of the cell that are cached, and held.
        level: Index into ``LEVEL_STARTS`` of the held blocks' mean reference count.
    """

    cached: int
    active: int
    level: int


def _mixtures() -> tuple[tuple[Mixture, ...], NDArray[np.uint16]]:
    """Return every mixture in code order, and the code by [cached, active, level]."""
    mixtures: list[Mixture] = []
    table = np.zeros((QUARTERS + 1, QUARTERS + 1, len(LEVEL_STARTS)), np.uint16)
    for cached in range(QUARTERS + 1):
        for active in range(QUARTERS + 1 - cached):
            for level in range(len(LEVEL_STARTS)):
                if active or level == 0:
                    mixtures.append(Mixture(cached, active, level))
                table[cached, active, level] = MIXED + len(mixtures) - 1
    return tuple(mixtures), table


MIXTURES, _MIXTURE_CODES = _mixtures()
NUM_CODES: Final = MIXED + len(MIXTURES)

_STATE_CODES: Final = np.array([FREE, CACHED, ACTIVE, RESERVED, RETIRED], np.uint16)
#: Reference counts above this look the same.
_MAX_REFS: Final = 10
_LEVELS: Final = np.searchsorted(LEVEL_STARTS, np.arange(_MAX_REFS + 1), side="right") - 1


def level_of(ref_count: int) -> int:
    """Return the index into ``LEVEL_STARTS`` of a reference count of 1 or more."""
    return int(_LEVELS[min(ref_count, _MAX_REFS)])


def block_codes(arrays: BlockArrays, start: int = 0, stop: int | None = None) -> Codes:
    """Return the code of each block from ``start`` to ``stop``. [stop - start] uint16"""
    part = slice(start, stop)
    codes = _STATE_CODES[arrays.state[part]]
    codes += np.where(codes == ACTIVE, np.clip(arrays.ref_count[part], 1, _MAX_REFS) - 1, 0).astype(np.uint16)
    flags = arrays.flags[part]
    if flags.any():
        codes[(flags & BlockFlag.PINNED) != 0] = PINNED
        codes[(flags & BlockFlag.FENCED) != 0] = FENCED
    return codes


def group_codes(arrays: BlockArrays, per_cell: int) -> Codes:
    """Return the code of each group of ``per_cell`` consecutive blocks: the mixture, or an alarm if any block has one.

    A group of retired blocks alone is ``RETIRED``; in a mixed group retired blocks do not count.

    Returns:
        One code a group, the last group possibly smaller. [⌈n / per_cell⌉] uint16

    Cost: a few vector passes over the arrays.
    """
    state = arrays.state
    sizes = np.full(-(-len(state) // per_cell), per_cell, np.int64)
    sizes[-1:] = len(state) - (len(sizes) - 1) * per_cell
    active = sums((state == BlockState.ACTIVE) | (state == BlockState.RESERVED), per_cell)
    cached = sums(state == BlockState.CACHED, per_cell)
    retired = state == BlockState.RETIRED
    live = sizes - sums(retired, per_cell) if retired.any() else sizes
    held, known = np.maximum(active, 1), np.maximum(live, 1)
    active_quarters = (active * QUARTERS * 2 + known) // (2 * known)
    cached_quarters = np.minimum((cached * QUARTERS * 2 + known) // (2 * known), QUARTERS - active_quarters)
    references = sums(np.minimum(arrays.ref_count, _MAX_REFS), per_cell)
    mean_refs = np.clip((references + held // 2) // held, 1, _MAX_REFS)
    levels = np.where(active_quarters > 0, _LEVELS[mean_refs], 0)
    codes = _MIXTURE_CODES[cached_quarters, active_quarters, levels]
    codes[live == 0] = RETIRED
    flags = arrays.flags
    if flags.any():
        codes[sums((flags & BlockFlag.PINNED) != 0, per_cell) > 0] = PINNED
        codes[sums((flags & BlockFlag.FENCED) != 0, per_cell) > 0] = FENCED
    return codes


#: Every second byte of a word, and how many blocks of at most ``_MAX_REFS`` its 16-bit lanes can count.
_EVEN_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)
_LANE_BLOCKS: Final = (1 << 16) // (2 * _MAX_REFS) * 8


def sums(values: NDArray[np.generic], per_cell: int) -> NDArray[np.int64]:
    """Return the sum of each ``per_cell`` consecutive values of at most ``_MAX_REFS``. [⌈n / per_cell⌉] int64

    Groups of whole words are added eight bytes at a time, which makes a million blocks cost about a millisecond.
    """
    bytes_ = values.view(np.uint8) if values.dtype == np.bool_ else values.astype(np.uint8)
    whole = len(bytes_) // per_cell * per_cell
    body = bytes_[:whole]
    sums = np.empty(-(-len(bytes_) // per_cell), np.int64)
    if per_cell % 8 == 0 and per_cell <= _LANE_BLOCKS:
        words = body.view(np.uint64)
        lanes = ((words & _EVEN_BYTES) + (words >> np.uint64(8) & _EVEN_BYTES)).reshape(-1, per_cell // 8).sum(axis=1)
        sums[: whole // per_cell] = lanes.view(np.uint16).reshape(-1, 4).sum(axis=1)
    else:
        sums[: whole // per_cell] = body.reshape(-1, per_cell).sum(axis=1, dtype=np.int64)
    if whole < len(bytes_):
        sums[-1] = int(bytes_[whole:].sum(dtype=np.int64))
    return sums


def mark_selected(codes: Codes, block_ids: NDArray[np.int64], per_cell: int = 1, start: int = 0) -> Codes:
    """Return the codes with ``SELECTED`` on the cells that hold one of ``block_ids`` and ``DIMMED`` on the others.

    Args:
        codes: One code a cell. [m]
        block_ids: The selected sequence's blocks; ids outside the cells are left out.
        per_cell: Blocks a cell.
        start: Block id at which the first cell begins.
    """
    cells = (block_ids - start) // per_cell
    marks = np.full(len(codes), DIMMED, np.uint16)
    marks[cells[(cells >= 0) & (cells < len(codes))]] = SELECTED
    return codes | marks


#: Above this, groups are whole words of eight blocks: hardly fewer cells, and much faster to add up.
_WORD_FROM: Final = 16

#: All blocks, so many blocks a cell, one block half a cell, one block a cell.
Zoom = Literal["fit", "dense", "glyph"] | int


@dataclass(frozen=True, slots=True)
class Scale:
    """How blocks become cells.

    Attributes:
        halves: Whether a character cell shows two cells, one above the other.
        per_cell: Blocks a cell.
        columns: Cells a row.
    """

    halves: bool
    per_cell: int
    columns: int

    def lines(self, num_blocks: int) -> int:
        """Return how many text lines a tier of ``num_blocks`` takes."""
        rows = -(-num_blocks // (self.columns * self.per_cell))
        return -(-rows // 2) if self.halves else rows


def choose_scale(tiers: tuple[int, ...], columns: int, lines: int, zoom: Zoom, glyphs_only: bool) -> Scale:
    """Return the scale at which tiers of these sizes fit into ``lines`` lines, all at the same blocks a cell.

    ``dense`` and ``glyph`` ask for one block a cell, and a number for that many, whether or not it fits. ``fit`` takes
    the largest picture that fits: one character a block, then half a character, then several blocks a half.
    """
    columns, lines = max(1, columns), max(len(tiers), lines)
    glyphs = Scale(False, 1, columns)
    if zoom == "glyph" or (zoom == "dense" and glyphs_only):
        return glyphs
    if zoom == "dense":
        return Scale(True, 1, columns)
    if zoom != "fit":
        return Scale(not glyphs_only, zoom, columns)

    def fits(scale: Scale) -> bool:
        return sum(scale.lines(n) for n in tiers) <= lines

    if fits(glyphs):
        return glyphs
    halves = not glyphs_only
    low, high = 1, max(1, sum(tiers))
    while low < high:
        middle = (low + high) // 2
        if fits(Scale(halves, middle, columns)):
            high = middle
        else:
            low = middle + 1
    if low > _WORD_FROM:
        low = -(-low // 8) * 8
    return Scale(halves, low, columns)


def zooms(fit: Scale, glyphs_only: bool) -> tuple[Zoom, ...]:
    """Return the steps from the whole pool, drawn as ``fit``, to one block a cell."""
    steps: list[Zoom] = ["fit"]
    per_cell = fit.per_cell // 4
    while per_cell > 1:
        steps.append(per_cell)
        per_cell //= 4
    return (*steps, "glyph") if glyphs_only else (*steps, "dense", "glyph")
