"""LookActions: panels, filters, the command line, sorting, holding the screen, themes, exports."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from textual.screen import Screen

from allocator.commands import Pause, Resume, SetSpeed, Step
from allocator.plans import Outcome
from kvtop.errors import UserError
from kvtop.model.block_log import BlockLog
from kvtop.model.view import View
from kvtop.panels import command_text
from kvtop.panels.beside import Beside
from kvtop.panels.catalog import CONTENTS
from kvtop.panels.content import Asked
from kvtop.serving_commands import AnyCommand
from kvtop.tui.actions import ACTIONS, Action
from kvtop.tui.arrangement import LINES, NONE, PANELS, PERCENT
from kvtop.tui.background import Background
from kvtop.tui.export_actions import KINDS, ExportActions
from kvtop.tui.screens.prompt import Prompt
from kvtop.tui.shades import MODES
from kvtop.tui.themes import THEMES
from kvtop.tui.widgets.block_map import BlockMap, BlockRef
from kvtop.tui.widgets.lesson import LessonPane
from kvtop.tui.widgets.lines import Lines
from kvtop.tui.widgets.panes import Events, Footer
from kvtop.tui.widgets.remote import RemotePane
from kvtop.tui.widgets.sequences import ORDERS, TREE, Sequences
from kvtop.tui.widgets.stage import Stage, Tabs

#: Commands kept for the panel of what was asked, and lines kept of the command line.
_MAX_ASKED: Final = 500
_MAX_LINES: Final = 100
#: Points of the history that a key scrolls.
_SCROLL: Final = 30
#: Commands that need no plan to look at first.
_AT_ONCE: Final = (Pause, Resume, Step, SetSpeed)

#: Lines that only look: name → (usage, what it does).
LOOKS: Final = {
    "block": ("block ID", "go to a block of the device pool"),
    "sequence": ("sequence ID", "select a sequence and go to its last block"),
    "colour": (f"colour {'|'.join(MODES)}", "colour the map"),
    "panel": ("panel NAME", f"one of {', '.join(PANELS)}"),
    "beside": ("beside PANEL", "the panel beside the map, or none"),
    "below": ("below PANEL", "the panel below the map, or none"),
    "side": ("side right|left", "where what is beside the map stands"),
    "side-width": (f"side-width {PERCENT[0]}-{PERCENT[1]}", "its share of the columns, in percent"),
    "below-height": (f"below-height {LINES[0]}-{LINES[1]}", "lines of what is below the map"),
    "order": ("order PANEL…", "the tabs that come first"),
    "hide": ("hide PANEL…", "take tabs away"),
    "unhide": ("unhide PANEL…", "show them again"),
    "sort": (f"sort {'|'.join(ORDERS)}", "sort the sequences"),
    "find": ("find WORDS", "show only sequences and events with these words"),
    "theme": (f"theme {'|'.join(THEMES)}", "change the colours"),
    "export": (f"export {'|'.join(KINDS)} [FILE]", "write the panel that is shown to a file"),
}


class LookActions(ExportActions):
    """What the keys do to the panes and to the console itself. ``KvtopApp`` is the only subclass."""

    _background: Background

    def __init__(self, *, nvml: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._beside = Beside(nvml)
        self.panel = "map"
        self._held: View | None = None
        self._back = 0
        self._wanted = ""
        self._block_log = BlockLog()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._asked: deque[tuple[str, str, bool, str]] = deque(maxlen=_MAX_ASKED)

    # What the subclass has ------------------------------------------------------------------------------------------

    @property
    def _base(self) -> Screen[Any]:
        raise NotImplementedError

    def _show(self, everything: bool) -> None:
        raise NotImplementedError

    def _look_at(self) -> None:
        raise NotImplementedError

    def refusal(self, action: Action) -> str | None:
        """Return why an action cannot be done; ``None`` when it can."""
        raise NotImplementedError

    def _place_panels(self) -> None:
        raise NotImplementedError

    def arrange_line(self, name: str, text: str) -> None:
        """Do what a line of the command line says of the arrangement."""
        raise NotImplementedError

    def _may(self, name: str) -> Any:
        raise NotImplementedError

    def _apply(self, command: AnyCommand) -> None:
        raise NotImplementedError

    def _open_sheet(self, name: str, title: str, offer: Any) -> None:
        raise NotImplementedError

    # Panels ---------------------------------------------------------------------------------------------------------

    @property
    def asked(self) -> Asked:
        """What panels show besides the view."""
        beside, under = self._beside, self.main.under
        return Asked(
            self.selected,
            self._back,
            tuple(self._asked),
            beside.alerts,
            beside.audit,
            self._wanted,
            beside.gpus,
            (under.tier, under.block_id),
            self._block_log.of((under.tier, under.block_id)),
        )

    def action_show(self, what: str) -> None:
        base = self._base
        self.panel = what
        self._beside.open(what)
        for name in ("sequences", "events"):
            base.set_class(what == name, f"-see-{name}")
        base.set_class(what in CONTENTS, "-see-panel")
        self._shrink()
        base.query_one(Tabs).open(what)
        if what in CONTENTS:
            self._open_stage(base.query_one("#stage", Stage), what)
        self._look_at()
        names = {
            "map": ("#map",),
            "sequences": ("#sequences", "#under-list", "#list"),
            "events": ("#events", "#side-log", "#log"),
        }

        def focus() -> None:
            self._show(everything=True)
            for selector in names.get(what, ("#stage",)):
                widget = base.query_one(selector)
                if widget.size.height and widget.size.width:
                    widget.focus()
                    return

        self.call_after_refresh(focus)

    def _open_stage(self, stage: Stage, panel: str) -> None:
        action = self.look.table.of(f"show('{panel}')")
        stage.open(panel, action.shown, action.help[:1].upper() + action.help[1:].partition(":")[0])

    def on_tabs_clicked(self, message: Tabs.Clicked) -> None:
        self.call_later(self.run_action, message.action)

    def on_footer_clicked(self, message: Footer.Clicked) -> None:
        self.call_later(self.run_action, message.action)

    def action_expand(self) -> None:
        base = self._base
        if base.has_class("-big"):
            self._shrink()
            return
        around = {node.id for node in self.focused.ancestors} if self.focused else set()
        what = "side" if "right" in around else "below" if "bottom" in around else "left"
        if isinstance(self.focused, LessonPane):
            what = "lesson"
        base.add_class("-big", f"-big-{what}")
        self._place_panels()

    def _shrink(self) -> bool:
        base = self._base
        was_big = base.has_class("-big")
        base.remove_class("-big", "-big-left", "-big-side", "-big-below", "-big-lesson")
        if was_big:
            self._place_panels()
        return was_big

    # Finding and sorting --------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        before = self._wanted

        def answer(text: str | None) -> None:
            self.find(before if text is None else text)

        self.push_screen(Prompt(self.look, "/ words to find", text=before, changed=self.find), answer)

    def find(self, wanted: str) -> None:
        """Show only sequences, events and lines of the audit log with these words; empty shows all."""
        self._wanted = wanted.strip()
        for table in self._base.query(Sequences):
            table.reorder(wanted=self._wanted)
        for events in self._base.query(Events):
            events.find(self._wanted)
        self._base.query_one(RemotePane).find(self._wanted)
        self._show(everything=True)

    def action_sort(self) -> None:
        if self.view.remote is not None:
            self._base.query_one(RemotePane).move("right")
            return
        table = next(iter(self._base.query(Sequences)))
        self.sort_by(ORDERS[(ORDERS.index(table.order) + 1) % len(ORDERS)])

    def sort_by(self, order: str) -> None:
        """Sort the sequences; again by the same, the other way round."""
        for table in self._base.query(Sequences):
            again = table.order == order and order != ORDERS[0]
            table.reorder(order=order, inverted=again and not table.inverted)
        self._look_at()
        if order == TREE and not table.inverted:
            self.say("sequences: below those with which they share their first blocks")
            return
        self.say(f"sequences: by {order}{', inverted' if table.inverted else ''}")

    def action_tree(self) -> None:
        table = next(iter(self._base.query(Sequences)))
        self.sort_by(ORDERS[0] if table.order == TREE else TREE)

    def on_sequences_sort_asked(self, message: Sequences.SortAsked) -> None:
        self.sort_by(message.order)

    def action_invert(self) -> None:
        if self.view.remote is not None:
            self._base.query_one(RemotePane).invert()
            return
        for table in self._base.query(Sequences):
            table.reorder(inverted=not table.inverted)

    # Time -----------------------------------------------------------------------------------------------------------

    def action_hold(self) -> None:
        self._held = None if self._held is not None else self.view
        held = f"the screen is held; {self.look.key('hold')} goes on"
        self.say(held if self._held is not None else "the screen goes on")
        self._show(everything=True)

    def action_history(self, way: str) -> None:
        points = len(self.view.history.get("at_s"))
        step = {"back": _SCROLL, "forward": -_SCROLL, "live": -self._back}[way]
        self._back = max(0, min(self._back + step, points - 2))
        if self.panel != "history":
            self.action_show("history")
        self._show(everything=True)

    # Looks ----------------------------------------------------------------------------------------------------------

    def action_theme(self) -> None:
        names = list(THEMES)
        self.set_theme(names[(names.index(self.look.theme.name) + 1) % len(names)])

    def set_theme(self, name: str) -> None:
        """Draw everything in another theme."""
        self.look = replace(self.look, theme=THEMES[name])
        self.refresh_css(animate=False)
        for widget in self._base.query("*"):
            if isinstance(widget, (BlockMap, Lines)):
                widget.set_look(self.look)
        note = "" if self.look.depth == "rgb" else "; this terminal's own colours are used"
        self.say(f"theme: {name}{note}")

    def get_theme_variable_defaults(self) -> dict[str, str]:
        theme = self.look.theme
        return {
            "kv-background": theme.background,
            "kv-panel": theme.panel,
            "kv-text": theme.styles["text"],
            "kv-faint": theme.styles["faint"],
            "kv-focus": theme.styles["rule-focus"],
            "kv-warn": theme.styles["warn"],
        }

    # The command line -----------------------------------------------------------------------------------------------

    def action_command_line(self) -> None:
        def answer(text: str | None) -> None:
            if text and text.strip():
                if text in self._lines:
                    self._lines.remove(text)
                self._lines.append(text)
                self.run_line(text)

        past = tuple(self._lines)
        self.push_screen(
            Prompt(self.look, ": a command", suggest=self.suggest, check=self.problem_of, past=past), answer
        )

    @property
    def _kinds(self) -> Mapping[str, Any]:
        """The commands of the engine that is shown: of ours, or of a server that is not ours."""
        return command_text.OWN_KINDS if self.view.remote is None else command_text.SERVING_KINDS

    def suggest(self, typed: str) -> list[tuple[str, str]]:
        """Return the lines that begin with what was typed, and what they do."""
        name, space, _ = typed.partition(" ")
        if space:
            own = command_text.full_name(name)
            use = LOOKS[name][0] if name in LOOKS else command_text.usage(own) if own in self._kinds else ""
            choices = [w for w in use.partition(" ")[2].split(" ")[0].split("|") if w.islower()]
            if name == "panel" or "PANEL" in use:
                choices = [*PANELS, NONE] if name in ("beside", "below") else list(PANELS)
            found = [(f"{name} {choice}", "") for choice in choices if f"{name} {choice}".startswith(typed)]
            return found or ([(use, "")] if use else [])
        keys = {a.line: f"  ({a.shown})" for a in self.look.table.actions if a.shown}
        known = {a.line: a.help for a in self.look.table.actions if a.help}
        known |= {name: command_text.summary(name) for name in self._kinds}
        known |= {name: words for name, (_, words) in LOOKS.items()}
        return [(n, words + keys.get(n, "")) for n, words in sorted(known.items()) if n.startswith(typed)]

    def problem_of(self, typed: str) -> str:
        """Return what is wrong with a line that is being typed; empty while it may still become right."""
        name, space, rest = typed.lstrip().partition(" ")
        if not name or (not space and self.suggest(name)):
            return ""
        own = command_text.full_name(name)
        if not (own in self._kinds and rest.strip()):
            is_known = own in self._kinds or name in LOOKS or any(a.line == name for a in ACTIONS)
            return "" if is_known else f"{name}: no such command; Tab lists them"
        try:
            command_text.parse_command(typed)
        except UserError as error:
            return str(error)
        return ""

    def run_line(self, text: str) -> None:
        """Do what a line of the command line says; a bad one is told on the event line."""
        name, _, rest = text.strip().partition(" ")
        own = command_text.full_name(name)
        try:
            if name in LOOKS:
                self._look_line(name, rest.strip())
                return
            # A command's own name wins over an action's of the same name unless nothing was said with it.
            action = next((a for a in ACTIONS if a.line == name), None)
            if own in self._kinds and (rest or action is None or action.sheet is False):
                self._command_line(command_text.parse_command(text))
            elif action is not None:
                if rest and self.refusal(action) is None:  # without these words it is not what was asked for
                    raise UserError(f"{name} {rest.strip()}: {name} takes no more")
                self.call_later(self.run_action, action.name)
            else:
                raise UserError(f"{name}: no such command; : and Tab list them")
        except UserError as error:
            self.say(str(error), "bad")

    def _command_line(self, command: AnyCommand) -> None:
        if isinstance(command, _AT_ONCE):
            if self._may("pause") is not None:
                self._apply(command)
        else:
            self._open_sheet("verify", command_text.describe(command), command)

    def _look_line(self, name: str, rest: str) -> None:
        match name:
            case "block":
                self.main.put_cursor(BlockRef("device", _number(name, rest)))
                self.action_show("map")
            case "sequence":
                self.go_to_sequence(_number(name, rest))
            case "colour":
                self.main.set_mode(_one_of(name, rest, MODES))  # type: ignore[arg-type]
            case "panel":
                self.action_show(_one_of(name, rest, PANELS))
            case "beside" | "below" | "side" | "side-width" | "below-height" | "order" | "hide" | "unhide":
                self.arrange_line(name, rest)
            case "sort":
                self.sort_by(_one_of(name, rest, ORDERS))
            case "find":
                self.find(rest)
            case "theme":
                self.set_theme(_one_of(name, rest, tuple(THEMES)))
            case _:
                kind, _, file = rest.partition(" ")
                self.export(_one_of(name, kind, KINDS), file.strip() or None)

    def _note_command(self, command: AnyCommand, outcome: Outcome, at: str) -> None:
        self._asked.append((at, command_text.describe(command), outcome.ok, outcome.message))


def _number(name: str, text: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) <= 9):
        raise UserError(f"{name} {text or '(nothing)'}: a whole number")
    return int(text)


def _one_of(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise UserError(f"{name} {text or '(nothing)'}: one of {', '.join(allowed)}")
    return text
