"""Key names: how one types a key in a file, how Textual calls it, how help and footer write it."""

from __future__ import annotations

import re
from typing import Final

from textual.binding import Binding
from textual.keys import Keys, format_key

#: What a key may be called, besides the character it writes.
_NAMED: Final = frozenset(key.value for key in Keys if re.fullmatch(r"[a-z][a-z0-9]*", key.value)) - {"return"}
ALLOWED: Final = "a character, space, enter, tab, escape, an arrow, f1 to f24, or one of these after ctrl+ or shift+"
#: How names that fill a line are written.
_SHOWN: Final = {
    "escape": "Esc",
    "enter": "Enter",
    "tab": "Tab",
    "pagedown": "PgDn",
    "pageup": "PgUp",
    "space": "space",
}


def key_of(text: str) -> str:
    """Return a key as Textual names it: ``?`` → ``question_mark``, ``Ctrl+S`` → ``ctrl+s``.

    Raises:
        ValueError: There is no such key.
    """
    *modifiers, base = text.split("+") if len(text) > 1 and not text.endswith("+") else [text]
    modifiers = [modifier.lower() for modifier in modifiers]
    if len(base) > 1:
        base = base.lower()
    is_known = base in _NAMED or (len(base) == 1 and base.isprintable() and not base.isspace())
    if not is_known or not set(modifiers) <= {"ctrl", "shift", "alt"} or len(set(modifiers)) != len(modifiers):
        raise ValueError(text)
    if modifiers == ["shift"] and len(base) == 1:
        if not base.isalpha():
            raise ValueError(text)  # which sign that is, only the keyboard knows
        modifiers, base = [], base.upper()
    elif modifiers and len(base) == 1:
        base = base.lower()
    name = next(iter(Binding.make_bindings([Binding("comma" if base == "," else base, "")]))).key
    return "+".join([*sorted(modifiers, key=["alt", "ctrl", "shift"].index), name])


def shown(key: str) -> str:
    """Return a key as help and footer write it: ``ctrl+s`` → ``^S``."""
    modifiers, _, base = key.rpartition("+") if key != "plus" else ("", "", key)
    name = _SHOWN.get(base) or (base.capitalize() if len(base) > 1 and base in _NAMED else format_key(base))
    if base in ("left", "right", "up", "down"):
        name = format_key(base)
    if modifiers == "ctrl" and len(name) == 1:
        return f"^{name.upper()}"
    return "-".join([*(modifier.capitalize() for modifier in modifiers.split("+") if modifier), name])


def typed(key: str) -> str:
    """Return a key as one types it in a file: ``question_mark`` → ``?``; a backslash and a quote doubled and marked."""
    modifiers, _, base = key.rpartition("+")
    sign = base if base in _NAMED else format_key(base)
    text = f"{modifiers}+{sign}" if modifiers else sign
    return text.replace("\\", "\\\\").replace('"', '\\"')
