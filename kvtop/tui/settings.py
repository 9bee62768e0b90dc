"""Settings: what ``kvtop.toml`` says of the console, read and checked before the screen is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtop.errors import UserError
from kvtop.options_file import FileTable
from kvtop.tui.actions import ACTIONS, GROUP_TITLES, USUAL, ActionTable
from kvtop.tui.arrangement import AT_FIRST, LINES, PANELS, PERCENT, Arrangement, known_fields, read_field
from kvtop.tui.key_names import typed
from kvtop.tui.keymap import rebound
from kvtop.tui.memory import Memory
from kvtop.tui.themes import THEMES


@dataclass(frozen=True, slots=True)
class Settings:
    """How one console differs from the usual one.

    Attributes:
        table: The actions with their keys.
        arrangement: The panels, as the file says, else as they were the last time.
        fixed: Names of what the file says of the panels, which is not remembered besides.
        theme: Colours of the last time; ``None`` before the first.
        memory: Where to remember; ``None`` remembers nothing.
        trouble: Why nothing is remembered of the last time; empty when nothing is wrong.
    """

    table: ActionTable = USUAL
    arrangement: Arrangement = AT_FIRST
    fixed: frozenset[str] = frozenset()
    theme: str | None = None
    memory: Memory | None = None
    trouble: str = ""


def read_settings(tables: Mapping[str, FileTable], memory: Memory | None = None) -> Settings:
    """Return what the tables of the file say, and beneath them what is remembered.

    Args:
        tables: The file's.
        memory: Where to read what is remembered; ``None`` begins as at first.

    Raises:
        UserError: They name an action, a key or a panel that there is not; says in which line.
    """
    keys = tables.get("keys")
    said = _panels(tables.get("panels") or {})
    remembered, trouble = memory.load() if memory is not None else ({}, "")
    panels, theme = remembered.get("panels"), remembered.get("theme")
    fields = known_fields(panels) if isinstance(panels, dict) else {}
    return Settings(
        table=rebound(keys) if keys else USUAL,
        arrangement=Arrangement(**{**fields, **said}),
        fixed=frozenset(name.replace("_", "-") for name in said),
        theme=theme if theme in THEMES else None,
        memory=memory,
        trouble=trouble,
    )


def _panels(table: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of an arrangement that the file's table has."""
    found = {}
    for name, value in table.items():
        where = table.place(name) if isinstance(table, FileTable) else name
        try:
            field, read = read_field(name, value)
        except KeyError as error:
            raise UserError(f"{where}: no such setting; {error.args[0]}") from None
        except ValueError as error:
            raise UserError(f"{where} {value}: {error}") from None
        found[field] = read
    return found


def example_text() -> str:
    """Return a ``kvtop.toml`` that changes nothing: every action with its keys, as remarks."""
    lines = [*_EXAMPLE]
    for group, title in GROUP_TITLES.items():
        lines += ["", f"# {title}"]
        for action in ACTIONS:
            if action.group == group:
                keys = ", ".join(f'"{typed(key)}"' for key in action.keys)
                keys = keys if len(action.keys) == 1 else f"[{keys}]"
                lines.append(f"# {f'{action.line} = {keys}':<40}{f'  # {action.help}' if action.help else ''}".rstrip())
    return "\n".join(lines) + "\n"


_EXAMPLE = (
    "# kvtop.toml: what kvtop does where neither the command line nor the environment says otherwise.",
    "# kvtop --help names all options; each can stand here under its own name, without the dashes.",
    "",
    "# blocks = 4096",
    '# theme = "dark"            # light, contrast or colour-blind',
    "# ascii = false",
    "# refresh = 0.1             # seconds between two readings",
    "# no-remember = false",
    "",
    "[panels]",
    f"# Panels: {', '.join(PANELS)}.",
    "# What stands here is always so; the rest is as it was left the last time.",
    '# beside = "sequences"       # the panel beside the map, or none',
    '# below = "events"           # the panel below it, or none',
    '# side = "right"             # or left',
    f"# side-width = 39            # % of the columns, {PERCENT[0]} to {PERCENT[1]}",
    f"# below-height = 6           # lines, {LINES[0]} to {LINES[1]}",
    '# order = ["map", "gpu"]     # the tabs that come first',
    '# hidden = ["locks"]         # panels without a tab',
    "",
    "[keys]",
    "# An action has one key, several in brackets, or none with []. A key is the sign that it writes, or space, enter,",
    "# tab, escape, up, pagedown, f5, …, or one of these after ctrl+, alt+ or shift+.",
)
