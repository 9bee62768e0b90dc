"""Contents: keys, tokens and forks of every kind."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from allocator.content import (
    GeneratedContent,
    KeyedContent,
    OpaqueContent,
    Request,
    TokenContent,
    mix64,
    slot_stamps,
)
from allocator.hashing import chain_keys

STREAM = np.arange(50, dtype=np.int32)


def make(kind: str):
    return {
        "tokens": lambda: TokenContent(STREAM),
        "ids": lambda: KeyedContent(50, np.array([4, 9, 2]), 10, 7),
        "lengths": lambda: OpaqueContent(50, 7),
    }[kind]()


KINDS = ["tokens", "ids", "lengths"]


def stamp(tokens: np.ndarray, start: int) -> list[int]:
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    return slot_stamps(tokens, positions).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_however_they_are_read(kind):
    content = make(kind)
    whole = content.tokens(0, 50)
    assert (whole.dtype, len(whole), content.num_tokens) == (np.int32, 50, 50)
    for start, stop in ((0, 0), (0, 1), (9, 11), (29, 31), (49, 50)):
        assert content.tokens(start, stop).tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 10, 25, 30, 49])
def test_a_fork_has_the_same_beginning_and_an_end_of_its_own(kind, at):
    content = make(kind)
    fork, other = content.forked(at, 1), content.forked(at, 2)
    own, whole = fork.tokens(0, 50), content.tokens(0, 50)
    assert fork.num_tokens == 50
    assert own[:at].tolist() == whole[:at].tolist()
    assert not (own[at:] == whole[at:]).all()
    assert not (own[at:] == other.tokens(at, 50)).all()
    assert own.tolist() == [*fork.tokens(0, 13), *fork.tokens(13, 50)]
    shared = min(at // 10, len(content.keys(10)))
    assert list(fork.keys(10))[:shared] == list(content.keys(10))[:shared]
    if kind == "tokens":
        assert list(fork.keys(10)) == chain_keys(own, 10)
    else:
        assert len(fork.keys(10)) == shared
    again = fork.forked(at, 3)
    assert again.tokens(0, at).tolist() == whole[:at].tolist()
    assert len(again.tokens(0, 50)) == 50
    assert list(again.keys(10))[:shared] == list(content.keys(10))[:shared]


def test_keys_of_tokens_are_computed_anew_for_another_block_size():
    content = make("tokens")
    assert list(content.keys(10)) == chain_keys(STREAM, 10)
    assert list(content.keys(7)) == chain_keys(STREAM, 7)
    assert list(content.keys(10)) == chain_keys(STREAM, 10)
    assert not set(TokenContent(STREAM, b"salt").keys(10)) & set(content.keys(10))


def test_keys_of_a_trace_row_are_its_ids():
    keys = make("ids").keys(10)
    assert len(keys) == 3
    assert all(len(key) == 16 for key in keys)
    same = KeyedContent(30, np.array([4, 9, 5]), 10, 8).keys(10)
    assert [a == b for a, b in zip(keys, same, strict=True)] == [True, True, False]
    assert make("ids").keys(16) == ()
    large = KeyedContent(10, np.array([2**63 - 1]), 10, 0).keys(10)
    assert len(large[0]) == 16
    assert len(KeyedContent(5, np.empty(0, np.int64), 10, 0).keys(10)) == 0


def test_rows_with_the_same_ids_share_tokens_up_to_there_only():
    a, b = KeyedContent(50, np.array([4, 9]), 10, 1), KeyedContent(50, np.array([4, 9]), 10, 2)
    assert a.tokens(0, 20).tolist() == b.tokens(0, 20).tolist()
    assert not (a.tokens(20, 50) == b.tokens(20, 50)).any()
    assert make("lengths").keys(10) == ()


def test_stamps_name_token_and_position():
    assert stamp(STREAM, 0)[10:20] == stamp(STREAM[10:20], 10)
    everything = {s for token in range(30) for s in stamp(np.full(30, token, np.int32), 0)}
    assert len(everything) == 900
    assert stamp(np.array([-1], np.int32), 0) != stamp(np.array([1], np.int32), 0)
    assert len(inspect.signature(slot_stamps).parameters) == 2


def test_mixing_is_splitmix64():
    # The first outputs of the published generator started at 0: increments of the golden ratio, finalised.
    assert mix64(np.array([0], np.uint64)).tolist() == [0xE220A8397B1DCDAF]
    assert mix64(np.array([0x9E3779B97F4A7C15], np.uint64)).tolist() == [0x6E789E6AA1B965F4]


def test_a_request_knows_its_output():
    request = Request(make("tokens"), 20)
    assert (request.num_output, request.arrival_s, request.label) == (30, 0.0, "")


def generated(known: int, prompt: int = 12, nonce: int | None = None) -> GeneratedContent:
    content = GeneratedContent(STREAM[:prompt], 50 - prompt, vocabulary=256, salt=b"s", nonce=nonce)
    for token in STREAM[prompt:known].tolist():
        content.append(token)
    return content


@pytest.mark.parametrize("key_hash", ["xxh3", "sha256"])
def test_keys_of_generated_tokens_come_as_blocks_become_known(key_hash):
    content = generated(12)
    keys = content.keys(5, key_hash)
    expected = chain_keys(STREAM, 5, b"s", key_hash)
    for known in range(12, 51):
        assert content.num_known == known
        assert list(keys) == expected[: known // 5]
        content.append(known)
    assert content.num_known == 50, "what follows the last token is dropped"
    assert content.exact_tokens().tolist() == STREAM.tolist()
    assert content.keys(5, key_hash) is keys
    assert content.keys(10, key_hash) == chain_keys(STREAM, 10, b"s", key_hash)


def test_a_token_that_is_not_known_yet_cannot_be_read():
    content = generated(20)
    assert content.tokens(0, 20).tolist() == STREAM[:20].tolist()
    with pytest.raises(IndexError, match="20 tokens are known, 21 were asked for"):
        content.tokens(19, 21)


@pytest.mark.parametrize(("known", "at", "kept"), [(30, 29, 29), (30, 20, 20), (12, 12, 12), (12, 7, 12), (30, 7, 12)])
def test_a_fork_of_generated_tokens_takes_another_token_next(known, at, kept):
    parent = generated(known)
    before = parent.stream.tolist()
    forks = [parent.forked(at, nonce) for nonce in (0, 1, 255, 1000)]
    for fork in forks:
        assert fork.num_tokens == 50
        assert fork.num_known == (kept + 1 if known > kept else kept)
        if fork.num_known == kept:
            fork.append(kept)
        assert fork.stream[:kept].tolist() == STREAM[:kept].tolist()
        assert fork.stream[kept] != STREAM[kept]
        assert 0 <= fork.stream[kept] < 256
        fork.append(99)
        assert fork.stream[kept + 1] == 99
        assert list(fork.keys(5)) == chain_keys(fork.stream[: kept + 2], 5, b"s")
    assert forks[0].stream[kept] != forks[1].stream[kept]
    assert forks[0].stream[kept] == forks[2].stream[kept], "255 is 0 again where 256 tokens are known"
    assert parent.stream.tolist() == before
