"""SglangPool: reads the page pool of an SGLang scheduler. The one module that knows SGLang's structures.

SGLang keeps no reference counts and no flat prefix index: its allocator lists the free pages, and a table gives each
request's token slots. So a page is free where the allocator says so, held by as many requests as name it, and cached
where it is neither. The prefix tree is compiled code, closed to Python: hashes and the order of eviction are unknown.
Page 0 takes what padding writes and is never handed out.

The tensors may lie on a device, where copying them waits for the engine's stream: they are read in the engine's own
thread only. Nothing here imports torch: the tensors come with their methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from allocator.snapshot import MAX_SEQUENCES
from kvtop.plugins.pool_state import PoolFacts, PoolState, RequestState, Unsupported

#: The releases whose structures were tried, both ends included.
SUPPORTED: Final = ((0, 5, 23), (0, 5, 23))
_MISSING: Final = {
    "operations": "SGLang's pool can be looked at only; what SGLang itself offers is at http://HOST:PORT",
    "events": "SGLang tells no events here; its stream of cache events is read with http://HOST:PORT --events",
    "host-tier": "SGLang's host tier is not part of its page pool",
}


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What is taken from the engine between two steps.

    Attributes:
        free: Ids of the free pages. [f]
        num_pages: Pages that can be handed out.
        requests: Those that hold pages, with their page ids.
        waiting: Those that wait.
        num_waiting: How many wait in all.
        steps: Steps taken.
    """

    free: NDArray[np.int64]
    num_pages: int
    requests: list[tuple[Any, NDArray[np.int64], int]]
    waiting: list[Any]
    num_waiting: int
    steps: int


class SglangPool:
    """A ``ForeignPool``.

    Args:
        scheduler: SGLang's scheduler; only referred to weakly.
        version: SGLang's release.
        steps: Returns the steps taken.

    Attributes:
        facts: What does not change.

    Raises:
        Unsupported: Its structures are not those that are known.
    """

    def __init__(self, scheduler: Any, version: str, steps: Callable[[], int]) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._steps = steps
        try:
            _free_pages(scheduler.token_to_kv_pool_allocator)
            _inflight(scheduler)
            self.facts = _facts(scheduler, version)
            _rows(scheduler, [0], 1)
            len(scheduler.waiting_queue)
        except Exception as error:
            raise Unsupported(f"its page pool is of another kind ({error})") from None

    def collect(self) -> Taken:
        """Take what may change at the next step: two copies from the device."""
        scheduler = self._scheduler()
        if scheduler is None:
            raise Unsupported("the engine is gone")
        allocator, page = scheduler.token_to_kv_pool_allocator, self.facts.block_size
        holding = [request for request in _inflight(scheduler) if request.kv.holds_kv]
        requests = []
        if holding:
            lengths = [int(request.kv.kv_allocated_len) for request in holding]
            rows = _rows(scheduler, [int(request.kv.req_pool_idx) for request in holding], max(lengths))
            for request, row, length in zip(holding, rows[:, ::page] // page, lengths, strict=True):
                requests.append((request, row[: -(-length // page)].astype(np.int64), int(request.kv.kv_committed_len)))
        return Taken(
            _free_pages(allocator),
            int(allocator.size) // page,
            requests,
            list(islice(scheduler.waiting_queue, MAX_SEQUENCES)),
            len(scheduler.waiting_queue),
            self._steps(),
        )

    def is_idle(self) -> bool:
        """Return whether there is nothing to compute."""
        scheduler = self._scheduler()
        return scheduler is None or not (_inflight(scheduler) or scheduler.waiting_queue)

    def want_victims(self, number: int) -> None:
        """Do nothing: the order is not told."""

    def digest(self, taken: Taken, pause: Callable[[], None]) -> PoolState:
        """Make a state of what was taken."""
        n = taken.num_pages + 1
        refs = np.zeros(n, np.int64)
        has_content = np.ones(n, np.bool_)
        has_content[taken.free] = False
        requests = []
        for request, pages, num_tokens in taken.requests:
            np.add.at(refs, pages, 1)
            requests.append(_request(request, True, pages, num_tokens))
        requests += [_request(request, False, np.empty(0, np.int64), 0) for request in taken.waiting]
        return PoolState(
            ref_count=refs,
            hash64=np.zeros(n, np.uint64),
            has_content=has_content,
            reserved=(0,),
            requests=requests,
            group_sizes=(self.facts.block_size,),
            num_running=len(taken.requests),
            num_waiting=taken.num_waiting,
            victims=None,
            steps=taken.steps,
        )


def _free_pages(allocator: Any) -> NDArray[np.int64]:
    """Return the ids of all pages that the allocator could hand out, those that are still to be sorted in included."""
    released = allocator.release_pages
    parts = [allocator.free_pages, *getattr(allocator, "staged_pages", ())]
    parts += [] if released is None else [released]
    return np.concatenate([part.cpu().numpy() for part in parts])


def _rows(scheduler: Any, indices: Sequence[int], length: int) -> NDArray[np.int64]:
    """Return the token slots of requests, by their places in the table. [requests][length]"""
    rows: NDArray[np.int64] = scheduler.req_to_token_pool.req_to_token[list(indices), :length].cpu().numpy()
    return rows


def _inflight(scheduler: Any) -> list[Any]:
    """Return the requests that are being computed, in a fixed order."""
    requests = set(scheduler.collect_inflight_reqs())
    if scheduler.chunked_req is not None:
        requests.add(scheduler.chunked_req)
    return sorted(requests, key=lambda request: str(request.rid))


def _request(request: Any, is_running: bool, pages: NDArray[np.int64], num_tokens: int) -> RequestState:
    prompt, most = len(request.origin_input_ids), getattr(request.sampling_params, "max_new_tokens", None)
    return RequestState(
        request_id=str(request.rid),
        is_running=is_running,
        reason="",
        priority=int(getattr(request, "priority", None) or 0),
        num_prompt=prompt,
        num_target=None if most is None else prompt + int(most),
        num_tokens=num_tokens,
        hit_tokens=int(request.cached_tokens) if is_running else None,
        tables=(pages,),
    )


def _facts(scheduler: Any, version: str) -> PoolFacts:
    allocator, arguments = scheduler.token_to_kv_pool_allocator, scheduler.server_args
    try:
        told = allocator.get_kvcache().get_kv_size_bytes()
        pool_bytes = sum(told) if isinstance(told, tuple) else int(told)
    except Exception:
        pool_bytes = 0
    page, size = int(allocator.page_size), int(allocator.size)
    return PoolFacts(
        engine=f"SGLang {version}",
        model=str(getattr(arguments, "served_model_name", None) or "SGLang"),
        device=str(allocator.device),
        layout=f"SGLang {version}",
        block_size=page,
        block_bytes=int(pool_bytes * page / (size + page)),
        eviction=str(getattr(arguments, "radix_eviction_policy", None) or "lru"),
        preempt="retract",
        policy=str(getattr(arguments, "schedule_policy", None) or "fcfs"),
        missing=_MISSING,
        notes=(
            "the map's clock counts 25 ms of real time as one step",
            "SGLang tells no hashes and no order of eviction; a page that is neither free nor named is shown as cached",
        ),
    )
