"""Reports: what a play of a lesson came to, as JSON for a class."""

from __future__ import annotations

import getpass
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvtop
from kvtop.errors import UserError
from kvtop.learn.player import LessonRun
from kvtop.learn.progress import Left, Played


def played(run: LessonRun) -> Played:
    """Return what is kept of a play."""
    is_left = not run.finished and run.at > 0
    return Played(
        done=run.finished,
        right=run.num_right,
        predictions=run.num_predictions,
        furthest=run.at + run.finished,
        steps=len(run.lesson.steps),
        left=Left(run.step.id, run.answers, run.hints, run.tries) if is_left else None,
    )


def report_of(run: LessonRun, *, started: str, seconds: float, is_auto: bool) -> dict[str, Any]:
    """Return a play as plain values.

    Args:
        run: The play.
        started: When it began, UTC.
        seconds: How long it took.
        is_auto: Whether it played by itself.
    """
    steps: list[dict[str, Any]] = []
    for number, step in enumerate(run.lesson.steps[: run.at + 1]):
        entry: dict[str, Any] = {"id": step.id, "kind": step.kind, "done": number < run.at or run.finished}
        if step.id in run.answers:
            verdict = run.verdicts.get(step.id)
            entry["answer"] = run.answers[step.id]
            entry["right"] = None if verdict is None else verdict.right_value
            entry["is_right"] = None if verdict is None else verdict.is_right
        if step.kind in ("predict", "do"):
            entry["hints"] = run.hints.get(step.id, 0)
        if step.kind == "do":
            entry["early_tries"] = run.tries.get(step.id, 0)
        steps.append(entry)
    return {
        "lesson": run.lesson.name,
        "number": run.lesson.number,
        "title": run.lesson.title,
        "started": started,
        "seconds": round(seconds, 1),
        "auto": is_auto,
        "done": run.finished,
        "right": run.num_right,
        "predictions": run.num_predictions,
        "steps": steps,
    }


def report_text(lessons: Sequence[dict[str, Any]]) -> str:
    """Return the report of all plays of one session, one JSON object."""
    document = {"kvtop": kvtop.__version__, "learner": _learner(), "lessons": list(lessons)}
    return json.dumps(document, allow_nan=False, ensure_ascii=False, indent=2)


def _learner() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def check_target(path: str) -> None:
    """Raise unless a report can be written there later.

    Raises:
        UserError: The file is there already, or its folder is not.
    """
    if path == "-":
        return
    target = Path(path)
    if target.exists():
        raise UserError(f"--report {path}: exists already; choose another name")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--report {path}: there is no folder {target.absolute().parent}")
