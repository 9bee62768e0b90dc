"""MarksScreen: the marks of a recording, one of which is gone to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvtop.model import format as fmt
from kvtop.recording.frames import Note
from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import fit, line

_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10, "home": -(10**9), "end": 10**9}
#: Columns of the list, where the screen has so many.
_WIDTH = 84


class MarksScreen(Dialog[int | None]):
    """Answers with a mark's step, or ``None`` after Esc.

    Args:
        look: How to draw.
        notes: The marks, in order of steps.
        step: Where the recording stands; the cursor begins at the last mark up to there.
        opened_by: The action that opens it, whose keys close it too.
    """

    DEFAULT_CSS = """
    MarksScreen { align: center middle; }
    MarksScreen > VerticalScroll {
        width: 84; max-width: 96%; height: auto; max-height: 96%; padding: 0 1;
        border: round $kv-focus; background: $kv-panel; scrollbar-size-vertical: 1;
        scrollbar-color: $kv-faint; scrollbar-background: $kv-panel;
    }
    MarksScreen:ansi > VerticalScroll { background: ansi_default; border: round ansi_cyan; }
    """

    def __init__(self, look: Look, notes: Sequence[Note], step: int, opened_by: str) -> None:
        super().__init__()
        self.look = look
        self._notes = notes
        self._closed_by = ("escape", "q", *look.table.of(opened_by).keys)
        self.cursor = max((i for i, note in enumerate(notes) if note.step <= step), default=0)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as pane:
            pane.border_title = f"Marks: {fmt.count(len(self._notes))}"
            pane.border_subtitle = "Enter goes there, Esc leaves"
            yield Static(self.text())

    def on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        if event.key in self._closed_by:
            self.dismiss(None)
        elif event.key == "enter":
            self.dismiss(self._notes[self.cursor].step)
        elif event.key in _MOVES:
            self.cursor = min(max(0, self.cursor + _MOVES[event.key]), len(self._notes) - 1)
            self.query_one(Static).update(self.text())
            pane = self.query_one(VerticalScroll)
            rows = max(1, pane.size.height)
            if not pane.scroll_offset.y <= self.cursor < pane.scroll_offset.y + rows:
                pane.scroll_to(y=max(0, self.cursor - rows // 2), animate=False)

    def text(self) -> Text:
        """Return the list, a line a mark."""
        steps = max(len(fmt.count(note.step)) for note in self._notes)
        width = max(20, min(_WIDTH, self.app.size.width * 96 // 100) - 12 - steps)
        rows = []
        for i, note in enumerate(self._notes):
            here = i == self.cursor
            rows.append(
                line(
                    ("▸ " if here else "  ", self.look.style("key")),
                    (f"step {fmt.count(note.step):>{steps}}  ", self.look.style("dim")),
                    (fit(note.text, width), self.look.style("value" if here else "text")),
                )
            )
        return Text("\n", end="").join(rows)
