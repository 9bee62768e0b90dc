"""KvtopApp: the console. Wires one attachment to the widgets, keys to actions, and owns start and stop.

Facts go one way: a thread polls the attachment and posts ``ViewChanged``; the screen reads
``attachment.view`` and hands values to widgets. Commands go the other way through one door,
``attachment.operations``, on the command thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.filter import LineFilter
from textual.screen import Screen

from allocator.commands import (
    Cancel,
    Command,
    Compact,
    CompactGoal,
    EvictCached,
    Fork,
    InjectFault,
    Pause,
    Pin,
    Resize,
    Resume,
    SetLoad,
    SetPolicy,
    SetSpeed,
    Step,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
    command_name,
)
from allocator.config import MAX_BLOCKS, Policy
from allocator.fault_kinds import FAULT_KINDS
from allocator.ids import BlockFlag
from allocator.plans import Outcome, Plan
from kvtop.attachment import Attachment
from kvtop.errors import EXIT_FAILED, EXIT_INTERRUPTED, KvtopError
from kvtop.model import format as fmt
from kvtop.model.observation import MAX_VICTIMS
from kvtop.model.view import TierView, View
from kvtop.recording.framing import Mark
from kvtop.sources.recorded import RecordedSource
from kvtop.sources.remote.fleet import Fleet
from kvtop.tui.actions import Action, action_of, bindings
from kvtop.tui.background import Background
from kvtop.tui.look import AsciiFilter, detect_look
from kvtop.tui.look_actions import LookActions
from kvtop.tui.messages import BackgroundCrashed, CommandFinished, Connected, ConnectFailed, PlanReady, ViewChanged
from kvtop.tui.screens.advice import AdviceScreen
from kvtop.tui.screens.help import HelpScreen
from kvtop.tui.screens.sheet import ActionSheet, Choice, NumberField
from kvtop.tui.themes import DARK
from kvtop.tui.widgets.block_map import BlockMap
from kvtop.tui.widgets.header import Header
from kvtop.tui.widgets.inspector import Inspector, InspectorLine, owner_of
from kvtop.tui.widgets.panes import MIN_HEIGHT, MIN_WIDTH, EventLine, Events, Footer, TooSmall, Trends
from kvtop.tui.widgets.remote import RemotePane
from kvtop.tui.widgets.sequences import Sequences
from kvtop.tui.widgets.stage import Stage, Tabs

#: Seconds between two updates of tables and numbers; the map follows every view.
_PANES_EVERY_S: Final = 0.25
#: Seconds a note stays on the event line.
_NOTE_S: Final = 8.0
#: Readings a second while the engine is lost.
_LOST_HZ: Final = 2.0
#: Readings alike after which an engine is taken to stand still, and readings a second from then on until a key asks
#: for something.
_STILL_AFTER: Final = 10
_STILL_HZ: Final = 2.0
#: What quitting may take: for the threads to end, and for the engine to be let go.
_STOP_THREADS_S: Final = 0.5
_STOP_ENGINE_S: Final = 1.2
#: How long after a signal a terminal that takes no output may hold up the end.
_STALLED_S: Final = 5.0
#: Virtual seconds a real second: how slow and how fast the keys go before ``max``.
_SLOWEST, _FASTEST = 1 / 64, 1024.0

#: Blocks of a range that are pinned at once, at most.
MAX_PINNED: Final = 10_000

_GOALS: Final[tuple[tuple[str, CompactGoal], ...]] = (
    ("pack low", "pack-low"),
    ("longest run", "longest-run"),
    ("by sequence", "by-sequence"),
)
#: What the keys that jump in a recording look for.
_JUMPS: Final = (
    ("event of interest", Mark.PREEMPTION | Mark.EVICTION | Mark.FAULT | Mark.COMMAND),
    ("preemption", Mark.PREEMPTION),
    ("eviction", Mark.EVICTION),
    ("fault", Mark.FAULT),
    ("command", Mark.COMMAND),
)
_POLICIES: Final[tuple[tuple[str, Policy], ...]] = (
    ("first come", "fcfs"),
    ("by class", "priority"),
    ("shortest job", "sjf"),
)


class KvtopApp(LookActions):
    """The console on one engine.

    Args:
        connect: Gives the attachment; may take seconds, runs beside the first frame. A ``KvtopError`` ends the
            console with its exit code and text.
        restart: Gives a new attachment after the engine was lost; ``None`` when that is not on offer.
        again: What the key for that does.
        refresh_hz: Readings a second.
        theme: Its colours, of ``THEMES``.
        ascii_only: Write ASCII characters only.
        auto_poll: Read by itself; without it, ``poll_once`` takes one step by hand.
        clock: Monotonic seconds, the same as the attachment's.
    """

    TITLE = "kvtop"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "BlockMap"
    BINDINGS: ClassVar[list[BindingType]] = bindings()
    HORIZONTAL_BREAKPOINTS = [(0, "-thin"), (MIN_WIDTH, "-narrow"), (110, "-wide"), (160, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (MIN_HEIGHT, "-short"), (32, "-tall")]  # noqa: RUF012
    CSS = """
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
    #events { width: 1fr; margin-left: 1; }
    BlockMap { height: 1fr; }
    #list { display: none; height: 1fr; }
    #log { display: none; height: 1fr; }
    #stage { display: none; width: 1fr; }
    #remote { display: none; height: 1fr; }
    .-remote #remote { display: block; }
    .-remote #left > * { display: none; }
    .-remote #left > #remote { display: block; }
    .-remote #right, .-remote #events, .-remote InspectorLine { display: none !important; }
    TooSmall { display: none; height: 1fr; }
    .-wide #right, .-huge #right { display: block; }
    .-huge #right { width: 42%; }
    .-wide.-tall #bottom, .-huge.-tall #bottom { display: block; }
    .-wide InspectorLine, .-huge InspectorLine { display: none; }
    .-narrow.-see-sequences #map, .-narrow.-see-events #map { display: none; }
    .-narrow.-see-sequences #list, .-narrow.-see-events #log { display: block; }
    .-wide.-short.-see-events #map, .-huge.-short.-see-events #map { display: none; }
    .-wide.-short.-see-events #log, .-huge.-short.-see-events #log { display: block; }
    .-see-panel #right, .-see-panel #left { display: none; }
    .-see-panel #stage { display: block; }
    .-huge.-see-panel #left { display: block; }
    .-huge.-see-panel #stage { margin-left: 1; }
    .-big.-big-map #right, .-big.-big-sequences #left, .-big.-big-sequences #inspector { display: none; }
    .-big.-big-sequences #right { width: 1fr; margin-left: 0; }
    .-big.-big-events #body, .-big.-big-events #trends { display: none; }
    .-tall.-big.-big-map #bottom, .-tall.-big.-big-sequences #bottom { display: none; }
    .-tall.-big.-big-events #bottom { height: 1fr; }
    .-big.-big-events #events { margin-left: 0; }
    .-thin Tabs, .-flat Tabs { display: none; }
    .-thin Header, .-flat Header, .-thin #body, .-flat #body, .-thin #bottom, .-flat #bottom { display: none; }
    .-thin InspectorLine, .-flat InspectorLine, .-thin EventLine, .-flat EventLine { display: none; }
    .-thin Footer, .-flat Footer { display: none; }
    .-thin TooSmall, .-flat TooSmall { display: block; }
    """

    def __init__(
        self,
        connect: Callable[[], Attachment],
        *,
        restart: Callable[[], Attachment] | None = None,
        again: str = "restarts it",
        refresh_hz: float = 10.0,
        ascii_only: bool = False,
        theme: str = DARK.name,
        auto_poll: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.look = detect_look(ascii_only, theme)
        # Sixteen colours and none are the terminal's own; the framework would turn them into shades of its theme.
        super().__init__(ansi_color=self.look.depth != "rgb")
        self.attachment = None
        self.selected = None
        self.clock = clock
        self._connect = connect
        self._restart = restart
        self._again = again
        self._refresh_hz = refresh_hz
        self._auto_poll = auto_poll
        self._background = Background(lambda error: self._post(BackgroundCrashed(error)))
        self._drawn = threading.Event()
        self._poll_now = threading.Event()
        self._polling: threading.Event | None = None
        self._left = threading.Event()
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._panes_at_s: float | None = None
        self._note_until_s = 0.0
        self._told: tuple[str, ...] = ()
        self._busy = False
        self._jump = 0
        self._ascii = AsciiFilter() if self.look.ascii_only else None

    def get_line_filters(self) -> list[LineFilter]:
        filters = list(super().get_line_filters())
        return [*filters, self._ascii] if self._ascii else filters

    # Screen ---------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        look = self.look
        yield Header(look)
        yield Tabs(look)
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield BlockMap(look, id="map")
                yield Sequences(look, id="list")
                yield Events(look, id="log")
                yield RemotePane(look, id="remote")
            with Vertical(id="right"):
                yield Inspector(look, id="inspector")
                yield Sequences(look, id="sequences")
            yield Stage(look, id="stage")
        with Horizontal(id="bottom"):
            yield Trends(look, id="trends")
            yield Events(look, id="events")
        yield InspectorLine(look)
        yield EventLine(look)
        yield Footer(look, self.refusal)
        yield TooSmall(look)

    def on_mount(self) -> None:
        self._listen_to_signals()
        self.set_interval(0.5, self._tick)
        self.call_after_refresh(self._start, self._connect)

    def _listen_to_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # Plain handlers rather than the loop's: those would wait for a loop that a stalled terminal holds up.
        loop = asyncio.get_running_loop()

        def leave(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.action_interrupt)
            threading.Thread(target=self._leave_at_last, name="kvtop-leave", daemon=True).start()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old_handlers[number] = signal.signal(number, leave)

    def _leave_at_last(self) -> None:
        """End the process if the screen cannot be left, because its terminal takes no more output."""
        if self._left.wait(_STALLED_S):
            return
        before = getattr(self._driver, "attrs_before", None)
        if before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.__stdin__.fileno() if sys.__stdin__ else 0, termios.TCSANOW, before)
        os._exit(EXIT_INTERRUPTED)

    def run(self, **options: Any) -> Any:
        """Show the console until it is left; ``return_code`` tells how."""
        try:
            return super().run(**options)
        finally:
            self._left.set()

    @property
    def view(self) -> View:
        """The current view; an empty one before the engine answered."""
        return self.attachment.view if self.attachment else View(source="")

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

    # Connecting and polling -----------------------------------------------------------------------------------------

    def _start(self, connect: Callable[[], Attachment]) -> None:
        def work() -> None:
            try:
                attachment = connect()
            except Exception as error:
                self._post(ConnectFailed(error))
                return
            if self._background.stopping.is_set() or not self._post(Connected(attachment)):
                attachment.close()

        self._background.start("connect", work)

    def on_connected(self, message: Connected) -> None:
        self.attachment = message.attachment
        if self._busy:
            self._busy = False
            self.say("a new engine runs", "good")
        self.selected = None
        self._held, self._back = None, 0
        self._told = ()
        self.main.say("reading the first block map…")
        self._look_at()
        if self._auto_poll:
            stop = self._polling = threading.Event()
            attachment = message.attachment
            self._background.start("poll", lambda: self._poll_loop(attachment, stop))
        self._show(everything=True)

    def on_connect_failed(self, message: ConnectFailed) -> None:
        error = message.error
        if self.attachment is not None:
            self._busy = False
            self.say(f"restart failed: {_reason(error)}", "bad")
            return
        code = error.exit_code if isinstance(error, KvtopError) else EXIT_FAILED
        self.exit(return_code=code, message=Text(f"kvtop: {_reason(error)}"))

    def on_background_crashed(self, message: BackgroundCrashed) -> None:
        self.exit(return_code=EXIT_FAILED, message=Text(f"kvtop: {_reason(message.error)}"))

    def _poll_loop(self, attachment: Attachment, stop: threading.Event) -> None:
        stopping = self._background.stopping
        due_s = time.monotonic()
        seen: tuple[int | None, TierView | None] = (None, None)
        unchanged = 0
        while not stopping.is_set() and not stop.is_set():
            self._poll_now.clear()
            view = attachment.poll()
            if stop.is_set():
                return
            self._drawn.clear()
            if not self._post(ViewChanged()):
                return
            # A slow terminal is sent fewer frames, rather than a queue of them.
            self._drawn.wait(1.0)
            facts = (view.snapshot.step if view.snapshot else None, view.device)
            unchanged = unchanged + 1 if facts == seen else 0
            seen = facts
            hz = self._refresh_hz
            if view.error is not None:
                hz = min(_LOST_HZ, hz)
            elif unchanged >= _STILL_AFTER:
                hz = min(_STILL_HZ, hz)
            now_s = time.monotonic()
            # From due time to due time, so that what a reading takes does not lower the rate; lag is not caught up.
            due_s = max(due_s + 1 / hz, now_s)
            self._poll_now.wait(max(0.005, due_s - now_s))
            if self._poll_now.is_set():
                due_s = time.monotonic()

    async def poll_once(self) -> None:
        """Read once and draw the reading: the step of a console without ``auto_poll``."""
        if self.attachment is not None:
            self.attachment.poll()
            self._show(everything=True)

    def on_view_changed(self) -> None:
        if self._base.query("#map"):  # at the end the panes go before the last message is handled
            self._show(everything=self._panes_at_s is None or self.clock() - self._panes_at_s >= _PANES_EVERY_S)
        self._drawn.set()

    def _tick(self) -> None:
        """Keep ages true while no view comes, and give the event line back."""
        if self._auto_poll and self.view.read_at_s is not None and self.clock() - self.view.read_at_s > 1.0:
            self._show_header()
        if self._note_until_s and self.clock() > self._note_until_s:
            self.say("")

    def _post(self, message: ViewChanged | Connected | ConnectFailed | CommandFinished | BackgroundCrashed) -> bool:
        """Post from any thread; false once the screen is gone."""
        try:
            return self.post_message(message)
        except RuntimeError:
            return False

    # Drawing --------------------------------------------------------------------------------------------------------

    def _show(self, everything: bool) -> None:
        view = self._shown
        self._forget_gone_sequence(view)
        self._say_new_notes(view)
        self._follow(view)
        self.main.show(view, f"sequence {self.selected}" if self.selected is not None else "")
        self._base.set_class(view.remote is not None, "-remote")
        self._show_header()  # of the same reading as the map's title, which tells some of its numbers again
        if everything or view.error is not None:
            self._panes_at_s = self.clock()
            self._show_panes()

    def _show_header(self) -> None:
        again = None if self._restart is None else self._again
        self._base.query_one(Header).show(self._shown, self.clock(), again, self._held is not None)

    def _show_panes(self) -> None:
        view, base = self._shown, self._base
        for table in base.query(Sequences):
            table.show(view, self.selected)
        for events in base.query(Events):
            events.show(view)
        base.query_one(RemotePane).show(view)
        base.query_one(Trends).show(view)
        base.query_one(Stage).show(view, self.asked)
        base.query_one(EventLine).show(view)
        base.query_one(TooSmall).show(view)
        base.query_one(Footer).redraw()
        if isinstance(self.screen, AdviceScreen):
            self.screen.show(view)
        self._show_inspector()

    def _show_inspector(self) -> None:
        view, block = self._shown, self.main.under
        self._base.query_one(Inspector).show(view, block, self.selected, self.main.range)
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
        self._base.query_one(EventLine).say(note, style)

    def on_block_map_pointed(self) -> None:
        self._look_at()
        self._show_inspector()

    def _look_at(self) -> None:
        self._poll_now.set()
        if self.attachment is not None:
            block = self.main.under
            self.attachment.look_at(
                seq_id=self.selected,
                block_id=block.block_id if block.tier == "device" else None,
                num_victims=MAX_VICTIMS if self.panel == "prefix" else 0,
            )

    def on_sequences_chosen(self, message: Sequences.Chosen) -> None:
        self.choose(message.seq_id)

    def choose(self, seq_id: int | None) -> None:
        """Select a sequence, whose blocks the map lights up, or none."""
        self.selected = seq_id
        self._look_at()
        self._show(everything=True)

    # Looking --------------------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.look, self.refusal))

    def action_advice(self) -> None:
        self.push_screen(AdviceScreen(self.look, self.view))

    def action_move(self, way: str) -> None:
        if self.view.remote is not None:
            self._base.query_one(RemotePane).move(way)
            return
        focused = self.focused
        if isinstance(focused, Stage) and focused.panel == "history" and way in ("left", "right"):
            self.action_history("back" if way == "left" else "forward")
            return
        target = focused if isinstance(focused, (Sequences, Events, Stage)) else self.main
        target.move(way)

    def action_select(self) -> None:
        if self.view.remote is not None:
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
        if self.view.remote is None:
            super().action_show(what)
        elif what != "map":
            self.say(f"{what}: {self._missing(what)}")

    def _open_server(self, target: str | None) -> None:
        """Show one server of a fleet, or all of them again."""
        source = self.attachment.source if self.attachment else None
        if isinstance(source, Fleet) and target != source.opened:
            source.open(target)
            self.say("all servers" if target is None else f"{target}: Esc goes back to all servers")

    def action_deselect(self) -> None:
        if self.view.remote is not None:
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
        else:
            self.main.focus()

    # Commands -------------------------------------------------------------------------------------------------------

    def refusal(self, action: Action) -> str | None:
        """Return why ``action`` cannot be done on this engine; ``None`` when it can, or may yet."""
        if self.attachment is None:
            return None
        is_recording = isinstance(self.attachment.source, RecordedSource)
        if action.group == "wind":
            return None if is_recording else "only a recording can be wound back"
        if not action.operates or (is_recording and action.group == "run"):
            return None
        return self.attachment.source.missing.get("operations")

    def _missing(self, capability: str) -> str:
        """Return why the engine does not offer something to look at."""
        assert self.attachment is not None
        return self.attachment.source.missing.get(capability, "nothing to show")

    def _may(self, name: str) -> Attachment | None:
        """Return the attachment if the action is on offer; else say why not."""
        if self.attachment is None or (self.view.snapshot is None and self.view.remote is None):
            self.say("the engine is still starting")
            return None
        reason = self.refusal(action_of(name))
        if reason is not None:
            self.say(f"refused: {reason}", "bad")
            return None
        return self.attachment

    def _apply(self, command: Command) -> None:
        attachment = self.attachment
        if attachment is None:
            return

        def work() -> None:
            try:
                outcome = attachment.operations.apply(command)
            except Exception as error:
                outcome = Outcome(ok=False, message=_reason(error))
            self._post(CommandFinished(command, outcome))

        if not self._background.submit(work):
            self.say("too many commands are waiting", "bad")

    def on_command_finished(self, message: CommandFinished) -> None:
        outcome = message.outcome
        self._poll_now.set()
        self._note_command(message.command, outcome, time.strftime("%H:%M:%S"))
        if outcome.ok:
            took = f" in {fmt.seconds(outcome.seconds)}" if outcome.seconds and outcome.moved_blocks else ""
            self.say(f"{outcome.message}{took}", "good")
        else:
            self.say(f"refused: {outcome.message}", "bad")

    def _open_sheet(self, name: str, title: str, offer: Command | list[Choice] | NumberField) -> None:
        attachment = self._may(name)
        if attachment is None:
            return

        def ask(sheet: ActionSheet, request: int, command: Command) -> None:
            def work() -> None:
                if not sheet.wants(request):
                    return
                try:
                    plan = attachment.operations.plan(command)
                except Exception as error:
                    plan = Plan(summary=command_name(command), refusal=_reason(error))
                with contextlib.suppress(RuntimeError):
                    sheet.post_message(PlanReady(request, plan))

            if not self._background.submit(work):
                sheet.post_message(PlanReady(request, Plan("busy", refusal="too many commands are waiting")))

        def answer(command: Command | None) -> None:
            if command is not None:
                self.say(f"{command_name(command)}…")
                self._apply(command)

        self.push_screen(ActionSheet(self.look, title, offer, ask), answer)

    def action_pause(self) -> None:
        if self._may_run("pause"):
            self._apply(Resume() if self._phase == "paused" else Pause())

    def action_step(self) -> None:
        if self._may_run("step"):
            if self._phase == "paused":
                self._apply(Step(1))
            else:
                self.say("pause first (space), then step")

    def action_wind(self, way: str) -> None:
        def wind(source: RecordedSource) -> Outcome:
            step = source.scrub(-1) if way == "moment" else source.scrub_time(-1.0 if way == "back" else 1.0)
            return Outcome(ok=True, message=f"step {fmt.count(step)}")

        self._wind(wind)

    def action_jump(self, way: str) -> None:
        name, marks = _JUMPS[self._jump]

        def jump(source: RecordedSource) -> Outcome:
            step = source.jump(marks, 1 if way == "next" else -1)
            where = "after" if way == "next" else "before"
            if step is None:
                return Outcome(ok=False, message=f"no {name} {where} this moment")
            return Outcome(ok=True, message=f"{name} at step {fmt.count(step)}")

        self._wind(jump)

    def action_jump_kind(self) -> None:
        if self._may("jump_kind") is not None:
            self._jump = (self._jump + 1) % len(_JUMPS)
            self.say(f"n and b go to the next and the last {_JUMPS[self._jump][0]}")

    def _wind(self, work: Callable[[RecordedSource], Outcome]) -> None:
        """Wind the recording on the command thread: its file is read for that."""
        attachment = self._may("wind")
        if attachment is None or not isinstance(attachment.source, RecordedSource):
            return
        source = attachment.source

        def run() -> None:
            try:
                outcome = work(source)
            except KvtopError as error:
                outcome = Outcome(ok=False, message=_reason(error))
            self._post(CommandFinished(Pause(), outcome))

        if not self._background.submit(run):
            self.say("too many commands are waiting", "bad")

    def _may_run(self, name: str) -> bool:
        """Return whether the engine can be set going or stopped at all; else say why not."""
        if self._may(name) is None:
            return False
        if self._phase == "done":
            self.say("the run is done")
        return self._phase != "done"

    @property
    def _phase(self) -> str:
        return self.view.snapshot.phase if self.view.snapshot else ""

    def action_speed(self, way: str) -> None:
        if self._may("speed") is None or self.view.snapshot is None:
            return
        self._apply(SetSpeed(next_speed(self.view.snapshot.speed, way)))

    def _sequence_for(self, name: str) -> int | None:
        """Return the sequence that an action means: the selected one, else the row under the table's cursor."""
        if self._may(name) is None:
            return None
        if self.selected is not None:
            return self.selected
        if isinstance(self.focused, Sequences) and self.focused.cursor is not None:
            return self.focused.cursor
        self.say("select a sequence first: Enter on a row, or on one of its blocks")
        return None

    def action_swap_out(self) -> None:
        if (seq_id := self._sequence_for("swap_out")) is not None:
            self._open_sheet("swap_out", f"Swap out sequence {seq_id}", SwapOut(seq_id))

    def action_swap_in(self) -> None:
        if (seq_id := self._sequence_for("swap_in")) is not None:
            self._open_sheet("swap_in", f"Swap in sequence {seq_id}", SwapIn(seq_id))

    def action_fork(self) -> None:
        if (seq_id := self._sequence_for("fork")) is not None:
            self._open_sheet("fork", f"Fork sequence {seq_id}", Fork(seq_id))

    def action_cancel(self) -> None:
        if (seq_id := self._sequence_for("cancel")) is not None:
            self._open_sheet("cancel", f"Cancel sequence {seq_id}", Cancel(seq_id))

    def action_compact(self) -> None:
        self._open_sheet("compact", "Compact the device pool", [Choice(n, Compact(goal)) for n, goal in _GOALS])

    def action_policy(self) -> None:
        self._open_sheet("policy", "Order the queue", [Choice(n, SetPolicy(policy)) for n, policy in _POLICIES])

    def action_resize(self) -> None:
        total = self.view.device.numbers.total if self.view.device else 0

        def make(text: str) -> Command | str:
            if not text:
                return "type the new number of blocks"
            number = int(text)
            if not 1 <= number <= MAX_BLOCKS:
                return f"{fmt.count(number)}: from 1 to {fmt.count(MAX_BLOCKS)} blocks"
            return f"the pool has {fmt.count(number)} blocks" if number == total else Resize(number)

        field = NumberField("blocks", str(total), make, "type the new size")
        self._open_sheet("resize", f"Resize the device pool of {fmt.blocks(total)}", field)

    def action_evict(self) -> None:
        def make(text: str) -> Command | str:
            if not text:
                return EvictCached(None)
            return EvictCached(int(text)) if int(text) >= 1 else "0: at least 1 block, or nothing typed for all"

        self._open_sheet("evict", "Evict cached blocks", NumberField("blocks", "", make, "nothing typed: all of them"))

    def action_load(self) -> None:
        snapshot = self.view.snapshot
        if self._may("load") is None or snapshot is None:
            return
        if snapshot.rate_scale is None or snapshot.size_scale is None:
            self.say("refused: the load of this engine cannot be changed", "bad")
            return
        rate, size = snapshot.rate_scale, snapshot.size_scale
        choices = [
            Choice("rate ×2", SetLoad(rate * 2, None)),
            Choice("rate ÷2", SetLoad(rate / 2, None)),
            Choice("size ×2", SetLoad(None, size * 2)),
            Choice("size ÷2", SetLoad(None, size / 2)),
            Choice("as at first", SetLoad(1.0, 1.0)),
        ]
        self._open_sheet("load", "Change the load", choices)

    def action_pin(self) -> None:
        block, device = self.main.cursor, self.view.device
        if block.tier != "device":
            self.say("only device blocks can be pinned")
            return
        pinned = device is not None and bool(int(device.arrays.flags[block.block_id]) & BlockFlag.PINNED)
        chosen = self.main.range
        ids = (block.block_id,) if chosen is None else tuple(range(chosen[1], chosen[2] + 1))
        if len(ids) > MAX_PINNED:
            self.say(f"{fmt.blocks(len(ids))} are marked; at most {fmt.count(MAX_PINNED)} can be pinned at once")
            return
        name = f"block {ids[0]}" if len(ids) == 1 else f"blocks {ids[0]}-{ids[-1]}"
        self._open_sheet("pin", f"{'Unpin' if pinned else 'Pin'} {name}", Unpin(ids) if pinned else Pin(ids))

    def action_verify(self) -> None:
        self._open_sheet("verify", "Verify laws and contents", VerifyContents())

    def action_inject(self) -> None:
        choices = [Choice(kind, InjectFault(kind)) for kind in FAULT_KINDS]
        self._open_sheet("inject", "Inject a fault", choices)

    # Start and stop -------------------------------------------------------------------------------------------------

    def action_restart(self) -> None:
        if self.view.error is None:
            self.say("the engine is there; nothing to restart")
        elif self._restart is None:
            self.say("this engine was not started here, so it cannot be restarted here", "bad")
        elif not self._busy:
            self._busy = True
            self.say(f"r {self._again}…")
            if self._polling is not None:
                self._polling.set()
            lost, restart = self.attachment, self._restart

            def again() -> Attachment:
                if lost is not None:
                    lost.close()
                return restart()

            self._start(again)

    async def action_quit(self) -> None:
        self.exit()

    def action_suspend(self) -> None:
        """Stop this job and give the terminal back to the shell, as Ctrl-Z does elsewhere. The engine goes on."""
        driver = self._driver
        # A job that a shell controls has a process group of its own; without such a shell nobody could continue it.
        if driver is None or not driver.can_suspend or os.getpgrp() == os.getsid(0):
            self.say("no shell to go back to")
            return
        driver.suspend_application_mode()
        # All of the job: stopped alone, this process would leave a `make` in front of it waiting unseen. SIGSTOP
        # rather than SIGTSTP, so that nobody takes the terminal before it is restored. The driver sees to SIGCONT.
        os.killpg(0, signal.SIGSTOP)

    def action_interrupt(self) -> None:
        """Leave at once, by Ctrl-C or a signal."""
        self.exit(return_code=EXIT_INTERRUPTED)

    async def on_unmount(self) -> None:
        """Stop the threads and let the engine go, within two seconds even if it hangs."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        attachment = self.attachment

        def close() -> None:
            if attachment is not None:
                attachment.close()

        closing = threading.Thread(target=close, name="kvtop-close", daemon=True)
        self._background.stopping.set()
        self._drawn.set()
        self._poll_now.set()
        closing.start()
        await asyncio.to_thread(self._background.stop, _STOP_THREADS_S)
        await asyncio.to_thread(closing.join, _STOP_ENGINE_S)


def _reason(error: BaseException) -> str:
    """Return an error's text; one that is not ours is an internal fault and says its kind too."""
    return str(error) if isinstance(error, KvtopError) else f"internal fault: {type(error).__name__}: {error}"


def next_speed(speed: float | None, way: str) -> float | None:
    """Return the speed after a key: doubled or halved within bounds, ``None`` (no pace) above the fastest."""
    if way == "max":
        return None
    if speed is None:
        return None if way == "up" else _FASTEST
    if way == "down":
        return max(_SLOWEST, speed / 2)
    return None if speed >= _FASTEST else speed * 2
