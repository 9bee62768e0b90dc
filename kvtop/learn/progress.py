"""Progress: which lessons were played, and how well. Owns its file, which is replaced whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvtop.errors import UserError


class Left(msgspec.Struct, frozen=True):
    """Where a play was left before its end.

    Attributes:
        step: The step that the learner had come to.
        answers: Prediction → what was answered.
        hints: Step → hints taken.
        tries: Task → times the learner wanted to go on before it was done.
    """

    step: str
    answers: dict[str, str] = {}
    hints: dict[str, int] = {}
    tries: dict[str, int] = {}


class Played(msgspec.Struct, frozen=True):
    """What is kept of one lesson.

    Attributes:
        done: Whether it was played to the end.
        right, predictions: Predictions that were right in the best play to the end, and how many there are.
        furthest: Steps seen in the play that came furthest.
        steps: Steps it has.
        left: Where the latest play was left; ``None`` after one to its end, and for one left on its first page.
    """

    done: bool = False
    right: int = 0
    predictions: int = 0
    furthest: int = 0
    steps: int = 0
    left: Left | None = None


class _File(msgspec.Struct, frozen=True):
    version: int
    lessons: dict[str, Played]


def progress_path() -> Path:
    """Return the file of this user's progress, which need not exist yet."""
    import platformdirs

    return Path(platformdirs.user_state_dir("kvtop", appauthor=False)) / "lessons.json"


class Progress:
    """What was played so far.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Mapping[str, Played]:
        """Return what is kept by lesson; nothing where there is no file yet.

        Raises:
            UserError: The file cannot be read, or is damaged; one line that says what to do.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        try:
            kept = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            raise UserError(f"{self.path}: damaged; remove it to begin anew") from None
        if kept.version != 1:
            raise UserError(f"{self.path}: of version {kept.version}; this kvtop knows version 1")
        return kept.lessons

    def add(self, lesson: str, played: Played) -> None:
        """Keep one play; the best of those before it stays, and it alone tells where the lesson was left.

        Raises:
            UserError: The file cannot be read or written; it stays as it is.
        """
        lessons = dict(self.read())
        before = lessons.get(lesson, Played())
        is_better = played.done and (not before.done or played.right >= before.right)
        lessons[lesson] = Played(
            done=before.done or played.done,
            right=played.right if is_better else before.right,
            predictions=played.predictions,
            furthest=max(before.furthest, played.furthest),
            steps=played.steps,
            left=played.left,
        )
        data = msgspec.json.format(msgspec.json.encode(_File(1, lessons)), indent=2)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".lessons-", dir=self.path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
