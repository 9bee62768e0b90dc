"""Workloads told apart by when and how much comes: ``batch``, ``burst``, ``priority``, ``pressure``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from allocator.content import OpaqueContent, Request
from allocator.scripts import CancelAfter
from kvtop.workloads.draws import Draws, SizeDial, held_seconds

#: Requests that share a pool under pressure at once: each wants that part of what is asked for in all.
_PRESSING: Final = 128
#: How often the time its tokens take a client under pressure waits before it hangs up.
_PATIENCE: Final = 4.0
#: Lengths of a request of low class, in times of one of high class.
_LOW_LENGTH: Final = 5.0


def batch_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    rows: int | None = None,
    prompt_tokens: float = 600.0,
    answer_tokens: float = 300.0,
) -> Iterator[Request]:
    """Yield long offline requests, for ever, in batches that arrive at one moment each.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second; ``None`` lets one batch follow when the pool can have done the one before.
        rows: Requests a batch; ``None`` takes three times what the pool holds.
        prompt_tokens, answer_tokens: Median lengths, before scaling to the pool.
    """
    draws = Draws("batch", seed, block_size, num_blocks, dial)

    def lengths(d: Draws) -> tuple[int, int]:
        return d.fit(d.length(prompt_tokens * d.scale, 0.4), d.length(answer_tokens * d.scale, 0.4))

    def demand(d: Draws) -> tuple[float, float]:
        prompt, output = lengths(d)
        return d.blocks(prompt + output), output

    rate = rate_per_s or draws.busy_rate(demand)
    mean = draws.blocks(min((prompt_tokens + answer_tokens) * draws.scale, draws.longest))
    size = rows or max(4, min(math.ceil(3 * num_blocks / mean), 512))
    number = 0
    while True:
        for _ in range(size):
            yield draws.request(number * size / rate, f"batch {number} row", *lengths(draws))
        number += 1


def burst_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    on_s: float = 4.0,
    off_s: float = 12.0,
    prompt_tokens: float = 200.0,
    answer_tokens: float = 120.0,
) -> Iterator[Request]:
    """Yield requests that come in bursts, for ever: ``on_s`` seconds of arrivals, then ``off_s`` seconds of none.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second, bursts and pauses taken together; ``None`` keeps the pool busy on average.
        on_s, off_s: Length of a burst and of a pause. [s]
        prompt_tokens, answer_tokens: Median lengths, before scaling to the pool.
    """
    draws = Draws("burst", seed, block_size, num_blocks, dial)

    def lengths(d: Draws) -> tuple[int, int]:
        return d.fit(d.length(prompt_tokens * d.scale), d.length(answer_tokens * d.scale))

    def demand(d: Draws) -> tuple[float, float]:
        prompt, output = lengths(d)
        return d.blocks(prompt + output), output

    rate = rate_per_s or draws.busy_rate(demand)
    in_burst = rate * (on_s + off_s) / on_s
    working_s = 0.0  # of bursts alone, laid end to end
    while True:
        bursts, inside_s = divmod(working_s, on_s)
        yield draws.request(bursts * (on_s + off_s) + inside_s, "burst", *lengths(draws))
        working_s += draws.gap_s(in_burst)


def priority_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    high_share: float = 0.3,
    prompt_tokens: float = 120.0,
    answer_tokens: float = 80.0,
) -> Iterator[Request]:
    """Yield requests of two classes, for ever: short ones of class 1, and five times as long ones of class 0.

    Together they ask for a little more than the pool, so that it matters who goes first.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second, both classes; ``None`` keeps the pool more than busy.
        high_share: Share of the requests that are of class 1.
        prompt_tokens, answer_tokens: Median lengths in class 1, before scaling to the pool.
    """
    draws = Draws("priority", seed, block_size, num_blocks, dial)

    def lengths(d: Draws, is_high: bool) -> tuple[int, int]:
        times = d.scale if is_high else d.scale * _LOW_LENGTH
        return d.fit(d.length(prompt_tokens * times), d.length(answer_tokens * times))

    def demand(d: Draws) -> tuple[float, float]:
        prompt, output = lengths(d, d.rng.random() < high_share)
        return d.blocks(prompt + output), output

    rate = rate_per_s or draws.busy_rate(demand, fill=1.1)
    arrival_s = 0.0
    while True:
        is_high = draws.rng.random() < high_share
        prompt, output = lengths(draws, is_high)
        # Demand above the pool would queue without end: nobody waits for ever.
        patience = (CancelAfter(_PATIENCE * held_seconds(output) + 10.0),)
        yield draws.request(
            arrival_s, "high" if is_high else "low", prompt, output, priority=int(is_high), script=patience
        )
        arrival_s += draws.gap_s(rate)


def pressure_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    demand: float = 1.5,
) -> Iterator[Request]:
    """Yield requests that double while they run and want more than the pool holds, for ever: somebody must give way.

    Nothing of them can be found again. Their clients hang up when it takes four times as long as it should.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second; ``None`` takes what ``demand`` says.
        demand: Blocks wanted at once, in pools.
    """
    draws = Draws("pressure", seed, block_size, num_blocks, dial)
    wanted = max(demand * num_blocks / _PRESSING, min(2, num_blocks)) * block_size

    def lengths(d: Draws) -> tuple[int, int]:
        total = min(d.dial.scale * wanted * math.exp(0.3 * d.rng.standard_normal()), 0.9 * d.num_tokens)
        output = int(total) // 2
        return max(1, int(total) - output), output

    sample = Draws("rate", 0, block_size, num_blocks)
    outputs = [lengths(sample)[1] for _ in range(256)]
    held_s = held_seconds(sum(outputs) / len(outputs))
    rate = rate_per_s or demand * draws.num_tokens / wanted / held_s
    arrival_s, number = 0.0, 0
    while True:
        prompt, output = lengths(draws)
        content = OpaqueContent(prompt + output, nonce=((seed << 32) + number) % (1 << 62))
        patience = (CancelAfter(_PATIENCE * held_seconds(output)),)
        yield Request(content, prompt, arrival_s, f"pressure {number}", script=patience)
        arrival_s += draws.gap_s(rate)
        number += 1
