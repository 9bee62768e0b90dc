"""``kvtop learn``: lessons on the screen, their list, their check, and the report of a session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvtop.console import require_terminal
from kvtop.errors import EXIT_FAILED, EXIT_OK, UserError
from kvtop.headless import say, write_out
from kvtop.learn.catalog import find_lesson, languages, read_course
from kvtop.learn.lesson import Lesson
from kvtop.learn.playing import play, right_answers
from kvtop.learn.progress import Played, Progress, progress_path
from kvtop.learn.reading import read_lesson
from kvtop.learn.report import check_target, report_text
from kvtop.learn.school import School

_INSTEAD = "open the lessons in a terminal, or use --list or --check"


def run_learn(
    wanted: str | None,
    *,
    file: str | None,
    language: str,
    pace: float | None,
    report: str | None,
    theme: str,
    ascii_only: bool,
) -> int:
    """Give lessons on the screen, and return the exit code once it is closed.

    Args:
        wanted: Number or name of the lesson to begin with; ``None`` shows the course.
        file: A lesson file of one's own instead of the course.
        language: Of the texts.
        pace: How fast a lesson plays by itself; ``None`` when it does not.
        report: Where the report goes: a new file, or ``-`` for standard output.
        theme: Colours.
        ascii_only: Write ASCII characters only.

    Raises:
        UserError: There is no terminal, or no such lesson, language or file, or a file that is wrong.
    """
    lesson = chosen_lesson(wanted, file=file, language=language)
    if pace is not None and lesson is None:
        lesson = find_lesson("1", language)
    if report is not None:
        check_target(report)
    require_terminal(sys.stdin, sys.stdout if report != "-" else sys.stdin, sys.stderr, os.environ, _INSTEAD)
    from kvtop.tui.lesson_app import LessonApp

    school = School(language=language, own=lesson if file is not None else None, pace=pace)
    app = LessonApp(school, lesson, theme=theme, ascii_only=ascii_only)
    app.run()
    if report is not None:
        _write_report(report, report_text(school.reports))
    return app.return_code or 0


def chosen_lesson(wanted: str | None, *, file: str | None, language: str) -> Lesson | None:
    """Return the lesson that was asked for; ``None`` for the course.

    Raises:
        UserError: There is none such, or its file is wrong.
    """
    if language not in languages():
        raise UserError(f"--language {language}: one of {', '.join(languages())}")
    if file is not None:
        if wanted is not None:
            raise UserError(f"LESSON {wanted} and --file {file}: one of the two, not both")
        return read_lesson(Path(file), language=language)
    return None if wanted is None else find_lesson(wanted, language)


def list_lessons(language: str) -> int:
    """Print one line a lesson: number, name, minutes, whether it was done, title."""
    try:
        kept, complaint = Progress(progress_path()).read(), ""
    except UserError as error:
        kept, complaint = {}, str(error)
    rows = []
    for lesson in read_course(language):
        played = kept.get(lesson.name, Played())
        state = f"{played.right}/{played.predictions} right" if played.done else ""
        rows.append(f"{lesson.number:>2}  {lesson.name:<14} {lesson.minutes:>2} min  {state:<9}  {lesson.title}")
    write_out("\n".join(rows))
    if complaint:
        say(complaint)
    return EXIT_OK


def check_lesson(wanted: str | None, *, file: str | None, language: str) -> int:
    """Play lessons without a screen, once to find out what is right and once as a learner who knows it; print how.

    Returns:
        The exit code: 1 where a task is done before anything was done for it, or a right answer is judged wrong.
    """
    lesson = chosen_lesson(wanted, file=file, language=language)
    faults = 0
    for each in read_course(language) if lesson is None else (lesson,):
        found = faults_of(each)
        faults += len(found)
        write_out("\n".join((f"{each.name}: {'fine' if not found else f'{len(found)} faults'}", *found)))
    return EXIT_FAILED if faults else EXIT_OK


def faults_of(lesson: Lesson) -> list[str]:
    """Return what is wrong with a lesson that can be read, one line each."""
    faults = []
    run, before = None, ""
    for playing in play(lesson, right_answers(lesson)):
        run = playing.run
        if run.step.kind == "do" and run.step.id != before and run.done:
            faults.append(f"  {run.step.id}: done before anything was done for it")
        elif run.step.kind == "do" and run.step.id == before and not run.done:
            faults.append(f"  {run.step.id}: its solve lines do not make its check true")
        before = run.step.id
    assert run is not None
    faults += [f"  {name}: its right answer is judged wrong" for name, v in run.verdicts.items() if not v.is_right]
    return faults


def _write_report(target: str, text: str) -> None:
    if target == "-":
        write_out(text)
        return
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UserError(f"--report {target}: {error.strerror}") from None
