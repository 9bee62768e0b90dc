"""Actions: everything a key can do, once. Bindings, footer and help are made from this table alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from textual.binding import Binding, BindingType

from kvtop.tui.key_names import shown

Group = Literal["look", "map", "panel", "run", "wind", "act", "serve", "program"]
GROUP_TITLES: Final[dict[Group, str]] = {
    "look": "Look",
    "map": "Map",
    "panel": "Panels",
    "run": "Run",
    "wind": "Wind a recording",
    "act": "Act (shows the plan first)",
    "serve": "Act on a server (shows the plan first; so do E, R, space)",
    "program": "Program",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing the operator can do.

    Attributes:
        name: The application's ``action_…`` method, arguments included.
        keys: Keys that do it, as Textual names them.
        shown: The keys as help and footer write them.
        label: One or two words for the footer.
        help: One line for the help overlay; empty where another action's line covers it.
        group: Where help lists it.
        operates: Whether it changes the engine, and so needs the ``operations`` capability.
        sheet: Whether it opens the action sheet, and so changes nothing before ``y``.
        rank: Who comes into the footer first where there is not room for all; 0 stays out.
    """

    name: str
    keys: tuple[str, ...]
    shown: str
    label: str
    help: str
    group: Group
    operates: bool = False
    sheet: bool = False
    rank: int = 0

    @property
    def method(self) -> str:
        """The name without arguments."""
        return self.name.partition("(")[0]

    @property
    def line(self) -> str:
        """What it is called on the command line and in files: ``speed-up``."""
        return "-".join(re.findall(r"[a-z0-9]+", self.name))


def _act(rank: int, name: str, key: str, label: str, text: str, group: Group = "act") -> Action:
    return Action(name, (key,), key, label, text, group, operates=True, sheet=True, rank=rank)


