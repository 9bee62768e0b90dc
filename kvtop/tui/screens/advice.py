"""AdviceScreen: what the measurements so far suggest, with the arithmetic; follows the engine while it is open."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from kvtop.advisor import Advice, advise, hit_ratios
from kvtop.attached_advice import advise_attached
from kvtop.model import format as fmt
from kvtop.model.remote import RemoteFacts
from kvtop.model.view import View
from kvtop.model.what_if import WhatIf
from kvtop.tui.look import Look
from kvtop.tui.screens.overlay import Overlay
from kvtop.tui.widgets.lines import line, printable

_MARKS = {"fine": ("fine", "good"), "advice": ("advice", "warn"), "warning": ("warning", "bad")}


class AdviceScreen(Overlay):
    """What to do, and why.

    Args:
        look: How to draw.
        view: The view it is about, until ``show`` gives another.
        estimates: What is estimated of an attached engine's traffic, if anything.
    """

    def __init__(self, look: Look, view: View, estimates: WhatIf | None = None) -> None:
        self._view, self._estimates = view, estimates
        super().__init__(look, "Advice", opened_by="advice", width=100)

    def show(self, view: View, estimates: WhatIf | None = None) -> None:
        """Follow a newer view, and newer estimates of an attached engine."""
        self._view, self._estimates = view, estimates
        self.draw_again()

    def text(self) -> Text:
        """Return what it says."""
        look, snapshot, device = self.look, self._view.snapshot, self._view.device
        if self._view.remote is not None:
            return self._attached(self._view.remote)
        if snapshot is None or device is None:
            return Text("nothing is measured here", look.style("dim"))
        text = Text(end="")
        host = self._view.host.numbers.total if self._view.host else 0
        for advice in advise(snapshot, device.numbers.total, host):
            self._append(text, advice)
        if snapshot.reuse is not None and snapshot.reuse.query_blocks:
            kind = "exact" if snapshot.reuse.is_exact else "estimates"
            self._append_bars(
                text,
                "Hit ratio by pool size",
                kind,
                {fmt.count(capacity): ratio for capacity, ratio in hit_ratios(snapshot.reuse).items()},
            )
        if not text:
            text.append("No advice yet: nothing has finished, waited or been swapped.", look.style("dim"))
        text.rstrip()
        return text

    def _append(self, text: Text, advice: Advice) -> None:
        look = self.look
        mark, style = _MARKS[advice.severity]
        text.append_text(line((advice.topic.capitalize(), look.style("title")), "  ", (mark, look.style(style)), "\n"))
        text.append(f"{printable(advice.text)}\n\n", look.style("text"))

    def _append_bars(self, text: Text, title: str, kind: str, ratios: Mapping[str, float | None]) -> None:
        look = self.look
        text.append_text(line((title, look.style("title")), (f"  {kind}", look.style("dim")), "\n"))
        for name, ratio in ratios.items():
            cells = round(min(1.0, ratio or 0.0) * 40)
            text.append(f"{name:>20} ", look.style("dim"))
            text.append(f"{fmt.percent(ratio):>6} ", look.style("value"))
            text.append("█" * cells, look.style("bar"))
            text.append("░" * (40 - cells if ratio is not None else 0) + "\n", look.style("bar-empty"))

    def _attached(self, facts: RemoteFacts) -> Text:
        """Return what the events of an engine over the network allow to say."""
        if facts.events is None:
            return Text("Estimates need the engine's cache events.", self.look.style("dim"))
        if self._estimates is None:
            return Text("Working out what other caches would have made of this traffic…", self.look.style("dim"))
        told = advise_attached(self._estimates)
        if not told:
            return Text("No request has stored a block yet.", self.look.style("dim"))
        text = Text(end="")
        for advice in told:
            self._append(text, advice)
        if facts.events.state != "complete":
            text.append(f"What is resident is known only in part: {facts.events.state}.\n\n", self.look.style("warn"))
        for title, outcomes in (
            ("Hit ratio by capacity", self._estimates.capacities),
            ("By block size, in the same memory", self._estimates.block_sizes),
            ("By eviction policy", self._estimates.policies),
        ):
            names = {f"{o.name} {'◂' if o.is_own else ' '}": o.hit_ratio for o in outcomes}
            self._append_bars(text, title, "estimates; hits are a lower bound", names)
        text.rstrip()
        return text
