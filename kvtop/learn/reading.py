"""Reading lessons: a TOML file and its texts → ``Lesson``. A complaint is one line: file, line, what, what is allowed.

A lesson's structure and its texts may lie in two files, so that a translation touches the texts alone: for
``lessons/03-size.toml`` they are in ``lessons/en/03-size.toml``. A file with a ``[texts]`` table holds both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtop.errors import UserError
from kvtop.learn.engine_tables import read_engines
from kvtop.learn.experiments import EXPERIMENTS
from kvtop.learn.expression import Expression
from kvtop.learn.facts import NAMES
from kvtop.learn.lesson import KINDS, EngineSpec, Lesson, Show, Step, StepText
from kvtop.learn.tables import LessonFile, Table, check_text

MAX_STEPS: Final = 100
#: Panels and colourings that a step may ask for; the screen's own, which is not imported for their names.
PANELS: Final = (
    "map", "sequences", "events", "prefix", "fragmentation", "tiers", "locks", "history", "details",
)  # fmt: skip
COLOURS: Final = ("references", "state", "owner", "age", "fill", "contiguity")
_ID: Final = re.compile(r"[a-z][a-z0-9-]*")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")

_STEP_KEYS: Final = ("id", "kind", "show", "engine", "run", "with", "keep")
_KIND_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (),
    "predict": ("options", "answer", "tolerance", "unit"),
    "do": ("check", "hold", "solve"),
    "see": (),
    "explain": ("about",),
}
#: Texts of each kind: those it must have, and those it may have.
_TEXT_KEYS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "text": (("text",), ()),
    "predict": (("text",), ("hints",)),
    "do": (("text", "missing", "hints"), ()),
    "see": (("text",), ()),
    "explain": (("right", "wrong"), ("text",)),
}


def read_lesson(path: Path, *, language: str = "en") -> Lesson:
    """Return the lesson of a file, with its texts.

    Args:
        path: The lesson's file.
        language: Of its texts, where they lie in a file of their own.

    Raises:
        UserError: A file cannot be read, or is no lesson: one line with file, line, what, what is allowed.
    """
    top = Table(file := LessonFile(path), file.table)
    if "texts" in top.values:
        texts = top.table("texts")
        top.only(("lesson", "engine", "step", "texts"))
    else:
        own = path.parent / language / path.name
        if not own.exists():
            raise UserError(f"{path}: no [texts] in it, and no {own} beside it")
        text_file = LessonFile(own)
        texts = Table(text_file, text_file.table)
        top.only(("lesson", "engine", "step"))
    about = top.table("lesson")
    about.only(("minutes",))
    engines = read_engines(top)
    steps = _steps(top, engines)
    found = re.fullmatch(r"(\d+)-(.+)", path.stem)
    return Lesson(
        name=found[2] if found else path.stem,
        number=int(found[1]) if found else None,
        minutes=about.whole("minutes", 1, 60, 5),
        title=texts.text("title"),
        summary=texts.text("summary"),
        engines=engines,
        steps=steps,
        texts=_texts(texts, steps),
    )


# Steps --------------------------------------------------------------------------------------------------------------


def _steps(top: Table, engines: Mapping[str, EngineSpec]) -> tuple[Step, ...]:
    tables = top.tables("step")
    if not 1 <= len(tables) <= MAX_STEPS:
        top.refuse("step", f"{len(tables)} steps; from 1 to {MAX_STEPS} [[step]] tables")
    steps: list[Step] = []
    known: set[str] = set()
    for table in tables:
        step = _step(table, engines, steps, known)
        steps.append(step)
    judged = {step.about for step in steps}
    for step, table in zip(steps, tables, strict=True):
        if step.kind == "predict" and step.id not in judged:
            table.refuse("id", f'{step.id}: nothing explains this prediction; add a step with about = "{step.id}"')
    return tuple(steps)


def _step(table: Table, engines: Mapping[str, EngineSpec], before: list[Step], known: set[str]) -> Step:
    step_id = table.text("id")
    if not _ID.fullmatch(step_id):
        table.refuse("id", f"id: {step_id}: small letters, digits and -, a letter first")
    if any(step.id == step_id for step in before):
        table.refuse("id", f"id: {step_id}: given twice")
    kind = table.one_of("kind", KINDS)
    table.only((*_STEP_KEYS, *_KIND_KEYS[kind]))
    engine = table.one_of("engine", tuple(engines)) if "engine" in table.values else None
    run = table.one_of("run", tuple(EXPERIMENTS)) if "run" in table.values else None
    parameters = _parameters(table, run)
    if run is not None:
        known.update(EXPERIMENTS[run].results)
    keep = {}
    kept = table.table("keep")
    for name in kept.values:
        if not _NAME.fullmatch(name) or name in NAMES:
            kept.refuse(name, f"keep.{name}: a name of its own, of small letters, digits and _")
        keep[name] = kept.expression(name, known)
        known.add(name)
    return Step(
        id=step_id,
        kind=kind,
        show=_show(table.table("show"), known),
        engine=engine,
        run=run,
        parameters=parameters,
        keep=keep,
        **_of_kind(table, kind, before, known),
    )


def _of_kind(table: Table, kind: str, before: list[Step], known: set[str]) -> dict[str, Any]:
    match kind:
        case "predict":
            return _prediction(table, known)
        case "do":
            solve = table.texts("solve")
            for line in solve:
                check_text(line, known, lambda what: table.refuse("solve", f"solve: {what}"))
            return {"check": table.expression("check", known), "must_hold": table.flag("hold"), "solve": solve}
        case "explain":
            predictions = tuple(step.id for step in before if step.kind == "predict")
            return {"about": table.one_of("about", predictions or ("(no prediction before it)",))}
        case _:
            return {}


def _prediction(table: Table, known: set[str]) -> dict[str, Any]:
    if "options" not in table.values:
        tolerance = table.values.get("tolerance", 0)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or tolerance < 0:
            table.refuse("tolerance", "tolerance: a number from 0")
        # What is asked may be kept by a later step, so names are checked where it is judged.
        return {
            "answer": {"": table.expression("answer", known | _kept_anywhere(table))},
            "tolerance": float(tolerance),
            "unit": table.text("unit", "blocks"),
        }
    options = table.texts("options")
    if not 2 <= len(options) <= 5 or len(set(options)) != len(options):
        table.refuse("options", "options: from 2 to 5 different ids")
    answer = table.values.get("answer")
    if isinstance(answer, str):
        if answer not in options:
            table.refuse("answer", f"answer: {answer}: one of {', '.join(options)}")
        return {"options": options, "answer": {answer: Expression("True")}}
    answers = table.table("answer")
    answers.only(options)
    if not answers.values:
        table.refuse("answer", f"answer: one of {', '.join(options)}, or a table of expressions")
    return {
        "options": options,
        "answer": {o: answers.expression(o, known | _kept_anywhere(table)) for o in options if o in answers.values},
    }


def _kept_anywhere(table: Table) -> set[str]:
    """Return the names that any step keeps or an experiment tells: a prediction is judged after it was made."""
    names: set[str] = set()
    for step in table.file.table.get("step", []):
        if isinstance(step, dict):
            names.update(keep if isinstance(keep := step.get("keep"), dict) else ())
            if (run := step.get("run")) in EXPERIMENTS:
                names.update(EXPERIMENTS[run].results)
    return names


def _parameters(table: Table, run: str | None) -> dict[str, Any]:
    given = table.table("with")
    if run is None:
        if given.values:
            table.refuse("with", "with: only together with run")
        return {}
    given.only(tuple(EXPERIMENTS[run].parameters))
    return {
        name: given.whole(name, low, high, default)
        for name, (low, high, default) in EXPERIMENTS[run].parameters.items()
    }


def _show(table: Table, known: set[str]) -> Show:
    table.only(("panel", "colour", "sequence", "block", "at"))
    values = table.values
    sequence = values.get("sequence")
    if sequence is not None and not isinstance(sequence, str):
        table.refuse("sequence", "sequence: a label, or an empty text for none")
    return Show(
        panel=table.one_of("panel", PANELS) if "panel" in values else None,
        colour=table.one_of("colour", COLOURS) if "colour" in values else None,
        sequence=sequence,
        block=table.expression("block", known) if "block" in values else None,
        at=table.expression("at", known) if "at" in values else None,
    )


# Texts --------------------------------------------------------------------------------------------------------------


def _texts(table: Table, steps: tuple[Step, ...]) -> dict[str, StepText]:
    ids = tuple(step.id for step in steps)
    table.only(("title", "summary", *ids))
    known: set[str] = set()
    texts = {}
    for step in steps:
        if step.id not in table.values:
            table.refuse("title", f"{step.id}: this step has no texts")
        known.update(step.keep)
        if step.run is not None:
            known.update(EXPERIMENTS[step.run].results)
        judging = {"answer", "answer_text", "right", "right_text"} if step.kind == "explain" else set()
        texts[step.id] = _step_text(table.table(step.id), step, known | judging)
    return texts


def _step_text(table: Table, step: Step, known: set[str]) -> StepText:
    needed, also = _TEXT_KEYS[step.kind]
    options = table.table("options") if step.options else None
    table.only((*needed, *also, *(("options",) if step.options else ())))
    if options is not None:
        options.only(step.options)
        for option in step.options:
            options.text(option)
    wanted = (*needed, *(key for key in also if key in table.values))
    hints = table.texts("hints") if "hints" in wanted else ()
    plain = {key: table.text(key) for key in wanted if key != "hints"}
    text = StepText(
        options=dict(options.values) if options is not None else {},
        hints=hints,
        **plain,
    )
    for key, part in (*plain.items(), *(("hints", hint) for hint in text.hints)):
        check_text(part, known, lambda what, key=key: table.refuse(key, f"{key}: {what}"))  # type: ignore[misc]
    if options is not None:
        for option, part in text.options.items():
            check_text(part, known, lambda what, option=option: options.refuse(option, f"{option}: {what}"))  # type: ignore[misc]
    return text
