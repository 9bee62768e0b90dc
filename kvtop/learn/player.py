"""LessonRun: one play of a lesson. Knows where the learner is, what was answered, when a task is done. Draws nothing.

Whoever shows it opens the engines and runs the experiments that it asks for, hands it every view, and passes on what
the learner answers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from allocator.snapshot import SequenceRow
from kvtop.learn.experiments import Results
from kvtop.learn.expression import Expression, UnknownFact, Value, fill_in, write
from kvtop.learn.facts import LessonFacts
from kvtop.learn.lesson import EngineSpec, Lesson, Step, StepText
from kvtop.learn.progress import Left
from kvtop.model.format import UNKNOWN
from kvtop.model.view import View

#: Digits of an answer.
_MAX_DIGITS = 9


@dataclass(slots=True)
class Screen:
    """What the console shows, as far as checks may ask: panel, colouring, selected sequence."""

    panel: str = "map"
    colour: str = ""
    selected: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a prediction was judged.

    Attributes:
        answer, right: What the learner said and what was right, as texts have them.
        is_right: Whether they are the same, within the tolerance.
        right_value: What was right: an option's id, or a number.
    """

    answer: str
    right: str
    is_right: bool
    right_value: Value


@dataclass(slots=True)
class _Page:
    """A step as it was shown first: a text keeps its numbers."""

    text: str = ""
    options: tuple[str, ...] = ()


