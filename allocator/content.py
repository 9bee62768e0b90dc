"""What a sequence's tokens are: requests, and the content that gives blocks their keys and stamps.

Most contents know a whole stream, prompt then output, because an embedded workload decides both
beforehand: real tokens (chat), block ids from a trace, and lengths alone. A generated one knows its prompt, and
learns its output from whoever computes it. Attached programs bring their tokens as they go: ``GrowingTokens``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allocator.config import KeyHash
from allocator.errors import ConfigError
from allocator.hashing import KeyChain, chain_keys
from allocator.ids import BlockKey
from allocator.scripts import ForkAt, Script

TokenArray = NDArray[np.int32]


class Content(Protocol):
    """The tokens of one sequence, prompt and output together."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""

    def keys(self, block_size: int, key_hash: KeyHash = "xxh3") -> Sequence[BlockKey]:
        """Return the keys of the leading full blocks that can be found again, in order. [0..n]"""

    def exact_tokens(self) -> TokenArray | None:
        """Return all tokens, to be compared on a hit; ``None`` where keys are exact by themselves. [num_tokens]"""

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Return tokens ``start`` to ``stop``, for stamps. [stop - start]"""

    def forked(self, at: int, nonce: int) -> Content:
        """Return a content with the same first ``at`` tokens and others after them."""


class TokenContent:
    """Real tokens: every full block has a key, generated ones too."""

    __slots__ = ("_keys", "_keys_made_for", "salt", "stream")

    def __init__(self, stream: TokenArray, salt: bytes = b"") -> None:
        self.stream = np.ascontiguousarray(stream, np.int32)
        self.salt = salt
        self._keys: list[BlockKey] = []
        self._keys_made_for: tuple[int, str] = (0, "")

    @property
    def num_tokens(self) -> int:
        return len(self.stream)

    def keys(self, block_size: int, key_hash: KeyHash = "xxh3") -> Sequence[BlockKey]:
        if self._keys_made_for != (block_size, key_hash):
            self._keys = chain_keys(self.stream, block_size, self.salt, key_hash)
            self._keys_made_for = (block_size, key_hash)
        return self._keys

    def exact_tokens(self) -> TokenArray | None:
        return self.stream

    def tokens(self, start: int, stop: int) -> TokenArray:
        return self.stream[start:stop]

    def forked(self, at: int, nonce: int) -> Content:
        own = OpaqueContent(self.num_tokens, nonce).tokens(at, self.num_tokens)
        return TokenContent(np.concatenate((self.stream[:at], own)), self.salt)


class GeneratedContent:
    """A prompt, and output that a model appends token by token: keys are made as blocks become known.

    Args:
        prompt: The tokens known from the start, below ``vocabulary``. [p]
        num_output: Tokens to be generated after them.
        vocabulary: Number of different tokens, at least 2.
        salt: Goes into its keys.
        nonce: Makes the first generated token another than the one appended; ``None`` takes it as it is.

    Attributes:
        stream: All tokens; those from ``num_known`` on are not known yet. [num_tokens]
        num_known: Leading tokens that are known.
    """

    __slots__ = (
        "_chain",
        "_keys",
        "_keys_made_for",
        "nonce",
        "num_known",
        "num_prompt",
        "salt",
        "stream",
        "vocabulary",
    )

    def __init__(
        self, prompt: TokenArray, num_output: int, *, vocabulary: int, salt: bytes = b"", nonce: int | None = None
    ) -> None:
        self.stream = np.zeros(len(prompt) + num_output, np.int32)
        self.stream[: len(prompt)] = prompt
        self.num_prompt = self.num_known = len(prompt)
        self.vocabulary, self.salt, self.nonce = vocabulary, salt, nonce
        self._keys: list[BlockKey] = []
        self._keys_made_for: tuple[int, KeyHash] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.stream)

    def append(self, token: int) -> None:
        """Take the token that follows those known; what follows the last one is dropped."""
        if self.num_known == len(self.stream):
            return
        if self.nonce is not None and self.num_known == self.num_prompt:
            token = (token + 1 + self.nonce % (self.vocabulary - 1)) % self.vocabulary
        self.stream[self.num_known] = token
        self.num_known += 1
        self._add_keys()

    def keys(self, block_size: int, key_hash: KeyHash = "xxh3") -> Sequence[BlockKey]:
        """Return the keys of the blocks that are known; the list grows with them."""
        if self._keys_made_for != (block_size, key_hash):
            self._keys_made_for = block_size, key_hash
            self._keys, self._chain = [], KeyChain(block_size, self.salt, key_hash)
            self._add_keys()
        return self._keys

    def exact_tokens(self) -> TokenArray | None:
        return self.stream

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Return tokens ``start`` to ``stop``.

        Raises:
            IndexError: Some are not known yet.
        """
        if stop > self.num_known:
            raise IndexError(f"{self.num_known} tokens are known, {stop} were asked for")
        return self.stream[start:stop]

    def forked(self, at: int, nonce: int) -> Content:
        # A prompt stays whole, even where part of it is yet to be computed; the next token is changed.
        kept = max(at, self.num_prompt)
        own = len(self.stream) - kept
        child = GeneratedContent(self.stream[:kept], own, vocabulary=self.vocabulary, salt=self.salt, nonce=nonce)
        if self.num_known > kept:
            child.append(int(self.stream[kept]))
        return child

    def _add_keys(self) -> None:
        if self._keys_made_for is None:
            return
        size = self._keys_made_for[0]
        known = self.num_known // size
        if known > len(self._keys):
            self._keys += self._chain.extend(self.stream[len(self._keys) * size : known * size])


