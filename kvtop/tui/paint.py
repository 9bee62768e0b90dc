"""Paint: cell values → coloured segments, at each colour depth and in each theme. Knows no widget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style

from kvtop.tui import cells
from kvtop.tui.look import Look, blend, rich_rgb
from kvtop.tui.shades import OTHER, SHADE, Mode
from kvtop.tui.themes import DARK, Rgb, Theme

#: Stands for the half cell under the cursor.
CURSOR: Final = 127
#: Set on the character cell under the cursor.
HERE: Final = 1 << cells.BITS
#: In a character's value: where the code begins whose character is written, when the colour says something else.
GLYPH_SHIFT: Final = cells.BITS + 2
_MASK: Final = (1 << cells.BITS) - 1
_CODE: Final = 127

_LEVEL_ANSI: Final = ("cyan", "green", "bright_green", "yellow", "bright_yellow")
_STATE_ANSI: Final = {
    cells.EMPTY: "black",
    cells.FREE: "bright_black",
    cells.CACHED: "blue",
    cells.RESERVED: "magenta",
    cells.RETIRED: "black",
    cells.FENCED: "bright_red",
    cells.PINNED: "red",
    CURSOR: "bright_white",
}
_RAMP_ANSI: Final = ("blue", "cyan", "green", "bright_green", "bright_yellow")
_OTHER_ANSI: Final = ("bright_black", "magenta", "bright_magenta", "bright_red", "bright_white")
_OWNER_ANSI: Final = (
    "cyan", "green", "yellow", "magenta", "bright_cyan", "bright_green", "bright_yellow", "bright_magenta",
    "bright_blue", "white",
)  # fmt: skip
_GLYPHS: Final = {
    cells.EMPTY: " ",
    cells.FREE: "·",
    cells.CACHED: "o",
    cells.RESERVED: "r",
    cells.RETIRED: "_",
    cells.FENCED: "s",
    cells.PINNED: "x",
}
MIXTURE_GLYPHS: Final = "-+*#"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIM_SHARE: Final = 0.32
_FLASH_SHARE: Final = 0.65


class Painter:
    """Turns cell values into segments. Keeps every style it made, since styles are dear to make and few.

    Attributes:
        look, mode: How, and what the colours say.
        base: The style behind every cell.
    """

    def __init__(self, look: Look, mode: Mode = "references", base: Style | None = None) -> None:
        self.look = look
        self.mode = mode
        self.base = base or Style.null()
        self._glyph: dict[int, tuple[str, Style]] = {}
        self._half: dict[int, tuple[str, Style]] = {}

    def runs(self, values: NDArray[np.uint32], halves: bool) -> list[Segment]:
        """Return one line's segments, equal neighbours in one. [columns] → segments"""
        find = self._half_cell if halves else self._glyph_cell
        edges = np.flatnonzero(values[1:] != values[:-1]) + 1
        starts = [0, *edges.tolist()]
        stops = [*starts[1:], len(values)]
        segments = []
        for value, start, stop in zip(values[starts].tolist(), starts, stops, strict=True):
            glyph, style = find(value)
            segments.append(Segment(glyph * (stop - start), style))
        return segments

    def swatch(self, code: int, halves: bool) -> tuple[str, Style]:
        """Return a sample of ``code`` for the legend."""
        if halves:
            return " ", self._half_cell(code << cells.BITS | code)[1]
        glyph, style = self._glyph_cell(code)
        return (glyph, style) if code < SHADE or self.look.depth == "none" else ("█", style)

    def _glyph_cell(self, value: int) -> tuple[str, Style]:
        found = self._glyph.get(value)
        if found is None:
            glyph, style = self._make_glyph(value)
            found = self._glyph[value] = (glyph, self.base + style)
        return found

    def _half_cell(self, value: int) -> tuple[str, Style]:
        found = self._half.get(value)
        if found is None:
            top, bottom = value >> cells.BITS & _MASK, value & _MASK
            upper, lower = self._ink(top), self._ink(bottom)
            # Two equal halves are a space: fewer bytes to write.
            same = upper == lower
            found = (" ", Style(bgcolor=lower)) if same else ("▀", Style(color=upper, bgcolor=lower))
            found = self._half[value] = (found[0], self.base + found[1])
        return found

    def _make_glyph(self, value: int) -> tuple[str, Style]:
        code, written = value & _CODE, value >> GLYPH_SHIFT
        glyph = glyph_of(written if written and self.look.depth != "none" else code, self.mode)
        here, chosen, changed = bool(value & HERE), bool(value & cells.SELECTED), bool(value & cells.FLASH)
        if self.look.depth == "none":
            return glyph, Style(
                reverse=chosen != here, underline=(here and chosen) or changed, bold=chosen or here or changed
            )
        if here:
            return glyph, Style(color=self._ink(cells.EMPTY), bgcolor=self._ink(CURSOR), bold=True)
        if self.look.depth == "rgb" and glyph == _GLYPHS[cells.FREE] and not changed:
            return glyph, Style(color=rich_rgb(self.look.theme.free_glyph))
        ink = self._ink(value & (_MASK & ~cells.SELECTED))
        return glyph, Style(color=ink, reverse=chosen, bold=chosen or changed, underline=changed or None)

    def _ink(self, value: int) -> RichColor | str:
        code = value & _CODE
        if self.look.depth != "rgb":
            if value & cells.FLASH:
                return "bright_white"
            return "bright_magenta" if value & cells.SELECTED else ansi_of(code, self.mode)
        theme = self.look.theme
        rgb = rgb_of(code, self.mode, theme)
        if value & cells.DIMMED and code not in (cells.EMPTY, cells.FREE):
            rgb = blend([(_DIM_SHARE, rgb), (1 - _DIM_SHARE, theme.background_rgb)])
        if value & cells.FLASH:
            rgb = blend([(_FLASH_SHARE, theme.flash), (1 - _FLASH_SHARE, rgb)])
        return rich_rgb(rgb)


