"""What the synthetic workloads share: sizes that fit a pool, seeded draws, the dial for lengths, and the busy rate.

A workload is scaled to its pool: lengths grow with the square root of the pool's size, and arrivals come as fast as
keeps the pool busy. Everything is drawn from one generator a workload, seeded by the run's seed and its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from allocator.config import STEP_S
from allocator.content import Request, TokenArray, TokenContent
from allocator.scripts import Script

#: Pool for which lengths are as the workloads name them; others grow and shrink with the square root. [tokens]
REFERENCE_TOKENS: Final = 65536
#: Largest scale and longest stream, whatever the pool.
MAX_SCALE: Final = 8.0
MAX_STREAM: Final = 32768
#: Share of the pool in use that a rate aims at.
FILL_RATIO: Final = 0.85
#: Sequences at work at once are kept below this, however large the pool.
MAX_CONCURRENT: Final = 192
VOCABULARY: Final = 32000
_SAMPLES: Final = 256


@dataclass(slots=True)
class SizeDial:
    """How many times as long requests are; whoever drives the load turns it, between two requests."""

    scale: float = 1.0


def pool_scale(num_tokens: int) -> float:
    """Return by how much lengths are scaled for a pool of that many tokens."""
    return min(math.sqrt(num_tokens / REFERENCE_TOKENS), MAX_SCALE)


def longest_stream(num_tokens: int) -> int:
    """Return how long a stream may be in a pool of that many tokens: a quarter of it, or 8 where that is more."""
    return min(max(num_tokens // 4, min(num_tokens, 8)), MAX_STREAM)


def draw_tokens(rng: np.random.Generator, count: int) -> TokenArray:
    """Return ``count`` tokens that nobody else has. [count]"""
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


class Draws:
    """Seeded draws of one workload for one pool.

    Args:
        name: The workload: two of them never draw the same.
        seed: The run's seed, from 0.
        block_size: Tokens a block of the pool.
        num_blocks: Its blocks.
        dial: Factor on every length drawn; by default one that stays at 1.
    """

    def __init__(self, name: str, seed: int, block_size: int, num_blocks: int, dial: SizeDial | None = None) -> None:
        self.rng = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_tokens = block_size * num_blocks
        self.scale = pool_scale(self.num_tokens)
        self.longest = longest_stream(self.num_tokens)
        self.dial = dial or SizeDial()
        self._num_requests = 0

    def length(self, median: float, sigma: float = 0.5) -> int:
        """Return a log-normal length of that median, times the dial; at least 1 and at most the longest stream."""
        drawn = self.dial.scale * median * math.exp(sigma * self.rng.standard_normal())
        return max(1, min(self.longest, round(drawn)))

    def tokens(self, count: int) -> TokenArray:
        """Return ``count`` tokens of its own. [count]"""
        return draw_tokens(self.rng, count)

    def gap_s(self, rate_per_s: float) -> float:
        """Return the time to the next arrival of a Poisson process. [s]"""
        return self.rng.standard_exponential() / rate_per_s

    def fit(self, prompt: int, output: int) -> tuple[int, int]:
        """Return lengths that make at most the longest stream: the prompt gives way to one token of output."""
        prompt = max(1, min(prompt, self.longest - 1))
        return prompt, min(output, self.longest - prompt)

    def blocks(self, tokens: float) -> float:
        """Return how many blocks ``tokens`` tokens take."""
        return float(-(-tokens // self.block_size))

    def request(
        self,
        arrival_s: float,
        label: str,
        prompt: int,
        output: int,
        *,
        priority: int = 0,
        contiguous: bool = False,
        script: Script = (),
    ) -> Request:
        """Return a request with tokens of its own; its label gets a running number."""
        self._num_requests += 1
        label = f"{label} {self._num_requests - 1}"
        content = TokenContent(self.tokens(prompt + output))
        return Request(content, prompt, arrival_s, label, priority, contiguous, script)

    def busy_rate(
        self, draw: Callable[[Draws], tuple[float, float]], *, fill: float = FILL_RATIO, resident_blocks: float = 0.0
    ) -> float:
        """Return the requests a second that keep ``fill`` of the pool in use.

        By Little's law: blocks at work = rate × blocks a request × seconds it holds them, both taken as means over a
        sample, since the limits on lengths bend them.

        Args:
            draw: Draws the blocks that one request holds for itself, and its output tokens.
            fill: Share of the pool, above 1 for demand above the pool.
            resident_blocks: Blocks that all requests share.
        """
        sample = Draws("rate", 0, self.block_size, self.num_blocks)
        drawn = [draw(sample) for _ in range(_SAMPLES)]
        held_s = sum(held_seconds(output) for _, output in drawn) / _SAMPLES
        block_seconds = sum(blocks * held_seconds(output) for blocks, output in drawn) / _SAMPLES
        room = max(fill * self.num_blocks - resident_blocks, 0.1 * self.num_blocks)
        return min(room / block_seconds, MAX_CONCURRENT / held_s)


def held_seconds(output: float) -> float:
    """Return how long a request holds its blocks that generates ``output`` tokens and never waits. [s]"""
    return (output + 1) * STEP_S
