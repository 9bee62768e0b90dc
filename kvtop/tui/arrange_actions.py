"""ArrangeActions: panels are placed, sized, ordered and hidden; and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvtop.errors import UserError
from kvtop.panels.catalog import CONTENTS
from kvtop.tui.arrangement import MOVABLE, NONE, Arrangement, below_height_of, put, read_field, side_width_of
from kvtop.tui.look_actions import LookActions
from kvtop.tui.messages import Told
from kvtop.tui.screens.arrange import ArrangeScreen
from kvtop.tui.settings import Settings
from kvtop.tui.widgets.dividers import Body, Divided
from kvtop.tui.widgets.stage import Stage, Tabs

_PLACES: Final = ("beside", "below")
#: Where a place draws what: ``sequences``, ``events``, ``stage`` for a panel of sections, ``none``.
_KINDS: Final = ("sequences", "events", "stage", NONE)


class ArrangeActions(LookActions):
    """What the keys, the command line and the mouse do to the arrangement. ``KvtopApp`` is the only subclass."""

    settings: Settings
    arrangement = Arrangement()
    _is_unsaved = False
    _chosen_theme = ""
    _trouble_told = ""

    def action_arrange(self) -> None:
        self.push_screen(ArrangeScreen(self.look, self.arrangement, self.arrange))

    def action_beside(self) -> None:
        self.arrange(self.arrangement.next_at("beside"))
        self.say(f"beside the map: {self.arrangement.beside}")

    def action_below(self) -> None:
        self.arrange(self.arrangement.next_at("below"))
        self.say(f"below the map: {self.arrangement.below}")

    def action_width(self, way: str) -> None:
        self.arrange(self.arrangement.wider(1 if way == "more" else -1))
        self.say(f"beside the map: {self.arrangement.side_width} % of the columns")

    def action_height(self, way: str) -> None:
        self.arrange(self.arrangement.higher(1 if way == "more" else -1))
        self.say(f"below the map: {self.arrangement.below_height} lines")

    def arrange(self, arrangement: Arrangement) -> None:
        """Take over another arrangement, and remember it."""
        if arrangement != self.arrangement:
            self.arrangement = arrangement
            self._is_unsaved = True
        self._place_panels()

    def arrange_line(self, name: str, text: str) -> None:
        """Do what a line of the command line says of the arrangement.

        Raises:
            UserError: There is no such panel, or the value is not allowed.
        """
        words = text.split()
        if name in ("hide", "unhide"):
            allowed = MOVABLE if name == "hide" else self.arrangement.hidden
            if not words or not set(words) <= set(allowed):
                raise UserError(f"{name} {text or '(nothing)'}: one of {', '.join(allowed) or 'those hidden: none is'}")
            for panel in words:
                if (panel in self.arrangement.hidden) == (name == "unhide"):
                    self.arrange(self.arrangement.toggled(panel))
            return
        value: object = words if name == "order" else int(text) if text.isdecimal() else text
        try:
            field, read = read_field(name, value)
        except ValueError as error:
            raise UserError(f"{name} {text or '(nothing)'}: {error}".removesuffix(", in brackets")) from None
        self.arrange(put(self.arrangement, field, read))

    # Mouse ----------------------------------------------------------------------------------------------------------

    def on_divided_dragged(self, message: Divided.Dragged) -> None:
        row = message.row
        if isinstance(row, Body):
            is_right = self.arrangement.side == "right"
            # The share counts the gap in, which is where the pointer is.
            columns = row.region.right - message.column if is_right else message.column - row.region.x + 1
            self.arrange(replace(self.arrangement, side_width=side_width_of(columns, row.region.width)))
        else:
            self.arrange(replace(self.arrangement, below_height=below_height_of(row.region.bottom - message.line)))

    def on_tabs_dropped(self, message: Tabs.Dropped) -> None:
        """Put a panel where its tab was dropped: beside another tab, beside the map, or below it."""
        if message.before is not None:
            tabs = [name for name in self.arrangement.tabs if name != message.panel]
            at = tabs.index(message.before) if message.before in tabs else len(tabs)
            self.arrange(self.arrangement.moved(message.panel, at))
            return
        if message.panel not in MOVABLE:
            return
        for place, selector in (("beside", "#right"), ("below", "#bottom")):
            if self._base.query_one(selector).region.contains(message.column, message.line):
                self.arrange(put(self.arrangement, place, message.panel))
                self.say(f"{place} the map: {message.panel}")

    # Drawing and remembering ----------------------------------------------------------------------------------------

    @property
    def open_panels(self) -> tuple[str, ...]:
        """The panels that may be seen: the one shown, and those around the map."""
        return (self.panel, self.arrangement.beside, self.arrangement.below)

    def _place_panels(self) -> None:
        """Make the screen what the arrangement says."""
        base, here = self._base, self.arrangement
        for place, stage in (("beside", "#side"), ("below", "#under")):
            panel = getattr(here, place)
            kind = panel if panel in _KINDS else "stage"
            for name in _KINDS:
                base.set_class(name == kind, f"-{place}-{name}")
            if panel in CONTENTS:
                self._open_stage(base.query_one(stage, Stage), panel)
                self._beside.open(panel)
        for name in ("sequences", "events"):
            base.set_class(name not in (here.beside, here.below), f"-away-{name}")
            base.set_class(name == here.below != here.beside, f"-under-{name}")
        body, left, right = (base.query_one(f"#{name}") for name in ("body", "left", "right"))
        is_left = here.side == "left"
        if base.has_class("-side-left") != is_left:
            base.set_class(is_left, "-side-left")
            body.move_child(right, before=left) if is_left else body.move_child(right, after=left)
        is_alone = base.has_class("-big")
        right.styles.width = None if here.side_width is None or is_alone else f"{here.side_width}%"
        base.query_one("#bottom").styles.height = None if is_alone else here.below_height
        base.query_one(Tabs).follow(here)
        self._look_at()
        self.call_after_refresh(self._show, True)

    def _remember(self) -> None:
        """Write what is to be remembered, if it changed, on the command thread."""
        if not self._is_unsaved:
            return
        self._is_unsaved = False
        memory, values = self.settings.memory, self._remembered()
        if memory is None:
            return

        def work() -> None:
            if (trouble := memory.save(values)) and trouble != self._trouble_told:
                self._trouble_told = trouble
                self.post_message(Told(trouble, False))

        self._background.submit(work)

    def remember_now(self) -> None:
        """Write what is yet to be remembered, at once: the console is being left."""
        if self._is_unsaved and self.settings.memory is not None:
            self.settings.memory.save(self._remembered())

    def _remembered(self) -> dict[str, object]:
        plain = self.arrangement.to_plain()
        panels = {name: plain[name] for name in plain if name not in self.settings.fixed}
        return {"panels": panels, **({"theme": self._chosen_theme} if self._chosen_theme else {})}

    def set_theme(self, name: str) -> None:
        super().set_theme(name)
        self._chosen_theme = name
        self._is_unsaved = True
