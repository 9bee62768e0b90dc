"""Memory: what the console remembers from one run to the next, in one small file that is replaced whole."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_MAX_BYTES: Final = 1 << 16
_VERSION: Final = 1


def default_path() -> Path:
    """Return where the file lies; it need not exist."""
    import platformdirs

    return Path(platformdirs.user_state_dir("kvtop", appauthor=False)) / "console.json"


class Memory:
    """Reads and writes what is remembered. Never raises: what goes wrong is told in one line.

    Several consoles may share the file: it is written beside its place and then put there, so that whoever reads finds
    one whole writing; of what two remember under the same name, the later stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> tuple[dict[str, Any], str]:
        """Return what is remembered, and why it is nothing; a file that is none of ours is put aside."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, f"nothing remembered: {self.path}: {error.strerror}"
        values = _parsed(data)
        if values is not None:
            return values, ""
        aside = self.path.with_suffix(".json.bad")
        try:
            os.replace(self.path, aside)
        except OSError:
            return {}, f"nothing remembered: {self.path} cannot be understood"
        return {}, f"nothing remembered: {self.path.name} could not be understood, and is now {aside.name} beside it"

    def save(self, values: Mapping[str, object]) -> str:
        """Remember values under their names, beside those under others; return why not, or nothing."""
        made = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._others() | {"schema_version": _VERSION, **values}
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, prefix=".console-", delete=False
            ) as file:
                made = file.name
                json.dump(kept, file, indent=1)
                file.write("\n")
            os.replace(made, self.path)
        except OSError as error:
            if made is not None:
                with contextlib.suppress(OSError):
                    os.unlink(made)
            return f"not remembered: {self.path}: {error.strerror}"
        return ""

    def _others(self) -> dict[str, Any]:
        try:
            return _parsed(self.path.read_bytes()[: _MAX_BYTES + 1]) or {}
        except FileNotFoundError:
            return {}


def _parsed(data: bytes) -> dict[str, Any] | None:
    """Return what a file says; ``None`` when it is no file of this version."""
    if len(data) > _MAX_BYTES:
        return None
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.get("schema_version") == _VERSION else None
