"""ConsoleOrder: what the console of one browser tab is told when it is started. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvtop.console import ConsoleOptions
from kvtop.options_file import OptionsFile
from kvtop.targets import AttachOptions


class ConsoleOrder(msgspec.Struct, frozen=True):
    """One tab's console.

    Attributes:
        targets: What it looks at; see ``kvtop.targets``.
        options: How to attach; without ``allow_operations`` the door for commands is one that refuses them all.
        theme, ascii_only, refresh_hz, tables: See ``ConsoleOptions``.
    """

    targets: tuple[str, ...]
    options: AttachOptions
    theme: str | None = None
    ascii_only: bool = False
    refresh_hz: float = 10.0
    tables: Mapping[str, Mapping[str, object]] = {}

    def look(self) -> ConsoleOptions:
        """Return how the console looks. It remembers nothing: what a visitor arranges is not the user's."""
        tables = OptionsFile({}, Path(), tables=self.tables).tables
        return ConsoleOptions(self.theme, self.ascii_only, self.refresh_hz, remember=False, tables=tables)
