"""Every synthetic workload: seeded, lazy, in order, fitting every pool; and that each does what its name promises."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.config import EngineConfig
from allocator.content import Request
from allocator.engine import Engine
from allocator.scripts import CancelAfter, CancelAt, ForkAt, Script
from kvtop.engine_setup import ATTACHED
from kvtop.workloads.catalog import WORKLOADS, workload_lines
from kvtop.workloads.clients import beam_script
from kvtop.workloads.draws import SizeDial
from kvtop.workloads.load import Load, parse_workloads

#: Those with requests of their own.
NAMES = tuple(name for name in WORKLOADS if name != ATTACHED)


def take(name: str, count: int, seed: int = 0, block_size: int = 16, num_blocks: int = 4096, **more: object):
    requests = WORKLOADS[name].requests(seed, block_size=block_size, num_blocks=num_blocks, **more)
    return list(itertools.islice(requests, count))


def facts(request: Request) -> tuple[object, ...]:
    content = request.content
    return (
        request.num_prompt,
        request.arrival_s,
        request.label,
        request.priority,
        request.contiguous,
        request.script,
        content.tokens(0, getattr(content, "num_known", content.num_tokens)).tobytes(),
    )


def play(name: str, steps: int, num_blocks: int = 512, **settings: object) -> Engine:
    """Run a workload on a small pool, checking every law a few times."""
    config = EngineConfig(num_blocks=num_blocks, num_swap_blocks=num_blocks // 2, geometry="none", **settings)
    load = Load(parse_workloads(name), config.seed, block_size=config.block_size, num_blocks=num_blocks)
    e = Engine(config, load=load)
    for _ in range(5):
        e.advance(steps // 5)
        e.check()
    return e


# -- all of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_requests_however_many_are_taken(name):
    few, many = take(name, 30), take(name, 80)
    assert [facts(r) for r in few] == [facts(r) for r in many[:30]]
    other = [r.content.tokens(0, 8).tobytes() for r in take(name, 5, seed=1)]
    assert other != [r.content.tokens(0, 8).tobytes() for r in few[:5]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    block_size=st.sampled_from([1, 2, 7, 16, 512, 1024]),
    num_blocks=st.sampled_from([1, 2, 3, 8, 96, 512, 4096, 20_000]),
    size=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_every_request_fits_every_pool(name, seed, block_size, num_blocks, size):
    before_s = 0.0
    dial = SizeDial(size)
    for request in take(name, 12, seed, block_size, num_blocks, dial=dial):
        assert request.num_prompt >= 1
        assert request.num_output >= 0
        assert -(-request.content.num_tokens // block_size) <= num_blocks
        assert before_s <= request.arrival_s < 1e9
        before_s = request.arrival_s


@pytest.mark.parametrize("name", NAMES)
def test_none_ends_and_the_dial_makes_requests_longer(name):
    usual, smaller = (
        [r.content.num_tokens for r in take(name, 800, dial=SizeDial(scale))][400:] for scale in (1.0, 0.25)
    )
    if name == "fragmenter":
        assert max(smaller) < 0.3 * max(usual)  # the run; the waves fill the pool whatever the dial
    else:
        assert np.mean(smaller) < 0.75 * np.mean(usual)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_that_is_asked_for_is_kept(name):
    if all(parameter.name != "rate_per_s" for parameter in WORKLOADS[name].parameters):
        pytest.skip("its arrivals come from the pool's size")
    requests = take(name, 2000, rate_per_s=20.0)
    assert 2000 / requests[-1].arrival_s == pytest.approx(20, rel=0.25)


def test_there_is_one_line_a_workload():
    lines = workload_lines()
    assert [line.split()[0] for line in lines] == list(WORKLOADS)
    assert all(len(line) <= 100 and "\n" not in line for line in lines)
    promised = "chat rag agents batch beam burst priority contiguous fragmenter pressure cancel-storm"
    assert set(promised.split()) <= set(NAMES)


# -- each by itself ----------------------------------------------------------------------------------


def test_rag_finds_its_documents_again():
    c = play("rag", 2000).counters
    assert c.hit_blocks / c.query_blocks > 0.75
    requests = take("rag", 500)
    assert Counter(r.label.split()[3].partition("v")[0] for r in requests).most_common(1)[0][0] == "0"
    assert len({tuple(r.content.tokens(0, 32)) for r in requests}) < 40  # few documents, and few versions of them


def test_agents_grow_their_prefixes_and_branch():
    streams: dict[str, np.ndarray] = {}
    grown, parents = 0, Counter()
    for request in take("agents", 600):
        task, call = request.label.removeprefix("agents ").split("/")
        stream = request.content.tokens(0, request.content.num_tokens)
        mine = [c for c in range(int(call)) if f"{task}/{c}" in streams]
        whose = [c for c in mine if np.array_equal(streams[f"{task}/{c}"], stream[: len(streams[f"{task}/{c}"])])]
        if int(call):
            assert whose, "a call goes on from an earlier one of its task"
            assert request.num_prompt > len(streams[f"{task}/{whose[-1]}"])
            parents[task, whose[-1]] += 1
            grown += 1
        streams[f"{task}/{call}"] = stream
    assert grown > 300
    assert sum(1 for children in parents.values() if children > 1) > 20
    c = play("agents", 2000).counters
    assert c.hit_blocks / c.query_blocks > 0.35


def test_batch_arrives_at_few_moments_and_is_long():
    requests = take("batch", 3000)
    moments = Counter(r.arrival_s for r in requests)
    assert len(moments) < 20
    assert requests[0].arrival_s == 0
    ordinary = np.mean([r.num_output for r in take("burst", 500)])
    assert np.mean([r.num_output for r in requests]) > 2 * ordinary
    keys = [key for r in requests[:50] for key in r.content.keys(16)]
    assert len(set(keys)) == len(keys)


def test_beam_forks_prunes_and_copies_on_write():
    e = play("beam", 3000)
    c = e.counters
    searches = sum(1 for r in take("beam", 1000, num_blocks=512) if r.arrival_s <= e.time_s)
    assert c.submitted > 3 * searches
    assert c.copy_on_write_blocks > 2 * searches
    assert 0.3 < c.cancelled / c.submitted < 0.8
    assert c.finished > 2 * searches


def hypotheses(script: Script, start: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens at which each member of a search is pruned (or a large number), and all (born, ended) pairs."""
    ends = [act.num_tokens for act in script if isinstance(act, CancelAt)] or [1 << 40]
    spans = [(start, ends[0])]
    for act in script:
        if isinstance(act, ForkAt):
            for child in act.children:
                spans += hypotheses(child, act.num_tokens)[1]
    return ends, spans


