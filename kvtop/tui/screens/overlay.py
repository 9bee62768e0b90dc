"""Overlay: a text above the panes that is read, scrolled and closed. Help and advice are overlays."""

from __future__ import annotations

from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog

#: Keys that scroll by so many lines, and by so many screens.
_LINES: Final = {"j": 1, "down": 1, "k": -1, "up": -1}
_SCREENS: Final = {"pagedown": 1, "space": 1, "pageup": -1}
#: Of the screen's width that an overlay takes at most, as its style says.
_MAX_PERCENT: Final = 96


class Overlay(Dialog[None]):
    """Shows ``text()``; Esc, Enter, q and the keys that opened it close it.

    Args:
        look: How to draw.
        title: Its name, in the border.
        opened_by: The action that opens it.
        width: Columns, where the screen has so many.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", show=False)]
    DEFAULT_CSS = """
    Overlay { align: center middle; }
    Overlay > VerticalScroll {
        max-width: 96%; height: auto; max-height: 96%; padding: 0 1;
        border: round $kv-focus; background: $kv-panel; scrollbar-size-vertical: 1;
        scrollbar-color: $kv-faint; scrollbar-background: $kv-panel;
    }
    Overlay:ansi > VerticalScroll { background: ansi_default; border: round ansi_cyan; }
    """

    def __init__(self, look: Look, title: str, opened_by: str, width: int) -> None:
        super().__init__()
        self.look = look
        self._title = title
        self._closed_by = look.table.of(opened_by).keys
        self._width = width

    def compose(self) -> ComposeResult:
        with VerticalScroll() as pane:
            pane.border_title = self._title
            pane.border_subtitle = "Esc closes"
            pane.styles.width = self._width
            yield Static(self.text())

    @property
    def room(self) -> int:
        """Columns there are for text, beside border, padding and scrollbar."""
        return min(self._width, self.app.size.width * _MAX_PERCENT // 100) - 5

    def on_resize(self) -> None:
        self.draw_again()

    def on_key(self, event: events.Key) -> None:
        if event.key in self._closed_by:
            event.stop()
            self.dismiss()
        elif self._scroll(self.query_one(VerticalScroll), event.key):
            event.stop()

    def _scroll(self, pane: VerticalScroll, key: str) -> bool:
        """Scroll the pane if this is a key that does, and say whether it is."""
        if key in _LINES or key in _SCREENS:
            lines = _LINES.get(key, 0) + _SCREENS.get(key, 0) * max(1, pane.size.height - 1)
            pane.scroll_relative(y=lines, animate=False)
        elif key == "home":
            pane.scroll_home(animate=False)
        elif key == "end":
            pane.scroll_end(animate=False)
        else:
            return False
        return True

    def text(self) -> Text:
        """Return what it says."""
        raise NotImplementedError

    def draw_again(self) -> None:
        """Show what ``text`` returns now."""
        if self.is_mounted:
            self.query_one(Static).update(self.text())
