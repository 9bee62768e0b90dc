"""The model workload: over the pool it gives bit for bit what it gives over a contiguous cache, whatever moves."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from allocator.commands import (
    Cancel,
    Command,
    Compact,
    EvictCached,
    Fork,
    Pin,
    Preempt,
    Resize,
    SubmitLoad,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
    command_name,
)
from allocator.config import EngineConfig
from allocator.content import GeneratedContent, Request, TokenContent
from allocator.engine import Engine
from allocator.errors import InvariantViolation
from allocator.geometry import GEOMETRIES
from allocator.ids import Status
from allocator.plans import CopyJob
from allocator.torch_storage import TorchStorage
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.workloads.model import VOCABULARY, make_request, model_requests
from kvtop.workloads.transformer import ContiguousCache, ModelCompute, Transformer

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture(autouse=True)
def _one_thread():
    """For what is computed without an engine: waiting for other threads costs many times what it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def request(tokens: np.ndarray, output: int, at: float = 0.0) -> Request:
    return Request(GeneratedContent(tokens, output, vocabulary=VOCABULARY), len(tokens), at)


def engine(requests=(), *, verify: bool = True, storage: TorchStorage | None = None, **settings: object) -> Engine:
    settings = {"num_blocks": 64, "num_swap_blocks": 32, "geometry": "model", "device": "cpu", **settings}
    return Engine(
        EngineConfig(**settings),
        requests,
        storage=storage,
        make_request=make_request,
        make_compute=lambda manager, storage: ModelCompute(manager, storage, seed=1, verify=verify),
    )


def run(e: Engine, most: int = 2000) -> Engine:
    for _ in range(most):
        if not e.advance(1):
            return e
        e.check()
    raise AssertionError(f"not over after {most} turns: {e.stuck_reason}")


def difference(e: Engine) -> float:
    verified = e.compute.verified
    assert verified is not None
    assert verified.tokens > 0
    return verified.max_difference


def continuation(tokens: np.ndarray, output: int) -> list[int]:
    """What the model says after a prompt, without engine or pool."""
    model, cache = Transformer(1, torch.device("cpu")), ContiguousCache(len(tokens) + output, torch.device("cpu"))
    stream = tokens.tolist()
    for position in range(len(tokens) + output - 1):
        logits = model.logits(stream[position], position, cache)
        if position + 1 == len(stream):
            stream.append(int(logits.argmax()))
    return stream


# -- the model ---------------------------------------------------------------------------------------


def test_a_sequence_says_what_the_model_says_without_a_pool():
    r = request(prompt(0, 21), 40)
    run(engine([r], block_size=4))
    assert r.content.stream.tolist() == continuation(prompt(0, 21), 40)


def test_what_it_says_depends_on_every_token_before():
    first, second = prompt(0, 40), prompt(0, 40)
    second[0] = (second[0] + 1) % VOCABULARY
    model, caches = Transformer(1, torch.device("cpu")), [ContiguousCache(40, torch.device("cpu")) for _ in "ab"]
    for position in range(40):
        a, b = (model.logits(int(s[position]), position, c) for s, c in zip((first, second), caches, strict=True))
        assert not torch.equal(a, b)


def test_other_seeds_give_other_models():
    caches = [ContiguousCache(1, torch.device("cpu")) for _ in range(3)]
    a, b, c = (
        Transformer(seed, torch.device("cpu")).logits(7, 0, k) for seed, k in zip((1, 1, 2), caches, strict=True)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def textbook_logits(model: Transformer, stream: list[int]) -> torch.Tensor:
    """The same network as written in books: all positions at once, a causal mask, float64. [n, VOCABULARY]"""
    n, heads, group, dim = len(stream), 2, 2, 16
    angles = torch.arange(n, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    cos, sin = (f(angles)[:, None, :] for f in (torch.cos, torch.sin))
    mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x * x).sum(-1, keepdim=True).sqrt()

    x = model._embedding[torch.tensor(stream)].double()
    for into, out, up, down in ([w.double() for w in layer] for layer in model._layers):
        q, k, v = (normed(x) @ into.T).split((heads * group * dim, heads * dim, heads * dim), -1)
        q, k, v = (t.view(n, -1, dim) for t in (q, k, v))
        q, k, v = rotated(q), rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("ihd,jhd->hij", q, k) / dim**0.5 + mask, -1)
        x = x + torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ out.T
        x = x + torch.relu(normed(x) @ up.T) @ down.T
    return normed(x) @ model._head.double().T


