"""AutoPlay: a lesson that plays itself on a projector: reads, answers, acts, and leaves time to look."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, Literal

from kvtop.learn.lesson import Lesson
from kvtop.learn.player import LessonRun
from kvtop.learn.playing import keys_of, right_answers

#: What a usual reader reads a second, and the pause after each page, at pace 1.
_WORDS_PER_S: Final = 3.0
_PAGE_S: Final = 2.0
#: Between two keys of an answer or two commands, and before a page with a result is left.
_ACT_S: Final = 1.5
_LOOK_S: Final = 4.0

Act = tuple[Literal["key", "line"], str]


class AutoPlay:
    """Says what is to be done next, and when.

    Args:
        lesson: What is played.
        pace: How fast; 2 is twice as fast as a usual reader.
    """

    def __init__(self, lesson: Lesson, pace: float) -> None:
        self._lesson, self._pace = lesson, pace
        self._answers: Mapping[str, str] | None = None
        self._page = -1
        self._left: deque[Act] = deque()
        self._due_s = 0.0
        self._has_looked = False

    def find_answers(self) -> None:
        """Find out what will have been right, by playing the lesson once without a screen; takes a second or two."""
        self._answers = right_answers(self._lesson)

    def due(self, run: LessonRun, now_s: float) -> Act | None:
        """Return what is to be done now, if anything.

        Args:
            run: The play.
            now_s: Monotonic time. [s]
        """
        if self._answers is None or (not run.ready and not run.finished):
            return None
        page = run.at + run.finished
        if page != self._page:
            self._page, self._has_looked = page, False
            self._left = self._plan(run)
            self._wait(now_s, _PAGE_S + len(run.page().split()) / _WORDS_PER_S)
        if now_s < self._due_s or run.finished:
            return None
        if self._left:
            self._wait(now_s, _ACT_S)
            return self._next(run)
        if run.step.kind == "do":
            if not run.done:
                return None
            if not self._has_looked:
                self._has_looked = True
                self._wait(now_s, _LOOK_S)
                return None
        self._wait(now_s, _ACT_S)
        return "key", "enter"

    def _next(self, run: LessonRun) -> Act:
        kind, value = self._left.popleft()
        return kind, run.evaluate(value) if kind == "line" else value

    def _plan(self, run: LessonRun) -> deque[Act]:
        assert self._answers is not None
        step = run.step
        if run.finished:
            return deque()
        if step.kind == "predict":
            return deque(("key", digit) for digit in keys_of(step, self._answers.get(step.id)))
        return deque(("line", line) for line in step.solve)

    def _wait(self, now_s: float, seconds: float) -> None:
        self._due_s = now_s + seconds / self._pace
