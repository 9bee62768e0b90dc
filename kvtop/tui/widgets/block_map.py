"""BlockMap: draws every block of both tiers and owns the cursor on them. Rebuilds only lines whose cells changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from allocator.ids import Tier
from allocator.snapshot import Snapshot
from kvtop.model import format as fmt
from kvtop.model.mirror import PLACEMENT, MirrorReading
from kvtop.model.view import TierView, View
from kvtop.tui import cells, shades
from kvtop.tui.changes import Changes, Watch, have_moved
from kvtop.tui.look import Look
from kvtop.tui.paint import CURSOR, GLYPH_SHIFT, HERE, Painter
from kvtop.tui.widgets.legend import legend
from kvtop.tui.widgets.lines import Moving, line, printable, rule


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
        mode: What the colours say.
        watching: Which changes are marked for a moment.
        cursor: The block that the keys are on.
        marked: Where a range of blocks was begun, up to the cursor; ``None`` when there is no range.
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
        self.mode: shades.Mode = "references"
        self.watching: Watch = "moves"
        self.marked: BlockRef | None = None
        self._painter = Painter(look)
        self._snapshot: Snapshot | None = None
        self._mirror: MirrorReading | None = None
        self._shades: dict[Tier, shades.Shades] = {}
        self._changes: dict[Tier, Changes] = {"device": Changes(), "host": Changes()}
        self._now_s = 0.0
        self._next_event = 0
        self._dragged_from: BlockRef | None = None
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
        self._drawn: tuple[object, ...] = ()
        self._base = Style.null()

    # What to draw ---------------------------------------------------------------------------------------------------

    def show(self, view: View, chosen: str = "") -> None:
        """Draw a view; ``chosen`` names the selected sequence, whose blocks are ``view.focus_table``."""
        tiers = dict(view.maps)
        for tier in ("device", "host"):
            if tiers.get(tier) is not self._tiers.get(tier):
                self._groups.pop(tier, None)
                self._shades.pop(tier, None)
        self._tiers = tiers
        self._note_changes(view)
        self._table = view.focus_table if chosen else None
        self._chosen = chosen
        if view.snapshot is not None and not self._tiers:
            self.message = "this source gives no block map"
        self.redraw()

    def _note_changes(self, view: View) -> None:
        mirror = view.mirror.reading if view.mirror else None
        if mirror is not None and view.read_at_s is not None:
            if self._mirror is None or self._mirror.step != mirror.step:
                self._shades.clear()
            self._now_s = view.read_at_s
            for tier, shown in self._tiers.items():
                self._changes[tier].note(shown.arrays, self._now_s, marks=self.watching == "all")
        if (self._mirror is None) != (mirror is None):
            self._forget_cells()
        self._mirror = mirror
        if view.snapshot is None or view.read_at_s is None:
            return
        self._now_s = view.read_at_s
        if self._snapshot is not view.snapshot:
            self._snapshot = view.snapshot
            self._shades.clear()
            if self.mode not in ("references", "state"):
                self._groups = {}
        marks = self.watching == "all" or (self.watching == "moves" and have_moved(view.events, self._next_event))
        for tier, shown in self._tiers.items():
            self._changes[tier].note(shown.arrays, self._now_s, marks=marks)
        if view.events:
            self._next_event = view.events[-1].number + 1

    def set_mode(self, mode: shades.Mode) -> None:
        """Colour by something else."""
        self.mode = mode
        self._painter = Painter(self.look, mode, self._base)
        self._forget_cells()

    def set_watch(self, watch: Watch) -> None:
        """Mark other changes."""
        self.watching = watch
        for changes in self._changes.values():
            changes.forget()
        self.redraw()

    def set_look(self, look: Look) -> None:
        """Draw in other colours."""
        self.look = look
        self._base = self.rich_style
        self._painter = Painter(look, self.mode, self._base)
        self._forget_cells()

    def _forget_cells(self) -> None:
        self._groups, self._shades, self._frame = {}, {}, []
        self._drawn_for = (0, 0)
        self.redraw()

    def mark(self, block: BlockRef | None) -> None:
        """Begin a range of blocks, which goes to wherever the cursor is; ``None`` ends it."""
        self.marked = block
        self.redraw()
        self.post_message(self.Pointed())

    @property
    def range(self) -> tuple[Tier, int, int] | None:
        """The tier, first and last block of the range; ``None`` when there is none."""
        if self.marked is None or self.marked.tier != self.cursor.tier:
            return None
        low, high = sorted((self.marked.block_id, self.cursor.block_id))
        if self._scale.per_cell > 1:  # to the end of the cell under the cursor
            high = min(high // self._scale.per_cell * self._scale.per_cell + self._scale.per_cell, self._end()) - 1
        return self.cursor.tier, low, high

    def _end(self) -> int:
        return next((p.num_blocks for p in self._parts if p.tier == self.cursor.tier), 1)

    def zoom_steps(self) -> tuple[cells.Zoom, ...]:
        """Return the scales from the whole pool to one block a cell."""
        width, height = self.size
        return cells.zooms(self._choose_scale("fit", width, height), self.look.glyphs_only)

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
        shown = self._shown()
        if shown == self._drawn and self._drawn_for == (width, height):
            return
        self._drawn = shown
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
            self._base = self.rich_style
            if self._painter.base != self._base:
                self._painter = Painter(self.look, self.mode, self._base)
            self._strips = [Strip.blank(width, self._base)] * len(values)
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
        scale = self._choose_scale(self.zoom, width, height)
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

    def _shown(self) -> tuple[object, ...]:
        """Return all that the picture hangs on: the same again means that nothing has to be drawn."""
        tiers = tuple(self._tiers.values())
        flashing = sum(len(changes.marked(self._now_s)) for changes in self._changes.values())
        table = None if self._table is None else self._table.tobytes()
        dated = self._mirror or self._snapshot
        step = dated.step if dated is not None and self.mode == "age" else 0
        return (
            tiers, self.cursor, self.marked, self.mode, self.zoom, self._top, self._chosen, table, flashing, step,
            self.has_focus, self.message,
        )  # fmt: skip

    def _choose_scale(self, zoom: cells.Zoom, width: int, height: int) -> cells.Scale:
        sizes = tuple(tier.arrays.num_blocks for tier in self._tiers.values())
        digits = len(str(max(sizes, default=1) - 1))
        self._gutter = digits + 2
        columns = width - self._gutter - 1
        columns -= columns % 8 if columns >= 32 else 0
        body = height - 2 - max(0, len(sizes) - 1)
        return cells.choose_scale(sizes, columns, body, zoom, self.look.glyphs_only)

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
        codes = self._codes(part, first, min(last, part.num_blocks if scale.per_cell == 1 else num_cells))
        written = None
        if self.mode != "references" and scale.per_cell == 1 and not scale.halves:
            written = cells.block_codes(arrays, first, min(last, part.num_blocks))
        table = self._lit(part.tier)
        if table is not None:
            codes = cells.mark_selected(codes, table, scale.per_cell, first * scale.per_cell)
        flashing = self._changes[part.tier].marked(self._now_s) // scale.per_cell - first
        if len(flashing):
            codes[flashing[(flashing >= 0) & (flashing < len(codes))]] |= cells.FLASH
        grid = np.full(last - first, cells.EMPTY, np.uint32)
        grid[: len(codes)] = codes
        if written is not None:
            grid[: len(codes)] |= written.astype(np.uint32) << GLYPH_SHIFT
        at = self.cursor.block_id // scale.per_cell - first
        if part.tier == self.cursor.tier and 0 <= at < len(codes):
            grid[at] = CURSOR if scale.halves else grid[at] | HERE
        return grid.reshape(-1, scale.columns)

    def _codes(self, part: _Part, first: int, last: int) -> cells.Codes:
        """Return the codes of some cells of one tier, free to be written to. [last - first]"""
        arrays, per_cell, tier = self._tiers[part.tier].arrays, self._scale.per_cell, part.tier
        if self.mode == "references" and per_cell == 1:
            return cells.block_codes(arrays, first, last)
        if self.mode not in ("references", "state") and tier not in self._shades:
            facts = shades.facts_of_mirror(self._mirror) if self._mirror is not None else None
            if facts is None and self._snapshot is not None:
                facts = shades.facts_of(self._snapshot)
            if facts is not None:
                self._shades[tier] = shades.shades(self.mode, arrays, facts)
        made = self._shades.get(tier) or shades.NONE
        if per_cell == 1:
            return shades.block_codes(self.mode, arrays, made, first, last)
        if tier not in self._groups:
            self._groups[tier] = shades.group_codes(self.mode, arrays, made, per_cell)
        return self._groups[tier][first:last].copy()

    def _lit(self, tier: Tier) -> NDArray[np.int64] | None:
        """Return the blocks of a tier that are lit, the others being dimmed; ``None`` when nothing is lit."""
        chosen = self.range
        if chosen is not None:
            return np.arange(chosen[1], chosen[2] + 1) if chosen[0] == tier else np.empty(0, np.int64)
        if self._table is None:
            return None
        return self._table if tier == "device" else self._table[:0]

    # How it looks ---------------------------------------------------------------------------------------------------

    def _strip(self, values: NDArray[np.uint32], label: tuple[str, bool], width: int) -> Strip:
        self.strips_built += 1
        text, here = label
        if text.startswith("title "):
            return self._text_strip(self._title(text.removeprefix("title "), width), width)
        if not text:
            return Strip.blank(width, self._base)
        ink = self._base + self.look.style("key" if here else "faint")
        segments = [Segment(text.rjust(self._gutter - 1) + " ", ink), *self._painter.runs(values, self._scale.halves)]
        return Strip(segments).adjust_cell_length(width, self._base)

    def _text_strip(self, text: Text, width: int) -> Strip:
        segments = [Segment(t, style) for t, style, _ in text.render(self.app.console, end="")]
        return Strip(segments).adjust_cell_length(width).apply_style(self._base)

    def _title(self, tier: str, width: int) -> Text:
        view = self._tiers.get(tier)  # type: ignore[call-overload]
        notes = []
        chosen = self.range
        if chosen is not None and chosen[0] == tier:
            notes.append(f"{fmt.blocks(chosen[2] - chosen[1] + 1)} marked: {chosen[1]}-{chosen[2]}")
        elif tier == "device" and self._chosen:
            held = fmt.UNKNOWN if self._table is None else fmt.count(len(self._table))
            notes.append(f"{self._chosen}: {held} blocks lit")
        elif view is not None and self._mirror is not None:
            notes.append(f"{fmt.short(view.numbers.cached)} resident")
        elif view is not None:
            notes.append(fmt.blocks(view.numbers.total))
            notes.append(f"{fmt.percent(view.numbers.usage_ratio)} used")
        if tier == "device":
            notes.append(self._scale_note())
            if self.mode != "references":
                by_branch = self._mirror is not None and self.mode == "owner"
                notes.append("by branch" if by_branch else f"by {self.mode}")
        if self._mirror is not None:
            notes.append(PLACEMENT)
        key = "1" if tier == "device" else ""
        name = "Device" if tier == "device" else "Host"
        if self._mirror is not None:
            mediums = dict.fromkeys(place.medium for place in self._mirror.places if place.tier == tier)
            name = f"Mirror {printable(', '.join(mediums))}"
        return rule(self.look, width, name, notes, key=key, focused=self.has_focus and self.cursor.tier == tier)

    def _scale_note(self) -> str:
        cell = "half a cell" if self._scale.halves else "a cell"
        return f"{cell} = {fmt.blocks(self._scale.per_cell)}"

    def _frame_changes(self, width: int, height: int) -> list[Region]:
        """Bring title, host title and legend up to date; return where they changed."""
        frame = [
            self._title("device", width),
            legend(self._painter, self._scale, width, is_mirror=self._mirror is not None),
        ]
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
        if not self._tiers:
            self._base = self.rich_style
            if y == 0:
                return self._text_strip(rule(self.look, width, "Device", key=self.look.key("show('map')")), width)
            if y == height // 2:
                text = line((self.message.center(width), self.look.style("dim")))
                return self._text_strip(text, width)
            return Strip.blank(width, self._base)
        if self._drawn_for != (width, height):
            self.redraw()
        if y == 0 and self._frame:
            return self._text_strip(self._frame[0], width)
        if y == height - 1 and self._frame:
            return self._text_strip(self._frame[1], width)
        if 0 < y <= len(self._strips):
            return self._strips[y - 1]
        return Strip.blank(width, self._base)

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
        if self._dragged_from is not None and pointed is not None and pointed != self.cursor:
            if self.marked is None:
                self.marked = self._dragged_from
            self.put_cursor(pointed)
            return
        if pointed != self.pointed:
            self.pointed = pointed
            self.post_message(self.Pointed())

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._dragged_from = self.block_at(event.x, event.y)
        if self._dragged_from is not None:
            self.capture_mouse()

    def on_mouse_up(self) -> None:
        self._dragged_from = None
        self.release_mouse()

    def on_leave(self) -> None:
        self.pointed = None
        self.post_message(self.Pointed())

    def on_click(self, event: events.Click) -> None:
        block = self.block_at(event.x, event.y)
        if block is None or (self.marked is not None and block == self.cursor):  # the second: a drag has ended here
            return
        self.marked = None
        below = BlockRef(block.tier, block.block_id + self._scale.columns * self._scale.per_cell)
        part = next(p for p in self._parts if p.tier == block.tier)
        if self._scale.halves and block == self.cursor and below.block_id < part.num_blocks:
            block = below
        self.put_cursor(block)

    def on_resize(self) -> None:
        self.redraw()
