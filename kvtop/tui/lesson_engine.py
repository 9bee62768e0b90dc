"""LessonEngine: opens a lesson's engines in place of the console's own, and goes back to it. Owns which one lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtop.attachment import Attachment
from kvtop.errors import UserError
from kvtop.tui.leaving import Leaving
from kvtop.tui.messages import ConnectFailed

if TYPE_CHECKING:
    from kvtop.learn.lesson import EngineSpec, Lesson
    from kvtop.learn.playing import Playing
    from kvtop.learn.progress import Left


class _OutOfDate(Exception):
    """The learner turned to something else before the engine was there."""


@dataclass(slots=True, eq=False)
class Opening:
    """An engine that a lesson waits for.

    Attributes:
        name: Its name in the lesson.
        engine: The engine, once it is there.
        rebuilt: The play that it belongs to, where a lesson goes on that was left.
        complaint: Why that play begins anew; empty when it does not.
    """

    name: str = ""
    engine: Attachment | None = None
    rebuilt: Playing | None = None
    complaint: str = ""


class LessonEngine(Leaving):
    """The engine of the lesson that is given. ``KvtopApp`` is the only subclass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._aside: Attachment | None = None  # the console's own engine while lessons are given
        self._aside_polling: threading.Event | None = None
        self._lesson_engine: Attachment | None = None
        self._opening: Opening | None = None
        self._one_at_a_time = threading.Lock()

    def _open(self, spec: EngineSpec, name: str) -> None:
        """Open an engine of a lesson; ``_opening`` has it once it is there."""

        def build(opening: Opening) -> Attachment:
            from kvtop.learn.workshop import open_engine

            return open_engine(spec, threaded=self._is_threaded)

        self._replace_engine(Opening(name), build)

    def _rebuild(self, lesson: Lesson, left: Left) -> None:
        """Bring a lesson and its engine to where it was left; where that fails, it begins anew."""

        def build(opening: Opening) -> Attachment:
            from kvtop.learn.playing import LessonStuck, Playing, resume
            from kvtop.learn.workshop import open_engine

            def open_with(spec: EngineSpec) -> Attachment:
                return open_engine(spec, threaded=self._is_threaded)

            try:
                playing = resume(lesson, left, open_with)
            except (LessonStuck, UserError) as error:
                playing, opening.complaint = Playing(lesson, open_with), str(error)
                playing.open_engine()
            opening.rebuilt = playing
            assert playing.attachment is not None
            return playing.attachment

        self._replace_engine(Opening(), build)

    @property
    def _is_threaded(self) -> bool:
        """Whether a lesson's engine runs in a thread of its own."""
        raise NotImplementedError

    def _replace_engine(self, opening: Opening, build: Callable[[Opening], Attachment]) -> None:
        """Have an engine built in place of the one there is. Who asks twice gets the second."""
        self._opening = opening
        self._stop_polling()

        def connect() -> Attachment:
            with self._one_at_a_time:
                self._close_engine()
                if self._opening is not opening:
                    raise _OutOfDate
                self._lesson_engine = opening.engine = build(opening)
                if self._opening is not opening:
                    self._close_engine()
                    raise _OutOfDate
                return opening.engine

        self._start(connect)

    def _go_back(self) -> None:
        """Close a lesson's engine and show the console's own one again."""
        aside, self._aside = self._aside, None
        self._opening = None
        assert aside is not None
        self._stop_polling()
        if self._aside_polling is not None:
            self._aside_polling.set()

        def back() -> Attachment:
            with self._one_at_a_time:
                self._close_engine()
            return aside

        self._start(back)

    def _stop_polling(self) -> None:
        """Let the lesson's engine be read no more; the console's own, which is aside, is read on."""
        if self._polling is not self._aside_polling:
            super()._stop_polling()

    def _close_engine(self) -> None:
        before, self._lesson_engine = self._lesson_engine, None
        if before is not None:
            before.close()

    def on_connect_failed(self, message: ConnectFailed) -> None:
        """Pass over an engine that nobody waits for any more."""
        if isinstance(message.error, _OutOfDate):
            message.prevent_default()
