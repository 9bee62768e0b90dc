"""A moving picture as SVG: the block maps of several moments, one after another. Self-contained; needs no script."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Final

import numpy as np
from PIL import Image

from kvtop.pictures.heatmap import (
    CELL,
    CELLS_BELOW,
    COLOURS,
    COLUMNS,
    DIM,
    INK,
    PAPER,
    TOP,
    Drawn,
    drawn_tiers,
    heading,
    svg_legend,
    svg_start,
)
from kvtop.recording.reader import Moment

#: Seconds that one picture stands.
_FRAME_S: Final = 0.2


def to_moving_svg(moments: Sequence[Moment], title: str) -> str:
    """Return an SVG document that shows the block maps of ``moments`` in turn, for ever.

    The cells of a moment are one small image, a dot a cell, so that a minute takes kilobytes and not megabytes.
    """
    tiers = [drawn_tiers(moment) for moment in moments]
    foot = TOP + max(sum(tier.height for tier in some) for some in tiers)
    length_s = len(moments) * _FRAME_S
    frames = [
        _frame(moment, some, title, i / len(moments), (i + 1) / len(moments), length_s)
        for i, (moment, some) in enumerate(zip(moments, tiers, strict=True))
    ]
    first, last = (moment.snapshot.step for moment in (moments[0], moments[-1]))
    return (
        f"{svg_start(foot + 40, f'{title}: steps {first:,} to {last:,}')}"
        f'<defs><pattern id="lines" width="{CELL}" height="{CELL}" patternUnits="userSpaceOnUse">'
        f'<rect y="{CELL - 1}" width="{CELL}" height="1" fill="{PAPER}"/></pattern></defs>'
        f"{''.join(frames)}{svg_legend(foot)}"
        f'<rect y="{foot + 36}" height="4" width="0" fill="{DIM}"><animate attributeName="width" from="0" to="960" '
        f'dur="{length_s:g}s" repeatCount="indefinite"/></rect></svg>'
    )


def _frame(moment: Moment, tiers: list[Drawn], title: str, begin: float, end: float, length_s: float) -> str:
    first, second = heading(moment, title)
    parts, top = [], TOP
    for tier in tiers:
        width, height = COLUMNS * CELL, tier.rows * CELL
        parts.append(
            f'<text x="24" y="{top + 22}" fill="{INK}">{escape(tier.caption)}</text>'
            f'<g transform="translate(32 {top + CELLS_BELOW})"><image width="{width}" height="{height}" '
            f'style="image-rendering:pixelated" preserveAspectRatio="none" href="{_dots(tier)}"/>'
            f'<rect width="{width}" height="{height}" fill="url(#lines)"/></g>'
        )
        top += tier.height
    times = [0.0, begin, end] if begin else [0.0, end]
    values = ["none", "inline", "none"] if begin else ["inline", "none"]
    return (
        f'<g display="{"none" if begin else "inline"}"><animate attributeName="display" calcMode="discrete" '
        f'dur="{length_s:g}s" repeatCount="indefinite" values="{";".join(values)}" '
        f'keyTimes="{";".join(f"{min(t, 0.99999):.5f}" for t in times)}"/>'
        f'<text x="24" y="30" fill="{INK}" font-size="17">{escape(first)}</text>'
        f'<text x="24" y="52" fill="{DIM}">{escape(second)}</text>{"".join(parts)}</g>'
    )


def _dots(tier: Drawn) -> str:
    """Return a tier's cells as an image of one dot a cell, as a data URL."""
    kinds = np.full(tier.rows * COLUMNS, len(COLOURS), np.uint8)
    kinds[: len(tier.kinds)] = tier.kinds
    image = Image.fromarray(kinds.reshape(tier.rows, COLUMNS), "P")
    image.putpalette(b"".join(bytes.fromhex(colour[1:]) for colour in (*COLOURS, PAPER)))
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
