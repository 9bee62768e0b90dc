"""Pictures in dots: a moment as PNG, several as GIF. Draws the same as the SVG, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kvtop.pictures.heatmap import (
    CELL,
    CELLS_BELOW,
    COLOURS,
    COLUMNS,
    DIM,
    INK,
    PAPER,
    TOP,
    WIDTH,
    Drawn,
    drawn_tiers,
    heading,
    legend,
)
from kvtop.recording.reader import Moment

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Dots of a still picture for each of the SVG's, so that text is sharp.
_SHARPER: Final = 2
#: Milliseconds that a picture of a moving one stands, and the last one.
_FRAME_MS: Final = 200
_LAST_MS: Final = 1500


def to_png(moment: Moment, title: str) -> bytes:
    """Return a moment's block map as a PNG."""
    out = io.BytesIO()
    _draw(moment, title, _SHARPER, None).save(out, "PNG")
    return out.getvalue()


def to_gif(moments: Iterable[Moment], title: str) -> bytes:
    """Return the block maps of several moments as a GIF that plays for ever.

    All pictures have the size that the first one needs; of a pool that grows beyond it, the rest is left out.
    """
    images: list[Image.Image] = []
    for moment in moments:
        images.append(_draw(moment, title, 1, images[0].height if images else None).quantize(64))
    out = io.BytesIO()
    images[0].save(
        out,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=[*[_FRAME_MS] * (len(images) - 1), _LAST_MS],
        loop=0,
        disposal=1,
    )
    return out.getvalue()


def _draw(moment: Moment, title: str, scale: int, height: int | None) -> Image.Image:
    tiers = drawn_tiers(moment)
    foot = TOP + sum(tier.height for tier in tiers)
    image = Image.new("RGB", (WIDTH * scale, height or (foot + 40) * scale), PAPER)
    pen = ImageDraw.Draw(image)
    first, second = heading(moment, title)
    pen.text((24 * scale, 30 * scale), first, INK, _font(17 * scale), anchor="ls")
    pen.text((24 * scale, 52 * scale), second, DIM, _font(13 * scale), anchor="ls")
    top = TOP
    for tier in tiers:
        pen.text((24 * scale, (top + 22) * scale), tier.caption, INK, _font(13 * scale), anchor="ls")
        image.paste(Image.fromarray(_cells(tier, scale)), (32 * scale, (top + CELLS_BELOW) * scale))
        top += tier.height
    for x, y, colour, name in legend(top):
        pen.rectangle((x * scale, y * scale, (x + 10) * scale, (y + 10) * scale), colour)
        pen.text(((x + 16) * scale, (y + 10) * scale), name, DIM, _font(12 * scale), anchor="ls")
    return image


def _cells(tier: Drawn, scale: int) -> NDArray[np.uint8]:
    """Return a tier's cells as dots, with a line of paper below each row. [h, w, 3]"""
    palette = np.array([tuple(bytes.fromhex(colour[1:])) for colour in (*COLOURS, PAPER)], np.uint8)
    kinds = np.full(tier.rows * COLUMNS, len(COLOURS))
    kinds[: len(tier.kinds)] = tier.kinds
    dots = kinds.reshape(tier.rows, COLUMNS).repeat(CELL * scale, axis=0).repeat(CELL * scale, axis=1)
    dots.reshape(tier.rows, CELL * scale, -1)[:, -scale:] = len(COLOURS)
    coloured: NDArray[np.uint8] = palette[dots]
    return coloured


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
