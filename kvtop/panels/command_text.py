"""Command text: what people type → engine commands, by the names that logs and scripts use. Pure."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from allocator.commands import Command, command_name
from kvtop.errors import UserError
from kvtop.serving_commands import AnyCommand, ServingCommand

#: Words for a field that may be left open.
_OPEN: Final = frozenset({"none", "all", "max"})
#: Block ids that one line may name, and how they are written.
_MAX_IDS: Final = 10_000
_BLOCK_IDS: Final = "block ids, such as 4 10-20"


def _kinds(commands: Any) -> Mapping[str, type[Any]]:
    return {command_name(kind): kind for kind in typing.get_args(commands)}


#: Name → class of every command of our own engine, and of inference servers that are not ours.
OWN_KINDS: Final = _kinds(Command)
SERVING_KINDS: Final = _kinds(ServingCommand)
KINDS: Final = {**OWN_KINDS, **SERVING_KINDS}
#: Command → the shorter name that one may type for it, and that ``kvtop ctl`` uses.
SHORT: Final = {"set-speed": "speed", "submit-load": "submit", "evict-cached": "evict", "verify-contents": "verify"}
_FULL: Final = {short: name for name, short in SHORT.items()}


def full_name(name: str) -> str:
    """Return a command's own name for what was typed: ``evict-cached`` for ``evict``, any other as it is."""
    return _FULL.get(name, name)


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
    name = full_name(name)
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"{name}: no such command; Tab lists them")
    fields = list(msgspec.structs.fields(kind))
    values: dict[str, Any] = {}
    if fields and _is_many(fields[0]):
        if words or fields[0].required:
            values[fields[0].name] = block_ids(name, words) if _is_ids(fields[0]) else words
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
        raise UserError(f"{name}: {plain_reason(error, kind)}") from None
    return command


def _is_many(field: msgspec.structs.FieldInfo) -> bool:
    return typing.get_origin(field.type) is tuple


def _is_ids(field: msgspec.structs.FieldInfo) -> bool:
    return _is_many(field) and typing.get_args(field.type)[0] is int


def block_ids(name: str, words: Sequence[str]) -> list[int]:
    """Return the ids that ``words`` name: each an id, or a range with both ends, such as ``10-20``.

    Args:
        name: What they are for, as a complaint begins.
        words: The words.

    Raises:
        UserError: One line: what they are for, the word, what is allowed.
    """
    ids: list[int] = []
    for word in words:
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word, re.ASCII)
        if found is None:
            raise UserError(f"{name} {word or 'empty'}: {_BLOCK_IDS}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise UserError(f"{name} {word}: a range begins with its lower end, such as {last}-{first}")
        if last - first + len(ids) >= _MAX_IDS:
            raise UserError(f"{name} {word}: at most {_MAX_IDS} blocks")
        ids.extend(range(first, last + 1))
    if not ids:
        raise UserError(f"{usage(name)}: {_BLOCK_IDS}")
    return ids


def plain_reason(error: msgspec.ValidationError, kind: type[Any]) -> str:
    """Return what is wrong with a command of ``kind`` as ``field: what is allowed``."""
    text = str(error).replace("`", "")
    problem, at, path = text.partition(" - at $.")
    if not at:
        return text
    field = path.partition("[")[0]
    return f"{field}: {_allowed(problem, typing.get_type_hints(kind).get(field))}"


def _allowed(problem: str, hint: Any) -> str:
    """Return what a field takes in words, from the type of the field and what the decoder found."""
    if problem.startswith("Invalid enum value"):
        return f"one of {', '.join(_choices(hint))}"
    if "matching regex" in problem:
        return "letters and digits, with . _ - between them"
    found = re.match(r"Expected (int|float|bool)(?:.* (<|>)= (\S+))?", problem)
    if found is None:
        return f"{problem[:1].lower()}{problem[1:]}"
    what = {"int": "a whole number", "float": "a number", "bool": "true or false"}[found[1]]
    return f"{what}, at {'most' if found[2] == '<' else 'least'} {found[3]}" if found[2] else what


def _choices(hint: Any) -> list[str]:
    """Return the words of every ``Literal`` in a type."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [word for part in typing.get_args(hint) for word in _choices(part)]


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
