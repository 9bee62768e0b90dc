"""A small decoder-only transformer whose keys and values lie in the pool, and its twin with a contiguous cache.

Every token is computed by itself, in prefill as in decode: the same operations on the same shapes, whoever else runs
and however a prompt is cut into pieces. So the keys and values of a token are a pure function of the tokens up to it. A
block found in the prefix cache, brought back from the host, or computed anew after a preemption holds the very bits
that computing it once more would give. The twin does the same with the same weights and differs only in where keys and
values lie; what the two compute may therefore not differ by a single bit.
"""

from __future__ import annotations

import collections.abc
import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from allocator.content import GeneratedContent
from allocator.errors import InvariantViolation
from allocator.geometry import GEOMETRIES
from allocator.sequence import Sequence
from allocator.snapshot import Verified
from allocator.torch_storage import Pages, TorchStorage
from kvtop.workloads.model import VOCABULARY

if TYPE_CHECKING:
    from allocator.block_table import BlockTables
    from allocator.ids import Tier
    from allocator.invariants import Holder
    from allocator.manager import BlockManager
    from allocator.storage import Storage

# A token's row fills whole cache lines, so that both caches give their numbers to a product equally aligned.
_GEOMETRY: Final = GEOMETRIES["model"]
#: Query heads that share one head of keys and values.
_GROUP: Final = 2
_WIDTH: Final = 64
_HIDDEN: Final = 128
_ROPE_BASE: Final = 10_000.0
#: Spread of the logits: wide enough that the most likely token is rarely a near tie.
_LOGIT_SCALE: Final = 3.0


class Cache(Protocol):
    """One sequence's keys and values, by layer and position."""

    def write(self, layer: int, position: int, values: torch.Tensor) -> None:
        """Write one token's keys and values. [2, heads, head_dim]"""

    def read(self, layer: int, num_tokens: int) -> torch.Tensor:
        """Return the first tokens' keys and values. [2, num_tokens, heads, head_dim]"""


