"""ArrangeScreen: the panels as a list, to be placed, ordered and hidden; every change is seen at once behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical

from kvtop.tui.arrangement import MOVABLE, NONE, Arrangement, put
from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import Lines, fit, line

_WIDTH: Final = 64
#: Columns of the list: key, name, tab, beside, below.
_NAME, _TAB, _PLACE = 16, 10, 14
_MARK: Final = "●"


class ArrangeScreen(Dialog[None]):
    """Changes the arrangement until it is closed.

    Args:
        look: How to draw.
        arrangement: As it is.
        change: Told of every change.
    """

    DEFAULT_CSS = """
    ArrangeScreen { align: center middle; }
    ArrangeScreen > Vertical {
        width: 66; max-width: 98%; height: auto; max-height: 98%; padding: 0 1;
        border: round $kv-focus; background: $kv-panel;
    }
    ArrangeScreen:ansi > Vertical { background: ansi_default; border: round ansi_cyan; }
    """

    def __init__(self, look: Look, arrangement: Arrangement, change: Callable[[Arrangement], None]) -> None:
        super().__init__()
        self.look = look
        self.list = ArrangeList(look, arrangement, change)

    def compose(self) -> ComposeResult:
        with Vertical() as pane:
            pane.border_title = "Arrange the panels"
            pane.border_subtitle = "Esc closes"
            yield self.list

    def on_key(self, event: events.Key) -> None:
        """Change something, or close; every other key stays here too."""
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        if event.key in ("escape", "enter", "q", *self.look.table.of("arrange").keys):
            self.dismiss(None)
        else:
            self.list.press(event.key)


class ArrangeList(Lines):
    """One line a panel: its key, whether it has a tab, whether it stands beside or below the map."""

    def __init__(self, look: Look, arrangement: Arrangement, change: Callable[[Arrangement], None]) -> None:
        super().__init__(look)
        self.arrangement = arrangement
        self.panel = "sequences"
        self._top = 0
        self._change = change
        self.styles.height = len(arrangement.tabs) + len(_HINTS) + 3
        self.styles.max_height = "90vh"

    def press(self, key: str) -> None:
        """Do what a key means here."""
        here = self.arrangement
        at = here.tabs.index(self.panel)
        match key:
            case "up" | "k":
                self.panel = here.tabs[max(0, at - 1)]
            case "down" | "j":
                self.panel = here.tabs[min(len(here.tabs) - 1, at + 1)]
            case "K" | "shift+up":
                self._set(here.moved(self.panel, at - 1))
            case "J" | "shift+down":
                self._set(here.moved(self.panel, at + 1))
            case "space":
                self._set(here.toggled(self.panel))
            case "b":
                self._place("beside")
            case "u":
                self._place("below")
            case "left" | "right" | "h" | "l":
                self._set(here.wider(1 if (key in ("left", "h")) == (here.side == "right") else -1))
            case "plus" | "minus" | "equals_sign":
                self._set(here.higher(-1 if key == "minus" else 1))
            case "s":
                self._set(replace(here, side="left" if here.side == "right" else "right"))
            case "0":
                self._set(Arrangement())
        self.redraw()

    def _place(self, place: str) -> None:
        """Put the panel at a place, or take it away from there."""
        if self.panel in MOVABLE:
            value = NONE if getattr(self.arrangement, place) == self.panel else self.panel
            self._set(put(self.arrangement, place, value))

    def _set(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self._change(arrangement)

    def build(self, width: int, height: int) -> list[Text]:
        look, here = self.look, self.arrangement
        heading = f" {'':<4}{'panel':<{_NAME}}{'tab':<{_TAB}}{'beside':<{_PLACE}}below"
        rows = [line((fit(heading, width).rstrip(), look.style("dim")))]
        room = max(3, height - len(_HINTS) - 3)
        self._top = max(0, min(here.tabs.index(self.panel) - room // 2, len(here.tabs) - room))
        for panel in here.tabs[self._top : self._top + room]:
            key = look.table.of(f"show('{panel}')").shown
            text = line((f" {fit(key, 4)}", look.style("key")), (f"{panel:<{_NAME}}", look.style("text")))
            text.append(f"{'hidden' if panel in here.hidden else 'shown':<{_TAB}}", look.style("dim"))
            for place in ("beside", "below"):
                mark = _MARK if getattr(here, place) == panel else "" if panel == "map" else "·"
                text.append(f"{mark:<{_PLACE}}", look.style("value" if mark == _MARK else "faint"))
            text.truncate(width, pad=True)
            if panel == self.panel:
                text.stylize(look.style("row-focus"))
            rows.append(text)
        beside = "as wide as suits the screen" if here.side_width is None else f"{here.side_width} % of the columns"
        told = f" beside: {here.side}, {beside}; below: {here.below_height} lines"
        rows += [line(), line((fit(told, width).rstrip(), look.style("text")))]
        rows += [line((fit(hint, width).rstrip(), look.style("faint"))) for hint in _HINTS]
        return rows

    def on_click(self, event: events.Click) -> None:
        event.stop()
        at = int(event.y) - 1 + self._top
        if event.y < 1 or not 0 <= at < len(self.arrangement.tabs):
            return
        self.panel = self.arrangement.tabs[at]
        edges = (5 + _NAME, 5 + _NAME + _TAB, 5 + _NAME + _TAB + _PLACE)
        if event.x >= edges[2]:
            self._place("below")
        elif event.x >= edges[1]:
            self._place("beside")
        elif event.x >= edges[0]:
            self._set(self.arrangement.toggled(self.panel))
        self.redraw()


_HINTS: Final = (
    " ↑ ↓ choose   J K move its tab   space hides or shows the tab",
    " b beside the map   u below it   s the other side   ← → width",
    " + - height below   0 all as at first; a click does it too",
)
