"""Block keys: chained, salted, full blocks only, the same in every process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xxhash

from allocator.hashing import KeyChain, chain_keys

TOKENS = np.arange(100, 150, dtype=np.int32)


def test_a_key_for_each_full_block_only():
    assert [len(chain_keys(TOKENS[:n], 16)) for n in (0, 1, 15, 16, 31, 32, 50)] == [0, 0, 0, 1, 1, 2, 3]
    assert all(len(key) == 16 for key in chain_keys(TOKENS, 7))
    assert len(chain_keys(TOKENS, 1)) == 50


def test_a_key_names_its_block_and_all_before_it():
    keys = chain_keys(TOKENS, 10)
    assert chain_keys(TOKENS[:30], 10) == keys[:3]
    changed = TOKENS.copy()
    changed[12] += 1
    assert [a == b for a, b in zip(chain_keys(changed, 10), keys, strict=True)] == [True, False, False, False, False]
    # The same tokens after another beginning are another block.
    twice = np.concatenate((TOKENS[:10], TOKENS[:10]))
    assert len(set(chain_keys(twice, 10))) == 2


def test_block_size_and_salt_separate():
    assert not set(chain_keys(TOKENS, 10)) & set(chain_keys(TOKENS, 5))
    assert not set(chain_keys(TOKENS, 10)) & set(chain_keys(TOKENS, 10, b"tenant"))
    assert chain_keys(TOKENS, 10, b"tenant") == chain_keys(TOKENS, 10, b"tenant")


def test_the_formula():
    first = xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(b"s") + TOKENS[:4].tobytes())
    second = xxhash.xxh3_128_digest(first + TOKENS[4:8].tobytes())
    assert chain_keys(TOKENS[:8], 4, b"s") == [first, second]


def test_other_layouts_of_the_same_tokens():
    keys = chain_keys(TOKENS, 10)
    assert chain_keys(TOKENS.astype(np.int64), 10) == keys
    assert chain_keys(np.repeat(TOKENS, 2)[::2], 10) == keys


def test_the_same_in_another_process():
    code = "import numpy as np; from allocator.hashing import chain_keys; "
    code += "print(chain_keys(np.arange(100, 150, dtype=np.int32), 10)[-1].hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == chain_keys(TOKENS, 10)[-1].hex()


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
def test_a_chain_goes_on_where_it_stopped(algorithm):
    chain = KeyChain(4, b"s", algorithm)
    pieces = [chain.extend(TOKENS[start:stop]) for start, stop in ((0, 8), (8, 8), (8, 11), (8, 32), (32, 50))]
    assert [len(piece) for piece in pieces] == [2, 0, 0, 6, 4]
    assert [key for piece in pieces for key in piece] == chain_keys(TOKENS, 4, b"s", algorithm)
