"""AdviceScreen: what the measurements so far suggest, with the arithmetic; follows the engine while it is open."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvtop.advisor import advise, hit_ratios
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import line, printable

_MARKS = {"fine": ("fine", "good"), "advice": ("advice", "warn"), "warning": ("warning", "bad")}


class AdviceScreen(Dialog[None]):
    """The advice overlay; any of the usual keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,a,q,enter", "dismiss", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    DEFAULT_CSS = """
    AdviceScreen { align: center middle; }
    AdviceScreen > VerticalScroll {
        width: 100; max-width: 96%; height: auto; max-height: 96%; padding: 0 1;
        border: round $kv-focus; background: $kv-panel; scrollbar-size-vertical: 1;
        scrollbar-color: $kv-faint; scrollbar-background: $kv-panel;
    }
    AdviceScreen:ansi > VerticalScroll { background: ansi_default; border: round ansi_cyan; }
    """

    def __init__(self, look: Look, view: View) -> None:
        super().__init__()
        self.look = look
        self._view = view

    def compose(self) -> ComposeResult:
        with VerticalScroll() as pane:
            pane.border_title = "Advice"
            pane.border_subtitle = "Esc closes"
            yield Static(self.text())

    def show(self, view: View) -> None:
        """Follow a newer view."""
        self._view = view
        if self.is_mounted:
            for text in self.query(Static):
                text.update(self.text())

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def text(self) -> Text:
        """Return the overlay's text."""
        look, snapshot, device = self.look, self._view.snapshot, self._view.device
        if snapshot is None or device is None:
            return Text("nothing is measured here", look.style("dim"))
        text = Text(end="")
        host = self._view.host.numbers.total if self._view.host else 0
        for advice in advise(snapshot, device.numbers.total, host):
            mark, style = _MARKS[advice.severity]
            text.append_text(
                line((advice.topic.capitalize(), look.style("title")), "  ", (mark, look.style(style)), "\n")
            )
            text.append(f"{printable(advice.text)}\n\n", look.style("text"))
        if snapshot.reuse is not None and snapshot.reuse.query_blocks:
            kind = "exact" if snapshot.reuse.is_exact else "estimates"
            text.append_text(
                line(("Hit ratio by pool size", look.style("title")), (f"  {kind}", look.style("dim")), "\n")
            )
            for capacity, ratio in hit_ratios(snapshot.reuse).items():
                cells = round((ratio or 0.0) * 40)
                text.append(f"{fmt.count(capacity):>12} ", look.style("dim"))
                text.append(f"{fmt.percent(ratio):>6} ", look.style("value"))
                text.append("█" * cells, look.style("bar"))
                text.append("░" * (40 - cells if ratio is not None else 0) + "\n", look.style("bar-empty"))
        if not text:
            text.append("No advice yet: nothing has finished, waited or been swapped.", look.style("dim"))
        text.rstrip()
        return text
