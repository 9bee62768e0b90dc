"""Command text: what people type → engine commands, by the names that logs and scripts use. Pure."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from allocator.commands import Command, command_name
from kvtop.errors import UserError
from kvtop.serving_commands import AnyCommand, ServingCommand

#: Words for a field that may be left open.
_OPEN: Final = frozenset({"none", "all", "max"})
#: Block ids that one line may name.
_MAX_IDS: Final = 10_000


def _kinds(commands: Any) -> Mapping[str, type[Any]]:
    return {command_name(kind): kind for kind in typing.get_args(commands)}


#: Name → class of every command of our own engine, and of inference servers that are not ours.
OWN_KINDS: Final = _kinds(Command)
SERVING_KINDS: Final = _kinds(ServingCommand)
KINDS: Final = {**OWN_KINDS, **SERVING_KINDS}


def usage(name: str) -> str:
    """Return a command with its fields: ``compact [GOAL] [RUN_BLOCKS] [MAX_MOVES]``."""
    words = [name]
    for field in msgspec.structs.fields(KINDS[name]):
        word = field.name.upper()
        if _is_many(field):
            word += "…"
        words.append(word if field.required else f"[{word}]")
    return " ".join(words)


def summary(name: str) -> str:
    """Return the first line of what a command does."""
    return (KINDS[name].__doc__ or "").strip().splitlines()[0].replace("``", "")


def parse_command(text: str) -> AnyCommand:
    """Return the command that ``text`` names: ``resize 900``, ``compact longest-run max_moves=100``, ``pin 4 10-20``.

    Raises:
        UserError: One line: the command, the value, what is allowed.
    """
    name, *words = text.split()
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"{name}: no such command; Tab lists them")
    fields = list(msgspec.structs.fields(kind))
    values: dict[str, Any] = {}
    if fields and _is_many(fields[0]):
        if words or fields[0].required:
            values[fields[0].name] = _ids(name, words) if _is_ids(fields[0]) else words
    elif fields and fields[0].type is str:
        values = {fields[0].name: " ".join(words)} if words else {}
    else:
        open_fields = [f.name for f in fields]
        for word in words:
            key, equals, value = word.partition("=")
            if not equals:
                left = [f for f in open_fields if f not in values]
                if not left:
                    raise UserError(f"{name} {word}: {usage(name)} takes no more")
                key, value = left[0], word
            elif key not in open_fields:
                raise UserError(f"{name} {key}: not a field; {usage(name)}")
            values[key] = None if value in _OPEN else value
    missing = [f.name for f in fields if f.required and f.name not in values]
    if missing:
        raise UserError(f"{usage(name)}: {missing[0].upper()} is missing")
    try:
        command: AnyCommand = msgspec.convert({**values, "type": kind.__name__}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{name}: {plain_reason(error)}") from None
    return command


def _is_many(field: msgspec.structs.FieldInfo) -> bool:
    return typing.get_origin(field.type) is tuple


def _is_ids(field: msgspec.structs.FieldInfo) -> bool:
    return _is_many(field) and typing.get_args(field.type)[0] is int


def _ids(name: str, words: list[str]) -> list[int]:
    ids: list[int] = []
    for word in words:
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word, re.ASCII)
        if found is None:
            raise UserError(f"{name} {word}: block ids, such as 4 10-20")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first + len(ids) >= _MAX_IDS:
            raise UserError(f"{name} {word}: at most {_MAX_IDS} blocks")
        ids.extend(range(first, last + 1))
    if not ids:
        raise UserError(f"{usage(name)}: block ids, such as 4 10-20")
    return ids


def plain_reason(error: msgspec.ValidationError) -> str:
    """Return a validation error as ``field: what is wrong``."""
    text = str(error).replace("`", "")
    text = re.sub(r"Expected str matching regex \S+", "letters and digits, with . _ - between them", text)
    problem, at, field = text.partition(" - at $.")
    return f"{field}: {problem[:1].lower()}{problem[1:]}" if at else problem


def describe(command: AnyCommand) -> str:
    """Return a command as it would be typed."""
    parts = [command_name(command)]
    for field in msgspec.structs.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, tuple):
            if value:
                parts.append(f"{len(value)} blocks" if len(value) > 8 else " ".join(map(str, value)))
        elif isinstance(value, bool):
            if value:
                parts.append(f"{field.name}=true")
        elif value is not None:
            parts.append(str(value))
    return " ".join(parts)
