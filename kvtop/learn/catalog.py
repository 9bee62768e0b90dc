"""The course: lessons by number and name, and the words they introduce."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtop.errors import UserError
from kvtop.learn.lesson import Lesson
from kvtop.learn.reading import read_lesson

FOLDER: Final = Path(__file__).parent / "lessons"
_FILE: Final = re.compile(r"(\d\d)-([a-z-]+)\.toml")
_GLOSSARY: Final = "glossary.toml"


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the course.

    Attributes:
        word: As texts have it, in the singular.
        meaning: What it means, in a line or two.
        others: Other forms of it.
    """

    word: str
    meaning: str
    others: tuple[str, ...] = ()

    def found_in(self, text: str) -> bool:
        """Return whether a text uses the word."""
        forms = "|".join(re.escape(form) for form in (self.word, *self.others))
        return re.search(rf"(?<![\w-])(?:{forms})(?:s|es)?(?![\w-])", text, re.IGNORECASE) is not None


def lesson_files() -> dict[str, Path]:
    """Return the course's files by lesson name, in order."""
    found = sorted(path for path in FOLDER.glob("*.toml") if _FILE.fullmatch(path.name))
    return {path.stem.partition("-")[2]: path for path in found}


def languages() -> tuple[str, ...]:
    """Return the languages in which there are texts."""
    return tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and (path / _GLOSSARY).exists()))


def read_course(language: str = "en") -> tuple[Lesson, ...]:
    """Return all lessons of the course, in order.

    Raises:
        UserError: A file of it is wrong.
    """
    return tuple(read_lesson(path, language=language) for path in lesson_files().values())


def find_lesson(wanted: str, language: str = "en") -> Lesson:
    """Return the lesson of that number or name.

    Raises:
        UserError: There is none.
    """
    files = lesson_files()
    names = list(files)
    if wanted.isascii() and wanted.isdecimal() and 1 <= int(wanted) <= len(names):
        wanted = names[int(wanted) - 1]
    if wanted not in files:
        raise UserError(f"LESSON {wanted}: a number from 1 to {len(names)}, or one of {', '.join(names)}")
    return read_lesson(files[wanted], language=language)


def read_words(language: str = "en") -> tuple[Word, ...]:
    """Return the words of the course in the order in which they are introduced."""
    table = tomllib.loads((FOLDER / language / _GLOSSARY).read_text(encoding="utf-8"))
    return tuple(Word(each["word"], each["meaning"], tuple(each.get("others", ()))) for each in table["word"])
