"""The layout: which panes there are, and which of them a screen of which size shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from textual.app import ComposeResult
from textual.containers import Vertical

from kvtop.tui.actions import Action
from kvtop.tui.look import Look
from kvtop.tui.widgets.block_map import BlockMap
from kvtop.tui.widgets.dividers import Body, Bottom
from kvtop.tui.widgets.header import Header
from kvtop.tui.widgets.inspector import Inspector, InspectorLine
from kvtop.tui.widgets.lesson import LessonPane
from kvtop.tui.widgets.panes import MIN_HEIGHT, MIN_WIDTH, EventLine, Events, Footer, TooSmall, Trends
from kvtop.tui.widgets.prefixes import Prefixes
from kvtop.tui.widgets.remote import RemotePane
from kvtop.tui.widgets.sequences import Sequences
from kvtop.tui.widgets.stage import Stage, Tabs

#: Classes of the screen by its columns and by its rows.
HORIZONTAL_BREAKPOINTS: Final = [(0, "-thin"), (MIN_WIDTH, "-narrow"), (110, "-wide"), (160, "-huge")]
VERTICAL_BREAKPOINTS: Final = [(0, "-flat"), (MIN_HEIGHT, "-short"), (32, "-tall")]

CSS: Final = """
Screen { background: $kv-background; layout: vertical; overflow: hidden; }
Screen:ansi { background: ansi_default; }
ModalScreen { background: $kv-background 55%; }
ModalScreen:ansi { background: transparent; }
Prompt { background: transparent; }
#body { height: 1fr; }
#left { width: 1fr; }
#right { width: 46; margin-left: 1; display: none; }
#bottom { height: 6; display: none; }
#trends { width: 1fr; }
#bottom > .slot { width: 1fr; margin-left: 1; display: none; }
#bottom { max-height: 60%; }
#right { min-width: 24; max-width: 80%; }
#right > .slot { height: 1fr; display: none; }
.-beside-sequences #sequences, .-beside-events #side-log, .-beside-stage #side { display: block !important; }
.-below-sequences #under-list, .-below-events #events, .-below-stage #under { display: block !important; }
.-side-left #right { margin-left: 0; margin-right: 1; }
BlockMap { height: 1fr; }
#list { display: none; height: 1fr; }
#log { display: none; height: 1fr; }
#stage { display: none; width: 1fr; }
#remote { display: none; height: 1fr; }
.-remote #remote { display: block; }
.-remote #left > * { display: none; }
.-remote #left > #remote { display: block; }
.-remote #right, .-remote #bottom > .slot, .-remote InspectorLine { display: none !important; }
#lesson { display: none; width: 44; margin-left: 1; }
.-lesson #lesson { display: block; }
.-lesson #right { display: none !important; }
.-lesson.-narrow Tabs { display: none; }
.-lesson InspectorLine { display: block !important; }
.-wide #lesson { width: 50; }
.-huge #lesson { width: 64; }
#prefixes { display: none; height: 1fr; }
.-mirror #prefixes { display: block; }
.-mirror #right > .slot, .-mirror #bottom > .slot { display: none !important; }
TooSmall { display: none; height: 1fr; }
.-wide #right, .-huge #right { display: block; }
.-huge #right { width: 42%; }
.-huge Inspector { height: 16; }
.-wide.-tall #bottom, .-huge.-tall #bottom { display: block; }
.-wide InspectorLine, .-huge InspectorLine { display: none; }
.-wide.-beside-none #right, .-huge.-beside-none #right { display: none; }
.-wide.-beside-none InspectorLine, .-huge.-beside-none InspectorLine { display: block; }
.-wide.-tall.-below-none #bottom, .-huge.-tall.-below-none #bottom { display: none; }
.-narrow.-see-sequences #map, .-narrow.-see-events #map { display: none; }
.-narrow.-see-sequences #list, .-narrow.-see-events #log { display: block; }
.-lesson.-see-sequences #map, .-lesson.-see-events #map { display: none; }
.-lesson.-see-sequences #list, .-lesson.-see-events #log { display: block; }
.-see-sequences.-away-sequences #map, .-short.-see-sequences.-under-sequences #map { display: none; }
.-see-sequences.-away-sequences #list, .-short.-see-sequences.-under-sequences #list { display: block; }
.-see-events.-away-events #map, .-short.-see-events.-under-events #map { display: none; }
.-see-events.-away-events #log, .-short.-see-events.-under-events #log { display: block; }
.-see-panel #right, .-see-panel #left { display: none; }
.-see-panel #stage { display: block; }
.-huge.-see-panel #left { display: block; }
.-lesson.-huge.-see-panel #left { display: none; }
.-huge.-see-panel #stage { margin-left: 1; }
.-big.-big-left #right, .-big.-big-side #left, .-big.-big-side #inspector { display: none !important; }
.-big.-big-side #right { width: 1fr; max-width: 100%; margin: 0; }
.-big.-big-below #body, .-big.-big-below #trends { display: none; }
.-lesson.-big.-big-left #lesson, .-lesson.-big.-big-below #lesson { display: none; }
.-big.-big-lesson #left, .-big.-big-lesson #stage { display: none !important; }
.-big.-big-lesson #lesson { width: 1fr; margin: 0; }
.-tall.-big.-big-lesson #bottom, .-tall.-big.-big-left #bottom, .-tall.-big.-big-side #bottom { display: none; }
.-tall.-big.-big-below #bottom { height: 1fr; max-height: 100%; }
.-big.-big-below #bottom > .slot { margin-left: 0; }
.-thin Tabs, .-flat Tabs { display: none; }
.-thin Header, .-flat Header, .-thin #body, .-flat #body, .-thin #bottom, .-flat #bottom { display: none; }
.-thin InspectorLine, .-flat InspectorLine, .-thin EventLine, .-flat EventLine { display: none; }
.-thin Footer, .-flat Footer { display: none; }
.-thin TooSmall, .-flat TooSmall { display: block; }
"""


def panes(look: Look, refusal: Callable[[Action], str | None]) -> ComposeResult:
    """Yield every pane there is.

    Args:
        look: How they are drawn.
        refusal: Says why an action cannot be done.
    """
    yield Header(look)
    yield Tabs(look)
    with Body(id="body"):
        with Vertical(id="left"):
            yield BlockMap(look, id="map")
            yield Sequences(look, id="list")
            yield Events(look, id="log")
            yield RemotePane(look, id="remote")
        with Vertical(id="right"):
            yield Inspector(look, id="inspector")
            yield Sequences(look, id="sequences", classes="slot")
            yield Events(look, id="side-log", classes="slot")
            yield Stage(look, id="side", classes="slot")
            yield Prefixes(look, id="prefixes")
        yield Stage(look, id="stage")
        yield LessonPane(look, id="lesson")
    with Bottom(id="bottom"):
        yield Trends(look, id="trends")
        yield Events(look, id="events", classes="slot")
        yield Sequences(look, id="under-list", classes="slot")
        yield Stage(look, id="under", classes="slot")
    yield InspectorLine(look)
    yield EventLine(look)
    yield Footer(look, refusal)
    yield TooSmall(look)
