"""AskNumber: asks for a block's or a sequence's number, which only moves the view, so Enter means yes."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import line

_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for: a block, or a sequence."""

    number: int
    is_sequence: bool


class AskNumber(Dialog[Target | None]):
    """Answers with a block from 0 to ``highest``, with a sequence after ``s``, or ``None``."""

    DEFAULT_CSS = """
    AskNumber { align: center middle; }
    AskNumber > Vertical {
        width: 46; max-width: 96%; height: auto; padding: 0 1;
        border: round $kv-focus; background: $kv-panel;
    }
    AskNumber:ansi > Vertical { background: ansi_default; border: round ansi_cyan; }
    """

    def __init__(self, look: Look, title: str, highest: int) -> None:
        super().__init__()
        self.look = look
        self.heading = title
        self.highest = highest
        self.typed = ""
        self.is_sequence = False

    def compose(self) -> ComposeResult:
        with Vertical() as pane:
            pane.border_title = self.heading
            yield Static(id="field")

    def on_mount(self) -> None:
        self._draw()

    @property
    def problem(self) -> str:
        """What is wrong with what was typed; empty when nothing is."""
        is_beyond = bool(self.typed) and not self.is_sequence and int(self.typed) > self.highest
        return f"0 to {self.highest} only" if is_beyond else ""

    def on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        if event.key == "escape":
            self.dismiss(None)
        elif event.key == "enter":
            if not self.problem:
                self.dismiss(Target(int(self.typed), self.is_sequence) if self.typed else None)
        elif event.key == "s":
            self.is_sequence = not self.is_sequence
        elif event.key in ("backspace", "ctrl+h"):
            self.typed = self.typed[:-1]
        elif (event.character or "").isdecimal() and (event.character or "").isascii():
            self.typed = (self.typed + (event.character or ""))[:_MAX_DIGITS]
        self._draw()

    def _draw(self) -> None:
        if not self.is_attached:
            return
        look = self.look
        what = "sequence" if self.is_sequence else "block"
        text = line((f"{what} ", look.style("dim")), (f" {self.typed or ' '} ", look.style("row-focus")))
        allowed = "its number" if self.is_sequence else f"0 to {self.highest}"
        text.append(f"  {self.problem or allowed}", look.style("warn" if self.problem else "faint"))
        text.append("\nEnter", look.style("key"))
        text.append(" goes there   ", look.style("text"))
        text.append("s", look.style("key"))
        text.append(f" {'block' if self.is_sequence else 'sequence'}   ", look.style("text"))
        text.append("Esc", look.style("key"))
        text.append(" stays", look.style("text"))
        self.query_one("#field", Static).update(text)
