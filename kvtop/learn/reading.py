"""Reading lessons: a TOML file and its texts → ``Lesson``. A complaint is one line: file, line, what, what is allowed.

A lesson's structure and its texts may lie in two files, so that a translation touches the texts alone: for
``lessons/03-size.toml`` they are in ``lessons/en/03-size.toml``. A file with a ``[texts]`` table holds both.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from allocator.errors import ConfigError
from kvtop.engine_setup import EngineOptions, build_config
from kvtop.errors import UserError
from kvtop.learn.experiments import EXPERIMENTS
from kvtop.learn.expression import BadExpression, Expression, placeholders
from kvtop.learn.facts import ARGUMENTS, NAMES
from kvtop.learn.lesson import KINDS, EngineSpec, Lesson, RequestSpec, Show, Step, StepText
from kvtop.learn.places import Places

MAX_BYTES: Final = 1 << 20
MAX_STEPS: Final = 100
#: Panels and colourings that a step may ask for; the screen's own, which is not imported for their names.
PANELS: Final = (
    "map", "sequences", "events", "prefix", "fragmentation", "tiers", "locks", "history", "commands", "details",
)  # fmt: skip
COLOURS: Final = ("references", "state", "owner", "age", "fill", "contiguity")
_ID: Final = re.compile(r"[a-z][a-z0-9-]*")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_LABEL: Final = re.compile(r"[\w. -]{1,24}")

#: Keys of an engine's table → the option's name.
_OPTIONS: Final[Mapping[str, str]] = {
    "blocks": "num_blocks",
    "block-size": "block_size",
    "geometry": "geometry",
    "swap-blocks": "num_swap_blocks",
    "slab-blocks": "slab_blocks",
    "policy": "policy",
    "prefill-tokens": "prefill_tokens",
    "preempt": "preempt",
    "eviction": "eviction",
    "prefix-cache": "prefix_cache",
    "watermark": "watermark_ratio",
    "compact": "compact",
    "compact-threshold": "compact_threshold_ratio",
    "compact-budget": "compact_budget",
    "copy-bandwidth": "copy_gb_per_s",
    "max-running": "max_running",
    "stamp": "stamp",
    "seed": "seed",
    "speed": "speed",
    "workload": "workload",
    "rate": "rate_scale",
    "size": "size_scale",
    "requests": "num_requests",
}
#: What a lesson's engine is unless its file says otherwise: books only, which needs no torch and so starts at once.
_USUAL: Final = {
    "geometry": "none",
    "executor": "inline",
    "device": "cpu",
    "num_swap_blocks": 0,
    "watermark_ratio": 0.0,
}
_ENGINE_KEYS: Final = (
    *("kind", "warm-steps", "steps", "shared-prompt", "record-steps", "record-every", "request", "same-requests-as"),
    *_OPTIONS,
)
_REQUEST_KEYS: Final = (
    "label", "prompt", "output", "at", "like", "common", "change", "ends", "contiguous", "priority",
)  # fmt: skip
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


class _File:
    """One file that is being read, and how to complain about it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if len(data) > MAX_BYTES:
            raise UserError(f"{path}: at most {MAX_BYTES:,} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {data.count(10, 0, error.start) + 1}: not UTF-8") from None
        try:
            self.table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"\(at line (\d+), column \d+\)", str(error))
            line = found[1] if found else str(text.count("\n") + 1)
            raise UserError(f"{path}, line {line}: not TOML: {str(error).partition(' (at ')[0]}") from None
        except RecursionError:
            raise UserError(f"{path}: nested too deeply") from None
        self._places = Places(text)

    def refuse(self, where: tuple[str | int, ...], what: str) -> NoReturn:
        """Raise the complaint about what stands at ``where``."""
        raise UserError(f"{self.path}, line {self._places.line(*where)}: {what}")


