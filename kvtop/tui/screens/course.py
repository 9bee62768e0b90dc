"""CourseScreen: the lessons with what was played of them, to choose one; WordsScreen: what the words of a page mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvtop.learn.catalog import Word
from kvtop.learn.lesson import Lesson
from kvtop.learn.playing import fits
from kvtop.learn.progress import Played
from kvtop.tui.look import Look
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import fit, line, printable

#: Chosen instead of a lesson: leave the lessons.
LEAVE: Final = "leave"

_CSS = """
    {name} {{ align: center middle; }}
    {name} > VerticalScroll {{
        width: 76; max-width: 98%; height: auto; max-height: 100%; padding: 0 1;
        border: round $kv-focus; background: $kv-panel; scrollbar-size-vertical: 1;
        scrollbar-color: $kv-faint; scrollbar-background: $kv-panel;
    }}
    {name}:ansi > VerticalScroll {{ background: ansi_default; border: round ansi_cyan; }}
"""
_WIDTH: Final = 70


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen of the course.

    Attributes:
        name: A lesson's name, or ``LEAVE``.
        anew: Whether a lesson that was left is to begin at its first page.
    """

    name: str
    anew: bool = False


class CourseScreen(Dialog[Chosen | None]):
    """Answers with what was chosen, or with ``None`` to stay where one was.

    Args:
        look: How to draw.
        lessons: The course.
        played: What was played, by lesson.
        complaint: What is wrong with the progress; empty when nothing is.
        leave: What leaving leads to.
        may_stay: Whether Esc leads back to something.
        first: Lesson that the cursor is on at first; ``None`` takes the first that is not done.
    """

    DEFAULT_CSS = _CSS.format(name="CourseScreen")

    def __init__(
        self,
        look: Look,
        lessons: Sequence[Lesson],
        played: Mapping[str, Played],
        *,
        complaint: str = "",
        leave: str = "quit",
        may_stay: bool = True,
        first: str | None = None,
    ) -> None:
        super().__init__()
        self.look = look
        self._lessons, self._played = lessons, played
        self._typed = ""
        self._complaint, self._leave, self._may_stay = complaint, leave, may_stay
        done = [played.get(lesson.name, Played()).done for lesson in lessons]
        names = [lesson.name for lesson in lessons]
        self.at = names.index(first) if first in names else done.index(False) if False in done else 0

    def compose(self) -> ComposeResult:
        with VerticalScroll() as pane:
            pane.border_title = "Lessons"
            pane.border_subtitle = "Enter begins, or goes on"
            pane.can_focus = False
            yield Static(self.text(), id="course")

    def on_key(self, event: events.Key) -> None:
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        number = len(self._lessons) + 1
        if event.key == "enter":
            self.dismiss(Chosen(self._lessons[self.at].name if self.at < len(self._lessons) else LEAVE))
        elif event.key == "n" and self.at < len(self._lessons):
            self.dismiss(Chosen(self._lessons[self.at].name, anew=True))
        elif event.key in ("escape", "q"):
            self.dismiss(None if self._may_stay else Chosen(LEAVE))
        elif event.key in ("down", "j", "tab", "up", "k"):
            self.at = (self.at + (-1 if event.key in ("up", "k") else 1)) % number
            self.query_one("#course", Static).update(self.text())
        elif event.key.isdecimal():
            self._typed = next((n for n in (self._typed + event.key, event.key) if 1 <= int(n) < number), "")
            self.at = int(self._typed) - 1 if self._typed else self.at
            self.query_one("#course", Static).update(self.text())

    def text(self) -> Text:
        """Return the list."""
        look = self.look
        rows = []
        for i, lesson in enumerate(self._lessons):
            played = self._played.get(lesson.name, Played())
            row = line((f"{i + 1:>3} ", look.style("key")))
            row.append("✓ " if played.done else "· " if played.furthest else "  ", look.style("good"))
            row.append(fit(lesson.title, _WIDTH - 22), look.style("text"))
            score = f"{played.right}/{played.predictions} right" if played.done else f"{lesson.minutes} min"
            score = _place(lesson, played) or score
            row.append(f" {score:>12}", look.style("dim"))
            rows.append(self._marked(row, i))
        rows.append(self._marked(line((f"    {self._leave}", look.style("dim"))), len(self._lessons)))
        at = min(self.at, len(self._lessons) - 1)
        about = self._lessons[at].summary if self.at < len(self._lessons) else ""
        rows.append(line((printable(about), look.style("label"))))
        rows.append(line((self._how(), look.style("dim"))))
        if self._complaint:
            rows.append(line((printable(self._complaint), look.style("warn"))))
        return Text("\n", end="").join(rows)

    def _how(self) -> str:
        """Return how the lesson under the cursor begins, where it has been begun already."""
        lesson = self._lessons[self.at] if self.at < len(self._lessons) else None
        place = "" if lesson is None else _place(lesson, self._played.get(lesson.name, Played()))
        return f"Enter goes on at {place}, n begins anew" if place else ""

    def _marked(self, row: Text, number: int) -> Text:
        if number == self.at:
            row.append(" " * max(0, _WIDTH - row.cell_len))
            row.stylize(self.look.style("row-focus"))
        return row


def _place(lesson: Lesson, played: Played) -> str:
    """Return where a lesson was left, such as ``page 5 of 12``; empty where it begins at its first page."""
    if played.left is None or not fits(lesson, played.left):
        return ""
    at = [step.id for step in lesson.steps].index(played.left.step)
    return f"page {at + 1} of {len(lesson.steps)}"


class WordsScreen(Dialog[None]):
    """Says what the course's words on a page mean; any of the usual keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,w,q,enter", "dismiss", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
    ]
    DEFAULT_CSS = _CSS.format(name="WordsScreen")

    def __init__(self, look: Look, words: Sequence[Word]) -> None:
        super().__init__()
        self.look = look
        self._words = words

    def compose(self) -> ComposeResult:
        with VerticalScroll() as pane:
            pane.border_title = "Words on this page"
            pane.border_subtitle = "Esc closes"
            yield Static(self.text())

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def text(self) -> Text:
        """Return the words and what they mean."""
        look = self.look
        rows = []
        for word in self._words:
            rows.append(Text.assemble((word.word, look.style("title")), (f"  {word.meaning}", look.style("text"))))
        if not rows:
            rows.append(Text("no word of the course is used here", look.style("dim")))
        return Text("\n", end="").join(rows)
