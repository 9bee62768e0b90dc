"""KvtopApp: the console. Wires one attachment to the widgets, and hands values to what is drawn.

Facts go one way: a thread polls the attachment and posts ``ViewChanged``; the screen reads
``attachment.view`` and hands values to widgets. Commands go the other way through one door,
``attachment.operations``, on the command thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from kvtop.attachment import Attachment
from kvtop.model.mirror import PLACEMENT
from kvtop.model.observation import MAX_VICTIMS
from kvtop.model.view import View
from kvtop.model.what_if import WhatIf
from kvtop.panels.beside import PANELS as ANY_ENGINE
from kvtop.sources.base import Estimates
from kvtop.sources.remote.fleet import Openable
from kvtop.tui import layout
from kvtop.tui.actions import bindings
from kvtop.tui.learning import Learning
from kvtop.tui.look import AsciiFilter, detect_look
from kvtop.tui.screens.advice import AdviceScreen
from kvtop.tui.screens.help import HelpScreen
from kvtop.tui.screens.sheet import ActionSheet
from kvtop.tui.settings import Settings
from kvtop.tui.themes import DARK
from kvtop.tui.typed_ahead import TypedAhead
from kvtop.tui.widgets.block_map import BlockMap
from kvtop.tui.widgets.header import Header
from kvtop.tui.widgets.inspector import Inspector, InspectorLine, owner_of
from kvtop.tui.widgets.panes import EventLine, Events, Footer, TooSmall, Trends
from kvtop.tui.widgets.prefixes import Prefixes
from kvtop.tui.widgets.remote import RemotePane
from kvtop.tui.widgets.sequences import TREE, Sequences
from kvtop.tui.widgets.stage import Stage

if TYPE_CHECKING:
    from kvtop.learn.school import School

#: Seconds a note stays on the event line.
_NOTE_S: Final = 8.0


class KvtopApp(TypedAhead, Learning):
    """The console on one engine.

    Args:
        connect: Gives the attachment; may take seconds, runs beside the first frame. A ``KvtopError`` ends the
            console with its exit code and text.
        restart: Gives a new attachment after the engine was lost; ``None`` when that is not on offer.
        again: What the key for that does.
        refresh_hz: Readings a second.
        theme: Its colours, of ``THEMES``; ``None`` takes those of the last time.
        settings: What the configuration file says, and what is remembered.
        ascii_only: Write ASCII characters only.
        auto_poll: Read by itself; without it, ``poll_once`` takes one step by hand.
        clock: Monotonic seconds, the same as the attachment's.
        nvml: The NVML binding, for the GPU panel; ``None`` takes the installed one.
        school: Where lessons come from, and what is kept of them.
    """

    TITLE = "kvtop"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "BlockMap"
    BINDINGS: ClassVar[list[BindingType]] = bindings()
    HORIZONTAL_BREAKPOINTS = layout.HORIZONTAL_BREAKPOINTS
    VERTICAL_BREAKPOINTS = layout.VERTICAL_BREAKPOINTS
    CSS = layout.CSS

    def __init__(
        self,
        connect: Callable[[], Attachment],
        *,
        restart: Callable[[], Attachment] | None = None,
        again: str = "restarts it",
        refresh_hz: float = 10.0,
        ascii_only: bool = False,
        theme: str | None = None,
        settings: Settings | None = None,
        auto_poll: bool = True,
        clock: Callable[[], float] = time.monotonic,
        nvml: Any = None,
        school: School | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        self.arrangement = settings.arrangement
        self.look = detect_look(ascii_only, theme or settings.theme or DARK.name, settings.table)
        super().__init__(
            connect,
            restart=restart,
            again=again,
            refresh_hz=refresh_hz,
            auto_poll=auto_poll,
            clock=clock,
            school=school,
            # Sixteen colours and none are the terminal's own; the framework would turn them into shades of its theme.
            ansi_color=self.look.depth != "rgb",
            nvml=nvml,
        )
        self.set_keymap(settings.table.keymap())
        self._note_until_s = 0.0
        self._is_mirrored = False
        self._ascii = AsciiFilter() if self.look.ascii_only else None

    def get_line_filters(self) -> list[LineFilter]:
        filters = list(super().get_line_filters())
        return [*filters, self._ascii] if self._ascii else filters

    # Screen ---------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield from layout.panes(self.look, self.refusal)

    def on_mount(self) -> None:
        self._listen_to_signals()
        self.set_interval(0.5, self._tick)
        self._place_panels()
        if self.settings.trouble:
            self.say(self.settings.trouble, "warn")
        self.call_after_refresh(self.begin)

    def begin(self) -> None:
        """Do what comes after the first frame: connect."""
        self._start(self._connect)

    @property
    def _shown(self) -> View:
        """The view that is drawn: the newest, or the one at which the screen is held."""
        return self.view if self._held is None else self._held

    @property
    def main(self) -> BlockMap:
        """The map."""
        return self._base.query_one("#map", BlockMap)

    @property
    def _base(self) -> Screen[Any]:
        """The screen with the panes, whatever dialog is above it."""
        return self.screen_stack[0]

    def _tick(self) -> None:
        """Keep ages true while no view comes, and give the event line back."""
        if not self.has_panes:
            return
        if self._auto_poll and self.view.read_at_s is not None and self.clock() - self.view.read_at_s > 1.0:
            self._show_header()
        if self._note_until_s and self.clock() > self._note_until_s:
            self.say("")
        self._remember()

    # Drawing --------------------------------------------------------------------------------------------------------

    def _show(self, everything: bool) -> None:
        view = self._shown
        self._forget_gone_sequence(view)
        self._say_new_notes(view)
        self._block_log.note(view)
        self._follow(view)
        self.main.show(view, f"sequence {self.selected}" if self.selected is not None else "")
        if view.mirror is None:
            self._is_mirrored = False
        self._base.set_class(view.remote is not None and not self._is_mirrored, "-remote")
        self._base.set_class(self._is_mirrored, "-mirror")
        self._show_header()  # of the same reading as the map's title, which tells some of its numbers again
        if everything or view.error is not None:
            self._panes_at_s = self.clock()
            self._show_panes()
        self._teach()

    def _show_header(self) -> None:
        again = None if self._restart is None else self._again
        for header in self._base.query(Header):  # none at the end, which takes the panes one by one
            header.show(self._shown, self.clock(), again, self._held is not None, self._beside.num_firing)

    def _show_panes(self) -> None:
        view, base = self._shown, self._base
        for table in base.query(Sequences):
            table.show(view, self.selected)
        for events in base.query(Events):
            events.show(view)
        base.query_one(RemotePane).show(view, self.asked)
        base.query_one(Prefixes).show(view)
        base.query_one(Trends).show(view)
        for stage in base.query(Stage):
            stage.show(view, self.asked)
        base.query_one(EventLine).show(view)
        base.query_one(TooSmall).show(view)
        base.query_one(Footer).redraw()
        if isinstance(self.screen, AdviceScreen):
            self.screen.show(view, self._estimates)
        if isinstance(self.screen, ActionSheet) and self.view.snapshot is not None:
            self.screen.keep_current(self.view.snapshot.step, self.clock())
        self._show_inspector()

    def _show_inspector(self) -> None:
        view, block = self._shown, self.main.under
        happenings = self._block_log.of((block.tier, block.block_id))
        self._base.query_one(Inspector).show(view, block, self.selected, self.main.range, happenings)
        self._base.query_one(InspectorLine).show(view, block, self.main.range)

    def _forget_gone_sequence(self, view: View) -> None:
        if self.selected is None or view.snapshot is None or view.focus_table is not None:
            return
        if all(row.seq_id != self.selected for row in view.snapshot.sequences):
            self.say(f"sequence {self.selected} has ended")
            self.selected = None
            self._look_at()

    def _say_new_notes(self, view: View) -> None:
        """Say what the engine has to tell its user besides events, once."""
        if view.snapshot is None or view.snapshot.notes == self._told:
            return
        new = [note for note in view.snapshot.notes if note not in self._told]
        self._told = view.snapshot.notes
        if new:
            self.say("; ".join(new), "bad" if view.snapshot.counters.integrity_faults else "warn")

    def say(self, note: str, style: str = "text") -> None:
        """Show a note on the event line for a while."""
        self._note_until_s = self.clock() + _NOTE_S if note else 0.0
        if self.has_panes:
            self._base.query_one(EventLine).say(note, style)

    def on_block_map_pointed(self) -> None:
        self._look_at()
        self._show_inspector()

    def _look_at(self) -> None:
        self._poll_now.set()
        if self.attachment is not None:
            block, is_map = self.main.under, self.view.remote is None
            self._block_log.look_at((block.tier, block.block_id))
            self.attachment.look_at(
                seq_id=self.selected,
                block_id=block.block_id if block.tier == "device" and (is_map or self._is_mirrored) else None,
                num_victims=MAX_VICTIMS if "prefix" in self.open_panels else 0,
                lineage="details" in self.open_panels or any(t.order == TREE for t in self._base.query(Sequences)),
            )

    def on_sequences_chosen(self, message: Sequences.Chosen) -> None:
        self.choose(message.seq_id)

    def choose(self, seq_id: int | None) -> None:
        """Select a sequence, whose blocks the map lights up, or none."""
        self.selected = seq_id
        self._look_at()
        self._show(everything=True)

    # Looking --------------------------------------------------------------------------------------------------------

    @property
    def _source(self) -> object:
        """The source, whatever more than reading it offers."""
        return self.attachment.source if self.attachment else None

    @property
    def _estimates(self) -> WhatIf | None:
        """What other caches would have made of an attached engine's traffic; asking has newer estimates made."""
        source = self._source
        return source.what_if() if isinstance(source, Estimates) else None

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.look, self.refusal))

    def action_advice(self) -> None:
        self.push_screen(AdviceScreen(self.look, self.view, self._estimates))

    def action_move(self, way: str) -> None:
        if self.view.remote is not None and self.panel == "map" and not self._is_mirrored:
            self._base.query_one(RemotePane).move(way)
            return
        focused = self.focused
        if isinstance(focused, Stage) and focused.panel == "history" and way in ("left", "right"):
            self.action_history("back" if way == "left" else "forward")
            return
        target = focused if isinstance(focused, (Sequences, Events, Stage)) else self.main
        target.move(way)

    def action_select(self) -> None:
        if self.view.remote is not None and self.panel == "map":
            if not self._is_mirrored:
                self._open_server(self._base.query_one(RemotePane).target)
            return
        if isinstance(self.focused, Sequences):
            if self.focused.cursor is not None:
                self.choose(self.focused.cursor)
            return
        holders = owner_of(self.view, self.main.cursor)
        if not holders:
            self.say("no sequence is known to hold this block")
            return
        # Enter again goes on to the next holder of a shared block.
        at = holders.index(self.selected) + 1 if self.selected in holders else 0
        self.choose(holders[at % len(holders)])

    def action_show(self, what: str) -> None:
        if self.view.remote is None or what in ("map", *ANY_ENGINE):
            if what == "map" and self.panel == "map":
                self._turn_mirror()
            super().action_show(what)
        else:
            self.say(f"{what}: {self._missing(what)}")

    def _turn_mirror(self) -> None:
        """Show the mirror that cache events make instead of the engines, or the engines again."""
        if self.view.mirror is not None:
            self._is_mirrored = not self._is_mirrored
            if self.main.mode == "references":  # which events do not tell
                self.main.set_mode("owner")
            key = self.look.key("show('map')")
            self.say(f"the mirror: {PLACEMENT}; {key} goes back" if self._is_mirrored else "the engines")
            self._look_at()
        elif self.view.remote is not None:
            self.say("a mirror needs the engine's cache events")

    def _open_server(self, target: str | None) -> None:
        """Show one server of a fleet, or all of them again."""
        source = self._source
        if isinstance(source, Openable) and target != source.opened:
            source.open(target)
            if target is None:
                self.say("all servers")
            elif source.opened == target:
                self.say(f"{target}: {self.look.key('deselect')} goes back to all servers")
            else:
                self.say(f"{target}: nothing is known of it", "bad")

    def action_deselect(self) -> None:
        if self._is_mirrored and self.panel == "map" and self.main.marked is None:
            self._turn_mirror()
            self._show(everything=True)
            return
        if self.view.remote is not None and self.panel == "map" and not self._is_mirrored:
            self._open_server(None)
            return
        if self._shrink():
            return
        if self.panel != "map":
            self.action_show("map")
        elif self._held is not None:
            self.action_hold()
        elif self._wanted:
            self.find("")
        elif self.main.marked is not None:
            self.main.mark(None)
        elif self.selected is not None:
            self.choose(None)
        elif isinstance(source := self._source, Openable) and source.opened is not None:
            self._open_server(None)
        else:
            self.main.focus()
