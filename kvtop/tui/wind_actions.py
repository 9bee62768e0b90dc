"""WindActions: a recording is wound back and on, and jumped through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from allocator.commands import Annotate, Pause
from allocator.plans import Outcome
from kvtop.errors import KvtopError
from kvtop.model import format as fmt
from kvtop.recording.framing import Mark
from kvtop.sources.recorded import RecordedSource
from kvtop.tui.background import reason
from kvtop.tui.messages import CommandFinished, MarksRead
from kvtop.tui.screens.marks import MarksScreen
from kvtop.tui.screens.prompt import Prompt
from kvtop.tui.setting_actions import SettingActions

#: What the keys that jump in a recording look for.
_JUMPS: Final = (
    ("event of interest", Mark.PREEMPTION | Mark.EVICTION | Mark.FAULT | Mark.COMMAND | Mark.NOTE),
    ("preemption", Mark.PREEMPTION),
    ("eviction", Mark.EVICTION),
    ("fault", Mark.FAULT),
    ("command", Mark.COMMAND),
    ("mark", Mark.NOTE),
)


class WindActions(SettingActions):
    """What the keys do to a recording. ``KvtopApp`` is the only subclass."""

    _jump = 0

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
            texts = [note.text for note in source.notes if source.shows(note)] if marks & Mark.NOTE else []
            told = f": {'; '.join(texts)}" if texts else ""
            return Outcome(ok=True, message=f"{name} at step {fmt.count(step)}{told}")

        self._wind(jump)

    def action_jump_kind(self) -> None:
        if self._may("jump_kind") is not None:
            self._jump = (self._jump + 1) % len(_JUMPS)
            next_key, last_key = (self.look.key(f"jump('{way}')") for way in ("next", "last"))
            self.say(f"{next_key} and {last_key} go to the next and the last {_JUMPS[self._jump][0]}")

    def action_annotate(self) -> None:
        def answer(text: str | None) -> None:
            if text and text.strip():
                self._apply(Annotate(text.strip()))

        if self._may("annotate") is not None:
            self.push_screen(Prompt(self.look, "mark this step with a text"), answer)

    def action_marks(self) -> None:
        attachment = self._may("marks")
        if attachment is None or not isinstance(attachment.source, RecordedSource):
            return
        source = attachment.source

        def run() -> None:
            self._post(MarksRead(source.notes, source.step))

        if not self._background.submit(run):
            self.say("too many commands are waiting", "bad")

    def on_marks_read(self, message: MarksRead) -> None:
        """Let the operator choose a mark to go to."""
        if not message.notes:
            self.say(f"no marks yet; {self.look.table.of('annotate').shown} sets one")
            return

        def answer(step: int | None) -> None:
            if step is not None:
                self._wind(lambda source: Outcome(ok=True, message=f"step {fmt.count(source.stop_at(step))}"))

        self.push_screen(MarksScreen(self.look, message.notes, message.step, "marks"), answer)

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
                outcome = Outcome(ok=False, message=reason(error))
            self._post(CommandFinished(Pause(), outcome))

        if not self._background.submit(run):
            self.say("too many commands are waiting", "bad")
