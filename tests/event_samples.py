"""Cache events made by hand, an engine that numbers and keeps them, and its sockets."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from kvtop.sources.remote.feed import END
from kvtop.sources.remote.probe import EventEndpoint

pack = msgspec.msgpack.encode


def stored(hashes: list[Any], parent: Any = None, *, size: int = 4, **more: Any) -> dict[str, Any]:
    tokens = list(range(len(hashes) * size))
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return {"type": "BlockStored", **fields, **more}


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: Any, time_s: float = 1.0, rank: int | None = 0) -> bytes:
    return pack([time_s, list(events), rank])


def message(number: int, *events: Any, time_s: float = 1.0) -> list[bytes]:
    return [b"kv", number.to_bytes(8, "big"), payload(*events, time_s=time_s)]


class Engine:
    """Numbered batches, and a replay buffer of the newest ``buffer``."""

    def __init__(self, buffer: int = 1000, time_s: float = 0.0) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.buffer = buffer
        self.time_s = time_s
        self.asked: list[int] = []

    def publish(self, *events: Any) -> list[bytes]:
        self.time_s += 1
        number = len(self.sent)
        frames = message(number, *events, time_s=self.time_s)
        self.sent.append((number, frames[2]))
        return frames

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        self.asked.append(start)
        return iter([entry for entry in self.sent[-self.buffer :] if entry[0] >= start])


class LruEngine:
    """A prefix cache of ``capacity`` blocks, one request at a time, least recently used out first; it tells events.

    Attributes:
        hits: Blocks that requests found.
    """

    def __init__(self, capacity: int) -> None:
        self.hits = 0
        self._capacity = capacity
        self._idle: OrderedDict[int, None] = OrderedDict()

    def serve(self, chain: list[int], size: int = 16) -> list[dict[str, Any]]:
        """Serve a request for a chain of blocks, and return what its engine would publish."""
        found = 0
        while found < len(chain) and chain[found] in self._idle:
            found += 1
        self.hits += found
        for h in chain[:found]:
            del self._idle[h]
        gone = []
        while len(self._idle) + len(chain) > self._capacity:
            gone.append(self._idle.popitem(last=False)[0])
        for h in reversed(chain):  # the tail is the first to go
            self._idle[h] = None
        told = [removed(h, medium="GPU") for h in gone]
        if found < len(chain):
            told.append(stored(chain[found:], chain[found - 1] if found else None, size=size, medium="GPU"))
        return told


def chats(count: int, seed: int, users: int = 24) -> list[list[int]]:
    """Return requests whose chains go on from earlier ones, each with at least one block of its own at the end."""
    rng = random.Random(seed)
    pasts: list[list[int]] = [[] for _ in range(users)]
    system = [rng.getrandbits(63) for _ in range(6)]
    made = []
    for _ in range(count):
        user = min(rng.randrange(users), rng.randrange(users))
        past = pasts[user] if pasts[user] and rng.random() < 0.9 else list(system)
        chain = [*past, *(rng.getrandbits(63) for _ in range(rng.randint(1, 8)))]
        pasts[user] = chain if len(chain) < 50 else []
        made.append(chain)
    return made


class Publisher:
    """An engine's PUB and ROUTER sockets, replies with or without the topic frame."""

    def __init__(self, *, with_topic: bool, end_marker: bool = True, queue: int = 1000) -> None:
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.pub.setsockopt(zmq.SNDHWM, queue)
        self.router.setsockopt(zmq.SNDHWM, 0)
        ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (self.pub, self.router)]
        self.endpoint = EventEndpoint(0, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", "kv")
        self.engine = Engine()
        self._topic, self._end = [b"kv"] if with_topic else [], end_marker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        assert self.pub.poll(10_000)
        self.pub.recv()

    def publish(self, *events: Any) -> None:
        self.pub.send_multipart(self.engine.publish(*events))

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)
        self.context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._over.is_set():
            if not self.router.poll(20):
                continue
            identity, _, start = self.router.recv_multipart()
            for number, body in self.engine.replay(int.from_bytes(start, "big")):
                self.router.send_multipart([identity, b"", *self._topic, number.to_bytes(8, "big"), body])
            if self._end:
                self.router.send_multipart([identity, b"", *([b""] * len(self._topic)), END, b""])