def test_it_is_the_network_it_says_it_is():
    model, cache, stream = Transformer(1, torch.device("cpu")), ContiguousCache(50, torch.device("cpu")), prompt(0, 50)
    found = [model.logits(int(token), position, cache) for position, token in enumerate(stream)]
    torch.testing.assert_close(torch.stack(found).double(), textbook_logits(model, stream.tolist()), rtol=0, atol=1e-3)


# -- one mechanism at a time: the same words as without it, and no difference -------------------------


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_preemption_changes_no_word(preempt):
    requests = [request(prompt(seed, 12), 40) for seed in range(5)]
    e = run(engine(requests, num_blocks=26, num_swap_blocks=64, block_size=4, preempt=preempt))
    counters = e.counters
    assert counters.preemptions_swap if preempt == "swap" else counters.preemptions_recompute
    for seed, r in enumerate(requests):
        assert r.content.stream.tolist() == continuation(prompt(seed, 12), 40)
    assert difference(e) == 0


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_prompt_found_in_the_cache_goes_on_as_if_computed(length):
    """At 32 tokens the whole prompt is found, and only its last token is computed again, over shared blocks."""
    requests = [request(prompt(0, length), 20, at) for at in (0.0, 0.0, 0.1, 5.0)]
    e = run(engine(requests, block_size=8))
    assert e.counters.hit_blocks == 3 * (4 if length == 33 else 3)
    expected = continuation(prompt(0, length), 20)
    assert [r.content.stream.tolist() for r in requests] == [expected] * 4
    assert difference(e) == 0


def test_generated_blocks_are_found_by_a_prompt_that_repeats_them():
    said = continuation(prompt(0, 10), 30)
    e = run(engine([request(prompt(0, 10), 30), request(np.array(said, np.int32), 5, 5.0)], block_size=4))
    assert e.counters.hit_blocks == 9
    assert difference(e) == 0


def test_a_fork_shares_then_goes_its_own_way():
    r = request(prompt(0, 10), 30)
    e = engine([r], block_size=8)
    e.advance(6)
    assert e.apply(Fork(0)).ok
    assert e.apply(Fork(0)).ok
    children = [e.scheduler.find(seq_id).content for seq_id in (1, 2)]
    run(e)
    at = next(i for i in range(40) if children[0].stream[i] != r.content.stream[i])
    streams = [c.stream.tolist() for c in (r.content, *children)]
    assert len({s[at] for s in streams}) == 3
    for s in streams:
        assert s[:at] == streams[0][:at]
        assert s[at + 1 :] == continuation(np.array(s[: at + 1], np.int32), 40 - at - 1)[at + 1 :]
    assert e.counters.copy_on_write_blocks >= 1
    assert difference(e) == 0


def test_a_prompt_in_pieces_is_as_good_as_one():
    r = request(prompt(0, 30), 10)
    e = engine([r], block_size=4)
    whole = e.compute.prefill

    def in_pieces(sequence, start, stop):
        for first in range(start, stop, 7):
            whole(sequence, first, min(first + 7, stop))

    e.compute.prefill = in_pieces
    assert run(e).counters.finished == 1
    assert r.content.stream.tolist() == continuation(prompt(0, 30), 10)
    assert difference(e) == 0


def test_skipped_steps_are_computed_too():
    requests = [[request(prompt(0, 5), 50)] for _ in range(2)]
    one, many = engine(requests[0]), engine(requests[1])
    while one.advance(1):
        pass
    assert many.advance(1000) == one.step
    assert one.compute.verified == many.compute.verified
    assert many.compute.verified.steps == many.step
    assert many.compute.verified.tokens == 55
    assert requests[0][0].content.stream.tolist() == requests[1][0].content.stream.tolist()


def test_tokens_that_were_not_made_for_the_model_are_computed_as_given():
    e = run(engine([Request(TokenContent(prompt(0, 40) + 1000), 20)]))
    assert e.counters.finished == 1
    assert difference(e) == 0


# -- everything at once ------------------------------------------------------------------------------


