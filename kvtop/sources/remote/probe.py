"""Probe: finds out what a server is, and turns its pages into facts. No threads; whoever polls owns the time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from kvtop.model.remote import EngineRow, EventFacts, RemoteFacts, SlotRow
from kvtop.sources.remote.capabilities import capabilities_of
from kvtop.sources.remote.dialects import CounterMemory, recognise
from kvtop.sources.remote.exposition import NotMetrics, parse
from kvtop.sources.remote.fetch import FetchError, Page
from kvtop.sources.remote.offers import Offers, ask, ask_sleep_mode, find_offers

#: Where metrics are looked for. The first is asked first although few have it: with that one engine, the second is a
#: list that is emptied by whoever reads it.
METRICS_PATHS: Final = ("/prometheus/metrics", "/metrics")

#: Engines of one server that are read, at most.
MAX_ROWS: Final = 1024
#: Readings in which something that is slow to tell is asked for.
_SLOW_TRIES: Final = 5
_VERSION: Final = re.compile(r"[0-9A-Za-z.+_-]{1,40}")


class Pages(Protocol):
    """Where pages come from; ``Fetcher`` is one."""

    def get(self, path: str, *, answer_s: float | None = None) -> Page:
        """Return the answer to ``GET path``."""

    def post(self, path: str, *, answer_s: float | None = None) -> Page:
        """Return the answer to ``POST path``."""

    def renew_token(self) -> bool:
        """Read the token again; true when it has changed."""


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """One rank's stream of cache events, as a server or the user tells it.

    Attributes:
        rank: Data-parallel rank.
        endpoint: ZeroMQ address to subscribe to.
        replay: Address that replays; ``None`` when there is none.
        topic: Prefix to subscribe to.
    """

    rank: int
    endpoint: str
    replay: str | None = None
    topic: str = ""


class Probe:
    """Reads one server again and again; keeps what does not change, and its counters over restarts.

    Args:
        pages: The server.
        address: Its address, for people.
        path: Where its metrics are; ``None`` looks at the usual places.
        may_operate: Whether whoever looks may also act.

    Attributes:
        endpoints: Streams of cache events that the server told of.
    """

    def __init__(self, pages: Pages, address: str, path: str | None = None, *, may_operate: bool = False) -> None:
        self._pages = pages
        self._may_operate = may_operate
        self._offers = Offers()
        self._readings = 0
        self._is_sleep_mode: bool | None = None
        self._slots: tuple[SlotRow, ...] = ()
        self._address = address
        self._asked_path = path
        self._path = path
        self._kind: str | None = None
        self._version: str | None = None
        self._events_reason: str | None = None
        self._counters = CounterMemory()
        self._slots_reason: str | None = None
        self.endpoints: tuple[EventEndpoint, ...] = ()

    def read(self, events: EventFacts | None = None) -> RemoteFacts:
        """Return what the server tells.

        Args:
            events: What its stream of events tells, to be joined with it.

        Raises:
            FetchError: There is no answer, or it is not an engine that kvtop knows; the text says which.
        """
        path, page = self._metrics_page()
        try:
            exposition = parse(page.text)
        except NotMetrics as error:
            self._path = self._asked_path
            raise FetchError(f"{path}: {_other_service(page) or error}") from None
        dialect = recognise(exposition)
        if dialect is None:
            self._path = self._asked_path
            some = ", ".join(sorted(exposition.names)[:3])
            raise FetchError(f"{path}: metrics of no inference engine that kvtop knows (such as {some})")
        self._path = path
        if dialect.kind != self._kind:
            self._learn(dialect.kind)
        told = dialect.read(exposition)
        if not told.rows:
            raise FetchError(f"{path}: {dialect.kind}, which tells nothing of its cache yet")
        rows, notes = told.rows[:MAX_ROWS], told.notes
        if len(told.rows) > MAX_ROWS:
            notes = (*notes, f"it tells of {len(told.rows):,} engines: the first {MAX_ROWS:,} are shown")
        if dialect.kind == "llama.cpp":
            rows, notes = (self._with_slots(rows[0]),), notes
        restarts_before = self._counters.restarts
        rows = self._counters.correct(rows)
        if self._counters.restarts > restarts_before:
            self._learn(dialect.kind)
        self._learn_slowly()
        if self._counters.restarts:
            notes = (*notes, f"started anew {self._counters.restarts}×: its counters fell; totals go on from there")
        table = capabilities_of(
            dialect.kind,
            rows,
            events_reason=self._events_reason,
            has_events=events is not None,
            offers=self._offers.reasons,
            may_operate=self._may_operate,
        )
        if dialect.kind == "llama.cpp" and self._slots_reason:
            notes = (*notes, self._slots_reason)
        return RemoteFacts(
            dialect.kind,
            self._version,
            self._address,
            rows,
            self._counters.restarts,
            table,
            notes,
            events,
            states=self._states(),
            slots=self._slots,
        )

    def _metrics_page(self) -> tuple[str, Page]:
        """Return the metrics page and its path, from where it was the last time or the first place that has one."""
        refusal: tuple[str, Page] | None = None
        for path in (self._path,) if self._path is not None else METRICS_PATHS:
            page = self._pages.get(path)
            if page.status in (401, 403) and self._pages.renew_token():
                page = self._pages.get(path)
            if page.status == 200 and not (path == METRICS_PATHS[0] and _is_json_or_html(page)):
                return path, page
            if refusal is None or refusal[1].status in (404, 200):
                refusal = path, page
        assert refusal is not None
        self._path = self._asked_path
        path, page = refusal
        raise FetchError(f"{path}: {_status_reason(page)}")

    def _learn(self, kind: str) -> None:
        """Ask once what a page of metrics does not tell. None of it is needed, so failures are not reported."""
        self._kind = kind
        self._version = self._ask_version(kind)
        self.endpoints = ()
        self._events_reason = None
        if kind == "vLLM":
            self._learn_vllm_events()
        elif kind == "SGLang":
            info = self._json("/server_info")
            self.endpoints = _sglang_endpoints(info.get("kv_events"), self._host)
        self._readings, self._is_sleep_mode = 0, None
        self._ask_offers(kind)

    def _ask_offers(self, kind: str) -> None:
        self._offers = find_offers(kind, self._version, self._pages, may_operate=self._may_operate)

    def _learn_slowly(self) -> None:
        """Ask what is slow to be told, or was not told in time: never before the first facts, a few times at most."""
        self._readings += 1
        if not self._offers.is_sure and 1 < self._readings <= 1 + _SLOW_TRIES:
            self._ask_offers(self._kind or "")
        is_wanted = self._may_operate and "sleeping" in self._offers.state_paths
        if is_wanted and self._is_sleep_mode is None and 1 < self._readings <= 1 + _SLOW_TRIES:
            self._is_sleep_mode = ask_sleep_mode(self._pages)
            self._offers = self._offers.with_sleep_mode(self._is_sleep_mode)

    def _states(self) -> tuple[tuple[str, bool], ...]:
        """Ask in which states the engine is, where it has said before that it tells."""
        found = []
        for state, (path, key) in self._offers.state_paths.items():
            told = ask(self._pages, path)
            if isinstance(told, dict) and isinstance(told.get(key), bool):
                found.append((state, told[key]))
        return tuple(found)

    def _learn_vllm_events(self) -> None:
        sources = self._json("/kv_event_sources")
        found = []
        for rank, config in sources.items():
            if not (rank.isascii() and rank.isdigit() and isinstance(config, Mapping)):
                continue
            if not config.get("enable_kv_cache_events") or config.get("publisher") != "zmq":
                self._events_reason = "needs --kv-events-config on the server: its events are off"
                continue
            endpoint = _reachable(config.get("endpoint"), self._host)
            if endpoint is None:
                self._events_reason = "its publisher connects instead of binding: give it an endpoint with *"
                continue
            topic = config.get("topic")
            replay = _reachable(config.get("replay_endpoint"), self._host)
            found.append(EventEndpoint(int(rank), endpoint, replay, topic if isinstance(topic, str) else ""))
        self.endpoints = tuple(found)

    @property
    def _host(self) -> str:
        host = urlsplit(self._address).hostname or "127.0.0.1"
        return f"[{host}]" if ":" in host else host

    def _ask_version(self, kind: str) -> str | None:
        path = {"vLLM": "/version", "SGLang": "/server_info", "TensorRT-LLM": "/version", "TGI": "/info"}.get(kind)
        version = self._json(path).get("version") if path else None
        return version if isinstance(version, str) and _VERSION.fullmatch(version) else None

    def _json(self, path: str) -> Mapping[str, Any]:
        found = ask(self._pages, path)
        return found if isinstance(found, dict) else {}

    def _with_slots(self, row: EngineRow) -> EngineRow:
        """Return the row with the occupancy of llama.cpp's slots, which its newer metrics do not tell."""
        self._slots = ()
        try:
            page = self._pages.get("/slots")
        except FetchError as error:
            self._slots_reason = f"/slots: {error}"
            return row
        slots = page.json() if page.status == 200 else None
        if not isinstance(slots, list) or not slots or not all(isinstance(slot, dict) for slot in slots):
            self._slots_reason = f"/slots answers {page.status}" if page.status != 200 else "/slots: no list of slots"
            return row
        self._slots_reason = None
        self._slots = _slot_rows(slots)
        sizes = [slot.get("n_ctx") for slot in slots]
        # A slot that has had no task has no such key: nothing is in it.
        held = [slot.get("n_prompt_tokens", 0) for slot in slots]
        if not all(isinstance(n, int) and n > 0 for n in sizes) or not all(isinstance(n, int) and n >= 0 for n in held):
            return row
        total, used = sum(sizes), sum(held)
        ratio = min(1.0, used / total) if row.usage_ratio is None else row.usage_ratio
        return replace(row, usage_ratio=ratio, total_tokens=total, used_tokens=used, free_tokens=max(0, total - used))


