"""PrometheusFleet: all engines that a Prometheus-compatible server scrapes, with three queries a reading.

One row for each engine; one of them at a time opened in full, with its past from a range query.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from kvtop.errors import SourceError, UserError
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import FLEET, EngineRow, PastRows, RemoteFacts
from kvtop.sources.remote.capabilities import NOT_OFFERED, capabilities_of
from kvtop.sources.remote.dialects import CounterMemory, recognise
from kvtop.sources.remote.exposition import Exposition, Labels
from kvtop.sources.remote.fetch import Fetcher, FetchError, Remote
from kvtop.sources.remote.fleet_queries import (
    DOWN_QUERY,
    Answer,
    Series,
    ages_query,
    instant_path,
    pages_of,
    parse_answer,
    past_query,
    range_path,
    values_query,
)
from kvtop.sources.remote.polling import Poller
from kvtop.sources.remote.source import split_url

SCHEME: Final = "prometheus+"
READ_ONLY: Final = "read only: engines are looked at through Prometheus; attach to one of them to act on it"
_EVENTS: Final = "not in Prometheus; kvtop attach http://HOST:PORT to the engine itself follows them"
#: Seconds between two readings: scrapes are rarely closer together.
EVERY_S: Final = 5.0
#: Seconds a query may take, and bytes its answer may have.
_ANSWER_S: Final = 15.0
_MAX_BODY: Final = 64 * 1024 * 1024
#: What an opened engine's past goes back, and seconds between its points.
PAST_S: Final = 1800.0
PAST_STEP_S: Final = 15.0
#: Seconds that a target that is gone altogether is still told.
FORGET_S: Final = 900.0
#: Labels that tell one scraped target from another; all others are the engine's own.
_IDENTITY: Final = ("instance", "job", "namespace", "cluster")

#: Values of ``_IDENTITY``.
_Id = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Scraped:
    """What is known of one target.

    Attributes:
        kind: What it is.
        rows, notes: What its newest page tells.
        age_s: Seconds since it was scraped; ``None`` when not told.
        trouble: Why there is no newest page.
        since_s: When that was first so, by the server's clock.
    """

    kind: str
    rows: tuple[EngineRow, ...]
    notes: tuple[str, ...] = ()
    age_s: float | None = None
    trouble: str | None = None
    since_s: float = 0.0


class PrometheusFleet:
    """Reads every engine that one server scrapes. A thread of its own starts with the first reading.

    Args:
        url: ``http(s)://HOST:PORT``, with a path where the API is below one.
        token_file, ca_file, insecure: See ``Remote``.
        every_s: Seconds between two readings.
        step_s: Seconds between two points of an opened engine's past.

    Attributes:
        name: The server's host and port.
        queries: Queries asked so far.

    Raises:
        UserError: The address or a file cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None = None,
        ca_file: str | None = None,
        insecure: bool = False,
        every_s: float = EVERY_S,
        step_s: float = PAST_STEP_S,
    ) -> None:
        base, _ = split_url(url)
        if urlsplit(url).query:
            raise UserError(f"{SCHEME}{url}: nothing may follow a ?")
        self.name = urlsplit(base).netloc
        self.missing: Mapping[str, str] = {
            "block-map": NOT_OFFERED,
            "sequences": NOT_OFFERED,
            "events": NOT_OFFERED,
            "host-tier": NOT_OFFERED,
            "operations": READ_ONLY,
        }
        self.queries = 0
        self._step_s = step_s
        self._address = base + urlsplit(url).path.rstrip("/")
        self._prefix = urlsplit(url).path.rstrip("/")
        remote = Remote(base, token_file, ca_file, insecure)
        self._fetcher = Fetcher(remote, answer_s=_ANSWER_S, max_body=_MAX_BODY)
        self._counters: dict[_Id, CounterMemory] = {}
        self._known: dict[_Id, _Scraped] = {}
        self._lock = threading.Lock()
        self._opened: str | None = None
        self._full: dict[str, RemoteFacts] = {}
        self._who: dict[str, _Id] = {}
        self._past: tuple[str, tuple[PastRows, ...]] | None = None
        self._poller = Poller(self.ask, release=self._fetcher.close, every_s=every_s)
        self._is_started = False

    @property
    def opened(self) -> str | None:
        """The engine that is shown in full; ``None`` for the table of all."""
        return self._opened

    def open(self, target: str | None) -> None:
        """Show one engine in full from the next reading on, or all of them again; a lost one is not opened."""
        with self._lock:
            facts = self._full.get(target) if target is not None else None
            self._opened = target if facts is not None and facts.rows[0].trouble is None else None
            self._past = None
        if self._opened is not None:
            self._poller.hurry()

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return a row for each engine, or the opened one's facts.

        Raises:
            SourceError: The last reading failed, or there was none within ``timeout_s``.
        """
        if not self._is_started:
            self._is_started = True
            self._poller.start()
        table = self._poller.newest(timeout_s)
        with self._lock:
            facts = self._full.get(self._opened) if self._opened is not None else None
        if facts is None:
            return RemoteObservation(table)
        if facts.rows and facts.rows[0].trouble is not None:
            raise SourceError(facts.rows[0].trouble)
        return RemoteObservation(replace(facts, age_s=facts.age_s + table.age_s))

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        self._poller.close()
        if not self._is_started:
            self._fetcher.close()

    # -- one reading ---------------------------------------------------------------------------------

    def ask(self) -> RemoteFacts:
        """Read once and return the table of all engines.

        Raises:
            FetchError: The server gave no usable answer, or scrapes no engine that kvtop knows.
        """
        values = self._query(instant_path(values_query()))
        now_s = max((at_s for one in values.series for at_s, _ in one.points), default=0.0)
        ages, age_notes = self._try(instant_path(ages_query()), "ages are unknown")
        down, down_notes = self._try(instant_path(DOWN_QUERY), "lost targets are unknown")
        if self._opened is not None and (self._past is None or self._past[0] != self._opened):
            self._read_past(self._opened, now_s)
        self._take(values.series, ages)
        self._note_lost({_who(one.labels) for one in values.series}, {_who(one.labels) for one in down}, now_s)
        if not self._known:
            raise FetchError(
                "it answers, but has no metric of an inference engine that kvtop knows; "
                "do its scrape jobs include the engines, and keep their names?"
            )
        named = _names(self._known)
        self._publish(named)
        notes = tuple(dict.fromkeys((*values.warnings, *age_notes, *down_notes)))
        rows = [row for who in sorted(named, key=named.__getitem__) for row in _told(self._known[who], named[who])]
        return RemoteFacts(FLEET, None, self._address, tuple(rows), notes=notes)

    def _query(self, path: str) -> Answer:
        self.queries += 1
        page = self._fetcher.get(self._prefix + path)
        if page.status in (401, 403) and self._fetcher.renew_token():
            page = self._fetcher.get(self._prefix + path)
        return parse_answer(page)

    def _try(self, path: str, otherwise: str) -> tuple[tuple[Series, ...], tuple[str, ...]]:
        """Return what a query found that can be done without, or nothing and a note."""
        try:
            answer = self._query(path)
        except FetchError as error:
            return (), (f"{otherwise}: {error}",)
        return answer.series, answer.warnings

    def _take(self, values: tuple[Series, ...], ages: tuple[Series, ...]) -> None:
        fresh: dict[_Id, dict[str, list[tuple[Labels, float]]]] = {}
        for one in values:
            fresh.setdefault(_who(one.labels), {}).setdefault(one.name, []).append((one.labels, one.points[-1][1]))
        sampled: dict[_Id, float] = {}
        for one in ages:
            at_s, newest_s = one.points[-1]
            who = _who(one.labels)
            sampled[who] = min(sampled.get(who, float("inf")), max(0.0, at_s - newest_s))
        for who, page in fresh.items():
            found = self._scraped(who, Exposition(page), sampled.get(who))
            if found is not None:
                self._known[who] = found

    def _note_lost(self, fresh: Set[_Id], down: Set[_Id], now_s: float) -> None:
        """Mark the engines without samples; a target that is down counts as one where its job has engines."""
        jobs = {who[1] for who in self._known}
        for who in (self._known.keys() | {who for who in down if who[1] in jobs}) - fresh:
            before = self._known.get(who, _Scraped("", ()))
            since_s = before.since_s if before.trouble else now_s
            if who in down:
                trouble = "Prometheus cannot scrape it (up is 0)"
            elif now_s - since_s > FORGET_S:
                del self._known[who]
                continue
            else:
                trouble = "Prometheus has no samples of it any more"
            self._known[who] = _Scraped(before.kind, (), trouble=trouble, since_s=since_s)

    def _scraped(self, who: _Id, page: Exposition, age_s: float | None) -> _Scraped | None:
        dialect = recognise(page)
        told = dialect.read(page) if dialect else None
        if dialect is None or told is None or not told.rows:
            return None
        rows = self._counters.setdefault(who, CounterMemory()).correct(told.rows)
        return _Scraped(dialect.kind, rows, told.notes, age_s)

    # -- one engine in full --------------------------------------------------------------------------

    def _read_past(self, name: str, now_s: float) -> None:
        """Ask for the past of one engine; without it, the sparklines begin with the present."""
        who = self._who[name]
        counters = CounterMemory()
        found: list[PastRows] = []
        labels = {label: value for label, value in zip(_IDENTITY, who, strict=True) if value}
        path = range_path(past_query(labels), now_s - PAST_S, now_s, self._step_s)
        for at_s, page in pages_of(self._try(path, "")[0]).items():
            dialect = recognise(page)
            if dialect is not None and at_s < now_s:
                found.append(PastRows(now_s - at_s, counters.correct(dialect.read(page).rows)))
        if found:  # otherwise it is asked for again: the engine may be younger than a step
            self._counters[who] = counters  # so that its totals go on from the past's
            self._past = (name, tuple(found))

    def _publish(self, named: Mapping[_Id, str]) -> None:
        full = {}
        for who, name in named.items():
            scraped = self._known[who]
            rows = scraped.rows or _told(scraped, name)
            full[name] = RemoteFacts(
                scraped.kind or "an engine",
                None,
                f"{name} by {self.name}",
                tuple(rows),
                self._counters[who].restarts if who in self._counters else 0,
                capabilities_of(scraped.kind, scraped.rows, events_reason=_EVENTS, has_events=False),
                (*scraped.notes, f"as {self.name} scraped it"),
                age_s=scraped.age_s or 0.0,
            )
        if self._past is not None and self._past[0] in full:
            name, points = self._past
            full[name] = replace(full[name], past=points)
        with self._lock:
            self._full, self._who = full, {name: who for who, name in named.items()}


def _who(labels: Mapping[str, str]) -> _Id:
    return tuple(labels.get(label, "") for label in _IDENTITY)


def _names(known: Mapping[_Id, object]) -> dict[_Id, str]:
    """Return a name for each target: its instance, with as many of the other labels as tell it from the others."""
    named: dict[_Id, str] = {}
    for depth in range(1, len(_IDENTITY) + 1):
        tried: dict[str, list[_Id]] = {}
        for who in known.keys() - named.keys():
            parts = [part for part in (*reversed(who[1:depth]), who[0]) if part]
            tried.setdefault("/".join(parts) or "no instance", []).append(who)
        is_last = depth == len(_IDENTITY)
        named |= {whose[0]: name for name, whose in tried.items() if len(whose) == 1 or is_last}
    return named


def _told(scraped: _Scraped, name: str) -> list[EngineRow]:
    """Return a target's rows of the table."""
    if scraped.trouble is not None:
        return [EngineRow(target=name, kind=scraped.kind, trouble=scraped.trouble, is_up=False)]
    return [replace(row, target=name, kind=scraped.kind, age_s=scraped.age_s) for row in scraped.rows]
