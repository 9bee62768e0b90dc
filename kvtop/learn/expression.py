"""Expressions: the small language of lesson files, for checks, answers and numbers in texts. Nothing is executed.

A text is parsed once, and only names, numbers, strings, arithmetic, comparisons, ``and``, ``or``, ``not`` and calls of
known functions are let through; it is then worked out node by node over values that the caller looks up.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from kvtop.model import format as fmt

Value = int | float | str | bool

MAX_LENGTH: Final = 400

_BINARY: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
#: Functions of plain values, known everywhere.
PLAIN: Final[Mapping[str, Callable[..., Any]]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}
#: How a placeholder's value may be written, after its colon.
FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "count": fmt.count,
    "size": fmt.size,
    "blocks": fmt.blocks,
    "seconds": fmt.seconds,
    "percent": lambda value: f"{value:.0f} %",
    "tenths": lambda value: f"{value:.1f}",
}
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")


class BadExpression(ValueError):
    """A text is no expression of the language; says why."""


class UnknownFact(LookupError):
    """A value is asked for that is not known at this moment; its text names it."""


class Facts(Protocol):
    """Where names and functions get their values."""

    def value(self, name: str) -> Value:
        """Return the value of a name. Raises ``UnknownFact``."""

    def call(self, name: str, arguments: tuple[Value, ...]) -> Value:
        """Return the value of a function. Raises ``UnknownFact``."""


class Expression:
    """One parsed expression.

    Args:
        text: Its source.

    Attributes:
        names: Names it uses.
        calls: Functions it calls, with how many arguments.

    Raises:
        BadExpression: It is none.
    """

    __slots__ = ("_tree", "calls", "names", "text")

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise BadExpression(f"longer than {MAX_LENGTH} characters")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadExpression(getattr(error, "msg", None) or "not an expression") from None
        self.text = text
        self.names: set[str] = set()
        self.calls: set[tuple[str, int]] = set()
        _check(self._tree, self.names, self.calls)

    def value(self, facts: Facts) -> Value:
        """Work it out.

        Raises:
            UnknownFact: A value is not known, or cannot be calculated with, such as a division by 0.
        """
        try:
            result = _value(self._tree, facts)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UnknownFact(f"{self.text}: {error}") from None
        if not isinstance(result, (bool, int, float, str)):
            raise UnknownFact(self.text)
        return result


def _check(node: ast.expr, names: set[str], calls: set[tuple[str, int]]) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name(id=name):
            names.add(name)
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            children = [left, right]
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            children = [operand]
        case ast.BoolOp(values=values):
            children = values
        case ast.Compare(left=left, ops=ops, comparators=right_sides) if all(type(op) in _COMPARE for op in ops):
            children = [left, *right_sides]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            calls.add((name, len(arguments)))
            children = arguments
        case _:
            what = ast.unparse(node)
            raise BadExpression(f"{what}: only numbers, names, calls, + - * / // %, comparisons, and, or, not")
    for child in children:
        _check(child, names, calls)


def _value(node: ast.expr, facts: Facts) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return facts.value(name)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, facts), _value(right, facts))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, facts)
        case ast.UnaryOp(operand=operand):
            return -_value(operand, facts)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(part, facts) for part in values)
        case ast.BoolOp(values=values):
            return any(_value(part, facts) for part in values)
        case ast.Compare(left=left, ops=ops, comparators=right_sides):
            return _compare(_value(left, facts), ops, right_sides, facts)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            given = tuple(_value(argument, facts) for argument in arguments)
            return PLAIN[name](*given) if name in PLAIN else facts.call(name, given)
        case _:
            raise UnknownFact(ast.unparse(node))


def _compare(left: Any, ops: list[ast.cmpop], right_sides: list[ast.expr], facts: Facts) -> bool:
    for op, right_side in zip(ops, right_sides, strict=True):
        right = _value(right_side, facts)
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True


def placeholders(text: str) -> Iterator[tuple[str, Expression, str]]:
    """Yield every placeholder of a text: as written, its expression, the name of its format or ``""``.

    Raises:
        BadExpression: One is none, or asks for a format that there is not.
    """
    for found in _PLACEHOLDER.finditer(text):
        source, colon, form = found[1].rpartition(":")
        if not colon:
            source, form = found[1], ""
        if form and form not in FORMATS:
            raise BadExpression(f"{{{found[1]}}}: {form}: one of {', '.join(FORMATS)}")
        try:
            yield found[0], Expression(source), form
        except BadExpression as error:
            raise BadExpression(f"{{{found[1]}}}: {error}") from None


def fill_in(text: str, facts: Facts) -> str:
    """Return a text with its placeholders' values; what is not known is written ``—``."""
    values = {}
    for written, expression, form in placeholders(text):
        try:
            values[written] = write(expression.value(facts), form)
        except UnknownFact:
            values[written] = fmt.UNKNOWN
    return _PLACEHOLDER.sub(lambda found: values[found[0]], text)


def write(value: Value, form: str = "") -> str:
    """Return a value as texts have it: whole numbers in full, others with one decimal."""
    if form:
        return FORMATS[form](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return fmt.count(value) if value == round(value) else f"{value:.1f}"