ACTIONS: Final = (
    Action("help", ("question_mark", "f1"), "?", "help", "this overlay", "program", rank=1),
    Action("move('left')", ("left", "h"), "arrows", "", "move the cursor; so do h j k l, PgUp PgDn, Home End", "look"),
    Action("move('down')", ("down", "j"), "↓ j", "", "", "look"),
    Action("move('up')", ("up", "k"), "↑ k", "", "", "look"),
    Action("move('right')", ("right", "l"), "→ l", "", "", "look"),
    Action("move('page_down')", ("pagedown",), "PgDn", "", "", "look"),
    Action("move('page_up')", ("pageup",), "PgUp", "", "", "look"),
    Action("move('first')", ("home",), "Home", "", "", "look"),
    Action("move('last')", ("end",), "End", "", "", "look"),
    Action("focus_next", ("tab",), "Tab", "pane", "next pane", "look", rank=18),
    Action("select", ("enter",), "Enter", "select", "select the row's sequence, or the block's holder", "look", rank=4),
    Action("deselect", ("escape",), "Esc", "", "deselect; back to the map", "look"),
    Action(
        "advice", ("a",), "a", "advice", "what the measurements suggest, and the hits at other sizes", "look", rank=21
    ),
    Action(
        "colour", ("c",), "c", "colour", "colour by references, state, owner, age, fill, contiguity", "map", rank=10
    ),
    Action("zoom", ("z",), "z", "zoom", "nearer, to one block a cell; from there to all blocks", "map", rank=10),
    Action("zoom_out", ("x",), "x", "", "further away", "map"),
    Action("go_to_block", ("g",), "g", "go to", "go to a block by its id, or with s to a sequence", "map", rank=17),
    Action("follow", ("f",), "f", "follow", "keep the cursor on the selected sequence's last block", "map", rank=22),
    Action("mark", ("v",), "v", "range", "begin a range of blocks, or end it; so does dragging", "map", rank=23),
    Action("copy", ("y",), "y", "copy", "copy the range, the row or the block to the clipboard", "map", rank=24),
    Action("watch", ("w",), "w", "", "flash blocks that moved, all that changed, or none", "map"),
    Action(
        "filter",
        ("slash",),
        "/",
        "filter",
        "show only lines with these words: sequences, events, audit",
        "look",
        rank=11,
    ),
    Action("command_line", ("colon",), ":", "command", "type any action or command; Tab completes", "look", rank=9),
    Action("sort", ("s",), "s", "sort", "sort the sequences or the servers by the next column", "look"),
    Action("invert", ("o",), "o", "", "sort them the other way round", "look"),
    Action("tree", ("backslash",), "\\", "", "sequences as a tree: below those with which they share blocks", "look"),
    Action("hold", ("p",), "p", "hold", "hold the screen still while the engine goes on, or go on", "look", rank=18),
    Action("history('back')", ("left_curly_bracket",), "{ } 0", "", "over time: back, forward, up to now", "look"),
    Action("history('forward')", ("right_curly_bracket",), "}", "", "", "look"),
    Action("history('live')", ("0",), "0", "", "", "look"),
    Action("expand", ("e",), "e", "", "give the focused pane the whole screen, or take it back", "look"),
    Action("show('map')", ("1",), "1", "map", "the map; of an attached engine, its numbers or its mirror", "panel"),
    Action("show('sequences')", ("2",), "2", "seqs", "the sequences", "panel"),
    Action("show('events')", ("3",), "3", "events", "the events", "panel"),
    Action(
        "show('prefix')", ("4",), "4", "prefix", "prefix cache: hits, reuse, shared prefixes, next victims", "panel"
    ),
    Action("show('fragmentation')", ("5",), "5", "frag", "fragmentation: runs, and what still fits", "panel"),
    Action("show('tiers')", ("6",), "6", "tiers", "both tiers, and the copies", "panel"),
    Action("show('locks')", ("7",), "7", "locks", "locks and threads", "panel"),
    Action("show('history')", ("8",), "8", "time", "every number over time, back to an hour ago", "panel"),
    Action("show('audit')", ("9",), "9", "audit", "audit log: who asked for what, the plan and the outcome", "panel"),
    Action("show('details')", ("d",), "d", "details", "the selected sequence and its block table", "panel"),
    Action(
        "show('alerts')",
        ("exclamation_mark",),
        "!",
        "alerts",
        "alerts: what would fire, since when, why, and its runbook",
        "panel",
    ),
    Action("show('gpu')", ("u",), "u", "gpu", "GPUs of this machine: memory, use, power, heat, processes", "panel"),
    Action("show('block')", ("semicolon",), ";", "block", "what happened to the block under the cursor", "panel"),
    Action("arrange", ("f4",), "F4", "", "arrange the panels: beside, below, order of tabs, hidden ones", "panel"),
    Action("beside", ("vertical_line",), "|", "", "the next panel beside the map", "panel"),
    Action("below", ("underscore",), "_", "", "the next panel below the map", "panel"),
    Action("width('more')", ("greater_than_sign",), "> <", "", "more or less width beside the map", "panel"),
    Action("width('less')", ("less_than_sign",), "<", "", "", "panel"),
    Action("height('more')", ("right_parenthesis",), ") (", "", "more or less height below the map", "panel"),
    Action("height('less')", ("left_parenthesis",), "(", "", "", "panel"),
    Action("pause", ("space",), "space", "pause", "pause or resume the engine", "run", operates=True, rank=3),
    Action("step", ("full_stop",), ".", "step", "one step, while paused", "run", operates=True, rank=9),
    Action("speed('up')", ("plus", "equals_sign"), "+", "speed", "twice the speed", "run", operates=True, rank=19),
    Action("speed('down')", ("minus",), "-", "", "half the speed", "run", operates=True),
    Action("speed('max')", ("m",), "m", "", "as fast as possible", "run", operates=True),
    Action("annotate", ("apostrophe",), "'", "mark", "mark this step with a text", "run", operates=True, rank=20),
    Action(
        "wind('back')",
        ("left_square_bracket",),
        "[ ]",
        "wind",
        "stop, and go a virtual second back or on",
        "wind",
        rank=3,
    ),
    Action("wind('on')", ("right_square_bracket",), "]", "", "", "wind"),
    Action("wind('moment')", ("comma",), ",", "", "stop, and go one recorded moment back; . goes one on", "wind"),
    Action(
        "jump('next')", ("n",), "n b", "jump", "go to the next or the last event of the kind looked for", "wind", rank=4
    ),
    Action("jump('last')", ("b",), "b", "", "", "wind"),
    Action(
        "jump_kind",
        ("i",),
        "i",
        "kind",
        "look for preemptions, evictions, faults, commands, marks, all",
        "wind",
        rank=5,
    ),
    Action("marks", ("quotation_mark",), '"', "marks", "list the marks, and go to one", "wind", rank=8),
    _act(5, "swap_out", "S", "out", "swap the selected sequence out to the host tier"),
    _act(12, "swap_in", "I", "in", "swap the selected sequence in again"),
    _act(6, "compact", "C", "compact", "move blocks together; choose the goal"),
    _act(7, "resize", "R", "resize", "grow or shrink the device pool"),
    _act(8, "evict", "E", "evict", "evict cached blocks: all of them, or a number"),
    _act(0, "abort", "A", "abort", "end the work in progress; what was moved stays moved"),
    _act(0, "policy", "O", "order", "order the queue: first come, by class, shortest job first"),
    _act(0, "watermark", "W", "watermark", "the share of the pool that is kept allocatable when admitting"),
    _act(0, "when_to_compact", "M", "mode", "when to compact: by itself, by hand, or never"),
    _act(20, "undo", "U", "undo", "undo the last change of size, policy, watermark, mode or load"),
    _act(21, "load", "L", "load", "change how fast requests come, and how long they are"),
    _act(14, "fork", "F", "fork", "continue the selected sequence twice, sharing its blocks"),
    _act(13, "cancel", "X", "cancel", "end the selected sequence"),
    _act(15, "pin", "P", "pin", "pin or unpin the block under the cursor"),
    _act(16, "verify", "V", "verify", "check every law, and the contents in stamp mode"),
    _act(21, "inject", "B", "break", "break something on purpose: a copy, a client, a bit, and more"),
    _act(5, "sleep", "Z", "sleep", "sleep or wake it; release or resume its memory", "serve"),
    _act(5, "slots", "K", "slots", "save or restore a slot", "serve"),
    Action("theme", ("t",), "t", "", "next theme: dark, light, contrast, colour-blind", "program"),
    Action("export", ("ctrl+s",), "^S", "", "a picture of the screen; :export csv or json writes rows", "program"),
    Action("learn", ("f2",), "F2", "", "lessons: paging explained, on an engine of their own", "program"),
    Action("restart", ("r",), "r", "", "restart the engine after it was lost", "program"),
    Action("quit", ("q",), "q", "quit", "quit; ends the engine that this console started", "program", rank=2),
    Action("suspend", ("ctrl+z",), "^Z", "", "back to the shell; fg comes back here", "program"),
    Action("interrupt", ("ctrl+c",), "^C", "", "quit with exit code 130", "program"),
)


