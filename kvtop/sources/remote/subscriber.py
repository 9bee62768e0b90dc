"""Subscriber: the ZeroMQ sockets of a stream of cache events, read by one thread. Any thread may ask for facts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtop.errors import UserError
from kvtop.model.mirror import MirrorReading
from kvtop.model.remote import EventFacts, PrefixLine
from kvtop.sources.remote.feed import END, BadFraming, Feed, unframe
from kvtop.sources.remote.lookups import Lookup
from kvtop.sources.remote.probe import EventEndpoint
from kvtop.sources.remote.residency import Residency

if TYPE_CHECKING:
    import zmq

#: Messages kept for a reader that falls behind; more are dropped by the sender's side and fetched by replay.
QUEUE: Final = 100_000
MAX_MESSAGE: Final = 64 * 1024 * 1024
#: Seconds without a message after which a replay is over; its end marker may be lost.
REPLAY_QUIET_S: Final = 1.0
#: Seconds and messages one replay may take.
REPLAY_S: Final = 20.0
MAX_REPLAY: Final = 200_000
_TURN_MS: Final = 100
_END_S: Final = 2.0
#: Messages taken before the lock is given to those who ask for facts.
_AT_ONCE: Final = 256
#: Turns in a row that leave messages unread, after which the reader says that it falls behind.
_BEHIND_TURNS: Final = 20
#: Share of the time that working out the prefixes may take: it holds up the reading of events.
_PREFIX_SHARE: Final = 0.05
#: Seconds that who asks for facts waits for the thread.
_PATIENCE_S: Final = 0.5


class Lookups(NamedTuple):
    """What a stream implies of the requests behind it.

    Attributes:
        by_rank: The lookups of each rank, oldest first.
        unknown: Lookups left out, since the beginning of their chain is not known.
        block_size: Tokens a block; 0 when not told.
        top: Most blocks of one rank that were resident on the device at once.
    """

    by_rank: Mapping[int, Sequence[Lookup]]
    unknown: int
    block_size: int
    top: int


class Subscriber:
    """Follows the streams of one engine's ranks.

    Args:
        endpoints: One for each rank.
        replay_quiet_s: Seconds without a message after which a replay is over.
        queue: Messages kept for a reader that falls behind.
        wall: Unix time.

    Raises:
        UserError: An endpoint is not one that can be connected to.
    """

    def __init__(
        self,
        endpoints: Sequence[EventEndpoint],
        *,
        replay_quiet_s: float = REPLAY_QUIET_S,
        queue: int = QUEUE,
        wall: Callable[[], float] = time.time,
    ) -> None:
        import zmq

        self._zmq = zmq
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay_quiet_s = replay_quiet_s
        self._queue = queue
        self._wall = wall
        self._dated_s: float | None = None
        self._lag_s: float | None = None
        self._least_lag_s = float("inf")
        self._residency = Residency()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._restarted = threading.Event()
        self._facts = EventFacts("no events yet")
        self._mirror: MirrorReading | None = None
        self._turns_behind = 0
        self._lines: tuple[PrefixLine, ...] = ()
        self._prefixes_due_s = 0.0
        self._feeds: list[tuple[zmq.Socket[bytes], Feed]] = []
        try:
            for endpoint in endpoints:
                self._feeds.append((self._subscribe(endpoint), self._feed(endpoint)))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"--events {endpoint.endpoint}: cannot be subscribed to: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="kvtop-events", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the sockets. Safe to call twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        elif self._thread.ident is None:  # the thread that closes them was never started
            self._context.destroy(linger=0)

    def server_restarted(self) -> None:
        """Say that the engine was started anew, which its numbering does not always show."""
        self._restarted.set()

    def facts(self) -> EventFacts:
        """Return what the events tell so far."""
        if not self._lock.acquire(timeout=_PATIENCE_S):  # the thread is in a replay
            self._facts = replace(self._facts, state="catching up: partial")
            return self._facts
        try:
            residency, feeds = self._residency, [feed for _, feed in self._feeds]
            self._facts = EventFacts(
                state=self._state(),
                resident=residency.by_medium(),
                distinct=residency.distinct,
                prefixes=self._prefixes(),
                batches=sum(feed.batches for feed in feeds),
                stored=residency.stored,
                removed=residency.removed,
                cleared=residency.cleared,
                gaps=sum(feed.gaps for feed in feeds),
                restarts=sum(feed.restarts for feed in feeds),
                missed=sum(feed.missed for feed in feeds),
                replayed=sum(feed.replayed for feed in feeds),
                behind_s=0.0 if self._lag_s is None else self._lag_s - self._least_lag_s,
                unknown=sum(feed.unknown for feed in feeds),
                broken=sum(feed.broken for feed in feeds),
                drift=residency.drift,
                mean_life_s=residency.mean_life_s,
            )
            return self._facts
        finally:
            self._lock.release()

    def _prefixes(self) -> tuple[PrefixLine, ...]:
        """Return the prefixes, worked out anew only where that takes a small share of the time."""
        began_s = time.monotonic()
        if began_s >= self._prefixes_due_s:
            self._lines = self._residency.prefixes()
            now_s = time.monotonic()
            self._prefixes_due_s = now_s + (now_s - began_s) / _PREFIX_SHARE
        return self._lines

    def mirror(self, sizes: Mapping[int, int], block_id: int | None) -> MirrorReading | None:
        """Return the resident blocks as a map; ``None`` before the first event.

        Args:
            sizes: Blocks of the device by rank, where the engine tells it.
            block_id: A device block of the map of which more is wanted.
        """
        if not self._lock.acquire(timeout=_PATIENCE_S):  # the thread is in a replay: the last map stands
            return self._mirror
        try:
            if self._residency.latest_s is None:
                return None
            made = self._residency.mirror(sizes, self._state(), self._mirror)
            if block_id is not None:
                made = replace(made, block=self._residency.block_at("device", block_id, made.places))
            self._mirror = made
            return made
        finally:
            self._lock.release()

    def lookups(self) -> Lookups:
        """Return what the events imply of the requests, by rank, with the blocks that were resident at most.

        Cost: a copy of the open ones.
        """
        with self._lock:
            residency = self._residency
            told = {rank: found.newest() for rank, found in residency.lookups.items()}
            unknown = sum(found.unknown for found in residency.lookups.values())
            return Lookups(told, unknown, residency.block_size, residency.top)

    def _state(self) -> str:
        if self._turns_behind > _BEHIND_TURNS:
            return "falling behind: partial"
        feeds = [feed for _, feed in self._feeds]
        return _state(feeds, self._residency, sum(feed.batches for feed in feeds))

    def copies(self) -> dict[tuple[int, str, int, int], int]:
        """Return the resident blocks; see ``Residency.copies``."""
        with self._lock:
            return self._residency.copies()

    def _subscribe(self, endpoint: EventEndpoint) -> zmq.Socket[bytes]:
        names, socket = self._zmq, self._context.socket(self._zmq.SUB)
        socket.setsockopt(names.RCVHWM, self._queue)
        socket.setsockopt(names.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(names.LINGER, 0)
        socket.setsockopt(names.SUBSCRIBE, endpoint.topic.encode())
        socket.connect(endpoint.endpoint)
        return socket

    def _feed(self, endpoint: EventEndpoint) -> Feed:
        def replay(start: int) -> Iterator[tuple[int, bytes]]:
            return self._replay(endpoint.replay, start) if endpoint.replay else iter(())

        return Feed(self._residency, endpoint.rank, replay)

    def _replay(self, address: str, start: int) -> Iterator[tuple[int, bytes]]:
        """Ask for the buffered batches from ``start`` on, over a socket of its own, and yield them."""
        names = self._zmq
        with self._context.socket(names.DEALER) as socket:
            socket.setsockopt(names.RCVHWM, 0)
            socket.setsockopt(names.MAXMSGSIZE, MAX_MESSAGE)
            socket.setsockopt(names.LINGER, 0)
            socket.connect(address)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            end_s = time.monotonic() + REPLAY_S
            for _ in range(MAX_REPLAY):
                if time.monotonic() > end_s or not self._wait_for(socket, self._replay_quiet_s):
                    return
                try:
                    number, payload = unframe(socket.recv_multipart())
                except BadFraming:
                    continue
                if number == END:
                    return
                yield int.from_bytes(number, "big"), payload

    def _wait_for(self, socket: zmq.Socket[bytes], quiet_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
        end_s = clock() + quiet_s
        while not self._stop.is_set():
            left_ms = int((end_s - clock()) * 1000)
            if socket.poll(max(0, min(_TURN_MS, left_ms))):
                return True
            if left_ms <= 0:
                return False
        return False

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for socket, feed in self._feeds:
            poller.register(socket, self._zmq.POLLIN)
            with self._lock:
                feed.join()
        seen_restarts = 0
        while not self._stop.is_set():
            ready = dict(poller.poll(_TURN_MS))
            with self._lock:
                emptied = [self._drain(socket, feed) for socket, feed in self._feeds if socket in ready]
                self._turns_behind = 0 if all(emptied) else self._turns_behind + 1
                self._note_lag()
                restarts = sum(feed.restarts for _, feed in self._feeds)
                if self._restarted.is_set():
                    self._restarted.clear()
                    if restarts == seen_restarts:  # otherwise the numbering has shown it already
                        for _, feed in self._feeds:
                            feed.begin_again()
                    seen_restarts = sum(feed.restarts for _, feed in self._feeds)
        self._context.destroy(linger=0)

    def _note_lag(self) -> None:
        """Note how late the newest batch is, against the best so far: the engine's clock may differ from ours."""
        latest_s = self._residency.latest_s
        if latest_s is not None and latest_s != self._dated_s:
            self._dated_s, self._lag_s = latest_s, self._wall() - latest_s
            self._least_lag_s = min(self._least_lag_s, self._lag_s)

    def _drain(self, socket: zmq.Socket[bytes], feed: Feed) -> bool:
        """Take the messages that wait, up to a bound; false when it was reached."""
        for _ in range(_AT_ONCE):
            try:
                frames = socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return True
            feed.take(frames)
        return False


def _state(feeds: Sequence[Feed], residency: Residency, batches: int) -> str:
    troubles = {feed.trouble for feed in feeds} - {None}
    if residency.is_full:
        return "too many blocks: partial"
    for trouble in ("joined late", "gap", "unreadable batch"):
        if trouble in troubles:
            return f"{trouble}: partial"
    return "complete" if batches else "no events yet"
