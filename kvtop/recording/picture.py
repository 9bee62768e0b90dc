"""A moment as a picture: the block map of both tiers as SVG, and as a page with its report. Pure; nothing is loaded."""

from __future__ import annotations

from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

from allocator.block_map import BlockArrays
from allocator.ids import BlockState
from allocator.metrics import REF_BUCKETS, tier_numbers
from allocator.snapshot import Snapshot
from kvtop.model.format import blocks, count, percent, seconds
from kvtop.recording.reader import Moment

_WIDTH: Final = 960
_COLUMNS: Final = 128
_CELL: Final = 7
#: Cells of one tier, at most; of a larger pool each stands for several blocks.
_MAX_CELLS: Final = 128 * 64
_TOP: Final = 66
_INK, _DIM, _PAPER = "#c9d1d9", "#7d8590", "#0d1117"
_RETIRED, _FREE, _CACHED, _RESERVED, _FIRST_HELD = range(5)
#: From dark to light, so that lightness alone tells them apart: retired, free, cached, reserved, then by holders.
_COLOURS: Final = (
    "#0d1117", "#21262d", "#4f62a3", "#e3b341", "#1f6f78", "#21918c", "#35b779", "#7ad151", "#bddf26", "#fde725",
)  # fmt: skip
_NAMES: Final = (
    "retired", "free", "cached", "reserved",
    *(f"{name} holder{'' if name == '1' else 's'}" for _, name in REF_BUCKETS[1:]),
)  # fmt: skip


def to_svg(moment: Moment, title: str) -> str:
    """Return a moment's block map as a self-contained SVG document.

    Args:
        moment: The moment.
        title: The heading, such as the recording's name.
    """
    snapshot = moment.snapshot
    parts, y = [], _TOP
    for name, arrays in (("Device", moment.device), ("Host", moment.host)):
        if arrays is not None:
            drawn, height = _tier(name, arrays, snapshot, y)
            parts.append(drawn)
            y += height
    parts.append(_legend(y))
    heading = escape(f"{title}: step {count(snapshot.step)}, {seconds(snapshot.time_s)} of virtual time")
    state = escape(
        f"{snapshot.num_running} running, {snapshot.num_waiting} waiting, {snapshot.num_swapped} swapped · "
        f"{snapshot.workload} · {snapshot.policy} · evict {snapshot.eviction} · {snapshot.phase}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 40}" width="{_WIDTH}" height="{y + 40}" '
        'font-family="ui-monospace, monospace" font-size="13" role="img">'
        f"<title>{heading}</title>"
        f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
        f'<text x="24" y="30" fill="{_INK}" font-size="17">{heading}</text>'
        f'<text x="24" y="52" fill="{_DIM}">{state}</text>'
        f"{''.join(parts)}</svg>"
    )


def to_html(moment: Moment, title: str, report: str) -> str:
    """Return a page that needs nothing else: the picture, and under it a report as lines of text."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}: step {count(moment.snapshot.step)}</title>"
        f"<style>body{{background:{_PAPER};color:{_INK};margin:24px auto;max-width:{_WIDTH}px}}"
        "svg{max-width:100%;height:auto}pre{font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;padding:0 24px}"
        f"</style>{to_svg(moment, title)}<pre>{escape(report)}</pre></html>\n"
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
    counts = np.stack([np.add.reduceat(kinds == kind, starts, dtype=np.int64) for kind in range(len(_COLOURS))])
    most: NDArray[np.int64] = counts.argmax(axis=0)
    return most


def _tier(name: str, arrays: BlockArrays, snapshot: Snapshot, top: int) -> tuple[str, int]:
    """Return a tier's drawing and its height."""
    numbers = tier_numbers(arrays, snapshot.block_size, snapshot.slab_size)
    per_cell = max(1, -(-arrays.num_blocks // _MAX_CELLS))
    kinds = cell_kinds(arrays, per_cell)
    caption = (
        f"{name}: {blocks(numbers.total)}, {percent(numbers.usage_ratio)} used, {count(numbers.cached)} cached, "
        f"{count(numbers.free)} free, external fragmentation {percent(numbers.external_ratio)}"
    )
    if per_cell > 1:
        caption += f"; a cell is {per_cell} blocks, as most of them are"
    parts = [f'<text x="24" y="{top + 22}" fill="{_INK}">{escape(caption)}</text><g shape-rendering="crispEdges">']
    for row in range(-(-len(kinds) // _COLUMNS)):
        line = kinds[row * _COLUMNS : (row + 1) * _COLUMNS]
        ends = np.append(np.flatnonzero(np.diff(line)) + 1, len(line)).tolist()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            parts.append(
                f'<rect x="{32 + start * _CELL}" y="{top + 32 + row * _CELL}" width="{(end - start) * _CELL}" '
                f'height="{_CELL - 1}" fill="{_COLOURS[int(line[start])]}"/>'
            )
    parts.append("</g>")
    return "".join(parts), 44 + -(-len(kinds) // _COLUMNS) * _CELL


def _legend(top: int) -> str:
    parts, x = [], 24
    for name, colour in list(zip(_NAMES, _COLOURS, strict=True))[_FREE:]:
        parts.append(f'<rect x="{x}" y="{top + 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{top + 20}" fill="{_DIM}" font-size="12">{escape(name)}</text>')
        x += 30 + 8 * len(name)
    return "".join(parts)
