"""School: what a console needs to give lessons: the course in one language, the progress, and the reports of plays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec

from kvtop.errors import UserError
from kvtop.learn.catalog import Word, read_course, read_words
from kvtop.learn.lesson import Lesson
from kvtop.learn.player import LessonRun
from kvtop.learn.playing import fits
from kvtop.learn.progress import Left, Played, Progress, progress_path
from kvtop.learn.report import played, report_of


class School:
    """Gives lessons, and keeps what came of them.

    Args:
        language: Of the texts.
        own: A lesson from a file of the learner's; ``None`` for the course.
        progress: Where progress is kept.
        pace: How fast a lesson that plays by itself goes, 1 for a usual reader; ``None`` when it does not.
        threaded: Whether engines run in threads of their own.
        clock: Monotonic seconds.

    Attributes:
        reports: Reports of the plays that have ended or were left.
    """

    def __init__(
        self,
        *,
        language: str = "en",
        own: Lesson | None = None,
        progress: Progress | None = None,
        pace: float | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.language = language
        self.own = own
        self.pace = pace
        self.threaded = threaded
        self.reports: list[dict[str, Any]] = []
        self._progress = progress or Progress(progress_path())
        self._clock = clock
        self._started = ("", 0.0)

    @cached_property
    def course(self) -> tuple[Lesson, ...]:
        """The lessons in order. Raises ``UserError`` where a file of the course is wrong."""
        return read_course(self.language)

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """The words of the course."""
        return read_words(self.language)

    def progress(self, playing: LessonRun | None = None) -> tuple[Mapping[str, Played], str]:
        """Return what was played by lesson, and a line of complaint or an empty one.

        Args:
            playing: A play that goes on, and so tells itself where its lesson stands.
        """
        try:
            kept = dict(self._progress.read())
        except UserError as error:
            return {}, str(error)
        if playing is not None and not playing.finished:
            now, name = played(playing), playing.lesson.name
            kept[name] = msgspec.structs.replace(kept.get(name, Played()), left=now.left, steps=now.steps)
        return kept, ""

    def left(self, lesson: Lesson) -> Left | None:
        """Return where a lesson was left, if it can go on there; one that plays by itself never does."""
        if self.pace is not None or self.own is not None:
            return None
        left = self.progress()[0].get(lesson.name, Played()).left
        return left if left is not None and fits(lesson, left) else None

    def begin(self, lesson: Lesson, left: Left | None = None) -> LessonRun:
        """Return a new play of a lesson, or what is known at once of one that goes on where it was left."""
        self._started = (datetime.now(UTC).isoformat(timespec="seconds"), self._clock())
        run = LessonRun(lesson)
        if left is not None:
            run.remember(left)
        return run

    def end(self, run: LessonRun) -> str:
        """Keep a play that has ended or is left; return a line of complaint or an empty one."""
        started, since_s = self._started
        is_auto = self.pace is not None
        self.reports.append(report_of(run, started=started, seconds=self._clock() - since_s, is_auto=is_auto))
        if is_auto or self.own is not None:
            return ""
        try:
            self._progress.add(run.lesson.name, played(run))
        except UserError as error:
            return str(error)
        return ""

    def after(self, lesson: Lesson) -> Lesson | None:
        """Return the lesson that follows one of the course; ``None`` after the last, and outside of the course."""
        if self.own is not None:
            return None
        names = [each.name for each in self.course]
        at = names.index(lesson.name) + 1
        return self.course[at] if at < len(names) else None
