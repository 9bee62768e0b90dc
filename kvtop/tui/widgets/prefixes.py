"""Prefixes: beside a mirror's map, what is resident by medium and rank, and the largest resident prefixes."""

from __future__ import annotations

from rich.text import Text

from kvtop.model import format as fmt
from kvtop.model.mirror import PLACEMENT, MirrorReading
from kvtop.model.remote import EventFacts
from kvtop.model.view import View
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Lines, fit, line, rule


class Prefixes(Lines):
    """The right pane below the inspector of a mirror."""

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._events: EventFacts | None = None
        self._reading: MirrorReading | None = None

    def show(self, view: View) -> None:
        """Draw what a view knows."""
        self._events = view.remote.events if view.remote else None
        self._reading = view.mirror.reading if view.mirror else None
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        look, events, reading = self.look, self._events, self._reading
        if events is None or reading is None:
            return [line()] * height
        lines = [rule(look, width, "Resident", [f"{fmt.short(events.distinct)} distinct"])]
        style = "good" if events.state == "complete" else "warn"
        lines.append(self._cut(f" {events.state}", width, style))
        lines.append(self._cut(f" {PLACEMENT}", width, "dim"))
        for place in reading.places:
            size = f" of {fmt.count(place.size)}" if place.is_sized else ""
            text = f" {fit(place.medium, 11)} rank {place.rank:<3} {fmt.count(place.resident)}{size} copies"
            lines.append(self._cut(text, width, "text"))
        for label, words in (
            ("stored", f"{fmt.count(events.stored)}, removed {fmt.count(events.removed)}"),
            ("cleared", f"{fmt.count(events.cleared)}, restarts {fmt.count(events.restarts)}"),
            ("mean life", fmt.seconds(events.mean_life_s)),
            ("lost", f"{fmt.count(events.gaps)} gaps, drift {fmt.count(events.drift)}"),
        ):
            lines.append(self._cut(f" {label:<9} {words}", width, "dim"))
        if events.prefixes:
            lines.append(self._cut(f" {'prefix':<9}{'depth':>6}{'blocks':>8}{'branch':>7}  age", width, "dim"))
        for p in events.prefixes:
            text = f" {p.hash64:016x}"[:9] + f" {p.depth:>6}{p.blocks:>8}{p.branches:>7}  {fmt.seconds(p.age_s)}"
            lines.append(self._cut(text, width, "text"))
        return (lines + [line()] * height)[:height]

    def _cut(self, text: str, width: int, style: str) -> Text:
        return line((fit(text, width).rstrip(), self.look.style(style)))
