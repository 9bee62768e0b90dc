"""LessonPane: a lesson's text beside the map, its question or task, and the keys that belong to it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from rich.text import Text
from textual import events
from textual.message import Message

from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Pane, line, printable, rule

if TYPE_CHECKING:
    from kvtop.learn.lesson import Step
    from kvtop.learn.player import LessonRun

_KIND_WORDS: Final = {"text": "read", "predict": "predict", "do": "do", "see": "look", "explain": "explained"}
#: A word that is explained here, or what is typed.
_MARKED: Final = re.compile(r"\*([^*\n]+)\*|`([^`\n]+)`")


class LessonPane(Pane):
    """Shows where a play has come to. Its keys are the lesson's while it has the focus.

    Attributes:
        run: The play; ``None`` shows nothing.
        hint: The hint that is shown; empty for none.
        after: What Enter does once the lesson is over.
    """

    class Pressed(Message):
        """A key of the lesson was pressed: a digit, ``enter``, ``erase``, ``hint``, ``words``."""

        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self.run: LessonRun | None = None
        self.hint = ""
        self.after = ""
        self.waiting = ""
        self._back = 0
        self._top = 0

    def show(self, run: LessonRun | None) -> None:
        """Draw a play as it is."""
        self.run = run
        self.redraw()

    def turn_page(self) -> None:
        """Show the step the learner has come to, from its top."""
        self._back = self._top = 0
        self.hint = ""
        self.redraw()

    @property
    def num_hidden(self) -> int:
        """Lines of the page that are outside of the pane."""
        return max(0, len(self._body(self.size.width)) - self._room(self.size.width, self.size.height))

    # Keys -----------------------------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        """Take the lesson's keys; all others are the console's."""
        what = {"enter": "enter", "backspace": "erase", "ctrl+h": "erase", "i": "hint", "w": "words"}.get(event.key)
        if event.key == "b" or (event.key == "enter" and self._back):
            self._turn(1 if event.key == "b" else -1)
        elif event.key in ("pageup", "pagedown") and self.num_hidden:
            self.move("page_up" if event.key == "pageup" else "page_down")
        elif what == "words" or (what is not None and not self._back):
            self.post_message(self.Pressed(what))
        elif (event.character or "").isdecimal() and (event.character or "").isascii() and self._asks:
            self.post_message(self.Pressed(event.character or ""))
        else:
            return
        event.stop()
        event.prevent_default()

    @property
    def _asks(self) -> bool:
        run = self.run
        if run is None or run.finished or self._back:
            return False
        return run.step.kind == "predict" or not run.ready

    def _turn(self, pages: int) -> None:
        if self.run is not None:
            self._back = max(0, min(self._back + pages, self.run.at))
            self._top = 0
            self.redraw()

    def move(self, way: str) -> None:
        """Scroll a page that is longer than the pane."""
        page = max(1, self.size.height - 4)
        self._top += {"up": -1, "down": 1, "page_up": -page, "page_down": page}.get(way, 0)
        self.redraw()

    # Drawing --------------------------------------------------------------------------------------------------------

    def build(self, width: int, height: int) -> list[Text]:
        run, look = self.run, self.look
        if run is None:
            return []
        at = run.at - self._back
        lesson, step = run.lesson, run.lesson.steps[at]
        number = f"{lesson.number}. " if lesson.number else ""
        notes = [f"{at + 1}/{len(lesson.steps)}"]
        kind = "done" if run.finished else _KIND_WORDS[step.kind]
        rows = [rule(look, width, f"{number}{kind}", notes, focused=self.has_focus)]
        body, status = self._body(width), self._status(width)
        room = height - 2 - len(status)
        self._top = max(0, min(self._top, len(body) - room))
        shown = body[self._top : self._top + room]
        has_more = len(body) > self._top + room
        return [*rows, *shown, *[line()] * (room - len(shown)), *status, self._foot(step, at, width, has_more)]

    def _room(self, width: int, height: int) -> int:
        return height - 2 - len(self._status(width))

    def _body(self, width: int) -> list[Text]:
        run = self.run
        if run is None:
            return []
        if run.finished and not self._back:
            return self._wrap(self._summary(run), width)
        at = run.at - self._back
        step = run.lesson.steps[at]
        if not self._back and not run.ready:
            return [line((" one moment…", self.look.style("dim")))]
        title = [*self._wrap(f"*{run.lesson.title}*", width), line()] if at == 0 else []
        rows = [*title, *self._wrap(run.page(at), width)]
        if step.kind == "predict":
            rows += [line(), *self._question(run, step, at, width)]
        return rows

    def _question(self, run: LessonRun, step: Step, at: int, width: int) -> list[Text]:
        look = self.look
        typed = run.typed if not self._back else self._typed_before(run, step)
        if not step.options:
            field = line((" your guess ", look.style("dim")), (f" {typed or ' '} ", look.style("row-focus")))
            field.append(f" {step.unit}", look.style("dim"))
            return [field]
        rows = []
        for number, option in enumerate(run.options(at), start=1):
            is_chosen = typed == str(number)
            for i, row in enumerate(self._wrap(option, width - 3)):
                text = line((f" {number} " if i == 0 else "   ", look.style("key")))
                text.append_text(row)
                if is_chosen:
                    text.stylize(look.style("row-focus"))
                rows.append(text)
        return rows

    @staticmethod
    def _typed_before(run: LessonRun, step: Step) -> str:
        answer = run.answers.get(step.id, "")
        return str(step.options.index(answer) + 1) if answer in step.options else answer

    def _status(self, width: int) -> list[Text]:
        """Return what the lesson has to say below its text: a hint, what is missing, that it is done."""
        run, look = self.run, self.look
        if run is None or run.finished or self._back or not run.ready:
            return []
        is_task = run.step.kind == "do"
        if is_task and run.done:
            return [line((" Done. Enter goes on.", look.style("good")))]
        rows = self._wrap(f"Hint: {self.hint}", width, "label") if self.hint else []
        # What a task lacks changes with every step: never what it lacked when Enter was pressed.
        told = run.missing if is_task else run.note
        if told and (is_task or not rows):
            rows += self._wrap(told, width, "warn" if run.note else "dim")
        return rows

    def _foot(self, step: Step, at: int, width: int, has_more: bool) -> Text:
        look, run = self.look, self.run
        assert run is not None
        has_hints = bool(run.lesson.texts[step.id].hints) and not run.finished and not self._back and not run.done
        back = [("b", "back")] if at else []
        if run.finished and not self._back:
            keys = [("Enter", self.after), *back]
        elif self._back:
            keys = [("Enter", "forward"), *back]
        elif step.kind == "do" and not run.done:
            keys = [("i", "hint"), *back, ("w", "words"), ("Tab", "pane")]
        else:
            keys = [("Enter", "go on"), *([("i", "hint")] if has_hints else []), *back, ("w", "words")]
        if has_more:
            keys.insert(0, ("PgDn", "more"))
        if not self.has_focus:
            keys = [("Tab", "comes back to the lesson")]
        text = line(" ")
        for key, label in keys:
            if text.cell_len + len(key) + len(label) + 1 > width:
                break
            text.append(key, look.style("key"))
            text.append(f" {label}  ", look.style("dim"))
        return text

    def _summary(self, run: LessonRun) -> str:
        parts = [f"*{run.lesson.title}: done.*"]
        if run.num_predictions:
            verb = "was" if run.num_right == 1 else "were"
            parts.append(f"{run.num_right} of your {run.num_predictions} predictions {verb} right.")
            parts += [
                f"{'Right' if v.is_right else 'Wrong'}: you said {v.answer}"
                + ("." if v.answer == v.right else f"; it was {v.right}.")
                for v in run.verdicts.values()
            ]
        return "\n\n".join(parts)

    def _wrap(self, text: str, width: int, style: str = "text") -> list[Text]:
        rows: list[Text] = []
        for paragraph in text.split("\n"):
            marked = self._styled(printable(paragraph), style)
            rows += [self._indent(row) for row in marked.wrap(self.app.console, max(1, width - 2))] or [line()]
        return rows

    def _styled(self, text: str, style: str) -> Text:
        look = self.look
        result = Text(end="", style=look.style(style))
        at = 0
        for found in _MARKED.finditer(text):
            result.append(text[at : found.start()])
            result.append(found[1] or found[2], look.style("title" if found[1] else "key"))
            at = found.end()
        result.append(text[at:])
        return result

    @staticmethod
    def _indent(row: Text) -> Text:
        text = line(" ")
        row.rstrip()
        text.append_text(row)
        return text
