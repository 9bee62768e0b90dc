"""LessonApp: the console as ``kvtop learn`` opens it: with the course or in a lesson, without an engine of its own."""

from __future__ import annotations

from typing import Any, NoReturn

from kvtop.learn.lesson import Lesson
from kvtop.learn.school import School
from kvtop.tui.app import KvtopApp


class LessonApp(KvtopApp):
    """Gives lessons.

    Args:
        school: Where they come from.
        lesson: The one to begin with; ``None`` shows the course.
        options: Of the console.
    """

    def __init__(self, school: School, lesson: Lesson | None, **options: Any) -> None:
        super().__init__(_no_engine, school=school, **options)
        self._first = lesson

    def begin(self) -> None:
        """Begin with the lesson, or show the course."""
        self.main.say("choose a lesson" if self._first is None else "one moment…")
        if self._first is not None:
            self.begin_lesson(self._first)
        else:
            self.action_learn()


def _no_engine() -> NoReturn:
    raise AssertionError("lessons have engines of their own")
