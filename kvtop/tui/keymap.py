"""Keymap: the ``[keys]`` of ``kvtop.toml``. Gives actions other keys, and finds clashes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvtop.errors import UserError
from kvtop.options_file import FileTable
from kvtop.tui.actions import ACTIONS, Action, ActionTable
from kvtop.tui.key_names import ALLOWED, key_of, shown

#: Keys that no table may take: without them nobody could leave.
_KEPT: Final = {"ctrl+c": "interrupt"}


def rebound(table: FileTable) -> ActionTable:
    """Return all actions with the keys that a file gives them.

    Args:
        table: Action, as the command line calls it → its key, several, or none.

    Raises:
        UserError: There is no such action or key, or two actions have the same key; says in which line.
    """
    by_line = {action.line: action for action in ACTIONS}
    given: dict[str, tuple[str, ...]] = {}
    for name, value in table.items():
        action = by_line.get(name.replace("_", "-"))
        if action is None:
            near = difflib.get_close_matches(name, by_line, 1)
            hint = f"did you mean {near[0]}?" if near else "kvtop export config lists them"
            raise UserError(f"{table.place(name)}: no such action; {hint}")
        given[action.name] = _keys(table, name, value)
        for key, keeper in _KEPT.items():
            if key in given[action.name] and action.name != keeper:
                raise UserError(f'{table.place(name)} "{key}": always leaves the console')
    _refuse_clashes(table, given)
    return ActionTable(tuple(_with_keys(action, given) for action in ACTIONS))


def _keys(table: FileTable, name: str, value: object) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value] if value != "" else []
    keys = []
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{table.place(name)}: a key in quotes, or several in brackets")
        try:
            keys.append(key_of(text))
        except ValueError:
            raise UserError(f'{table.place(name)} "{text}": {ALLOWED}') from None
    return tuple(dict.fromkeys(keys))


def _refuse_clashes(table: FileTable, given: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a key that two actions would have; those of the file are told, wherever they meet another."""
    lines = {action.name: action.line for action in ACTIONS}
    named = {lines[name] for name in given}
    taken: dict[str, str] = {}
    for action in sorted(ACTIONS, key=lambda a: a.name in given):
        for key in given.get(action.name, action.keys):
            if key in taken:
                written = next((name for name in table if name.replace("_", "-") == action.line), action.line)
                other = taken[key]
                way = "give one of the two another" if other in named else f"give {other} another one too"
                raise UserError(f'{table.place(written)} "{shown(key)}": also the key of {other}; {way}')
            taken[key] = action.line


def _with_keys(action: Action, given: Mapping[str, tuple[str, ...]]) -> Action:
    followers = [a for a in ACTIONS if action.help and not a.help and a.method == action.method]
    if not given.keys() & {action.name, *(a.name for a in followers)}:
        return action
    keys = given.get(action.name, action.keys)
    names = [shown(key) for key in keys[:1]]
    names += [shown(k) for a in followers for k in given.get(a.name, a.keys)[:1]]
    return replace(action, keys=keys, shown=" ".join(names))
