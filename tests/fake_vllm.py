"""A stand-in for the parts of vLLM that its plugin reads, in the shapes of several releases; no model, no tensors.

The names are vLLM's, the bodies are the least that behaves alike: reference counts, a free queue linked through the
blocks, hashes that outlive their holders, tables by request. ``Scheduler.step`` is one step of an engine core.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

#: The releases whose shapes differ, oldest first.
RELEASES = ("0.14.0", "0.23.1", "0.32.0+cpu")
MODULE = "vllm.v1.core.sched.scheduler"


@dataclass
class LooseBlock:
    """A block up to 0.19."""

    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    prev_free_block: Any = None
    next_free_block: Any = None
    is_null: bool = False


@dataclass(slots=True)
class SlottedBlock:
    """A block of later releases, which takes no further attributes."""

    block_id: int
    ref_cnt: int = 0
    pool: Any = field(default=None, repr=False, compare=False, kw_only=True)
    _block_hash: bytes | None = None
    _block_hash_num_tokens: int | None = None
    prev_free_block: Any = None
    next_free_block: Any = None
    is_null: bool = False


class FreeQueue:
    def __init__(self, blocks: list[Any]) -> None:
        kind = type(blocks[0])
        self.fake_free_list_head, self.fake_free_list_tail = kind(-1), kind(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: Any) -> None:
        last = self.fake_free_list_tail.prev_free_block
        last.next_free_block, block.prev_free_block = block, last
        block.next_free_block, self.fake_free_list_tail.prev_free_block = self.fake_free_list_tail, block
        self.num_free_blocks += 1

    def remove(self, block: Any) -> None:
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[Any]:
        found, block = [], self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            found.append(block)
            block = block.next_free_block
        return found


class BlockPool:
    def __init__(self, num_gpu_blocks: int, block_class: type) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [block_class(i) for i in range(num_gpu_blocks)]
        self.free_block_queue = FreeQueue(self.blocks)
        self.cached: dict[bytes, dict[int, Any]] = defaultdict(dict)
        self.null_block = self.blocks[0]
        self.free_block_queue.remove(self.null_block)
        self.null_block.is_null = True
        self.kv_event_queue: list[Any] = []

    def get_new_blocks(self, number: int) -> list[Any]:
        taken: list[Any] = []
        for _ in range(number):
            block = self.free_block_queue.fake_free_list_head.next_free_block
            self.free_block_queue.remove(block)
            if block._block_hash is not None:
                self.cached[block._block_hash].pop(block.block_id)
                self.kv_event_queue.append(BlockRemoved([block._block_hash]))
                block._block_hash = None
            block.ref_cnt += 1
            taken.append(block)
        return taken

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.append(block)

    def get_usage(self) -> float:
        return 1.0 - self.free_block_queue.num_free_blocks / (self.num_gpu_blocks - 1)


@dataclass
class BlockRemoved:
    block_hashes: list[bytes]


@dataclass
class PrefixCacheStats:
    queries: int = 0
    hits: int = 0


class RequestStatus(enum.IntEnum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_ABORTED = 4


class Request:
    def __init__(self, request_id: str, prompt: list[int], max_tokens: int, release: str) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.num_computed_tokens = 0
        self.num_tokens = len(prompt)
        self.priority = 0
        self.status = RequestStatus.WAITING
        if release == RELEASES[-1]:
            self.prefill_stats = SimpleNamespace(num_cached_tokens=0)
        else:
            self.num_cached_tokens = -1

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the hash of each full block of the prompt, with the four bytes of its group behind it."""
        found, last = [], b""
        for start in range(0, self.num_prompt_tokens - block_size + 1, block_size):
            last = hashlib.sha256(last + bytes(self.prompt[start : start + block_size])).digest()
            found.append(last + (0).to_bytes(4, "big"))
        return found


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, release: str) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, LooseBlock if release == RELEASES[0] else SlottedBlock)
        self.req_to_blocks: defaultdict[str, list[Any]] = defaultdict(list)
        single = SimpleNamespace(req_to_blocks=self.req_to_blocks)
        self.coordinator = SimpleNamespace(single_type_managers=(single,))
        self.log_stats = True
        self.stats = PrefixCacheStats()

    def admit(self, request: Request) -> bool:
        """Give a request the blocks of its prompt, cached ones first; False when there are too few."""
        pool, size = self.block_pool, self.block_size
        hit = []
        for block_hash in request.hashes(size)[: (request.num_prompt_tokens - 1) // size]:
            if not pool.cached.get(block_hash):
                break
            hit.append(next(iter(pool.cached[block_hash].values())))
        needed = -(-request.num_prompt_tokens // size) - len(hit)
        if needed > pool.free_block_queue.num_free_blocks - sum(block.ref_cnt == 0 for block in hit):
            return False
        pool.touch(hit)
        table = self.req_to_blocks[request.request_id]
        table += [*hit, *pool.get_new_blocks(needed)]
        for block, block_hash in zip(table, request.hashes(size), strict=False):
            if block._block_hash is None:
                block._block_hash = block_hash
                pool.cached[block_hash][block.block_id] = block
        self.stats.queries += request.num_prompt_tokens
        self.stats.hits += len(hit) * size
        if hasattr(request, "num_cached_tokens"):
            request.num_cached_tokens = len(hit) * size
        return True

    def grow(self, request: Request) -> bool:
        """Give a request room for one more token; False when there is no block."""
        table = self.req_to_blocks[request.request_id]
        if request.num_computed_tokens + 1 > len(table) * self.block_size:
            if not self.block_pool.free_block_queue.num_free_blocks:
                return False
            table += self.block_pool.get_new_blocks(1)
        return True

    def free(self, request: Request) -> None:
        self.block_pool.free_blocks(self.req_to_blocks.pop(request.request_id, [])[::-1])

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        stats, self.stats = self.stats, PrefixCacheStats()
        return stats

    def take_events(self) -> list[Any]:
        events, self.block_pool.kv_event_queue = self.block_pool.kv_event_queue, []
        return events


class BaseScheduler:
    """A scheduler before any plugin saw it; ``scheduler_class`` makes one that a plugin may wrap."""

    release = RELEASES[-1]

    def __init__(
        self, num_blocks: int = 64, block_size: int = 16, rank: int | None = None, events: bool = True
    ) -> None:
        parallel = SimpleNamespace(data_parallel_size=1 if rank is None else 2)
        setattr(parallel, "data_parallel_rank" if self.release == RELEASES[0] else "data_parallel_index", rank or 0)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(served_model_name="toy"),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        spec = SimpleNamespace(block_size=block_size, page_size_bytes=1024)
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.policy = SimpleNamespace(value="fcfs")
        self.block_size = block_size
        self.enable_kv_cache_events = events
        self.kv_cache_manager = KVCacheManager(num_blocks, block_size, self.release)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.is_shut_down = False

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> list[Request]:
        for request in list(self.running):
            while request in self.running and not self.kv_cache_manager.grow(request):
                self._preempt_request(self.running.pop(), 0.0)
        while self.waiting and self.kv_cache_manager.admit(self.waiting[0]):
            request = self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
        return list(self.running)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def update_from_output(self, scheduled: list[Request], output: object) -> dict[int, object]:
        for request in scheduled:
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed_tokens = max(request.num_computed_tokens + 1, request.num_prompt_tokens)
            if request.num_computed_tokens >= request.num_prompt_tokens + request.max_tokens:
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.kv_cache_manager.make_prefix_cache_stats()
        self.kv_cache_manager.take_events()
        return {}

    def finish_requests(self, request_id: str, status: RequestStatus) -> None:
        request = self.requests.pop(request_id)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.kv_cache_manager.free(request)

    def reset_prefix_cache(self) -> bool:
        if self.running:
            return False
        pool = self.kv_cache_manager.block_pool
        pool.cached.clear()
        for block in pool.blocks:
            block._block_hash = None
        return True

    def shutdown(self) -> None:
        self.is_shut_down = True

    def step(self) -> None:
        """Do what an engine core does in one step."""
        self.update_from_output(self.schedule(), None)


def scheduler_class(release: str = RELEASES[-1]) -> type[BaseScheduler]:
    """Return a class of its own, as a release has it."""
    return type("Scheduler", (BaseScheduler,), {"release": release, "__init__": _own_init})


def _own_init(self: BaseScheduler, *args: Any, **kwargs: Any) -> None:
    BaseScheduler.__init__(self, *args, **kwargs)


@contextmanager
def imported(release: str) -> Iterator[type[BaseScheduler]]:
    """Let vLLM of a release be imported until the block ends, and give its scheduler's class."""
    module = ModuleType(MODULE)
    module.__spec__ = SimpleNamespace(_initializing=False)  # type: ignore[assignment]
    module.Scheduler = scheduler_class(release)  # type: ignore[attr-defined]
    package = ModuleType("vllm")
    package.__version__ = release  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", package)
        patch.setitem(sys.modules, MODULE, module)
        yield module.Scheduler


def request_of(scheduler: BaseScheduler, name: str, prompt: list[int], max_tokens: int = 8) -> Request:
    """Return a request that was added to a scheduler."""
    request = Request(name, prompt, max_tokens, scheduler.release)
    scheduler.add_request(request)
    return request
