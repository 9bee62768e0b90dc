"""Lesson: what a lesson file says, checked and frozen. Reading it is ``kvtop.learn.reading``'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvtop.engine_setup import EngineOptions
from kvtop.learn.expression import Expression, Value

Kind = Literal["text", "predict", "do", "see", "explain"]
KINDS: Final[tuple[Kind, ...]] = ("text", "predict", "do", "see", "explain")


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request of a lesson's engine.

    Attributes:
        label: Its name, by which checks find its sequence.
        prompt, output: Lengths. [tokens]
        at: Step of its arrival.
        like: Name of a stream whose tokens its prompt begins with; empty for none.
        common: How many of them. [tokens]
        change: Position of one of them that is another token after all; ``None`` for none.
        ends: Tokens after which its client has had enough; ``None`` is all of them.
        contiguous, priority: As in ``Request``.
    """

    label: str
    prompt: int
    output: int = 0
    at: int = 0
    like: str = ""
    common: int = 0
    change: int | None = None
    ends: int | None = None
    contiguous: bool = False
    priority: int = 0

    @property
    def end(self) -> int:
        """Tokens at which it ends."""
        return self.prompt + self.output if self.ends is None else self.ends


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One of a lesson's engines.

    Attributes:
        options: Its settings.
        requests: What it serves; empty takes the workload of the options, if ``has_workload``.
        has_workload: Whether the file names a workload.
        warm_steps: Steps taken before it is shown.
        max_steps: Step at which it stands still, so that nobody can run past what is to be seen; ``None`` is no limit.
        shared_prompt: Leading prompt tokens that all requests submitted by hand have in common.
        kind: ``engine``; ``recording``, a run that is recorded first and then shown; or ``server``, one that is seen
            over the network only.
        record_steps, record_every: Of a recording: its steps, and those between two of its moments.
        load_blocks: Pool that its workload is made for; ``None`` is its own.
    """

    options: EngineOptions
    requests: tuple[RequestSpec, ...] = ()
    has_workload: bool = False
    warm_steps: int = 0
    max_steps: int | None = None
    shared_prompt: int = 0
    kind: Literal["engine", "recording", "server"] = "engine"
    record_steps: int = 1000
    record_every: int = 10
    load_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Show:
    """What a step puts on the screen when it begins; ``None`` leaves it.

    Attributes:
        panel: Panel beside the text.
        colour: Colouring of the map.
        sequence: Label of a sequence to select; empty selects none.
        block: Block for the cursor.
        at: Step that a recording is wound to.
    """

    panel: str | None = None
    colour: str | None = None
    sequence: str | None = None
    block: Expression | None = None
    at: Expression | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a lesson.

    Attributes:
        id: Its name in the file, and in the texts.
        kind: What the learner does: read, predict, do something, look, have a prediction explained.
        show: What is shown with it.
        engine: Name of the engine from here on; ``None`` keeps the one there is.
        run: Name of an experiment that is run first; its results are facts from then on.
        parameters: The experiment's parameters.
        keep: Name → expression, worked out when the step begins and known from then on.
        options: Of a prediction with choices, their ids.
        answer: Of a prediction: option → when it is right, or under ``""`` the right number.
        tolerance: How far a number may be off.
        unit: What a number counts.
        check: Of a task: when it is done.
        must_hold: Whether it must still be true when the learner goes on.
        solve: Of a task: lines of the command line that do it.
        about: Of an explanation: the prediction that it judges.
    """

    id: str
    kind: Kind
    show: Show = Show()
    engine: str | None = None
    run: str | None = None
    parameters: Mapping[str, Value] = field(default_factory=dict)
    keep: Mapping[str, Expression] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    answer: Mapping[str, Expression] = field(default_factory=dict)
    tolerance: float = 0.0
    unit: str = ""
    check: Expression | None = None
    must_hold: bool = False
    solve: tuple[str, ...] = ()
    about: str | None = None


@dataclass(frozen=True, slots=True)
class StepText:
    """What one step says in one language; only the parts its kind has.

    Attributes:
        text: What is read first; for an explanation, after the verdict.
        options: Option → its words.
        missing: Of a task: what is still missing.
        hints: Of a task or prediction, the vaguest first.
        right, wrong: Of an explanation: to who was right, and to who was not.
    """

    text: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    hints: tuple[str, ...] = ()
    right: str = ""
    wrong: str = ""

    def parts(self) -> tuple[str, ...]:
        """Return every text of the step, in the order in which it may be read."""
        return (self.text, *self.options.values(), *self.hints, self.missing, self.right, self.wrong)


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson with its texts in one language.

    Attributes:
        name: Its name: that of its file, without a leading number.
        number: Its place in the course; ``None`` outside of it.
        minutes: What it takes, roughly.
        title, summary: What the catalogue says of it.
        engines: By name; the first one is there at the start.
        steps: In order.
        texts: Step id → its texts.
    """

    name: str
    number: int | None
    minutes: int
    title: str
    summary: str
    engines: Mapping[str, EngineSpec]
    steps: tuple[Step, ...]
    texts: Mapping[str, StepText]

    @property
    def first_engine(self) -> str:
        """Name of the engine at the start."""
        return next(iter(self.engines))

    def step(self, step_id: str) -> Step:
        """Return the step of that name."""
        return next(step for step in self.steps if step.id == step_id)
