"""Workloads that need runs of consecutive blocks: ``contiguous`` (fused requests) and ``fragmenter`` (adversarial)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from allocator.config import STEP_S
from allocator.content import Request
from allocator.scripts import CancelAfter
from kvtop.workloads.draws import Draws, SizeDial

#: Output tokens of a fused request at most: it is about its blocks, not about its time.
_FUSED_OUTPUT: Final = 64
#: Seconds after which a client of ``contiguous`` gives up: without compaction the queue would grow without end.
_PATIENCE_S: Final = 40.0
#: Most requests of one wave of the fragmenter, half of them short, and the least blocks of one.
_WAVE: Final = 96
_PART_BLOCKS: Final = 8
_SHORT_OUTPUT: Final = 2
_LONG_OUTPUT: Final = 400
#: Share of its part of the pool into which a long request still grows; small, so that the walls stand at once.
_GROWTH_RATIO: Final = 0.25
_LONGEST_RUN_RATIO: Final = 0.45
#: Steps from the end of the short requests to the request for a run.
_PAUSE_STEPS: Final = 6


def contiguous_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    run_share: float = 0.05,
    run_ratio: float = 0.1,
    prompt_tokens: float = 150.0,
    answer_tokens: float = 150.0,
) -> Iterator[Request]:
    """Yield ordinary requests of very mixed lengths and fused ones that need one run of blocks each, for ever.

    Their clients hang up when they have no answer after 40 seconds.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second, both kinds; ``None`` keeps 0.7 of the pool in use.
        run_share: Share of the requests that are fused.
        run_ratio: Length of a run, as a share of the pool.
        prompt_tokens, answer_tokens: Median lengths of ordinary requests, before scaling to the pool.
    """
    draws = Draws("contiguous", seed, block_size, num_blocks, dial)

    def plain(d: Draws) -> tuple[int, int]:
        return d.fit(d.length(prompt_tokens * d.scale, 0.8), d.length(answer_tokens * d.scale, 0.9))

    def fused(d: Draws) -> tuple[int, int]:
        wanted = d.dial.scale * run_ratio * d.num_tokens * d.rng.uniform(0.7, 1.3)
        total = max(min(2, d.num_tokens), min(int(wanted), d.num_tokens))
        output = min(_FUSED_OUTPUT, total // 2)
        return total - output, output

    def demand(d: Draws) -> tuple[float, float]:
        prompt, output = fused(d) if d.rng.random() < run_share else plain(d)
        return d.blocks(prompt + output), output

    rate = rate_per_s or draws.busy_rate(demand, fill=0.7)
    patience = (CancelAfter(_PATIENCE_S),)
    arrival_s = 0.0
    while True:
        if draws.rng.random() < run_share:
            yield draws.request(arrival_s, "fused", *fused(draws), contiguous=True, script=patience)
        else:
            yield draws.request(arrival_s, "plain", *plain(draws), script=patience)
        arrival_s += draws.gap_s(rate)


def fragmenter_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    run_ratio: float = 0.25,
) -> Iterator[Request]:
    """Yield waves against the allocator, for ever: a full pool, every second request gone, then one run asked for.

    A wave's requests arrive at once and take equal parts of the pool; the short ones among them end at once and
    leave holes between the long ones, too small for the run that is asked for next.

    Args:
        seed, block_size, num_blocks, dial: As for every workload; the dial stretches the run.
        run_ratio: Length of the run, as a share of the pool, at most 0.45.
    """
    draws = Draws("fragmenter", seed, block_size, num_blocks, dial)
    count = max(1, min(_WAVE, num_blocks // _PART_BLOCKS))
    each = num_blocks * 15 // 16 // count or 1
    room = each * block_size
    start_s, wave = 0.0, 0
    while True:
        long = max(1, min(_LONG_OUTPUT, int(_GROWTH_RATIO * room)))
        short = min(_SHORT_OUTPUT, long)
        for i in range(count):
            output = min(short if i % 2 else long, room - 1)
            yield draws.request(start_s, f"wave {wave} {'hole' if i % 2 else 'wall'}", room - output, output)
        asked_s = start_s + (short + _PAUSE_STEPS) * STEP_S
        ratio = min(draws.dial.scale * run_ratio, _LONGEST_RUN_RATIO)
        total = max(min(2, draws.num_tokens), int(ratio * draws.num_tokens))
        output = min(_SHORT_OUTPUT, total - 1)
        yield draws.request(asked_s, f"wave {wave} run", total - output, output, contiguous=True)
        # The next wave finds an empty pool, whether the run was had at once or only after the walls had gone.
        start_s += (long + 2 * short + 2 * _PAUSE_STEPS) * STEP_S * draws.rng.uniform(1.0, 1.2)
        wave += 1
