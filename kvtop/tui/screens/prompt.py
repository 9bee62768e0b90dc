"""Prompt: one line to type into at the foot of the screen, for filters and commands, with what could be meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, Static

from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import fit, line

#: Suggestions shown at once.
_SHOWN = 8

Suggest = Callable[[str], Sequence[tuple[str, str]]]


class Prompt(Dialog[str | None]):
    """Answers with what was typed, or ``None`` after Esc.

    Args:
        look: How to draw.
        sign: In front of the line.
        text: What stands there at first.
        suggest: What was typed → (what it could become, what that does); Tab takes the first that is longer.
        changed: Told of every change.
        check: What was typed → what is wrong with it so far; empty when nothing is.
        past: What was typed earlier, oldest first; ↑ and ↓ go through it.
    """

    DEFAULT_CSS = """
    Prompt { align: left bottom; background: transparent; }
    Prompt > Vertical { width: 100%; height: auto; background: $kv-panel; }
    Prompt:ansi > Vertical { background: ansi_default; }
    Prompt Input, Prompt Input:focus {
        border: none; height: 1; padding: 0 1; background: $kv-panel; color: $kv-text;
    }
    Prompt:ansi Input { background: ansi_default; }
    Prompt Static { padding: 0 1; }
    """

    def __init__(
        self,
        look: Look,
        sign: str,
        *,
        text: str = "",
        suggest: Suggest = lambda typed: (),
        changed: Callable[[str], None] | None = None,
        check: Callable[[str], str] = lambda typed: "",
        past: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.look = look
        self._sign = sign
        self._start = text
        self._suggest = suggest
        self._changed = changed
        self._check = check
        self._past = [*past, ""]
        self._at = len(self._past) - 1

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(id="suggestions")
            yield Input(self._start, placeholder=self._sign, select_on_focus=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._draw(self._start)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._draw(event.value)
        if self._changed is not None:
            self._changed(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value)

    def on_key(self, event: events.Key) -> None:
        field = self.query_one(Input)
        if event.key == "escape":
            self.dismiss(None)
        elif event.key in ("up", "down"):
            self._at = min(max(0, self._at + (-1 if event.key == "up" else 1)), len(self._past) - 1)
            field.value = self._past[self._at]
            field.cursor_position = len(field.value)
        elif event.key == "tab":
            longer = [name for name, _ in self._suggest(field.value) if len(name) > len(field.value)]
            if longer:
                field.value = longer[0]
                field.cursor_position = len(field.value)
        elif event.key == "backspace" and not field.value:
            self.dismiss(None)
        # What is typed before the field has the focus comes here; afterwards the field keeps it.
        elif event.key == "enter":
            self.dismiss(field.value)
        elif event.is_printable and event.character:
            field.insert_text_at_cursor(event.character)
        else:
            return
        event.stop()
        event.prevent_default()

    def _draw(self, typed: str) -> None:
        width = max(20, self.app.size.width - 2)
        rows = []
        found = list(self._suggest(typed))
        names = max((len(name) for name, _ in found[:_SHOWN]), default=0)
        for name, words in found[:_SHOWN]:
            text = line((f"{name:<{names}}  ", self.look.style("key")))
            text.append(fit(words, max(0, width - text.cell_len)).rstrip(), self.look.style("dim"))
            rows.append(text)
        if len(found) > _SHOWN:
            rows.append(line((f"{len(found) - _SHOWN} more", self.look.style("faint"))))
        if problem := self._check(typed):
            rows.append(line((fit(problem, width).rstrip(), self.look.style("warn"))))
        rows.append(line((f"{self._sign}   Tab completes, Enter does it, Esc leaves", self.look.style("faint"))))
        self.query_one("#suggestions", Static).update(Text("\n", end="").join(rows))
