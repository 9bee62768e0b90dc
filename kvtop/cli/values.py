"""Values on the command line: how each kind is read, and the one sentence that says what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

import click
from click.core import ParameterSource

from allocator.config import MAX_LOAD_SCALE, MIN_LOAD_SCALE
from allocator.errors import EMPTY
from allocator.fault_kinds import FAULT_KINDS, parse_rate
from kvtop.errors import UserError
from kvtop.options_file import OptionsFile

MAX_SPEED: Final = 1_000_000.0


class Value(click.ParamType):
    """A value with one sentence that says what is allowed; a bad one is a ``UserError`` naming option and value."""

    def __init__(self, name: str, allowed: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.allowed = allowed
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value.strip())
        except ValueError:
            raise UserError(f"{_given_as(param, ctx)} {value.strip() or EMPTY}: {self.allowed}") from None


class Flag(click.types.BoolParamType):
    """A flag; from the environment also a word for yes or no, and a bad one is a ``UserError`` as any bad value is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            allowed = "1, true, yes or on; 0, false, no or off"
            raise UserError(f"{_given_as(param, ctx)} {value}: {allowed}") from None


def _given_as(param: click.Parameter | None, ctx: click.Context | None) -> str:
    """Return how the user gave a value: the option's name, its environment variable's, or its line in the file."""
    assert param is not None
    source = ctx.get_parameter_source(param.name) if ctx is not None and param.name else None
    if source is ParameterSource.ENVIRONMENT:
        return str(param.envvar)
    if source is ParameterSource.DEFAULT_MAP and ctx is not None and isinstance(ctx.default_map, OptionsFile):
        return ctx.default_map.place(param.opts[0].lstrip("-"))
    return param.opts[0]


def whole(low: int, high: int) -> Value:
    def parse(text: str) -> int:
        number = int(_plain(text))
        if not low <= number <= high:
            raise ValueError
        return number

    return Value("N", f"a whole number from {low} to {high}", parse)


def real(low: float, high: float, allowed: str, *, also: str | None = None) -> Value:
    """A finite number from ``low`` to ``high``, or the word ``also``, which becomes ``None``."""

    def parse(text: str) -> float | None:
        if text == also:
            return None
        number = float(_plain(text))
        if not (math.isfinite(number) and low <= number <= high):
            raise ValueError
        return number

    return Value("X", allowed, parse)


def _plain(text: str) -> str:
    """Return a number's text unless only Python takes it for one: with underscores, or in another script's digits."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def _word(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def one_of(*names: str) -> Value:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Value("|".join(names), f"one of {', '.join(names)}" if len(names) > 1 else f"only {names[0]}", parse)


def some_of(*names: str) -> Value:
    """Several of ``names``, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(name.strip() for name in text.split(","))
        if not set(chosen) <= set(names):
            raise ValueError
        return chosen

    return Value("A,B", f"some of {', '.join(names)}, with commas between them", parse)


def _duration(text: str) -> str:
    """A duration as Prometheus writes it."""
    if not re.fullmatch(r"(?=[0-9])([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?", text):
        raise ValueError(text)
    return text


def _hold(text: str) -> tuple[str | None, str]:
    name, equals, duration = text.rpartition("=")
    if equals and not name:
        raise ValueError(text)
    return name or None, _duration(duration)


def _threshold(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    if not name or not math.isfinite(value := float(_plain(number))):
        raise ValueError(text)
    return name, value


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+", host) or not 0 < int(_plain(port)) < 65536:
        raise ValueError(text)
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z_.:/-]+", text):
        raise ValueError(text)
    return text


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(text)
    return int(found[1]), int(found[2])


WORD: Final = Value("TEXT", "needs a value", _word)
FAULT: Final = Value(
    "KIND[:RATE]",
    f"KIND or KIND:RATE, KIND one of {', '.join(FAULT_KINDS)}, RATE above 0 and at most 1",
    parse_rate,
)
RATIO: Final = real(0, 1, "a number from 0 to 1")
SPEED: Final = real(1e-6, MAX_SPEED, "a number above 0 and at most 1000000, or max", also="max")
SCALE: Final = real(MIN_LOAD_SCALE, MAX_LOAD_SCALE, f"a number from {MIN_LOAD_SCALE:g} to {MAX_LOAD_SCALE:g}")
SECONDS: Final = real(1e-3, 1e9, "a number of seconds above 0")
DURATION: Final = Value("D", "a duration such as 30s, 5m or 1h30m", _duration)
HOLD: Final = Value("[ALERT=]D", "a duration such as 30s, 5m or 1h30m, or ALERT=DURATION", _hold)
THRESHOLD: Final = Value("ALERT=X", "ALERT=NUMBER", _threshold)
STEPS: Final = Value("FROM..TO", "two steps, such as 100..250", _steps)
HOST_PORT: Final = Value("HOST:PORT", "HOST:PORT", _host_port)
LABEL: Final = Value("NAME", "letters, digits, and any of _ . : / -", _label)