def glyph_of(code: int, mode: Mode = "references") -> str:
    """Return the character of a code."""
    if code >= SHADE:
        shade = code - SHADE
        if mode == "owner":
            return _LETTERS[shade % len(_LETTERS)]
        return str(shade) if shade < OTHER else _LETTERS[shade - OTHER]
    if code >= cells.MIXED:
        mixture = cells.MIXTURES[code - cells.MIXED]
        if mixture.active:
            return MIXTURE_GLYPHS[mixture.active - 1]
        return "o" if mixture.cached >= cells.QUARTERS / 2 else "·"
    if code >= cells.ACTIVE:
        return "+" if code - cells.ACTIVE >= 9 else str(code - cells.ACTIVE + 1)
    return _GLYPHS[code]


def _state_rgb(theme: Theme) -> Mapping[int, Rgb]:
    return {
        cells.EMPTY: theme.background_rgb,
        cells.FREE: theme.free,
        cells.CACHED: theme.cached,
        cells.RESERVED: theme.reserved,
        cells.RETIRED: theme.retired,
        cells.FENCED: theme.copying,
        cells.PINNED: theme.pinned,
        CURSOR: theme.cursor,
    }


def rgb_of(code: int, mode: Mode = "references", theme: Theme = DARK) -> Rgb:
    """Return the colour of a code; a mixture's is the mean of its blocks' colours."""
    states = _state_rgb(theme)
    if code in states:
        return states[code]
    if code >= SHADE:
        shade = code - SHADE
        if mode == "owner":
            return theme.owner_colour(shade)
        if mode == "age":  # the older, the less it matters
            return theme.ramp_colour(OTHER - 1 - shade)
        return theme.ramp_colour(shade % OTHER, other=shade >= OTHER)
    if code < cells.MIXED:
        return theme.levels[cells.level_of(code - cells.ACTIVE + 1)]
    mixture = cells.MIXTURES[code - cells.MIXED]
    return blend(
        [
            (mixture.cached, theme.cached),
            (mixture.active, theme.levels[mixture.level]),
            (cells.QUARTERS - mixture.cached - mixture.active, theme.free),
        ]
    )


def ansi_of(code: int, mode: Mode = "references") -> str:
    """Return the one of 16 colours for a code; a mixture takes that of its majority."""
    if code in _STATE_ANSI:
        return _STATE_ANSI[code]
    if code >= SHADE:
        shade = code - SHADE
        if mode == "owner":
            return _OWNER_ANSI[shade % len(_OWNER_ANSI)]
        level = (OTHER - 1 - shade if mode == "age" else shade % OTHER) // 2
        return _OTHER_ANSI[level] if shade >= OTHER else _RAMP_ANSI[level]
    if code < cells.MIXED:
        return _LEVEL_ANSI[cells.level_of(code - cells.ACTIVE + 1)]
    mixture = cells.MIXTURES[code - cells.MIXED]
    free = cells.QUARTERS - mixture.cached - mixture.active
    if mixture.active and mixture.active >= max(mixture.cached, free):
        return _LEVEL_ANSI[mixture.level]
    return _STATE_ANSI[cells.CACHED if mixture.cached >= free else cells.FREE]
