"""What the allocator is to reach side by side with its peers, and how far recorded rounds show it. Pure functions.

A ratio above 1 always means "ours is better by that factor". It is taken inside each round, where both subjects
met the same machine in the same mood; then the median over the rounds counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

Result = dict[str, Any]
#: Results by case, subject and round.
Records = dict[str, dict[str, dict[int, Result]]]


@dataclass(frozen=True, slots=True)
class Case:
    """One workload with its arguments, run by several subjects in turn.

    Attributes:
        label: Names the case in records.
        workload: Function of the benchmark's worker.
        args: Its keyword arguments.
        subjects: Ours and the peers' subjects that run it.
    """

    label: str
    workload: str
    args: dict[str, Any]
    subjects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of one subject in one case; with several subjects, that of the best one present.

    Attributes:
        case: Label of the case.
        subjects: Names of subjects.
        read: Takes the figure from a result.
    """

    case: str
    subjects: tuple[str, ...]
    read: Callable[[Result], float]


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table.

    Attributes:
        workload: Group it belongs to, such as ``W1``.
        what: What is measured, and against whom.
        ours: Our figure.
        theirs: The figure compared with.
        at_least: Ratio to reach.
        is_cost: Whether less is better.
    """

    workload: str
    what: str
    ours: Figure
    theirs: Figure
    at_least: float
    is_cost: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rounds show of one target.

    Attributes:
        ratio: Median of the ratios within rounds.
        low: Least of these ratios.
        high: Greatest of them.
        reference: Subject compared with: the best one present.
        ours: Median of our figure.
        theirs: Median of the reference's figure.
        met: Whether the ratio reaches the target.
    """

    ratio: float
    low: float
    high: float
    reference: str
    ours: float
    theirs: float
    met: bool


def field(*path: str) -> Callable[[Result], float]:
    """Return a reader of the figure at ``path`` in a result."""

    def read(result: Result) -> float:
        cell: Any = result
        for name in path:
            cell = cell[name]
        return float(cell)

    return read


def pair(*path: str) -> Callable[[Result], float]:
    """Return a reader of the time of one allocate and one free, in nanoseconds, from the cell at ``path``."""
    allocate, free = field(*path, "alloc_ns"), field(*path, "free_ns")
    return lambda result: allocate(result) + free(result)


def judge(target: Target, records: Records) -> Verdict | None:
    """Return what the records show of a target; ``None`` when ours and no peer met in any round."""
    ours = _by_round(records, target.ours, target.ours.subjects[0])
    best: Verdict | None = None
    for subject in target.theirs.subjects:
        theirs = _by_round(records, target.theirs, subject)
        ratios = [
            theirs[i] / ours[i] if target.is_cost else ours[i] / theirs[i] for i in sorted(ours.keys() & theirs.keys())
        ]
        if not ratios:
            continue
        ratio = median(ratios)
        if best is None or ratio < best.ratio:
            best = Verdict(
                ratio,
                min(ratios),
                max(ratios),
                subject,
                median(ours.values()),
                median(theirs.values()),
                ratio >= target.at_least,
            )
    return best


def _by_round(records: Records, figure: Figure, subject: str) -> dict[int, float]:
    return {i: figure.read(result) for i, result in records.get(figure.case, {}).get(subject, {}).items()}


#: Pools whose unit is one block of 16 tokens. SGLang's token allocator, quicker at 4096, hands out single token slots.
BLOCK_POOLS: Final = (
    "vllm",
    "vllm-nocache",
    "sglang-paged",
    "sglang-paged-sort",
    "nano-vllm",
    "mini-sglang",
    "lmcache-paged",
)

CASES: Final = (
    Case("W1", "W1", {}, ("ours", *BLOCK_POOLS)),
    Case("W2", "W2", {}, ("ours", "vllm-blockpool", "vllm", "nano-vllm", "sglang-paged")),
    Case("W3", "W3", {}, ("ours", "ours-sha256", "vllm-sha256", "sglang-unified-rust", "sglang-radix", "mini-sglang")),
    Case("W4 10k", "W4", {"pool_size": 10_000}, ("ours",)),
    Case("W4 4M", "W4", {"pool_size": 4_000_000}, ("ours",)),
    Case("W4 1M", "W4", {"pool_size": 1_000_000}, ("ours", "vllm")),
    *(Case(f"W5 {n}", "W5", {"n": n, "secs": 0.7, "threads": [1, 8]}, ("ours", "vllm")) for n in (1, 16, 256)),
)


