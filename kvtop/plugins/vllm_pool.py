"""VllmPool: reads the block pool of a vLLM engine core. The one module that knows vLLM's structures.

``Scheduler`` → ``kv_cache_manager`` → ``block_pool`` → ``blocks``: a block in use has a reference count; one without
whose hash is set is cached and waits in the free queue to be evicted, from its head on; the null block is never
handed out. Every structure is looked for before anything is read, and every change of a release that matters here is
answered here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import is_not
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from allocator.snapshot import MAX_SEQUENCES
from kvtop.plugins.pool_state import PoolFacts, PoolState, RequestState, Unsupported, slices

#: The releases whose structures were tried, both ends included.
SUPPORTED: Final = ((0, 14), (0, 33))
#: Blocks of the free queue that are looked at, at most, to find the next victims: hashless blocks lie before them.
_QUEUE_LOOKS: Final = 65_536
_MISSING: Final = {
    "operations": "vLLM's block pool can be looked at only; what vLLM itself offers is at http://HOST:PORT",
    "events": "vLLM tells no events here; its stream of cache events is read with http://HOST:PORT --events",
    "host-tier": "vLLM's block pool has no host tier",
}


#: What a request tells: id, why it waits, priority, prompt tokens, tokens at most, tokens computed, tokens hit.
Told: TypeAlias = tuple[str, str, int, int, int | None, int, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What is taken from the engine between two steps.

    Attributes:
        refs, hashes: Of every block. [n]
        null_id: The null block.
        requests: Of each request: its attributes, and its tables as lists of blocks.
        num_running, num_unfinished: Requests.
        victims: Cached blocks at the head of the free queue.
        steps, totals: Counted so far.
    """

    refs: list[int]
    hashes: list[bytes | None]
    null_id: int
    requests: list[tuple[bool, Told, list[list[Any]]]]
    num_running: int
    num_unfinished: int
    victims: tuple[int, ...]
    steps: int
    totals: dict[str, int]


class VllmPool:
    """A ``ForeignPool``.

    Args:
        scheduler: The engine core's scheduler; only referred to weakly.
        version: vLLM's release.
        steps: Returns the steps taken.

    Attributes:
        facts: What does not change.
        totals: Totals, counted by whoever watches the scheduler's calls.

    Raises:
        Unsupported: Its structures are not those that are known.
    """

    def __init__(self, scheduler: Any, version: str, steps: Callable[[], int]) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._steps = steps
        self._num_victims = 0
        self._hashes: list[bytes | None] = []
        self._hash64 = np.empty(0, np.uint64)
        self.totals: dict[str, int] = {"preemptions_swap": 0, "swap_out_blocks": 0, "swap_in_blocks": 0}
        self._check(scheduler)
        self.facts = _facts(scheduler, version)
        self._group_sizes = _group_sizes(scheduler)

    # ---- in the engine's thread, or while it rests

    def collect(self) -> Taken:
        """Take what may change at the next step. Cost: about 20 ns a block."""
        scheduler = self._scheduler()
        if scheduler is None:
            raise Unsupported("the engine is gone")
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        blocks = pool.blocks
        tables = [m.req_to_blocks for m in manager.coordinator.single_type_managers]
        running = {request.request_id: request for request in scheduler.running}
        requests = [(True, request, [list(t.get(name, ())) for t in tables]) for name, request in running.items()]
        for name, request in islice(scheduler.requests.items(), MAX_SEQUENCES + len(running)):
            if name not in running:
                requests.append((False, request, [list(t.get(name, ())) for t in tables]))
        return Taken(
            [block.ref_cnt for block in blocks],
            [block._block_hash for block in blocks],
            pool.null_block.block_id,
            [(is_running, _told(request), held) for is_running, request, held in requests],
            len(running),
            len(scheduler.requests),
            self._victims(pool.free_block_queue) if self._num_victims else (),
            self._steps(),
            dict(self.totals),
        )

    def is_idle(self) -> bool:
        """Return whether there is nothing to compute."""
        scheduler = self._scheduler()
        return scheduler is None or not scheduler.requests

    def want_victims(self, number: int) -> None:
        """Ask for so many victims from the next reading on."""
        self._num_victims = number

    def _victims(self, queue: Any) -> tuple[int, ...]:
        found: list[int] = []
        block = queue.fake_free_list_head.next_free_block
        for _ in range(_QUEUE_LOOKS):
            if block is None or block.next_free_block is None or len(found) == self._num_victims:
                break  # the last one is the queue's own end mark
            if block._block_hash is not None:
                found.append(block.block_id)
            block = block.next_free_block
        return tuple(found)

    # ---- in the publication's threads

    def digest(self, taken: Taken, pause: Callable[[], None]) -> PoolState:
        """Make a state of what was taken; ``pause`` is called now and then where there is much of it."""
        n = len(taken.refs)
        refs = np.empty(n, np.int64)
        for part in slices(n, pause):
            refs[part] = taken.refs[part]
        refs[taken.null_id] = 0
        requests = []
        for is_running, told, tables in taken.requests:
            ids = [np.fromiter((b.block_id for b in held), np.int64, len(held)) for held in tables]
            requests.append(RequestState(told[0], is_running, *told[1:], ids))
        hash64 = self._keys(taken.hashes, pause)
        return PoolState(
            ref_count=refs,
            hash64=hash64,
            has_content=hash64 != 0,
            reserved=(taken.null_id,),
            requests=requests,
            group_sizes=self._group_sizes,
            num_running=taken.num_running,
            num_waiting=max(0, taken.num_unfinished - taken.num_running),
            victims=taken.victims,
            steps=taken.steps,
            totals=_totals(taken.totals, self.facts.block_size),
        )

    def _keys(self, hashes: list[bytes | None], pause: Callable[[], None]) -> NDArray[np.uint64]:
        """Return 64 bits of each hash; only those that are other objects than last time are made anew. [n]"""
        n = len(hashes)
        if len(self._hashes) != n:
            self._hashes, self._hash64 = [None] * n, np.zeros(n, np.uint64)
        keys = self._hash64.copy()
        for part in slices(n, pause):
            new = hashes[part]
            changed = np.fromiter(map(is_not, new, self._hashes[part]), np.bool_, len(new))
            for i in np.flatnonzero(changed).tolist():
                keys[part.start + i] = key64(new[i])
        self._hashes, self._hash64 = hashes, keys
        return keys

    @staticmethod
    def _check(scheduler: Any) -> None:
        """Make sure that everything that is read is there.

        Raises:
            Unsupported: Something is not.
        """
        try:
            manager = scheduler.kv_cache_manager
            pool = manager.block_pool
            looks: list[Callable[[], object]] = [
                lambda: pool.blocks[0].ref_cnt,
                lambda: pool.blocks[0].block_id,
                lambda: pool.blocks[0]._block_hash,
                lambda: pool.null_block.block_id,
                lambda: pool.free_block_queue.fake_free_list_head.next_free_block,
                lambda: [m.req_to_blocks.get for m in manager.coordinator.single_type_managers],
                lambda: scheduler.running[:0] and scheduler.requests,
                lambda: scheduler.kv_cache_config.kv_cache_groups,
                lambda: len(scheduler.requests),
            ]
            for look in looks:
                look()
        except Exception as error:
            raise Unsupported(f"its block pool is of another kind ({error})") from None
        if type(pool.blocks) is not list or pool.blocks[0].block_id != 0:
            raise Unsupported("its block pool is of another kind (blocks are not listed by id)")