@dataclass(slots=True)
class LessonRun:
    """One play.

    Attributes:
        lesson: What is played.
        at: Number of the step that the learner has come to.
        ready: Whether this step's engine and experiment are there and its text can be told.
        done: Whether this step asks for nothing more.
        typed: The number typed so far, or the option chosen, as text.
        note: What the last key led to.
        answers: Prediction → what was answered.
        verdicts: Prediction → how it was judged.
        hints: Step → hints taken.
        tries: Task → times the learner wanted to go on before it was done.
        engine: Name of the engine that is there; empty before the first.
        finished: Whether the last step has been left.
    """

    lesson: Lesson
    at: int = 0
    ready: bool = False
    done: bool = False
    typed: str = ""
    note: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    engine: str = ""
    finished: bool = False
    _known: dict[str, Value] = field(default_factory=dict)
    _pages: dict[str, _Page] = field(default_factory=dict)
    _ran: set[str] = field(default_factory=set)
    _kept_ahead: frozenset[str] = frozenset()
    _wound_at: int | None = None
    _facts: LessonFacts = field(default_factory=lambda: LessonFacts(View(source="")))

    def remember(self, left: Left) -> None:
        """Take over what the learner did in a play that was left, as far as no engine is needed to tell it."""
        self.at = [step.id for step in self.lesson.steps].index(left.step)
        self.answers, self.hints, self.tries = dict(left.answers), dict(left.hints), dict(left.tries)

    @property
    def step(self) -> Step:
        """The step that the learner has come to."""
        return self.lesson.steps[self.at]

    @property
    def text(self) -> StepText:
        """Its texts, as written."""
        return self.lesson.texts[self.step.id]

    # What it needs --------------------------------------------------------------------------------------------------

    @property
    def wants_engine(self) -> str | None:
        """Name of the engine that this step needs and that is not there."""
        wanted = self.step.engine or (self.lesson.first_engine if not self.engine else None)
        return wanted if wanted is not None and wanted != self.engine else None

    @property
    def wants_experiment(self) -> str | None:
        """Name of the experiment that this step needs and that was not run for it yet."""
        return self.step.run if self.step.id not in self._ran else None

    @property
    def spec(self) -> EngineSpec:
        """The engine that is there."""
        return self.lesson.engines[self.engine or self.lesson.first_engine]

    def opened(self, engine: str) -> None:
        """Note that an engine is there."""
        self.engine = engine

    def ran(self, results: Results) -> None:
        """Note what this step's experiment found out."""
        self._ran.add(self.step.id)
        self._known.update(results)

    # Looking --------------------------------------------------------------------------------------------------------

    def see(self, view: View, screen: Screen) -> None:
        """Take the newest view in: begin the step if that is still to be done, and look whether its task is done."""
        requests = {request.label: request for request in self.spec.requests}
        self._facts = LessonFacts(view, requests, self._known, screen.panel, screen.colour, screen.selected)
        if self.finished or self.wants_engine is not None or self.wants_experiment is not None:
            return
        if (view.snapshot is None and view.remote is None) or self._awaits_table(view) or self._awaits_moment(view):
            return
        if not self.ready:
            self._begin()
        if self.step.check is not None and (not self.done or self.step.must_hold):
            self.done = self._holds()
            if self.done:
                self._keep_ahead()

    def _awaits_table(self, view: View) -> bool:
        """Whether the step shows a sequence whose block table has not been read yet."""
        wanted = self.step.show.sequence
        if self.ready or not wanted:
            return False
        row = self.find(wanted)
        return row is not None and row.row is not None and view.focus_table is None

    def wound(self) -> None:
        """Note that the recording was wound to where this step wants it."""
        self._wound_at = self._facts.view.generation

    def _awaits_moment(self, view: View) -> bool:
        """Whether the step shows another moment of a recording, which has not been read yet."""
        if self.ready or self.step.show.at is None:
            return False
        return self._wound_at is None or view.generation <= self._wound_at

    def _begin(self) -> None:
        step = self.step
        self._keep(step, self._kept_ahead)
        self._kept_ahead = frozenset()
        if step.about is not None and step.about not in self.verdicts:
            self._judge(self.lesson.step(step.about))
        self.ready = True
        self.done = step.kind in ("text", "see", "explain")
        self._page()

    def _keep(self, step: Step, already: frozenset[str] = frozenset()) -> frozenset[str]:
        """Work out what a step keeps, as far as it is known; return the names."""
        kept = set(already)
        for name, expression in step.keep.items():
            if name not in already:
                with contextlib.suppress(UnknownFact):
                    self._known[name] = expression.value(self._facts)
                    kept.add(name)
        return frozenset(kept)

    def _keep_ahead(self) -> None:
        """Keep what the explanation of a task that is done will tell: the engine may go on before the learner does."""
        following = self.lesson.steps[self.at + 1] if self.at + 1 < len(self.lesson.steps) else None
        if following is not None and following.kind == "explain":
            self._kept_ahead = self._keep(following)

    def _holds(self) -> bool:
        assert self.step.check is not None
        return self._true(self.step.check)

    def _judge(self, prediction: Step) -> None:
        answer, texts = self.answers.get(prediction.id, ""), self.lesson.texts[prediction.id]
        if prediction.options:
            right = next((o for o, when in prediction.answer.items() if self._true(when)), "")
            verdict = Verdict(
                texts.options.get(answer, answer), texts.options.get(right, right), answer == right, right
            )
        else:
            verdict = self._judge_number(prediction, answer)
        self.verdicts[prediction.id] = verdict

    def _judge_number(self, prediction: Step, answer: str) -> Verdict:
        said = write(int(answer)) if answer else ""
        try:
            value = prediction.answer[""].value(self._facts)
        except UnknownFact:
            return Verdict(said, UNKNOWN, False, UNKNOWN)
        if isinstance(value, str):
            return Verdict(said, value, False, value)
        is_right = bool(answer) and abs(float(answer) - value) <= prediction.tolerance
        return Verdict(said, write(value), is_right, value)

    def _true(self, expression: Expression) -> bool:
        try:
            return bool(expression.value(self._facts))
        except UnknownFact:
            return False

    def find(self, label: str) -> SequenceRow | None:
        """Return the unfinished sequence of that label; ``None`` when there is none."""
        return None if self._facts.view.snapshot is None else self._facts.find(label)

    def ask(self, expression: Expression) -> Value:
        """Return an expression's value at this moment. Raises ``UnknownFact``."""
        return expression.value(self._facts)

    def evaluate(self, text: str) -> str:
        """Return a text with the values of this moment in its placeholders."""
        return fill_in(text, self._facts)

    # Texts ----------------------------------------------------------------------------------------------------------

    def page(self, at: int | None = None) -> str:
        """Return what a step said when the learner came to it; empty before that. By default the current one."""
        step = self.lesson.steps[self.at if at is None else at]
        kept = self._pages.get(step.id)
        return "" if kept is None else kept.text

    def options(self, at: int | None = None) -> tuple[str, ...]:
        """Return the choices of a step in words; empty where it has none."""
        step = self.lesson.steps[self.at if at is None else at]
        kept = self._pages.get(step.id)
        return () if kept is None else kept.options

    def _page(self) -> None:
        step, texts = self.step, self.text
        parts = [texts.text]
        if step.about is not None:
            verdict = self.verdicts[step.about]
            self._known |= {"answer": verdict.answer, "right": verdict.right}
            parts.insert(0, texts.right if verdict.is_right else texts.wrong)
        text = "\n\n".join(self.evaluate(part).strip() for part in parts if part.strip())
        self._pages[step.id] = _Page(text, tuple(self.evaluate(texts.options[o]) for o in step.options))

    @property
    def missing(self) -> str:
        """What the task at hand still lacks; empty for other steps, and once it is done."""
        return "" if self.done or not self.text.missing else self.evaluate(self.text.missing)

    # Answering ------------------------------------------------------------------------------------------------------

    def press(self, digit: str) -> bool:
        """Type a digit, or choose the option of that number; false where the step does not ask for one."""
        if self.step.kind != "predict" or not self.ready:
            return False
        self.note = ""
        if not self.step.options:
            self.typed = (self.typed + digit)[:_MAX_DIGITS]
        elif 1 <= int(digit) <= len(self.step.options):
            self.typed = digit
        return True

    def erase(self) -> None:
        """Take back the last digit."""
        self.typed = self.typed[:-1]

    def hint(self) -> str:
        """Return the next hint, or the last one again; empty where there is none."""
        hints = self.text.hints
        if not hints or self.done:
            return ""
        taken = min(self.hints.get(self.step.id, 0) + 1, len(hints))
        self.hints[self.step.id] = taken
        return self.evaluate(hints[taken - 1])

    def go_on(self) -> bool:
        """Leave this step if it is done; else say in ``note`` what is missing. True if it was left."""
        if not self.ready or self.finished:
            return False
        step = self.step
        if step.kind == "predict":
            if not self.typed:
                self.note = "choose one: type its number" if step.options else "type a whole number"
                return False
            self.answers[step.id] = step.options[int(self.typed) - 1] if step.options else self.typed
        elif not self.done:
            self.tries[step.id] = self.tries.get(step.id, 0) + 1
            self.note = self.missing
            return False
        self._leave()
        return True

    def _leave(self) -> None:
        self.typed = self.note = ""
        self.ready = self.done = False
        self._wound_at = None
        if self.at + 1 == len(self.lesson.steps):
            self.finished = True
        else:
            self.at += 1

    def solution(self) -> tuple[str, ...]:
        """Return the lines of the command line that do the task at hand."""
        return tuple(self.evaluate(line) for line in self.step.solve)

    @property
    def num_right(self) -> int:
        """Predictions that were right."""
        return sum(verdict.is_right for verdict in self.verdicts.values())

    @property
    def num_predictions(self) -> int:
        """Predictions of the lesson."""
        return sum(step.kind == "predict" for step in self.lesson.steps)