class ContiguousCache:
    """Keys and values of one sequence in one piece.

    Attributes:
        values: [layers, 2, capacity, heads, head_dim]
        num_tokens: Leading tokens that are there.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        g = _GEOMETRY
        self.values = torch.empty(g.num_layers, g.num_parts, capacity, g.num_heads, g.head_dim, device=device)
        self.num_tokens = 0

    def write(self, layer: int, position: int, values: torch.Tensor) -> None:
        self.values[layer, :, position] = values

    def read(self, layer: int, num_tokens: int) -> torch.Tensor:
        return self.values[layer, :, :num_tokens]


class PagedCache:
    """Keys and values of one sequence in the pool.

    Args:
        pages: They, through its block table.
        first: Tokens before it are there already, perhaps shared, and are not written again.
    """

    def __init__(self, pages: Pages, first: int) -> None:
        self._first = first
        self._pages = pages
        self.read = pages.read

    def write(self, layer: int, position: int, values: torch.Tensor) -> None:
        if position >= self._first:
            self._pages.write(layer, position, values)


class Transformer:
    """Pre-norm decoder with rotary positions and grouped-query attention; random weights, the same for the same seed.

    Its parts are the plainest that keep this shape: norms without weights, and rectifiers.

    Args:
        seed: Any whole number from 0.
        device: Where it computes.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int, scale: float) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * scale).to(device)

        g = _GEOMETRY
        self._queries = g.num_heads * _GROUP * g.head_dim
        self._keys = g.num_heads * g.head_dim
        # A normed vector has length 1, so what multiplies it keeps the spread of its weights.
        self._embedding = weights(VOCABULARY, _WIDTH, 1.0)
        self._layers = [
            (
                weights(self._queries + 2 * self._keys, _WIDTH, 1.0),
                weights(_WIDTH, self._queries, self._queries**-0.5),
                weights(_HIDDEN, _WIDTH, 1.0),
                weights(_WIDTH, _HIDDEN, _HIDDEN**-0.5),
            )
            for _ in range(g.num_layers)
        ]
        self._head = weights(VOCABULARY, _WIDTH, _LOGIT_SCALE)
        self._device = device
        self._rotations: list[torch.Tensor] = []

    def logits(self, token: int, position: int, cache: Cache) -> torch.Tensor:
        """Compute one token from it and the keys and values before it, write its own, and return its logits.

        Returns:
            What follows it, unnormalised. [VOCABULARY]
        """
        g, queries, keys = _GEOMETRY, self._queries, self._keys
        rotation = self._rotation(position)
        x = self._embedding[token]
        for layer, (into, out, up, down) in enumerate(self._layers):
            # One vector: queries, then keys, then values; the first two are rotated in place.
            projected = torch.mv(into, _normed(x))
            torch.view_as_complex(projected[: queries + keys].view(-1, g.head_dim // 2, 2)).mul_(rotation)
            cache.write(layer, position, projected[queries:].view(g.num_parts, g.num_heads, g.head_dim))
            k, v = cache.read(layer, position + 1).unbind(0)
            q = projected[:queries].view(g.num_heads, _GROUP, g.head_dim)
            scores = torch.bmm(q, k.permute(1, 2, 0)) / math.sqrt(g.head_dim)
            attended = torch.bmm(torch.softmax(scores, -1), v.transpose(0, 1))
            x = torch.addmv(x, out, attended.reshape(-1))
            x = torch.addmv(x, down, torch.relu(torch.mv(up, _normed(x))))
        return torch.mv(self._head, _normed(x))

    def _rotation(self, position: int) -> torch.Tensor:
        """Return the rotation of each pair of elements at a position, always the same numbers. [head_dim / 2]"""
        half = _GEOMETRY.head_dim // 2
        while len(self._rotations) <= position:
            angles = len(self._rotations) * _ROPE_BASE ** (-np.arange(half) / half)
            self._rotations.append(torch.from_numpy(np.exp(1j * angles).astype(np.complex64)).to(self._device))
        return self._rotations[position]


class ModelCompute:
    """Computes an engine's sequences with the transformer: the engine's ``Compute`` for the ``model`` workload.

    Args:
        manager: Blocks and tables.
        storage: Where keys and values lie; torch's, with the geometry ``model``.
        seed: Of the weights.
        verify: Compute every token with the contiguous cache too, and compare.
    """

    def __init__(self, manager: BlockManager, storage: Storage, *, seed: int, verify: bool) -> None:
        assert isinstance(storage, TorchStorage)
        self._manager, self._storage = manager, storage
        self._device = torch.device(storage.device_name)
        self._model = Transformer(seed, self._device)
        self._twins: WeakKeyDictionary[Sequence, ContiguousCache] = WeakKeyDictionary()
        self._verify = verify
        self._steps = self._tokens = 0
        self._max_difference = 0.0
        self._unsettled = False
        self._fault: InvariantViolation | None = None

    @property
    def verified(self) -> Verified | None:
        return Verified(self._steps, self._tokens, self._max_difference) if self._verify else None

    def prefill(self, sequence: Sequence, start: int, stop: int) -> None:
        content = sequence.content
        # Of a prompt that was found whole, the last token is computed again, for the one that follows it.
        again = start == stop and isinstance(content, GeneratedContent) and content.num_known == stop
        with _one_thread():
            self._compute(sequence, start - again, stop, first=start)

    def decode(self, sequences: collections.abc.Sequence[Sequence], steps: int) -> None:
        with _one_thread():
            for sequence in sequences:
                assert sequence.row is not None
                start = int(self._manager.tables.num_tokens[sequence.row])
                self._compute(sequence, start, start + steps, first=start)

    def settle(self, steps: int) -> None:
        if self._unsettled:
            self._steps += steps
            self._unsettled = False
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def check(self, sequences: collections.abc.Sequence[Holder]) -> None:
        manager = self._manager
        with _one_thread():
            for sequence in sequences:
                if not isinstance(sequence, Sequence):
                    continue  # an attached program's: it brings tokens, and nothing is computed for it
                if sequence.row is not None:
                    self._check_pages(sequence, "device", manager.tables, sequence.row)
                if sequence.host_row is not None:
                    self._check_pages(sequence, "host", manager.host_tables, sequence.host_row)

    # -- inside --------------------------------------------------------------------------------------

    def _compute(self, sequence: Sequence, start: int, stop: int, *, first: int) -> None:
        """Compute tokens ``start`` to ``stop``, writing those from ``first`` on, and note the token that follows."""
        if start == stop:
            return
        assert sequence.row is not None
        content = sequence.content
        cache = PagedCache(self._storage.pages("device", self._manager.tables.table(sequence.row)), first)
        for position in range(start, stop):
            logits = self._model.logits(_token(sequence, position), position, cache)
            following = int(logits.argmax())
            if self._verify:
                self._compare(sequence, position, logits, following)
            if isinstance(content, GeneratedContent) and content.num_known == position + 1:
                content.append(following)
        self._unsettled = True

    def _compare(self, sequence: Sequence, position: int, logits: torch.Tensor, following: int) -> None:
        twin = self._twin(sequence, position)
        expected = self._model.logits(_token(sequence, position), position, twin)
        twin.num_tokens = max(twin.num_tokens, position + 1)
        difference = float((logits - expected).abs().max())
        if math.isnan(difference):
            difference = math.inf
        self._tokens += 1
        self._max_difference = max(self._max_difference, difference)
        if difference and self._fault is None:
            twin_following = int(expected.argmax())
            follows = f"; {following} follows, not {twin_following}" if following != twin_following else ""
            self._fault = InvariantViolation(
                5,
                f"sequence {sequence.seq_id}, token {position}: its logits differ by {difference:g} "
                f"from those of a contiguous cache{follows}",
            )

    def _twin(self, sequence: Sequence, num_tokens: int) -> ContiguousCache:
        """Return a sequence's contiguous cache with at least its first tokens in it, computed from the tokens alone."""
        twin = self._twins.get(sequence)
        if twin is None:
            twin = self._twins[sequence] = ContiguousCache(sequence.content.num_tokens, self._device)
        for position in range(twin.num_tokens, num_tokens):
            self._model.logits(_token(sequence, position), position, twin)
        twin.num_tokens = max(twin.num_tokens, num_tokens)
        return twin

    def _check_pages(self, sequence: Sequence, tier: Tier, tables: BlockTables, row: int) -> None:
        block_ids, num_tokens = tables.table(row), int(tables.num_tokens[row])
        twin = self._twin(sequence, num_tokens)
        pages = self._storage.pages(tier, block_ids)
        for layer in range(_GEOMETRY.num_layers):
            found = pages.read(layer, num_tokens).to(self._device)
            same = (found == twin.read(layer, num_tokens)).all(-1).all(-1).all(0)
            if not same.all():
                position = int(same.logical_not().nonzero()[0])
                block, offset = divmod(position, self._manager.block_size)
                raise InvariantViolation(
                    5,
                    f"sequence {sequence.seq_id}, token {position}: {tier} block {block_ids[block]}, offset {offset} "
                    "holds other keys or values",
                )


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x / torch.linalg.vector_norm(x)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to the calling thread: operations this small lose far more by waiting for others than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _token(sequence: Sequence, position: int) -> int:
    """Return a sequence's token as the model knows it; contents that were not made for it may have larger ones."""
    return int(sequence.content.tokens(position, position + 1)[0]) % VOCABULARY
