"""Legend: the map's last line, which says what its colours and characters mean in the mode it is drawn in."""

from __future__ import annotations

from rich.text import Text

from kvtop.tui import cells
from kvtop.tui.paint import MIXTURE_GLYPHS, Painter
from kvtop.tui.shades import OTHER, SHADE, SHARED, age_text
from kvtop.tui.themes import NUM_LEVELS
from kvtop.tui.widgets.lines import line

_ALARMS = ((cells.PINNED, "pinned"), (cells.FENCED, "copying"), (cells.RESERVED, "reserved"))


def legend(painter: Painter, scale: cells.Scale, width: int, *, is_mirror: bool = False) -> Text:
    """Return the legend of a map at this scale; entries without room are left out from the end."""
    made = _Legend(painter, scale.halves, width)
    if is_mirror:
        return _mirror(made, scale)
    match painter.mode:
        case "references":
            _references(made, scale)
        case "state":
            made.add(cells.FREE, "free")
            made.add(cells.CACHED, "cached")
            made.add(cells.ACTIVE, "held")
            made.add(SHARED, "shared")
        case "owner":
            made.add(cells.FREE, "free")
            made.add(cells.CACHED, "cached")
            made.ramp(range(0, 8), "a colour a sequence" if scale.per_cell == 1 else "the first holder in each cell")
        case "age":
            made.add(cells.FREE, "free")
            for level in (0, 1, 3, 5, 7, NUM_LEVELS - 1):
                made.add(SHADE + level, age_text(level))
        case "fill":
            made.add(cells.FREE, "free")
            made.say("filled 0")
            made.ramp(range(NUM_LEVELS), "100%")
        case "contiguity":
            made.say("run of 1")
            made.ramp(range(NUM_LEVELS), "256+ of a sequence")
            made.ramp(range(OTHER, OTHER + NUM_LEVELS), "allocatable")
    for code, name in _ALARMS:
        made.add(code, name)
    return made.text


def _mirror(made: _Legend, scale: cells.Scale) -> Text:
    """Say what a mirror shows: whether a block is held, events do not tell."""
    made.add(cells.FREE, "nothing told")
    match made.painter.mode:
        case "owner":
            made.ramp(
                range(0, 8), "a colour a branch of the prefixes" if scale.per_cell == 1 else "the first in each cell"
            )
        case "age":
            for level in (1, 3, 5, 7, NUM_LEVELS - 1):
                made.add(SHADE + level, age_text(level))
            made.say("ago")
        case "fill":
            made.say("filled 0")
            made.ramp(range(NUM_LEVELS), "100%")
        case _:
            made.add(cells.CACHED, "resident: held or idle, events do not tell")
    return made.text


def _references(made: _Legend, scale: cells.Scale) -> None:
    made.add(cells.FREE, "free")
    made.add(cells.CACHED, "cached")
    if scale.per_cell > 1 and not scale.halves:
        made.say(f"{MIXTURE_GLYPHS} held, by quarters")
    elif scale.halves:
        made.say("held by")
        for start, name in zip(cells.LEVEL_STARTS, cells.LEVEL_NAMES, strict=True):
            made.add(cells.ACTIVE + start - 1, name)
    else:
        for start in cells.LEVEL_STARTS:
            made.text.append(*made.painter.swatch(cells.ACTIVE + min(start, 10) - 1, False))
        made.say("+ holders")


class _Legend:
    def __init__(self, painter: Painter, halves: bool, width: int) -> None:
        self.painter, self._halves, self._width = painter, halves, width
        self.text = line(" ")

    def say(self, words: str) -> None:
        self.text.append(f"{words} ", self.painter.look.style("dim"))

    def add(self, code: int, name: str) -> None:
        if self.text.cell_len + len(name) + 3 <= self._width:
            self.text.append(*self.painter.swatch(code, self._halves))
            self.say(f" {name}")

    def ramp(self, shades: range, name: str) -> None:
        if self.text.cell_len + len(name) + len(shades) + 2 <= self._width:
            for shade in shades:
                self.text.append(*self.painter.swatch(SHADE + shade, self._halves))
            self.say(f" {name}")
