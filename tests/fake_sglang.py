"""A stand-in for the parts of SGLang that its plugin reads: pages, a table of slots, a registry of hooks; no tensors.

A request takes whole pages and gives them back to the tree when it ends; what the tree holds is simply not free.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

MODULE = "sglang.srt.managers.scheduler"
PAGE = 16


class Tensor:
    """An array that is somewhere else until it is copied."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.values[at])

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self.values


class Allocator:
    def __init__(self, num_pages: int) -> None:
        self.size, self.page_size, self.device = num_pages * PAGE, PAGE, "cpu"
        self.free_pages = Tensor(np.arange(1, num_pages + 1))
        self.staged_pages: list[Tensor] = []
        self.release_pages = None

    def get_kvcache(self) -> Any:
        return SimpleNamespace(get_kv_size_bytes=lambda: (self.size + PAGE) * 64)

    def take(self, number: int) -> np.ndarray:
        taken = self.free_pages.values[:number]
        self.free_pages = Tensor(self.free_pages.values[number:])
        return taken


class Kv:
    def __init__(self) -> None:
        self.req_pool_idx: int | None = None
        self.kv_allocated_len = self.kv_committed_len = 0

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None


class Req:
    def __init__(self, rid: str, num_prompt: int, max_new_tokens: int = 8) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(num_prompt))
        self.sampling_params = SimpleNamespace(max_new_tokens=max_new_tokens)
        self.cached_tokens = 0
        self.priority = None
        self.kv = Kv()


class BaseScheduler:
    def __init__(self, num_pages: int = 64) -> None:
        self.token_to_kv_pool_allocator = Allocator(num_pages)
        self.req_to_token_pool = SimpleNamespace(req_to_token=Tensor(np.zeros((17, 2048), np.int32)))
        self.server_args = SimpleNamespace(served_model_name="toy", radix_eviction_policy="lru", schedule_policy="fcfs")
        self.waiting_queue: list[Req] = []
        self.running: list[Req] = []
        self.chunked_req: Req | None = None

    def collect_inflight_reqs(self) -> set[Req]:
        return set(self.running)

    def process_input_requests(self, requests: list[Req]) -> None:
        self.waiting_queue += requests

    def get_next_batch_to_run(self, shared: np.ndarray | None = None) -> list[Req]:
        """Admit all that wait; with ``shared``, they begin with these pages."""
        for req in self.waiting_queue:
            begin = np.empty(0, np.int64) if shared is None else shared
            pages = np.concatenate((begin, self.token_to_kv_pool_allocator.take(self._needed(req) - len(begin))))
            req.kv.req_pool_idx = len(self.running) + 1
            slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
            self.req_to_token_pool.req_to_token.values[req.kv.req_pool_idx, : len(slots)] = slots
            req.kv.kv_allocated_len = req.kv.kv_committed_len = len(req.origin_input_ids)
            req.cached_tokens = len(begin) * PAGE
            self.running.append(req)
        self.waiting_queue = []
        return list(self.running)

    def _needed(self, req: Req) -> int:
        return -(-len(req.origin_input_ids) // PAGE)

    def process_batch_result(self, batch: list[Req], result: object) -> None:
        """Nothing changes by it here."""

    def finish(self, req: Req) -> None:
        """End a request; its full pages stay in the tree."""
        self.running.remove(req)
        req.kv.req_pool_idx = None

    def flush_cache(self) -> None:
        allocator = self.token_to_kv_pool_allocator
        allocator.free_pages = Tensor(np.arange(1, allocator.size // PAGE + 1))

    def step(self, shared: np.ndarray | None = None) -> None:
        self.process_batch_result(self.get_next_batch_to_run(shared), None)


class HookType(Enum):
    AFTER = "after"


class HookRegistry:
    """Keeps hooks; ``imported`` applies them to the scheduler's construction, as SGLang does."""

    hooks: dict[str, Callable[..., Any]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        assert hook_type is HookType.AFTER
        cls.hooks[target] = hook


@contextmanager
def imported(release: str, **ranks: int) -> Iterator[Callable[..., BaseScheduler]]:
    """Let SGLang of a release be imported until the block ends, and give what makes schedulers as it would."""
    registry = type("HookRegistry", (HookRegistry,), {"hooks": {}})
    modules = {name: ModuleType(name) for name in ("sglang", MODULE, "sglang.srt", "sglang.srt.plugins")}
    modules["sglang"].__version__ = release  # type: ignore[attr-defined]
    parallel = SimpleNamespace(**{"tp_rank": 0, "pp_rank": 0, "dp_rank": None, "dp_size": 1, **ranks})
    modules[MODULE].get_parallel = lambda: parallel  # type: ignore[attr-defined]
    hooks = modules["sglang.srt.plugins.hook_registry"] = ModuleType("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry, hooks.HookType = registry, HookType  # type: ignore[attr-defined]

    def make(*args: Any, **kwargs: Any) -> BaseScheduler:
        scheduler = BaseScheduler(*args, **kwargs)
        for target, hook in registry.hooks.items():  # type: ignore[attr-defined]
            assert target == f"{MODULE}.Scheduler.__init__"
            assert hook(None, scheduler, *args, **kwargs) is None
        return scheduler

    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield make
