"""The small panes: trends, events, the event line, the footer, and the note that the terminal is too small."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.message import Message

from allocator.events import Event
from allocator.plans import WorkProgress
from kvtop.model import format as fmt
from kvtop.model.history import History, hit_ratios
from kvtop.model.remote import usage_of
from kvtop.model.view import View
from kvtop.operations import NOT_OFFERED
from kvtop.tui.actions import Action
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Lines, Pane, bar, fit, line, rule, spark

MIN_WIDTH, MIN_HEIGHT = 60, 16

_EVENT_STYLES = {
    "fault": "bad",
    "refuse": "bad",
    "preempt": "warn",
    "evict": "warn",
    "command": "label",
    "note": "warn",
}


class Trends(Lines):
    """Sparklines of the last two minutes."""

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._history = History()

    def show(self, view: View) -> None:
        """Draw a view's history."""
        self._history = view.history
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        look, history = self.look, self._history
        times = [t for t in history.get("at_s")[-max(1, width - 16) :] if t is not None]
        span = fmt.seconds(times[-1] - times[0]) if len(times) > 1 else fmt.UNKNOWN
        lines = [rule(look, width, "Trends", [f"last {span}"])]
        hits = hit_ratios(history)
        waiting = history.get("waiting")
        for label, values, text, top in (
            ("used", history.get("usage"), fmt.percent(_last(history.get("usage"))), 1.0),
            ("frag", history.get("external"), fmt.percent(_last(history.get("external"))), 1.0),
            ("hit", hits, fmt.percent(_last(hits)), 1.0),
            ("running", history.get("running"), fmt.short(_last(history.get("running"))), None),
            ("waiting", waiting, fmt.short(_last(waiting)), None),
        ):
            entry = line((f" {label:<8}", look.style("dim")), (f"{text:>6} ", look.style("value")))
            entry.append(spark(values, max(0, width - entry.cell_len - 1), top), look.style("spark"))
            lines.append(entry)
        return lines


def _last(values: tuple[float | None, ...] | list[float | None]) -> float | None:
    return values[-1] if values else None


def event_line(look: Look, event: Event, width: int) -> Text:
    """Return one event: step, kind, text."""
    text = line((f"{fmt.count(event.step):>9} ", look.style("dim")))
    text.append(f"{event.kind:<13} ", look.style(_EVENT_STYLES.get(event.kind, "label")))
    text.append(fit(event.text, max(0, width - text.cell_len)).rstrip(), look.style("text"))
    return text


class Events(Pane):
    """The latest events, newest first."""

    def __init__(self, look: Look, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(look, id=id, classes=classes)
        self.wanted = ""
        self._all: tuple[Event, ...] = ()
        self._events: tuple[Event, ...] = ()
        self._top = 0

    def show(self, view: View) -> None:
        """Draw a view's events."""
        newest = self._all[-1].number if self._all else -1
        self._all = view.events
        self._events = self._matching()
        if self._top:
            # A reader who scrolled back keeps his place while new events arrive.
            self._top += sum(1 for e in self._events if e.number > newest)
        self.redraw()

    def find(self, wanted: str) -> None:
        """Show only events with all these words in their kind or text."""
        self.wanted = wanted
        self._events = self._matching()
        self._top = 0
        self.redraw()

    def _matching(self) -> tuple[Event, ...]:
        words = self.wanted.lower().split()
        return tuple(e for e in self._all if all(w in f"{e.kind} {e.text} {e.step}".lower() for w in words))

    def move(self, way: str) -> None:
        """Scroll; left and right do nothing."""
        page = max(1, self.size.height - 2)
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page, "first": -len(self._events)}
        step |= {"last": len(self._events), "left": 0, "right": 0}
        self._top += step[way]
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        room = height - 1
        self._top = max(0, min(self._top, len(self._events) - room))
        newest_first = self._events[::-1]
        notes = [f"/{self.wanted}: {len(self._events)} of {len(self._all)}"] if self.wanted else []
        notes += [f"{self._top} newer above"] if self._top else []
        lines = [
            rule(
                self.look,
                width,
                "Events",
                notes,
                key=self.look.key("show('events')"),
                focused=self.has_focus,
            )
        ]
        lines += [event_line(self.look, e, width) for e in newest_first[self._top : self._top + room]]
        if not self._events:
            empty = f" no event with {self.wanted}" if self.wanted else " no events yet"
            lines.append(line((fit(empty, width).rstrip(), self.look.style("dim"))))
        lines += [line()] * (height - len(lines))
        return lines


