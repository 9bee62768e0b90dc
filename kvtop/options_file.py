"""The configuration file ``kvtop.toml``: options by their own names, and tables for the console."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtop.errors import UserError

_MAX_BYTES: Final = 1 << 20
#: Tables that the file may hold besides options: the console reads them.
TABLES: Final = ("keys", "panels")


class OptionsFile(dict[str, Any]):
    """Values as text, by the name of the parameter they are for; what click takes for a map of defaults.

    Attributes:
        path: Where they come from.
        lines: key, with its table's name and a dot in front of it → its line, from 1.
        tables: The tables of ``TABLES``; empty ones that are not there.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        lines: Mapping[str, int] | None = None,
        tables: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        super().__init__(values)
        self.path = path
        self.lines = lines or {}
        self.tables = {name: FileTable(name, (tables or {}).get(name, {}), self) for name in TABLES}

    def place(self, key: str) -> str:
        """Return where a key stands, for messages: ``FILE:LINE: KEY``."""
        line = self.lines.get(key)
        return f"{self.path}:{line}: {key}" if line else f"{self.path}: {key}"


class FileTable(dict[str, object]):
    """One table of the file, as it was read.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, values: Mapping[str, object], file: OptionsFile) -> None:
        super().__init__(values)
        self.name = name
        self._file = file

    def place(self, key: str) -> str:
        """Return where a key stands, for messages: ``FILE:LINE: TABLE.KEY``."""
        return self._file.place(f"{self.name}.{key}")


def default_path() -> Path:
    """Return where the file lies when nothing else is said; it need not exist."""
    import platformdirs

    return Path(platformdirs.user_config_dir("kvtop", appauthor=False)) / "kvtop.toml"


def read_options_file(path: str | None, known: Mapping[str, str], many: frozenset[str]) -> OptionsFile:
    """Return what the file says.

    Args:
        path: The file; ``None`` takes the default one, which may be missing.
        known: option, without dashes → name of its parameter.
        many: Options that may have several values.

    Raises:
        UserError: It cannot be read, is no TOML, or names an option or a table that there is not; says where.
    """
    place = default_path() if path is None else Path(path)
    try:
        with place.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        if path is None:
            return OptionsFile({}, place)
        raise UserError(f"--config {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--config {place}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_BYTES:
        raise UserError(f"--config {place}: larger than {_MAX_BYTES} bytes")
    try:
        text = data.decode()
        read = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: no TOML: {error}") from None
    tables = {name: read.pop(name) for name in TABLES if isinstance(read.get(name), dict)}
    found = OptionsFile({}, place, _lines_of(text), tables)
    for key, value in read.items():
        where = found.place(key)
        if key in TABLES:
            raise UserError(f"{where}: a table: [{key}]")
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *TABLES], 1)
            hint = f"did you mean {near[0]}?" if near else "kvtop --help lists them"
            raise UserError(f"{where}: no such {'table' if isinstance(value, dict) else 'option'}; {hint}")
        if isinstance(value, list) and key in many:
            found[known[key]] = tuple(_text(where, item) for item in value)
        else:
            one = _text(where, value)
            found[known[key]] = (one,) if key in many else one
    return found


def _text(where: str, value: object) -> str:
    """Return a value as one would type it on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise UserError(f"{where}: a text, a number, true or false")


def _lines_of(text: str) -> dict[str, int]:
    """Return key → line, which TOML's reader does not tell; a text of several lines may mislead it."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]", line):
            table = f"{_bare(found[1])}."
            lines.setdefault(table[:-1], number)
        elif found := re.match(r"""\s*("[^"]*"|'[^']*'|[\w.-]+)\s*=""", line):
            lines.setdefault(table + _bare(found[1]), number)
    return lines


def _bare(key: str) -> str:
    return key[1:-1] if key[:1] in ("'", '"') and key[:1] == key[-1:] else key