@given(
    seed=st.integers(0, 1000),
    prompt=st.integers(1, 500),
    output=st.integers(0, 300),
    width=st.integers(2, 9),
    rounds=st.integers(0, 6),
)
def test_a_beam_keeps_its_width_from_its_first_token_to_its_end(seed, prompt, output, width, rounds):
    script = beam_script(np.random.default_rng(seed), prompt, output, width=width, rounds=rounds)
    _, spans = hypotheses(script, prompt)
    for token in range(prompt + 1, prompt + output, 7):
        assert sum(born <= token < ended for born, ended in spans) == width


def test_burst_is_on_and_off():
    at = np.array([r.arrival_s for r in take("burst", 3000)])
    assert ((at % 16.0) < 4.0 + 1e-6).all()
    counts = np.bincount((at // 1.0).astype(int))
    assert np.var(counts) / np.mean(counts) > 10  # 1 for a Poisson process
    assert np.diff(at).max() > 10.0


def test_priority_has_two_classes_the_low_one_longer():
    requests = take("priority", 2000)
    high, low = ([r for r in requests if r.priority == p] for p in (1, 0))
    assert len(high) + len(low) == 2000
    assert len(high) / 2000 == pytest.approx(0.3, abs=0.05)
    assert np.mean([r.num_output for r in low]) > 3 * np.mean([r.num_output for r in high])


@pytest.mark.parametrize("name", ["contiguous", "fragmenter"])
def test_runs_are_missing_without_compaction_and_had_with_it(name):
    off, auto = (play(name, 6000, compact=mode).counters for mode in ("off", "auto"))
    assert off.contiguous_admitted > 10
    assert off.failures_contiguous > 10
    assert off.contiguous_longest_blocks < off.contiguous_needed_blocks < off.contiguous_allocatable_blocks
    assert (auto.failures_contiguous, auto.compactions_contiguous > 0) == (0, True)
    waited = [c.contiguous_waited_steps / c.contiguous_admitted for c in (off, auto)]
    assert waited[1] < 1 < 10 < waited[0]


def test_pressure_preempts():
    e = play("pressure", 3000)
    c = e.counters
    assert c.preemptions_swap + c.preemptions_recompute > 50
    assert c.finished > 50
    assert c.peak_active == 512
    assert len(e.scheduler.waiting) < 700  # clients give up, or the queue would grow without end


def test_clients_of_a_storm_hang_up_in_every_stage():
    requests = take("cancel-storm", 2000)
    assert all(len(r.script) == 1 for r in requests)
    (at,) = ([r for r in requests if isinstance(r.script[0], CancelAt)],)
    assert any(r.script[0].num_tokens == r.num_prompt for r in at)
    assert any(r.num_prompt < r.script[0].num_tokens < r.content.num_tokens for r in at)
    after = [r.arrival_s + r.script[0].seconds for r in requests if isinstance(r.script[0], CancelAfter)]
    assert Counter(round(moment, 6) for moment in after).most_common(1)[0][1] > 25  # the storm itself

    e = Engine(
        EngineConfig(num_blocks=512, num_swap_blocks=256, geometry="none"),
        load=Load(parse_workloads("cancel-storm"), 0, block_size=16, num_blocks=512),
    )
    stages: Counter[str] = Counter()
    real = e.lifecycle.cancel

    def cancel(sequence) -> None:
        stages[sequence.status.name] += 1
        real(sequence)

    e.lifecycle.cancel = cancel  # type: ignore[method-assign]
    e.advance(4000)
    e.check()
    assert min(stages[stage] for stage in ("WAITING", "RUNNING", "SWAPPED")) > 0
    assert e.counters.finished > 50