class EventLine(Lines):
    """One line: how far a command in progress is, else what the console has to say, else why the engine is lost or
    stands, else the latest event."""

    DEFAULT_CSS = "EventLine { height: 1; }"

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.note = ""
        self._note_style = "text"
        self._trouble: str | None = None
        self._event: Event | None = None
        self._work: WorkProgress | None = None

    def say(self, note: str, style: str = "text") -> None:
        """Show a note in front of the events; an empty one gives the line back to them."""
        self.note, self._note_style = note, style
        self.redraw()

    def show(self, view: View) -> None:
        """Note what is wrong with the engine, and the latest event of a view."""
        phase = view.snapshot.phase if view.snapshot else ""
        self._trouble = f"engine lost: {view.error}" if view.error is not None else phase if ":" in phase else None
        self._event = view.events[-1] if view.events else None
        self._work = view.snapshot.work if view.snapshot and view.error is None else None
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        if self._work is not None:
            return [progress_line(self.look, self._work, width)]
        if self.note:
            return [line((fit(f" {self.note}", width).rstrip(), self.look.style(self._note_style)))]
        if self._trouble is not None:
            return [line((fit(f" {self._trouble}", width).rstrip(), self.look.style("bad")))]
        return [event_line(self.look, self._event, width) if self._event else line()]


def progress_line(look: Look, work: WorkProgress, width: int) -> Text:
    """Return how far a command is, as a bar and in words, and what ends it."""
    share = work.done_blocks / work.total_blocks if work.total_blocks else None
    text = line((f" {work.name} ", look.style("label")))
    text.append_text(bar(look, max(8, min(40, width - 60)), [(share, "bar")]))
    text.append(f" {fmt.percent(share):>6} ", look.style("value"))
    text.append(f" {fmt.count(work.done_blocks)} of {fmt.blocks(work.total_blocks)}", look.style("text"))
    text.append(f"  {look.key('abort')}", look.style("key"))
    text.append(" ends it", look.style("dim"))
    return text


class Footer(Lines):
    """The keys that count here, greyed where the engine takes no commands. Leaves out what does not fit whole."""

    DEFAULT_CSS = "Footer { height: 1; }"

    class Clicked(Message):
        """A key was clicked: do its action."""

        def __init__(self, action: str) -> None:
            super().__init__()
            self.action = action

    def __init__(self, look: Look, refusal: Callable[[Action], str | None]) -> None:
        super().__init__(look)
        self._refusal = refusal
        self._places: list[tuple[int, int, str]] = []

    def build(self, width: int, height: int) -> list[Text]:
        text = line(" ")
        room = width - 1
        kept = []
        self._places = []
        here = [a for a in self.look.table.actions if a.rank and a.shown and self._is_here(a)]
        for action in sorted(here, key=lambda a: a.rank):
            room -= cell_len(action.shown) + len(action.label) + 3
            if room < -2:
                break
            kept.append(action)
        for action in sorted(kept, key=self.look.table.actions.index):
            self._key(text, action)
        text.rstrip()
        return [text]

    def _is_here(self, action: Action) -> bool:
        """Return whether an action means anything on this kind of engine, be it on offer or not."""
        refusal = self._refusal(action)
        return refusal is None or (refusal != NOT_OFFERED and action.group not in ("wind", "serve"))

    def _key(self, text: Text, action: Action) -> None:
        grey = self._refusal(action) is not None
        start = text.cell_len
        self._places.append((start, start + cell_len(action.shown) + len(action.label) + 1, action.name))
        text.append(action.shown, self.look.style("faint" if grey else "key"))
        text.append(f" {action.label}  ", self.look.style("faint" if grey else "dim"))

    def on_click(self, event: events.Click) -> None:
        for start, stop, name in self._places:
            if start <= event.x < stop:
                self.post_message(self.Clicked(name))


class TooSmall(Lines):
    """What is needed, and the one number that must stay."""

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._used = fmt.UNKNOWN

    def show(self, view: View) -> None:
        """Note the usage of a view."""
        remote = usage_of(view.remote.rows) if view.remote else None
        self._used = fmt.percent(view.device.numbers.usage_ratio if view.device else remote)
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        size = self.app.size
        said = f"kvtop needs {MIN_WIDTH}x{MIN_HEIGHT}, this terminal has {size.width}x{size.height}"
        return [
            line((fit(said, width).rstrip(), self.look.style("warn"))),
            line(("used ", self.look.style("dim")), (self._used, self.look.style("value"))),
        ]
