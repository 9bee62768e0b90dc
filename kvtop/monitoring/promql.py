"""The part of PromQL that the shipped rules are written in: parsed into an expression, and evaluated over samples.

So the console says by itself what Prometheus would say, from the very text that ``kvtop export rules`` prints. Ranges
and the lookback leave out their older end, and rates reach to the ends of their range, as in Prometheus 3.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

Labels: TypeAlias = frozenset[tuple[str, str]]
#: One value for each set of labels.
Vector: TypeAlias = dict[Labels, float]
Value: TypeAlias = float | Vector
#: Times and values, oldest first. [(s, …)]
Points: TypeAlias = list[tuple[float, float]]
_T = TypeVar("_T")

#: How long the last sample of a series stands for the present. [s]
LOOKBACK_S: Final = 300.0
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
#: Operators that bind alike, the loosest first.
_LEVELS: Final = (("or",), ("and",), ("==", "!=", ">=", "<=", ">", "<"), ("+", "-"), ("*", "/"))
_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_TOKEN: Final = re.compile(
    r'\s*(?:(?P<word>[A-Za-z_][\w:]*)|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<text>"[^"]*")'
    r"|(?P<window>\[[0-9a-z]+\])|(?P<sign>[=!<>]=|[-+*/<>(){},=]))",
    re.ASCII,
)


class BadExpression(ValueError):
    """An expression is not written in the part of PromQL that is understood here."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Select:
    """Series by name and labels: their last values, or all of a window. [s]"""

    name: str
    labels: Labels = frozenset()
    window_s: float | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments."""

    name: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class SumWithout:
    """Sums over the labels named."""

    labels: frozenset[str]
    argument: Expression


@dataclass(frozen=True, slots=True)
class Binary:
    """Two sides, matched by their labels but for those ignored."""

    sign: str
    left: Expression
    right: Expression
    ignoring: frozenset[str] = frozenset()


Expression: TypeAlias = Number | Select | Call | SumWithout | Binary


def duration_s(text: str) -> float:
    """Return a duration such as ``1h30m`` in seconds.

    Raises:
        BadExpression: It is none.
    """
    parts = re.findall(r"(\d+)(ms|[smhdw])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise BadExpression(f"{text}: no duration")
    return sum(int(number) * _UNITS_S[unit] for number, unit in parts)


def parse(text: str) -> Expression:
    """Return the expression that a text is.

    Raises:
        BadExpression: It is not understood.
    """
    return _Parser(text).whole()


def selects(expression: Expression) -> Iterator[Select]:
    """Return every selection of series in an expression."""
    match expression:
        case Select():
            yield expression
        case Call():
            for argument in expression.arguments:
                yield from selects(argument)
        case SumWithout():
            yield from selects(expression.argument)
        case Binary():
            yield from selects(expression.left)
            yield from selects(expression.right)


def text_of(expression: Expression) -> str:
    """Return an expression as it is typed, sums left out."""
    match expression:
        case Number(value):
            return f"{value:g}"
        case Select(name, labels, window_s):
            chosen = ",".join(f'{label}="{value}"' for label, value in sorted(labels))
            return name + (f"{{{chosen}}}" if chosen else "") + ("" if window_s is None else f"[{window_s:g}s]")
        case Call(name, arguments):
            return f"{name}({', '.join(map(text_of, arguments))})"
        case SumWithout(_, argument):
            return text_of(argument)
        case Binary(sign, left, right):
            return f"{text_of(left)} {sign} {text_of(right)}"


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at, text = 0, text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise BadExpression(f"{text[at:]}: not understood")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self._at = 0

    def whole(self) -> Expression:
        expression = self._binary(0)
        if self._at < len(self._tokens):
            raise BadExpression(f"{self._tokens[self._at][1]}: not understood")
        return expression

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if not token or (wanted is not None and token != wanted):
            raise BadExpression(f"{token or 'the end'}: {wanted or 'more'} expected")
        self._at += 1
        return token

    def _binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self._operand()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            sign = self._take()
            ignoring: frozenset[str] = frozenset()
            if self._peek() == "ignoring":
                self._take()
                ignoring = self._names()
            left = Binary(sign, left, self._binary(level + 1), ignoring)
        return left

    def _operand(self) -> Expression:
        if self._peek() == "(":
            self._take()
            inner = self._binary(0)
            self._take(")")
            return inner
        kind = self._tokens[self._at][0] if self._peek() else "end"
        if kind == "number":
            return Number(float(self._take()))
        if kind != "word":
            raise BadExpression(f"{self._peek() or 'the end'}: a value expected")
        name = self._take()
        if name == "sum":
            self._take("without")
            return SumWithout(self._names(), self._operand())
        if self._peek() == "(":
            return Call(name, tuple(self._listed(lambda: self._binary(0))))
        labels = frozenset(self._listed(self._label, "{", "}")) if self._peek() == "{" else frozenset()
        window = self._peek() if self._at < len(self._tokens) and self._tokens[self._at][0] == "window" else ""
        return Select(name, labels, duration_s(self._take()[1:-1]) if window else None)

    def _names(self) -> frozenset[str]:
        return frozenset(self._listed(self._take))

    def _label(self) -> tuple[str, str]:
        name = self._take()
        self._take("=")
        return name, self._take().strip('"')

    def _listed(self, item: Callable[[], _T], opening: str = "(", closing: str = ")") -> list[_T]:
        self._take(opening)
        found: list[_T] = []
        while self._peek() != closing:
            found.append(item())
            if self._peek() != closing:
                self._take(",")
        self._take(closing)
        return found


class Samples:
    """What was sampled of each series, for as long as the longest window needs.

    Args:
        keep_s: How long. [s]
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = max(keep_s, LOOKBACK_S)
        self._series: dict[str, dict[Labels, deque[tuple[float, float]]]] = {}

    def add(self, at_s: float, name: str, labels: Mapping[str, str], value: float) -> None:
        """Keep one sample; those too old for every window are dropped."""
        points = self._series.setdefault(name, {}).setdefault(frozenset(labels.items()), deque())
        points.append((at_s, value))
        while points[0][0] <= at_s - self._keep_s:
            points.popleft()

    def points(self, select: Select, now_s: float) -> Iterator[tuple[Labels, Points]]:
        """Return the samples of each series chosen, in its window, or in the lookback; series without any are out."""
        since_s = now_s - (LOOKBACK_S if select.window_s is None else select.window_s)
        for labels, points in self._series.get(select.name, {}).items():
            if select.labels <= labels:
                found = [point for point in points if since_s < point[0] <= now_s]
                if found:
                    yield labels, found

    def knows(self, select: Select) -> bool:
        """Return whether any series of these labels was ever sampled."""
        return any(select.labels <= labels for labels in self._series.get(select.name, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._series.clear()


class Evaluator:
    """Evaluates expressions over samples; a recorded name stands for its own expression.

    Args:
        samples: The samples.
        recorded: Expressions by the name they are recorded under.
    """

    def __init__(self, samples: Samples, recorded: Mapping[str, Expression]) -> None:
        self._samples = samples
        self._recorded = recorded

    def missing(self, expression: Expression) -> str | None:
        """Return a series that an expression needs and that was never sampled; ``None`` when there is none."""
        for select in selects(expression):
            inner = self._recorded.get(select.name)
            if inner is not None:
                found = self.missing(_narrow(inner, select.labels))
                if found is not None:
                    return found
            elif not self._samples.knows(select):
                return text_of(Select(select.name, select.labels))
        return None

    def value(self, expression: Expression, now_s: float) -> Value:
        """Return what an expression is at a time.

        Raises:
            BadExpression: It asks for what is not understood.
        """
        match expression:
            case Number(number):
                return number
            case Select():
                return self._select(expression, now_s)
            case SumWithout(labels, argument):
                sums: Vector = {}
                for of, number in self.vector(argument, now_s).items():
                    key = _without(of, labels)
                    sums[key] = sums.get(key, 0.0) + number
                return sums
            case Call():
                return self._call(expression, now_s)
            case Binary():
                return self._binary(expression, now_s)

    def vector(self, expression: Expression, now_s: float) -> Vector:
        """Return what an expression is at a time, a plain number as a vector without labels."""
        value = self.value(expression, now_s)
        return value if isinstance(value, dict) else {frozenset(): value}

    def _select(self, select: Select, now_s: float) -> Vector:
        inner = self._recorded.get(select.name)
        if inner is not None:
            found = self.vector(inner, now_s)
            return {labels: number for labels, number in found.items() if select.labels <= labels}
        return {labels: points[-1][1] for labels, points in self._samples.points(select, now_s)}

    def _call(self, call: Call, now_s: float) -> Vector:
        first = call.arguments[0]
        if call.name == "absent":
            labels = first.labels if isinstance(first, Select) else frozenset()
            return {} if self.vector(first, now_s) else {labels: 1.0}
        if call.name == "clamp_min":
            least = self.value(call.arguments[1], now_s)
            if isinstance(least, dict):
                raise BadExpression("clamp_min: a number expected")
            return {labels: max(number, least) for labels, number in self.vector(first, now_s).items()}
        over = _OVER_TIME.get(call.name)
        if over is None or not isinstance(first, Select) or first.window_s is None:
            raise BadExpression(f"{call.name}: not understood")
        found = {}
        for labels, points in self._samples.points(first, now_s):
            number = over(points, now_s, first.window_s)
            if number is not None:
                found[labels] = number
        return found

    def _binary(self, binary: Binary, now_s: float) -> Value:
        left, right = self.value(binary.left, now_s), self.value(binary.right, now_s)
        if not isinstance(left, dict) and not isinstance(right, dict):
            return _arithmetic(binary.sign, left, right)
        sides = _matched(_keyed(left, binary.ignoring), _keyed(right, binary.ignoring))
        if binary.sign == "and":
            return {labels: number for labels, number, other in sides if other is not None}
        if binary.sign == "or":
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            return {**right, **left}
        if (compare := _COMPARE.get(binary.sign)) is not None:
            return {labels: n for labels, n, other in sides if other is not None and compare(n, other)}
        return {labels: _arithmetic(binary.sign, n, o) for labels, n, o in sides if o is not None}


def _keyed(value: Value, ignoring: frozenset[str]) -> float | dict[Labels, tuple[Labels, float]]:
    if not isinstance(value, dict):
        return value
    return {_without(labels, ignoring): (labels, number) for labels, number in value.items()}


def _matched(
    left: float | dict[Labels, tuple[Labels, float]], right: float | dict[Labels, tuple[Labels, float]]
) -> Iterable[tuple[Labels, float, float | None]]:
    """Return labels, left number and the right number that goes with it; a plain number goes with everything."""
    if not isinstance(left, dict):
        assert isinstance(right, dict)
        return [(labels, left, number) for labels, number in right.values()]
    if not isinstance(right, dict):
        return [(labels, number, right) for labels, number in left.values()]
    return [(labels, n, right[key][1] if key in right else None) for key, (labels, n) in left.items()]


def _narrow(expression: Expression, labels: Labels) -> Expression:
    """Return a recorded expression as if its own selections asked for these labels too, where that means the same."""
    match expression:
        case Select(name, own, window_s):
            return Select(name, own | labels, window_s)
        case Call(name, arguments):
            return Call(name, tuple(_narrow(a, labels) for a in arguments))
        case Binary(sign, left, right, ignoring):
            return Binary(sign, _narrow(left, labels), _narrow(right, labels), ignoring)
    return expression


def _without(labels: Labels, names: frozenset[str]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] not in names) if names else labels


def _arithmetic(sign: str, left: float, right: float) -> float:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right if right else float("nan") if not left else float("inf") * left
    raise BadExpression(f"{sign}: between two numbers it is not understood")


def _increase(points: Points, now_s: float, window_s: float) -> float | None:
    """Return how much a counter rose in a window: what was seen, drawn out to the ends of the window.

    Source: as ``extrapolatedRate`` of Prometheus.
    """
    if len(points) < 2:
        return None
    (first_s, first), (last_s, last) = points[0], points[-1]
    seen = last - first + sum(a for (_, a), (_, b) in pairwise(points) if b < a)
    sampled_s = last_s - first_s
    mean_s = sampled_s / (len(points) - 1)
    to_start_s, to_end_s = first_s - (now_s - window_s), now_s - last_s
    if to_start_s >= 1.1 * mean_s:
        to_start_s = mean_s / 2
    if seen > 0 and first >= 0:
        to_start_s = min(to_start_s, sampled_s * first / seen)  # a counter was not below 0
    if to_end_s >= 1.1 * mean_s:
        to_end_s = mean_s / 2
    return seen * (sampled_s + to_start_s + to_end_s) / sampled_s


def _rate(points: Points, now_s: float, window_s: float) -> float | None:
    rise = _increase(points, now_s, window_s)
    return None if rise is None else rise / window_s


_OVER_TIME: Final[Mapping[str, Callable[[Points, float, float], float | None]]] = {
    "avg_over_time": lambda points, now_s, window_s: sum(v for _, v in points) / len(points),
    "max_over_time": lambda points, now_s, window_s: max(v for _, v in points),
    "min_over_time": lambda points, now_s, window_s: min(v for _, v in points),
    "increase": _increase,
    "rate": _rate,
}
