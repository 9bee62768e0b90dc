"""BlockMap: draws every block of both tiers and owns the cursor on them. Rebuilds only lines whose cells changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from allocator.ids import Tier
from kvtop.model import format as fmt
from kvtop.model.view import TierView, View
from kvtop.tui import cells
from kvtop.tui.look import Look, Rgb, blend, rich_rgb
from kvtop.tui.widgets.lines import Moving, line, rule

#: Stands for the half cell under the cursor.
_CURSOR: Final = 127
_HERE: Final = 1 << 9
_MASK: Final = (1 << cells.BITS) - 1

_LEVEL_RGB: Final[tuple[Rgb, ...]] = ((33, 145, 140), (77, 189, 104), (151, 216, 62), (222, 227, 24), (255, 247, 180))
_LEVEL_ANSI: Final = ("cyan", "green", "bright_green", "yellow", "bright_yellow")
_STATE_RGB: Final[dict[int, Rgb]] = {
    cells.EMPTY: (13, 17, 23),
    cells.FREE: (38, 44, 56),
    cells.CACHED: (68, 83, 148),
    cells.RESERVED: (154, 111, 176),
    cells.RETIRED: (22, 18, 20),
    cells.FENCED: (255, 121, 198),
    cells.PINNED: (240, 64, 60),
    _CURSOR: (255, 255, 255),
}
_STATE_ANSI: Final = {
    cells.EMPTY: "black",
    cells.FREE: "bright_black",
    cells.CACHED: "blue",
    cells.RESERVED: "magenta",
    cells.RETIRED: "black",
    cells.FENCED: "bright_red",
    cells.PINNED: "red",
    _CURSOR: "bright_white",
}
#: Free glyphs sit low in lightness as half blocks; as characters they need more to be seen.
_FREE_GLYPH_RGB: Final[Rgb] = (88, 96, 105)
_GLYPHS: Final = {
    cells.EMPTY: " ",
    cells.FREE: "·",
    cells.CACHED: "o",
    cells.RESERVED: "r",
    cells.RETIRED: "_",
    cells.FENCED: "s",
    cells.PINNED: "x",
}
_MIXTURE_GLYPHS: Final = "-+*#"
_DIM_SHARE: Final = 0.32


class Painter:
    """Turns cell values into segments. Keeps every style it made, since styles are dear to make and few."""

    def __init__(self, look: Look) -> None:
        self.look = look
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
        return self._glyph_cell(code)

    def _glyph_cell(self, value: int) -> tuple[str, Style]:
        found = self._glyph.get(value)
        if found is None:
            found = self._glyph[value] = self._make_glyph(value)
        return found

    def _half_cell(self, value: int) -> tuple[str, Style]:
        found = self._half.get(value)
        if found is None:
            top, bottom = value >> cells.BITS & _MASK, value & _MASK
            upper, lower = self._ink(top), self._ink(bottom)
            # Two equal halves are a space: fewer bytes to write.
            same = upper == lower
            found = (" ", Style(bgcolor=lower)) if same else ("▀", Style(color=upper, bgcolor=lower))
            self._half[value] = found
        return found

    def _make_glyph(self, value: int) -> tuple[str, Style]:
        code = value & 127
        glyph = glyph_of(code)
        here, chosen = bool(value & _HERE), bool(value & cells.SELECTED)
        if self.look.depth == "none":
            return glyph, Style(reverse=chosen != here, underline=here and chosen, bold=chosen or here)
        if here:
            return glyph, Style(color=self._ink(cells.EMPTY), bgcolor=self._ink(_CURSOR), bold=True)
        if self.look.depth == "rgb" and glyph == _GLYPHS[cells.FREE]:
            return glyph, Style(color=rich_rgb(_FREE_GLYPH_RGB))
        ink = self._ink(value & ~cells.SELECTED)
        return glyph, Style(color=ink, reverse=chosen, bold=chosen)

    def _ink(self, value: int) -> RichColor | str:
        code = value & 127
        if self.look.depth != "rgb":
            return "bright_magenta" if value & cells.SELECTED else ansi_of(code)
        rgb = rgb_of(code)
        if value & cells.DIMMED and code not in (cells.EMPTY, cells.FREE):
            rgb = blend([(_DIM_SHARE, rgb), (1 - _DIM_SHARE, _STATE_RGB[cells.EMPTY])])
        return rich_rgb(rgb)


def glyph_of(code: int) -> str:
    """Return the character of a code."""
    if code >= cells.MIXED:
        mixture = cells.MIXTURES[code - cells.MIXED]
        if mixture.active:
            return _MIXTURE_GLYPHS[mixture.active - 1]
        return "o" if mixture.cached >= cells.QUARTERS / 2 else "·"
    if code >= cells.ACTIVE:
        return "+" if code - cells.ACTIVE >= 9 else str(code - cells.ACTIVE + 1)
    return _GLYPHS[code]


def rgb_of(code: int) -> Rgb:
    """Return the colour of a code; a mixture's is the mean of its blocks' colours."""
    if code in _STATE_RGB:
        return _STATE_RGB[code]
    if code < cells.MIXED:
        return _LEVEL_RGB[cells.level_of(code - cells.ACTIVE + 1)]
    mixture = cells.MIXTURES[code - cells.MIXED]
    return blend(
        [
            (mixture.cached, _STATE_RGB[cells.CACHED]),
            (mixture.active, _LEVEL_RGB[mixture.level]),
            (cells.QUARTERS - mixture.cached - mixture.active, _STATE_RGB[cells.FREE]),
        ]
    )


def ansi_of(code: int) -> str:
    """Return the one of 16 colours for a code; a mixture takes that of its majority."""
    if code in _STATE_ANSI:
        return _STATE_ANSI[code]
    if code < cells.MIXED:
        return _LEVEL_ANSI[cells.level_of(code - cells.ACTIVE + 1)]
    mixture = cells.MIXTURES[code - cells.MIXED]
    free = cells.QUARTERS - mixture.cached - mixture.active
    if mixture.active and mixture.active >= max(mixture.cached, free):
        return _LEVEL_ANSI[mixture.level]
    return _STATE_ANSI[cells.CACHED if mixture.cached >= free else cells.FREE]


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block of one tier."""

    tier: Tier
    block_id: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One tier on the map: its first virtual line, and how many lines its blocks take."""

    tier: Tier
    num_blocks: int
    first: int
    lines: int


class BlockMap(Moving, can_focus=True):
    """The map of both tiers, from the title line to the legend.

    Attributes:
        zoom: Which scale was asked for.
        cursor: The block that the keys are on.
        pointed: The block under the mouse; ``None`` when it is elsewhere.
        strips_built: How many lines were drawn so far; an unchanged frame adds none.
    """

    class Pointed(Message):
        """The cursor or the mouse came to another block."""

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look = look
        self.zoom: cells.Zoom = "fit"
        self.cursor = BlockRef("device", 0)
        self.pointed: BlockRef | None = None
        self.message = "starting engine…"
        self.strips_built = 0
        self._painter = Painter(look)
        self._tiers: dict[Tier, TierView] = {}
        self._table: NDArray[np.int64] | None = None
        self._chosen = ""
        self._scale = cells.Scale(False, 1, 1)
        self._parts: tuple[_Part, ...] = ()
        self._gutter = 0
        self._top = 0
        self._groups: dict[Tier, cells.Codes] = {}
        self._values: NDArray[np.uint32] = np.zeros((0, 0), np.uint32)
        self._labels: list[tuple[str, bool]] = []
        self._strips: list[Strip] = []
        self._frame: list[Text] = []
        self._drawn_for = (0, 0)

    # What to draw ---------------------------------------------------------------------------------------------------

    def show(self, view: View, chosen: str = "") -> None:
        """Draw a view; ``chosen`` names the selected sequence, whose blocks are ``view.focus_table``."""
        tiers: dict[Tier, TierView] = {}
        if view.device is not None:
            tiers["device"] = view.device
        if view.host is not None:
            tiers["host"] = view.host
        for tier in ("device", "host"):
            if tiers.get(tier) is not self._tiers.get(tier):
                self._groups.pop(tier, None)
        self._tiers = tiers
        self._table = view.focus_table if chosen else None
        self._chosen = chosen
        if view.snapshot is not None and not self._tiers:
            self.message = "this source gives no block map"
        self.redraw()

    def say(self, message: str) -> None:
        """Show ``message`` instead of a map that is not there."""
        self.message = message
        self.redraw()

    def set_zoom(self, zoom: cells.Zoom) -> None:
        """Draw at another scale."""
        self.zoom = zoom
        self.redraw()

    @property
    def scale(self) -> cells.Scale:
        """The scale of the last frame."""
        return self._scale

    @property
    def under(self) -> BlockRef:
        """The block under the mouse, else under the cursor."""
        return self.pointed or self.cursor

    def redraw(self) -> None:
        """Bring the lines up to date and repaint what changed."""
        width, height = self.size
        if width < 12 or height < 3:
            return
        self._lay_out(width, height)
        if not self._tiers:
            self._labels, self._strips = [], []
            self._values = np.zeros((0, 0), np.uint32)
            self.refresh()
            return
        values, labels = self._cells(height - 2)
        fresh = values.shape != self._values.shape or self._drawn_for != (width, height)
        if fresh:
            self._drawn_for = (width, height)
            self._strips = [Strip.blank(width)] * len(values)
            dirty = np.ones(len(values), bool)
        else:
            dirty = (values != self._values).any(axis=1)
            dirty |= np.array([new != old for new, old in zip(labels, self._labels, strict=True)])
        previous, self._values, old_labels, self._labels = self._values, values, self._labels, labels
        rows = np.flatnonzero(dirty).tolist()
        for y in rows:
            self._strips[y] = self._strip(values[y], labels[y], width)
        regions = self._frame_changes(width, height)
        if fresh or len(rows) > 0.6 * len(values):
            self.refresh()
            return
        for y in rows:
            changed = np.flatnonzero(values[y] != previous[y])
            left, right = (0, width) if labels[y] != old_labels[y] else (int(changed[0]), int(changed[-1]) + 1)
            offset = self._gutter if labels[y] == old_labels[y] else 0
            regions.append(Region(left + offset, y + 1, right - left, 1))
        if regions:
            self.refresh(*regions)

    def _lay_out(self, width: int, height: int) -> None:
        sizes = tuple(tier.arrays.num_blocks for tier in self._tiers.values())
        digits = len(str(max(sizes, default=1) - 1))
        self._gutter = digits + 2
        columns = width - self._gutter - 1
        columns -= columns % 8 if columns >= 32 else 0
        body = height - 2 - max(0, len(sizes) - 1)
        scale = cells.choose_scale(sizes, columns, body, self.zoom, self.look.glyphs_only)
        if scale.per_cell != self._scale.per_cell:
            self._groups = {}
        self._scale = scale
        parts, first = [], 0
        for tier, view in self._tiers.items():
            lines = self._scale.lines(view.arrays.num_blocks)
            parts.append(_Part(tier, view.arrays.num_blocks, first, lines))
            first += lines + 1
        self._parts = tuple(parts)
        if parts:
            self._keep_cursor_inside()
            self._top = self._scrolled(first - 1, height - 2)

    def _keep_cursor_inside(self) -> None:
        part = next((p for p in self._parts if p.tier == self.cursor.tier), self._parts[0])
        block_id = min(max(0, self.cursor.block_id), max(0, part.num_blocks - 1))
        if (part.tier, block_id) != (self.cursor.tier, self.cursor.block_id):
            self.cursor = BlockRef(part.tier, block_id)

    def _scrolled(self, total: int, shown: int) -> int:
        """Return the first virtual line to show, moved no further than the cursor needs."""
        at = self._line_of(self.cursor)
        top = min(max(self._top, at - shown + 1), at)
        return max(0, min(top, total - shown))

    def _line_of(self, block: BlockRef) -> int:
        part = next(p for p in self._parts if p.tier == block.tier)
        row = block.block_id // (self._scale.per_cell * self._scale.columns)
        return part.first + (row // 2 if self._scale.halves else row)

    def _cells(self, shown: int) -> tuple[NDArray[np.uint32], list[tuple[str, bool]]]:
        """Return the cell values of the visible lines and their labels: (text, whether the cursor is there)."""
        scale = self._scale
        values = np.zeros((shown, scale.columns), np.uint32)
        labels = [("", False)] * shown
        for part in self._parts:
            low, high = max(self._top, part.first), min(self._top + shown, part.first + part.lines)
            if part.first - 1 >= self._top and part.first - 1 < self._top + shown and part.first:
                labels[part.first - 1 - self._top] = (f"title {part.tier}", False)
            if low >= high:
                continue
            rows_a_line = 2 if scale.halves else 1
            first_row, last_row = (low - part.first) * rows_a_line, (high - part.first) * rows_a_line
            grid = self._grid(part, first_row, last_row)
            packed = grid[0::2].astype(np.uint32) << cells.BITS | grid[1::2] if scale.halves else grid
            values[low - self._top : high - self._top] = packed
            for y in range(low, high):
                start = (y - part.first) * rows_a_line * scale.columns * scale.per_cell
                here = part.tier == self.cursor.tier and y == self._line_of(self.cursor)
                labels[y - self._top] = (str(start), here)
        return values, labels

    def _grid(self, part: _Part, first_row: int, last_row: int) -> NDArray[np.uint32]:
        """Return the codes of some rows of one tier, cursor and selection marked. [rows, columns]"""
        scale, arrays = self._scale, self._tiers[part.tier].arrays
        first, last = first_row * scale.columns, last_row * scale.columns
        num_cells = -(-part.num_blocks // scale.per_cell)
        if scale.per_cell == 1:
            codes = cells.block_codes(arrays, first, min(last, part.num_blocks))
        else:
            if part.tier not in self._groups:
                self._groups[part.tier] = cells.group_codes(arrays, scale.per_cell)
            codes = self._groups[part.tier][first : min(last, num_cells)]
        if self._table is not None:
            table = self._table if part.tier == "device" else self._table[:0]
            codes = cells.mark_selected(codes, table, scale.per_cell, first * scale.per_cell)
        grid = np.full(last - first, cells.EMPTY, np.uint32)
        grid[: len(codes)] = codes
        at = self.cursor.block_id // scale.per_cell - first
        if part.tier == self.cursor.tier and 0 <= at < len(codes):
            grid[at] = _CURSOR if scale.halves else grid[at] | _HERE
        return grid.reshape(-1, scale.columns)

    # How it looks ---------------------------------------------------------------------------------------------------

    def _strip(self, values: NDArray[np.uint32], label: tuple[str, bool], width: int) -> Strip:
        self.strips_built += 1
        text, here = label
        if text.startswith("title "):
            return self._text_strip(self._title(text.removeprefix("title "), width), width)
        if not text:
            return Strip.blank(width)
        ink = self.look.style("key" if here else "faint")
        segments = [Segment(text.rjust(self._gutter - 1) + " ", ink), *self._painter.runs(values, self._scale.halves)]
        return Strip(segments).adjust_cell_length(width)

    def _text_strip(self, text: Text, width: int) -> Strip:
        segments = [Segment(t, style) for t, style, _ in text.render(self.app.console, end="")]
        return Strip(segments).adjust_cell_length(width)

    def _title(self, tier: str, width: int) -> Text:
        view = self._tiers.get(tier)  # type: ignore[call-overload]
        notes = []
        if tier == "device" and self._chosen:
            held = fmt.UNKNOWN if self._table is None else fmt.count(len(self._table))
            notes.append(f"{self._chosen}: {held} blocks lit")
        elif view is not None:
            notes.append(fmt.blocks(view.numbers.total))
            notes.append(f"{fmt.percent(view.numbers.usage_ratio)} used")
        if tier == "device":
            notes.append(self._scale_note())
        key = "1" if tier == "device" else ""
        name = "Device" if tier == "device" else "Host"
        return rule(self.look, width, name, notes, key=key, focused=self.has_focus and self.cursor.tier == tier)

    def _scale_note(self) -> str:
        cell = "half a cell" if self._scale.halves else "a cell"
        return f"{cell} = {fmt.blocks(self._scale.per_cell)}"

    def _legend(self, width: int) -> Text:
        halves, dim = self._scale.halves, self.look.style("dim")
        text = line(" ")
        self._add_entry(text, cells.FREE, "free")
        self._add_entry(text, cells.CACHED, "cached")
        if self._scale.per_cell > 1 and not halves:
            text.append(f"{_MIXTURE_GLYPHS} held, by quarters ", dim)
        elif halves:
            text.append("held by ", dim)
            for start, name in zip(cells.LEVEL_STARTS, cells.LEVEL_NAMES, strict=True):
                self._add_entry(text, cells.ACTIVE + start - 1, name)
        else:
            for start in cells.LEVEL_STARTS:
                text.append(*self._painter.swatch(cells.ACTIVE + min(start, 10) - 1, halves))
            text.append("+ holders ", dim)
        for code, name in ((cells.PINNED, "pinned"), (cells.FENCED, "copying"), (cells.RESERVED, "reserved")):
            if text.cell_len + len(name) + 3 <= width:
                self._add_entry(text, code, name)
        return text

    def _add_entry(self, text: Text, code: int, name: str) -> None:
        text.append(*self._painter.swatch(code, self._scale.halves))
        text.append(f" {name} ", self.look.style("dim"))

    def _frame_changes(self, width: int, height: int) -> list[Region]:
        """Bring title, host title and legend up to date; return where they changed."""
        frame = [self._title("device", width), self._legend(width)]
        regions = []
        if frame != self._frame:
            self._frame = frame
            regions = [Region(0, 0, width, 1), Region(0, height - 1, width, 1)]
        for y, (text, _) in enumerate(self._labels):
            if text.startswith("title "):
                strip = self._text_strip(self._title(text.removeprefix("title "), width), width)
                if strip != self._strips[y]:
                    self._strips[y] = strip
                    regions.append(Region(0, y + 1, width, 1))
        return regions

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        base = self.rich_style
        if not self._tiers:
            if y == 0:
                return self._text_strip(rule(self.look, width, "Device", key="1"), width).apply_style(base)
            if y == height // 2:
                text = line((self.message.center(width), self.look.style("dim")))
                return self._text_strip(text, width).apply_style(base)
            return Strip.blank(width, base)
        if self._drawn_for != (width, height):
            self.redraw()
        if y == 0 and self._frame:
            return self._text_strip(self._frame[0], width).apply_style(base)
        if y == height - 1 and self._frame:
            return self._text_strip(self._frame[1], width).apply_style(base)
        if 0 < y <= len(self._strips):
            return self._strips[y - 1].apply_style(base)
        return Strip.blank(width, base)

    # Cursor and mouse -----------------------------------------------------------------------------------------------

    def put_cursor(self, block: BlockRef) -> None:
        """Move the cursor to a block; one outside the pool becomes the nearest inside."""
        self.cursor = block
        self.pointed = None
        self.redraw()
        self.post_message(self.Pointed())

    def move(self, way: str) -> None:
        """Move the cursor one cell or one page, or to the first or last block; up and down cross the tiers."""
        if not self._parts:
            return
        index, part = next((i, p) for i, p in enumerate(self._parts) if p.tier == self.cursor.tier)
        scale = self._scale
        page = max(1, self.size.height - 3) * (2 if scale.halves else 1)
        step = {"left": -1, "right": 1, "up": -scale.columns, "down": scale.columns}
        step |= {"page_up": -page * scale.columns, "page_down": page * scale.columns}
        last = -(-part.num_blocks // scale.per_cell) - 1
        cell = self.cursor.block_id // scale.per_cell
        if way == "first":
            cell = 0
        elif way == "last":
            cell = last
        else:
            wanted = cell + step[way]
            if wanted < 0 and way == "up" and index > 0:
                before = self._parts[index - 1]
                end = -(-before.num_blocks // scale.per_cell)
                rows = -(-end // scale.columns)
                cell = min(end - 1, (rows - 1) * scale.columns + cell % scale.columns)
                part = before
            elif wanted > last and way == "down" and index + 1 < len(self._parts):
                if cell // scale.columns == last // scale.columns:
                    part = self._parts[index + 1]
                    cell %= scale.columns
                else:
                    cell = last
            elif wanted < 0 or wanted > last:
                cell = cell if way in ("up", "down") else 0 if wanted < 0 else last
            else:
                cell = wanted
        self.put_cursor(BlockRef(part.tier, min(cell * scale.per_cell, part.num_blocks - 1)))

    def block_at(self, x: int, y: int) -> BlockRef | None:
        """Return the block drawn at a position of this widget: the upper one where a cell shows two."""
        scale = self._scale
        column, virtual = x - self._gutter, y - 1 + self._top
        if not 0 <= column < scale.columns or not 0 < y < self.size.height - 1:
            return None
        for part in self._parts:
            if part.first <= virtual < part.first + part.lines:
                row = (virtual - part.first) * (2 if scale.halves else 1)
                block_id = (row * scale.columns + column) * scale.per_cell
                return BlockRef(part.tier, block_id) if block_id < part.num_blocks else None
        return None

    def on_mouse_move(self, event: events.MouseMove) -> None:
        pointed = self.block_at(event.x, event.y)
        if pointed != self.pointed:
            self.pointed = pointed
            self.post_message(self.Pointed())

    def on_leave(self) -> None:
        self.pointed = None
        self.post_message(self.Pointed())

    def on_click(self, event: events.Click) -> None:
        block = self.block_at(event.x, event.y)
        if block is None:
            return
        below = BlockRef(block.tier, block.block_id + self._scale.columns * self._scale.per_cell)
        part = next(p for p in self._parts if p.tier == block.tier)
        if self._scale.halves and block == self.cursor and below.block_id < part.num_blocks:
            block = below
        self.put_cursor(block)

    def on_resize(self) -> None:
        self.redraw()