class _Table:
    """One table of a file, whose keys are taken out one by one; what is left over is a complaint."""

    def __init__(self, file: _File, values: Any, *where: str | int) -> None:
        if not isinstance(values, dict):
            file.refuse(where, f"{_name(where)}: a table")
        self.file, self.values, self.where = file, values, where

    def refuse(self, key: str, what: str) -> NoReturn:
        self.file.refuse((*self.where, key), what)

    def only(self, allowed: tuple[str, ...]) -> None:
        """Refuse keys that are not among ``allowed``."""
        for key in self.values:
            if key not in allowed:
                self.refuse(key, f"{key}: unknown here; one of {', '.join(allowed)}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, f"{key}: {'missing; ' if value is None else ''}a text")
        return value

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            shown = "missing; " if value is None else f"{value!r}: "
            self.refuse(key, f"{key}: {shown}a whole number from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, f"{key}: true or false")
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> Any:
        value = self.values.get(key, default)
        if value not in allowed:
            shown = "missing" if value is None else f"{value}"
            self.refuse(key, f"{key}: {shown}; one of {', '.join(allowed)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value) or not value:
            self.refuse(key, f"{key}: a list of at least one text")
        return tuple(value)

    def tables(self, key: str) -> list[_Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.refuse(key, f"{key}: written as [[{key}]]")
        return [_Table(self.file, v, *self.where, key, i) for i, v in enumerate(value)]

    def table(self, key: str) -> _Table:
        return _Table(self.file, self.values.get(key, {}), *self.where, key)

    def expression(self, key: str, known: set[str]) -> Expression:
        value = self.values.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            self.refuse(key, f"{key}: an expression, as a text")
        try:
            expression = Expression(value)
            check_words(expression, known)
        except BadExpression as error:
            self.refuse(key, f"{key}: {error}")
        return expression


def check_words(expression: Expression, known: set[str]) -> None:
    """Raise ``BadExpression`` unless every name and function of an expression is one that lessons know."""
    for name in sorted(expression.names):
        if name not in NAMES and name not in known:
            near = difflib.get_close_matches(name, (*sorted(known), *NAMES), n=1)
            raise BadExpression(f"{name}: no such fact{f'; did you mean {near[0]}?' if near else ''}")
    for name, count in sorted(expression.calls):
        if name not in ARGUMENTS:
            raise BadExpression(f"{name}(…): no such function; one of {', '.join(sorted(ARGUMENTS))}")
        wanted = ARGUMENTS[name]
        if wanted is not None and count != wanted:
            raise BadExpression(f"{name}(…): {count} arguments; it takes {wanted}")


def read_lesson(path: Path, *, language: str = "en") -> Lesson:
    """Return the lesson of a file, with its texts.

    Args:
        path: The lesson's file.
        language: Of its texts, where they lie in a file of their own.

    Raises:
        UserError: A file cannot be read, or is no lesson: one line with file, line, what, what is allowed.
    """
    top = _Table(file := _File(path), file.table)
    if "texts" in top.values:
        texts = top.table("texts")
        top.only(("lesson", "engine", "step", "texts"))
    else:
        own = path.parent / language / path.name
        if not own.exists():
            raise UserError(f"{path}: no [texts] in it, and no {own} beside it")
        text_file = _File(own)
        texts = _Table(text_file, text_file.table)
        top.only(("lesson", "engine", "step"))
    about = top.table("lesson")
    about.only(("minutes",))
    engines = _engines(top)
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


# Engines ------------------------------------------------------------------------------------------------------------


def _engines(top: _Table) -> dict[str, EngineSpec]:
    tables = top.table("engine")
    if not tables.values:
        top.refuse("engine", "engine: missing; at least one [engine.NAME] table")
    engines: dict[str, EngineSpec] = {}
    for name in tables.values:
        if not _ID.fullmatch(name):
            tables.refuse(name, f"engine.{name}: a name of small letters, digits and -")
        engines[name] = _engine(tables.table(name), engines)
    return engines


def _engine(table: _Table, before: Mapping[str, EngineSpec]) -> EngineSpec:
    table.only(_ENGINE_KEYS)
    values = {field: table.values[key] for key, field in _OPTIONS.items() if key in table.values}
    try:
        options = msgspec.convert({**_USUAL, **values}, EngineOptions)
        build_config(options)
    except msgspec.ValidationError as error:
        problem, _, field = str(error).replace("`", "").partition(" - at $.")
        key = next((k for k, f in _OPTIONS.items() if f == field), field)
        table.refuse(key, f"{key}: {problem[:1].lower()}{problem[1:]}")
    except ConfigError as error:
        option = str(error).split(" ", 1)[0].lstrip("-").rstrip(":")
        table.refuse(option, str(error))
    kind = table.one_of("kind", ("engine", "recording", "server"), "engine")
    if (key := "same-requests-as") in table.values:
        if table.values.get("request"):
            table.refuse(key, f"{key} and request: one of the two, not both")
        requests = before[table.one_of(key, tuple(before) or ("(no engine before it)",))].requests
    else:
        requests = _requests(table)
    return EngineSpec(
        options=options,
        requests=requests,
        has_workload="workload" in table.values,
        warm_steps=table.whole("warm-steps", 0, 1_000_000, 0),
        max_steps=table.whole("steps", 1, 1_000_000) if "steps" in table.values else None,
        shared_prompt=table.whole("shared-prompt", 0, 65536, 0),
        kind=kind,
        record_steps=table.whole("record-steps", 1, 100_000, 1000),
        record_every=table.whole("record-every", 1, 10_000, 10),
    )


def _requests(table: _Table) -> tuple[RequestSpec, ...]:
    tables = table.tables("request")
    requests = tuple(_request(each) for each in tables)
    labels = [request.label for request in requests]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            tables[i].refuse("label", f"label: {label}: given twice")
    return requests


def _request(table: _Table) -> RequestSpec:
    table.only(_REQUEST_KEYS)
    label = table.text("label")
    if not _LABEL.fullmatch(label):
        table.refuse("label", f"label: {label}: up to 24 letters, digits, spaces, . and -")
    prompt = table.whole("prompt", 1, 65536)
    output = table.whole("output", 0, 65536, 0)
    ends = table.whole("ends", 1, prompt + output) if "ends" in table.values else None
    like = table.text("like", "none")
    common = table.whole("common", 0, prompt, prompt if "like" in table.values else 0)
    return RequestSpec(
        label=label,
        prompt=prompt,
        output=output,
        at=table.whole("at", 0, 1_000_000, 0),
        like=like if "like" in table.values else "",
        common=common,
        change=table.whole("change", 0, max(0, common - 1)) if "change" in table.values else None,
        ends=ends,
        contiguous=table.flag("contiguous"),
        priority=table.whole("priority", 0, 100, 0),
    )


# Steps --------------------------------------------------------------------------------------------------------------


def _steps(top: _Table, engines: Mapping[str, EngineSpec]) -> tuple[Step, ...]:
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


def _step(table: _Table, engines: Mapping[str, EngineSpec], before: list[Step], known: set[str]) -> Step:
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


def _of_kind(table: _Table, kind: str, before: list[Step], known: set[str]) -> dict[str, Any]:
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


def _prediction(table: _Table, known: set[str]) -> dict[str, Any]:
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


def _kept_anywhere(table: _Table) -> set[str]:
    """Return the names that any step keeps or an experiment tells: a prediction is judged after it was made."""
    names: set[str] = set()
    for step in table.file.table.get("step", []):
        if isinstance(step, dict):
            names.update(keep if isinstance(keep := step.get("keep"), dict) else ())
            if (run := step.get("run")) in EXPERIMENTS:
                names.update(EXPERIMENTS[run].results)
    return names


def _parameters(table: _Table, run: str | None) -> dict[str, Any]:
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


def _show(table: _Table, known: set[str]) -> Show:
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


def check_text(text: str, known: set[str], refuse: Callable[[str], NoReturn]) -> None:
    """Refuse a text with a placeholder that cannot be filled in."""
    try:
        for written, expression, _ in placeholders(text):
            try:
                check_words(expression, known)
            except BadExpression as error:
                raise BadExpression(f"{written}: {error}") from None
    except BadExpression as error:
        refuse(str(error))


def _texts(table: _Table, steps: tuple[Step, ...]) -> dict[str, StepText]:
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


def _step_text(table: _Table, step: Step, known: set[str]) -> StepText:
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


def _name(where: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in where) or "the file"
