"""Exposition: a page of Prometheus text as series by name, whatever spelling the client library chose. Bounded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

#: Samples read of one page at most.
MAX_SAMPLES: Final = 200_000

Labels = Mapping[str, str]
#: (model, engine) that a series belongs to; ``None`` for a series that is to be left out.
KeyOf = Callable[[Labels], "tuple[str | None, str] | None"]


class NotMetrics(ValueError):
    """The text is no page of metrics."""


class Exposition:
    """Samples of one page.

    Names are kept with ``:`` written as ``_``, since client libraries differ in that, and ``*_created`` times are left
    out: they are not families of their own.
    """

    def __init__(self, series: Mapping[str, list[tuple[Labels, float]]]) -> None:
        self._series = series

    @property
    def names(self) -> frozenset[str]:
        """Names of all samples."""
        return frozenset(self._series)

    def has(self, name: str) -> bool:
        """Return whether there is a series of that name, a counter's ``_total`` aside."""
        return name in self._series or f"{name}_total" in self._series

    def series(self, name: str) -> Iterator[tuple[Labels, float | None]]:
        """Yield the series of one name with or without ``_total``; NaN and infinite values are unknown."""
        for labels, value in self._series.get(name) or self._series.get(f"{name}_total") or ():
            yield labels, value if math.isfinite(value) else None

    def by_engine(
        self, key_of: KeyOf, *names: str, where: Mapping[str, str] | None = None
    ) -> dict[tuple[str | None, str], float | None]:
        """Return the values of the first of ``names`` that the page has, by engine; several series of one add up.

        Args:
            key_of: Says which engine a series belongs to.
            names: The newest name first.
            where: Labels a series must have.
        """
        name = next((name for name in names if self.has(name)), None)
        found: dict[tuple[str | None, str], float | None] = {}
        if name is None:
            return found
        for labels, value in self.series(name):
            key = key_of(labels)
            if key is None or (where and any(labels.get(k) != v for k, v in where.items())):
                continue
            before = found.get(key, 0.0)
            found[key] = None if value is None or before is None else before + value
        return found


def parse(text: str) -> Exposition:
    """Return the samples of a page.

    Raises:
        NotMetrics: It is not Prometheus text, has no sample, or has more than ``MAX_SAMPLES``.
    """
    series: dict[str, list[tuple[Labels, float]]] = {}
    count = 0
    try:
        families = text_string_to_metric_families(text)
        for sample in itertools.chain.from_iterable(family.samples for family in families):
            count += 1
            if count > MAX_SAMPLES:
                raise NotMetrics(f"more than {MAX_SAMPLES:,} samples")
            if not sample.name.endswith("_created"):
                series.setdefault(sample.name.replace(":", "_"), []).append((sample.labels, float(sample.value)))
    except NotMetrics:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise NotMetrics(f"not Prometheus text ({str(error)[:80]})") from None
    if not series:
        raise NotMetrics("no metrics on the page")
    return Exposition(series)
