"""Look: which colours and characters this terminal gets. Owns every style of the panes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len
from rich.color import Color as RichColor
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from kvtop.tui.actions import USUAL, ActionTable
from kvtop.tui.themes import DARK, THEMES, Rgb, Theme

Depth = Literal["none", "ansi", "rgb"]

_ANSI: Final = {
    "text": "",
    "dim": "",
    "faint": "bright_black",
    "label": "cyan",
    "value": "bold",
    "title": "bold",
    "rule": "bright_black",
    "rule-focus": "cyan",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "badge-good": "black on green",
    "badge-warn": "black on yellow",
    "badge-bad": "bold white on red",
    "badge-dim": "black on white",
    "key": "bold yellow",
    "bar": "cyan",
    "bar-cached": "blue",
    "bar-empty": "bright_black",
    "spark": "cyan",
    "row": "reverse",
    "row-focus": "bold reverse",
    "chosen": "bold yellow",
}
#: Without colour the weight of the type carries the meaning.
_NONE: Final = {
    **dict.fromkeys(DARK.styles, ""),
    "value": "bold",
    "title": "bold",
    "bad": "bold reverse",
    "badge-good": "bold",
    "badge-warn": "bold reverse",
    "badge-bad": "bold reverse",
    "badge-dim": "bold",
    "key": "bold",
    "row": "underline",
    "row-focus": "reverse",
    "chosen": "bold",
}
_STYLES: Final[Mapping[str, Mapping[str, Style]]] = {
    **{name: {key: Style.parse(text) for key, text in theme.styles.items()} for name, theme in THEMES.items()},
    "ansi": {name: Style.parse(text) for name, text in _ANSI.items()},
    "none": {name: Style.parse(text) for name, text in _NONE.items()},
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one terminal is drawn.

    Attributes:
        depth: ``rgb`` (truecolor and 256 colours), ``ansi`` (16 colours) or ``none`` (``NO_COLOR``).
        ascii_only: Whether only ASCII characters may be written.
        theme: The colours, where the depth is ``rgb``; otherwise they are the terminal's own.
        table: The keys that texts name.
    """

    depth: Depth = "rgb"
    ascii_only: bool = False
    theme: Theme = DARK
    table: ActionTable = USUAL

    @property
    def glyphs_only(self) -> bool:
        """Whether the map must be readable by its characters, since half blocks would not be."""
        return self.depth == "none" or self.ascii_only

    def key(self, action: str) -> str:
        """Return the first key of an action, as texts write it."""
        return self.table.key(action)

    def style(self, name: str) -> Style:
        """Return the style of that name."""
        return _STYLES[self.theme.name if self.depth == "rgb" else self.depth][name]


def detect_look(ascii_only: bool = False, theme: str = DARK.name, table: ActionTable = USUAL) -> Look:
    """Return what the environment and the terminal's encoding allow, in a theme of ``THEMES``."""
    encoding = (getattr(sys.__stdout__, "encoding", None) or "ascii").lower().replace("-", "")
    ascii_only = ascii_only or encoding != "utf8"
    if os.environ.get("NO_COLOR"):
        return Look("none", ascii_only, THEMES[theme], table)
    system = Console(force_terminal=True, legacy_windows=False).color_system
    depth: Depth = "none" if system is None else "ansi" if system == "standard" else "rgb"
    return Look(depth, ascii_only, THEMES[theme], table)


_ASCII: Final = str.maketrans("─━│╭╮╰╯·—–…×→←↑↓█▒░▁▂▃▄▅▆▇▀├└●", "--|++++.--~x><^v#+._.-=+*%#++o")


class AsciiFilter(LineFilter):
    """Writes every line in ASCII alone: known signs by their likeness, all else as ``?``."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else Segment(_to_ascii(segment.text), segment.style, segment.control)
            for segment in segments
        ]


def _to_ascii(text: str) -> str:
    return "".join(c if c.isascii() else "?" * cell_len(c) for c in text.translate(_ASCII))


def blend(parts: list[tuple[float, Rgb]]) -> Rgb:
    """Return the mean of colours by weight, mixed as light is so that the middle does not darken."""
    total = sum(weight for weight, _ in parts) or 1.0
    r, g, b = (
        round((sum(weight * (rgb[i] / 255) ** 2.2 for weight, rgb in parts) / total) ** (1 / 2.2) * 255)
        for i in range(3)
    )
    return r, g, b


def rich_rgb(rgb: Rgb) -> RichColor:
    """Return a colour for Rich styles."""
    return RichColor.from_rgb(*rgb)
