"""Playing a lesson without a screen: for tests, and to know beforehand what will have been right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvtop.attachment import Attachment
from kvtop.errors import KvtopError
from kvtop.learn.experiments import run_experiment
from kvtop.learn.expression import UnknownFact
from kvtop.learn.lesson import EngineSpec, Lesson, Step
from kvtop.learn.player import LessonRun, Screen
from kvtop.learn.progress import Left
from kvtop.learn.workshop import open_engine
from kvtop.panels.command_text import parse_command
from kvtop.sources.recorded import RecordedSource

#: Written before a command of a solution that may fail.
TRY: Final = "try "
#: Readings after which a step that does not begin is given up.
_MAX_READINGS = 50


class LessonStuck(KvtopError):
    """A lesson cannot be played to its end as written."""


class Playing:
    """One play without a screen, step by step.

    Args:
        lesson: What is played.
        open_with: Opens its engines.
    """

    def __init__(
        self,
        lesson: Lesson,
        open_with: Callable[[EngineSpec], Attachment] = lambda spec: open_engine(spec, threaded=False),
    ) -> None:
        self.run = LessonRun(lesson)
        self.screen = Screen()
        self.attachment: Attachment | None = None
        self._open_with = open_with

    def begin_step(self) -> Step:
        """Do what the current step needs before it can be told, and return it.

        Raises:
            LessonStuck: It never gets ready.
        """
        run = self.run
        self.open_engine()
        if (experiment := run.wants_experiment) is not None:
            run.ran(run_experiment(experiment, run.spec, run.step.parameters))
        self.look()
        self._show(run.step)
        for _ in range(_MAX_READINGS):
            self.look()
            if run.ready:
                return run.step
        raise LessonStuck(f"{run.lesson.name}, {run.step.id}: never gets ready")

    def open_engine(self) -> None:
        """Open the engine that the current step needs, if it is another one than there is."""
        if (wanted := self.run.wants_engine) is not None:
            self.close()
            self.attachment = self._open_with(self.run.lesson.engines[wanted])
            self.screen.selected = None
            self.run.opened(wanted)

    def look(self) -> None:
        """Read the engine once and let the lesson see it."""
        assert self.attachment is not None
        self.attachment.look_at(seq_id=self.screen.selected, block_id=None)
        self.run.see(self.attachment.poll(), self.screen)

    def do(self, line: str) -> None:
        """Do one line of the command line.

        Raises:
            LessonStuck: The engine refuses it.
        """
        name, _, rest = line.partition(" ")
        if name in ("panel", "colour"):
            setattr(self.screen, name, rest)
        elif name == "sequence":
            self.screen.selected = int(rest)
        elif name != "block":
            assert self.attachment is not None
            outcome = self.attachment.operations.apply(parse_command(line.removeprefix(TRY)))
            if not outcome.ok and not line.startswith(TRY):
                raise LessonStuck(f"{self.run.lesson.name}, {self.run.step.id}: {line}: {outcome.message}")
        self.look()

    def close(self) -> None:
        """Let go of the engine."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None

    def _show(self, step: Step) -> None:
        show, screen = step.show, self.screen
        screen.panel = show.panel or screen.panel
        screen.colour = show.colour or screen.colour
        if show.sequence is not None:
            row = self.run.find(show.sequence) if show.sequence else None
            screen.selected = None if row is None else row.seq_id
        if show.at is not None:
            source = None if self.attachment is None else self.attachment.source
            if isinstance(source, RecordedSource):
                with contextlib.suppress(UnknownFact):
                    source.go_to(int(self.run.ask(show.at)))
            self.run.wound()


def play(lesson: Lesson, answers: Mapping[str, str]) -> Iterator[Playing]:
    """Play a lesson to its end, and yield at every step: once it is ready, and tasks again when they are done.

    Args:
        lesson: What is played.
        answers: Prediction → answer: an option's id, or a number. One that is not there is answered with the first
            option, or 0.

    Raises:
        LessonStuck: It cannot be played to its end.
    """
    playing = Playing(lesson)
    run = playing.run
    try:
        while not run.finished:
            step = playing.begin_step()
            yield playing
            _answer(playing, step, answers)
            if step.kind == "do":
                yield playing
            _go_on(playing, step)
    finally:
        playing.close()


def fits(lesson: Lesson, left: Left) -> bool:
    """Return whether a play of ``lesson`` can go on where another was left: lessons change between releases."""
    names = [step.id for step in lesson.steps]
    if left.step not in names[1:]:
        return False
    before = [step for step in lesson.steps[: names.index(left.step)] if step.kind == "predict"]
    return all(_is_answer(step, left.answers.get(step.id, "")) for step in before)


def _is_answer(step: Step, answer: str) -> bool:
    return answer in step.options if step.options else answer.isascii() and answer.isdecimal()


def resume(
    lesson: Lesson,
    left: Left,
    open_with: Callable[[EngineSpec], Attachment] = lambda spec: open_engine(spec, threaded=False),
) -> Playing:
    """Return a play that has come to where another was left, with its engine as that one's may have been.

    The answers are those that were given. What was done at the tasks is not known: each is done as its file does it.

    Args:
        lesson: What was played.
        left: Where it was left; must fit.
        open_with: Opens its engines.

    Raises:
        LessonStuck: It does not come that far; nothing is left open.
    """
    playing = Playing(lesson, open_with)
    try:
        while playing.run.step.id != left.step:
            step = playing.begin_step()
            _answer(playing, step, left.answers)
            _go_on(playing, step)
    except BaseException:
        playing.close()
        raise
    playing.run.remember(left)
    return playing


def _answer(playing: Playing, step: Step, answers: Mapping[str, str]) -> None:
    """Do what a step asks for."""
    if step.kind == "predict":
        for digit in keys_of(step, answers.get(step.id)):
            playing.run.press(digit)
    elif step.kind == "do":
        for line in playing.run.solution():
            playing.do(line)


def _go_on(playing: Playing, step: Step) -> None:
    run = playing.run
    if not run.go_on():
        raise LessonStuck(f"{run.lesson.name}, {step.id}: {run.note or 'cannot be left'}")


def keys_of(step: Step, answer: str | None) -> str:
    """Return the digits that give an answer to a prediction."""
    if step.options:
        return str(step.options.index(answer) + 1) if answer in step.options else "1"
    return answer or "0"


def right_answers(lesson: Lesson) -> dict[str, str]:
    """Return what will have been right, prediction by prediction: found out by playing the lesson once."""
    verdicts = {}
    for playing in play(lesson, {}):
        verdicts = playing.run.verdicts
    return {
        name: verdict.right_value if isinstance(verdict.right_value, str) else str(round(verdict.right_value))
        for name, verdict in verdicts.items()
    }