def _bulk(n: int, peer: str, subjects: tuple[str, ...], at_least: float) -> Target:
    read = pair(str(n))
    return Target(
        "W1",
        f"allocate and free {n}, against {peer}",
        Figure("W1", ("ours",), read),
        Figure("W1", subjects, read),
        at_least,
    )


def _decode(peer: str, subject: str, at_least: float) -> Target:
    read = field("step_us")
    return Target(
        "W2",
        f"step of 256 sequences, against {peer}",
        Figure("W2", ("ours",), read),
        Figure("W2", (subject,), read),
        at_least,
    )


def _prefix(what: str, ours: str, theirs: str, at_least: float) -> Target:
    read = field("us_per_req")
    return Target("W3", what, Figure("W3", (ours,), read), Figure("W3", (theirs,), read), at_least)


def _threads(n: int, at_least: float) -> Target:
    read = field("8", "pairs_per_s")
    case = f"W5 {n}"
    return Target(
        "W5",
        f"8 threads, {n} blocks, against vLLM + lock",
        Figure(case, ("ours",), read),
        Figure(case, ("vllm",), read),
        at_least,
        is_cost=False,
    )


def _kept(n: int) -> Target:
    case = f"W5 {n}"
    return Target(
        "W5",
        f"8 threads, {n} blocks, against our one thread",
        Figure(case, ("ours",), field("8", "pairs_per_s")),
        Figure(case, ("ours",), field("1", "pairs_per_s")),
        0.9,
        is_cost=False,
    )


TARGETS: Final = (
    _bulk(1, "vLLM", ("vllm",), 1.7),
    _bulk(16, "vLLM", ("vllm",), 2.3),
    _bulk(256, "vLLM", ("vllm",), 20),
    _bulk(4096, "vLLM", ("vllm",), 60),
    _bulk(1, "the best peer", BLOCK_POOLS, 1.3),
    _bulk(16, "the best peer", BLOCK_POOLS, 1.3),
    _bulk(256, "the best peer", BLOCK_POOLS, 3.5),
    _bulk(4096, "the best peer", BLOCK_POOLS, 1.2),
    _decode("vLLM's manager", "vllm", 80),
    _decode("nano-vllm", "nano-vllm", 15),
    _decode("vLLM's bare block pool", "vllm-blockpool", 2),
    _prefix("request, against vLLM sha256", "ours", "vllm-sha256", 4),
    _prefix("request, against SGLang's Rust tree", "ours", "sglang-unified-rust", 1.3),
    _prefix("request with sha256, against vLLM sha256", "ours-sha256", "vllm-sha256", 2.8),
    Target(
        "W3",
        "hit rate, against vLLM's",
        Figure("W3", ("ours",), field("hit_rate")),
        Figure("W3", ("vllm-sha256",), field("hit_rate")),
        0.99,
        is_cost=False,
    ),
    Target(
        "W4",
        "4,000,000 blocks, against 10,000",
        Figure("W4 4M", ("ours",), pair("gc_frozen")),
        Figure("W4 10k", ("ours",), pair("gc_frozen")),
        1 / 1.3,
    ),
    Target(
        "W4",
        "building 1,000,000 blocks, against vLLM",
        Figure("W4 1M", ("ours",), field("build_s")),
        Figure("W4 1M", ("vllm",), field("build_s")),
        100,
    ),
    _kept(1),
    _kept(16),
    _threads(1, 15),
    _threads(16, 6),
    _threads(256, 5),
)

#: Most bytes a block takes once every page is touched, its share of the block map included, cache entries left out.
MAX_BYTES_PER_BLOCK: Final = 40
#: Arrays that describe cached content alone: part of a cache entry, not of a block.
CACHE_ARRAYS: Final = frozenset({"stamp", "inserted", "uses", "hash64"})