def _slot_rows(slots: list[dict[str, Any]]) -> tuple[SlotRow, ...]:
    """Return the slots; none when any of them cannot be understood."""
    rows = []
    for slot in slots:
        number, size, held = slot.get("id"), slot.get("n_ctx"), slot.get("n_prompt_tokens", 0)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (number, size, held)):
            return ()
        rows.append(SlotRow(slot["id"], slot["n_ctx"], held, slot.get("is_processing") is True))
    return tuple(rows)


def _reachable(endpoint: object, host: str) -> str | None:
    """Return the address to connect to for one that a publisher bound; ``None`` if it did not bind a TCP port."""
    if not isinstance(endpoint, str):
        return None
    match = re.fullmatch(r"tcp://(.+):(\d{1,5})", endpoint)
    if match is None or not ("*" in match[1] or "::" in match[1]):
        return None
    return f"tcp://{host}:{match[2]}"


def _sglang_endpoints(told: object, host: str) -> tuple[EventEndpoint, ...]:
    if not isinstance(told, Mapping) or told.get("publisher") != "zmq":
        return ()
    base, replay = told.get("endpoint_port_base"), told.get("replay_endpoint_port_base")
    ranks, topic = told.get("dp_size", 1), told.get("topic", "")
    if not isinstance(base, int) or not isinstance(ranks, int) or not 0 < ranks <= 1024:
        return ()
    return tuple(
        EventEndpoint(
            rank,
            f"tcp://{host}:{base + rank}",
            f"tcp://{host}:{replay + rank}" if isinstance(replay, int) else None,
            topic if isinstance(topic, str) else "",
        )
        for rank in range(ranks)
    )


def _is_json_or_html(page: Page) -> bool:
    return page.text.lstrip()[:1] in ("[", "{", "<")


def _other_service(page: Page) -> str | None:
    start = page.text.lstrip()[:1]
    if start == "<":
        return "an HTML page, not metrics: this is another service"
    if start in ("[", "{"):
        return "JSON, not metrics: this is another service, or TensorRT-LLM without return_perf_metrics"
    return "an empty page" if not page.text.strip() else None


def _status_reason(page: Page) -> str:
    if page.status in (401, 403):
        return f"it wants a bearer token ({page.status}); --token-file FILE gives one"
    if 300 <= page.status < 400:
        target = "".join(c for c in page.location if c.isprintable())[:80]
        return f"it redirects to {target or 'nowhere'}; that is not followed, attach to that address instead"
    if page.status in (404, 501):
        return (
            f"no metrics there ({page.status}); SGLang needs --enable-metrics, llama.cpp needs --metrics, "
            "TensorRT-LLM needs return_perf_metrics"
        )
    if page.status == 200:
        return _other_service(page) or "not metrics"
    return f"it answers {page.status}"
