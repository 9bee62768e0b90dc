"""The vLLM plugin: entry point ``vllm.general_plugins``. Publishes the engine core's block pool if asked to.

vLLM calls ``register`` once in each of its processes. Unless ``KVTOP_PUBLISH`` is set that does nothing. If it is,
the scheduler's construction is wrapped as soon as vLLM imports its class, which only the engine core does. A scheduler
that was made gets wrapped methods of its own: those that change the pool, so that nothing is read meanwhile, and those
that tell totals. A release outside the range that was tried is left as it is.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final

from kvtop.plugins.import_hook import when_imported

VARIABLE: Final = "KVTOP_PUBLISH"
_OFF: Final = ("", "0", "false", "no", "off")
_ON: Final = ("1", "true", "yes", "on")
_DEFAULT_NAME: Final = "vllm"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
#: Whether a method is a step's end, of those that change the pool; what a release has not is passed over.
_CHANGES: Final = {
    "schedule": False,
    "update_from_output": True,
    "add_request": False,
    "finish_requests": True,
    "reset_prefix_cache": True,
}
_log = logging.getLogger("vllm.kvtop")


def register() -> None:
    """Do what the environment asks for. Never raises."""
    if asked_name() is None:
        return
    try:
        when_imported(_SCHEDULER, _safely(_wrap_class))
    except Exception as error:
        _decline(error)


def asked_name() -> str | None:
    """Return the name to publish by; ``None`` when publishing was not asked for."""
    value = os.environ.get(VARIABLE, "").strip()
    if value.lower() in _OFF:
        return None
    return _DEFAULT_NAME if value.lower() in _ON else value


def release(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a release; ``None`` where there are none."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def _wrap_class(module: ModuleType) -> None:
    """Wrap the construction of schedulers, if the release is one that was tried."""
    from kvtop.plugins.vllm_pool import SUPPORTED

    version = _version()
    number, (first, last) = release(version), SUPPORTED
    if number is None or not first <= number <= last:
        names = " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        _decline(f"vLLM {version} is none of the releases {names} that it was tried with")
        return
    scheduler_class = module.Scheduler
    construct = scheduler_class.__init__
    if hasattr(construct, "_kvtop"):
        return
    publish = _safely(lambda scheduler: _publish(scheduler, version))

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
    hooks = Hooks(scheduler)
    publisher = PoolPublisher(publication_name(scheduler), pool, gate, log=_log.warning, on_failure=hooks.remove)
    try:
        for name, ends_step in _CHANGES.items():
            hooks.put(scheduler, name, partial(gate.guard, ends_step=ends_step))
        _count(hooks, scheduler, pool.totals)
        hooks.put(scheduler, "shutdown", lambda method: _after(method, _safely(lambda *_: publisher.close())))
    except BaseException:
        hooks.remove()
        publisher.close()
        raise
    weakref.finalize(scheduler, _close_apart, publisher.close).atexit = False
    _log.info("kvtop: block pool published; kvtop attach local:%s", publisher.name)


def publication_name(scheduler: Any) -> str:
    """Return the name that was asked for, with the rank behind it where there are several engine cores."""
    name = asked_name() or _DEFAULT_NAME
    config = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    if getattr(config, "data_parallel_size", 1) > 1:
        rank = getattr(config, "data_parallel_index", None)
        rank = getattr(config, "data_parallel_rank", 0) if rank is None else rank
        return f"{name}-dp{rank}"
    return name


class Hooks:
    """Methods that were wrapped on objects; ``remove`` puts the classes' own back.

    Args:
        owner: The scheduler; only referred to weakly, as all objects that were wrapped live with it.
    """

    def __init__(self, owner: Any) -> None:
        self._put: list[tuple[weakref.ref[Any], str]] = []

    def put(self, target: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Wrap one method of one object; return whether it has such a method."""
        method = getattr(target, name, None)
        if not callable(method):
            return False
        setattr(target, name, wrap(method))
        self._put.append((weakref.ref(target), name))
        return True

    def remove(self) -> None:
        """Put all methods back. Safe to call twice."""
        for reference, name in self._put:
            target = reference()
            if target is not None:
                vars(target).pop(name, None)
        self._put.clear()


def _count(hooks: Hooks, scheduler: Any, totals: dict[str, int]) -> None:
    """Count what the scheduler's calls tell, from here on; what a release has no call for stays unknown."""

    def add(name: str, number: int) -> None:
        totals[name] = totals.get(name, 0) + number

    def count_calls(name: str, counter: str) -> None:
        if hooks.put(scheduler, name, lambda method: _after(method, lambda result: add(counter, 1))):
            totals[counter] = 0

    def count_hits(stats: Any) -> None:
        if stats is not None:
            add("query_tokens", stats.queries)
            add("hit_tokens", stats.hits)

    def count_removed(events: Any) -> None:
        add("evictions", sum(len(e.block_hashes) for e in events if type(e).__name__ == "BlockRemoved"))

    count_calls("_preempt_request", "preemptions_recompute")
    count_calls("add_request", "submitted")
    manager = scheduler.kv_cache_manager
    if getattr(manager, "log_stats", False) and hooks.put(
        manager, "make_prefix_cache_stats", lambda method: _after(method, _safely(count_hits))
    ):
        totals["query_tokens"] = totals["hit_tokens"] = 0
    # Evictions are told as cache events only: to count them where they happen would cost every allocation.
    if getattr(scheduler, "enable_kv_cache_events", False) and hooks.put(
        manager, "take_events", lambda method: _after(method, _safely(count_removed))
    ):
        totals["evictions"] = 0


def _after(method: Callable[..., Any], act: Callable[[Any], None]) -> Callable[..., Any]:
    """Return ``method`` followed by ``act``, which is given its result and must not raise."""

    @wraps(method)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        act(result)
        return result

    return followed


def _safely(act: Callable[..., None]) -> Callable[..., None]:
    """Return ``act`` so that nothing that goes wrong in it reaches vLLM; it is not done again after that."""
    is_over = False

    def acting(*args: Any) -> None:
        nonlocal is_over
        if not is_over:
            try:
                act(*args)
            except Exception as error:
                is_over = True
                _decline(error)

    return acting


def _decline(reason: object) -> None:
    text = str(reason) or type(reason).__name__
    _log.warning("kvtop: the block pool is not published: %s", text)


def _close_apart(close: Callable[[], None]) -> None:
    """Close in a thread of its own: a finaliser may run in the middle of anything."""
    threading.Thread(target=_safely(close), name="kvtop-close", daemon=True).start()


def _version() -> str:
    import sys

    return str(getattr(sys.modules.get("vllm"), "__version__", "of unknown release"))
