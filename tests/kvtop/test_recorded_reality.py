"""Recorded engines: what their own counters say at the end of each phase is what their events add up to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtop.sources.remote.feed import END, Feed, unframe
from kvtop.sources.remote.residency import Residency

CAPTURES = Path(__file__).parents[3] / "shared" / "reference" / "real-captures"
PHASES = sorted(CAPTURES.glob("*.phases.jsonl"))
#: Groups of a hybrid model store their blocks each in its own way: its counters of tokens are no sum of those.
VLLM = [path for path in PHASES if path.name.startswith("vllm") and "hybrid" not in path.name]
SGLANG = [path for path in PHASES if path.name.startswith("sglang")]
pytestmark = pytest.mark.skipif(not PHASES, reason="no recorded engines in ../shared/reference")

#: What a recorded vLLM was started with: blocks that can hold content, of each rank.
POOL_BLOCKS = 511


class Phase(NamedTuple):
    """One recorded phase: what was asked, and all that was known at its end."""

    name: str
    usages: list[Mapping[str, int]]
    num_unanswered: int
    metrics: Mapping[str, float]
    residency: Residency
    feeds: Mapping[int, Feed]
    stored: int

    def metric(self, name: str) -> float:
        """Return a metric, added up over its series."""
        return sum(value for key, value in self.metrics.items() if key.partition("{")[0] == name)


def phases(path: Path) -> Iterator[Phase]:
    """Play the events up to the end of each phase. The buffer is as far as it was recorded: the first of each reply."""
    log = path.with_name(path.name.replace(".phases.", ".events."))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    residency = Residency()
    feeds: dict[int, Feed] = {}
    done = 0
    for line in path.read_text().splitlines():
        told = json.loads(line)
        before = residency.stored
        for record in records[done : told["events_so_far"]]:
            rank = rank_of(record["payload"])
            if rank not in feeds:
                feeds[rank] = Feed(residency, rank, lambda start: iter(buffered(path, start)))
            feeds[rank].take([bytes.fromhex(frame) for frame in record["frames_hex"]])
        done = told["events_so_far"]
        usages = [answer["usage"] for answer in told["answers"] if answer.get("usage")]
        num_unanswered = len(told["answers"]) - len(usages)
        metrics = told["kv_metrics_after"] or {}
        yield Phase(told["phase"], usages, num_unanswered, metrics, residency, feeds, residency.stored - before)
    assert done == len(records)


def rank_of(payload: list[Any]) -> int:
    return payload[2] or 0 if len(payload) > 2 else 0


def buffered(path: Path, start: int) -> list[tuple[int, bytes]]:
    """Return what was recorded of the answer to a replay from ``start`` on."""
    replay = path.with_name(path.name.replace(".phases.", ".replay."))
    found = []
    for line in replay.read_text().splitlines() if replay.exists() else ():
        reply = json.loads(line)
        number, body = unframe([bytes.fromhex(frame) for frame in reply["frames_hex"]])
        if reply["asked_from"] == start and number != END:
            found.append((int.from_bytes(number, "big"), body))
    return found


@pytest.mark.parametrize("path", VLLM, ids=lambda path: path.name.removesuffix(".phases.jsonl"))
def test_blocks_that_vllm_stored_are_those_that_it_computed(path: Path) -> None:
    hits = preemptions = 0.0
    checked = 0
    for phase in phases(path):
        new_hits = phase.metric("vllm:prefix_cache_hits_total") - hits
        new_preemptions = phase.metric("vllm:num_preemptions_total") - preemptions
        hits, preemptions = hits + new_hits, preemptions + new_preemptions
        assert sum(phase.residency.copies().values()) <= POOL_BLOCKS * max(1, len(phase.feeds))
        assert phase.metric("vllm:kv_cache_usage_perc") == 0.0  # at rest nothing is held, however much is resident
        assert all(feed.trouble is None for feed in phase.feeds.values())
        if phase.num_unanswered or new_preemptions or not phase.usages:
            continue  # what an aborted or preempted request computed is in no answer
        # The last token of an answer is not computed; of the rest, whole blocks are stored that were not found.
        size = phase.residency.block_size
        computed = sum((u["prompt_tokens"] + u["completion_tokens"] - 1) // size for u in phase.usages)
        assert phase.stored == computed - new_hits / size, phase.name
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("path", SGLANG, ids=lambda path: path.name.removesuffix(".phases.jsonl"))
def test_resident_tokens_are_those_that_sglang_could_evict(path: Path) -> None:
    checked = 0
    for phase in phases(path):
        # A page that is in use is not told apart by events, and after a reset the gauges wait for the next step.
        if phase.metric("sglang:kv_used_tokens") or not phase.feeds or phase.name == "reset":
            continue
        resident = sum(phase.residency.copies().values()) * phase.residency.block_size
        assert resident == phase.metric("sglang:kv_evictable_tokens"), phase.name
        assert phase.feeds[0].trouble is None  # its warm-up came from the buffer
        free = phase.metric("sglang:max_total_num_tokens") - resident
        assert free == phase.metric("sglang:kv_available_tokens"), phase.name
        checked += 1
    assert checked >= 7


@pytest.mark.parametrize("path", PHASES, ids=lambda path: path.name.removesuffix(".phases.jsonl"))
def test_a_reset_that_was_asked_for_is_seen_at_last(path: Path) -> None:
    """vLLM tells it with its next step, SGLang at once."""
    names = [(phase.name, phase.residency.cleared) for phase in phases(path)]
    asked = [at for at, (name, _) in enumerate(names) if name == "reset"]
    for at in asked:
        later = min(at + 1, len(names) - 1)
        assert names[later][1] > names[at - 1][1]


@pytest.mark.parametrize("path", VLLM, ids=lambda path: path.name.removesuffix(".phases.jsonl"))
def test_a_prompt_that_is_asked_again_finds_the_blocks_that_are_resident(path: Path) -> None:
    """The hits of the second request are the resident beginning of its chain, but for the block it computes anew."""
    told = {phase.name: phase for phase in phases(path) if phase.name in ("cold", "warm")}
    if "warm" not in told or len(told["warm"].feeds) > 1:
        pytest.skip("not recorded, or the second request went to another rank")
    lookups = told["warm"].residency.lookups[0].newest()
    size = told["warm"].residency.block_size
    again = next(lookup for lookup in lookups if lookup.repeated)
    assert again.hits * size == 288  # of 320 tokens in blocks of 32: all but the last, which is stored a second time
