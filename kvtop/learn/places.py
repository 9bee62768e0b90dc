"""Places: on which line of a TOML text each table and key stands, which the standard reader does not tell."""

from __future__ import annotations

import re
from typing import Final

_TABLE: Final = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY: Final = re.compile(r"^\s*([A-Za-z0-9_-]+|\"[^\"]*\")\s*(?:\.\s*[A-Za-z0-9_-]+\s*)*=")

#: Where something stands: table names, numbers of array elements from 0, keys.
Path = tuple[str | int, ...]


class Places:
    """Lines of one text, from 1.

    Args:
        text: A text that is valid TOML.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {(): 1}
        counts: dict[Path, int] = {}
        table: Path = ()
        quote = ""
        array: Path = ()
        elements = 0
        for number, line in enumerate(text.splitlines(), start=1):
            if quote:
                quote = _open_quote(line, quote)
                continue
            if array and line.lstrip().startswith("{"):
                self._lines[(*array, elements)] = number
                elements += 1
            elif found := _TABLE.match(line):
                names = tuple(name.strip().strip('"') for name in found[2].split("."))
                table = self._enter(names, found[1] == "[[", counts)
                self._lines.setdefault(table, number)
                array = ()
            elif found := _KEY.match(line):
                array, elements = (*table, found[1].strip('"')), 0
                self._lines.setdefault(array, number)
            quote = _open_quote(line, "")

    def line(self, *path: str | int) -> int:
        """Return the line of what stands at ``path``, or of the nearest table around it."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    @staticmethod
    def _enter(names: tuple[str, ...], is_array: bool, counts: dict[Path, int]) -> Path:
        path: Path = ()
        for i, name in enumerate(names):
            path = (*path, name)
            is_last = i == len(names) - 1
            if is_last and is_array:
                counts[path] = counts.get(path, -1) + 1
            if path in counts:
                path = (*path, counts[path])
        return path


def _open_quote(line: str, quote: str) -> str:
    """Return the quote of the string of several lines that is open after ``line``; ``""`` when none is."""
    at = 0
    while True:
        if quote:
            at = line.find(quote, at)
            if at < 0:
                return quote
            at, quote = at + 3, ""
        found = min((i for i in (line.find('"""', at), line.find("'''", at)) if i >= 0), default=-1)
        if found < 0:
            return ""
        quote, at = line[found : found + 3], found + 3
