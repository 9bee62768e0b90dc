"""A moment as a picture: the block map of both tiers, in words and cells, and as SVG. Pure; nothing is loaded."""

from __future__ import annotations

from html import escape
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.ids import BlockState
from allocator.metrics import REF_BUCKETS, tier_numbers
from allocator.snapshot import Snapshot
from kvtop.model.format import blocks, count, percent, seconds
from kvtop.recording.reader import Moment

WIDTH: Final = 960
COLUMNS: Final = 128
CELL: Final = 7
#: Cells of one tier, at most; of a larger pool each stands for several blocks.
_MAX_CELLS: Final = 128 * 64
#: Where the first tier begins, and its cells below its caption.
TOP: Final = 66
CELLS_BELOW: Final = 32
INK, DIM, PAPER = "#c9d1d9", "#7d8590", "#0d1117"
_RETIRED, _FREE, _CACHED, _RESERVED, _FIRST_HELD = range(5)
#: From dark to light, so that lightness alone tells them apart: retired, free, cached, reserved, then by holders.
COLOURS: Final = (
    "#0d1117", "#21262d", "#4f62a3", "#e3b341", "#1f6f78", "#21918c", "#35b779", "#7ad151", "#bddf26", "#fde725",
)  # fmt: skip
NAMES: Final = (
    "retired", "free", "cached", "reserved",
    *(f"{name} holder{'' if name == '1' else 's'}" for _, name in REF_BUCKETS[1:]),
)  # fmt: skip


class Drawn(NamedTuple):
    """One tier as it is drawn.

    Attributes:
        caption: Its numbers in words.
        kinds: The place of every cell in ``COLOURS``. [cells]
    """

    caption: str
    kinds: NDArray[np.int64]

    @property
    def rows(self) -> int:
        """Rows of cells."""
        return -(-len(self.kinds) // COLUMNS)

    @property
    def height(self) -> int:
        """What it takes, its caption included. [px]"""
        return CELLS_BELOW + 12 + self.rows * CELL


def heading(moment: Moment, title: str) -> tuple[str, str]:
    """Return the two lines above a moment's picture; ``title`` is such as the recording's name."""
    snapshot = moment.snapshot
    return (
        f"{title}: step {count(snapshot.step)}, {seconds(snapshot.time_s)} of virtual time",
        f"{snapshot.num_running} running, {snapshot.num_waiting} waiting, {snapshot.num_swapped} swapped · "
        f"{snapshot.workload} · {snapshot.policy} · evict {snapshot.eviction} · {snapshot.phase}",
    )


def drawn_tiers(moment: Moment) -> list[Drawn]:
    """Return the tiers that a moment has, the device's first."""
    tiers = (("Device", moment.device), ("Host", moment.host))
    return [_drawn(name, arrays, moment.snapshot) for name, arrays in tiers if arrays is not None]


def to_svg(moment: Moment, title: str) -> str:
    """Return a moment's block map as a self-contained SVG document.

    Args:
        moment: The moment.
        title: The heading, such as the recording's name.
    """
    parts, y = [], TOP
    for tier in drawn_tiers(moment):
        parts.append(_text(24, y + 22, INK, tier.caption) + _cells(tier, y + CELLS_BELOW))
        y += tier.height
    first, second = heading(moment, title)
    return (
        f"{svg_start(y + 40, first)}"
        f"{_text(24, 30, INK, first, 17)}{_text(24, 52, DIM, second)}{''.join(parts)}{svg_legend(y)}</svg>"
    )


def svg_start(height: int, title: str) -> str:
    """Return how an SVG document of a block map begins, its paper included."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="ui-monospace, monospace" font-size="13" role="img">'
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="{PAPER}"/>'
    )


def cell_kinds(arrays: BlockArrays, per_cell: int) -> NDArray[np.int64]:
    """Return the place in the colours of every cell, of several blocks what most of them are. [cells]"""
    held = np.searchsorted([low for low, _ in REF_BUCKETS[2:]], arrays.ref_count, side="right") + _FIRST_HELD
    kinds = np.select(
        [arrays.state == state for state in (BlockState.FREE, BlockState.CACHED, BlockState.RESERVED)],
        [_FREE, _CACHED, _RESERVED],
        _RETIRED,
    )
    kinds[arrays.state == BlockState.ACTIVE] = held[arrays.state == BlockState.ACTIVE]
    if per_cell == 1:
        return kinds
    starts = np.arange(0, len(kinds), per_cell)
    counts = np.stack([np.add.reduceat(kinds == kind, starts, dtype=np.int64) for kind in range(len(COLOURS))])
    most: NDArray[np.int64] = counts.argmax(axis=0)
    return most


def legend(top: int) -> list[tuple[int, int, str, str]]:
    """Return where each colour's sample lies below a picture of this height, with the colour and its name."""
    places, x = [], 24
    for name, colour in list(zip(NAMES, COLOURS, strict=True))[_FREE:]:
        places.append((x, top + 10, colour, name))
        x += 30 + 8 * len(name)
    return places


def svg_legend(top: int) -> str:
    """Return the legend as SVG."""
    return "".join(
        f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>{_text(x + 16, y + 10, DIM, name, 12)}'
        for x, y, colour, name in legend(top)
    )


def _drawn(name: str, arrays: BlockArrays, snapshot: Snapshot) -> Drawn:
    numbers = tier_numbers(arrays, snapshot.block_size, snapshot.slab_size)
    per_cell = max(1, -(-arrays.num_blocks // _MAX_CELLS))
    caption = (
        f"{name}: {blocks(numbers.total)}, {percent(numbers.usage_ratio)} used, {count(numbers.cached)} cached, "
        f"{count(numbers.free)} free, external fragmentation {percent(numbers.external_ratio)}"
    )
    if per_cell > 1:
        caption += f"; a cell is {per_cell} blocks, as most of them are"
    return Drawn(caption, cell_kinds(arrays, per_cell))


def _cells(tier: Drawn, top: int) -> str:
    """Return a tier's cells as SVG, neighbours of one colour in one piece."""
    parts = ['<g shape-rendering="crispEdges">']
    for row in range(tier.rows):
        line = tier.kinds[row * COLUMNS : (row + 1) * COLUMNS]
        ends = np.append(np.flatnonzero(np.diff(line)) + 1, len(line)).tolist()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            parts.append(
                f'<rect x="{32 + start * CELL}" y="{top + row * CELL}" width="{(end - start) * CELL}" '
                f'height="{CELL - 1}" fill="{COLOURS[int(line[start])]}"/>'
            )
    return "".join(parts) + "</g>"


def _text(x: int, y: int, colour: str, text: str, size: int | None = None) -> str:
    sized = "" if size is None else f' font-size="{size}"'
    return f'<text x="{x}" y="{y}" fill="{colour}"{sized}>{escape(text)}</text>'
