"""The configuration file ``kvtop.toml``: values for options, one a line, under the options' own names."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtop.errors import UserError

_MAX_BYTES: Final = 1 << 20


class OptionsFile(dict[str, Any]):
    """Values as text, by the name of the parameter they are for; what click takes for a map of defaults.

    Attributes:
        path: Where they come from.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path


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
        UserError: It cannot be read, is no TOML, or names an option that there is not; says where.
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
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: no TOML: {error}") from None
    values: dict[str, str | tuple[str, ...]] = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else "kvtop run --help lists them"
            raise UserError(f"{place}: {key}: no such option; {hint}")
        if isinstance(value, list) and key in many:
            values[known[key]] = tuple(_text(place, key, item) for item in value)
        else:
            text = _text(place, key, value)
            values[known[key]] = (text,) if key in many else text
    return OptionsFile(values, place)


def _text(place: Path, key: str, value: object) -> str:
    """Return a value as one would type it on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise UserError(f"{place}: {key}: a text, a number, true or false")
