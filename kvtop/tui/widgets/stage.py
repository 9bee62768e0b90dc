"""Stage: draws a panel made of sections, in one column or two, and scrolls it; and Tabs, which names all panels."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.message import Message

from kvtop.model.view import View
from kvtop.panels.catalog import CONTENTS
from kvtop.panels.content import Asked, Entry, Section
from kvtop.tui.actions import Action
from kvtop.tui.arrangement import Arrangement
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Lines, Pane, bar, fit, line, printable, rule, spark

_TWO_COLUMNS_FROM = 100
_BAR = 16
_TICKS = " ▁▂▃▄▅▆▇█"


class Stage(Pane):
    """Shows one panel at a time.

    Attributes:
        panel: Its name, of ``CONTENTS``.
    """

    def __init__(self, look: Look, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(look, id=id, classes=classes)
        self.panel = "prefix"
        self._sections: tuple[Section, ...] = ()
        self._key, self._title = "", ""
        self._top = 0

    def open(self, panel: str, key: str, title: str) -> None:
        """Show another panel from its top."""
        if panel != self.panel:
            self._top = 0
        self.panel, self._key, self._title = panel, key, title

    def show(self, view: View, asked: Asked) -> None:
        """Draw what a view says, if the panel can be seen."""
        if self.size.height and self.size.width:
            self._sections = CONTENTS[self.panel](view, asked)
            self.redraw()

    def move(self, way: str) -> None:
        """Scroll; left and right do nothing."""
        page = max(1, self.size.height - 2)
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page, "first": -(10**6), "last": 10**6}
        self._top += step.get(way, 0)
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        body = lay_out(self.look, self._sections, width, height - 1)
        room = height - 1
        self._top = max(0, min(self._top, len(body) - room))
        left = len(body) - room - self._top
        notes = [f"{left} more below"] if left > 0 else []
        title = rule(self.look, width, self._title, notes, key=self._key, focused=self.has_focus)
        shown = body[self._top : self._top + room]
        return [title, *shown, *[line()] * (room - len(shown))]


def lay_out(look: Look, sections: Sequence[Section], width: int, height: int) -> list[Text]:
    """Return the sections as lines: two columns where there is room, the shorter one filled first."""
    narrow = [s for s in sections if not s.wide]
    wide = [row for s in sections if s.wide for row in [*_section(look, s, width, height), line()]]
    if width < _TWO_COLUMNS_FROM or len(narrow) < 2:
        return wide + [row for s in narrow for row in [*_section(look, s, width, height), line()]]
    half = (width - 2) // 2
    columns: tuple[list[Text], list[Text]] = ([], [])
    for section in narrow:
        column = columns[0] if len(columns[0]) <= len(columns[1]) else columns[1]
        column.extend([*_section(look, section, half, height), line()])
    rows = []
    for i in range(max(map(len, columns))):
        left, right = (column[i] if i < len(column) else line() for column in columns)
        text = left.copy()
        text.append(" " * max(0, half + 2 - text.cell_len))
        text.append_text(right)
        rows.append(text)
    return wide + rows


def _section(look: Look, section: Section, width: int, height: int) -> list[Text]:
    rows = [line((f" {fit(section.title, width - 1).rstrip()}", look.style("title")))] if section.title else []
    labels = max((cell_len(e.label) for e in section.entries), default=0)
    labels = min(labels, max(8, width * 9 // 20))
    values = min(max((cell_len(e.value) for e in section.entries), default=0), max(6, width // 2))
    graphs = len(section.entries) > 4 and all(e.series is not None for e in section.entries)
    tall = max(1, min(4, (height - 3) // max(1, len(section.entries)))) if graphs else 1
    for entry in section.entries:
        if tall > 1:
            rows += _graph(look, entry, labels, values, width, tall)
        else:
            rows += _entry(look, entry, labels, values, width, section.wrap)
    return rows


def _entry(look: Look, entry: Entry, labels: int, values: int, width: int, wrap: bool) -> list[Text]:
    """Return an entry as one line, or as several where a long note may go on below."""
    text = line((f" {fit(entry.label, labels)} ", look.style("dim")))
    text.append(fit(entry.value, values), look.style("bad" if entry.alarm else "value"))
    room = width - text.cell_len - 2
    if entry.series is not None:
        text.append(" ")
        text.append(spark(entry.series, max(0, room), entry.top), look.style("spark"))
        return [text]
    if entry.share is not None and room >= _BAR + (cell_len(entry.note) + 2 if entry.note else 0):
        text.append(" ")
        text.append_text(bar(look, _BAR, [(entry.share, "bar")]))
        room -= _BAR + 1
    if not entry.note or room <= 4:
        return [text]
    if not wrap:
        text.append(f"  {fit(entry.note, room - 1).rstrip()}", look.style("dim"))
        return [text]
    if not entry.value:  # nothing stands between: the words take its room
        text = line((f" {fit(entry.label, labels)}", look.style("dim")))
    indent = " " * (text.cell_len + (2 if entry.value else 1))
    first, *more = textwrap.wrap(printable(entry.note), width - len(indent) - 1)
    text.append(f"{'  ' if entry.value else ' '}{first}", look.style("dim"))
    return [text, *(line((f"{indent}{words}", look.style("dim"))) for words in more)]


def _graph(look: Look, entry: Entry, labels: int, values: int, width: int, tall: int) -> list[Text]:
    """Return an entry as a graph of several lines, its newest value at the right."""
    room = max(1, width - labels - values - 4)
    series = list(entry.series or ())[-room:]
    top = entry.top if entry.top is not None else max((v for v in series if v is not None), default=0.0)
    levels = [
        None if v is None else round(min(1.0, max(0.0, v / top)) * (8 * tall - 1)) + 1 if top else 1 for v in series
    ]
    rows = []
    for row in range(tall - 1, -1, -1):
        first = row == tall - 1
        text = line((f" {fit(entry.label if first else '', labels)} ", look.style("dim")))
        text.append(fit(entry.value if first else "", values), look.style("value"))
        ticks = "".join(" " if v is None else _TICKS[min(8, max(0, v - 8 * row))] for v in levels)
        text.append(" " + ticks.rjust(room), look.style("spark"))
        rows.append(text)
    return rows


def _letters(actions: Sequence[Action], current: str, width: int) -> int:
    """Return how many letters of each label there is room for; the current one keeps all of them."""
    for letters in range(max(len(a.label) for a in actions), 0, -1):
        labels = (len(a.label) if a.name == current else min(len(a.label), letters) for a in actions)
        if sum(labels) + sum(cell_len(a.shown) + 2 for a in actions) <= width:
            return letters
    return 1


class Tabs(Lines):
    """Every panel's key and name in one line; a click goes there."""

    DEFAULT_CSS = "Tabs { height: 1; }"

    class Dropped(Message):
        """A tab was dragged and let go.

        Attributes:
            panel: Whose it is.
            before: The panel whose tab it was let go on; ``None`` elsewhere.
            column, line: Where it was let go, on the screen.
        """

        def __init__(self, panel: str, before: str | None, column: int, line: int) -> None:
            super().__init__()
            self.panel, self.before, self.column, self.line = panel, before, column, line

    class Clicked(Message):
        """A tab was clicked: do this action."""

        def __init__(self, action: str) -> None:
            super().__init__()
            self.action = action

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.current = "map"
        self._places: list[tuple[int, int, Action]] = []
        self._placed = Arrangement()
        self._held: Action | None = None
        self._was_dragged = False

    def follow(self, arrangement: Arrangement) -> None:
        """Name the panels in another order, without those that are hidden."""
        self._placed = arrangement
        self.redraw()

    def open(self, panel: str) -> None:
        """Mark another panel as the one that is shown."""
        self.current = panel
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        look = self.look
        text = line(" ")
        self._places = []
        hidden = {*self._placed.hidden} - {self.current}
        actions = [look.table.of(f"show('{name}')") for name in self._placed.tabs if name not in hidden]
        current = f"show('{self.current}')"
        gap = "  " if sum(cell_len(a.shown) + len(a.label) + 3 for a in actions) < width else " "
        letters = _letters(actions, current, width)
        for action in actions:
            start = text.cell_len
            is_current = action.name == current
            text.append(f"{action.shown} " if action.shown else "", look.style("key"))
            label = action.label if is_current else action.label[:letters]
            text.append(label, look.style("title" if is_current else "dim"))
            self._places.append((start, text.cell_len, action))
            if is_current:
                text.stylize(look.style("row-focus"), start, text.cell_len)
            text.append(gap)
        text.rstrip()
        return [text]

    def _at(self, column: int) -> Action | None:
        return next((action for start, stop, action in self._places if start <= column < stop), None)

    def on_click(self, event: events.Click) -> None:
        action = self._at(int(event.x))
        if action is not None and not self._was_dragged:
            self.post_message(self.Clicked(action.name))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._held, self._was_dragged = self._at(int(event.x)), False
        if self._held is not None:
            self.capture_mouse()

    def on_mouse_up(self, event: events.MouseUp) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        self.release_mouse()
        column, row = int(event.screen_x), int(event.screen_y)
        on = self._at(column - self.region.x) if row == self.region.y else None
        if on is not held:
            self._was_dragged = True
            self.post_message(self.Dropped(held.name[6:-2], on.name[6:-2] if on else None, column, row))
