"""Themes: every colour of the console, by name. Owns no drawing; ``kvtop.tui.look`` turns names into styles.

In each theme the map's free, cached and held blocks stand apart by lightness alone, so that nothing hangs on telling
hues apart; ``colour-blind`` keeps to blue and yellow besides, and ``contrast`` to black, white and full colours.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Rgb = tuple[int, int, int]

#: Colours that sequences get in turn, and shades of the ramps for age, fill and contiguity.
NUM_OWNER_COLOURS: Final = 48
NUM_LEVELS: Final = 10


@dataclass(frozen=True, slots=True)
class Theme:
    """One theme.

    Attributes:
        name: As options and the command line write it.
        background, panel: Behind the panes, and behind dialogs.
        styles: Style name → Rich style.
        free, cached, reserved, retired, copying, pinned, cursor, flash: Colours of the map.
        free_glyph: A free block written as a character, which needs more to be seen.
        levels: Held blocks by reference count, five.
        ramp: Stops of the colours from the lowest level to the highest.
        other_ramp: The same, of a second kind of block beside the first.
        owner_lightness: The two lightnesses of the owners' colours.
    """

    name: str
    background: str
    panel: str
    styles: Mapping[str, str]
    free: Rgb
    cached: Rgb
    reserved: Rgb
    retired: Rgb
    copying: Rgb
    pinned: Rgb
    cursor: Rgb
    flash: Rgb
    free_glyph: Rgb
    levels: tuple[Rgb, ...]
    ramp: tuple[Rgb, ...]
    other_ramp: tuple[Rgb, ...]
    owner_lightness: tuple[float, float] = (0.62, 0.8)

    @property
    def background_rgb(self) -> Rgb:
        """The background as numbers."""
        return _parse(self.background)

    def ramp_colour(self, level: int, *, other: bool = False) -> Rgb:
        """Return the colour of a level from 0 to ``NUM_LEVELS`` − 1."""
        stops = self.other_ramp if other else self.ramp
        at = level / (NUM_LEVELS - 1) * (len(stops) - 1)
        low = min(int(at), len(stops) - 2)
        share = at - low
        r, g, b = (round(x + (y - x) * share) for x, y in zip(stops[low], stops[low + 1], strict=True))
        return r, g, b

    def owner_colour(self, slot: int) -> Rgb:
        """Return one of ``NUM_OWNER_COLOURS`` colours."""
        hues = NUM_OWNER_COLOURS // 2
        lightness = self.owner_lightness[slot // hues]
        r, g, b = (round(255 * part) for part in colorsys.hls_to_rgb(slot % hues / hues, lightness, 0.62))
        return r, g, b


def _parse(text: str) -> Rgb:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _ui(
    *,
    back: str,
    text: str,
    strong: str,
    dim: str,
    faint: str,
    label: str,
    rule: str,
    focus: str,
    good: str,
    warn: str,
    bad: str,
    bar: str,
    cached: str,
    row: str,
    row_focus: str,
    chosen: str,
    on_bad: str = "#ffffff",
) -> dict[str, str]:
    return {
        "text": text,
        "dim": dim,
        "faint": faint,
        "label": label,
        "value": f"bold {strong}",
        "title": f"bold {strong}",
        "rule": rule,
        "rule-focus": focus,
        "good": good,
        "warn": warn,
        "bad": f"bold {bad}",
        "badge-good": f"bold {back} on {good}",
        "badge-warn": f"bold {back} on {warn}",
        "badge-bad": f"bold {on_bad} on {bad}",
        "badge-dim": f"bold {back} on {dim}",
        "key": f"bold {warn}",
        "bar": bar,
        "bar-cached": cached,
        "bar-empty": rule,
        "spark": label,
        "row": f"on {row}",
        "row-focus": f"on {row_focus}",
        "chosen": f"bold {chosen}",
    }


_VIRIDIS: Final[tuple[Rgb, ...]] = ((98, 74, 158), (76, 108, 172), (40, 152, 148), (94, 201, 98), (253, 231, 37))
_CIVIDIS: Final[tuple[Rgb, ...]] = ((0, 52, 110), (65, 77, 107), (124, 123, 120), (187, 173, 108), (254, 232, 56))

DARK: Final = Theme(
    name="dark",
    background="#0d1117",
    panel="#161b22",
    styles={
        "text": "#c9d1d9",
        "dim": "#7d8590",
        "faint": "#484f58",
        "label": "#58a6c7",
        "value": "bold #f0f6fc",
        "title": "bold #e6edf3",
        "rule": "#30363d",
        "rule-focus": "#2f81a7",
        "good": "#5ec962",
        "warn": "#e3b341",
        "bad": "bold #ff7b72",
        "badge-good": "bold #0d1117 on #3fb950",
        "badge-warn": "bold #0d1117 on #e3b341",
        "badge-bad": "bold #ffffff on #b62324",
        "badge-dim": "bold #0d1117 on #7d8590",
        "key": "bold #e3b341",
        "bar": "#21918c",
        "bar-cached": "#4f62a3",
        "bar-empty": "#30363d",
        "spark": "#3d8fc4",
        "row": "on #1f2a38",
        "row-focus": "on #1f4b6e",
        "chosen": "bold #f5e663",
    },
    free=(38, 44, 56),
    cached=(68, 83, 148),
    reserved=(154, 111, 176),
    retired=(22, 18, 20),
    copying=(255, 121, 198),
    pinned=(240, 64, 60),
    cursor=(255, 255, 255),
    flash=(255, 255, 255),
    free_glyph=(88, 96, 105),
    levels=((33, 145, 140), (77, 189, 104), (151, 216, 62), (222, 227, 24), (255, 247, 180)),
    ramp=_VIRIDIS,
    other_ramp=((112, 84, 78), (150, 90, 66), (208, 118, 54), (255, 196, 128)),
)

LIGHT: Final = Theme(
    name="light",
    background="#ffffff",
    panel="#f6f8fa",
    styles=_ui(
        back="#ffffff",
        text="#24292f",
        strong="#0b0f14",
        dim="#57606a",
        faint="#8c959f",
        label="#0b5d86",
        rule="#d0d7de",
        focus="#0969da",
        good="#1a7f37",
        warn="#8a5a00",
        bad="#b42318",
        bar="#1b7f7a",
        cached="#8e9fd6",
        row="#e8eef5",
        row_focus="#cfe3fb",
        chosen="#6f42c1",
    ),
    free=(228, 232, 237),
    cached=(168, 182, 226),
    reserved=(190, 140, 214),
    retired=(250, 246, 244),
    copying=(214, 26, 134),
    pinned=(200, 30, 30),
    cursor=(0, 0, 0),
    flash=(0, 0, 0),
    free_glyph=(140, 149, 159),
    levels=((92, 178, 172), (48, 148, 104), (34, 112, 66), (66, 82, 20), (52, 28, 12)),
    ramp=((206, 222, 240), (134, 182, 214), (66, 146, 178), (24, 96, 120), (8, 48, 72)),
    other_ramp=((246, 226, 206), (238, 178, 118), (204, 112, 36), (120, 52, 8)),
    owner_lightness=(0.42, 0.6),
)

CONTRAST: Final = Theme(
    name="contrast",
    background="#000000",
    panel="#000000",
    styles=_ui(
        back="#000000",
        text="#ffffff",
        strong="#ffffff",
        dim="#d8d8d8",
        faint="#a8a8a8",
        label="#7fdfff",
        rule="#909090",
        focus="#ffff00",
        good="#00ff5f",
        warn="#ffd700",
        bad="#ff5f5f",
        bar="#00d7d7",
        cached="#6f8fff",
        row="#303030",
        row_focus="#0000c0",
        chosen="#ffff00",
        on_bad="#000000",
    ),
    free=(48, 48, 48),
    cached=(70, 100, 255),
    reserved=(200, 100, 255),
    retired=(14, 14, 14),
    copying=(255, 80, 220),
    pinned=(255, 40, 40),
    cursor=(255, 255, 255),
    flash=(255, 255, 255),
    free_glyph=(170, 170, 170),
    levels=((0, 190, 190), (0, 225, 90), (170, 240, 0), (255, 240, 0), (255, 255, 220)),
    ramp=((40, 40, 120), (0, 110, 200), (0, 200, 160), (170, 240, 0), (255, 255, 140)),
    other_ramp=((90, 40, 40), (190, 70, 40), (255, 130, 40), (255, 220, 160)),
)

COLOUR_BLIND: Final = Theme(
    name="colour-blind",
    background="#0d1117",
    panel="#161b22",
    styles=_ui(
        back="#0d1117",
        text="#d0d7de",
        strong="#f6f8fa",
        dim="#8b949e",
        faint="#565d66",
        label="#56b4e9",
        rule="#30363d",
        focus="#56b4e9",
        good="#56b4e9",
        warn="#e69f00",
        bad="#d55e00",
        bar="#7c7b78",
        cached="#3a5f94",
        row="#1f2a38",
        row_focus="#1f4b6e",
        chosen="#f0e442",
        on_bad="#0d1117",
    ),
    free=(34, 40, 52),
    cached=(40, 76, 130),
    reserved=(86, 120, 190),
    retired=(20, 20, 22),
    copying=(255, 255, 255),
    pinned=(213, 94, 0),
    cursor=(255, 255, 255),
    flash=(255, 255, 255),
    free_glyph=(96, 104, 114),
    levels=((124, 123, 120), (160, 150, 112), (195, 178, 106), (228, 205, 82), (255, 240, 140)),
    ramp=_CIVIDIS,
    other_ramp=((30, 44, 70), (44, 86, 150), (86, 150, 220), (190, 220, 250)),
)

THEMES: Final[Mapping[str, Theme]] = {theme.name: theme for theme in (DARK, LIGHT, CONTRAST, COLOUR_BLIND)}
