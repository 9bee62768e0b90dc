"""WorkloadFacts: what advice needs to know of a run besides its counters. Bounded; kept by the engine."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

#: Buckets by powers of two: bucket i counts the numbers below 2^i that bucket i − 1 does not; the last takes the rest.
NUM_BUCKETS: Final = 32

Blocked = Literal["watermark", "capacity"]


class WorkloadFacts(msgspec.Struct, frozen=True):
    """What was measured so far.

    Attributes:
        num_finished: Sequences that finished.
        finished_tokens: Tokens of these, prompt and output.
        length_buckets: Finished sequences by tokens, see ``NUM_BUCKETS``.
        blocks_at_half, blocks_at_size, blocks_at_double: Blocks that the finished sequences took, and would have
            taken with half and double the block size; half of an odd size is rounded down, and at least 1.
        peak_running: Most sequences that ran at once.
        peak_swap_blocks: Most blocks that had to be in the host tier at once, those that found no room included.
        swap_shortfalls: Times a sequence was to be swapped out and found no room.
        num_starts: Times a sequence started, or started again after a preemption.
        longest_wait_steps: Longest time a sequence waited for that, or still waits.
        wait_buckets: Starts by steps waited, see ``NUM_BUCKETS``.
        watermark_steps: Steps in which the head of the queue waited for nothing but the watermark.
        capacity_steps: Steps in which it waited for blocks.
        copied_blocks: Blocks that swaps copied.
        copy_runs: Runs of consecutive device ids in which these lay: the least number of copies.
    """

    num_finished: int = 0
    finished_tokens: int = 0
    length_buckets: tuple[int, ...] = (0,) * NUM_BUCKETS
    blocks_at_half: int = 0
    blocks_at_size: int = 0
    blocks_at_double: int = 0
    peak_running: int = 0
    peak_swap_blocks: int = 0
    swap_shortfalls: int = 0
    num_starts: int = 0
    longest_wait_steps: int = 0
    wait_buckets: tuple[int, ...] = (0,) * NUM_BUCKETS
    watermark_steps: int = 0
    capacity_steps: int = 0
    copied_blocks: int = 0
    copy_runs: int = 0


class FactsRecorder:
    """Writes down what happens, in a few additions each.

    Args:
        block_size: Tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._peak_running = 0
        self._sizes = (max(1, block_size // 2), block_size, 2 * block_size)
        self._blocks = [0, 0, 0]
        self._finished = [0] * NUM_BUCKETS
        self._finished_tokens = 0
        self._waits = [0] * NUM_BUCKETS
        self._longest_wait = 0
        self._peak_swap_blocks = 0
        self._swap_shortfalls = 0
        self._blocked_steps: dict[Blocked, int] = {"watermark": 0, "capacity": 0}
        self._copied_blocks = 0
        self._copy_runs = 0

    def finish(self, num_tokens: int) -> None:
        """Note that a sequence of ``num_tokens`` tokens finished."""
        self._finished[_bucket(num_tokens)] += 1
        self._finished_tokens += num_tokens
        for i, size in enumerate(self._sizes):
            self._blocks[i] += -(-num_tokens // size)

    def start(self, waited_steps: int) -> None:
        """Note that a sequence started after waiting."""
        self._waits[_bucket(waited_steps)] += 1
        self._longest_wait = max(self._longest_wait, waited_steps)

    def turn(self, num_running: int, blocked: Blocked | None, steps: int) -> None:
        """Note a turn of some steps, and what the head of the queue waits for, where that is blocks."""
        if num_running > self._peak_running:
            self._peak_running = num_running
        if blocked is not None:
            self._blocked_steps[blocked] += steps

    def swap_out(self, needed_blocks: int, has_room: bool) -> None:
        """Note that the host tier was to hold ``needed_blocks`` at once, and whether it could."""
        self._peak_swap_blocks = max(self._peak_swap_blocks, needed_blocks)
        self._swap_shortfalls += not has_room

    def copy(self, num_blocks: int, runs: int) -> None:
        """Note a copy of blocks that lay in ``runs`` runs."""
        self._copied_blocks += num_blocks
        self._copy_runs += runs

    def facts(self, longest_wait_steps: int = 0) -> WorkloadFacts:
        """Return all of it; ``longest_wait_steps`` is that of the sequences that still wait."""
        return WorkloadFacts(
            num_finished=sum(self._finished),
            finished_tokens=self._finished_tokens,
            length_buckets=tuple(self._finished),
            blocks_at_half=self._blocks[0],
            blocks_at_size=self._blocks[1],
            blocks_at_double=self._blocks[2],
            peak_running=self._peak_running,
            peak_swap_blocks=self._peak_swap_blocks,
            swap_shortfalls=self._swap_shortfalls,
            num_starts=sum(self._waits),
            longest_wait_steps=max(self._longest_wait, longest_wait_steps),
            wait_buckets=tuple(self._waits),
            watermark_steps=self._blocked_steps["watermark"],
            capacity_steps=self._blocked_steps["capacity"],
            copied_blocks=self._copied_blocks,
            copy_runs=self._copy_runs,
        )


def median_bound(buckets: tuple[int, ...]) -> int | None:
    """Return a number that at least half of what was counted lies below; ``None`` when nothing was."""
    total, seen = sum(buckets), 0
    for i, count in enumerate(buckets):
        seen += count
        if total and 2 * seen >= total:
            return 1 << i
    return None


def _bucket(number: int) -> int:
    return min(number.bit_length(), NUM_BUCKETS - 1)
