"""Lines: a widget made of text lines that repaints only those that changed; and the text helpers of all panes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvtop.tui.look import Look


class Lines(Widget):
    """Draws what ``build`` returns. Subclasses hold plain values and call ``redraw`` after a change."""

    def __init__(self, look: Look, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.look = look
        self._lines: list[Text] = []
        self._strips: list[Strip] = []
        self._built_for = (0, 0)
        self._base = Style.null()

    def set_look(self, look: Look) -> None:
        """Draw in other colours."""
        self.look = look
        self._built_for = (0, 0)
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        """Return at most ``height`` lines of at most ``width`` cells."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Build the lines again and repaint those that differ."""
        width, height = self.size
        if not width or not height:
            return
        lines = self.build(width, height)[:height]
        fresh = self._built_for != (width, height) or len(lines) != len(self._lines)
        changed = [y for y, line in enumerate(lines) if fresh or line != self._lines[y]]
        if fresh:
            # Asked for once: working a widget's own style out is dearer than drawing a line.
            self._base = self.rich_style
            self._strips = [Strip.blank(width, self._base)] * len(lines)
            self._built_for = (width, height)
        self._lines = lines
        for y in changed:
            self._strips[y] = self._strip(lines[y], width)
        if fresh:
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        if self._built_for != tuple(self.size):
            self.redraw()
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self._base)

    def line_text(self, y: int) -> str:
        """Return what line ``y`` says; empty below the last."""
        return self._lines[y].plain if y < len(self._lines) else ""

    def on_resize(self) -> None:
        self.redraw()

    def _strip(self, line: Text, width: int) -> Strip:
        segments = [Segment(text, style) for text, style, _ in line.render(self.app.console, end="")]
        return Strip(segments).adjust_cell_length(width).apply_style(self._base)


class Moving(Widget, can_focus=True):
    """A widget that takes the focus and moves by keys and by the wheel; it is drawn again when the focus changes."""

    def redraw(self) -> None:
        """Draw what changed."""
        raise NotImplementedError

    def move(self, way: str) -> None:
        """Move ``up``, ``down``, ``left``, ``right``, ``page_up``, ``page_down``, ``first`` or ``last``."""
        raise NotImplementedError

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move("down")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move("up")

    def on_focus(self) -> None:
        # The widget learns of its focus only after this handler.
        self.call_later(self.redraw)

    def on_blur(self) -> None:
        self.call_later(self.redraw)


class Pane(Lines, Moving, can_focus=True):
    """Lines that move."""


def printable(text: str) -> str:
    """Return ``text`` with everything that could move the cursor or hide text shown as a replacement sign."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def fit(text: str, width: int) -> str:
    """Return ``text`` at exactly ``width`` cells: padded, or cut with ``…``."""
    text = printable(text)
    if width <= 0:
        return ""
    if cell_len(text) > width:
        text = set_cell_size(text, width - 1).rstrip() + "…"
    return set_cell_size(text, width)


def line(*parts: tuple[str, Style] | str) -> Text:
    """Return a line of styled parts; never markup, so that data shows as it is."""
    text = Text(no_wrap=True, end="")
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text.append(part[0], part[1])
    return text


def rule(
    look: Look, width: int, title: str, notes: Sequence[str] = (), *, key: str = "", focused: bool = False
) -> Text:
    """Return a pane's title line: ``── 1 Title ─── note ─ note ─``; notes without room are left out from the left."""
    ink = look.style("rule-focus" if focused else "rule")
    text = line(("── ", ink))
    if key:
        text.append(f"{key} ", look.style("key"))
    text.append(printable(title), look.style("title"))
    text.append(" ", ink)
    kept: list[str] = []
    room = width - text.cell_len - 2
    for note in reversed([printable(n) for n in notes if n]):
        if cell_len(note) + 3 > room:
            break
        kept.insert(0, note)
        room -= cell_len(note) + 3
    tail = line()
    for note in kept:
        tail.append(" ", ink)
        tail.append(note, look.style("dim"))
        tail.append(" ─", ink)
    text.append("─" * max(0, width - text.cell_len - tail.cell_len), ink)
    text.append_text(tail)
    text.truncate(width)
    return text


def bar(look: Look, width: int, parts: Sequence[tuple[float | None, str]]) -> Text:
    """Return a bar of at most two shares, each with the name of its style; unknown ones draw nothing."""
    text = line()
    used = 0
    fills = "█▒" if look.glyphs_only else "██"
    for fill, (share, style) in zip(fills, parts, strict=False):
        cells = 0 if not share else max(1, round(share * width))
        cells = min(cells, width - used)
        text.append(fill * cells, look.style(style))
        used += cells
    text.append("░" * (width - used), look.style("bar-empty"))
    return text


_TICKS = " ▁▂▃▄▅▆▇█"


def spark(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Return a sparkline of the newest ``width`` values, right-aligned; an unknown value is a gap.

    Args:
        values: Oldest first.
        width: Cells.
        top: The value of a full cell; by default the largest of those shown.
    """
    shown = list(values)[-width:] if width > 0 else []
    full = top if top is not None else max((v for v in shown if v is not None), default=0.0)
    ticks = []
    for value in shown:
        if value is None:
            ticks.append(" ")
        else:
            share = min(1.0, max(0.0, value / full)) if full else 0.0
            ticks.append(_TICKS[1 + round(share * 7)])
    return "".join(ticks).rjust(width)
