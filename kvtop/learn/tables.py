"""Tables of lesson files: taking values out of them, and one line for what is wrong: file, line, what is allowed."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from kvtop.errors import UserError
from kvtop.learn.expression import BadExpression, Expression, placeholders
from kvtop.learn.facts import ARGUMENTS, NAMES
from kvtop.learn.places import Places

MAX_BYTES: Final = 1 << 20


class LessonFile:
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


class Table:
    """One table of a file, whose keys are taken out one by one; what is left over is a complaint."""

    def __init__(self, file: LessonFile, values: Any, *where: str | int) -> None:
        if not isinstance(values, dict):
            file.refuse(where, f"{path_name(where)}: a table")
        self.file, self.values, self.where = file, values, where

    def refuse(self, key: str, what: str) -> NoReturn:
        """Raise the complaint about one key's value."""
        self.file.refuse((*self.where, key), what)

    def only(self, allowed: tuple[str, ...]) -> None:
        """Refuse keys that are not among ``allowed``."""
        for key in self.values:
            if key not in allowed:
                self.refuse(key, f"{key}: unknown here; one of {', '.join(allowed)}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text that is not empty."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, f"{key}: {'missing; ' if value is None else ''}a text")
        return value

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number within bounds, both included."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            shown = "missing; " if value is None else f"{value!r}: "
            self.refuse(key, f"{key}: {shown}a whole number from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        """Return true or false; false where there is none."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, f"{key}: true or false")
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> Any:
        """Return one of the words that are allowed."""
        value = self.values.get(key, default)
        if value not in allowed:
            shown = "missing" if value is None else f"{value}"
            self.refuse(key, f"{key}: {shown}; one of {', '.join(allowed)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of at least one text."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value) or not value:
            self.refuse(key, f"{key}: a list of at least one text")
        return tuple(value)

    def tables(self, key: str) -> list[Table]:
        """Return the tables of an array; none where there is none."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.refuse(key, f"{key}: written as [[{key}]]")
        return [Table(self.file, v, *self.where, key, i) for i, v in enumerate(value)]

    def table(self, key: str) -> Table:
        """Return a table; an empty one where there is none."""
        return Table(self.file, self.values.get(key, {}), *self.where, key)

    def expression(self, key: str, known: set[str]) -> Expression:
        """Return an expression whose names are facts or among ``known``."""
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


def path_name(where: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in where) or "the file"
