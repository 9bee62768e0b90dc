"""Workloads told apart by what their clients do: ``beam`` (fork and prune) and ``cancel-storm`` (hang up)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from allocator.content import Request
from allocator.scripts import Act, CancelAfter, CancelAt, ForkAt, Script
from kvtop.workloads.draws import Draws, SizeDial

#: Seconds between two storms, in which every client that heard of it hangs up at once.
_STORM_S: Final = 8.0
_IMPATIENCE_S: Final = 0.3


def beam_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    width: int = 4,
    rounds: int = 3,
    prompt_tokens: float = 500.0,
    answer_tokens: float = 200.0,
) -> Iterator[Request]:
    """Yield beam searches, for ever: hypotheses fork, the worse half is pruned each round, the n best finish.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Searches a second; ``None`` keeps the pool busy.
        width: Hypotheses at once, at least 2.
        rounds: Times half of them are pruned and the others fork, spread over the answer.
        prompt_tokens, answer_tokens: Median lengths, before scaling to the pool.
    """
    draws = Draws("beam", seed, block_size, num_blocks, dial)

    def lengths(d: Draws) -> tuple[int, int]:
        return d.fit(d.length(prompt_tokens * d.scale), d.length(answer_tokens * d.scale))

    def demand(d: Draws) -> tuple[float, float]:
        prompt, output = lengths(d)
        return d.blocks(prompt) + width * (d.blocks(output) + 1), output

    rate = rate_per_s or draws.busy_rate(demand)
    arrival_s = 0.0
    while True:
        prompt, output = lengths(draws)
        script = beam_script(draws.rng, prompt, output, width=width, rounds=rounds)
        yield draws.request(arrival_s, "beam", prompt, output, script=script)
        arrival_s += draws.gap_s(rate)


@dataclass(slots=True)
class _Hypothesis:
    """One hypothesis while its search is laid out: when it forks into whom, and when it is pruned."""

    forks: list[tuple[int, tuple[_Hypothesis, ...]]] = field(default_factory=list)
    pruned_at: int | None = None

    def script(self) -> Script:
        acts: list[Act] = [ForkAt(at, tuple(child.script() for child in born)) for at, born in self.forks]
        if self.pruned_at is not None:
            acts.append(CancelAt(self.pruned_at))
        return tuple(acts)


def beam_script(rng: np.random.Generator, prompt: int, output: int, *, width: int, rounds: int) -> Script:
    """Return the script of one search: ``width`` hypotheses from the first output token to the end.

    Each round the losers are cancelled and as many of the winners fork, so that the width stays; whoever was there
    first may lose too, and its children go on.
    """
    root = _Hypothesis()
    others = tuple(_Hypothesis() for _ in range(width - 1))
    first = prompt + min(1, output)
    root.forks.append((first, others))
    beam = [root, *others]
    orders = rng.random((rounds, width)).argsort(axis=1).tolist()
    for turn, order in enumerate(orders, start=1):
        at = prompt + output * turn // (rounds + 1)
        if not first < at < prompt + output:
            continue
        losers, winners = order[: width // 2], order[width // 2 :]
        born = []
        for i in range(len(losers)):
            beam[losers[i]].pruned_at = at
            child = _Hypothesis()
            beam[winners[i]].forks.append((at, (child,)))
            born.append(child)
        beam = [*(beam[i] for i in winners), *born]
    return root.script()


def cancel_storm_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    cancel_share: float = 0.7,
    prompt_tokens: float = 300.0,
    answer_tokens: float = 300.0,
) -> Iterator[Request]:
    """Yield requests whose clients hang up, for ever: before they start, after the prompt, halfway, or all at once.

    They ask for more than the pool, so that some are waiting when they go.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second; ``None`` keeps the pool more than busy.
        cancel_share: Share of the clients that hang up.
        prompt_tokens, answer_tokens: Median lengths, before scaling to the pool.
    """
    draws = Draws("cancel-storm", seed, block_size, num_blocks, dial)

    def lengths(d: Draws) -> tuple[int, int]:
        return d.fit(d.length(prompt_tokens * d.scale), d.length(answer_tokens * d.scale))

    def demand(d: Draws) -> tuple[float, float]:
        prompt, output = lengths(d)
        # Who hangs up holds its blocks for half of the time, more or less.
        return d.blocks(prompt + output) * (1 - cancel_share / 2), output

    rate = rate_per_s or draws.busy_rate(demand, fill=1.3)
    rng = draws.rng
    arrival_s = 0.0

    def hang_up(prompt: int, output: int) -> Act:
        stage = int(rng.integers(4))
        if stage == 0:
            return CancelAfter(_IMPATIENCE_S * rng.standard_exponential())
        if stage == 1:
            return CancelAt(prompt)
        if stage == 2:
            return CancelAt(prompt + int(rng.integers(output + 1)))
        return CancelAfter(_STORM_S - arrival_s % _STORM_S)

    while True:
        prompt, output = lengths(draws)
        # Even the patient do not wait for ever, or the queue would grow without end.
        act = hang_up(prompt, output) if rng.random() < cancel_share else CancelAfter(10 * _STORM_S)
        yield draws.request(arrival_s, "storm", prompt, output, script=(act,))
        arrival_s += draws.gap_s(rate)
