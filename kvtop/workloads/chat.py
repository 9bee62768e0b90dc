"""The synthetic ``chat`` workload: people talking in turns to a few assistants. Seeded, endless, lazy.

Sessions begin as a Poisson process. Each opens with one of a few system prompts, the popular
ones far more often, and goes on for some turns; a turn's prompt is everything said before
plus a new message, so that it can find its blocks again while they last. Lengths are
log-normal and scaled to the pool, so that a small pool is as busy as a large one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from allocator.config import STEP_S
from allocator.content import Request, TokenArray, TokenContent
from kvtop.workloads.draws import (
    FILL_RATIO,
    MAX_CONCURRENT,
    SizeDial,
    draw_tokens,
    longest_stream,
    pool_scale,
)

NUM_SYSTEM_PROMPTS: Final = 4
MEAN_TURNS: Final = 4.0
MEAN_THINK_S: Final = 4.0
#: Sessions that may open at the start.
MAX_OPENING: Final = 4096

#: Log-normal lengths at scale 1: (median, sigma). [tokens]
_SYSTEM: Final = (400.0, 0.4)
_MESSAGE: Final = (60.0, 0.9)
_ANSWER: Final = (160.0, 0.7)
_SAMPLED_SESSIONS: Final = 256


def chat_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
) -> Iterator[Request]:
    """Yield chat requests for ever, in order of arrival; the same for the same arguments.

    Every request fits an empty pool: a stream is at most a quarter of it, or 8 tokens where that is more.

    Args:
        seed: Any whole number from 0.
        block_size: Tokens a block of the pool they are meant for.
        num_blocks: Its blocks.
        dial: Factor on the lengths of messages and answers.
        rate_per_s: Requests a virtual second, above 0; ``None`` takes what keeps this pool busy.
    """
    lengths = _Lengths.for_pool(num_blocks * block_size, dial)
    busy = measure_demand(block_size, num_blocks)
    rate = busy.rate_per_s if rate_per_s is None else rate_per_s
    rng = np.random.Generator(np.random.PCG64([seed, 0]))
    prompts = [draw_tokens(rng, lengths.draw_system(rng)) for _ in range(NUM_SYSTEM_PROMPTS)]
    weights = 1.0 / np.arange(1, NUM_SYSTEM_PROMPTS + 1)
    bounds = np.cumsum(weights / weights.sum())[:-1]

    waiting: list[tuple[float, int, int, int, TokenArray]] = []  # arrival, session, turn, turns left, said so far
    num_sessions = 0

    def begin(arrival_s: float) -> None:
        nonlocal num_sessions
        system = prompts[int(np.searchsorted(bounds, rng.random(), side="right"))]
        turns = int(rng.geometric(1.0 / MEAN_TURNS))
        heapq.heappush(waiting, (arrival_s, num_sessions, 0, turns, system))
        num_sessions += 1

    def next_turn() -> Request:
        arrival_s, session, turn, turns, said = heapq.heappop(waiting)
        message, answer = lengths.draw_turn(rng, len(said))
        stream = np.concatenate((said, draw_tokens(rng, message + answer)))
        if turns > 1 and lengths.has_room(len(stream)):
            again_s = arrival_s + answer * STEP_S + float(rng.exponential(MEAN_THINK_S))
            heapq.heappush(waiting, (again_s, session, turn + 1, turns - 1, stream))
        return Request(TokenContent(stream), len(said) + message, arrival_s, f"chat {session}/{turn}")

    # As many sessions as are open in the long run begin within one cycle of talking and thinking,
    # so that the pool is busy at once. The number of turns left has no memory, so this is no bias.
    cycle_s = busy.held_s + MEAN_THINK_S
    begin(0.0)
    for _ in range(min(round(rate * cycle_s), MAX_OPENING)):
        begin(float(rng.uniform(0.0, cycle_s)))
    next_start_s = 0.0
    while True:
        next_start_s += float(rng.exponential(MEAN_TURNS / rate))
        while waiting and waiting[0][0] <= next_start_s:
            yield next_turn()
        begin(next_start_s)


@dataclass(frozen=True, slots=True)
class Demand:
    """What keeps a pool busy: requests a second, and how long one holds its blocks on average."""

    rate_per_s: float
    held_s: float


def measure_demand(block_size: int, num_blocks: int) -> Demand:
    """Return the rate of requests that keeps a pool of this size busy.

    By Little's law: blocks at work = rate x blocks a request x seconds it holds them, the system
    prompts aside, which all their holders share. The latter two are measured on a sample of
    sessions, since the limits on lengths bend their means.
    """
    lengths = _Lengths.for_pool(num_blocks * block_size)
    rng = np.random.Generator(np.random.PCG64(0))
    block_seconds, seconds, requests, shared = 0.0, 0.0, 0, 0
    for _ in range(_SAMPLED_SESSIONS):
        said = lengths.draw_system(rng)
        system = said // block_size
        shared += system
        for _ in range(int(rng.geometric(1.0 / MEAN_TURNS))):
            message, answer = lengths.draw_turn(rng, said)
            said += message + answer
            held_s = (answer + 1) * STEP_S
            block_seconds += (-(-said // block_size) - system) * held_s
            seconds += held_s
            requests += 1
            if not lengths.has_room(said):
                break
    target = max(FILL_RATIO * num_blocks - NUM_SYSTEM_PROMPTS * shared / _SAMPLED_SESSIONS, 0.1 * num_blocks)
    held_s = seconds / requests
    return Demand(min(target / (block_seconds / requests), MAX_CONCURRENT / held_s), held_s)


def make_request(prompt_tokens: int, output_tokens: int, nonce: int) -> Request:
    """Return a request of these lengths with tokens of its own; the same for the same ``nonce``. Arrives at 0."""
    rng = np.random.Generator(np.random.PCG64([nonce, 1]))
    return Request(TokenContent(draw_tokens(rng, prompt_tokens + output_tokens)), prompt_tokens, 0.0, f"load {nonce}")


@dataclass(frozen=True, slots=True)
class _Lengths:
    """How long things are for one pool. All results are whole tokens."""

    scale: float
    max_stream: int
    dial: SizeDial

    @classmethod
    def for_pool(cls, num_tokens: int, dial: SizeDial | None = None) -> _Lengths:
        return cls(pool_scale(num_tokens), longest_stream(num_tokens), dial or SizeDial())

    def draw_system(self, rng: np.random.Generator) -> int:
        """Return a system prompt's length: at most about half of a stream, so that an answer always has room."""
        return min(self._draw(rng, _SYSTEM), max(0, self.max_stream // 2 - 1))

    def draw_turn(self, rng: np.random.Generator, said: int) -> tuple[int, int]:
        """Return the lengths of a message, at least 1, and its answer, 0 only where no room is left."""
        room = self.max_stream - said
        message = min(self._draw(rng, _MESSAGE), max(1, room - 1))
        return message, min(self._draw(rng, _ANSWER), room - message)

    def has_room(self, said: int) -> bool:
        """Return whether another turn fits after ``said`` tokens."""
        return self.max_stream - said >= 2

    def _draw(self, rng: np.random.Generator, shape: tuple[float, float]) -> int:
        median, sigma = shape
        return max(1, round(self.dial.scale * self.scale * median * math.exp(sigma * float(rng.standard_normal()))))