def draw(rng: random.Random, e: Engine) -> Command:
    sequences = e.unfinished()
    running = [s.seq_id for s in sequences if s.status is Status.RUNNING] or [0]
    swapped = [s.seq_id for s in sequences if s.status is Status.SWAPPED] or [0]
    blocks = e.manager.device.num_blocks
    chosen = tuple(rng.sample(range(blocks), 2))
    return rng.choice(
        (
            lambda: Fork(rng.choice(running)),
            lambda: Fork(rng.choice(running)),
            lambda: Preempt(rng.choice(running), "swap"),
            lambda: Preempt(rng.choice(running), "recompute"),
            lambda: SwapOut(rng.choice(running)),
            lambda: SwapIn(rng.choice(swapped)),
            lambda: SwapIn(rng.choice(swapped)),
            lambda: Compact("pack-low", None, rng.choice((None, 3))),
            lambda: Compact("longest-run", None, None),
            lambda: Compact("by-sequence", None, None),
            lambda: Resize(blocks + rng.randint(1, 20)),
            lambda: Resize(max(48, blocks - rng.randint(1, 20))),
            lambda: EvictCached(rng.choice((None, 2))),
            lambda: Cancel(rng.choice(running)),
            lambda: Pin(chosen),
            lambda: Unpin(tuple(range(blocks))),
            lambda: SubmitLoad(rng.randint(1, 60), rng.randint(0, 40), 1),
            lambda: VerifyContents(),
        )
    )()


#: What every run of random commands must have seen, or it has shown nothing.
KINDS = {
    "fork", "preempt", "swap-out", "swap-in", "compact", "resize", "evict-cached", "cancel", "pin", "unpin",
    "submit-load", "verify-contents",
}  # fmt: skip


def torment(seed: int, steps: int, *, in_full: bool = True, **settings: object) -> Engine:
    """Run with a random command every few steps; ``in_full`` insists that all there is has happened."""
    rng = random.Random(seed)
    blocks = settings.setdefault("num_blocks", 64)
    size = settings.setdefault("block_size", 8)
    e = engine(model_requests(seed, block_size=size, num_blocks=blocks), compact="auto", **settings)
    done: Counter[str] = Counter()
    while e.step < steps:
        e.advance(rng.randint(1, 4))
        command = draw(rng, e)
        if e.apply(command).ok:
            done[command_name(command)] += 1
        if rng.random() < 0.2:
            e.check()
    e.check()
    counters, verified = e.counters, e.compute.verified
    assert (verified.max_difference, counters.integrity_faults) == (0, 0)
    assert verified.tokens > steps
    if not in_full:
        return e
    assert set(done) == KINDS
    if e.config.prefix_cache:
        assert min(counters.hit_blocks, counters.evictions)
    assert min(
        counters.swap_out_blocks,
        counters.swap_in_blocks,
        counters.preemptions_recompute,
        counters.copy_on_write_blocks,
        counters.compaction_moved_blocks,
        counters.grown_blocks,
        counters.shrunk_blocks,
    )
    return e


@pytest.mark.parametrize(
    "settings",
    [{}, {"slab_blocks": 7, "block_size": 5, "preempt": "recompute", "eviction": "lfu"}, {"copy_gb_per_s": 3e-4}],
    ids=["one slab", "small slabs", "copies that take several steps"],
)
def test_operators_at_random_make_no_difference(settings):
    torment(3, 120, **settings)


def test_a_shrink_is_planned_past_the_fences_of_copies_under_way():
    torment(101, 170, in_full=False, slab_blocks=16, preempt="recompute", copy_gb_per_s=1e-4)


