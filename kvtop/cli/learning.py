"""``kvtop learn``: lessons."""

from __future__ import annotations

import click

from kvtop.cli.options import THEME_NAMES
from kvtop.cli.values import WORD, one_of, real
from kvtop.errors import UserError


@click.command("learn")
@click.argument("lesson", required=False)
@click.option("--list", "is_list", is_flag=True, help="Print the lessons, and which were done.")
@click.option("--file", type=WORD, metavar="FILE", help="Give the lesson of this file instead (docs/lessons.md).")
@click.option("--language", type=WORD, metavar="L", default="en", help="Language of the texts (en).")
@click.option("--auto", "is_auto", is_flag=True, help="Let the lesson play by itself, for a projector.")
@click.option(
    "--pace",
    type=real(0.1, 100, "a number from 0.1 to 100"),
    metavar="X",
    help="With --auto: how fast, 1 for a usual reader (1).",
)
@click.option("--report", type=WORD, metavar="FILE|-", help="Write what came of it as JSON when it is left.")
@click.option("--check", "is_check", is_flag=True, help="Play without a screen, and say what is wrong with a lesson.")
@click.option("--theme", type=one_of(*THEME_NAMES), metavar="NAME", help=f"Colours: {', '.join(THEME_NAMES)} (dark).")
@click.option("--ascii", "ascii_only", is_flag=True, help="Write ASCII characters only.")
def learn_command(
    lesson: str | None,
    is_list: bool,
    file: str | None,
    language: str,
    is_auto: bool,
    pace: float | None,
    report: str | None,
    is_check: bool,
    theme: str | None,
    ascii_only: bool,
) -> int:
    """Learn paging at the keyboard: predict, do, see, explain.

    LESSON is a number or a name of --list; without it the course is shown, with what was done before. Each lesson takes
    3 to 8 minutes and runs on an engine of its own.

    With --check, exit code 1: a lesson is wrong.
    """
    for asked, option in ((is_list, "--list"), (is_check, "--check")):
        if asked and (is_auto or report is not None or (is_list and (lesson or file))):
            raise UserError(f"{option}: not together with --auto, --report{' or a lesson' if is_list else ''}")
    if pace is not None and not is_auto:
        raise UserError(f"--pace {pace:g}: only together with --auto")
    from kvtop import learn_command as command

    if is_list:
        return command.list_lessons(language)
    if is_check:
        return command.check_lesson(lesson, file=file, language=language)
    return command.run_learn(
        lesson,
        file=file,
        language=language,
        pace=(pace or 1.0) if is_auto else None,
        report=report,
        theme=theme or THEME_NAMES[0],
        ascii_only=ascii_only,
    )