@dataclass(frozen=True, slots=True)
class ActionTable:
    """All actions, with the keys that they have in one console."""

    actions: tuple[Action, ...] = ACTIONS

    def of(self, name: str) -> Action:
        """Return the action called ``name``, its arguments left out or given as in the table."""
        return next(a for a in self.actions if name in (a.name, a.method))

    def key(self, name: str) -> str:
        """Return the first key of an action as help writes it; for one without a key, its line."""
        action = self.of(name)
        return shown(action.keys[0]) if action.keys else f":{action.line}"

    @property
    def panels(self) -> tuple[Action, ...]:
        """The actions that show a panel."""
        return tuple(a for a in self.actions if a.method == "show")

    def keymap(self) -> dict[str, str]:
        """Return what Textual is to change in ``bindings()``: name → keys."""
        first = {a.name: a.keys for a in ACTIONS}
        return {a.name: ",".join(a.keys) or _NO_KEY for a in self.actions if a.keys != first[a.name]}


#: The actions with the keys they have unless a file says otherwise.
USUAL: Final = ActionTable()
#: A key that no terminal sends.
_NO_KEY: Final = "none"


def bindings(actions: Iterable[Action] = ACTIONS) -> list[BindingType]:
    """Return the application's key bindings. Those with Ctrl work above dialogs too."""
    return [
        Binding(",".join(a.keys), a.name, a.help, show=False, priority=a.shown.startswith("^"), id=a.name)
        for a in actions
    ]
