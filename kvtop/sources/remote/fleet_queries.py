"""PromQL for a fleet: the few queries that read every engine at once, and the answers of the HTTP API as samples.

The names come from the dialects themselves: each is read once over an empty page that notes what it is asked for.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from kvtop.sources.remote.dialects import DIALECTS
from kvtop.sources.remote.exposition import Exposition, Labels
from kvtop.sources.remote.fetch import FetchError, Page

#: Below the prefix under which the API is served.
API: Final = "/api/v1"
#: Series read of one answer at most.
MAX_SERIES: Final = 200_000
#: Characters shown of what a server says.
_MAX_WORDS: Final = 160


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer.

    Attributes:
        name: Its name, ``:`` written as ``_``; empty when the query dropped it.
        labels: Its other labels.
        points: (Unix time, value), oldest first; one for an instant query. [s]
    """

    name: str
    labels: Labels
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one query found.

    Attributes:
        series: The series.
        warnings: What the server says about them, such as that some store did not answer.
    """

    series: tuple[Series, ...]
    warnings: tuple[str, ...] = ()


class _Asked(Exposition):
    """A page without samples that notes the names it is asked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked: set[str] = set()

    def has(self, name: str) -> bool:
        self.asked.add(name)
        return False

    def series(self, name: str) -> Iterator[tuple[Labels, float | None]]:
        self.asked.add(name)
        return iter(())


@functools.cache
def names() -> frozenset[str]:
    """Return every name that a dialect reads, a counter's ``_total`` left out."""
    found: set[str] = set()
    for dialect in DIALECTS:
        page = _Asked()
        dialect.read(page)
        found |= page.asked | set(dialect.marks)
    return frozenset(found)


def _pattern(wanted: frozenset[str], *, totals: bool) -> str:
    """Return a regular expression of names in both spellings, ``vllm:x`` and ``vllm_x``."""
    by_prefix: dict[str, list[str]] = {}
    for name in sorted(wanted):
        prefix, _, rest = name.partition("_")
        by_prefix.setdefault(prefix, []).append(rest)
    tail = "(_total)?" if totals else ""
    return "|".join(f"{prefix}[:_]({'|'.join(rests)}){tail}" for prefix, rests in by_prefix.items())


@functools.cache
def values_query() -> str:
    """Return the query for the newest value of everything that any dialect reads."""
    return f'{{__name__=~"{_pattern(names(), totals=True)}"}}'


@functools.cache
def ages_query() -> str:
    """Return the query for when each engine was last sampled: of one series an engine, as a time keeps no name."""
    return f'timestamp({{__name__=~"{_pattern(frozenset(d.beat for d in DIALECTS), totals=False)}"}})'


#: The query for the targets that cannot be scraped.
DOWN_QUERY: Final = "up == 0"


def past_query(labels: Mapping[str, str]) -> str:
    """Return the query for everything that any dialect reads of one target."""
    only = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f'{{__name__=~"{_pattern(names(), totals=True)}",{only}}}'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def instant_path(query: str) -> str:
    """Return the path of an instant query, below the prefix."""
    return f"{API}/query?query={quote(query, safe='')}"


def range_path(query: str, start_s: float, end_s: float, step_s: float) -> str:
    """Return the path of a range query, below the prefix."""
    return f"{API}/query_range?query={quote(query, safe='')}&start={start_s:.3f}&end={end_s:.3f}&step={step_s:g}"


def parse_answer(page: Page) -> Answer:
    """Return what a query found.

    Raises:
        FetchError: The server refused, failed, or is not one that answers queries; the text says which.
    """
    body = page.json()
    if not isinstance(body, dict) or body.get("status") not in ("success", "error"):
        raise FetchError(_no_api(page))
    if body["status"] == "error" or page.status != 200:
        raise FetchError(f"the query failed ({page.status}): {_words(body.get('error')) or 'no reason given'}")
    data = body.get("data")
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("resultType") not in ("vector", "matrix") or not isinstance(result, list):
        raise FetchError("an answer without series: this is no Prometheus API")
    if len(result) > MAX_SERIES:
        raise FetchError(f"more than {MAX_SERIES:,} series in one answer")
    told = [*_list(body.get("warnings")), *_list(body.get("infos"))]
    if body.get("isPartial") is True:
        told.insert(0, "the answer is partial: some stores did not answer")
    try:
        series = tuple(_series(entry) for entry in result)
    except (KeyError, TypeError, ValueError):
        raise FetchError("series that cannot be read: this is no Prometheus API") from None
    return Answer(series, tuple(dict.fromkeys(filter(None, map(_words, told)))))


def _series(entry: Any) -> Series:
    labels = dict(entry["metric"])
    points = [entry["value"]] if "value" in entry else entry["values"]
    name = str(labels.pop("__name__", "")).replace(":", "_")
    return Series(name, labels, tuple((float(at), float(value)) for at, value in points))


def _no_api(page: Page) -> str:
    if page.status in (401, 403):
        return f"it wants a bearer token ({page.status}); --token-file FILE gives one"
    if 300 <= page.status < 400:
        target = "".join(c for c in page.location if c.isprintable())[:80]
        return f"it redirects to {target or 'nowhere'}; that is not followed, give that address instead"
    if page.status in (404, 405, 501):
        return (
            f"no Prometheus API there ({page.status}); it may be below a path, such as /prometheus with Mimir or "
            "/select/0/prometheus with a VictoriaMetrics cluster"
        )
    if page.status >= 400:
        said = re.sub(r"\s+", " ", page.text).strip()
        return f"it answers {page.status}" + (f": {_words(said)}" if said and said[0] != "<" else "")
    if page.text.lstrip()[:1] == "<":
        return "an HTML page, not the Prometheus API: this is another service"
    return "not the Prometheus API: this is another service; an engine's own address is http://HOST:PORT"


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _words(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return text if len(text) <= _MAX_WORDS else f"{text[: _MAX_WORDS - 1]}…"


def pages_of(series: Iterator[Series] | tuple[Series, ...]) -> dict[float, Exposition]:
    """Return time → the page that a scrape at that time would have been."""
    pages: dict[float, dict[str, list[tuple[Labels, float]]]] = {}
    for one in series:
        for at_s, value in one.points:
            if math.isfinite(at_s):
                pages.setdefault(at_s, {}).setdefault(one.name, []).append((one.labels, value))
    return {at_s: Exposition(page) for at_s, page in sorted(pages.items())}
