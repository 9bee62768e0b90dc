"""Advice from measured numbers: block size, swap space, policy, watermark, compaction, cache size. Pure functions.

Every line shows its arithmetic, and a topic without data has none.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from allocator.config import MAX_BLOCK_SIZE, STEP_S
from allocator.metrics import ratio
from allocator.reuse import ReuseSummary
from allocator.snapshot import Snapshot
from allocator.workload_facts import median_bound
from kvtop.engine_setup import MIN_SWAP_RATIO
from kvtop.model.format import blocks, count, percent, seconds, size

Severity = Literal["fine", "advice", "warning"]
Topic = Literal["block size", "swap space", "policy", "watermark", "compaction", "cache size", "traffic"]
Number = int | float | bool | None

#: Bytes of one block id in a block table.
ENTRY_BYTES: Final = 8
#: A block size is worth changing for a tenth of what waste and tables take together.
_WORTH_A_CHANGE: Final = 0.1
#: Share of starts that are due to preemption, and of steps spent waiting, from which something should be done.
_MANY: Final = 0.05
#: A wait is starvation when it is this many times the median, and this long. [s]
_STARVED_TIMES, _STARVED_S = 100, 60.0
#: Blocks a copy below which copies are short.
_SHORT_COPY: Final = 4.0
#: Hit ratio that a doubled pool should bring, and that a halved one may cost.
_GAIN, _LOSS = 0.05, 0.01


class Advice(msgspec.Struct, frozen=True):
    """One line of advice.

    Attributes:
        topic: What it is about.
        severity: ``fine``: nothing to do; ``advice``: something could be gained; ``warning``: something is lost.
        text: What was measured, how it adds up, and what to do.
        numbers: The numbers in it, by name.
    """

    topic: Topic
    severity: Severity
    text: str
    numbers: dict[str, Number]


def advise(snapshot: Snapshot, num_blocks: int, num_host_blocks: int) -> tuple[Advice, ...]:
    """Return the advice that the measurements so far support, at most one line a topic.

    Args:
        snapshot: The engine at a step boundary.
        num_blocks: Size of its device pool.
        num_host_blocks: Size of its host pool; 0 without one.
    """
    if snapshot.unknown_counters:
        return ()  # another's engine, which does not measure what advice needs
    found = (
        _block_size(snapshot),
        _swap_space(snapshot, num_blocks, num_host_blocks),
        _policy(snapshot),
        _watermark(snapshot, num_blocks),
        _compaction(snapshot),
        _cache_size(snapshot, num_blocks),
    )
    return tuple(advice for advice in found if advice is not None)


def _block_size(snapshot: Snapshot) -> Advice | None:
    facts, at = snapshot.facts, snapshot.block_size
    if not facts.num_finished:
        return None
    taken = {max(1, at // 2): facts.blocks_at_half, at: facts.blocks_at_size, 2 * at: facts.blocks_at_double}
    taken = {s: n for s, n in sorted(taken.items()) if s <= MAX_BLOCK_SIZE}
    empty = {s: n * s - facts.finished_tokens for s, n in taken.items()}
    half = median_bound(facts.length_buckets)
    text = (
        f"{count(facts.num_finished)} finished sequences of {count(facts.finished_tokens / facts.num_finished)} tokens "
        f"on average (half of them below {count(half)}) end with {percent(ratio(empty[at], taken[at] * at))} of their "
        f"slots empty in blocks of {at} tokens"
    )
    others = [f"{percent(ratio(empty[s], taken[s] * s))} in blocks of {s}" for s in taken if s != at]
    text += f"; it would be {' and '.join(others)}."
    numbers: dict[str, Number] = {"finished": facts.num_finished, "tokens": facts.finished_tokens, "block_size": at}
    for s in taken:
        numbers |= {f"blocks_at_{s}": taken[s], f"empty_slots_at_{s}": empty[s]}
    if not snapshot.block_bytes:
        return Advice("block size", "fine", text, numbers)
    token_bytes = snapshot.block_bytes // at
    cost = {s: empty[s] * token_bytes + taken[s] * ENTRY_BYTES for s in taken}
    numbers |= {f"bytes_at_{s}": cost[s] for s in taken} | {"token_bytes": token_bytes}
    sums = ", ".join(f"{s}: {size(empty[s] * token_bytes)} + {size(taken[s] * ENTRY_BYTES)}" for s in taken)
    text += (
        f" Empty slots of {size(token_bytes)} and table entries of {ENTRY_BYTES} B take together, by block size, {sums}"
    )
    best = min(cost, key=lambda s: (cost[s], s))
    if best != at and cost[at] - cost[best] > _WORTH_A_CHANGE * cost[at]:
        saved = percent(1 - cost[best] / cost[at])
        return Advice("block size", "advice", f"{text}: --block-size {best} saves {saved} of it.", numbers)
    return Advice("block size", "fine", f"{text}: {at} is well chosen.", numbers)


def _swap_space(snapshot: Snapshot, num_blocks: int, num_host: int) -> Advice | None:
    facts = snapshot.facts
    if snapshot.preempt != "swap" or facts.peak_running <= 1:
        return None  # nobody would be swapped out
    needed = facts.peak_swap_blocks
    enough = round(MIN_SWAP_RATIO * num_blocks)
    numbers: dict[str, Number] = {
        "host_blocks": num_host, "device_blocks": num_blocks, "peak_blocks": needed,
        "shortfalls": facts.swap_shortfalls,
    }  # fmt: skip
    of_pool = percent(num_host / num_blocks)
    share = f"the host tier's {blocks(num_host)} are {of_pool} of the device pool's {count(num_blocks)}"
    used = f"At most {blocks(needed)} had to be there at once"
    if facts.swap_shortfalls:
        text = (
            f"{used}; {share}. {count(facts.swap_shortfalls)} times there was no room, and the sequence was computed "
            f"anew: --swap-blocks {max(needed, enough)} (the greater of that need and {MIN_SWAP_RATIO:.0%})."
        )
        return Advice("swap space", "warning", text, numbers)
    if num_host < MIN_SWAP_RATIO * num_blocks:
        text = f"{share[0].upper()}{share[1:]}, below {MIN_SWAP_RATIO:.0%}: --swap-blocks {enough}. {used}."
        return Advice("swap space", "warning", text, numbers)
    if not needed:
        return None
    return Advice("swap space", "fine", f"{used}, {percent(needed / num_host)} of the host tier; {share}.", numbers)


def _policy(snapshot: Snapshot) -> Advice | None:
    facts, counters = snapshot.facts, snapshot.counters
    preemptions = counters.preemptions_swap + counters.preemptions_recompute
    median = median_bound(facts.wait_buckets)
    if median is None or (not preemptions and not facts.longest_wait_steps):
        return None
    longest_s = facts.longest_wait_steps * STEP_S
    share = preemptions / facts.num_starts
    numbers: dict[str, Number] = {
        "starts": facts.num_starts, "preemptions_swap": counters.preemptions_swap,
        "preemptions_recompute": counters.preemptions_recompute, "longest_wait_steps": facts.longest_wait_steps,
        "median_wait_below_steps": median,
    }  # fmt: skip
    text = (
        f"{count(preemptions)} preemptions ({count(counters.preemptions_swap)} by swap, "
        f"{count(counters.preemptions_recompute)} by recompute) in {count(facts.num_starts)} starts, {percent(share)}. "
        f"The longest wait was {count(facts.longest_wait_steps)} steps ({seconds(longest_s)}), half of all below "
        f"{count(median)} step{'' if median == 1 else 's'}"
    )
    if longest_s >= _STARVED_S and facts.longest_wait_steps >= _STARVED_TIMES * median:
        text += f", {count(facts.longest_wait_steps / median)} times less: somebody starves under {snapshot.policy}."
        return Advice("policy", "warning", text, numbers)
    if share > _MANY:
        cure = "raise --watermark or lower --max-running, so that fewer start than the pool can hold"
        return Advice("policy", "advice", f"{text}. More than {_MANY:.0%} of starts repeat work: {cure}.", numbers)
    return Advice("policy", "fine", f"{text}.", numbers)


def _watermark(snapshot: Snapshot, num_blocks: int) -> Advice | None:
    facts, counters = snapshot.facts, snapshot.counters
    preemptions = counters.preemptions_swap + counters.preemptions_recompute
    if not preemptions and not facts.watermark_steps:
        return None
    kept = round(snapshot.watermark_ratio * num_blocks)
    waited = facts.watermark_steps / snapshot.step if snapshot.step else 0.0
    numbers: dict[str, Number] = {
        "watermark_blocks": kept, "peak_running": facts.peak_running, "watermark_steps": facts.watermark_steps,
        "capacity_steps": facts.capacity_steps, "steps": snapshot.step, "preemptions": preemptions,
    }  # fmt: skip
    text = (
        f"{blocks(kept)} ({percent(snapshot.watermark_ratio)}) are kept for up to {count(facts.peak_running)} running "
        f"sequences, each of which may need one in any step. The queue waited for them alone in "
        f"{count(facts.watermark_steps)} of {count(snapshot.step)} steps ({percent(waited)}), with "
        f"{count(preemptions)} preemptions"
    )
    if preemptions > _MANY * facts.num_starts and kept < facts.peak_running:
        wanted = facts.peak_running / num_blocks
        return Advice("watermark", "advice", f"{text}: --watermark {wanted:.2g} keeps one for each.", numbers)
    if not preemptions and waited > _MANY:
        return Advice("watermark", "advice", f"{text}: a lower --watermark would let more of them start.", numbers)
    return Advice("watermark", "fine", f"{text}.", numbers)


def _compaction(snapshot: Snapshot) -> Advice | None:
    facts, counters = snapshot.facts, snapshot.counters
    runs = counters.compactions_manual + counters.compactions_threshold
    failed = counters.failures_contiguous
    if not failed and not runs and not facts.copy_runs:
        return None
    mean = ratio(facts.copied_blocks, facts.copy_runs)
    numbers: dict[str, Number] = {
        "failed_contiguous": failed, "compactions": runs, "moved_blocks": counters.compaction_moved_blocks,
        "copied_blocks": facts.copied_blocks, "copy_runs": facts.copy_runs, "blocks_a_copy": mean,
    }  # fmt: skip
    parts = []
    if facts.copy_runs:
        parts.append(
            f"swaps copied {blocks(facts.copied_blocks)} in {count(facts.copy_runs)} runs, {mean:.1f} blocks a copy"
        )
    if runs:
        parts.append(f"{count(runs)} compactions moved {blocks(counters.compaction_moved_blocks)}")
    if failed:
        parts.insert(0, f"{count(failed)} contiguous requests failed although enough blocks were free")
    text = "; ".join(parts)
    text = text[0].upper() + text[1:]
    if failed:
        cure = "--compact auto makes room" if snapshot.compact != "auto" else "a lower --compact-threshold acts sooner"
        return Advice("compaction", "warning", f"{text}: {cure}.", numbers)
    if mean is not None and mean < _SHORT_COPY and snapshot.compact != "auto":
        return Advice("compaction", "advice", f"{text}: compacting by sequence makes copies longer.", numbers)
    return Advice("compaction", "fine", f"{text}.", numbers)


def _cache_size(snapshot: Snapshot, num_blocks: int) -> Advice | None:
    reuse = snapshot.reuse
    if reuse is None or not reuse.query_blocks:
        return None
    ratios = hit_ratios(reuse)
    half, double = ratios.get(max(1, round(num_blocks / 2))), ratios.get(2 * num_blocks)
    own = ratio(snapshot.counters.hit_blocks, snapshot.counters.query_blocks)
    if own is None or (half is None and double is None):
        return None
    numbers: dict[str, Number] = {
        "blocks": num_blocks, "hit_ratio": own, "predicted_ratio": ratios.get(num_blocks), "half_ratio": half,
        "double_ratio": double, "query_blocks": reuse.query_blocks, "is_exact": reuse.is_exact,
    }  # fmt: skip
    told = " and ".join(_change(own, share, factor, num_blocks, reuse) for share, factor in ((half, 0.5), (double, 2)))
    off = prediction_error(ratios.get(num_blocks), own)
    kind = (
        "exact" if reuse.is_exact else "estimates" + ("" if off is None else f", off by {off * 100:+.1f} points here")
    )
    text = (
        f"{percent(own)} of {count(reuse.query_blocks)} queried blocks hit with {blocks(num_blocks)}; {told} ({kind})"
    )
    if double is not None and double - own >= _GAIN:
        saved = count((double - own) * reuse.query_blocks)
        return Advice("cache size", "advice", f"{text}: doubling saves computing {saved} blocks.", numbers)
    if half is not None and own - half <= _LOSS and reuse.query_blocks >= num_blocks:
        return Advice("cache size", "advice", f"{text}: half the pool would hit nearly as much.", numbers)
    return Advice("cache size", "fine", f"{text}.", numbers)


def _change(own: float, other: float | None, factor: float, num_blocks: int, reuse: ReuseSummary) -> str:
    capacity = max(1, round(num_blocks * factor))
    if other is None:
        bound = "a larger request" if capacity < reuse.floor else "what was refused"
        return f"unknown with {count(capacity)} ({bound} would change it)"
    return f"{percent(other)} with {count(capacity)} ({(other - own) * 100:+.1f} points)"


def prediction_error(predicted: float | None, counted: float | None) -> float | None:
    """Return by how much the predicted hit ratio of the pool's own size is off; ``None`` when either is unknown."""
    return None if predicted is None or counted is None else predicted - counted


def hit_ratios(reuse: ReuseSummary) -> dict[int, float | None]:
    """Return the predicted hit ratio by capacity; ``None`` where it cannot be known."""
    return {
        p.capacity: None if p.hit_blocks is None else ratio(p.hit_blocks, reuse.query_blocks) for p in reuse.predictions
    }
