"""Alerting: the shipped alerts on the views of one console, sampled and evaluated as Prometheus would.

What the exporter would tell of a view is what the rules are given, so an engine that does not tell a number has
unknown alerts, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvtop.model.view import View
from kvtop.monitoring.watch import AlertStatus, AlertWatch, Sample

if TYPE_CHECKING:
    from kvtop.monitoring.rules import RuleSettings

#: Seconds between two samples.
SAMPLE_EVERY_S: Final = 5.0


class Alerting:
    """Follows one console's views. ``follow`` is for one thread; ``statuses`` may be read from any.

    Args:
        settings: Windows, thresholds and holds.

    Attributes:
        statuses: Every alert as it stood at the last sample; empty before the first.
    """

    def __init__(self, settings: RuleSettings | None = None) -> None:
        self._settings = settings
        self._watch: AlertWatch | None = None
        self._sampled_s: float | None = None
        self._step = 0
        self.statuses: tuple[AlertStatus, ...] = ()

    def follow(self, view: View, now_s: float) -> None:
        """Sample a view and evaluate the alerts, where that is due.

        Args:
            view: The newest view.
            now_s: Time by the clock of its ``read_at_s``. [s]
        """
        if view.read_at_s is None and view.error is None:
            return
        step = view.snapshot.step if view.snapshot else 0
        if self._watch is None:
            self._watch = AlertWatch(self._settings)
        elif step < self._step:  # another engine, or a recording that was wound back
            self._watch.forget()
        elif self._sampled_s is not None and now_s - self._sampled_s < SAMPLE_EVERY_S:
            return
        self._step, self._sampled_s = step, now_s
        self._watch.sample(now_s, samples_of(view, now_s, self._watch.names))
        self.statuses = self._watch.evaluate(now_s)


def samples_of(view: View, now_s: float, names: frozenset[str]) -> Iterator[Sample]:
    """Return what the exporter would tell of a view under some names; unknown numbers are left out."""
    from kvtop.exporter import METRICS

    source = {"source": view.source}
    for spec in METRICS:
        name = f"{spec.name}_total" if spec.kind == "counter" else spec.name
        if name in names:
            for labels, value in spec.read(view, now_s):
                if isinstance(value, (int, float)):
                    yield name, source | dict(zip(spec.labels, labels, strict=True)), float(value)
    if view.remote is not None:
        from kvtop.remote_metrics import COUNTER, engine_metrics

        for kind, short, _, samples in engine_metrics(view.remote):
            name = f"kvtop_{short}_total" if kind is COUNTER else f"kvtop_{short}"
            if name in names:
                yield from ((name, source | labels, float(value)) for labels, value in samples if value is not None)
