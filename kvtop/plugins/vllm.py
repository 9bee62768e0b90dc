"""The vLLM plugin: entry point ``vllm.general_plugins``. Publishes the engine core's block pool if asked to.

vLLM calls ``register`` once in each of its processes. Unless ``KVTOP_PUBLISH`` is set that does nothing. If it is,
the scheduler's construction is wrapped as soon as vLLM imports its class, which only the engine core does. A scheduler
that was made gets wrapped methods of its own: those that change the pool, so that nothing is read meanwhile, and those
that tell totals. A release outside the range that was tried is left as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final

from kvtop.plugins.hooks import Careful, Hooks, after, asked_name, release
from kvtop.plugins.import_hook import when_imported

_DEFAULT_NAME: Final = "vllm"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
#: What changes the pool, and where it may be read: after what leaves it as the end of a step does.
_CHANGES: Final[dict[str, dict[str, Any]]] = {
    "schedule": {},
    "update_from_output": {"read": "after", "is_step": True},
    "add_request": {},
    "finish_requests": {"read": "after"},
    "reset_prefix_cache": {"read": "after"},
}
_careful = Careful(logging.getLogger("vllm.kvtop"))


def register() -> None:
    """Do what the environment asks for. Never raises."""
    if asked_name(_DEFAULT_NAME) is not None:
        _careful.safely(lambda: when_imported(_SCHEDULER, _careful.safely(_wrap_class)))()


def _wrap_class(module: ModuleType) -> None:
    """Wrap the construction of schedulers, if the release is one that was tried."""
    from kvtop.plugins.vllm_pool import SUPPORTED

    version = str(getattr(sys.modules.get("vllm"), "__version__", "of unknown release"))
    number, (first, last) = release(version, 2), SUPPORTED
    if number is None or not first <= number <= last:
        names = " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        _careful.decline(f"vLLM {version} is none of the releases {names} that it was tried with")
        return
    scheduler_class = module.Scheduler
    construct = scheduler_class.__init__
    if hasattr(construct, "_kvtop"):
        return
    publish = _careful.safely(lambda scheduler: _publish(scheduler, version))

    @wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        publish(self)

    constructed._kvtop = True  # type: ignore[attr-defined]
    scheduler_class.__init__ = constructed


def _publish(scheduler: Any, version: str) -> None:
    """Publish a scheduler's pool until the scheduler is shut down, or gone."""
    from kvtop.plugins.publisher import PoolPublisher
    from kvtop.plugins.step_gate import StepGate
    from kvtop.plugins.vllm_pool import VllmPool

    pool = VllmPool(scheduler, version, lambda: gate.steps)
    gate: StepGate[Any] = StepGate(pool.collect, pool.is_idle)
    hooks = Hooks()
    publisher = PoolPublisher(
        publication_name(scheduler), pool, gate, log=_careful.log.warning, on_failure=hooks.remove
    )
    try:
        for name, how in _CHANGES.items():
            hooks.put(scheduler, name, partial(gate.guard, **how))
        _count(hooks, scheduler, pool.totals)
        close = _careful.safely(publisher.close)
        hooks.put(scheduler, "shutdown", lambda method: after(method, lambda result: close()))
    except BaseException:
        hooks.remove()
        publisher.close()
        raise
    _careful.close_with(scheduler, publisher.close)
    _careful.log.info("kvtop: block pool published; kvtop attach local:%s", publisher.name)


def publication_name(scheduler: Any) -> str:
    """Return the name that was asked for, with the rank behind it where there are several engine cores."""
    name = asked_name(_DEFAULT_NAME) or _DEFAULT_NAME
    config = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    if getattr(config, "data_parallel_size", 1) > 1:
        rank = getattr(config, "data_parallel_index", None)
        rank = getattr(config, "data_parallel_rank", 0) if rank is None else rank
        return f"{name}-dp{rank}"
    return name


def _count(hooks: Hooks, scheduler: Any, totals: dict[str, int]) -> None:
    """Count what the scheduler's calls tell, from here on; what a release has no call for stays unknown."""

    def add(name: str, number: int) -> None:
        totals[name] = totals.get(name, 0) + number

    def count_hits(stats: Any) -> None:
        if stats is not None:
            add("query_tokens", stats.queries)
            add("hit_tokens", stats.hits)

    def count_removed(events: Any) -> None:
        add("evictions", sum(len(e.block_hashes) for e in events if type(e).__name__ == "BlockRemoved"))

    def count(target: Any, name: str, act: Callable[[Any], None], *counters: str) -> None:
        if hooks.put(target, name, lambda method: after(method, _careful.safely(act))):
            totals.update(dict.fromkeys(counters, 0))

    manager = scheduler.kv_cache_manager
    count(scheduler, "_preempt_request", lambda result: add("preemptions_recompute", 1), "preemptions_recompute")
    count(scheduler, "add_request", lambda result: add("submitted", 1), "submitted")
    if getattr(manager, "log_stats", False):
        count(manager, "make_prefix_cache_stats", count_hits, "query_tokens", "hit_tokens")
    # Evictions are told as cache events only: to count them where they happen would cost every allocation.
    if getattr(scheduler, "enable_kv_cache_events", False):
        count(manager, "take_events", count_removed, "evictions")
