"""AlertWatch: the shipped rules evaluated here, over samples that the caller takes: who would fire now, and why.

Everything comes from ``alerts`` and the settings of ``rules``: the expressions are those that Prometheus is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvtop.monitoring.alerts import ALERTS, RECORDINGS, Alert
from kvtop.monitoring.promql import (
    LOOKBACK_S,
    Binary,
    Evaluator,
    Expression,
    Labels,
    Samples,
    Vector,
    duration_s,
    parse,
    selects,
    text_of,
)
from kvtop.monitoring.rules import RuleSettings, fill, hold_of, runbook_url

AlertState = Literal["firing", "pending", "quiet", "unknown"]
#: Name as exported, labels, value.
Sample: TypeAlias = tuple[str, Mapping[str, str], float]

_COMPARISONS: Final = (">", "<", "==")


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of an alert's expression.

    Attributes:
        text: What is compared.
        value: What it is; ``None`` while it is not known.
        sign: The comparison.
        limit: What it is compared with; ``None`` while it is not known.
        holds: Whether it is so.
    """

    text: str
    value: float | None
    sign: str
    limit: float | None
    holds: bool


@dataclass(frozen=True, slots=True)
class AlertStatus:
    """One alert, as it stands now.

    Attributes:
        alert: What it is.
        state: ``firing``; ``pending`` while its expression has not held long enough; ``quiet``; ``unknown`` when this
            engine does not tell what it needs.
        held_s: How long its expression has held; ``None`` when it does not. [s]
        hold_s: How long it must. [s]
        conditions: What it compares; all of them must hold.
        runbook: Where its page is.
        where: Labels that tell which one of several fires, such as ``law=2``.
        missing: The series that is not told.
    """

    alert: Alert
    state: AlertState
    held_s: float | None
    hold_s: float
    conditions: tuple[Condition, ...]
    runbook: str
    where: str = ""
    missing: str = ""


class AlertWatch:
    """Evaluates every alert over the samples it was given. Used by one thread at a time.

    Args:
        settings: Windows, thresholds and holds.
    """

    def __init__(self, settings: RuleSettings | None = None) -> None:
        self._settings = settings = settings or RuleSettings()
        recorded = {r.record: parse(fill(r.expr, settings)) for r in RECORDINGS}
        self._alerts = [
            (alert, parse(fill(alert.expr, settings, settings.thresholds.get(alert.name, alert.threshold))))
            for alert in ALERTS
        ]
        self._samples = Samples(max(duration_s(settings.long_window), duration_s(settings.window), LOOKBACK_S))
        self._evaluator = Evaluator(self._samples, recorded)
        self._since_s: dict[str, dict[Labels, float]] = {alert.name: {} for alert in ALERTS}
        every = [*recorded.values(), *(expression for _, expression in self._alerts)]
        #: Names of the series that the alerts are made of.
        self.names: Final = frozenset(s.name for e in every for s in selects(e)) - recorded.keys()

    def sample(self, at_s: float, samples: Iterable[Sample]) -> None:
        """Keep the samples of one moment; those that no alert needs are left out."""
        for name, labels, value in samples:
            if name in self.names:
                self._samples.add(at_s, name, labels, value)

    def forget(self) -> None:
        """Begin anew: what was sampled belongs to another time."""
        self._samples.clear()
        for since_s in self._since_s.values():
            since_s.clear()

    def evaluate(self, now_s: float) -> tuple[AlertStatus, ...]:
        """Return every alert as it stands, in the order of ``ALERTS``."""
        return tuple(self._status(alert, expression, now_s) for alert, expression in self._alerts)

    def _status(self, alert: Alert, expression: Expression, now_s: float) -> AlertStatus:
        hold_s = duration_s(hold_of(alert, self._settings))
        runbook = runbook_url(alert, self._settings)
        if (missing := self._evaluator.missing(expression)) is not None:
            self._since_s[alert.name].clear()
            return AlertStatus(alert, "unknown", None, hold_s, (), runbook, missing=missing)
        found = self._evaluator.vector(expression, now_s)
        before = self._since_s[alert.name]
        since_s = self._since_s[alert.name] = {labels: before.get(labels, now_s) for labels in found}
        conditions = tuple(self._conditions(expression, found, now_s))
        if not since_s:
            return AlertStatus(alert, "quiet", None, hold_s, conditions, runbook)
        first, at_s = min(since_s.items(), key=lambda item: item[1])
        held_s = now_s - at_s
        state: AlertState = "firing" if held_s >= hold_s else "pending"
        return AlertStatus(alert, state, held_s, hold_s, conditions, runbook, _where(first))

    def _conditions(self, expression: Expression, found: Vector, now_s: float) -> Iterator[Condition]:
        if isinstance(expression, Binary) and expression.sign == "and":
            yield from self._conditions(expression.left, found, now_s)
            yield from self._conditions(expression.right, found, now_s)
        elif isinstance(expression, Binary) and expression.sign in _COMPARISONS:
            holding = self._evaluator.vector(expression, now_s)
            left = self._evaluator.vector(expression.left, now_s)
            right = self._evaluator.vector(expression.right, now_s)
            labels = next((of for of in left if of in found or of in holding), next(iter(left), None))
            limit = None if labels is None else right.get(labels, right.get(frozenset()))
            value = None if labels is None else left[labels]
            if limit is None and len(right) == 1:
                limit = next(iter(right.values()))
            yield Condition(text_of(expression.left), value, expression.sign, limit, bool(holding))
        else:
            yield Condition(text_of(expression), None, "", None, bool(self._evaluator.vector(expression, now_s)))


def _where(labels: Labels) -> str:
    """Return the labels that tell one of several apart; those that every series has are left out."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels) if name not in ("source", "tier", "kind"))
