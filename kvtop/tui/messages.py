"""Messages that the console's threads post to its screen. They carry facts; threads touch no widget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from allocator.plans import Outcome, Plan
from kvtop.attachment import Attachment
from kvtop.recording.frames import Note
from kvtop.serving_commands import AnyCommand

if TYPE_CHECKING:
    from kvtop.learn.experiments import Results
    from kvtop.learn.player import LessonRun


class Connected(Message):
    """The engine answered: here is the attachment."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment = attachment


class ConnectFailed(Message):
    """There is no engine to show."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class ViewChanged(Message):
    """The attachment has a newer view. Carries nothing: read ``attachment.view``."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, ViewChanged)


class PlanReady(Message):
    """The plan that an action sheet asked for.

    Attributes:
        request: The sheet's number of the request; older answers are dropped.
        plan: The plan, or why there is none, as a refusal.
    """

    def __init__(self, request: int, plan: Plan) -> None:
        super().__init__()
        self.request, self.plan = request, plan


class CommandFinished(Message):
    """A command was applied or refused; that it is not known what became of it is an outcome too.

    ``inverse`` takes it back; ``None`` where nothing does.
    """

    def __init__(
        self, command: AnyCommand, outcome: Outcome, is_known: bool = True, inverse: AnyCommand | None = None
    ) -> None:
        super().__init__()
        self.command, self.outcome, self.is_known, self.inverse = command, outcome, is_known, inverse


class MarksRead(Message):
    """The marks of a recording, read on the command thread, and the step it stands at."""

    def __init__(self, notes: tuple[Note, ...], step: int) -> None:
        super().__init__()
        self.notes, self.step = notes, step


class BackgroundCrashed(Message):
    """A task let an exception out: our bug."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class ExperimentDone(Message):
    """A lesson's experiment has ended: what it found out, for the play that asked, or why it could not be run."""

    def __init__(self, run: LessonRun, results: Results, problem: str = "") -> None:
        super().__init__()
        self.run, self.results, self.problem = run, results, problem


class Told(Message):
    """A task beside the screen has something to say: an export that ended, or what could not be remembered."""

    def __init__(self, text: str, ok: bool) -> None:
        super().__init__()
        self.text, self.ok = text, ok
