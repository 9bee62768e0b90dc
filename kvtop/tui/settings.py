"""Settings: what ``kvtop.toml`` says of the console, read and checked before the screen is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtop.options_file import FileTable
from kvtop.tui.actions import ACTIONS, GROUP_TITLES, USUAL, ActionTable
from kvtop.tui.key_names import typed
from kvtop.tui.keymap import rebound


@dataclass(frozen=True, slots=True)
class Settings:
    """How one console differs from the usual one.

    Attributes:
        table: The actions with their keys.
    """

    table: ActionTable = USUAL


def read_settings(tables: Mapping[str, FileTable]) -> Settings:
    """Return what the tables of the file say.

    Raises:
        UserError: They name an action, a key or a panel that there is not; says in which line.
    """
    keys = tables.get("keys")
    return Settings(table=rebound(keys) if keys else USUAL)


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
    "[keys]",
    "# An action has one key, several in brackets, or none with []. A key is the sign that it writes, or space, enter,",
    "# tab, escape, up, pagedown, f5, …, or one of these after ctrl+, alt+ or shift+.",
)