class KeyedContent:
    """A trace row with block ids: full prompt blocks have keys, the rest has none.

    Args:
        num_tokens: Prompt and output tokens.
        block_ids: The ids of the *full* prompt blocks; an id names its block and all before it. [n]
        block_size: Tokens a block in the trace.
        nonce: Makes the tokens of unkeyed blocks differ between requests.
    """

    __slots__ = ("block_ids", "block_size", "nonce", "num_tokens")

    def __init__(self, num_tokens: int, block_ids: NDArray[np.int64], block_size: int, nonce: int) -> None:
        self.num_tokens = num_tokens
        self.block_ids = block_ids
        self.block_size = block_size
        self.nonce = nonce

    def exact_tokens(self) -> TokenArray | None:
        return None

    def keys(self, block_size: int, key_hash: KeyHash = "xxh3") -> Sequence[BlockKey]:
        if block_size != self.block_size:
            return ()
        words = np.zeros((len(self.block_ids), 2), np.int64)
        words[:, 0] = self.block_ids + 1  # never 0, which means "no key" in the block map
        data = words.tobytes()
        return [data[i : i + 16] for i in range(0, len(data), 16)]

    def tokens(self, start: int, stop: int) -> TokenArray:
        positions = np.arange(start, stop, dtype=np.int64)
        blocks = positions // self.block_size
        keyed = len(self.block_ids)
        ids = np.full(len(positions), ~self.nonce, np.int64)
        inside = blocks < keyed
        ids[inside] = self.block_ids[blocks[inside]]
        return _mixed_tokens(ids, positions)

    def forked(self, at: int, nonce: int) -> Content:
        return ForkedContent(self, at, nonce)


class OpaqueContent:
    """Lengths alone: nothing can be found again. ``nonce`` makes its tokens differ from others'."""

    __slots__ = ("nonce", "num_tokens")

    def __init__(self, num_tokens: int, nonce: int) -> None:
        self.num_tokens = num_tokens
        self.nonce = nonce

    def keys(self, block_size: int, key_hash: KeyHash = "xxh3") -> Sequence[BlockKey]:
        return ()

    def exact_tokens(self) -> TokenArray | None:
        return None

    def tokens(self, start: int, stop: int) -> TokenArray:
        positions = np.arange(start, stop, dtype=np.int64)
        return _mixed_tokens(np.full(len(positions), ~self.nonce, np.int64), positions)

    def forked(self, at: int, nonce: int) -> Content:
        return ForkedContent(self, at, nonce)


