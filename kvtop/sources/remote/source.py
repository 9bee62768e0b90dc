"""RemoteSource: an engine over the network, from its metrics and, where there are any, its cache events."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvtop.errors import UserError
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import RemoteFacts
from kvtop.model.what_if import WhatIf
from kvtop.sources.remote.capabilities import NOT_OFFERED, READ_ONLY
from kvtop.sources.remote.estimator import Estimator
from kvtop.sources.remote.fetch import Fetcher, Remote
from kvtop.sources.remote.polling import EVERY_S, Poller
from kvtop.sources.remote.probe import EventEndpoint, Probe
from kvtop.sources.remote.subscriber import Subscriber

#: Seconds between two looks whether the events that are buffered have been taken over.
_SETTLE_S: Final = 0.1


class RemoteSource:
    """Reads one server. Its threads start with the first reading, and end with ``close``.

    Args:
        url: ``http(s)://HOST:PORT``, with a path when its metrics are in an unusual place.
        token_file, ca_file, insecure: See ``Remote``.
        events: Streams of cache events; without them, those that the server tells of are followed.
        may_operate: Whether whoever looks may also act.
        every_s: Seconds between two readings.

    Attributes:
        name: The server's host and port.
        remote: How it is reached.
        missing: What it does not offer; the table of ``RemoteFacts.capabilities`` tells more.

    Raises:
        UserError: The address, a file or an endpoint cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None = None,
        ca_file: str | None = None,
        insecure: bool = False,
        events: Sequence[EventEndpoint] = (),
        may_operate: bool = False,
        every_s: float = EVERY_S,
    ) -> None:
        base, path = split_url(url)
        self.name = urlsplit(base).netloc
        self.missing: Mapping[str, str] = {
            "block-map": NOT_OFFERED,
            "sequences": NOT_OFFERED,
            "events": NOT_OFFERED,
            "host-tier": NOT_OFFERED,
        }
        if not may_operate:
            self.missing = {**self.missing, "operations": READ_ONLY}
        self.remote = Remote(base, token_file, ca_file, insecure)
        self._fetcher = Fetcher(self.remote)
        self._probe = Probe(self._fetcher, base, path, may_operate=may_operate)
        self._subscriber = Subscriber(events) if events else None
        if self._subscriber is not None:
            self._subscriber.start()
        self._is_told = not events
        self._restarts = 0
        self._facts: RemoteFacts | None = None
        self._joined = (0.0, 0.0)
        self._estimator = Estimator(self._estimate)
        self._poller = Poller(self._ask, release=self._release, every_s=every_s)
        self._is_started = False
        self._starting = threading.Lock()

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return the newest facts, and with cache events their mirror, of which a block may be asked for.

        Raises:
            SourceError: The last reading failed, or there was none within ``timeout_s``.
        """
        self._start()
        facts, subscriber = self._poller.newest(timeout_s), self._subscriber
        if subscriber is None:
            return RemoteObservation(facts)
        sizes = {int(row.engine): row.total_blocks for row in facts.rows if row.total_blocks and row.engine.isdecimal()}
        return RemoteObservation(facts, subscriber.mirror(sizes, focus.block_id))

    def settle(self, timeout_s: float) -> None:
        """Wait until what a first reading does not tell is known: buffered events, and answers that are slow.

        Raises:
            SourceError: The server cannot be read.
        """
        until_s = time.monotonic() + timeout_s
        self.read(Focus(), timeout_s)
        while (left_s := until_s - time.monotonic()) > 0:
            facts = self.facts_after(time.monotonic(), left_s)
            if facts is None or self._subscriber is None:
                return
            if facts.events is not None and facts.events.batches and not facts.events.state.startswith("catching up"):
                return
            time.sleep(min(_SETTLE_S, left_s))

    def facts_after(self, at_s: float, timeout_s: float) -> RemoteFacts | None:
        """Return facts that were read at ``at_s``, monotonic, or later; ``None`` when there are none in time."""
        self._start()
        return self._poller.after(at_s, timeout_s)

    def what_if(self) -> WhatIf | None:
        """Return the newest estimates of what other caches would have made of its traffic, and have newer ones made.

        ``None`` before the first, and without cache events.
        """
        return self._estimator.newest() if self._subscriber is not None else None

    def _estimate(self) -> WhatIf | None:
        subscriber, facts = self._subscriber, self._facts
        if subscriber is None or facts is None:
            return None
        from kvtop.sources.remote.what_if import what_if

        seen = subscriber.lookups()
        told = [row.total_blocks for row in facts.rows if row.total_blocks]
        held = [row.used_blocks or 0 for row in facts.rows]
        capacity = max(told, default=seen.top)
        if not capacity:
            return None
        made = what_if(
            seen.by_rank,
            capacity,
            min(capacity, round(sum(held) / len(held))),
            block_size=seen.block_size,
            is_told=bool(told),
        )
        queries, hits = (after - before for after, before in zip(_told_lookups(facts), self._joined, strict=True))
        traffic = replace(made.traffic, unknown=seen.unknown)
        # What was replayed may be from before the counters were first read.
        is_since = facts.events is not None and not facts.events.replayed
        is_told = is_since and queries > 0 and all(row.hit_unit == "tokens" for row in facts.rows)
        return replace(
            made, traffic=traffic, told_queries=queries if is_told else None, told_hits=hits if is_told else None
        )

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        self._poller.close()
        self._estimator.close()
        if not self._is_started:
            self._release()

    def _start(self) -> None:
        with self._starting:
            if not self._is_started:
                self._is_started = True
                self._poller.start()

    def _ask(self) -> RemoteFacts:
        facts = self._probe.read(self._subscriber.facts() if self._subscriber else None)
        if self._is_told and self._subscriber is None and self._probe.endpoints:
            self._subscriber = Subscriber(self._probe.endpoints)
            self._subscriber.start()
        if self._facts is None:
            self._joined = _told_lookups(facts)
        self._facts = facts
        if facts.restarts > self._restarts:
            self._restarts = facts.restarts
            if self._subscriber is not None:
                self._subscriber.server_restarted()
        return facts

    def _release(self) -> None:
        self._fetcher.close()
        if self._subscriber is not None:
            self._subscriber.close()


def _told_lookups(facts: RemoteFacts) -> tuple[float, float]:
    """Return the looked-up and hit tokens that all engines behind an address have counted."""
    return sum(row.queries or 0.0 for row in facts.rows), sum(row.hits or 0.0 for row in facts.rows)


def split_url(url: str) -> tuple[str, str | None]:
    """Return (``http(s)://HOST:PORT``, path of the metrics or ``None``).

    Raises:
        UserError: It is no such address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise UserError(f"{url}: an address is http(s)://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise UserError(f"{parts.scheme}://…@{parts.hostname}: no user in an address; --token-file FILE gives a token")
    if parts.fragment:
        raise UserError(f"{url}: nothing may follow a #")
    if port == 0:
        raise UserError(f"{url}: the port is from 1 to 65535")
    path = parts.path if parts.path != "/" else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}", (path or "/metrics") + query if path or query else None


class EventOptions(msgspec.Struct, frozen=True):
    """Streams of cache events as the user gives them.

    Attributes:
        events: Addresses to subscribe to, one for each rank, rank 0 first.
        replays: Addresses that replay, in the same order; may be fewer.
        topic: Prefix to subscribe to.
    """

    events: tuple[str, ...] = ()
    replays: tuple[str, ...] = ()
    topic: str = ""

    def endpoints(self) -> tuple[EventEndpoint, ...]:
        """Return one endpoint for each rank.

        Raises:
            UserError: There are more replay addresses than streams.
        """
        if len(self.replays) > len(self.events):
            raise UserError(f"--replay: {len(self.replays)} of them, but {len(self.events)} --events")
        replays = (*self.replays, *[None] * (len(self.events) - len(self.replays)))
        return tuple(
            EventEndpoint(rank, endpoint, replay, self.topic)
            for rank, (endpoint, replay) in enumerate(zip(self.events, replays, strict=True))
        )
