"""The chat workload: the same for the same seed, in order, fitting every pool, finding its own blocks again."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.errors import UserError
from kvtop.workloads.catalog import WORKLOADS, find_workload
from kvtop.workloads.chat import chat_requests, make_request


def take(count: int, seed: int = 0, block_size: int = 16, num_blocks: int = 4096, **options):
    return list(islice(chat_requests(seed, block_size=block_size, num_blocks=num_blocks, **options), count))


def same(left, right) -> bool:
    return (left.num_prompt, left.arrival_s, left.label) == (right.num_prompt, right.arrival_s, right.label) and (
        np.array_equal(left.content.stream, right.content.stream)
    )


def test_the_same_seed_gives_the_same_requests_however_many_are_taken():
    few, many = take(50), take(300)
    assert all(same(left, right) for left, right in zip(few, many[:50], strict=True))
    one, two = (chat_requests(0, block_size=16, num_blocks=4096) for _ in range(2))
    assert all(same(next(one), next(two)) for _ in range(50))  # neither disturbs the other
    assert not same(take(1, seed=1)[0], few[0])


def test_a_turn_goes_on_where_the_one_before_ended():
    said: dict[str, tuple[int, np.ndarray, float]] = {}
    continued = 0
    for request in take(400):
        session, turn = request.label.removeprefix("chat ").split("/")
        if turn == "0":
            assert session not in said
        else:
            before, stream, answered_s = said[session]
            assert int(turn) == before + 1
            assert request.num_prompt > len(stream)
            assert np.array_equal(request.content.stream[: len(stream)], stream)
            assert request.arrival_s >= answered_s
            continued += 1
        answered_s = request.arrival_s + request.num_output * 0.025
        said[session] = (int(turn), request.content.stream, answered_s)
    assert continued > 150


def test_first_turns_open_with_few_system_prompts_the_first_most_often():
    heads = [tuple(r.content.stream[:32]) for r in take(1500) if r.label.endswith("/0")]
    shares = sorted((heads.count(head) / len(heads) for head in set(heads)), reverse=True)
    assert len(shares) == 4
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.06)


def test_requests_come_at_the_rate_asked_for():
    requests = take(2000, rate_per_s=20.0)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(20, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    block_size=st.sampled_from([1, 2, 7, 16, 512, 1024]),
    num_blocks=st.sampled_from([1, 2, 3, 8, 512, 4096, 100_000]),
)
def test_every_request_fits_every_pool(seed, block_size, num_blocks):
    before_s = 0.0
    for request in take(40, seed, block_size, num_blocks):
        assert request.num_prompt >= 1
        assert request.num_output >= min(1, num_blocks * block_size - 1)  # a pool of one token has no room for any
        assert -(-request.content.num_tokens // block_size) <= num_blocks
        assert request.arrival_s >= before_s
        before_s = request.arrival_s
        assert request.content.stream.dtype == np.int32
        assert request.content.stream.min() >= 0


def test_the_default_pool_is_busy_and_prefixes_are_found_again():
    requests = take(1500)
    seen: set[bytes] = set()
    asked = found = 0
    for request in requests:
        keys = request.content.keys(16)
        prompt_keys = keys[: request.num_prompt // 16]
        asked += len(prompt_keys)
        found += sum(key in seen for key in prompt_keys)
        seen.update(keys)
    assert 0.6 < found / asked < 0.95  # with a cache that forgets nothing
    # Blocks in use at moments well after the start, a shared block once, were everybody admitted at once.
    used = []
    for moment_s in np.arange(20.0, requests[-1].arrival_s, 5.0):
        working = [r for r in requests if r.arrival_s <= moment_s < r.arrival_s + r.num_output * 0.025]
        full = {key for r in working for key in r.content.keys(16)}
        used.append((len(full) + len(working)) / 4096)
    assert 0.65 < np.mean(used) < 0.95
    assert max(used) > 0.9


def test_made_requests_have_the_lengths_asked_for_and_tokens_of_their_own():
    first, again, other = make_request(100, 20, 3), make_request(100, 20, 3), make_request(100, 20, 4)
    assert (first.num_prompt, first.num_output) == (100, 20)
    assert same(first, again)
    assert not np.array_equal(first.content.stream, other.content.stream)
    assert make_request(1, 0, 0).content.num_tokens == 1


def test_workloads_are_found_by_name():
    assert next(iter(WORKLOADS)) == "chat"
    first = next(find_workload("chat").requests(0, block_size=16, num_blocks=4096))
    assert same(first, take(1)[0])
    with pytest.raises(UserError, match="--workload char: one of chat"):
        find_workload("char")
