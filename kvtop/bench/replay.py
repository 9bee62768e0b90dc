"""The plainest serial replay of a trace, and the benchmark that sets the engine beside it.

``plain_replay`` shares no code with the allocator on purpose: it is the second opinion on
the exact counts, and the unit in which the engine's time is told.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict

RESULT_KEYS: Final = ("hit_blocks", "hit_tokens", "evictions", "refused")


class ReplayCounts(TypedDict):
    """The numbers of a serial replay that have one right answer."""

    hit_blocks: int
    hit_tokens: int
    evictions: int
    refused: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Both sides at one pool size.

    Attributes:
        num_blocks: Pool size.
        plain_s: Median seconds of the plain replay, reading included.
        engine_s: Median seconds of the engine, reading included.
        ratio: Engine over plain, taken inside each round; the median.
        plain: Counts of the plain replay.
        engine: The same keys from the engine.
    """

    num_blocks: int
    plain_s: float
    engine_s: float
    ratio: float
    plain: Mapping[str, int]
    engine: Mapping[str, int]

    @property
    def agrees(self) -> bool:
        """Whether both sides counted the same."""
        return self.plain == self.engine


def plain_replay(path: Path, num_blocks: int, block_size: int) -> ReplayCounts:
    """Replay a JSON-lines trace with ``hash_ids``, one request after the other in file order.

    A request holds as many blocks as it has at its end. Free blocks are taken before the oldest
    cached ones; afterwards full prompt blocks become cached, the last of them first, and the
    rest are free.
    """
    cached: OrderedDict[int, None] = OrderedDict()  # the next to be evicted stands first
    num_free = num_blocks
    hit_blocks = evictions = refused = 0
    for prompt, output, hash_ids in _read_rows(path):
        total = -(-(prompt + output) // block_size)
        if total > num_blocks:
            refused += 1
            continue
        ids = hash_ids[: prompt // block_size]
        found = 0
        for block in ids:
            if block not in cached:
                break
            found += 1
        for block in ids[:found]:
            del cached[block]
        # A prompt that is cached to its very end has its last block computed again, in place.
        hit_blocks += found - (found > 0 and found * block_size == prompt)
        missing = total - found
        from_free = min(num_free, missing)
        num_free -= from_free
        for _ in range(missing - from_free):
            cached.popitem(last=False)
        evictions += missing - from_free
        num_free += total - len(ids)
        for block in reversed(ids):
            if block in cached:  # an older copy keeps the id
                num_free += 1
            else:
                cached[block] = None
    return ReplayCounts(hit_blocks=hit_blocks, hit_tokens=hit_blocks * block_size, evictions=evictions, refused=refused)


def bench_replay(
    path: Path,
    block_counts: Sequence[int],
    rounds: int,
    run_engine: Callable[[Path, int], Mapping[str, Any]],
    *,
    block_size: int = 512,
    clock: Callable[[], float] = time.perf_counter,
) -> list[ReplayResult]:
    """Run both replays by turns and return, for each pool size, times and counts.

    Args:
        path: A JSON-lines trace with ``hash_ids``.
        block_counts: Pool sizes.
        rounds: How often each side runs at each size, at least 1; the order changes every round.
        run_engine: Replays the file serially on the engine and returns at least ``RESULT_KEYS``.
        block_size: Tokens a block of the trace's ids.
        clock: Seconds from any origin.
    """
    results = []
    for num_blocks in block_counts:
        plain_times, engine_times = [], []
        plain: Mapping[str, Any] = {}
        engine: Mapping[str, Any] = {}
        for index in range(rounds):
            for side in ("plain", "engine") if index % 2 == 0 else ("engine", "plain"):
                start_s = clock()
                if side == "plain":
                    plain = plain_replay(path, num_blocks, block_size)
                    plain_times.append(clock() - start_s)
                else:
                    engine = run_engine(path, num_blocks)
                    engine_times.append(clock() - start_s)
        results.append(
            ReplayResult(
                num_blocks,
                statistics.median(plain_times),
                statistics.median(engine_times),
                statistics.median(e / p for e, p in zip(engine_times, plain_times, strict=True)),
                {key: plain[key] for key in RESULT_KEYS},
                {key: engine[key] for key in RESULT_KEYS},
            )
        )
    return results


def _read_rows(path: Path) -> list[tuple[int, int, list[int]]]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_gzip else path.open("rb") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [(row["input_length"], row["output_length"], row["hash_ids"]) for row in rows]
