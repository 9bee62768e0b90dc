"""AdviceScreen: what the measurements so far suggest, with the arithmetic; follows the engine while it is open."""

from __future__ import annotations

from rich.text import Text

from kvtop.advisor import advise, hit_ratios
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.tui.look import Look
from kvtop.tui.screens.overlay import Overlay
from kvtop.tui.widgets.lines import line, printable

_MARKS = {"fine": ("fine", "good"), "advice": ("advice", "warn"), "warning": ("warning", "bad")}


class AdviceScreen(Overlay):
    """What to do, and why.

    Args:
        look: How to draw.
        view: The view it is about, until ``show`` gives another.
    """

    def __init__(self, look: Look, view: View) -> None:
        self._view = view
        super().__init__(look, "Advice", opened_by="advice", width=100)

    def show(self, view: View) -> None:
        """Follow a newer view."""
        self._view = view
        self.draw_again()

    def text(self) -> Text:
        """Return what it says."""
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
