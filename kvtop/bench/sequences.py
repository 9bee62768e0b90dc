"""Sequences at work: the decode steps of 256 at once, and requests that share prefixes. Owns both made loads."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from allocator import chain_keys
from allocator.config import KeyHash
from allocator.content import TokenArray
from allocator.ids import BlockKey
from kvtop.bench.figures import Figure, figure, quiet_heap, ratio_figure
from kvtop.bench.pools import make_manager

BLOCK_SIZE = 16
#: Requests that live at the same time in the prefix load.
_WINDOW = 64
_GROUPS = 100


@dataclass(slots=True)
class DecodeLoad:
    """Who starts and who ends at which step; sequence ``i`` sits in slot ``i`` until another takes its place.

    Attributes:
        starts: Step → (slot, prompt tokens) of those that start.
        ends: Step → slots whose sequence is finished.
    """

    starts: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def decode_load(num_slots: int, num_steps: int, seed: int = 3) -> DecodeLoad:
    """Return a load of prompts of 64 to 1024 tokens and outputs of 32 to 480, the first ones already half-way."""
    rng = random.Random(seed)
    load = DecodeLoad()
    for slot in range(num_slots):
        step = 0
        while step < num_steps:
            prompt, output = rng.randrange(64, 1025), rng.randrange(32, 481)
            if step == 0:
                output = rng.randrange(1, output + 1)
            load.starts[step].append((slot, prompt))
            step += output
            load.ends[step].append(slot)
    return load


def decode_step_us(load: DecodeLoad, *, num_blocks: int, num_slots: int, warm_up: int, num_steps: int) -> float:
    """Return the median time of one step: release the finished, admit their successors, append a token to all. [µs]"""
    manager = make_manager(num_blocks, prefix_cache=False, watermark_ratio=0.0)
    rows = np.zeros(num_slots, np.int64)
    times = []
    with quiet_heap():
        for step in range(num_steps):
            ends = load.ends.get(step, ())
            starts = load.starts.get(step, ())
            began = time.perf_counter_ns()
            for slot in ends:
                manager.free(int(rows[slot]))
            for slot, prompt in starts:
                rows[slot] = manager.admit((), prompt).row
            manager.append(rows)
            if step >= warm_up:
                times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e3


def measure_decode(rounds: int, *, num_blocks: int, num_slots: int, warm_up: int, num_steps: int) -> Iterator[Figure]:
    """Yield the time of a decode step."""
    load = decode_load(num_slots, num_steps)
    times = [
        decode_step_us(load, num_blocks=num_blocks, num_slots=num_slots, warm_up=warm_up, num_steps=num_steps)
        for _ in range(rounds)
    ]
    yield figure("decode", f"step of {num_slots} sequences, one call", "µs", times)
    yield figure("decode", "tokens", "M/s", [num_slots / t for t in times])


def prefix_load(num_requests: int, seed: int = 5) -> list[TokenArray]:
    """Return prompts: one of 100 prefixes of 16 to 128 blocks, popular as 1 ÷ rank, then 64 to 1024 own tokens."""
    rng = random.Random(seed)

    def tokens(n: int) -> TokenArray:
        return np.array([rng.randrange(32000) for _ in range(n)], np.int32)

    prefixes = [tokens(BLOCK_SIZE * rng.randrange(16, 129)) for _ in range(_GROUPS)]
    weights = [1 / (rank + 1) for rank in range(_GROUPS)]
    chosen = (rng.choices(prefixes, weights)[0] for _ in range(num_requests))
    return [np.concatenate((prefix, tokens(rng.randrange(64, 1025)))) for prefix in chosen]


@dataclass(slots=True)
class PrefixTimes:
    """Where the time of one run of the prefix load went, and what it found.

    Attributes:
        hash_us, admit_us, release_us: A request's share. [µs]
        hit_ratio: Blocks found ÷ blocks.
    """

    hash_us: float
    admit_us: float
    release_us: float
    hit_ratio: float

    @property
    def total_us(self) -> float:
        """Time of a request. [µs]"""
        return self.hash_us + self.admit_us + self.release_us


def run_prefix(prompts: list[TokenArray], key_hash: KeyHash, *, num_blocks: int, warm_up: int) -> PrefixTimes:
    """Admit every prompt, the oldest of 64 being released before the next; the first ``warm_up`` are not counted."""
    manager = make_manager(num_blocks, watermark_ratio=0.0, key_hash=key_hash)
    live: deque[int] = deque()
    hashing = admitting = releasing = hits = blocks = 0
    now = time.perf_counter_ns
    with quiet_heap():
        for number, tokens in enumerate(prompts):
            began = now()
            if len(live) == _WINDOW:
                manager.free(live.popleft())
            released = now()
            keys: list[BlockKey] = chain_keys(tokens, BLOCK_SIZE, algorithm=key_hash)
            hashed = now()
            admission = manager.admit(keys, len(tokens), tokens=tokens)
            first = admission.matched_blocks
            own = tokens[first * BLOCK_SIZE : len(keys) * BLOCK_SIZE]
            manager.publish_keys(admission.row, keys[first:], first, tokens=own)
            admitted = now()
            live.append(admission.row)
            if number >= warm_up:
                releasing += released - began
                hashing += hashed - released
                admitting += admitted - hashed
                hits += admission.hit_blocks
                blocks += -(-len(tokens) // BLOCK_SIZE)
    unit = 1e3 * (len(prompts) - warm_up)
    return PrefixTimes(hashing / unit, admitting / unit, releasing / unit, hits / blocks)


def measure_prefix(rounds: int, *, num_blocks: int, num_requests: int, warm_up: int) -> Iterator[Figure]:
    """Yield the time of a request with each kind of key, the tokens being compared on every hit."""
    prompts = prefix_load(num_requests)
    algorithms: tuple[KeyHash, ...] = ("xxh3", "sha256")
    runs: dict[KeyHash, list[PrefixTimes]] = {name: [] for name in algorithms}
    for index in range(rounds):
        for name in algorithms if index % 2 == 0 else algorithms[::-1]:
            runs[name].append(run_prefix(prompts, name, num_blocks=num_blocks, warm_up=warm_up))
    for name in algorithms:
        for what, part in (("request", "total_us"), ("  of it keys", "hash_us"), ("  of it admission", "admit_us")):
            yield figure("prefix", f"{what}, {name}", "µs", [getattr(times, part) for times in runs[name]])
        yield figure("prefix", f"hit ratio by blocks, {name}", "", [times.hit_ratio for times in runs[name]])
    totals = {name: [times.total_us for times in runs[name]] for name in algorithms}
    yield ratio_figure("prefix", "request, sha256 ÷ xxh3", totals["sha256"], totals["xxh3"])
