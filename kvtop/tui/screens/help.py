"""HelpScreen: every key, made from the action table, and what is refused here with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvtop.tui.actions import ACTIONS, GROUP_TITLES, Action
from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import line


class HelpScreen(Dialog[None]):
    """The help overlay; any of the usual keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,f1,q,enter", "dismiss", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 1;
        border: round $kv-focus; background: $kv-panel; scrollbar-size-vertical: 1;
        scrollbar-color: $kv-faint; scrollbar-background: $kv-panel;
    }
    HelpScreen:ansi > VerticalScroll { background: ansi_default; border: round ansi_cyan; }
    """

    def __init__(self, look: Look, refusal: Callable[[Action], str | None]) -> None:
        super().__init__()
        self.look = look
        self._refusal = refusal

    def compose(self) -> ComposeResult:
        with VerticalScroll() as pane:
            pane.border_title = "Keys"
            pane.border_subtitle = "Esc closes"
            yield Static(self.text())

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def text(self) -> Text:
        """Return the overlay's text."""
        look = self.look
        text = Text(end="")
        for group, title in GROUP_TITLES.items():
            actions = [a for a in ACTIONS if a.group == group and a.help]
            refusal = next((r for a in actions if (r := self._refusal(a))), None)
            text.append(f"{title}", look.style("title"))
            text.append(f"   not here: {refusal}" if refusal else "", look.style("warn"))
            text.append("\n")
            for action in actions:
                grey = self._refusal(action) is not None
                text.append_text(
                    line(
                        (f"  {action.shown:<7}", look.style("faint" if grey else "key")),
                        (f" {action.help}\n", look.style("faint" if grey else "text")),
                    )
                )
        text.append("Mouse", look.style("title"))
        text.append("\n  hover inspects; click moves the cursor, or selects a row; wheel moves\n", look.style("text"))
        text.append("\nLower case looks; a capital acts, and asks first.", look.style("dim"))
        return text