def test_the_same_seed_gives_the_same_words_and_counts():
    first, second = (torment(5, 40, in_full=False) for _ in range(2))
    assert first.counters == second.counters
    assert [s.content.stream.tolist() for s in first.unfinished()] == [
        s.content.stream.tolist() for s in second.unfinished()
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("seed", range(4))
def test_operators_at_random_make_no_difference_for_long(seed, device):
    settings = [
        {},
        {"slab_blocks": 16, "preempt": "recompute", "copy_gb_per_s": 1e-4},
        {"prefix_cache": False, "block_size": 16},
        {"num_swap_blocks": 8, "block_size": 3, "num_blocks": 128, "eviction": "fifo"},
    ][seed]
    torment(100 + seed, 2000, device=device, **settings)


# -- what must be found ------------------------------------------------------------------------------


def corrupt(e: Engine, block: int, tier: str = "device", layer: int = 0, part: int = 0, offset: int = 0) -> None:
    slab, local = divmod(block, e.manager.storage.inner.slab_size)
    e.manager.storage.inner.elements(tier, slab)[local, layer, part, offset, 0, 0] += 0.5


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("position", [0, 9, 29])
def test_one_changed_number_is_found_by_the_next_token(layer, part, position):
    e = engine([request(prompt(0, 30), 30)], block_size=8)
    e.advance(2)
    corrupt(e, int(e.table(0)[position // 8]), layer=layer, part=part, offset=position % 8)
    with pytest.raises(InvariantViolation, match="law 5: sequence 0, token 31: its logits differ by"):
        e.advance(1)
    assert e.compute.verified.max_difference > 0
    assert (e.counters.integrity_faults, e.counters.faults_by_law[5]) == (1, 1)
    assert e.events_from(0)[-1].kind == "fault"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_check_finds_it_without_another_token(tier, verify):
    e = engine([request(prompt(0, 30), 30)], block_size=8, verify=verify)
    e.advance(3)
    block = int(e.table(0)[1])
    if tier == "host":
        assert e.apply(SwapOut(0)).ok
        block = int(e.manager.host_tables.table(e.scheduler.find(0).host_row)[1])
    e.check()
    corrupt(e, block, tier, layer=1, part=1, offset=2)
    outcome = e.apply(VerifyContents())
    assert not outcome.ok
    assert outcome.message == (
        f"law 5: sequence 0, token 10: {tier} block {block}, offset 2 holds other keys or values"
    )


def test_a_number_that_is_none_counts_as_a_difference():
    e = engine([request(prompt(0, 30), 30)], block_size=8)
    e.advance(2)
    corrupt(e, int(e.table(0)[0]))
    e.manager.storage.inner.elements("device", 0)[int(e.table(0)[0])] = float("nan")
    with pytest.raises(InvariantViolation, match="differ by inf"):
        e.advance(1)


class ForgetfulStorage(TorchStorage):
    """Copies nothing from the device to the device, and says it did."""

    def copy(self, job: CopyJob) -> int:
        if job.source_tier == job.destination_tier:
            return len(job.sources) * self.block_bytes
        return super().copy(job)


def spread(e: Engine) -> None:
    """Bring the engine to where compaction has something to move: the first sequence cancelled."""
    e.advance(4)
    assert e.apply(Cancel(0)).ok
    assert e.apply(EvictCached()).ok


def two_sequences(**settings: object) -> Engine:
    return engine([request(prompt(seed, 20), 30) for seed in range(2)], block_size=8, **settings)


def test_a_move_without_its_copy_is_found():
    config = two_sequences().config
    e = two_sequences(storage=ForgetfulStorage(GEOMETRIES["model"], config.block_size, "cpu", config.slab_size))
    spread(e)
    assert e.apply(Compact("pack-low")).moved_blocks
    with pytest.raises(InvariantViolation, match="law 5"):
        e.advance(1)


def test_a_table_that_does_not_follow_a_move_is_found(monkeypatch):
    e = two_sequences()
    spread(e)
    monkeypatch.setattr(e.manager.tables, "rename", lambda remap: None)
    assert e.apply(Compact("pack-low")).moved_blocks
    # The old blocks hold the right bytes until somebody else gets them.
    e.submit(request(prompt(9, 20), 5))
    with pytest.raises(InvariantViolation):
        e.advance(40)


def test_a_copy_on_write_without_its_copy_is_found():
    config = two_sequences().config
    e = two_sequences(storage=ForgetfulStorage(GEOMETRIES["model"], config.block_size, "cpu", config.slab_size))
    e.advance(3)
    assert e.apply(Fork(0)).ok
    with pytest.raises(InvariantViolation, match="law 5"):
        e.advance(4)


# -- from the options --------------------------------------------------------------------------------


def test_the_options_build_a_verifying_engine():
    e, _ = build_engine(EngineOptions(workload="model", verify=True, num_blocks=64, device="cpu"))
    try:
        e.advance(10)
        snapshot = e.snapshot(phase="running", speed=None, steps_per_s=None)
    finally:
        e.close()
    assert (snapshot.geometry, snapshot.workload, snapshot.block_bytes) == ("model", "model", 8192)
    assert snapshot.verified is not None
    assert (snapshot.verified.steps, snapshot.verified.max_difference) == (10, 0)


def test_nothing_is_verified_unasked():
    e, _ = build_engine(EngineOptions(workload="model", num_blocks=64, device="cpu"))
    e.advance(3)
    assert e.snapshot(phase="running", speed=None, steps_per_s=None).verified is None
    e.close()


def test_a_large_pool_gets_the_load_of_a_small_one():
    large, small = (model_requests(1, block_size=16, num_blocks=n) for n in (1 << 20, 512))
    for _ in range(20):
        a, b = next(large), next(small)
        assert (a.num_prompt, a.arrival_s) == (b.num_prompt, b.arrival_s)
        assert int(a.content.stream.max()) < VOCABULARY
        assert a.content.num_known == a.num_prompt
