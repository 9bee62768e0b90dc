"""How fast cache events are taken in over real sockets, against what a busy server emits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from kvtop.bench.figures import Figure, figure, ratio_figure
from kvtop.errors import SourceError
from kvtop.sources.remote.probe import EventEndpoint
from kvtop.sources.remote.subscriber import Subscriber

#: A busy server: tokens it computes a second, prompts and output together, in blocks that are each stored and removed.
BUSY_TOKENS_PER_S: Final = 50_000
BLOCK_TOKENS: Final = 16
BUSY_BLOCKS_PER_S: Final = 2 * BUSY_TOKENS_PER_S / BLOCK_TOKENS
#: Of the blocks of a batch, those that one request's prompt stores at once; the others are output, one a request.
_PROMPT_BLOCKS: Final = 16
_CHAINS: Final = 256
_LONGEST: Final = 400
_PATIENCE_S: Final = 120.0
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class EventSizes:
    """How much is measured: batches, stores in each, blocks of the engine's pool, and the seed of the traffic."""

    batches: int = 2000
    stores: int = 16
    num_blocks: int = 65_536
    seed: int = 1


def measure_events(rounds: int, sizes: EventSizes) -> Iterator[Figure]:
    """Yield block events a second taken in, and how many times that is what a busy server emits.

    Raises:
        SourceError: Events were lost on the way.
    """
    payloads, blocks = traffic(sizes)
    runs = [_take_in(payloads, blocks) for _ in range(rounds)]
    rates = [blocks / run.wall_s for run in runs]
    busy = [BUSY_BLOCKS_PER_S] * rounds
    yield figure("events", "stored and removed blocks, over sockets", "blocks/s", rates)
    yield figure("events", f"a server of {BUSY_TOKENS_PER_S:,} tokens/s in blocks of {BLOCK_TOKENS}", "blocks/s", busy)
    yield ratio_figure("events", "taken in ÷ emitted", rates, busy, at_least=1.0)
    # Of one core, sender and sockets included: that does not depend on what else the machine does.
    shares = [BUSY_BLOCKS_PER_S * run.cpu_s / blocks for run in runs]
    yield figure("events", "processor that a busy server's events take", "cores", shares)


def traffic(sizes: EventSizes) -> tuple[list[bytes], int]:
    """Return batches as a server with a full pool publishes them, and the blocks stored and removed in them."""
    rng = random.Random(sizes.seed)
    chains: list[list[int]] = [[] for _ in range(_CHAINS)]
    resident: list[int] = []
    oldest = blocks = 0
    made = []
    for number in range(sizes.batches):
        events: list[dict[str, Any]] = []
        for _ in range(sizes.stores):
            chain = rng.choice(chains)
            if len(chain) >= _LONGEST:
                chain.clear()
            fresh = [rng.getrandbits(64) for _ in range(1 if chain else _PROMPT_BLOCKS)]
            events.append(_stored(fresh, chain[-1] if chain else None))
            chain += fresh
            resident += fresh
            blocks += len(fresh)
        while len(resident) - oldest > sizes.num_blocks // 8:
            events.append({"type": "BlockRemoved", "block_hashes": [resident[oldest]], "medium": "GPU"})
            oldest += 1
            blocks += 1
        made.append(msgspec.msgpack.encode([float(number), events, 0]))
    return made, blocks


def _stored(hashes: list[int], parent: int | None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(len(hashes) * BLOCK_TOKENS)),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
    }


class _Run(NamedTuple):
    """From the first message sent to the last one applied: real time, and this process's processor time. [s]"""

    wall_s: float
    cpu_s: float


def _take_in(payloads: list[bytes], blocks: int) -> _Run:
    import zmq

    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.SNDHWM, 0)
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        subscriber = Subscriber([EventEndpoint(0, f"tcp://127.0.0.1:{port}")])
        subscriber.start()
        try:
            if not publisher.poll(int(_PATIENCE_S * 1000)):
                raise SourceError("the reader did not subscribe")
            publisher.recv()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for number, payload in enumerate(payloads):
                publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
            while (facts := subscriber.facts()).stored + facts.removed < blocks:
                if time.perf_counter() - began_s > _PATIENCE_S or facts.gaps:
                    raise SourceError(f"{facts.batches} of {len(payloads)} batches were taken in")
                time.sleep(_LOOK_S)
            return _Run(time.perf_counter() - began_s, time.process_time() - began_cpu_s)
        finally:
            subscriber.close()
