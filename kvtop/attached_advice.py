"""Advice for an attached engine, from the estimates that its cache events allow. Says what they cannot tell. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtop.advisor import Advice, Number, Topic
from kvtop.model.format import count, percent, seconds
from kvtop.model.what_if import Outcome, Traffic, WhatIf

#: What must be read before the estimates.
UNSEEN = "A request whose blocks were all resident stores nothing and leaves no event: hits are a lower bound."


def advise_attached(estimates: WhatIf) -> tuple[Advice, ...]:
    """Return what the estimates say, at most one line a topic."""
    return tuple(_advice(estimates))


def _advice(estimates: WhatIf) -> Iterator[Advice]:
    traffic = estimates.traffic
    if not traffic.blocks:
        return
    yield _traffic(estimates)
    yield _capacity(estimates)
    yield _line("block size", estimates.block_sizes, _BLOCK_SIZE_NOTE)
    tried = f"kvtop's own allocator, on the newest {count(estimates.replayed)} lookups"
    yield _line("policy", estimates.policies, f"Tried on {tried}; the engine's own order of eviction may differ.")


_BLOCK_SIZE_NOTE = (
    "In the same memory. Smaller blocks cannot be told: events name whole blocks, and token ids are not kept."
)


def _traffic(estimates: WhatIf) -> Advice:
    traffic, size = estimates.traffic, estimates.block_size
    fresh = traffic.blocks - traffic.hits - traffic.again - traffic.repeated
    text = (
        f"{count(traffic.lookups)} requests in {seconds(estimates.span_s)} looked up or made {count(traffic.blocks)} "
        f"blocks: {_share(traffic.hits, traffic)} were resident, {_share(traffic.again, traffic)} had been and were "
        f"gone, {_share(traffic.repeated, traffic)} were stored twice, {_share(fresh, traffic)} were new. {UNSEEN}"
    )
    hits_seen = traffic.hits * size
    if estimates.told_hits and size:
        text += (
            f" The engine counts {count(estimates.told_hits)} hit tokens of {count(estimates.told_queries)} looked up "
            f"meanwhile; the events account for {count(hits_seen)} ({percent(hits_seen / estimates.told_hits)})."
        )
    if traffic.unknown:
        text += f" {count(traffic.unknown)} more were left out: the beginning of their chain was not known."
    numbers: dict[str, Number] = {
        "lookups": traffic.lookups, "blocks": traffic.blocks, "hits": traffic.hits, "again": traffic.again,
        "repeated": traffic.repeated, "unknown": traffic.unknown, "told_hits": estimates.told_hits,
    }  # fmt: skip
    return Advice("traffic", "fine", text, numbers)


def _capacity(estimates: WhatIf) -> Advice:
    traffic = estimates.traffic
    own = next((o.hit_ratio for o in estimates.capacities if o.is_own), None)
    seen = traffic.hits / traffic.blocks
    off = "" if own is None else f"; at its own size the estimate is off by {(own - seen) * 100:+.1f} points"
    held = f" of which running requests hold {count(estimates.held)}" if estimates.held else ""
    told = "" if estimates.is_told else ", the most that was resident: its size is not told"
    note = f"Estimates for {count(estimates.capacity)} blocks a rank{told}{held}{off}."
    advice = _line("cache size", estimates.capacities, note)
    more = traffic.again / traffic.blocks
    if more >= 0.05:
        saved = f"One that loses nothing would save computing {count(traffic.again)} blocks ({percent(more)})."
        return Advice("cache size", "advice", f"{advice.text} {saved}", advice.numbers)
    return advice


def _line(topic: Topic, outcomes: Sequence[Outcome], note: str) -> Advice:
    told = ", ".join(f"{percent(o.hit_ratio)} with {o.name}{' (as it is)' if o.is_own else ''}" for o in outcomes)
    numbers: dict[str, Number] = {o.name: o.hit_ratio for o in outcomes}
    return Advice(topic, "fine", f"Hits: {told}. {note}", numbers)


def _share(part: int, traffic: Traffic) -> str:
    return percent(part / traffic.blocks)