class ForkedContent:
    """The first ``at`` tokens of a parent without real tokens, then unkeyed ones of its own."""

    __slots__ = ("at", "num_tokens", "own", "parent")

    def __init__(self, parent: Content, at: int, nonce: int) -> None:
        self.parent, self.at = parent, at
        self.num_tokens = parent.num_tokens
        self.own = OpaqueContent(parent.num_tokens, nonce)

    def keys(self, block_size: int, key_hash: KeyHash = "xxh3") -> Sequence[BlockKey]:
        return self.parent.keys(block_size, key_hash)[: self.at // block_size]

    def exact_tokens(self) -> TokenArray | None:
        return None

    def tokens(self, start: int, stop: int) -> TokenArray:
        cut = min(max(start, self.at), stop)
        return np.concatenate((self.parent.tokens(start, cut), self.own.tokens(cut, stop)))

    def forked(self, at: int, nonce: int) -> Content:
        return ForkedContent(self, at, nonce)


class GrowingTokens:
    """Tokens of a sequence that nobody knows the end of, with the keys of its full blocks.

    Args:
        tokens: The first of them. [n] int32
        block_size, salt, key_hash: Of its keys.

    Attributes:
        keys: Keys of the full blocks so far. [num_tokens // block_size]
        num_tokens: Tokens so far.
    """

    __slots__ = ("_block_size", "_buffer", "_chain", "keys", "num_tokens")

    def __init__(self, tokens: TokenArray, block_size: int, salt: bytes = b"", key_hash: KeyHash = "xxh3") -> None:
        self._block_size = block_size
        self._chain = KeyChain(block_size, salt, key_hash)
        self._buffer = np.array(tokens, np.int32)
        self.num_tokens = len(tokens)
        self.keys = self._chain.extend(self._buffer)

    def extend(self, tokens: TokenArray) -> None:
        """Add tokens at the end. [n] int32"""
        start, stop = self.num_tokens, self.num_tokens + len(tokens)
        if stop > len(self._buffer):
            # Replaced, not resized: views of the old one stay as they are.
            grown = np.zeros(max(stop, 2 * len(self._buffer)), np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:stop] = tokens
        self.num_tokens = stop
        self.keys += self._chain.extend(self.tokens(len(self.keys) * self._block_size, stop))

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Return tokens ``start`` to ``stop``. A view. [stop - start]"""
        return self._buffer[start:stop]

    def copy(self) -> GrowingTokens:
        """Return the same tokens, to go on by themselves."""
        other = copy.copy(self)
        other._chain, other.keys, other._buffer = self._chain.copy(), self.keys.copy(), self._buffer.copy()
        return other


@dataclass(slots=True)
class Request:
    """What a client asks for.

    Attributes:
        content: Prompt and output tokens.
        num_prompt: How many of them are the prompt, at least 1.
        arrival_s: Virtual seconds from the start of the run.
        label: Shown beside the sequence, such as a trace row or a chat session.
        priority: Its class under the priority policy: higher goes first. From 0.
        contiguous: Whether its blocks must be one run of consecutive ids. It gets all of them when it is admitted,
            shares none, and cannot fork.
        script: What its client does on its own: forks and cancels.

    Raises:
        ConfigError: The script forks a contiguous request.
    """

    content: Content
    num_prompt: int
    arrival_s: float = 0.0
    label: str = field(default="")
    priority: int = 0
    contiguous: bool = False
    script: Script = ()

    def __post_init__(self) -> None:
        if self.contiguous and any(isinstance(act, ForkAt) for act in self.script):
            raise ConfigError("Request.script", "ForkAt", "nothing that forks where the request is contiguous")

    @property
    def num_output(self) -> int:
        """Output tokens still to be generated when it arrives."""
        return self.content.num_tokens - self.num_prompt


class AdjustableLoad(Protocol):
    """Requests in order of arrival, whose rate and size can be changed while they are being read."""

    @property
    def rate_scale(self) -> float:
        """How many times as fast they arrive as they would by themselves."""

    @property
    def size_scale(self) -> float:
        """How many times as long they are."""

    def __iter__(self) -> Iterator[Request]: ...

    def adjust(self, now_s: float, rate_scale: float, size_scale: float, pending: Request | None) -> None:
        """Change both from ``now_s`` on; the arrival of ``pending``, read already, moves along."""


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well-spread 64-bit value for each input (the finaliser of splitmix64). [n]"""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def slot_stamps(tokens: TokenArray, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the stamp of each slot, made from its token and the token's position. [n], [n] → [n]

    A shared prefix has the same tokens at the same positions for all its holders, so they all
    expect the same stamps; any other slot's stamp differs but for a chance of 2^-64.
    """
    return mix64(mix64(positions.view(np.uint64)) ^ tokens.astype(np.uint32).astype(np.uint64))


def _mixed_tokens(ids: NDArray[np.int64], positions: NDArray[np.int64]) -> TokenArray:
    mixed = mix64(mix64(ids.view(np.uint64)) ^ positions.view(np.uint64))
    return (mixed >> np.uint64(33)).astype(np.int32)