def key64(block_hash: bytes | None) -> int:
    """Return the 64 bits of a hash that vLLM's own cache events carry: the digest's last, without the group's id."""
    if block_hash is None:
        return 0
    return int.from_bytes(block_hash[:-4][-8:], "big") or 1


def _told(request: Any) -> Told:
    """Return what a request tells."""
    word = request.status.name
    reason = "" if word in ("WAITING", "RUNNING") else word.removeprefix("WAITING_").replace("_", " ").lower()
    hit = getattr(request, "num_cached_tokens", None)
    if hit is None:
        hit = getattr(getattr(request, "prefill_stats", None), "num_cached_tokens", None)
    known = hit if isinstance(hit, int) and hit >= 0 else None
    prompt, most = int(request.num_prompt_tokens), getattr(request, "max_tokens", None)
    return (
        str(request.request_id),
        reason,
        int(getattr(request, "priority", 0)),
        prompt,
        None if most is None else prompt + int(most),
        int(request.num_computed_tokens),
        known,
    )


def _totals(counted: dict[str, int], block_size: int) -> dict[str, int]:
    """Return the totals under the names of our counters; hits and queries are told in tokens."""
    totals = dict(counted)
    for kind in ("query", "hit"):
        if f"{kind}_tokens" in totals:
            totals[f"{kind}_blocks"] = totals[f"{kind}_tokens"] // block_size
    return totals


def _group_sizes(scheduler: Any) -> Sequence[int]:
    return [int(group.kv_cache_spec.block_size) for group in scheduler.kv_cache_config.kv_cache_groups]


def _facts(scheduler: Any, version: str) -> PoolFacts:
    groups = scheduler.kv_cache_config.kv_cache_groups
    sizes = _group_sizes(scheduler)
    model = _look(lambda: scheduler.vllm_config.model_config.served_model_name) or "vLLM"
    notes = ["the map's clock counts 25 ms of real time as one step"]
    if len(groups) > 1:
        notes.append(f"{len(groups)} groups of layers share the pool: a sequence's tables follow one another")
    return PoolFacts(
        engine=f"vLLM {version}",
        model=str(model[0] if isinstance(model, list) and model else model),
        device=str(_look(lambda: scheduler.vllm_config.device_config.device_type) or "device"),
        layout=f"vLLM {version}",
        block_size=max(sizes, default=int(_look(lambda: scheduler.block_size) or 1)),
        block_bytes=int(_look(lambda: _block_bytes(groups)) or 0),
        eviction="lru",
        preempt="recompute",
        policy=str(_look(lambda: scheduler.policy.value) or "fcfs"),
        missing=_MISSING,
        notes=tuple(notes),
    )


def _block_bytes(groups: Sequence[Any]) -> int:
    """Return the bytes of one block in all layers of the group that takes most: one group uses a block at a time."""
    most = 0
    for group in groups:
        spec = group.kv_cache_spec
        layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
        most = max(most, int(spec.page_size_bytes) * layers)
    return most


def _look(at: Callable[[], Any]) -> Any:
    """Return what may not be there in every release; ``None`` then."""
    try:
        return at()
    except Exception:
        return None
