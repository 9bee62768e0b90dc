"""Overlay: a text above the panes that is read, scrolled and closed. Help and advice are overlays."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog

#: Keys that scroll by so many lines, besides those of the pane itself.
_SCROLL = {"j": 1, "k": -1}


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

    def on_key(self, event: events.Key) -> None:
        if event.key in self._closed_by:
            event.stop()
            self.dismiss()
        elif event.key in _SCROLL:
            event.stop()
            self.query_one(VerticalScroll).scroll_relative(y=_SCROLL[event.key], animate=False)

    def text(self) -> Text:
        """Return what it says."""
        raise NotImplementedError

    def draw_again(self) -> None:
        """Show what ``text`` returns now."""
        if self.is_mounted:
            self.query_one(Static).update(self.text())
